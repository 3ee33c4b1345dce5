"""Draws docs/images/format_*.svg, one picture for each format: `python docs/images/draw_formats.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BLUE, LIGHT, DARK, GREY, PADDING = "#2458a6", "#eef3fb", "#b9d0f0", "#777", "#e3e3e3"


def rect(x: float, y: float, width: float, height: float, fill: str = "none", stroke: str = BLUE) -> str:
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {box} fill="{fill}" stroke="{stroke}"/>'


def text(
    x: float, y: float, words: str, fill: str = "#1c1c1c", size: int = 12, anchor: str = "middle"
) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{words}</text>'


def grid(
    x: float, y: float, width: float, height: float, columns: list[float], rows: list[float]
) -> list[str]:
    """A light rectangle with lines at fractions of its sides."""
    lines = [f"M{x + c * width:g} {y:g} v{height:g}" for c in columns]
    lines += [f"M{x:g} {y + r * height:g} h{width:g}" for r in rows]
    path = f'<path d="{" ".join(lines)}" fill="none" stroke="{BLUE}" stroke-width="0.6"/>' if lines else ""
    return [rect(x, y, width, height, LIGHT), path]


def evenly(n: int) -> list[float]:
    return [i / n for i in range(1, n)]


def bits(x: float, y: float, what: str, fields: list[tuple[str, int, str]], note: str) -> list[str]:
    """Boxes of the bits of a number, the highest first: (name, count, colour)."""
    parts, at = [text(x, y - 8, what, anchor="start")], x
    for name, count, colour in fields:
        parts += [rect(at + 16 * i, y, 16, 22, colour) for i in range(count)]
        if name:
            parts.append(text(at + 8 * count, y + 36, name, GREY, 11))
        at += 16 * count
    return [*parts, text(at + 8, y + 15, note, GREY, 11, "start")]


@dataclass(frozen=True)
class Matrix:
    """A picture of who shares a scale: lines at fractions, one block in another colour."""

    title: str
    columns: list[float]
    rows: list[float]
    block: tuple[float, float, float, float]  # left, top, width, height as fractions
    below: str

    def draw(self, x: float) -> list[str]:
        y, width, height = 62, 230, 140
        left, top, w, h = self.block
        return [
            text(x + width / 2, 50, self.title),
            *grid(x, y, width, height, self.columns, self.rows),
            rect(x + left * width, y + top * height, w * width, h * height, DARK),
            text(x + width / 2, y + height + 18, self.below, GREY, 11),
        ]


@dataclass(frozen=True)
class Scales:
    """A picture of where scales lie: the used part of an array, and its padding."""

    title: str
    used: tuple[float, float]  # width and height as fractions
    columns: list[float]
    rows: list[float]
    cell: tuple[float, float, float, float] | None
    below: tuple[str, ...]
    height: float = 140

    def draw(self, x: float) -> list[str]:
        y, width, height = 62, 180, self.height
        w, h = self.used
        parts = [text(x + width / 2, 50, self.title), rect(x, y, width, height, PADDING, GREY)]
        parts += grid(x, y, w * width, h * height, self.columns, self.rows)
        if self.cell:
            left, top, cw, ch = self.cell
            parts.append(rect(x + left * width, y + top * height, cw * width, ch * height, DARK))
        return parts + [
            text(x + width / 2, y + height + 18 + 15 * i, t, GREY, 11) for i, t in enumerate(self.below)
        ]


E4M3 = [("s", 1, "#fff"), ("exponent", 4, LIGHT), ("mantissa", 3, DARK)]
E5M2 = [("s", 1, "#fff"), ("exponent", 5, LIGHT), ("m", 2, DARK)]
E8M0 = [("exponent", 8, LIGHT)]
E2M1 = [("s", 1, "#fff"), ("exp", 2, LIGHT), ("m", 1, DARK)]
FP32 = [("s", 1, "#fff"), ("exponent", 8, LIGHT), ("mantissa: 23 bits", 9, DARK)]


def picture(title: str, parts: list[list[str]]) -> str:
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 330" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="880" height="330" fill="#ffffff"/>',
        text(440, 22, title, GREY),
        *(line for part in parts for line in part if line),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def fp8_tensor() -> str:
    one = Matrix("data [M, K], one byte each", [], [], (0, 0, 1, 1), "one scale for all of it")
    groups = Matrix(
        "a ragged matrix [T, K]",
        [],
        [0.3, 0.3, 0.75],
        (0, 0.3, 1, 0.45),
        "one scale for each group; tail: none",
    )
    scales = Scales(
        "scale_inv [G], FP32",
        (1, 1),
        evenly(4),
        [],
        (0.25, 0, 0.25, 1),
        ("one number, [1], for a matrix;", "both directions share it"),
        height=22,
    )
    return picture(
        "fp8_tensor: value = float(data) * scale_inv",
        [
            one.draw(40),
            groups.draw(320),
            scales.draw(630),
            bits(40, 268, "an element, E4M3 (to 448)", E4M3, ""),
            bits(260, 268, "or E5M2 (to 57344)", E5M2, ""),
            bits(480, 268, "the scale, FP32", FP32, ""),
        ],
    )


def fp8_row() -> str:
    rows = Matrix("data [M, K], one byte each", [], evenly(10), (0, 0.3, 1, 0.1), "one scale for each row")
    columns = Matrix(
        "columnwise data [K, M]",
        [],
        evenly(7),
        (0, 3 / 7, 1, 1 / 7),
        "of the transposed matrix, one for each row",
    )
    scales = Scales(
        "scale_inv [M], FP32",
        (1, 1),
        evenly(10),
        [],
        (0.3, 0, 0.1, 1),
        ("one number for each row;", "[T] of a ragged matrix"),
        height=22,
    )
    return picture(
        "fp8_row: value = float(data) * scale_inv of its row",
        [
            rows.draw(40),
            columns.draw(320),
            scales.draw(630),
            bits(40, 268, "an element, E4M3 (to 448)", E4M3, ""),
            bits(260, 268, "or E5M2 (to 57344)", E5M2, ""),
            bits(480, 268, "a scale, FP32", FP32, ""),
        ],
    )


def fp8_block() -> str:
    rows = Matrix(
        "1x128 blocks: inputs, gradients",
        [0.4, 0.8],
        evenly(10),
        (0.4, 0.3, 0.4, 0.1),
        "128, 128, K % 128 elements of a row",
    )
    square = Matrix(
        "128x128 blocks: weights", [0.4, 0.8], [0.45, 0.9], (0.4, 0, 0.4, 0.45), "the last ones are not full"
    )
    scales = Scales(
        "scale_inv [ceil(K/128), up4(M)]",
        (0.9, 1),
        evenly(10),
        evenly(3),
        (0.27, 1 / 3, 0.09, 1 / 3),
        ("the row is the fastest index;", "padded to 16 bytes with zeros"),
    )
    return picture(
        "fp8_block: value = float(data) * scale_inv of its block",
        [
            rows.draw(40),
            square.draw(320),
            scales.draw(630),
            bits(40, 268, "an element, E4M3 (to 448)", E4M3, ""),
            bits(260, 268, "or E5M2 (to 57344)", E5M2, ""),
            bits(480, 268, "a scale, FP32; pow2: the mantissa is 0", FP32, ""),
        ],
    )


def byte_blocks(name: str, width: int, value: str, last: list[list[str]]) -> str:
    n = 256 // width // 2
    rows = Matrix(
        f"1x{width} blocks", evenly(n), evenly(10), (2 / n, 0.3, 1 / n, 0.1), f"{width} elements of a row"
    )
    side = 230 / n / 140  # as high as wide
    square = Matrix(
        f"{width}x{width} blocks: weights",
        evenly(n),
        [i * side for i in range(1, int(1 / side) + 1)],
        (2 / n, side, 1 / n, side),
        "a scale is stored for each row of its block",
    )
    scales = Scales(
        f"scale_inv [up128(M), up4(ceil(K/{width}))]",
        (0.8, 0.75),
        evenly(n),
        evenly(10),
        (2 * 0.8 / n, 0.225, 0.8 / n, 0.075),
        (f"byte [row, k // {width}], padded with zeros", "to tiles of 128 rows and 4 columns"),
    )
    return picture(f"{name}: {value}", [rows.draw(40), square.draw(320), scales.draw(630), *last])


def mxfp8() -> str:
    return byte_blocks(
        "mxfp8",
        32,
        "value = float(data) * 2^(e - 127)",
        [
            bits(40, 268, "an element, E4M3 (to 448)", E4M3, ""),
            bits(260, 268, "or E5M2 (to 57344)", E5M2, ""),
            bits(480, 268, "a scale, E8M0: 2^(e - 127), 255 is NaN", E8M0, ""),
        ],
    )


def nvfp4() -> str:
    two = E2M1 + E2M1
    return byte_blocks(
        "nvfp4",
        16,
        "value = element * scale * amax / (6 * 448)",
        [
            bits(40, 268, "two elements, E2M1 (to 6)", two, "the even one is low"),
            bits(320, 268, "a scale, E4M3 (to 448)", E4M3, ""),
            bits(530, 268, "the amax of the matrix, FP32", FP32, ""),
        ],
    )


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    for draw in (fp8_tensor, fp8_row, fp8_block, mxfp8, nvfp4):
        (folder / f"format_{draw.__name__}.svg").write_text(draw())
