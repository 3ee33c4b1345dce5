"""What a recipe costs in loss: examples/train_moe.py with each recipe, same data and steps, beside bfloat16 operands.

Every run starts from the same weights and reads the same batches, so the curves differ by the numbers that the experts
multiply in, and by chaos: a model that starts with one weight 1 % off ends up to 1.8 % elsewhere. ``--seeds`` repeats
all of it from other weights and averages the differences. The last tenth of the steps is compared, and the mean of the
last validations; the first has a bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"
BASE = "bf16"
#: relative difference of the loss over the last tenth of the steps, by format.
BOUNDS = {
    BASE: 0.0,
    "fp8_tensor": 0.01,
    "fp8_delayed": 0.01,
    "fp8_block": 0.01,
    "mxfp8": 0.01,
    "nvfp4": 0.02,
}
STEPS = {"cuda": 550, "cpu": 200}
VALIDATIONS = 3


def curves(format: str, seed: int, ranks: int, steps: int, options: list[str]) -> dict[str, list[float]]:
    """The losses of one run, step by step, and its validations."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            str(SCRIPT),
            "--format",
            format,
            "--seed",
            str(seed),
            "--ranks",
            str(ranks),
        ]
        command += ["--steps", str(steps), "--out", f"{out}/run", *options]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
        records = [json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()]
    return {key: [r[key] for r in records if key in r] for key in ("loss", "validation_loss")}


def end(losses: list[float]) -> float:
    """The mean over the last tenth."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def measure(
    formats: list[str], seeds: int, ranks: int, steps: int, options: list[str]
) -> list[dict[str, Any]]:
    """A row for each format."""
    rows = []
    base: list[dict[str, list[float]]] = []
    for format in formats:
        runs = [curves(format, seed, ranks, steps, options) for seed in range(seeds)]
        base = base or runs
        pairs = list(zip(runs, base, strict=True))
        final = [end(run["loss"]) / end(other["loss"]) - 1 for run, other in pairs]
        validation = [
            statistics.fmean(run["validation_loss"][-VALIDATIONS:])
            / statistics.fmean(other["validation_loss"][-VALIDATIONS:])
            - 1
            for run, other in pairs
        ]
        rows.append(
            {
                "name": format,
                "final_loss": [round(end(run["loss"]), 4) for run in runs],
                "final_difference": round(statistics.fmean(final), 5),
                "final_differences": [round(value, 5) for value in final],
                "validation_difference": round(statistics.fmean(validation), 5),
                "losses": [[round(loss, 4) for loss in run["loss"]] for run in runs],
            }
        )
        print(
            f"{format:12s} final {end(runs[0]['loss']):.4f} ({rows[-1]['final_difference']:+.2%}), "
            f"validation {rows[-1]['validation_difference']:+.2%}",
            flush=True,
        )
    return rows


def main() -> None:
    """Trains, writes ``results/recipes_<device>.json``, and fails where a recipe ends too far from bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="1 on a GPU, 2 on a CPU unless given")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--formats", nargs="*", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--options", default="", help="more options of the example, in one string")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = arguments.ranks or (1 if device == "cuda" else 2)
    steps = arguments.steps or STEPS[device]
    formats = [BASE, *(format for format in arguments.formats if format != BASE)]
    rows = measure(formats, arguments.seeds, ranks, steps, arguments.options.split())
    write("recipes", torch.device(device), rows, ranks=ranks, steps=steps, seeds=arguments.seeds)
    far = [row["name"] for row in rows if abs(row["final_difference"]) > BOUNDS[row["name"]]]
    if far:
        sys.exit(f"further from {BASE} than its bound: {', '.join(far)}")


if __name__ == "__main__":
    main()
