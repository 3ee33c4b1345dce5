"""Dispatch and combine whose results and gradients are in tensors of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.ops import expert_parallel as ops


class DispatchInto(torch.autograd.Function):
    """Dispatch into the caller's tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        recv: Tensor,
        recv_weights: Tensor,
        slot: Tensor,
        source: Tensor,
        received: Tensor | None,
        position: Tensor | None,
        name: str,
        timeout_ms: int,
    ) -> tuple[Tensor, Tensor]:
        for_tokens, for_weights, *_ = ctx.needs_input_grad
        group = (name, timeout_ms, int(for_tokens) + 2 * int(for_weights))
        ops.dispatch_out(tokens, weights, slot, source, recv, recv_weights, *group, received, position)
        ctx.save_for_backward(slot, received, position)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.dtype = tuple(tokens.shape), tokens.dtype
        ctx.wanted, ctx.group = (for_tokens, for_weights), (name, timeout_ms)
        return recv.detach(), recv_weights.detach()

    @staticmethod
    def backward(ctx: Any, grad_recv: Tensor | None, grad_weights: Tensor | None) -> tuple[Any, ...]:
        slot, received, position = ctx.saved_tensors
        (for_tokens, for_weights), (name, timeout_ms) = ctx.wanted, ctx.group
        of_tokens, of_weights = ops.dispatch_backward(
            grad_recv if for_tokens else None,
            grad_weights if for_weights else None,
            slot,
            ctx.sizes[0],
            ctx.sizes[1],
            ctx.dtype,
            for_tokens,
            for_weights,
            name,
            timeout_ms,
            received=received,
            position=position,
        )
        return (of_tokens if for_tokens else None, of_weights if for_weights else None, *[None] * 8)


class CombineGradInto(torch.autograd.Function):
    """Combine, whose backward writes the gradient into the caller's tensor, or into ``new_target(shape, grad)``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        target: Tensor | None,
        new_target: Callable[[tuple[int, int], Tensor], Tensor],
        num_tokens: int,
        slot: Tensor,
        source: Tensor,
        received: Tensor | None,
        position: Tensor | None,
        name: str,
        timeout_ms: int,
    ) -> Tensor:
        ctx.save_for_backward(slot, source, received, position)
        # Not a saved tensor: torch checks the versions of those, but a second backward may write to the target again.
        ctx.target, ctx.new_target = target, new_target
        ctx.group = (name, timeout_ms)
        grads_needed = int(ctx.needs_input_grad[0])
        group = (name, timeout_ms, grads_needed)
        return ops.combine(rows, slot, source, num_tokens, *group, received=received, position=position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        slot, source, received, position = ctx.saved_tensors
        name, timeout_ms = ctx.group
        target = ctx.target
        if target is None:
            target = ctx.new_target((len(source), grad.shape[1]), grad)
        ops.combine_backward_out(grad, slot, source, target, name, timeout_ms, received, position)
        return (target, *[None] * 9)
