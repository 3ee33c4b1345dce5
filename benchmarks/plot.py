"""Draws the files of benchmarks/results/ for which there is a plot here, into docs/images/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.common import RESULTS
from benchmarks.moe_layer_page import layers_of, main_rows
from benchmarks.plot_expert_parallel import expert_parallel
from benchmarks.plot_sharded import sharded_layers, sharded_scale, sharded_trace

IMAGES = RESULTS.parent.parent / "docs" / "images"
OURS, TORCH, MUL = "#2458a6", "#c9741f", "#9a9a9a"


def host_time(result: dict[str, Any]) -> Figure:
    """Bars of each op's host time, of torch.mul and of the torch calls it replaces; with gradient if there is one."""
    # Modules take many times as long as ops.
    rows = [row for row in result["rows"] if not row["op"].startswith("nn.")]
    figure, axes = pyplot.subplots(figsize=(8.5, 0.45 * len(rows) + 1.6), layout="constrained")
    suffixes = ["_grad_us" if "op_grad_us" in row else "_us" for row in rows]
    end = 1.35 * max(row["op" + suffix]["high"] for row, suffix in zip(rows, suffixes, strict=True))
    labels = []
    for place, (row, suffix) in enumerate(zip(reversed(rows), reversed(suffixes), strict=True)):
        for offset, name, color in ((0.26, "op", OURS), (0.0, "torch", TORCH), (-0.26, "mul", MUL)):
            time = row[f"{name}{suffix}"]
            error = [[time["median"] - time["low"]], [time["high"] - time["median"]]]
            axes.barh(
                place + offset, time["median"], height=0.24, color=color, xerr=error, error_kw={"lw": 0.8}
            )
            if time["median"] > end:  # the bar is longer than the axis
                axes.text(end, place + offset, f"{time['median']:.0f} ", fontsize=7, ha="right", va="center")
        ratio = row["op" + suffix]["median"] / row["mul" + suffix]["median"]
        axes.annotate(
            f"{ratio:.1f} x torch.mul", (row["op" + suffix]["high"], place + 0.26), (4, 0), fontsize=8,
            textcoords="offset points", va="center",
        )  # fmt: skip
        labels.append(row["op"] + (" (with gradient)" if suffix == "_grad_us" else ""))
    axes.set_xlim(0, end)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel("host time of one call, us: median and middle half")
    for color, name in (
        (OURS, "transformer_plugin"),
        (TORCH, "the torch calls it replaces"),
        (MUL, "torch.mul"),
    ):
        axes.barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title("Host time of a small call", result), fontsize=10)
    return figure


def functional(result: dict[str, Any]) -> Figure:
    """Bars of each function's host time and of the op that it calls; the difference without the values it makes."""
    rows = [row for row in result["rows"] if "function" in row]
    figure, axes = pyplot.subplots(figsize=(8.5, 0.36 * len(rows) + 1.6), layout="constrained")
    for place, row in enumerate(reversed(rows)):
        for offset, name, color in ((0.2, "function_us", OURS), (-0.2, "op_us", MUL)):
            time = row[name]
            error = [[time["median"] - time["low"]], [time["high"] - time["median"]]]
            axes.barh(
                place + offset, time["median"], height=0.38, color=color, xerr=error, error_kw={"lw": 0.8}
            )
        axes.annotate(
            f"+{row['added_us']:.1f} us, {row['values']} made", (row["function_us"]["high"], place + 0.2), (4, 0),
            fontsize=8, textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set_xlim(0, 1.25 * max(row["function_us"]["high"] for row in rows))
    axes.set_yticks(range(len(rows)), [row["function"] for row in reversed(rows)], fontsize=8)
    axes.set_xlabel("host time of one call, us: median and middle half")
    for color, name in (
        (OURS, "function, with the values it makes"),
        (MUL, "the op, with its tensors by hand"),
    ):
        axes.barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title("Host time of a function and of its op", result), fontsize=10)
    return figure


