"""Buffers of the caller for the output of a layer and for the gradient of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin._arguments import check_strided
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._checks import check_tensor, refuse
from transformer_plugin.tensor._layout import describe


def buffer_of(out: Any) -> Any:
    """A tensor in the memory of ``out`` to which autograd gives the history of one call."""
    # The op refuses what has a gradient of its own, or is no tensor.
    usable = isinstance(out, Tensor) and not out.requires_grad
    return out.detach() if usable else out


def into_buffers(
    layer: str, recipe: Recipe | None, out: Any, dgrad_out: Tensor | None, weight_shard: str = ""
) -> tuple[Any, dict[str, Any]]:
    """What a layer passes to the form of its op with ``_out``: the tensor to write, or None, and other arguments."""
    given = "out" if out is not None else "dgrad_out"
    if isinstance(recipe, DelayedScaling):
        advice = "Use another recipe, for example Float8CurrentScaling()"
        refuse(layer, given, "None with DelayedScaling", "a tensor", advice)
    if out is not None and weight_shard:
        advice = "Copy the output into the buffer"
        refuse(layer, "out", "None with a weight that is sharded over ranks", "a tensor", advice)
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
    check_strided(layer, "input", input)
    buffer = check_tensor(layer, argument, buffer, input.device)
    got, advice = describe(buffer), "Allocate it like 'input'"
    if buffer.dtype != input.dtype:
        refuse(layer, argument, f"a buffer of {input.dtype}, as 'input'", got, advice, TypeError)
    if buffer.shape != input.shape:
        refuse(layer, argument, f"a buffer of the sizes {list(input.shape)} of 'input'", got, advice)
    if buffer.requires_grad:
        got = f"{got} with requires_grad=True"
        refuse(layer, argument, "a tensor with requires_grad=False", got, "Pass buffer.detach()")
    if not torch.compiler.is_compiling() and _overlap(buffer, input):
        got = f"{got} in the same memory"
        refuse(layer, argument, "a buffer apart from 'input'", got, "Pass a separate buffer")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the bytes from first to last element overlap."""
    ranges = []
    for tensor in (x, y):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        ranges.append((begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin))
    (a, b), (c, d) = ranges
    return max(a, c) < min(b, d)
