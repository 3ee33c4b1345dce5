"""Products of the format ``fp8_row``, what ``torch._scaled_grouped_mm`` calls row-wise scaling.

Letters as in :mod:`transformer_plugin.ops.gemm`, whose words on ``group_sizes``, tails, ``alpha`` and
``max_sms`` hold here too. A matrix is FP8 data ``[..., K]`` and float32 scales ``[...]`` as
:func:`~transformer_plugin.ops.quantize` returns them for ``fp8_row``.

The order of operations is the same on CPU and CUDA: an FP32 sum, times the product of both scales, times ``alpha``,
then one fma adds the bias, then one rounding. On Hopper, FP8 data goes straight to WGMMA (bfloat16 output, N % 8 == 0,
K % 16 == 0): sums of 128 products of FP8 tensor cores, added in FP32 (:mod:`transformer_plugin.ops.gemm` has their
accuracy). Elsewhere, and into other dtypes, both operands are converted to a wider type first, exactly, and the sum is
an FP32 sum of exact products; on CUDA the bfloat16 copies and the FP32 sums are then in memory.

There are no row-wise weight gradients: they sum over the rows, so a row's scale is not a factor of the whole sum.
Quantize their operands along columns in ``fp8_tensor`` or ``fp8_block``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.transformer_plugin


def gemm_rowwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``alpha * (a_scale[:, None] * a) @ (b_scale[:, None] * b).T + bias`` of FP8 data.

    Args:
        a, a_scale: ``[M, K]`` float8_e4m3fn or float8_e5m2, and float32 ``[M]``.
        b, b_scale: ``[N, K]`` float8_e4m3fn, and float32 ``[N]``.
        dtype: of the output: float32, bfloat16 or float16.
        alpha: float32 ``[1]``; 1 by default.
        bias: ``[N]``, any float dtype.

    Returns:
        ``[M, N]``. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree.
    """
    return _ops.gemm_rowwise.default(a, a_scale, b, b_scale, dtype=dtype, alpha=alpha, bias=bias)


def grouped_gemm_rowwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_sizes: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> Tensor:
    """:func:`gemm_rowwise` of each group's rows and the group's matrix.

    ``out[i, n] = sum_k(a[i, k] * b[g, n, k]) * (a_scale[i] * b_scale[g, n]) * alpha[g] + bias_scale[i] * bias[g, n]``
    for the rows i of group g.

    Args:
        a, a_scale: ``[T, K]`` float8_e4m3fn or float8_e5m2, and float32 ``[T]``.
        b, b_scale: ``[G, N, K]`` float8_e4m3fn, and float32 ``[G, N]``.
        group_sizes: int32 or int64 ``[G]``.
        dtype: of the output: float32, bfloat16 or float16.
        alpha: float32 ``[G]``; 1 by default.
        bias: ``[G, N]``, any float dtype.
        bias_scale: float32 ``[T]``, a factor of the bias for each row; 1 by default.

    Returns:
        ``[T, N]``, tail rows zero. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree, a scale without a bias, and on a CPU
        group sizes that are negative or sum to more than T.
    """
    return _ops.grouped_gemm_rowwise.default(
        a,
        a_scale,
        b,
        b_scale,
        group_sizes,
        dtype=dtype,
        alpha=alpha,
        bias=bias,
        bias_scale=bias_scale,
        max_sms=max_sms,
        expected_rows=expected_rows,
    )
