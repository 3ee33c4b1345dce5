"""Draws docs/images/one_sided_exchange.svg, one exchange in time: `python docs/images/draw_exchange.py`."""

from __future__ import annotations

from pathlib import Path

from draw_formats import BLUE, DARK, GREY, LIGHT, PADDING, rect, text

ORANGE = "#c8641b"
LEFT, WIDTH, HEIGHT = 150, 900, 372

#: the middle of each lane: who acts, or whose memory changes.
LANES = {
    "rank 0 puts": 62,
    "rank 0 receives": 106,
    "memory of rank 1": 172,
    "rank 1 receives": 238,
    "rank 1 puts": 282,
}


def box(lane: str, begin: float, end: float, words: str, fill: str = LIGHT) -> list[str]:
    y = LANES[lane]
    middle = LEFT + (begin + end) / 2
    return [rect(LEFT + begin, y - 14, end - begin, 28, fill), text(middle, y + 4, words, size=11)]


def arrow(lane: str, begin: float, to_lane: str, end: float, colour: str = BLUE) -> str:
    y, to = LANES[lane], LANES[to_lane]
    down = 14 if to > y else -14
    line = f'x1="{LEFT + begin:g}" y1="{y + down}" x2="{LEFT + end:g}" y2="{to - down}"'
    return f'<line {line} stroke="{colour}" stroke-width="1.2" marker-end="url(#head)"/>'


def draw() -> str:
    parts = [text(12, y + 4, name, GREY, 12, "start") for name, y in LANES.items()]
    parts += [
        f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}" stroke="{PADDING}"/>' for y in LANES.values()
    ]
    parts += box("rank 0 puts", 0, 70, "announce") + box("rank 1 puts", 0, 70, "announce")
    for i in range(3):
        begin, arrives = 80 + 90 * i, 150 + 90 * i
        parts += box("rank 0 puts", begin, begin + 84, f"16 rows: {i + 1}", DARK)
        parts += box("memory of rank 1", arrives, arrives + 84, f"rows {i + 1}, flag n", DARK)
        parts += [
            arrow("rank 0 puts", begin + 42, "memory of rank 1", arrives + 30),
            arrow("memory of rank 1", arrives + 60, "rank 1 receives", arrives + 88),
        ]
        parts += box("rank 1 receives", arrives + 88, arrives + 172, f"copy rows {i + 1}")
        parts += box("rank 1 puts", begin, begin + 84, f"16 rows: {i + 1}", DARK)
        parts += box("rank 0 receives", arrives + 88, arrives + 172, f"copy rows {i + 1}")
    parts += box("rank 1 receives", 80, 220, "own rows, zeros") + box(
        "rank 0 receives", 80, 220, "own rows, zeros"
    )
    parts.append(arrow("rank 0 puts", 35, "memory of rank 1", 70, ORANGE))
    parts += box("memory of rank 1", 30, 120, "call, output", PADDING)
    parts += box("rank 1 receives", 520, 600, "consumed n") + box("rank 0 receives", 520, 600, "consumed n")
    parts.append(arrow("rank 1 receives", 560, "rank 0 puts", 650, ORANGE))
    parts += box("rank 0 puts", 620, 730, "may put n + 2", PADDING)
    parts += box("rank 1 puts", 620, 730, "may put n + 2", PADDING)
    notes = [
        "Every rank does the same at the same time, in one kernel; rank 0 to rank 1 is drawn. A flag is set after its "
        "rows, and names the exchange n.",
        "Rows of n + 1 go to a second region. The credit, n consumed, comes from each rank and allows n + 2, which "
        "uses the first region again.",
    ]
    parts += [text(12, 330 + 18 * i, note, GREY, 11, "start") for i, note in enumerate(notes)]
    parts.append(text(WIDTH - 12, 24, "time &#8594;", GREY, 12, "end"))
    head = (
        '<defs><marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        f'<path d="M0 0L7 3L0 6z" fill="{GREY}"/></marker></defs>'
    )
    style = 'font-family="DejaVu Sans, Arial, sans-serif"'
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    (Path(__file__).parent / "one_sided_exchange.svg").write_text(draw())
