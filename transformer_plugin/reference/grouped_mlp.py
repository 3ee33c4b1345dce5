"""Reference of the experts' op: its steps in sequence."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.reference.activation import swiglu
from transformer_plugin.reference.gemm import grouped_linear

__all__ = [
    "grouped_mlp",
]


def grouped_mlp(
    input: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
) -> Tensor:
    """A product, SwiGLU times probability, and a product whose bias is multiplied by the probability. Operands are
    not quantized."""
    activation = swiglu(grouped_linear(input, fc1_weight, group_sizes, fc1_bias), probs)
    return grouped_linear(activation, fc2_weight, group_sizes, fc2_bias, None if fc2_bias is None else probs)
