"""Plot of experts over ranks: exchanges, layers relative to ours, and what the exchange adds to a rank alone."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure

OURS, LIGHT, TORCH, MUL = "#2458a6", "#9ab4d8", "#c9741f", "#9a9a9a"

Row = dict[str, Any]


def _bars(axes: Any, bars: list[tuple[str, float, str]], digits: int, size: float = 0.7) -> None:
    """Horizontal bars, the first one above, with their values."""
    for place, (_, value, color) in enumerate(reversed(bars)):
        axes.barh(place, value, height=size, color=color)
        axes.annotate(
            f"{value:.{digits}f}", (value, place), (3, 0), fontsize=7, textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)], fontsize=7)
    axes.margins(x=0.18)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _color(row: Row) -> str:
    return OURS if row["competitor"].startswith("ours") else TORCH


def _exchanges(axes: Any, rows: list[Row]) -> None:
    bars = []
    for row in rows:
        name = row["competitor"] + ("" if row["dispatch_mode"] == "graph" else f", {row['dispatch_mode']}")
        bars.append((f"{name}: dispatch", row["dispatch_us"]["median"], _color(row)))
        bars.append(("combine", row["combine_us"]["median"], LIGHT if _color(row) == OURS else "#e3b98f"))
    _bars(axes, bars, 0)
    axes.set_xlabel("us", fontsize=8)


def _layers(axes: Any, rows: list[Row]) -> None:
    """Each competitor's fastest mode over ours in bfloat16."""
    fastest: dict[str, Row] = {}
    for row in rows:
        best = fastest.get(row["competitor"])
        if best is None or row["step_us"]["median"] < best["step_us"]["median"]:
            fastest[row["competitor"]] = row
    base = fastest.get("ours bf16", rows[0])["step_us"]["median"]
    _bars(
        axes,
        [
            (
                f"{name}, {row['mode']}",
                row["step_us"]["median"] / base,
                MUL if name.startswith("one rank") else _color(row),
            )
            for name, row in fastest.items()
        ],
        2,
    )
    axes.axvline(1.0, color="black", lw=1, ls=":", zorder=0)
    axes.set_xlabel("forward and backward over ours in bf16", fontsize=8)


def _over_one_rank(axes: Any, rows: list[Row]) -> None:
    """The main mode of ours in each routing."""
    main = {(row["competitor"], row["routing"]): row for row in rows if "over_one_rank" in row}
    bars = [
        (f"{name.removeprefix('ours ')}, {routing}", row["over_one_rank"], OURS)
        for (name, routing), row in main.items()
    ]
    _bars(axes, bars, 2)
    axes.axvline(1.0, color="black", lw=1, ls=":", zorder=0)
    axes.set_xlabel("ours over one rank with its share of the experts", fontsize=8)


def expert_parallel(result: dict[str, Any]) -> Figure:
    """Columns of layers: dispatch and combine, steps relative to ours, and ours over one rank."""
    timed = [row for row in result["rows"] if "note" not in row]
    layers = list(dict.fromkeys(row["layer"] for row in timed))
    figure, panels = pyplot.subplots(
        3,
        len(layers),
        squeeze=False,
        figsize=(4.6 * len(layers) + 1, 10.5),
        layout="constrained",
        height_ratios=(3, 3, 1.2),
    )
    for column, layer in enumerate(layers):
        rows = [row for row in timed if row["layer"] == layer]
        first = [row for row in rows if row["routing"] == rows[0]["routing"]]
        steps = [row for row in first if row["kind"] == "layer"]
        exchanges = [row for row in first if row["kind"] == "exchange"]
        if exchanges:
            _exchanges(panels[0][column], exchanges)
        if steps:
            _layers(panels[1][column], steps)
            _over_one_rank(panels[2][column], [row for row in rows if row["kind"] == "layer"])
        panels[0][column].set_title(layer, fontsize=9)
    environment = result["environment"]
    where = environment["gpu"]["name"] if environment["gpu"] else environment["processor"]
    figure.suptitle(
        f"Experts over {result['ranks']} ranks, natural routing: {where}, torch {environment['torch']}",
        fontsize=10,
    )
    return figure
