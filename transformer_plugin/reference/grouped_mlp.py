"""Reference of the experts' op: its steps in sequence."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.ops._operands import Tensors
from transformer_plugin.reference.activation import swiglu
from transformer_plugin.reference.gemm import grouped_linear

__all__ = [
    "grouped_mlp",
]


def grouped_mlp(
    input: Tensor,
    fc1_weight: Tensors,
    fc2_weight: Tensors,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    fc1_main_grad: Tensors | None = None,
    fc2_main_grad: Tensors | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
) -> Tensor:
    """A product, SwiGLU times probability, and a product whose bias is multiplied by the probability. Operands are
    not quantized."""
    options = (accumulate, weight_grad)
    linear = grouped_linear(input, fc1_weight, group_sizes, fc1_bias, None, fc1_main_grad, *options)
    scale = None if fc2_bias is None else probs
    return grouped_linear(
        swiglu(linear, probs), fc2_weight, group_sizes, fc2_bias, scale, fc2_main_grad, *options
    )
