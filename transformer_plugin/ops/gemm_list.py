"""Grouped products whose matrices are separate tensors, for example experts that are separate parameters.

The ops of :mod:`transformer_plugin.ops.gemm` and :mod:`transformer_plugin.ops.gemm_out` with a list of G matrices in
place of one tensor ``[G, .., ..]``, with the letters and rules of those pages. The matrices may be anywhere in
memory, have one shape and one dtype, and are not copied (quantized ones on some devices: see the op): on CUDA a small
launch before the product writes their addresses where its kernel finds them. The addresses are arguments of that
launch, which is why a list has at most 1024 matrices. Where the matrices are equally spaced views of one tensor, the
product is that of the tensor.

A CUDA graph keeps the addresses that it was captured with. Contents and sizes may change between replays; a matrix that
has moved, for example a parameter whose ``data`` was replaced, is not followed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ops = torch.ops.transformer_plugin


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
    max_sms: int = 0,
    expected_rows: int = -1,
) -> Tensor:
    """:func:`~transformer_plugin.ops.grouped_gemm` with the groups' matrices as a list.

    Args:
        a: ``[T, K]`` float32, bfloat16 or float16; float64 on a CPU.
        b: 1 to 1024 matrices ``[N, K]``, or ``[K, N]`` when not ``transpose_b``, one for each group, all of one shape,
            in the dtype of ``a``. One that is not contiguous is copied first on CUDA.
        group_sizes, bias, bias_scale, dtype, alpha, rows, max_sms, expected_rows: as for
            :func:`~transformer_plugin.ops.grouped_gemm`.

    Returns:
        ``[T, N]``, tail rows zero. Differentiable in ``a``, every matrix of ``b``, ``bias`` and ``bias_scale``. The
        gradients of the matrices are views of one tensor.

    Raises:
        TypeError: another dtype. ValueError: no matrix or more than 1024, and as
        :func:`~transformer_plugin.ops.grouped_gemm`.
    """
    return _ops.grouped_gemm_list.default(
        a, list(b), group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows, max_sms, expected_rows
    )


def grouped_gemm_quantized_list(
    a: Tensor,
    a_scale: Tensor,
    b: Iterable[Tensor],
    b_scale: Iterable[Tensor],
    group_sizes: Tensor,
    a_format: str,
    b_format: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    a_amax: Tensor | None = None,
    b_amax: Iterable[Tensor] | None = None,
    alpha: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> Tensor:
    """:func:`~transformer_plugin.ops.grouped_gemm_quantized` with the groups' matrices as a list.

    Args:
        b, b_scale: 1 to 1024 matrices ``[N, K]``, or ``[K, N]`` when not ``transpose_b``, each quantized separately in
            ``b_format``, as :func:`~transformer_plugin.ops.quantize` or :func:`~transformer_plugin.ops.quantize_list`
            gives them; all of one shape, and as many scales.
        b_amax: of ``nvfp4``, what each matrix was quantized with; none for the other formats.
        a, a_scale, group_sizes, a_format, dtype, bias, bias_scale, transpose_b, a_amax, alpha, max_sms, expected_rows:
            as for :func:`~transformer_plugin.ops.grouped_gemm_quantized`.

    Returns:
        ``[T, N]``, tail rows zero: the bits of :func:`~transformer_plugin.ops.grouped_gemm_quantized` with the matrices
        as one tensor. Not differentiable.

    On CUDA the scales, which are small, are concatenated. Quantized data is concatenated too (a byte per element, half
    a byte in ``nvfp4``), except for ``fp8_block`` and ``fp8_tensor`` on Hopper, which take pointers, and where the
    matrices are consecutive views of one tensor. A CPU copies nothing and dequantizes one matrix at a time.

    Raises:
        TypeError: another dtype. ValueError: no matrix or more than 1024, another number of scales or amaxes, and as
        :func:`~transformer_plugin.ops.grouped_gemm_quantized`.
    """
    return _ops.grouped_gemm_quantized_list.default(
        a,
        a_scale,
        list(b),
        list(b_scale),
        group_sizes,
        a_format,
        b_format,
        dtype,
        bias,
        bias_scale,
        transpose_b,
        a_amax,
        None if b_amax is None else list(b_amax),
        alpha,
        max_sms,
        expected_rows,
    )


def grouped_gemm_wgrad_list_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Iterable[Tensor],
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> None:
    """:func:`~transformer_plugin.ops.grouped_gemm_wgrad_out` into a list of buffers, one for each group.

    Args:
        grad, input, group_sizes, accumulate, alpha, beta, input_rows, max_sms, expected_rows: as for
            :func:`~transformer_plugin.ops.grouped_gemm_wgrad_out`.
        out: 1 to 1024 matrices ``[N, K]``, all float32 or all bfloat16, the ``main_grad`` of each expert for example.
            Rows may be strided, with one stride for all.

    Raises:
        TypeError: another dtype. ValueError: no matrix or more than 1024, two that share memory, and as
        :func:`~transformer_plugin.ops.grouped_gemm_wgrad_out`; nothing is written then.
    """
    _ops.grouped_gemm_wgrad_list_out.default(
        grad, input, group_sizes, list(out), accumulate, alpha, beta, input_rows, max_sms, expected_rows
    )