def train_moe(result: dict[str, Any]) -> Figure:
    """Tokens per second in training, each configuration and plain PyTorch in the same run."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8.5, 0.8 * len(rows) + 1.6), layout="constrained")
    for place, row in enumerate(reversed(rows)):
        for offset, name, color in ((0.18, "plugin", OURS), (-0.18, "plain", TORCH)):
            speed = row[f"{name}_tokens_per_second"]
            error = [[speed["median"] - speed["low"]], [speed["high"] - speed["median"]]]
            axes.barh(
                place + offset, speed["median"], height=0.34, color=color, xerr=error, error_kw={"lw": 0.8}
            )
        end = row["plugin_tokens_per_second"]["high"]
        axes.annotate(
            f"{row['ratio']:.2f} x", (end, place + 0.18), (4, 0), fontsize=8, textcoords="offset points",
            va="center",
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    axes.set_xlabel("tokens per second of all ranks: median step and middle half")
    for color, name in ((OURS, "transformer_plugin"), (TORCH, "plain PyTorch")):
        axes.barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title("Training the MoE language model", result), fontsize=10)
    return figure


def quantize(result: dict[str, Any]) -> Figure:
    """Bars of each op's and the compiled reference's speed, as fractions of the speed of a copy of as many bytes."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8.5, 0.45 * len(rows) + 1.8), layout="constrained")
    for place, row in enumerate(reversed(rows)):
        copy = row["copy_us"]["median"]
        for offset, name, color in ((0.2, "op", OURS), (-0.2, "compiled", TORCH)):
            if f"{name}_us" not in row:
                continue
            time = row[f"{name}_us"]
            speed, low, high = (copy / time[key] for key in ("median", "high", "low"))
            axes.barh(
                place + offset, speed, height=0.38, color=color, xerr=[[speed - low], [high - speed]],
                error_kw={"lw": 0.8},
            )  # fmt: skip
            text = f"{speed:.2f}"
            if name == "op" and "fraction_of_single" in row:
                text += f", {row['fraction_of_single']:.2f} x"
            axes.annotate(
                text, (high, place + offset), (4, 0), fontsize=7, textcoords="offset points", va="center"
            )
        if row["fraction_in_reach"] < 1:
            axes.vlines(row["fraction_in_reach"], place - 0.42, place + 0.42, color="black", lw=1, ls=":")
    axes.axvline(1.0, color=MUL, lw=1, zorder=0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    axes.set_xlabel(
        "fraction of a copy's speed (dotted: limit of an op that reads its input twice)\n"
        "after a comma: fraction of the speed without groups, without the bias, or in separate steps"
    )
    axes.margins(y=0.01)
    for color, name in ((OURS, "transformer_plugin"), (TORCH, "torch.compile of plain PyTorch")):
        axes.barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(f"Quantize, {' x '.join(map(str, rows[0]['shape']))}", result), fontsize=10)
    return figure


