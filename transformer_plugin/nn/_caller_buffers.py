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
    check_buffer(layer, "dgrad_out", dgrad_out, input)
    watched: Tensor = _GradientInto.apply(input, dgrad_out)
    return watched


def copied_into(output: Tensor, out: Tensor) -> Tensor:
    """An output that a layer makes in memory of its own, in the memory of ``out``, with its gradient."""
    copy: Tensor = buffer_of(out)
    return copy.copy_(output)


def check_buffer(layer: str, argument: str, buffer: Any, input: Tensor) -> None:
    """Refuses what does not have the sizes, dtype and device of the input, or lies in its memory."""

    def refuse(expected: str, got: str, advice: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(
            f"transformer_plugin::{layer}: argument '{argument}': expected {expected}, got {got}. {advice}."
        )

    if not isinstance(buffer, Tensor):
        refuse("a tensor", type(buffer).__name__, "Pass a tensor, or leave it out", TypeError)
    got = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
    if buffer.dtype != input.dtype:
        refuse(f"{input.dtype}, as 'input'", got, "Allocate it in this dtype", TypeError)
    if buffer.shape != input.shape or buffer.device != input.device:
        refuse(
            f"a buffer of the sizes {list(input.shape)} of 'input' on {input.device}", got, "Allocate it so"
        )
    if not buffer.is_contiguous():
        refuse("a contiguous tensor", f"{got} with strides {list(buffer.stride())}", "Pass one")
    if buffer.requires_grad:
        refuse("a tensor with requires_grad=False", f"{got} with requires_grad=True", "Pass buffer.detach()")
    if not torch.compiler.is_compiling() and _overlap(buffer, input):
        refuse("a buffer apart from 'input'", f"{got} in the same memory", "Pass a separate buffer")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the bytes from first to last element overlap."""
    ranges = []
    for tensor in (x, y):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        ranges.append((begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin))
    (a, b), (c, d) = ranges
    return max(a, c) < min(b, d)
