"""Quantize and dequantize. Shapes: M rows, K columns, G matrices or groups, T rows of a ragged buffer.

An FP8 matrix is two tensors: ``data`` (float8_e4m3fn or float8_e5m2) and ``scale_inv`` (float32; for ``mxfp8``
float8_e8m0fnu, bytes e that mean ``2**(e - 127)``, 255 NaN), with ``value = float(data) * scale_inv``.
``up4(n)`` and ``up128(n)`` are n rounded up to a multiple; the padding is zero bytes.

====================  ===============================  ===============================
format                scale of rows, data [M, K]       scale of transposed data [K, M]
====================  ===============================  ===============================
``fp8_tensor``        [1]                              [1]
``fp8_block``         [ceil(K/128), up4(M)]            [ceil(M/128), up4(K)]
``fp8_block:square``  [ceil(M/128), up4(ceil(K/128))]  [ceil(K/128), up4(ceil(M/128))]
``mxfp8``             [up128(M), 4 * ceil(K/128)]      [up128(K), 4 * ceil(M/128)]
``mxfp8:square``      as ``mxfp8``                     as ``mxfp8``
``nvfp4``             [up128(M), up4(K/16)]            [up128(K), up4(M/16)]
====================  ===============================  ===============================

A 3-D input [G, M, K] is G matrices, each with its own scales: [G] for ``fp8_tensor``, a leading G otherwise.
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
(``fp8_tensor``) or the largest finite value of the input's dtype (``fp8_block``); ``pow2`` clears its
mantissa; ``scale_inv = 1 / scale``; ``data = round(float(x) * scale)`` to nearest even, saturating, NaN of
either sign to 0x7F. For ``mxfp8`` ``scale_inv`` is ``a * (1 / largest)``, in float32, rounded up to a power of
two, at least 2^-127; 2^127 when a is infinite; ``scale = 1 / scale_inv``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format

_ops = torch.ops.transformer_plugin


def _key(format: str | Format) -> str:
    return format if isinstance(format, str) else format.key


def quantize(
    input: Tensor, format: str | Format, amax: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantizes along rows.

    Args:
        input: ``[M, K]``, or ``[G, M, K]`` for G matrices with separate scales; float32, bfloat16 or
            float16; any strides, any sizes including 0. K is a multiple of 32 for ``mxfp8``, of 16 for ``nvfp4``.
        format: a key of ``fp8_tensor``, ``fp8_block``, ``mxfp8`` or ``nvfp4``, or a
            :class:`~transformer_plugin.formats.Format`.
        amax: float32 on the device of ``input``, what :func:`amax` gives, or its maximum over several ranks. For
            ``fp8_tensor`` it replaces a pass over the input; ``nvfp4`` requires it. If it is smaller than the
            input's own, values saturate. Other formats take none.
        seed: int64 ``[1]`` on the device of ``input``, of the stochastic rounding of ``nvfp4:sr``; other formats
            take none. Use another one in each step; a block's random numbers depend on it and the block's position.

    Returns:
        ``data`` in the shape of ``input`` and ``scale_inv`` (table above). Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, a format without scales, no format, for
            ``mxfp8`` or ``nvfp4`` another width, or an amax or a seed that is not the format's.

    Source: per-tensor current scaling, DeepSeek-V3's block scaling (arXiv:2412.19437, section 3.3) and the OCP
    Microscaling Formats (MX) v1.0 specification, with the scale conventions of NVIDIA TransformerEngine 2.20.
    """
    return _ops.quantize.default(input, _key(format), amax, seed)


