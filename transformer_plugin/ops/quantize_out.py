"""Quantize into buffers of the caller, many tensors at once, and requantize to the transposed direction.

The ops of :mod:`transformer_plugin.ops.quantize` return fresh tensors. The ``_out`` ops here write into tensors of the
caller, so that a weight keeps its address from step to step and a captured CUDA graph stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import buffers, key_of, matrices

__all__ = [
    "amax_list_out",
    "quantize_list",
    "quantize_out",
    "requantize_transposed",
]

_ops = torch.ops.transformer_plugin


def quantize_out(
    input: Tensor,
    format: str | Format,
    out: Sequence[Tensor],
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> None:
    """:func:`~transformer_plugin.ops.quantize` into buffers of the caller.

    Args:
        input, format, group_sizes, amax, amax_t, seed, rowwise, columnwise: as in
            :func:`~transformer_plugin.ops.quantize`.
        out: what that returns, of an earlier call for example: contiguous tensors of exactly these sizes and dtypes on
            the device of ``input``. Written in place, never moved or copied, so that a CUDA graph may hold their
            addresses. They may not share memory with an input or with each other, nor require a gradient.
        noop: float32 ``[1]`` on the device of ``input``, read when the kernels run: with 1 every byte of the buffers
            stays unchanged. For weights that did not change since the last micro-batch.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.quantize`; buffers that do not fit, share memory or
        require a gradient. Nothing is written then.
    """
    key = key_of(format, "quantize_out")
    tensors = buffers(out, "quantize_out")
    _ops.quantize_out.default(input, key, tensors, group_sizes, amax, amax_t, seed, noop, rowwise, columnwise)


def amax_list_out(
    inputs: Iterable[Tensor],
    format: str | Format,
    amax: Tensor,
    amax_t: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`~transformer_plugin.ops.amax` of many matrices at once: the first phase for all weights of a model.

    A kernel takes 128 matrices: their addresses travel in its arguments, no table is copied to the device. Ranks can
    then take the largest of theirs with one collective.

    Args:
        inputs: n matrices ``[M, K]`` of one dtype, float32, bfloat16 or float16, any strides (those that are not
            contiguous are copied first), any sizes including 0; for ``nvfp4`` K is a multiple of 16.
        format: a key of ``fp8_tensor``, or of ``nvfp4`` without ``row_scaled``.
        amax: float32 ``[n]``, contiguous: written.
        amax_t: the same for the columns, ``[n]``: the same numbers. None leaves it out; required to be None for
            ``nvfp4`` with ``rht``, whose columns are rotated first.
        noop: float32 ``[1]``, as in :func:`quantize_out`: with 1 ``amax`` and ``amax_t`` stay unchanged.

    Raises:
        TypeError: another dtype. ValueError: other dimensions or devices, a format with other scales, buffers that do
        not fit, share memory or require a gradient. Nothing is written then.
    """
    _ops.amax_list_out.default(
        matrices(inputs, "amax_list_out"), key_of(format, "amax_list_out"), amax, amax_t, noop
    )


def quantize_list(
    inputs: Iterable[Tensor],
    format: str | Format,
    amax: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    stacked: bool = False,
) -> list[tuple[Tensor, ...]]:
    """:func:`~transformer_plugin.ops.quantize` of each of many matrices, all weights of a model for example.

    A kernel takes 64 matrices, whose addresses are kernel arguments; a format without a list kernel
    (:mod:`transformer_plugin.formats`) launches one for each matrix.
    ``fp8_tensor`` and ``nvfp4`` compute all amaxes first, as :func:`amax_list_out` does.

    Args:
        inputs: n matrices ``[M, K]``, at least one, of one dtype, float32, bfloat16 or float16, any strides (those that
            are not contiguous are copied first), any sizes including 0; for ``mxfp8`` every K is a multiple of 32, for
            ``nvfp4`` of 16, and with ``columnwise`` every M too.
        format: a key of a format with scales, ``nvfp4`` without ``rht``, ``sr`` and ``row_scaled``.
        amax: float32 ``[n]``, contiguous, only for ``fp8_tensor`` and ``nvfp4``: takes the place of the matrices' own.
            One amax serves both directions.
        rowwise, columnwise: as in :func:`~transformer_plugin.ops.quantize`.
        stacked: the results are those of :func:`~transformer_plugin.ops.quantize` for the stack of the matrices, all of
            one size, which is not made.

    Returns:
        For each matrix what :func:`~transformer_plugin.ops.quantize` returns; once if stacked. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: an empty list, other dimensions or devices, a width or an amax that does
        not fit the format, no direction, ``stacked`` matrices of several sizes.
    """
    inputs = matrices(inputs, "quantize_list")
    if not inputs:  # torch calls the op only if an argument holds a tensor
        raise ValueError(
            "transformer_plugin::quantize_list: argument 'inputs': expected at least one matrix, got "
            "none. Skip the call if there is nothing to quantize."
        )
    key = key_of(format, "quantize_list")
    outputs = _ops.quantize_list.default(inputs, key, amax, rowwise, columnwise, stacked)
    each = len(outputs) // (1 if stacked else len(inputs))
    return [tuple(outputs[i : i + each]) for i in range(0, len(outputs), each)]


def requantize_transposed(
    data: Tensor,
    scale_inv: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The transposed copy of row-wise quantized data, for example data from another rank.

    Args:
        data: ``[M, K]`` or ``[G, M, K]``, or ``[T, K]`` with ``group_sizes``, as
            :func:`~transformer_plugin.ops.quantize` gives it; of ``nvfp4`` two elements to a byte, M or T a multiple of
            16. Rows past the groups are not read.
        scale_inv, format: what came with it; a format with fused ops (:mod:`transformer_plugin.formats`).
        dtype: of the values between, float32, bfloat16 or float16.
        group_sizes: int32 or int64 ``[G]`` on the device of ``data``; for ``nvfp4`` multiples of 16.
        amax: of ``nvfp4``, what ``data`` was quantized with, as in :func:`~transformer_plugin.ops.dequantize`; none for
            the other formats.
        amax_t: of ``nvfp4``, what the result is quantized with: what :func:`~transformer_plugin.ops.amax` with
            ``columnwise`` gave of the matrix that became ``data``; none for the other formats.
        seed: as in :func:`~transformer_plugin.ops.quantize`, of ``nvfp4`` with ``sr`` alone.

    Returns:
        Of ``fp8_block``, ``mxfp8`` and ``nvfp4`` exactly what quantize with ``columnwise`` alone gives of
        ``dequantize(data, scale_inv, format, dtype, group_sizes)``, of ``nvfp4`` with ``amax`` and then with ``amax_t``
        and ``seed``; the values between are never in memory. Of ``fp8_tensor``,
        whose scale serves both directions, the data transposed without requantization and a copy of the scale. The same
        bytes on CPU and CUDA. Not differentiable.

    Raises:
        TypeError: data, scales or a dtype that are not the format's. ValueError: scales of another shape, a width that
            the format does not take, for ``nvfp4`` rows that are no whole blocks, an amax or a seed that is missing or
            not the format's; on a CPU also sizes that are negative, sum to more than T or, for ``nvfp4``, are no whole
            blocks.
    """
    return _ops.requantize_transposed.default(
        data, scale_inv, key_of(format, "requantize_transposed"), dtype, group_sizes, amax, amax_t, seed
    )
