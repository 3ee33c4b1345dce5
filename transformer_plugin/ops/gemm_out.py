"""Products written into given buffers: the ops of :mod:`transformer_plugin.ops.gemm`, with the letters of that page.

``out`` is written through its pointer, never copied, and its autograd version does not change. Its rows may be
strided: any strides that do not overlap, 1 in the last dimension. It may not share memory with the operands. Invalid
arguments are refused before anything is written. No op here is differentiable; operands that require a gradient are
refused where an op without a buffer would give them one.

``beta`` is float32 ``[G]``, ``[1]`` without groups: ``beta`` times the old ``out`` is added to the FP32 sum before the
only rounding. Where it is 0 the old ``out`` is ignored, also when it is not finite. Like ``alpha`` it stays on the
device and has no gradient.

``max_sms`` and ``expected_rows`` are those of :mod:`transformer_plugin.ops.gemm_plan`. The bits are the same with any,
also of sums into ``out``: each element is added to once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.transformer_plugin


def gemm_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> None:
    """``out = alpha * (a @ b.T) + beta * out + bias``.

    Args:
        a, b, bias, transpose_b, alpha: as for :func:`~transformer_plugin.ops.gemm`.
        out: ``[M, N]`` float32, bfloat16 or float16; float64 with float64 operands.
        beta: float32 ``[1]``; without it ``out`` is overwritten.

    With factors, or where torch's product would round twice, the sum is made in float32 memory first.

    Raises:
        TypeError: another dtype. ValueError: sizes, strides, devices or memory that do not fit, operands or an ``out``
        that require a gradient.
    """
    _ops.gemm_out.default(a, b, out, bias, transpose_b, alpha, beta)


def gemm_quantized_out(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_format: str,
    b_format: str,
    out: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> None:
    """:func:`gemm_out` of operands as :func:`~transformer_plugin.ops.gemm_quantized` takes them.

    Args:
        out: ``[M, N]`` float32, bfloat16 or float16.
        beta: float32 ``[1]``; without it ``out`` is overwritten.
    """
    _ops.gemm_quantized_out.default(
        a, a_scale, b, b_scale, a_format, b_format, out, bias, transpose_b, a_amax, b_amax, alpha, beta
    )


def grouped_gemm_out(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> None:
    """``out_g = alpha[g] * (a_g @ b[g].T) + beta[g] * out_g + bias_scale_g * bias[g]`` for each group.

    Args:
        a, b, group_sizes, bias, bias_scale, transpose_b, alpha, rows: as for
            :func:`~transformer_plugin.ops.grouped_gemm`.
        out: ``[T, N]`` float32, bfloat16 or float16; float64 with float64 operands. Tail rows become zero without
            ``beta``, and stay unchanged with it.
        beta: float32 ``[G]``; without it ``out`` is overwritten.

    On a CPU ``beta`` is applied to sums in a separate float32 buffer; on CUDA in the epilogue.

    Raises:
        TypeError: another dtype. ValueError: as :func:`~transformer_plugin.ops.grouped_gemm`; strides or memory of
        ``out`` that do not fit, operands or an ``out`` that require a gradient.
    """
    _ops.grouped_gemm_out.default(
        a, b, group_sizes, out, bias, bias_scale, transpose_b, alpha, beta, rows, max_sms, expected_rows
    )


def grouped_gemm_quantized_out(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_sizes: Tensor,
    a_format: str,
    b_format: str,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> None:
    """:func:`grouped_gemm_out` of operands as :func:`~transformer_plugin.ops.grouped_gemm_quantized` takes them.

    Args:
        out: ``[T, N]`` float32, bfloat16 or float16, with the rules of :func:`grouped_gemm_out`.
        beta: float32 ``[G]``; without it ``out`` is overwritten.
    """
    _ops.grouped_gemm_quantized_out.default(
        a,
        a_scale,
        b,
        b_scale,
        group_sizes,
        a_format,
        b_format,
        out,
        bias,
        bias_scale,
        transpose_b,
        a_amax,
        b_amax,
        alpha,
        beta,
        max_sms,
        expected_rows,
    )


def grouped_gemm_wgrad_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Tensor,
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> None:
    """:func:`~transformer_plugin.ops.grouped_gemm_wgrad` added to ``out``, or written over it when not ``accumulate``.

    Args:
        out: float32 or bfloat16 ``[G, N, K]``, a ``main_grad`` for example. Added in FP32 and rounded once.
        accumulate: an empty group leaves its matrix unchanged.
        beta: float32 ``[G]``, with ``accumulate=False``: ``beta[g] * out[g]`` is added, also for an empty group.

    Raises:
        TypeError: another dtype. ValueError: sizes, strides, devices or memory that do not fit, ``beta`` with
        ``accumulate``, an ``out`` that requires a gradient; nothing is written then.
    """
    _ops.grouped_gemm_wgrad_out.default(
        grad, input, group_sizes, out, accumulate, alpha, beta, input_rows, max_sms, expected_rows
    )


def grouped_gemm_wgrad_quantized_out(
    grad_t: Tensor,
    grad_t_scale: Tensor,
    input_t: Tensor,
    input_t_scale: Tensor,
    group_sizes: Tensor,
    grad_format: str,
    input_format: str,
    out: Tensor,
    accumulate: bool = True,
    grad_t_amax: Tensor | None = None,
    input_t_amax: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> None:
    """:func:`~transformer_plugin.ops.grouped_gemm_wgrad_quantized` with the rules of :func:`grouped_gemm_wgrad_out`."""
    _ops.grouped_gemm_wgrad_quantized_out.default(
        grad_t,
        grad_t_scale,
        input_t,
        input_t_scale,
        group_sizes,
        grad_format,
        input_format,
        out,
        accumulate,
        grad_t_amax,
        input_t_amax,
        alpha,
        beta,
        max_sms,
        expected_rows,
    )
