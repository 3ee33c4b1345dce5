"""Tokens per second of examples/train_moe.py compared with the same model in plain PyTorch, in one run.

Both models train alternately, step by step, on the same ranks and the same data (``--compare``), and the medians of
their steps are compared. The run also checks both loss curves: they must begin equal and end near each other. FP8 on a
CPU is included to check its numbers, not its speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"
WARM_UP = 5
EARLY = 5  # steps before rounding differences grow; then they grow tenfold in two or three steps


@dataclass(frozen=True)
class Bound:
    """Bounds of the relative difference between the two loss curves."""

    #: in each of the first steps.
    early: float
    #: between the means over the last tenth of the steps.
    final: float


#: by the coarser of the two dtypes or formats. Late differences are more chaos than rounding: plain PyTorch in bfloat16
#: differs from itself by up to 1.8 % after 60 steps of the medium model if one initial weight changes by 1 %.
BOUNDS = {
    "float32": Bound(1e-5, 1e-3),
    "bfloat16": Bound(2**-8, 0.03),  # the unit roundoff
    "fp8_block": Bound(0.02, 0.03),
}

Spread = dict[str, float]


def runs(cuda: bool) -> dict[str, list[str]]:
    """Returns the options of the runs on this machine, by name."""
    if not cuda:
        return {
            "float32": [],
            "bfloat16": ["--dtype", "bfloat16"],
            "fp8_block": ["--format", "fp8_block"],
        }
    size = ["--preset", "medium", "--dtype", "bfloat16"]
    return {
        "bfloat16": size,
        "bfloat16, compiled": [*size, "--compile"],
        "fp8_block": [*size, "--format", "fp8_block"],
    }


def spread(seconds: list[float], tokens: int) -> Spread:
    """Returns tokens per second: the median step and the quartiles."""
    low, median, high = statistics.quantiles(seconds[WARM_UP:], n=4)
    return {"median": round(tokens / median), "low": round(tokens / high), "high": round(tokens / low)}


def measure(name: str, options: list[str], ranks: int, steps: int) -> dict[str, Any]:
    """Runs one comparison."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(SCRIPT), "--compare", "--ranks", str(ranks), "--steps", str(steps)]
        subprocess.run([*command, "--out", f"{out}/run", *options], check=True)
        report = json.loads(Path(out, "run", "compare.json").read_text())
    plain_losses, plugin_losses = report["losses"].values()
    differences = [
        got / plain - 1 for got, plain in zip(plugin_losses[:EARLY], plain_losses[:EARLY], strict=True)
    ]
    plain, plugin = (
        spread(seconds, report["tokens_per_step"]) for seconds in report["step_seconds"].values()
    )
    return {
        "name": name,
        "options": " ".join(options),
        "ranks": ranks,
        "steps": report["steps"],
        "plugin_tokens_per_second": plugin,
        "plain_tokens_per_second": plain,
        "ratio": round(plugin["median"] / plain["median"], 3),
        "early_differences": differences,
        "bound": asdict(BOUNDS[name.split(",")[0]]),
        "final_difference": report["final_difference"],
        "largest_difference": report["largest_difference"],
    }


def is_near(row: dict[str, Any]) -> bool:
    """Whether the two loss curves are within the row's bound of each other."""
    early = max(abs(difference) for difference in row["early_differences"])
    print(
        f"{row['name']}: losses part by {early:.1e} in {EARLY} steps, by {row['final_difference']:+.2%} at the end"
    )
    return early <= row["bound"]["early"] and abs(row["final_difference"]) <= row["bound"]["final"]


def main() -> None:
    """Measures, writes ``results/train_moe_<device>.json``, and fails if the curves differ too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    cuda = torch.cuda.device_count() >= arguments.ranks
    rows = []
    for name, options in runs(cuda).items():
        rows.append(measure(name, options, arguments.ranks, arguments.steps))
        print(f"{name}: {rows[-1]['ratio']:.3f} x plain PyTorch")
    write("train_moe", torch.device("cuda" if cuda else "cpu"), rows, ranks=arguments.ranks)
    far = [row["name"] for row in rows if not is_near(row)]
    if far:
        sys.exit(f"losses differ from plain PyTorch's by more than the bound: {', '.join(far)}")


if __name__ == "__main__":
    main()
