"""References of the activation ops. Each function is an entry of :data:`FUNCTIONS`."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ClampedSwiglu:
    """g * sigmoid(alpha * g) * (u + offset) of g = min(gate, limit) and u = clamp(linear, -limit, limit)."""

    limit: float
    alpha: float
    offset: float

    def clamped(self, gate: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
        return gate.clamp(max=self.limit), linear.clamp(-self.limit, self.limit) + self.offset

    def passed(self, grad: Tensor, inside: Tensor) -> Tensor:
        """The gradient of a clamp, which is none without a limit."""
        return grad if self.limit == math.inf else torch.where(inside, grad, 0.0)

    def value(self, gate: Tensor, linear: Tensor) -> Tensor:
        """The activation of float32 parts of an input."""
        g, u = self.clamped(gate, linear)
        return g * torch.sigmoid(self.alpha * g) * u

    def backward(
        self, grad: Tensor, prob: Tensor | float, gate: Tensor, linear: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients of the parts, and the activation; as those of SwiGLU."""
        g, u = self.clamped(gate, linear)
        sigmoid = torch.sigmoid(self.alpha * g)
        activated = g * sigmoid
        of_gate = grad * u * prob * (sigmoid + self.alpha * (activated * (1 - sigmoid)))
        within = (linear >= -self.limit) & (linear <= self.limit)
        gradients = [
            self.passed(of_gate, gate <= self.limit),
            self.passed(grad * activated * prob, within),
        ]
        return gradients, activated * u


class GegluTanh:
    """gelu(gate) * linear, with the approximation of GELU by tanh.

    ``(1 + tanh(z)) / 2`` is ``sigmoid(2 z)``, with which no digits cancel.
    """

    SCALE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715

    @staticmethod
    def sigmoid(gate: Tensor) -> Tensor:
        return torch.sigmoid(GegluTanh.SCALE * (gate + GegluTanh.CUBIC * (gate * gate * gate)))

    @staticmethod
    def value(gate: Tensor, linear: Tensor) -> Tensor:
        """The activation of float32 parts of an input."""
        return gate * GegluTanh.sigmoid(gate) * linear

    @staticmethod
    def backward(
        grad: Tensor, prob: Tensor | float, gate: Tensor, linear: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients of the parts, and the activation.

        Where a square is above 1000 the sigmoid is 0 or 1, and its slope 0: the square is cut off, so that it does not
        overflow.
        """
        sigmoid = GegluTanh.sigmoid(gate)
        gelu = gate * sigmoid
        inner = GegluTanh.SCALE * (1 + 3 * GegluTanh.CUBIC * (gate * gate).clamp(max=1000))
        grad_gate = grad * linear * prob * (sigmoid + gelu * (1 - sigmoid) * inner)
        return [grad_gate, grad * gelu * prob], gelu * linear


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
FUNCTIONS: dict[Function, Any] = {"swiglu": Swiglu, "geglu_tanh": GegluTanh, "relu2": Relu2}


def parsed(activation: str | Activation) -> Activation:
    return activation if isinstance(activation, Activation) else Activation.parse(activation)


def _function_of(activation: Activation) -> Any:
    numbers = (activation.limit, activation.alpha, activation.offset)
    return FUNCTIONS[activation.function] if numbers == _NO_NUMBERS else ClampedSwiglu(*numbers)


_NO_NUMBERS = (math.inf, 1.0, 0.0)


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
    output: Tensor = _function_of(described).value(*_parts(input, described))
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
    gradients, value = _function_of(described).backward(grad, prob, *_parts(input, described))
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
