"""References of the layers that write into buffers of the caller. Operands are not quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin.ops._operands import Tensors
from transformer_plugin.reference.grouped_mlp import grouped_mlp
from transformer_plugin.reference.linear import grouped_linear, linear

__all__ = [
    "grouped_linear_out",
    "grouped_mlp_out",
    "linear_out",
]


class _GradientInto(torch.autograd.Function):
    """A tensor whose gradient is written into a buffer, which autograd then gets."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.buffer.copy_(grad).detach(), None


def watched_input(input: Tensor, dgrad_out: Tensor | None) -> Tensor:
    """The input of a layer, whose gradient goes into a buffer if there is one."""
    if dgrad_out is None:
        return input
    watched: Tensor = _GradientInto.apply(input, dgrad_out)
    return watched


def linear_out(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    dgrad_out: Tensor | None = None,
    **options: Any,
) -> None:
    """``out`` becomes the output of :func:`linear`, with its gradient."""
    out.copy_(linear(watched_input(input, dgrad_out), weight, bias, **options))


def grouped_linear_out(
    input: Tensor,
    weight: Tensors,
    group_sizes: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    dgrad_out: Tensor | None = None,
    **options: Any,
) -> None:
    """``out`` becomes the output of :func:`grouped_linear`, with its gradient."""
    out.copy_(
        grouped_linear(watched_input(input, dgrad_out), weight, group_sizes, bias, bias_scale, **options)
    )


def grouped_mlp_out(
    input: Tensor,
    fc1_weight: Tensors,
    fc2_weight: Tensors,
    group_sizes: Tensor,
    probs: Tensor,
    out: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    dgrad_out: Tensor | None = None,
    slot: Tensor | None = None,
    source: Tensor | None = None,
    **options: Any,
) -> None:
    """``out`` becomes the output of :func:`grouped_mlp`, with its gradient."""
    watched, biases = watched_input(input, dgrad_out), (fc1_bias, fc2_bias)
    options.update(slot=slot, source=source)
    out.copy_(grouped_mlp(watched, fc1_weight, fc2_weight, group_sizes, probs, *biases, **options))