def quantize_transposed(
    input: Tensor, format: str | Format, amax: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantizes along columns: :func:`quantize` of the transposed matrix, contiguous.

    Args:
        input, format, seed: as in :func:`quantize`; for ``nvfp4`` M is a multiple of 16 too.
        amax: as there, of the transposed matrix: what :func:`amax_transposed` gives.

    Returns:
        ``data [K, M]`` (``[G, K, M]``), contiguous, and its ``scale_inv``.

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    return _ops.quantize_transposed.default(input, _key(format), amax, seed)


def quantize_both(
    input: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`quantize` and :func:`quantize_transposed` in one pass over the input.

    Args:
        input, format, amax, seed: as in :func:`quantize`.
        amax_t: as ``amax``, of the transposed matrix; none for ``fp8_tensor``, whose one amax serves both.

    Returns:
        ``data, scale_inv, data_transposed, scale_inv_transposed``.

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    return _ops.quantize_both.default(input, _key(format), amax, amax_t, seed)


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """``float(data) * scale_inv`` in float32, then rounded to ``dtype``.

    Args:
        data: ``[M, K]`` or ``[G, M, K]`` as :func:`quantize` returns it, or with ``transposed`` ``[K, M]`` or
            ``[G, K, M]`` as :func:`quantize_transposed` does; in the element's dtype.
        scale_inv: the scales that came with it: float32, float8_e8m0fnu of ``mxfp8``, float8_e4m3fn of ``nvfp4``.
        format: the key it was quantized with.
        dtype: float32, bfloat16 or float16.
        transposed: whether ``data`` is transposed; the result is not.
        amax: of ``nvfp4``, what it was quantized with; none for the other formats.

    Returns:
        ``[M, K]`` or ``[G, M, K]``. Not differentiable.

    Raises:
        TypeError: a dtype that is not the format's, or another output dtype. ValueError: scales of another
            shape, an amax that is missing or not the format's.
    """
    return _ops.dequantize.default(data, scale_inv, _key(format), dtype, transposed, amax)


def grouped_quantize(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes the rows of several matrices that are stored one after another.

    Args:
        input: ``[T, K]``, float32, bfloat16 or float16, any strides; rows past the groups may hold anything.
            K is a multiple of 32 for ``mxfp8``, of 16 for ``nvfp4``.
        group_sizes: ``[G]`` int32 or int64 on the device of ``input``, contiguous: rows of each group, 0
            allowed, any number of groups. Never read on the host when on a GPU, where sizes are cut at T
            rows.
        format: a key of ``fp8_tensor``, ``fp8_block``, ``mxfp8`` or ``nvfp4``; not ``square``.
        amax: as in :func:`quantize`, ``[G]`` for ``fp8_tensor`` and ``nvfp4``, ``[T]`` with ``row_scaled``.
        seed: as there.

    Returns:
        ``data [T, K]`` and ``scale_inv``: ``[G]``, ``[ceil(K/128), up4(T)]``, or for ``mxfp8``
        ``[up128(T), 4 * ceil(K/128)]``. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, a format without scales or with square
            blocks, for ``mxfp8`` or ``nvfp4`` another width, an amax or a seed that is not the format's; on a CPU also
            sizes that are negative or sum to more than T.
    """
    return _ops.grouped_quantize.default(input, group_sizes, _key(format), amax, seed)


def grouped_quantize_transposed(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes each group along its columns, transposed.

    Args:
        input, group_sizes, format, seed: as in :func:`grouped_quantize`.
        amax: as there, of the transposed groups.

    Returns:
        ``data [K, T]``, where group g is the columns from its first row to its last, columns past the groups
        0; and ``scale_inv``: ``[G]``, ``[ceil(T/128) + G, up4(K)]``, or for ``mxfp8``
        ``[up128(K), 4 * (ceil(T/128) + G)]``; what no group uses is 0. In an ``aligned`` format ``data`` is
        ``[K, round_up(T, 32) + 32 * (G + 1)]`` and group g, from row b on, begins at ``round_up(b, 32) + 32 * g``
        (:meth:`transformer_plugin.formats.Format.line_begin`), with zeros between groups.

    Raises:
        TypeError, ValueError: as :func:`grouped_quantize`.
    """
    return _ops.grouped_quantize_transposed.default(input, group_sizes, _key(format), amax, seed)


def grouped_quantize_both(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`grouped_quantize` and :func:`grouped_quantize_transposed` in one pass over the input.

    Args:
        input, group_sizes, format, amax, seed: as in :func:`grouped_quantize`.
        amax_t: as ``amax``, of the transposed matrix; none for ``fp8_tensor``, whose one amax serves both.

    Returns:
        ``data, scale_inv, data_transposed, scale_inv_transposed``.

    Raises:
        TypeError, ValueError: as :func:`grouped_quantize`.
    """
    return _ops.grouped_quantize_both.default(input, group_sizes, _key(format), amax, amax_t, seed)


def grouped_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """``float(data) * scale_inv`` of each group in float32, then rounded to ``dtype``.

    Args:
        data: ``[T, K]`` as :func:`grouped_quantize` returns it, or with ``transposed`` ``[K, T]``.
        scale_inv, group_sizes, format: what it was quantized with.
        dtype: float32, bfloat16 or float16.
        transposed: whether ``data`` is transposed; the result is not.
        amax: of ``nvfp4``, what it was quantized with; none for the other formats.

    Returns:
        ``[T, K]``; rows past the groups are 0. Of transposed data in an ``aligned`` format T rounded up to a multiple
        of 32. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`dequantize` and :func:`grouped_quantize`.
    """
    return _ops.grouped_dequantize.default(
        data, scale_inv, group_sizes, _key(format), dtype, transposed, amax
    )


def amax(input: Tensor, format: str | Format, group_sizes: Tensor | None = None) -> Tensor:
    """The largest magnitudes that a format scales the rows of ``input`` by.

    Between this and :func:`quantize` with ``amax=``, ranks can reduce theirs with a maximum, to use the same scale.

    Args:
        input: as in :func:`quantize`, or with ``group_sizes`` as in :func:`grouped_quantize`.
        format: a key of ``fp8_tensor`` or ``nvfp4``.
        group_sizes: ``[G]`` int32 or int64 on the device of ``input``, contiguous: ``input`` is ragged.

    Returns:
        float32 ``[1]``, ``[G]`` for G matrices or G groups; with ``row_scaled`` ``[M]``, ``[G, M]`` or ``[T]``.
        NaN is ignored, an infinity is not; 0 for an empty input. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, another format; on a CPU also sizes that are
            negative or sum to more than T.
    """
    return _ops.amax.default(input, _key(format), group_sizes)


def amax_transposed(input: Tensor, format: str | Format, group_sizes: Tensor | None = None) -> Tensor:
    """The largest magnitudes that a format scales the columns of ``input`` by.

    Args:
        input, format, group_sizes: as in :func:`amax`.

    Returns:
        As :func:`amax`, of the transposed matrix, after the Hadamard transform if the format has ``rht``. Without that
        and ``row_scaled`` the same numbers; with ``row_scaled`` ``[K]`` or ``[G, K]``.

    Raises:
        TypeError, ValueError: as :func:`amax`.
    """
    return _ops.amax_transposed.default(input, _key(format), group_sizes)


def amax_both(
    input: Tensor, format: str | Format, group_sizes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`amax` and :func:`amax_transposed` in one pass over the input.

    Args:
        input, format, group_sizes: as in :func:`amax`.

    Returns:
        ``amax, amax_transposed``.

    Raises:
        TypeError, ValueError: as :func:`amax`.
    """
    return _ops.amax_both.default(input, _key(format), group_sizes)
