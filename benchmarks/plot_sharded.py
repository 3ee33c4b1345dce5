"""Plots of layers with sharded weights: time and memory beside FSDP2, and when gathers and sums run."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure

COLORS = {"product": "#2458a6", "other": "#9ab4d8", "gather": "#c9741f", "sum": "#7a9a3a"}
WEIGHTS, STEP = "#2458a6", "#9ab4d8"
#: Milliseconds to draw: two layers in the forward, and two in the backward.
WINDOW_MS = 28.0


def sharded_layers(result: dict[str, Any]) -> Figure:
    """Times of a step over FSDP2's, and GiB of a GPU: weights, and what a step adds to them."""
    kinds = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure, panels = pyplot.subplots(2, len(kinds), figsize=(9, 5.2), layout="constrained", squeeze=False)
    for column, kind in enumerate(kinds):
        rows = [row for row in result["rows"] if row["model"] == kind]
        names = [row["competitor"].replace(" ", "\n") for row in rows]
        times, memory = panels[0][column], panels[1][column]
        times.bar(names, [row["of_fsdp2"] for row in rows], 0.6, color=WEIGHTS)
        times.axhline(1, color="#9a9a9a", lw=1)
        times.set_title({"dense": "8 dense layers", "experts": "4 layers of experts"}[kind], fontsize=10)
        held = [row["weights_gib"] for row in rows]
        memory.bar(names, held, 0.6, color=WEIGHTS, label="weights, and quantized copies")
        added = [row["peak_gib_above_weights"] for row in rows]
        memory.bar(
            names, added, 0.6, bottom=held, color=STEP, label="gradients, activations, gathered weights"
        )
        for axes in (times, memory):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    panels[0][0].set_ylabel("time of a step,\nof FSDP2 in bfloat16")
    panels[1][0].set_ylabel("GiB of a GPU at the peak")
    panels[1][0].set_ylim(0, 1.35 * panels[1][0].get_ylim()[1])
    panels[1][0].legend(frameon=False, fontsize=8, loc="upper right")
    environment = result["environment"]
    figure.suptitle(
        f"Sharded weights on two {environment['gpu']['name']}, torch {environment['torch']}", fontsize=10
    )
    return figure


def sharded_trace(result: dict[str, Any]) -> Figure:
    """What runs when on one GPU, from a trace: products and other kernels above, gathers and sums below."""
    rows = result["rows"]
    figure, panels = pyplot.subplots(
        2 * len(rows), 1, figsize=(9, 1.5 * 2 * len(rows) + 0.8), layout="constrained"
    )
    for i, row in enumerate(rows):
        end = max(span["begin"] + span["length"] for span in row["spans"]) / 1e3
        for axes, (where, first) in zip(
            panels[2 * i : 2 * i + 2], (("forward", 12.0), ("backward", 0.55 * end)), strict=True
        ):
            _draw(axes, row["spans"], first)
            axes.set_title(f"{row['competitor']}: two layers in the {where}", fontsize=9, loc="left")
    panels[-1].set_xlabel("ms of the step")
    for kind, color in COLORS.items():
        panels[0].barh(0, 0, color=color, label=kind if kind != "sum" else "sum of gradients")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw(axes: Any, spans: list[dict[str, Any]], first: float) -> None:
    for span in spans:
        begin, length = span["begin"] / 1e3, span["length"] / 1e3
        if begin + length < first or begin > first + WINDOW_MS:
            continue
        lane = {"gather": 1, "sum": 0}.get(span["kind"], 2)
        axes.barh(lane, length, left=begin, height=0.8, color=COLORS[span["kind"]], edgecolor="white", lw=0.4)
    axes.set_xlim(first, first + WINDOW_MS)
    axes.set_yticks([0, 1, 2], ["sums", "gathers", "compute"], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def sharded_scale(result: dict[str, Any]) -> Figure:
    """The part of a step that waits for other ranks, against their number: a model on paper."""
    titles = {"dense": "8 dense layers", "experts": "4 layers of experts"}
    where = {"nvlink": "within NVLink, as measured for two", "network": "50 GB/s for each GPU"}
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True, sharey=True)
    for line, model in zip(panels, titles, strict=True):
        for axes, place in zip(line, where, strict=True):
            rows = [row for row in result["rows"] if (row["model"], row["where"]) == (model, place)]
            tokens = list(dict.fromkeys(row["tokens"] for row in rows))
            for format, style in (("bf16", "-"), ("fp8_block", "--")):
                for i, count in enumerate(tokens):
                    curve = [row for row in rows if (row["format"], row["tokens"]) == (format, count)]
                    axes.plot(
                        [row["ranks"] for row in curve],
                        [100 * row["waiting_part"] for row in curve],
                        style,
                        color=pyplot.get_cmap("viridis")(i / len(tokens)),
                        label=f"{count} tokens" if style == "-" else None,
                    )
            axes.set_xscale("log", base=2)
            axes.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
            axes.set_title(f"{titles[model]}, {where[place]}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("% of a step that waits")
        line[0].legend(frameon=False, fontsize=8, title="a rank; dashes: FP8 blocks", title_fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel("ranks")
    return figure
