"""Writes the section of ``docs/performance.md`` on experts over ranks from ``results/expert_parallel_cuda.json``.

A test compares them. Without that file there is no such section.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import RESULTS, number, table

PAGE = RESULTS.parent.parent / "docs" / "performance.md"
RESULT = RESULTS / "expert_parallel_cuda.json"
BEGIN, END = "<!-- begin: python -m benchmarks.expert_parallel_page -->\n", "<!-- end -->\n"

Row = dict[str, Any]

HEAD = """## Experts over ranks

{where}; `python -m benchmarks.expert_parallel`.

Each rank has other tokens and a share of the experts; times are those of the slowest rank. What could be captured was
replayed from CUDA graphs, the rest is marked `eager` and has the host's time. Outputs and gradients were compared with
float64 first.

- `copies`: experts get a copy of a token for each of them. `tokens`: each rank gets a token once.
- `stock`: a layer in plain PyTorch that sends each token once to each rank, adds up its experts' rows in FP32 and sends
  the sum back, with `torch._grouped_mm`, sums and elementwise parts compiled. It reads its sizes on the host.
- `all-to-all of copies`, and `all-gather` of all tokens, which static sizes need in plain PyTorch: likewise.
- `capacity {factor}`: rows for {factor} times a balanced routing. The default fits any routing.
- `all_gather`: with that transport. By itself a context takes `one_sided` where the GPUs reach each other's memory.
- `one rank`: the same layer with a rank's share of the experts, the same tokens and choices for each, no exchange.

Weights in FP8 were quantized once for {micro_batches} steps.
"""


def _eager(row: Row, work: str) -> str:
    return " (eager)" if row.get(f"{work}_mode") == "eager" else ""


def _exchanges(rows: list[Row]) -> str:
    columns = [
        "exchange",
        "gets",
        "plan, us",
        "dispatch",
        "combine",
        "dispatch over tight capacity",
        "combine",
    ]
    columns += ["MB sent by a dispatch", "by a combine", "MB that a dispatch must send"]
    lines = []
    for row in rows:
        plan = "plan" if "plan_us" in row else "plan_and_dispatch"
        note = ", with a dispatch" if plan != "plan" else ""
        lines.append(
            [
                row["competitor"],
                row["form"],
                number(row[f"{plan}_us"]) + _eager(row, plan) + note,
                number(row["dispatch_us"]) + _eager(row, "dispatch"),
                number(row["combine_us"]) + _eager(row, "combine"),
                number(row.get("dispatch_over_capacity"), 2),
                number(row.get("combine_over_capacity"), 2),
                number(row.get("dispatch_counted_sent", row.get("stated_sent")), 1, 1e6),
                number(row.get("combine_counted_sent"), 1, 1e6),
                number(row["needed_sent"], 1, 1e6),
            ]
        )
    return table(columns, lines)


def _layers(rows: list[Row], routings: list[str]) -> str:
    """A line for each competitor and mode, with the ratios of every routing."""
    columns = ["layer", "mode"]
    for routing in routings:
        columns += [f"{routing}: step, us", "times stock (sustained)", "over one rank", "over tight capacity"]
        columns += ["rows dropped"]
    columns += ["peak, GiB", "MB sent and received in a step"]
    found = {(row["competitor"], row["mode"], row["routing"]): row for row in rows}
    lines = []
    for name, mode in dict.fromkeys(key[:2] for key in found):
        cells = [name, mode]
        for routing in routings:
            row = found.get((name, mode, routing), {})
            under_load = f" ({row['times_stock_sustained']:.2f})" if "times_stock_sustained" in row else ""
            cells += [number(row.get("step_us")), number(row.get("times_stock"), 2) + under_load]
            cells += [number(row.get("over_one_rank"), 2), number(row.get("over_capacity"), 2)]
            cells.append(str(row["dropped_rows"]) if row.get("dropped_rows") else "")
        first = found.get((name, mode, routings[0]), {})
        sent = first["counted_sent"] + first["counted_received"] if "counted_sent" in first else None
        cells += [number(first.get("peak_bytes"), 2, 2**30), number(sent, 0, 1e6)]
        lines.append(cells)
    return table(columns, lines)


def section(result: dict[str, Any]) -> str:
    """The whole section, as Markdown."""
    environment = result["environment"]
    gpu = environment["gpu"]["name"] if environment["gpu"] else environment["processor"]
    rows = [row for row in result["rows"] if "note" not in row]
    counts = {row["micro_batches"] for row in rows if row.get("micro_batches")}
    where = f"{result['ranks']} ranks, each one {gpu}; torch {environment['torch']}; {environment['date']}"
    text = HEAD.format(where=where, factor=1.25, micro_batches=max(counts, default=1))
    for layer in dict.fromkeys(row["layer"] for row in result["rows"]):
        of_layer = [row for row in rows if row["layer"] == layer]
        routings = list(dict.fromkeys(row["routing"] for row in of_layer))
        text += f"\n### {layer} a rank\n\n"
        if of_layer:
            text += "Busiest expert and busiest rank over the mean, minus 1: " + "; ".join(
                f"{row['routing']} {row['max_violation']:.2f}, {row['rank_violation']:.2f}"
                for row in {row["routing"]: row for row in of_layer}.values()
            )
            text += ".\n\n"
        exchanges = [row for row in of_layer if row["kind"] == "exchange" and row["routing"] == routings[0]]
        steps = [row for row in of_layer if row["kind"] == "layer"]
        parts = [_exchanges(exchanges)] if exchanges else []
        parts += [_layers(steps, routings)] if steps else []
        notes = [row for row in result["rows"] if row["layer"] == layer and "note" in row]
        parts += ["".join(f"- `{row['competitor']}`, {row['kind']}: {row['note']}.\n" for row in notes)]
        text += "\n".join(part for part in parts if part)
    return text + f"\n![experts over ranks](images/expert_parallel_{result['device']}.png)\n"


def with_section(page: str) -> str:
    """The page with the section of the recorded run, if there is one."""
    text = section(json.loads(RESULT.read_text())) if RESULT.exists() else ""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


def main() -> None:
    """Writes the page."""
    PAGE.write_text(with_section(PAGE.read_text()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