def grouped_gemm(result: dict[str, Any]) -> Figure:
    """Bars of each shape's speed as a multiple of the peer's in the same run, one panel for each work."""
    rows = result["rows"]
    works, shapes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("work", "name"))
    lines = 1 if len(works) < 8 else 2
    across = -(-len(works) // lines)
    size = (2.3 * across + 1.7, (0.5 * len(shapes) + 1.7) * lines + 0.3)
    figure, panels = pyplot.subplots(
        lines, across, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axes in panels.flat[len(works) :]:
        axes.set_visible(False)
    peer = "a loop of torch.mm"
    if result["device"] == "cuda":
        peer = "torch's (for MXFP8 and NVFP4: our bfloat16 kernel)"
    looks = {
        "even": (0.27, OURS, f"even groups, relative to {peer}"),
        "skewed": (0.0, "#7da0d4", f"skewed groups, relative to {peer}"),
        "any": (-0.27, MUL, "groups of any sizes, relative to the same op with even groups"),
    }
    looks = {kind: look for kind, look in looks.items() if any(row["sizes"] == kind for row in rows)}
    for axes, work in zip(panels.flat, works, strict=False):
        for row in (row for row in rows if row["work"] == work):
            offset, color, _ = looks[row["sizes"]]
            place = len(shapes) - 1 - shapes.index(row["name"]) + offset
            speed, low, high = (
                row["peer_us"]["median"] / row["op_us"][key] for key in ("median", "high", "low")
            )
            error = [[speed - low], [high - speed]]
            axes.barh(place, speed, height=0.25, color=color, xerr=error, error_kw={"lw": 0.8})
            axes.annotate(
                f"{speed:.2f}", (high, place), (3, 0), fontsize=7, textcoords="offset points", va="center"
            )
        axes.axvline(1.0, color="black", lw=1, ls=":", zorder=0)
        axes.margins(x=0.2, y=0.02)
        axes.set_title(work, fontsize=9)
        means = [f"{mean['ratio']:.2f} {mean['sizes']}" for mean in result["means"] if mean["work"] == work]
        axes.set_xlabel("\n".join(["geometric means", *means] if means else []), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for line in panels:
        line[0].set_yticks(range(len(shapes)), reversed(shapes))
    for _, color, name in looks.values():
        panels[0][0].barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=len(looks), frameon=False, fontsize=8)
    figure.suptitle(_title("Speed of grouped products", result), fontsize=10)
    return figure


def expert_mlp(result: dict[str, Any]) -> Figure:
    """Bars of each workload's time and peak memory as a fraction of stock PyTorch's in the same run."""
    rows = result["rows"]
    names, recipes_ = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "recipe"))
    looks = dict(zip(recipes_, (OURS, "#7da0d4", "#c3d3ec"), strict=False))
    height = 0.76 / len(recipes_)
    figure, panels = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 0.35 * len(rows) + 1.8), layout="constrained"
    )
    parts = (("of_the_time", "time, forward and backward"), ("of_the_memory", "peak memory"))
    for axes, (key, text) in zip(panels, parts, strict=True):
        for row in rows:
            turn = (len(recipes_) - 1) / 2 - recipes_.index(row["recipe"])
            place = len(names) - 1 - names.index(row["name"]) + turn * height
            axes.barh(place, row[key], height=0.95 * height, color=looks[row["recipe"]])
            axes.annotate(
                f"{row[key]:.2f}",
                (row[key], place),
                (3, 0),
                fontsize=8,
                textcoords="offset points",
                va="center",
            )
        axes.axvline(1.0, color="black", lw=1, ls=":", zorder=0)
        axes.margins(x=0.15)
        axes.set_xlabel(f"{text}, relative to stock PyTorch")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), reversed(names))
    for recipe, color in looks.items():
        panels[0].barh(0, 0, color=color, label=recipe)
    figure.legend(loc="outside lower center", ncols=len(recipes_), frameon=False, fontsize=8)
    figure.suptitle(_title("The experts of a mixture", result), fontsize=10)
    return figure


def moe_layer(result: dict[str, Any]) -> Figure:
    """Bars of each competitor's TFLOP/s in each layer, at rested clocks and natural routing; published ones hatched."""
    layers = layers_of(result)
    most = max(len({row["competitor"] for row in rows}) for rows in layers.values())
    figure, panels = pyplot.subplots(
        1, len(layers), squeeze=False, figsize=(3.6 * len(layers) + 1, 0.4 * most + 1.6), layout="constrained"
    )
    for axes, (layer, rows) in zip(panels[0], layers.items(), strict=True):
        timed = [row for row in rows if "note" not in row]
        bars = []
        for row in main_rows([row for row in timed if row["routing"] == timed[0]["routing"]]):
            color = OURS if row["competitor"].startswith("ours") else TORCH
            rate = row["forward_tflops" if row["forward_only"] else "step_tflops"]
            bars.append((f"{row['competitor']}, {row['mode']}", rate, color, ""))
        published = [row for row in rows if "published_tflops" in row]
        bars += [(f"{row['competitor']}, published", row["published_tflops"], MUL, "//") for row in published]
        for place, (_, rate, color, hatch) in enumerate(reversed(bars)):
            axes.barh(place, rate, height=0.7, color=color, hatch=hatch)
            axes.annotate(
                f"{rate:.0f}", (rate, place), (3, 0), fontsize=7, textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)], fontsize=7)
        what = "forward" if rows[0].get("forward_only") else "forward and backward"
        axes.set_xlabel(f"TFLOP/s, {what}", fontsize=8)
        axes.set_title(layer, fontsize=9)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title("One MoE layer, weights quantized for 4 micro-batches", result), fontsize=10)
    return figure


