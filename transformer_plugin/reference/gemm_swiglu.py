"""References of the products with a SwiGLU epilogue: their steps in sequence, with zeros in the rows past the
groups."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference import activation
from transformer_plugin.reference.gemm import grouped_gemm
from transformer_plugin.reference.quantize import quantize

__all__ = [
    "grouped_gemm_swiglu",
    "grouped_gemm_swiglu_quantize",
]


def halves_apart(h: Tensor, interleave: int) -> Tensor:
    """All columns of the gate first."""
    return h.unflatten(1, (-1, 2, interleave)).transpose(1, 2).flatten(1) if interleave else h


def _before_tail(rows: Tensor, group_sizes: Tensor) -> Tensor:
    index = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((index < group_sizes.sum()).view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)


def grouped_gemm_swiglu(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    interleave: int = 0,
    keep_input: bool = True,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """swiglu(h, probs) of h = a_g @ b[g].T + bias[g], and h."""
    h = grouped_gemm(a, b, group_sizes, bias, rows=rows)
    act = activation.swiglu(halves_apart(h, interleave), probs)
    return _before_tail(act, group_sizes), h if keep_input else h[:0]


def grouped_gemm_swiglu_quantize(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    interleave: int = 0,
    keep_input: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """swiglu(h, probs) of h = a_g @ b[g].T + bias[g], quantized along rows, and h."""
    act, h = grouped_gemm_swiglu(a, b, group_sizes, probs, bias, interleave, keep_input)
    data, scale_inv = quantize(act, format, group_sizes)
    return data, scale_inv, h
