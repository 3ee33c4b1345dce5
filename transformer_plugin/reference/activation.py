"""What the activation ops mean."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(input: Tensor, probs: Tensor | None = None) -> Tensor:
    """silu(gate) * linear * probs in float32, rounded once."""
    gate, linear = input.float().chunk(2, dim=-1)
    output = torch.nn.functional.silu(gate) * linear
    if probs is not None:
        output = output * probs[:, None]
    return output.to(input.dtype)


def swiglu_backward(grad: Tensor, input: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The chain rule by hand: slope of silu(a) is s + a s (1 - s) with s = sigmoid(a)."""
    gate, linear = input.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    scaled = grad.float() if probs is None else grad.float() * probs[:, None]
    grad_gate = scaled * linear * (sigmoid + silu * (1 - sigmoid))
    grad_input = torch.cat([grad_gate, scaled * silu], dim=-1).to(input.dtype)
    if probs is None:
        return grad_input, torch.empty(0, dtype=torch.float32, device=input.device)
    return grad_input, (grad.float() * silu * linear).sum(-1)
