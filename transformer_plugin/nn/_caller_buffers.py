"""Buffers of the caller for the output of a layer and for the gradient of its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_plugin.recipes import DelayedScaling, Recipe


def into_buffers(
    layer: str, recipe: Recipe | None, out: Any, dgrad_out: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """What a layer passes to the form of its op with ``_out``: a tensor in the memory of ``out``, and other arguments.

    Autograd gives the op's history to the tensor that is passed, and each call has its own. The first result is None
    without ``out``.
    """
    given = "out" if out is not None else "dgrad_out" if dgrad_out is not None else None
    if given and isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"transformer_plugin::{layer}: argument '{given}': expected None with DelayedScaling, got a tensor. Use "
            "another recipe, for example Float8CurrentScaling()."
        )
    options = {} if dgrad_out is None else {"dgrad_out": dgrad_out}
    # The op refuses what has a gradient of its own, or is no tensor.
    usable = isinstance(out, Tensor) and not out.requires_grad
    return out.detach() if usable else out, options
