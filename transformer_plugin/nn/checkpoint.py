"""Activation checkpointing that keeps the scales of delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor


class Scales:
    """Which scales the delayed layers of one function took: call by call of each layer, in one forward."""

    def __init__(self) -> None:
        self._taken: dict[torch.nn.Module, list[Tensor]] = {}
        self._given: dict[torch.nn.Module, int] = {}
        self._replays = False

    @contextmanager
    def of_this_run(self) -> Iterator[None]:
        """The first run takes notes, those after it read them."""
        self._given = {}
        token = _runs.set((*_runs.get(), self))
        try:
            yield
        finally:
            _runs.reset(token)
            self._replays = True

    def note(self, layer: torch.nn.Module, scale: Tensor) -> None:
        """Of the next call of the layer."""
        self._taken.setdefault(layer, []).append(scale)

    def next(self, layer: torch.nn.Module) -> Tensor:
        """Of the next call of the layer in a run after the first."""
        call = self._given.get(layer, 0)
        taken = self._taken.get(layer, [])
        if call == len(taken):
            raise RuntimeError(
                f"transformer_plugin.checkpoint: argument 'function': expected to call {type(layer).__name__} "
                f"{call} times, as in its forward, got one more when it ran again. Let it do the same each time."
            )
        self._given[layer] = call + 1
        return taken[call]


#: Of the functions that this thread is running under :func:`checkpoint`, the outer first.
_runs: ContextVar[tuple[Scales, ...]] = ContextVar("transformer_plugin_checkpoints", default=())


def scales_of(layer: torch.nn.Module, find: Callable[[], Tensor]) -> Tensor:
    """Of this call of a delayed layer: those of the forward if that runs again, else what ``find`` gives."""
    runs = _runs.get()
    if not runs:
        return find()
    replays = [run for run in runs if run._replays]
    scale = replays[-1].next(layer) if replays else find()
    for run in runs[runs.index(replays[-1]) + 1 if replays else 0 :]:
        run.note(layer, scale)
    return scale


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that keeps the scales of its forward.

    A layer with :class:`~transformer_plugin.recipes.DelayedScaling` updates its scales in every forward in training.
    Recomputed in the backward, it uses the scales of its first run and does not update: outputs, gradients and state
    have the bits of a run without checkpointing, with any number of forwards before the first backward and layers used
    any number of times. With torch's own function that holds only if each layer's backward comes before its next
    forward. The saved scales take 12 bytes for a ``Linear``. Calls may be nested.

    Args:
        function: is recomputed in the backward.
        args, kwargs: of the function, and the options of torch's.
        use_reentrant: as in torch's; False is what torch recommends.

    Returns:
        The result of the function.

    In code that ``torch.compile`` compiles it is torch's own, and the compiler saves the scales. A compiled function
    that is called through it in eager code uses the current scales when it is recomputed, as with torch's own.
    """
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    scales = Scales()

    def run(*args: Any, **kwargs: Any) -> Any:
        with scales.of_this_run():
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
