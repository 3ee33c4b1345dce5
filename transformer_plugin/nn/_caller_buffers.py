"""Buffers of the caller for the output of a layer and for the gradient of its input."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
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


class _GradientInto(torch.autograd.Function):
    """A tensor whose gradient is copied into a buffer, which autograd then passes on."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.buffer.copy_(grads[0]), None


def with_gradient_into(layer: str, input: Tensor, dgrad_out: Any) -> Tensor:
    """The input of a layer whose backward makes the gradient in memory of its own: it is copied into ``dgrad_out``."""

    def refuse(expected: str, got: str, advice: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(
            f"transformer_plugin::{layer}: argument 'dgrad_out': expected {expected}, got {got}. {advice}."
        )

    if not isinstance(dgrad_out, Tensor):
        refuse("a tensor", type(dgrad_out).__name__, "Pass a tensor, or leave it out", TypeError)
    got = f"{dgrad_out.dtype} {list(dgrad_out.shape)} on {dgrad_out.device}"
    if dgrad_out.dtype != input.dtype:
        refuse(f"{input.dtype}, as 'input'", got, "Allocate it in this dtype", TypeError)
    if dgrad_out.shape != input.shape or dgrad_out.device != input.device:
        refuse(
            f"a buffer of the sizes {list(input.shape)} of 'input' on {input.device}", got, "Allocate it so"
        )
    if not dgrad_out.is_contiguous():
        refuse("a contiguous tensor", f"{got} with strides {list(dgrad_out.stride())}", "Pass one")
    if dgrad_out.requires_grad:
        refuse("a tensor with requires_grad=False", f"{got} with requires_grad=True", "Pass buffer.detach()")
    if not torch.compiler.is_compiling() and _overlap(dgrad_out, input):
        refuse("a buffer apart from 'input'", f"{got} in the same memory", "Pass a separate buffer")
    watched: Tensor = _GradientInto.apply(input, dgrad_out)
    return watched


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the bytes from first to last element overlap."""
    ranges = []
    for tensor in (x, y):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        ranges.append((begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin))
    (a, b), (c, d) = ranges
    return max(a, c) < min(b, d)
