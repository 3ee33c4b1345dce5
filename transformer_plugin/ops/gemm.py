"""Products of matrices, dense and over ragged groups. Sums are FP32 and rounded once.

Letters: M rows; T rows of a buffer of fixed capacity, of which the first ``sum(group_sizes)`` belong to G groups, in
order; N output columns; K the dimension that is summed over. ``group_sizes`` is int32 or int64 ``[G]`` on the device
of the data, any G, any sizes from 0. The host never reads it on CUDA, so a captured CUDA graph follows new sizes.
Rows past the last group, the tail, are never read and come out as zero.

On CUDA, sizes that are negative count as 0 and rows past the buffer are cut; on a CPU both are a ValueError.

Any N, K and strides are supported. 16-byte aligned rows are fast; operands that are not contiguous are copied first.

``alpha`` is float32 ``[G]``, ``[1]`` without groups: a factor of the FP32 sum, before a bias is added and the sum is
rounded. It stays on the device and has no gradient: an ``alpha`` that requires one is a ValueError.

A quantized operand has a format, a key or a :class:`~transformer_plugin.formats.Format`, and its scales:
``scale_inv``, or of ``nvfp4`` ``[scale_inv, amax]``, as the quantize ops return them. The values of both operands are
multiplied, ``alpha * (dequantize(a) @ dequantize(b).T) + bias``. Such a product has no gradient
(:func:`~transformer_plugin.ops.linear` has), takes no ``rows``, and returns bfloat16 unless ``dtype`` is float32,
bfloat16 or float16. Without a format, ``"none"``, an operand is multiplied as it is. A matrix that is quantized along
its columns is the rowwise quantization of its transpose, so that a weight gradient without groups is
``gemm(grad_t, input_t, a_scale=..., ...)``.

- ``fp8_block`` (E4M3) and ``fp8_tensor`` (``b`` E4M3) go straight to FP8 tensor cores on Hopper: bfloat16 output,
  N % 8 == 0, K % 16 == 0; weight gradients also into float32. Tensor cores sum 128 products, and these sums are added
  in FP32: with mixed signs within ``20 * 2**-12`` of the root of the sum of squares.
- ``fp8_row``: both operands, ``b`` E4M3 and with ``transpose_b``; the same tensor cores. The sum is multiplied by
  ``a_scale[i] * b_scale[g, n]``, then by ``alpha``; one fma adds the bias. There is no weight gradient: it sums over
  rows, so a row's scale is not a factor of the whole sum.
- ``mxfp8`` and ``nvfp4`` are dequantized in the mainloop on Hopper.
- Everything else is an FP32 sum of exact products.

Where the matrices of the groups are separate tensors, for example experts that are separate parameters, ``b`` is a
sequence of them in place of one tensor ``[G, .., ..]``: 1 to 1024 of one shape and one dtype, anywhere in memory. Their
scales are one for each, then of ``nvfp4`` one amax for each. They are not copied, except where one is not contiguous,
and quantized ones other than ``fp8_block`` and ``fp8_tensor`` on Hopper: on CUDA a small launch before the product
writes their addresses where its kernel finds them. Equally spaced views of one tensor are multiplied as that tensor. A
CUDA graph keeps the addresses that it was captured with: contents may change between replays, a matrix that has moved
is not followed.

``max_sms`` and ``expected_rows`` control the launch of a grouped product on Hopper and never change its bits:
:mod:`transformer_plugin.ops.gemm_plan`. A negative ``max_sms`` and an ``expected_rows`` below -1 are a ValueError.

Products into buffers are in :mod:`transformer_plugin.ops.gemm_out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, listed, quantized

__all__ = [
    "bias_backward",
    "check_group_sizes",
    "gather_rows_backward",
    "gemm",
    "grouped_bias_backward",
    "grouped_gemm",
    "grouped_gemm_wgrad",
]

_ops = torch.ops.transformer_plugin


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
) -> Tensor:
    """``alpha * (a @ b.T) + bias``, or ``alpha * (a @ b) + bias``.

    Args:
        a: ``[M, K]`` float32, bfloat16, float16 or float64; or data in ``a_format``.
        b: ``[N, K]``, or ``[K, N]`` when not ``transpose_b``; the dtype of ``a``, or data in ``b_format``.
        bias: ``[N]``, any float dtype, added to the sum before it is rounded.
        dtype: of the output; that of ``a`` by default, and bfloat16 of quantized operands. float64 only with float64
            inputs.
        alpha: float32 ``[1]``; 1 by default.
        a_scale, b_scale, a_format, b_format: of quantized operands: fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4.

    Returns:
        ``[M, N]``. Differentiable in ``a``, ``b`` and ``bias``, unless operands are quantized.

    On CUDA torch's matrix product runs, and its settings hold (TF32, reduced-precision reductions); with quantized
    operands, on Hopper, FP8 tensor cores.

    Raises:
        TypeError: another dtype. ValueError: sizes, scales or devices that do not agree; formats that do not go
        together.
    """
    return _ops.gemm.default(
        a,
        b,
        bias,
        transpose_b,
        dtype,
        alpha,
        *quantized("gemm", a_scale, b_scale, a_format, b_format),
    )


def grouped_gemm(
    a: Tensor,
    b: Tensors,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
    zero_tail: bool = True,
) -> Tensor:
    """Each group's rows times the group's matrix: ``alpha[g] * (a_g @ b[g].T) + bias_scale_g * bias[g]``.

    Args:
        a: ``[T, K]`` float32, bfloat16 or float16; float64 on a CPU; or data in ``a_format``.
        b: ``[G, N, K]``, or ``[G, K, N]`` when not ``transpose_b`` (a weight ``[G, N, K]`` in the data gradient:
            ``grouped_gemm(grad, weight, group_sizes, transpose_b=False)``); or G matrices. The dtype of ``a``, or data
            in ``b_format``.
        group_sizes: int32 or int64 ``[G]``.
        bias: ``[G, N]``, any float dtype, added to the FP32 sum before it is rounded.
        bias_scale: float32 ``[T]``, a factor of the bias for each row; 1 by default.
        dtype: of the output; that of ``a`` by default, and bfloat16 of quantized operands.
        alpha: float32 ``[G]``; 1 by default.
        rows: int32 or int64 ``[T]``: row i of the product is of ``a[rows[i]]``, so that a permute can be skipped.
            ``a`` then has any number of rows, any of them several times. An entry of -1 is a row of zeros. Entries of
            the tail are not used. On Hopper, 16-byte aligned 16-bit rows are gathered in the kernel, up to 4096 output
            columns; elsewhere, and for the gradient of ``b``, they are copied into a buffer first, with the same bits.
        a_scale, b_scale, a_format, b_format: of quantized operands, as for :func:`gemm`.
        zero_tail: whether rows past the groups are 0. Otherwise their content is unspecified.

    Returns:
        ``[T, N]``. Differentiable in ``a``, whose gradient is zero past the groups, every matrix of ``b``, ``bias`` and
        ``bias_scale``, unless operands are quantized; the gradients of a sequence are views of one tensor. With
        ``rows`` the gradient of ``a`` is :func:`gather_rows_backward` of that of the rows, rounded to the dtype of
        ``a``.

    Raises:
        TypeError: another dtype. ValueError: sizes, scales or devices that do not agree, a sequence of no matrix or
        more than 1024, a bias scale without a bias, and on a CPU group sizes that are negative or sum to more than T,
        and other rows that ``a`` does not have. On CUDA such a row counts as zeros, and a later call raises:
        :func:`check_group_sizes`.
    """
    matrices = listed(b, "grouped_gemm", "b")
    options = (bias, bias_scale, transpose_b, dtype, alpha, rows, max_sms, expected_rows)
    scales = quantized("grouped_gemm", a_scale, b_scale, a_format, b_format)
    return _ops.grouped_gemm.default(a, matrices, group_sizes, *options, *scales, zero_tail=zero_tail)


def gather_rows_backward(grad: Tensor, rows: Tensor, group_sizes: Tensor, num_rows: int) -> Tensor:
    """The gradient of taking rows by an index, as :func:`grouped_gemm` does with ``rows``.

    Args:
        grad: ``[T, K]`` float32, bfloat16 or float16; float64 on a CPU.
        rows: int32 or int64 ``[T]``, what the forward was given.
        num_rows: of the matrix that ``rows`` points into, at most ``2**31 - 1``.

    Returns:
        ``[num_rows, K]`` in the dtype of ``grad``: for each row the sum of ``grad`` over the rows of the
        product before the tail that used it, in their order, in FP32, rounded once; the same bits on CPU and CUDA.
        Entries of -1 and out-of-range entries are ignored. Not differentiable.
    """
    return _ops.gather_rows_backward.default(grad, rows, group_sizes, num_rows)


def grouped_gemm_wgrad(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    grad_scale: Tensors | None = None,
    input_scale: Tensors | None = None,
    grad_format: str | Format = "none",
    input_format: str | Format = "none",
) -> Tensor:
    """The weight gradient of each group: ``alpha[g] * (grad_g.T @ input_g)``, zero for an empty group.

    Args:
        grad: ``[T, N]`` float32, bfloat16 or float16; float64 on a CPU; or transposed data ``[N, T]``, quantized along
            columns, as :func:`~transformer_plugin.ops.quantize` gives it columnwise in ``grad_format``.
        input: ``[T, K]`` in the dtype of ``grad``; or ``[K, T]`` in ``input_format``. Both formats are ``aligned`` or
            neither is.
        group_sizes: int32 or int64 ``[G]``.
        dtype: of the output; that of ``grad`` by default, and bfloat16 of quantized operands.
        alpha: float32 ``[G]``; 1 by default.
        input_rows: int32 or int64 ``[T]``: ``input[input_rows[i]]`` replaces ``input[i]``, with the rules of ``rows``
            in :func:`grouped_gemm`. ``input`` then has any number of rows.
        grad_rows: int32 or int64 ``[T]``: ``grad[grad_rows[i]]`` replaces ``grad[i]``, likewise.
        grad_scale, input_scale, grad_format, input_format: of quantized operands, as for :func:`gemm`; not fp8_row.

    Returns:
        ``[G, N, K]``. Not differentiable.
    """
    return _ops.grouped_gemm_wgrad.default(
        grad,
        input,
        group_sizes,
        dtype,
        alpha,
        input_rows,
        grad_rows,
        max_sms,
        expected_rows,
        *quantized(
            "grouped_gemm_wgrad", grad_scale, input_scale, grad_format, input_format, ("grad", "input")
        ),
    )


def bias_backward(grad: Tensor) -> Tensor:
    """The gradient of the bias of :func:`gemm` or :func:`linear`: the sums over the rows.

    Args:
        grad: ``[M, N]`` float32, bfloat16, float16 or float64; any strides.

    Returns:
        ``[N]`` float32, ``sum over rows of grad[i, j]``; float64 for float64. In a fixed order, the same bits on CPU
        and CUDA: neighbouring rows are added, then neighbouring sums, and so on until one is left; with an odd number
        the last one moves up unchanged. A sum of 0 has no sign. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions.
    """
    return _ops.bias_backward.default(grad)


def grouped_bias_backward(
    grad: Tensor, group_sizes: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of the bias of :func:`grouped_gemm` and of its scale.

    Args:
        grad: ``[T, N]`` float32, bfloat16 or float16; float64 on a CPU.
        bias: ``[G, N]``, needed for the gradient of the scale only.
        bias_scale: float32 ``[T]``, what the forward was given.

    Returns:
        ``grad_bias [G, N]`` float32, ``sum over a group's rows of bias_scale[i] * grad[i, j]``, and
        ``grad_bias_scale [T]`` float32 (``[0]`` without ``bias`` and ``bias_scale``),
        ``sum over columns of grad[i, j] * bias[g, j]``, zero in the tail. Both in a fixed order, the same bits on
        CPU and CUDA; over the rows of a group, ``grad_bias`` has the order of :func:`bias_backward`. float64 for a
        float64 ``grad_bias``.
    """
    return _ops.grouped_bias_backward.default(grad, group_sizes, bias, bias_scale)


def check_group_sizes() -> None:
    """Raises errors that a GPU recorded about the group sizes of earlier calls, without waiting for it.

    On a CPU a call with wrong sizes (negative, or past the rows of their buffer) is an error itself. On a GPU the host
    does not read sizes: a negative size counts as 0, rows past the buffer are left out, and the next op with
    group sizes raises, or this one does. After ``torch.cuda.synchronize()`` it covers every earlier call, also
    captured and replayed graphs. It also covers out-of-range entries of ``rows``,
    ``input_rows`` and ``grad_rows``, other than -1, which is a row of zeros, and indices other than -1 that name no
    expert, in :func:`assign_slots` and other ops of routing and expert parallelism; it says how many.

    Raises:
        ValueError: an earlier call had invalid group sizes, row indices or expert indices. Raised once per error.
    """
    _ops.check_group_sizes.default()
