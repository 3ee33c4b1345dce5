"""Counts the steps of torch's optimizers, for quantized copies of weights that must not outlive one."""

from __future__ import annotations

import itertools
from typing import Any

import torch

#: An attribute of parameters that a captured step changes whenever the CUDA graph is replayed.
CHANGED_BY_GRAPHS = "_changed_by_graphs"


class OptimizerSteps:
    """The count of the steps of every ``torch.optim.Optimizer`` of the process.

    torch has hooks of one optimizer, which has to be known, and hooks of all. A layer does not know which optimizer
    steps its weight, so these are of all. They are registered once, when the first layer keeps its quantized weight,
    and hold no layer and no weight. A step counts at its beginning and at its end: what is quantized within it, in a
    closure or a hook, is not that of the weight after it, and a step that raises an error may have changed weights.
    """

    def __init__(self) -> None:
        self._counts = itertools.count(1)  # of several threads, none gets the number of another
        self._count = 0
        # Set by compiled code, which would be compiled again for each count that it reads. torch does not count what
        # a fused kernel writes in it either.
        self.compiled_step = False
        self._is_watching = False

    def count(self) -> int:
        """How often everything may have changed."""
        if self.compiled_step:
            self.compiled_step = False
            self.advance()
        return self._count

    def advance(self) -> None:
        """Everything may have changed."""
        self._count = next(self._counts)

    def watch(self) -> None:
        """From now on steps count."""
        if self._is_watching:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._is_watching = True
        register_optimizer_step_pre_hook(_count_step)
        register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        STEPS.compiled_step = True
        return
    STEPS.advance()
    _note_capture(optimizer)


def _note_capture(optimizer: torch.optim.Optimizer) -> None:
    """Nothing tells when a captured step runs: its parameters are quantized in every forward from now on."""
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    if not any(p.is_cuda for p in parameters[:1]) or not torch.cuda.is_current_stream_capturing():
        return
    for parameter in parameters:
        setattr(parameter, CHANGED_BY_GRAPHS, True)


#: The one of the process.
STEPS = OptimizerSteps()
