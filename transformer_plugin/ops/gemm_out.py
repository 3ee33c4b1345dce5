"""Products written into buffers: the ops of :mod:`transformer_plugin.ops.gemm`, with the letters of that page.

``out`` is written through its pointer, never copied, and its autograd version does not change. Its rows may be
strided: any strides that do not overlap, 1 in the last dimension. It may not share memory with the operands. Invalid
arguments are refused before anything is written. No op here is differentiable; operands that require a gradient are
refused where an op without a buffer would give them one. Quantized operands, and sequences of matrices, are those of
the ops without a buffer.

``beta`` is float32 ``[G]``, ``[1]`` without groups: ``beta`` times the old ``out`` is added to the FP32 sum before the
only rounding. Where it is 0 the old ``out`` is ignored, also when it is not finite. Like ``alpha`` it stays on the
device and has no gradient.

``max_sms`` and ``expected_rows`` are those of :mod:`transformer_plugin.ops.gemm_plan`. The bits are the same with any,
also of sums into ``out``: each element is added to once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, listed, quantized

__all__ = [
    "gemm_out",
    "grouped_gemm_out",
    "grouped_gemm_wgrad_out",
]

_ops = torch.ops.transformer_plugin


def gemm_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
    accumulate: bool = False,
) -> None:
    """``out = alpha * (a @ b.T) + beta * out + bias``.

    Args:
        a, b, bias, transpose_b, alpha, a_scale, b_scale, a_format, b_format: as for
            :func:`~transformer_plugin.ops.gemm`.
        out: ``[M, N]`` float32, bfloat16 or float16; float64 with float64 operands.
        beta: float32 ``[1]``; without it ``out`` is overwritten.
        accumulate: the product is added to ``out``, which a ``beta`` of 1 would do. On CUDA one GEMM adds it, with
            operands in the dtype of ``out``, or in 16 bits and ``out`` in float32, and without ``alpha`` and ``bias``.

    Otherwise, with factors, or where torch's product would round twice, the sum is made in float32 memory first.

    Raises:
        TypeError: another dtype. ValueError: sizes, strides, devices or memory that do not fit, operands or an ``out``
        that require a gradient, ``beta`` with ``accumulate``.
    """
    _ops.gemm_out.default(
        a,
        b,
        out,
        bias,
        transpose_b,
        alpha,
        beta,
        *quantized("gemm_out", a_scale, b_scale, a_format, b_format),
        accumulate=accumulate,
    )


def grouped_gemm_out(
    a: Tensor,
    b: Tensors,
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
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
) -> None:
    """``out_g = alpha[g] * (a_g @ b[g].T) + beta[g] * out_g + bias_scale_g * bias[g]`` for each group.

    Args:
        a, b, group_sizes, bias, bias_scale, transpose_b, alpha, rows, a_scale, b_scale, a_format, b_format: as for
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
        a,
        listed(b, "grouped_gemm_out", "b"),
        group_sizes,
        out,
        bias,
        bias_scale,
        transpose_b,
        alpha,
        beta,
        rows,
        max_sms,
        expected_rows,
        *quantized("grouped_gemm_out", a_scale, b_scale, a_format, b_format),
    )


def grouped_gemm_wgrad_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Tensors,
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    grad_scale: Tensors | None = None,
    input_scale: Tensors | None = None,
    grad_format: str | Format = "none",
    input_format: str | Format = "none",
) -> None:
    """:func:`~transformer_plugin.ops.grouped_gemm_wgrad` added to ``out``, or written over it when not ``accumulate``.

    Args:
        grad, input, group_sizes, alpha, input_rows, grad_rows, grad_scale, input_scale, grad_format, input_format: as
            for :func:`~transformer_plugin.ops.grouped_gemm_wgrad`.
        out: float32 or bfloat16 (float64 with float64 operands) ``[G, N, K]``, a ``main_grad`` for example; or 1 to
            1024 matrices ``[N, K]``, the ``main_grad`` of each expert, all of one dtype, whose rows may be strided with
            one stride for all. Added in FP32 and rounded once.
        accumulate: an empty group leaves its matrix unchanged.
        beta: float32 ``[G]``, with ``accumulate=False``: ``beta[g] * out[g]`` is added, also for an empty group.

    Raises:
        TypeError: another dtype. ValueError: sizes, strides, devices or memory that do not fit, no matrix or more than
        1024 in a sequence, two that share memory, ``beta`` with ``accumulate``, an ``out`` that requires a gradient;
        nothing is written then.
    """
    _ops.grouped_gemm_wgrad_out.default(
        grad,
        input,
        group_sizes,
        listed(out, "grouped_gemm_wgrad_out", "out"),
        accumulate,
        alpha,
        beta,
        input_rows,
        grad_rows,
        max_sms,
        expected_rows,
        *quantized(
            "grouped_gemm_wgrad_out", grad_scale, input_scale, grad_format, input_format, ("grad", "input")
        ),
    )
