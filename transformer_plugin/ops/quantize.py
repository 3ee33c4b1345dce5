"""Quantize and dequantize. Shapes: M rows, K columns, G matrices or groups, T rows of a ragged buffer.

An FP8 matrix is two tensors: ``data`` (float8_e4m3fn or float8_e5m2) and ``scale_inv`` (float32; for ``mxfp8``
float8_e8m0fnu, bytes e that mean ``2**(e - 127)``, 255 NaN), with ``value = float(data) * scale_inv``.
``up4(n)`` and ``up128(n)`` are n rounded up to a multiple; the padding is zero bytes.

====================  ===============================  ===============================
format                scale of rows, data [M, K]       scale of transposed data [K, M]
====================  ===============================  ===============================
``fp8_tensor``        [1]                              [1]
``fp8_row``           [M]                              [K]
``fp8_block``         [ceil(K/128), up4(M)]            [ceil(M/128), up4(K)]
``fp8_block:square``  [ceil(M/128), up4(ceil(K/128))]  [ceil(K/128), up4(ceil(M/128))]
``mxfp8``             [up128(M), 4 * ceil(K/128)]      [up128(K), 4 * ceil(M/128)]
``mxfp8:square``      as ``mxfp8``                     as ``mxfp8``
``nvfp4``             [up128(M), up4(K/16)]            [up128(K), up4(M/16)]
====================  ===============================  ===============================

A 3-D input [G, M, K] is G matrices, each with its own scales: [G] for ``fp8_tensor``, a leading G otherwise.
The results of an op are a tuple: data and scale of the rows with ``rowwise``, then of the columns with ``columnwise``,
whose data is transposed.
A ragged matrix [T, K] with ``group_sizes [G]`` has scale [G] for ``fp8_tensor``; for ``fp8_block`` the
transposed blocks restart at each group and are stored one after another, [ceil(T/128) + G, up4(K)]: group g's first
scale row is the sum of ceil(size/128) over the groups before it. For ``mxfp8`` the transposed scales are
[up128(K), 4 * (ceil(T/128) + G)], and that sum times 4 is group g's first column. Rows past the groups are
never read; their data and scales are 0.

``mxfp8`` has blocks of 32: ``scale_inv[row, k // 32]`` is the scale of ``data[row, k]``. K, the columns of the
input in either direction, must be a multiple of 32; M may be anything. With ``square`` the scale of a 32x32
block is repeated for each of its rows.

``nvfp4`` is two elements to a byte, the even one in the low half: data float4_e2m1fn_x2 ``[M, K/2]``, transposed
``[K, M/2]``, and scales float8_e4m3fn, ``scale_inv[row, k // 16]``, repeated for the 16 rows of a ``square`` block;
ragged and transposed ``[up128(K), 8 * (ceil(T/128) + G)]``, group g's first column 8 times that sum. Values have one
more factor: ``value = data * ((scale_inv * amax) * (1 / 2688))``, where ``amax`` is an argument of the ops
(:func:`amax`), float32 ``[1]``, or ``[G]`` for G matrices or groups; with ``row_scaled`` one for each row, ``[M]``,
``[G, M]`` or ``[T]``, and each column of the transposed copy, ``[K]`` or ``[G, K]``. K must be a multiple of 16, and
for transposed data M and every group size too. On a GPU, where the host does not read sizes, a partial block of 16
rows has data 0 and the scale NaN. With ``rht`` transposed data is that of the transformed matrix.

``tiled`` formats, of ``mxfp8`` and ``nvfp4``, have the bytes of their scales in tiles of 128x4 in the same shape: byte
``(r, c)`` at ``512 * (r // 128 * width / 4 + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4``.

Arithmetic, the same bytes on CPU and CUDA: with ``a`` the amax of the block (NaN left out, at least ``eps``),
``scale = largest / a`` in float32, 1 when a is 0 or infinite, and when it overflows the largest float32
(``fp8_tensor``, ``fp8_row``) or the largest finite value of the input's dtype (``fp8_block``); ``pow2`` clears its
mantissa; ``scale_inv = 1 / scale``; ``data = round(float(x) * scale)`` to nearest even, saturating, NaN of
either sign to 0x7F. For ``mxfp8`` ``scale_inv`` is ``a * (1 / largest)``, in float32, rounded up to a power of
two, at least 2^-127; 2^127 when a is infinite; ``scale = 1 / scale_inv``.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of

__all__ = [
    "amax",
    "dequantize",
    "quantize",
]

_ops = torch.ops.transformer_plugin


def quantize(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    rows: Tensor | None = None,
    zero_tail: bool = True,
) -> tuple[Tensor, ...]:
    """Quantizes along rows, along columns, or both in one pass over the input.

    Args:
        input: ``[M, K]``, or ``[G, M, K]`` for G matrices with separate scales, or a ragged ``[T, K]`` with
            ``group_sizes``, whose rows past the groups may hold anything; float32, bfloat16 or float16; any strides,
            any sizes including 0. K is a multiple of 32 for ``mxfp8``, of 16 for ``nvfp4``; for ``nvfp4`` with
            ``columnwise`` M and every group size is a multiple of 16 too.
        format: a key of ``fp8_tensor``, ``fp8_row``, ``fp8_block``, ``mxfp8`` or ``nvfp4``, or a
            :class:`~transformer_plugin.formats.Format`; not ``square`` with ``group_sizes``.
        group_sizes: ``[G]`` int32 or int64 on the device of ``input``, contiguous: rows of each group, 0 allowed, any
            number of groups. Never read on the host when on a GPU, where sizes are cut at T rows.
        amax: float32 on the device of ``input``, what :func:`amax` gives for the rows, or its maximum over several
            ranks. For ``fp8_tensor`` it replaces a pass over the input, and serves both directions; ``nvfp4`` requires
            it with ``rowwise``. If it is smaller than the input's, values saturate. Other formats take none.
        amax_t: the same for the columns: ``nvfp4`` requires it with ``columnwise``. Other formats take none.
        seed: int64 ``[1]`` on the device of ``input``, of the stochastic rounding of ``nvfp4:sr``; other formats
            take none. Use another one in each step; a block's random numbers depend on it and the block's position.
        rowwise: whether to return data and scale along rows.
        columnwise: whether to return those along columns: of the transposed matrix, contiguous. Not for ``fp8_row``
            with ``group_sizes``. For ``fp8_row`` the input is transposed into a temporary first.
        rows: ``[T]`` int32 or int64 on the device of ``input``, contiguous, with ``group_sizes``, which sum to at most
            T: row i of the ragged matrix is ``input[rows[i]]``, zeros for -1, and ``input`` has any number of rows.
            The results are those of a copy, which a GPU does not make of 16-bit values, columnwise, if ``aligned``.
        zero_tail: whether data and scales past the groups are 0. Otherwise their content is unspecified.

    Returns:
        ``data, scale_inv`` with ``rowwise``, then ``data_transposed, scale_inv_transposed`` with ``columnwise``; the
        first in the shape of ``input``, the third ``[K, M]``, ``[G, K, M]`` or ``[K, T]``, where group g is the columns
        from its first row to its last. In an ``aligned`` format the third is ``[K, round_up(T, 32) + 32 * (G + 1)]``
        and group g, from row b on, begins at ``round_up(b, 32) + 32 * g``, with zeros between groups
        (:meth:`transformer_plugin.formats.Format.line_begin`). Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, a format without scales, no format, for ``mxfp8`` or
            ``nvfp4`` another width, an amax or a seed that is not the format's, no direction, ``rows`` without
            ``group_sizes``; on a CPU also group sizes that are negative or sum to more than T, and entries of ``rows``
            that are neither rows of the input nor -1, which on a GPU are rows of zeros and an error of a later call.

    Source: per-tensor current scaling, DeepSeek-V3's block scaling (arXiv:2412.19437, section 3.3) and the OCP
    Microscaling Formats (MX) v1.0 specification, with the scale conventions of NVIDIA TransformerEngine 2.20.
    """
    key = key_of(format, "quantize")
    more = (amax, amax_t, seed, rowwise, columnwise)
    if rows is not None or zero_tail is not True:
        return tuple(_ops.quantize.default(input, key, group_sizes, *more, rows, zero_tail))
    if rowwise is True and columnwise is False and amax is None and amax_t is None and seed is None:
        return tuple(_ops.quantize.default(input, key, group_sizes))  # fewer arguments to parse: 0.5 us
    return tuple(_ops.quantize.default(input, key, group_sizes, *more))


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    group_sizes: Tensor | None = None,
    transposed: bool = False,
    amax: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """``float(data) * scale_inv`` in float32, then rounded to ``dtype``.

    Args:
        data: ``[M, K]``, ``[G, M, K]`` or, with ``group_sizes``, ``[T, K]`` as :func:`quantize` returns it, or with
            ``transposed`` ``[K, M]``, ``[G, K, M]`` or ``[K, T]``; in the element's dtype.
        scale_inv: the scales that came with it: float32, float8_e8m0fnu of ``mxfp8``, float8_e4m3fn of ``nvfp4``.
        format: the key it was quantized with.
        dtype: float32, bfloat16 or float16.
        group_sizes: what it was quantized with.
        transposed: whether ``data`` is transposed; the result is not. Not for ``fp8_row`` with ``group_sizes``.
        amax: of ``nvfp4``, what it was quantized with (``amax_t`` for transposed data); none for the other formats.
        zero_tail: whether rows past the groups are 0. Otherwise their content is unspecified.

    Returns:
        ``[M, K]``, ``[G, M, K]`` or ``[T, K]``, whose rows past the groups are 0 with ``zero_tail``. Of transposed data
        in an ``aligned`` format T rounded up to a multiple of 32. Not differentiable.

    Raises:
        TypeError: a dtype that is not the format's, or another output dtype. ValueError: scales of another
            shape, an amax that is missing or not the format's; on a CPU also group sizes that are negative or sum to
            more than T.
    """
    return _ops.dequantize.default(
        data, scale_inv, key_of(format, "dequantize"), dtype, group_sizes, transposed, amax, zero_tail
    )


@overload
def amax(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    rowwise: Literal[True] = True,
    columnwise: Literal[False] = False,
) -> Tensor: ...
@overload
def amax(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    *,
    rowwise: Literal[False],
    columnwise: Literal[True],
) -> Tensor: ...
@overload
def amax(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    rowwise: Literal[True] = True,
    *,
    columnwise: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def amax(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
def amax(
    input: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest magnitudes that a format scales the rows of ``input`` by, its columns, or both in one pass.

    Between this and :func:`quantize` with ``amax=``, ranks can reduce theirs with a maximum, to use the same scale.

    Args:
        input, group_sizes: as in :func:`quantize`.
        format: a key of ``fp8_tensor`` or ``nvfp4``.
        rowwise: whether to return those of the rows.
        columnwise: whether to return those of the columns: of the transposed matrix, after the Hadamard transform if
            the format has ``rht``. Without that and ``row_scaled`` the same numbers.

    Returns:
        float32 ``[1]``, ``[G]`` for G matrices or G groups; with ``row_scaled`` ``[M]``, ``[G, M]`` or ``[T]`` for the
        rows, ``[K]`` or ``[G, K]`` for the columns. A pair with both directions. NaN is ignored, an infinity is not; 0
        for an empty input. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, another format, no direction; on a CPU also sizes that
            are negative or sum to more than T.
    """
    first, *rest = _ops.amax.default(input, key_of(format, "amax"), group_sizes, rowwise, columnwise)
    return (first, rest[0]) if rest else first
