"""References of the activation ops. Each function is an entry of :data:`FUNCTIONS`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.activations import Activation, Function
from transformer_plugin.reference._rows import before_tail

__all__ = [
    "activation",
    "activation_backward",
]


class Swiglu:
    """silu(gate) * linear."""

    @staticmethod
    def value(gate: Tensor, linear: Tensor) -> Tensor:
        """The activation of float32 parts of an input."""
        return F.silu(gate) * linear

    @staticmethod
    def backward(
        grad: Tensor, prob: Tensor | float, gate: Tensor, linear: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients of the parts, and the activation, of which the probability's gradient is made.

        The chain rule, written out: the slope of silu(a) is s + a s (1 - s) with s = sigmoid(a). The order of the
        factors is that of the op, where a product of two factors may overflow or underflow float32.
        """
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_gate = grad * linear * prob * (sigmoid + silu * (1 - sigmoid))
        return [grad_gate, grad * silu * prob], silu * linear


class Relu2:
    """relu(x) squared; a NaN stays one, and relu(-0) is 0, which torch leaves open."""

    @staticmethod
    def relu(x: Tensor) -> Tensor:
        return torch.where(x <= 0, 0.0, x)

    @staticmethod
    def value(x: Tensor) -> Tensor:
        """The activation of a float32 input."""
        return Relu2.relu(x).square()

    @staticmethod
    def backward(grad: Tensor, prob: Tensor | float, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradient of the input, and the activation."""
        positive = Relu2.relu(x)
        return [grad * prob * (positive + positive)], positive.square()


#: The value and the gradients of each function, of as many parts as its input has.
FUNCTIONS: dict[Function, Any] = {"swiglu": Swiglu, "relu2": Relu2}


def parsed(activation: str | Activation) -> Activation:
    return activation if isinstance(activation, Activation) else Activation.parse(activation)


def halves_apart(h: Tensor, activation: str | Activation) -> Tensor:
    """All columns of the gate first."""
    interleave = parsed(activation).interleave
    return h.unflatten(1, (-1, 2, interleave)).transpose(1, 2).flatten(1) if interleave else h


def _parts(input: Tensor, activation: Activation) -> tuple[Tensor, ...]:
    """The gate and the linear part, or all of an input without a gate, in float32."""
    if not activation.traits.gated:
        return (input.float(),)
    return halves_apart(input.float(), activation).chunk(2, dim=-1)


def _together(parts: list[Tensor], activation: Activation) -> Tensor:
    """The columns of the parts in the order of the input."""
    interleave = activation.interleave
    if interleave:
        return torch.stack([part.unflatten(1, (-1, interleave)) for part in parts], dim=2).flatten(1)
    return torch.cat(parts, dim=-1)


def activation(
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    activation: str | Activation = "swiglu",
) -> Tensor:
    """The function times probs in float32, rounded once. Rows past the groups, which the op leaves out, are 0."""
    described = parsed(activation)
    output: Tensor = FUNCTIONS[described.function].value(*_parts(input, described))
    if probs is not None:
        output = output * probs[:, None]
    return before_tail(output.to(input.dtype), group_sizes)


def activation_backward(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor]:
    """The function's gradients. Past the groups both are 0, of which the op does not write the first."""
    described, grad = parsed(activation), grad.float()
    prob = 1.0 if probs is None else probs[:, None]
    gradients, value = FUNCTIONS[described.function].backward(grad, prob, *_parts(input, described))
    grad_input = before_tail(_together(gradients, described).to(input.dtype), group_sizes)
    if probs is None:
        return grad_input, torch.empty(0, dtype=torch.float32, device=input.device)
    return grad_input, before_tail(row_sums(grad * value), group_sizes)


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
