"""References of the products with an activation in the epilogue: their steps in sequence, with zeros in the rows past
the groups."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.activations import Activation
from transformer_plugin.formats import Format
from transformer_plugin.reference import activations
from transformer_plugin.reference.activations import halves_apart as halves_apart
from transformer_plugin.reference.gemm import grouped_gemm
from transformer_plugin.reference.quantize import quantize

__all__ = [
    "grouped_gemm_activation",
    "grouped_gemm_activation_quantize",
]


def grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation = "swiglu",
    keep_input: bool = True,
    rows: Tensor | None = None,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """activation(h, probs) of h = a_g @ b[g].T + bias[g], and h. Rows past the groups are 0, with and without
    ``zero_tail``."""
    h = grouped_gemm(a, b, group_sizes, bias, rows=rows)
    act = activations.activation(h, probs, group_sizes, activation)
    return act, h if keep_input else h[:0]


def grouped_gemm_activation_quantize(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation = "swiglu",
    keep_input: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """activation(h, probs) of h = a_g @ b[g].T + bias[g], quantized along rows, and h."""
    act, h = grouped_gemm_activation(a, b, group_sizes, probs, bias, activation, keep_input)
    data, scale_inv = quantize(act, format, group_sizes)
    return data, scale_inv, h
