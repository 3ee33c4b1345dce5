"""Trains the plain PyTorch model and this package's with the same weights and data, alternating step by step."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from moe_lm.config import Config, Options
from moe_lm.run import claim_folder, describe, load_text, say
from moe_lm.stopping import EVALUATING, STEP, StopRequest
from moe_lm.trainer import Trainer, about_compiling
from moe_lm.world import World

NAMES = ("plain PyTorch", "transformer_plugin")
WARM_UP = 3  # steps that are not timed


def compare(config: Config, options: Options, world: World, stop: StopRequest) -> dict[str, Any]:
    """Trains both for ``config.steps`` steps, plots both curves, prints their difference and both speeds.

    The order within a step alternates, so that neither always runs with warm caches.
    """
    corpus = load_text(config, options, world)
    owned = claim_folder(Path(options.out), config, world, options.preset)
    trainers = [
        Trainer(config.in_plain_pytorch(), world, corpus),
        Trainer(replace(config, reference=False), world, corpus),
    ]
    if world.first:
        say("\n".join(describe(trainer.config, trainer) for trainer in trainers))
        if config.compile:
            say(about_compiling(trainers[1].config))
    curves: list[list[torch.Tensor]] = [[], []]
    seconds: list[list[float]] = [[], []]
    steps = tqdm(
        range(config.steps), unit="step", disable=not world.first, dynamic_ncols=True, file=sys.stderr
    )
    for step in steps:
        for which in (0, 1) if step % 2 == 0 else (1, 0):
            world.meet()
            stop.during(STEP)
            start = time.perf_counter()
            curves[which].append(trainers[which].step(step, stop.requested))
            world.synchronize()
            seconds[which].append(time.perf_counter() - start)
            stop.done()
        if float(curves[0][-1][2]) > 0:
            break
        if world.first and step % 10 == 9:
            steps.set_postfix_str("losses " + ", ".join(f"{float(curve[-1][0]):.4f}" for curve in curves))
    stop.during(EVALUATING)
    losses = [[float(numbers[0]) for numbers in curve] for curve in curves]
    speeds = [trainers[0].tokens_per_step / statistics.median(times[WARM_UP:] or times) for times in seconds]
    gaps = [abs(a - b) for a, b in zip(*losses, strict=True)]
    tail = max(1, len(gaps) // 10)
    final = [sum(curve[-tail:]) / tail for curve in losses]
    report = {
        "steps": len(gaps),
        "losses": dict(zip(NAMES, losses, strict=True)),
        "validation_losses": dict(zip(NAMES, [t.evaluate() for t in trainers], strict=True)),
        "final_losses": dict(zip(NAMES, final, strict=True)),
        "largest_difference": max(gaps),
        "largest_difference_at": gaps.index(max(gaps)) + 1,
        "final_difference": final[1] / final[0] - 1,
        "tokens_per_step": trainers[0].tokens_per_step,
        "step_seconds": dict(zip(NAMES, seconds, strict=True)),
        "tokens_per_second": dict(zip(NAMES, speeds, strict=True)),
        "speed_ratio": speeds[1] / speeds[0],
    }
    if owned is not None:
        (owned.out / "compare.json").write_text(json.dumps(report) + "\n")
        _show(report, trainers[1], owned.out)
    return report


def _show(report: dict[str, Any], trainer: Trainer, out: Path) -> None:
    from moe_lm.plots import compare_curves

    compare_curves(out / "compare.png", report["losses"], describe(trainer.config, trainer))
    for name in NAMES:
        final, validation = report["final_losses"][name], report["validation_losses"][name]
        say(
            f"{name:>20}: {final:.4f} nats/byte over the last tenth of the steps, validation "
            f"{validation:.4f}, {report['tokens_per_second'][name]:,.0f} tokens/s"
        )
    say(
        f"largest loss difference: {report['largest_difference']:.2e} at step "
        f"{report['largest_difference_at']}; over the last tenth {report['final_difference']:+.3%}; "
        f"speed {report['speed_ratio']:.3f} x plain PyTorch"
    )
    for name in ("compare.png", "compare.json"):
        say(f"  {out / name}")
