"""Activation checkpointing that reuses the scales of the first forward with delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from transformer_plugin._arguments import class_name, typed


class Scales:
    """The scales that the layers of one checkpointed function used in its first forward, per layer and call."""

    def __init__(self) -> None:
        self._taken: dict[torch.nn.Module, list[Tensor]] = {}
        self._calls: dict[torch.nn.Module, int] = {}
        self._replays = False

    @contextmanager
    def of_this_run(self) -> Iterator[None]:
        """Context of one run of the function: the first run records scales, later runs read them."""
        self._calls = {}
        token = _runs.set((*_runs.get(), self))
        try:
            yield
        finally:
            _runs.reset(token)
            self._replays = True

    def note(self, layer: torch.nn.Module, scale: Tensor) -> None:
        """Records the scales of the layer's next call, in the first run."""
        self._taken.setdefault(layer, []).append(scale)

    def next(self, layer: torch.nn.Module) -> Tensor:
        """Returns the recorded scales of the layer's next call, in a later run."""
        call = self._calls.get(layer, 0)
        taken = self._taken.get(layer, [])
        if call == len(taken):
            raise RuntimeError(
                f"transformer_plugin.checkpoint: argument 'function': expected to call {class_name(layer)} "
                f"{call} times, as in its first forward, got one more call when it was recomputed. Make the function "
                "deterministic."
            )
        self._calls[layer] = call + 1
        return taken[call]


#: The functions that this thread runs under :func:`checkpoint`, outermost first.
_runs: ContextVar[tuple[Scales, ...]] = ContextVar("transformer_plugin_checkpoints", default=())


def scales_of(layer: torch.nn.Module, find: Callable[[], Tensor]) -> Tensor:
    """Returns the scales of this call of a layer: the recorded ones in a recomputation, otherwise ``find()``."""
    runs = _runs.get()
    if not runs:
        return find()
    replays = [run for run in runs if run._replays]
    scale = replays[-1].next(layer) if replays else find()
    for run in runs[runs.index(replays[-1]) + 1 if replays else 0 :]:
        run.note(layer, scale)
    return scale


@typed
def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that reuses the scales of the first forward.

    A layer with :class:`~transformer_plugin.recipes.DelayedScaling` updates its scales in every training forward.
    When the function is recomputed in the backward, the layer uses the scales of its first run and does not update.
    Outputs, gradients and state then have the same bits as without checkpointing, for any number of forwards before
    the first backward and any number of calls of a layer. With torch's own function that is true only if each layer's
    backward comes before its next forward. The saved scales take 12 bytes for a ``Linear``. Calls may be nested.

    Args:
        function: the function to recompute in the backward.
        args, kwargs: arguments of the function, and options of torch's checkpoint function.
        use_reentrant: as in torch's checkpoint function; torch recommends False.

    Returns:
        The result of the function.

    Raises:
        TypeError: no function.

    In code that ``torch.compile`` compiles this is torch's own function, and the compiler saves the scales. If eager
    code calls a compiled function through it, the recomputation uses the current scales, as with torch's own function.
    """
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    scales = Scales()

    def run(*args: Any, **kwargs: Any) -> Any:
        with scales.of_this_run():
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
