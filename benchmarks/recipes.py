"""The effect of each recipe on the loss: examples/train_moe.py, same data and steps, compared with bfloat16 operands.

Runs of one seed start from the same weights and read the same batches, so their curves differ by the number format of
the experts' products, and by chaos: if one initial weight changes by 1 %, the final loss changes by up to 1.8 %. Chaos
has no preferred sign, but a recipe that loses accuracy has. So each run is compared with the bfloat16 run of its seed,
and the mean over the seeds has a bound; its standard error is reported. The last tenth of the steps is compared, and
the mean of the last validations.

A training this small mostly waits for the host, so several share a GPU (``--jobs``) and divide the cores among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import write

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_moe.py"
BASE = "bf16"
#: bound of the loss's relative difference over the last tenth of the steps, mean over the seeds, by format.
BOUNDS = {
    BASE: 0.0,
    "fp8_tensor": 0.01,
    "fp8_delayed": 0.01,
    "fp8_block": 0.01,
    "mxfp8": 0.01,
    "nvfp4": 0.02,
}
SEEDS = 3
STEPS = {"cuda": 550, "cpu": 200}
VALIDATIONS = 3


@dataclass(frozen=True)
class Curves:
    """The losses of one run at each step, and its validation losses."""

    losses: list[float]
    validations: list[float]

    @property
    def final(self) -> float:
        """The mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def validation(self) -> float:
        """The mean of the last validation losses."""
        return statistics.fmean(self.validations[-VALIDATIONS:])


Run = tuple[str, int]  # a format and a seed


@dataclass(frozen=True)
class Training:
    """The settings of all runs: ``threads`` for each rank, and ``options`` of the example."""

    ranks: int
    steps: int
    threads: int
    options: tuple[str, ...]

    def curves(self, run: Run) -> Curves:
        """Trains to the end in a separate process."""
        with tempfile.TemporaryDirectory() as out:
            given = {"format": run[0], "seed": run[1], "ranks": self.ranks, "steps": self.steps}
            named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            command = [sys.executable, str(SCRIPT), *named, "--out", f"{out}/run", *self.options]
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise RuntimeError(
                    f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                )
            records = [
                json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()
            ]
        return Curves(
            *([r[key] for r in records if key in r] for key in ("loss", "validation_loss")),
        )


def train(runs: list[Run], training: Training, jobs: int) -> dict[Run, Curves]:
    """Trains all runs, ``jobs`` at once. If one fails, those that have not begun are cancelled."""
    curves: dict[Run, Curves] = {}
    pool = ThreadPoolExecutor(jobs)
    bar = tqdm(total=len(runs), unit="run", dynamic_ncols=True, file=sys.stderr)
    try:
        futures = {pool.submit(training.curves, run): run for run in runs}
        for future in as_completed(futures):
            format, seed = run = futures[future]
            curves[run] = future.result()
            bar.write(f"{format:12s} seed {seed}: final {curves[run].final:.4f}")
            bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
    return curves


def compared(values: list[float], base: list[float], name: str) -> dict[str, Any]:
    """Returns the relative difference from the base for each seed, their mean and standard error (one seed: None)."""
    differences = [value / other - 1 for value, other in zip(values, base, strict=True)]
    error = statistics.stdev(differences) / len(values) ** 0.5 if len(values) > 1 else None
    return {
        f"{name}_loss": [round(value, 4) for value in values],
        f"{name}_differences": [round(difference, 5) for difference in differences],
        f"{name}_difference": round(statistics.fmean(differences), 5),
        f"{name}_standard_error": None if error is None else round(error, 5),
    }


def row(format: str, runs: list[Curves], base: list[Curves]) -> dict[str, Any]:
    """Returns the row of one format; each seed is compared with the base's. The curve is the mean over the seeds."""
    return {
        "name": format,
        "bound": BOUNDS[format],
        **compared([run.final for run in runs], [run.final for run in base], "final"),
        **compared([run.validation for run in runs], [run.validation for run in base], "validation"),
        "mean_losses": [
            round(statistics.fmean(step), 4) for step in zip(*(run.losses for run in runs), strict=True)
        ],
    }


def _line(row: dict[str, Any]) -> str:
    def column(name: str) -> str:
        error = row[f"{name}_standard_error"]
        return f"{row[f'{name}_difference']:+.2%}" + (
            "" if error is None else f" (standard error {error:.2%})"
        )

    seeds = ", ".join(f"{difference:+.2%}" for difference in row["final_differences"])
    return f"{row['name']:12s} final {column('final')}, validation {column('validation')}; seeds: {seeds}"


def main() -> None:
    """Trains, writes ``results/recipes_<device>.json``, and fails if a recipe's mean exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, default=0, help="ranks per run (default: 1 on a GPU, 2 on a CPU)"
    )
    parser.add_argument("--steps", type=int, default=0, help=f"steps per run (default: {STEPS})")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--jobs", type=int, default=0, help="parallel runs (default: 12 on a GPU, 1 on a CPU)"
    )
    parser.add_argument("--formats", nargs="*", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--options", default="", help="more options of the example, in one string")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = arguments.ranks or (1 if device == "cuda" else 2)
    steps = arguments.steps or STEPS[device]
    jobs = arguments.jobs or (12 if device == "cuda" else 1)
    threads = max(1, len(os.sched_getaffinity(0)) // (jobs * ranks))
    training = Training(ranks, steps, threads, tuple(arguments.options.split()))
    formats = [BASE, *(format for format in arguments.formats if format != BASE)]
    curves = train([(format, seed) for seed in range(arguments.seeds) for format in formats], training, jobs)
    of = {format: [curves[format, seed] for seed in range(arguments.seeds)] for format in formats}
    rows = [row(format, of[format], of[BASE]) for format in formats]
    print("\n".join(map(_line, rows)))
    write("recipes", torch.device(device), rows, ranks=ranks, steps=steps, seeds=arguments.seeds, jobs=jobs)
    far = [row["name"] for row in rows if abs(row["final_difference"]) > row["bound"]]
    if far:
        sys.exit(f"the mean difference from {BASE} over the seeds exceeds the bound: {', '.join(far)}")


if __name__ == "__main__":
    main()
