"""Loss curves as PNG."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"


def smoothed(values: list[float], width: float = 0.02) -> list[float]:
    """Returns an exponential moving average over about ``width`` of the curve, without a bias at its start."""
    keep = 1 - 1 / max(1.0, width * len(values))
    total, weight, result = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(total / weight)
    return result


def _style(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def loss_curve(path: Path, losses: dict[int, float], validation: dict[int, float], title: str) -> None:
    """Plots training loss, raw and smoothed, and validation loss, over steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    steps, values = list(losses), list(losses.values())
    axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8, label="training")
    axes.plot(steps, smoothed(values), color=BLUE, linewidth=1.8, label="training, smoothed")
    if validation:
        axes.plot(
            list(validation), list(validation.values()), "o-", color=ORANGE, markersize=4, label="validation"
        )
    _style(axes, "cross entropy (nats per byte)")
    axes.set_xlabel("step")
    axes.set_title(textwrap.fill(title, 100), loc="left", fontsize=9)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def compare_curves(path: Path, curves: dict[str, list[float]], title: str) -> None:
    """Plots two training curves, and below them their difference."""
    (first, first_values), (second, second_values) = curves.items()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), dpi=150, sharex=True, height_ratios=[3, 1.2], layout="constrained"
    )
    for name, color, style, width in ((first, ORANGE, "-", 3.0), (second, BLUE, "-", 1.2)):
        values = curves[name]
        top.plot(values, color=color, alpha=0.2, linewidth=0.8)
        top.plot(smoothed(values), style, color=color, linewidth=width, label=name)
    _style(top, "cross entropy (nats per byte)")
    top.set_title(textwrap.fill(title, 100), loc="left", fontsize=9)
    top.legend(frameon=False)
    gaps = [abs(a - b) for a, b in zip(first_values, second_values, strict=True)]
    bottom.semilogy([max(gap, 1e-9) for gap in gaps], color=GREY, linewidth=0.9)
    _style(bottom, "absolute difference")
    bottom.set_xlabel("step")
    figure.savefig(path)
    plt.close(figure)
