"""References of the activation ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.reference._rows import before_tail

__all__ = [
    "swiglu",
    "swiglu_backward",
]


def halves_apart(h: Tensor, interleave: int) -> Tensor:
    """All columns of the gate first."""
    return h.unflatten(1, (-1, 2, interleave)).transpose(1, 2).flatten(1) if interleave else h


def swiglu(
    input: Tensor, probs: Tensor | None = None, group_sizes: Tensor | None = None, interleave: int = 0
) -> Tensor:
    """silu(gate) * linear * probs in float32, rounded once. Rows past the groups, which the op leaves out, are 0."""
    gate, linear = halves_apart(input.float(), interleave).chunk(2, dim=-1)
    output = F.silu(gate) * linear
    if probs is not None:
        output = output * probs[:, None]
    return before_tail(output.to(input.dtype), group_sizes)


def swiglu_backward(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    interleave: int = 0,
) -> tuple[Tensor, Tensor]:
    """The chain rule, written out: the slope of silu(a) is s + a s (1 - s) with s = sigmoid(a). The order of the
    factors is that of the op, where a product of two factors may overflow or underflow float32. Past the groups both
    are 0, of which the op does not write the first."""
    gate, linear = halves_apart(input.float(), interleave).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    prob = 1.0 if probs is None else probs[:, None]
    grad_gate = grad.float() * linear * prob * (sigmoid + silu * (1 - sigmoid))
    both = [grad_gate, grad.float() * silu * prob]
    if interleave:
        grad_input = torch.stack([part.unflatten(1, (-1, interleave)) for part in both], dim=2).flatten(1)
    else:
        grad_input = torch.cat(both, dim=-1)
    grad_input = grad_input.to(input.dtype)
    grad_input = before_tail(grad_input, group_sizes)
    if probs is None:
        return grad_input, torch.empty(0, dtype=torch.float32, device=input.device)
    return grad_input, before_tail(row_sums(grad.float() * (silu * linear)), group_sizes)


def row_sums(terms: Tensor) -> Tensor:
    """Float32 sums of rows in the order of the ops: a tree over each 128 columns that adds neighbors, and then the
    results in order."""
    tiles = F.pad(terms, (0, -terms.shape[1] % 128)).unflatten(1, (-1, 128))
    while tiles.shape[-1] > 1:
        tiles = tiles[..., 0::2] + tiles[..., 1::2]
    sums = terms.new_zeros(terms.shape[0])
    for tile in tiles.squeeze(-1).unbind(1):
        sums = sums + tile
    return sums
