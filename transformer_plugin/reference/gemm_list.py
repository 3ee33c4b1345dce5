"""What the products with lists of matrices mean: those of their stacks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from transformer_plugin.reference.gemm import grouped_gemm, grouped_gemm_wgrad_out


def grouped_gemm_list(
    a: Tensor,
    b: Iterable[Tensor],
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """grouped_gemm of the stack."""
    stack = torch.stack(list(b))
    return grouped_gemm(a, stack, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows)


def grouped_gemm_wgrad_list_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Iterable[Tensor],
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
) -> None:
    """grouped_gemm_wgrad_out into a stack of them, then each from its place."""
    buffers = list(out)
    stack = torch.stack(buffers)
    grouped_gemm_wgrad_out(grad, input, group_sizes, stack, accumulate, alpha, beta, input_rows)
    for buffer, result in zip(buffers, stack, strict=True):
        buffer.copy_(result)
