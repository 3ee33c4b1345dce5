"""Buffers of the caller for the output of a layer and for the gradient of its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_plugin.recipes import DelayedScaling, Recipe


def buffer_of(out: Any) -> Any:
    """A tensor in the memory of ``out`` to which autograd gives the history of one call."""
    # The op refuses what has a gradient of its own, or is no tensor.
    usable = isinstance(out, Tensor) and not out.requires_grad
    return out.detach() if usable else out


def into_buffers(
    layer: str, recipe: Recipe | None, out: Any, dgrad_out: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """What a layer passes to the form of its op with ``_out``: the tensor to write, or None, and other arguments."""
    given = "out" if out is not None else "dgrad_out"
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"transformer_plugin::{layer}: argument '{given}': expected None with DelayedScaling, got a tensor. Use "
            "another recipe, for example Float8CurrentScaling()."
        )
    return buffer_of(out), {} if dgrad_out is None else {"dgrad_out": dgrad_out}
