"""Writes the tables of ``docs/moe-layer.md`` from ``results/moe_layer_cuda.json``; a test compares them."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import RESULTS, number, table

PAGE = RESULTS.parent.parent / "docs" / "moe-layer.md"
RESULT = RESULTS / "moe_layer_cuda.json"
BEGIN, END = "<!-- begin: python -m benchmarks.moe_layer_page -->\n", "<!-- end -->\n"
NOT_MEASURED = "No run is recorded in `benchmarks/results/moe_layer_cuda.json`.\n"

Row = dict[str, Any]


def main_rows(rows: list[Row], micro_batches: int = 4) -> list[Row]:
    """One row of each competitor: its last mode, with the weights quantized for so many micro-batches."""
    timed = [row for row in rows if row.get("micro_batches", 0) in (None, micro_batches) and "mode" in row]
    return list({row["competitor"]: row for row in timed}.values())


def layers_of(result: dict[str, Any]) -> dict[str, list[Row]]:
    """The rows of each layer."""
    layers: dict[str, list[Row]] = {}
    for row in result["rows"]:
        layers.setdefault(row["layer"], []).append(row)
    return layers


def _joined(rows: list[Row], key: str, digits: int = 0) -> str:
    """The values for 1, 4 and 8 micro-batches, or the only one."""
    return " / ".join(number(row[key], digits) for row in rows if key in row)


def _natural(rows: list[Row]) -> str:
    """The table of the first routing: each competitor in each mode."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["competitor"], row["mode"]), []).append(row)
    columns = [
        "competitor",
        "mode",
        "forward, us",
        "step, us",
        "TFLOP/s",
        "times stock",
        "sustained times stock",
    ]
    columns += ["peak, GiB", "cached weights, GiB", "host, us: without, with gradients"]
    columns += ["launches, forward + backward", "first step, s"]
    lines = []
    for (name, mode), found in groups.items():
        first = found[0]
        rate = "forward_tflops" if first["forward_only"] else "step_tflops"
        host = [number(first.get(key)) for key in ("host_no_grad_us", "host_grad_us")]
        launched = [number(first.get(f"{part}_launches")) for part in ("forward", "backward")]
        lines.append(
            [
                name,
                mode,
                _joined(found, "forward_us"),
                _joined(found, "step_us"),
                _joined(found, rate),
                _joined(found, "times_stock", 2),
                _joined(found, "sustained_times_stock", 2),
                number(first.get("peak_bytes"), 2, 2**30),
                number(first.get("cached_weight_bytes"), 2, 2**30),
                ", ".join(part for part in host if part),
                " + ".join(part for part in launched if part),
                number(first.get("first_step_s"), 1),
            ]
        )
    return table(columns, lines)


def _routings(rows: list[Row]) -> str:
    """The table of all routings: the main mode of each competitor, time and ratio."""
    routings: dict[str, list[Row]] = {}
    for row in rows:
        routings.setdefault(row["routing"], []).append(row)
    if len(routings) < 2:
        return ""
    key = "forward_us" if rows[0]["forward_only"] else "step_us"
    columns, lines = ["us (times stock); main mode, N = 4"], {}
    for routing, found in routings.items():
        columns.append(f"{routing}, MaxVio {found[0]['max_violation']:.2f}")
        for row in main_rows(found):
            ratio = f" ({row['times_stock']:.2f})" if "times_stock" in row else ""
            line = lines.setdefault(row["competitor"], {})
            line[routing] = f"{number(row[key])}{ratio}"
    filled = [[name, *(line.get(each, "") for each in routings)] for name, line in lines.items()]
    return "\n" + table(columns, filled)


def _notes(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        mode = f", {row['mode']}" if "mode" in row else ""
        line = f"- `{row['competitor']}`{mode}: {row['note']}."
        if "published_tflops" in row:
            line += (
                f" Published by its authors: {row['published_tflops']:g} TFLOP/s on {row['published_on']}."
            )
        lines.append(line + "\n")
    return "\n" + "".join(lines) if lines else ""


def tables(result: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    environment = result["environment"]
    versions = ", ".join(
        f"{name} {found}" for name, found in result["peers"].items() if found and name != "stock"
    )
    gpu = environment["gpu"]["name"] if environment["gpu"] else environment["processor"]
    text = (
        f"{gpu}, torch {environment['torch']}{', ' if versions else ''}{versions}; {environment['date']}.\n"
    )
    for layer, rows in layers_of(result).items():
        timed = [row for row in rows if "note" not in row]
        text += f"\n### {layer}\n\n"
        if timed:
            routing = timed[0]["routing"]
            first = [row for row in timed if row["routing"] == routing]
            text += f"Routing: {routing}, MaxVio {first[0]['max_violation']:.2f}.\n\n"
            text += _natural(first) + _routings(timed)
        text += _notes([row for row in rows if "note" in row])
    return text + f"\n![one layer with each competitor](images/moe_layer_{result['device']}.png)\n"


def with_tables(page: str) -> str:
    """The page with the tables of the recorded run."""
    text = tables(json.loads(RESULT.read_text())) if RESULT.exists() else NOT_MEASURED
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


def main() -> None:
    """Writes the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