def recipes(result: dict[str, Any]) -> Figure:
    """Loss curves averaged over the seeds, their differences from the first recipe, and the final loss of each seed."""
    first, *others = rows = result["rows"]
    figure, panels = pyplot.subplot_mosaic(
        [["loss", "loss"], ["way", "end"]], figsize=(9, 7), layout="constrained", height_ratios=(3, 2)
    )  # fmt: skip
    base = _smooth(first["mean_losses"])
    colors = dict(zip((row["name"] for row in rows), (MUL, "C0", "C1", "C2", "C3", "C4"), strict=False))
    for row in rows:
        curve = _smooth(row["mean_losses"])
        steps = range(1, len(curve) + 1)
        panels["loss"].plot(steps, curve, lw=1.2, label=row["name"], color=colors[row["name"]])
        apart = [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)]
        panels["way"].plot(steps, apart, lw=1.2, color=colors[row["name"]])
    for place, row in enumerate(reversed(others)):
        seeds = [100 * difference for difference in row["final_differences"]]
        mean, bound = 100 * row["final_difference"], 100 * row["bound"]
        panels["end"].plot(seeds, [place] * len(seeds), "o", ms=4, alpha=0.5, color=colors[row["name"]])
        panels["end"].plot(mean, place, "|", ms=16, mew=2, color=colors[row["name"]])
        panels["end"].vlines([-bound, bound], place - 0.4, place + 0.4, color="black", lw=1, ls=":")
    panels["end"].axvline(0, color=MUL, lw=1, zorder=0)
    panels["end"].set_yticks(range(len(others)), [row["name"] for row in reversed(others)])
    panels["end"].set_xlabel(
        f"% from {first['name']}, last tenth of the steps:\neach seed, their mean, and its bound (dotted)"
    )
    panels["loss"].set_ylabel("loss, nats per byte")
    panels["way"].set_ylabel(f"% from {first['name']}")
    for name in ("loss", "way"):
        panels[name].set_xlabel("step")
    panels["loss"].legend(frameon=False, fontsize=8)
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    seeds_text = f"mean of {result['seeds']} seeds" if result["seeds"] > 1 else "one seed"
    panels["loss"].set_title(
        _title(f"The MoE language model with each recipe, {seeds_text}", result), fontsize=10
    )
    return figure


def weight_gather(result: dict[str, Any]) -> Figure:
    """Times of gathers in CUDA graphs over that of NCCL in bfloat16."""
    rows = [row for row in result["rows"] if row["mode"] == "graph"]
    labels = [f"{row['format'].split(':')[0]}\n{row['shape'][0]} x {row['shape'][1]}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for shift, what, color in ((-0.2, "ready", OURS), (0.2, "quantized", TORCH)):
        places = [place + shift for place in range(len(rows))]
        label = {"ready": "planes ready", "quantized": "quantization included"}[what]
        axes.bar(places, [row[f"{what}_of_nccl_bf16"] for row in rows], 0.38, color=color, label=label)
    axes.axhline(1, color=MUL, lw=1)
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylabel("of NCCL's time in bfloat16")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    ranks = rows[0]["ranks"]
    axes.set_title(_title(f"All-gather of a weight over {ranks} GPUs", result), fontsize=10)
    return figure


def _smooth(losses: list[float], weight: float = 0.9) -> list[float]:
    """Returns an exponential moving average with weight 0.9."""
    smooth, mean = [], losses[0]
    for loss in losses:
        mean = weight * mean + (1 - weight) * loss
        smooth.append(mean)
    return smooth


def _title(text: str, result: dict[str, Any]) -> str:
    environment = result["environment"]
    where = environment["gpu"]["name"] if environment["gpu"] else environment["processor"]
    return f"{text}: {where}, torch {environment['torch']}"


# By the key "benchmark" of a result file.
DRAWINGS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "expert_mlp": expert_mlp,
    "expert_parallel": expert_parallel,
    "functional": functional,
    "grouped_gemm": grouped_gemm,
    "host_time": host_time,
    "moe_layer": moe_layer,
    "quantize": quantize,
    "recipes": recipes,
    "sharded_layers": sharded_layers,
    "sharded_scale": sharded_scale,
    "sharded_trace": sharded_trace,
    "train_moe": train_moe,
    "weight_gather": weight_gather,
}


def main() -> None:
    """Draws all files that have a plot, and lists the others."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        drawing = DRAWINGS.get(result.get("benchmark", ""))
        if drawing is None:
            print(f"{path.name}: no plot")
            continue
        image = Path(IMAGES, f"{path.stem}.png")
        figure = drawing(result)
        figure.savefig(image, dpi=120, metadata={"Software": None})
        pyplot.close(figure)
        print(f"drew {image}")


if __name__ == "__main__":
    main()
