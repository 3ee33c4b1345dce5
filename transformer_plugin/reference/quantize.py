"""References of the quantize ops. They read group sizes on the host; only the results are specified, not how they
are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, Format
from transformer_plugin.reference import _nvfp4
from transformer_plugin.reference._fp8 import decode_exponent, encode_exponent, encode_scale, round_to_fp8
from transformer_plugin.reference._layouts import layout_of, tile, untile
from transformer_plugin.reference._rows import indexed_rows

__all__ = [
    "amax",
    "dequantize",
    "quantize",
]


def _format(format: str | Format) -> Format:
    return Format.parse(format) if isinstance(format, str) else format


def _magnitudes(input: Tensor) -> Tensor:
    """Returns the magnitudes for an amax: NaN is replaced by 0, and infinities are kept."""
    return input.float().abs().nan_to_num(nan=0.0, posinf=float("inf"))


def _largest(magnitudes: Tensor, dim: int | None = None) -> Tensor:
    """Returns the amax of all elements, ``[1]``, or along a dimension; 0 if there are none."""
    if dim is None:
        return magnitudes.flatten().amax(0, keepdim=True) if magnitudes.numel() else magnitudes.new_zeros(1)
    if magnitudes.shape[dim] == 0:
        return magnitudes.sum(dim)
    return magnitudes.amax(dim)


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """Returns [M, K] as [blocks down, blocks across, height, width], padded with zeros."""
    m, k = matrix.shape
    padded = F.pad(matrix, (0, -k % width, 0, -m % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)


def _quantize_matrix(
    matrix: Tensor, format: Format, amax: Tensor | None, bytes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantizes one matrix row-wise: returns the bytes of the data and the stored scales, as bytes if a scale is
    one byte."""
    m, k = matrix.shape
    layout = layout_of(format)
    if format.family == "nvfp4":
        assert amax is not None, "nvfp4 takes the amax that reference.amax gives"
        data, scale = _nvfp4.quantize_matrix(matrix, format, amax, bytes)
        return data, layout.store(scale, m)
    values, magnitudes = matrix.float().contiguous(), _magnitudes(matrix)
    if format.family == "fp8_row":
        factor = encode_scale(_largest(magnitudes, 1), format, torch.finfo(torch.float32).max)
        return round_to_fp8(values * factor[:, None], format).view(torch.uint8), layout.store(1 / factor, m)
    if format.family == "fp8_tensor":
        amax = _largest(magnitudes) if amax is None else amax
        factor = encode_scale(amax, format, torch.finfo(torch.float32).max)
        return round_to_fp8(values * factor, format).view(torch.uint8), layout.store(1 / factor, m)
    assert format.block is not None
    amax = _blocks(magnitudes, *format.block).amax((2, 3))
    if format.family == "mxfp8":
        scale = encode_exponent(amax, format)
        factor = 1 / decode_exponent(scale)
    else:
        factor = encode_scale(amax, format, torch.finfo(matrix.dtype).max)
        scale = 1 / factor
    height, width = format.block
    factor = factor.repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
    return round_to_fp8(values * factor, format).view(torch.uint8), layout.store(scale, m)


def _oriented(input: Tensor, format: Format, transposed: bool) -> Tensor:
    """Returns the matrix or stack whose rows are quantized."""
    oriented = input.mT.contiguous() if transposed else input
    return _nvfp4.rotate(oriented) if transposed and format.random_hadamard else oriented


def _random(input: Tensor, format: Format, seed: Tensor | None, transposed: bool) -> Tensor | None:
    """Returns the bytes of stochastic rounding, one per element of an oriented input; None without it."""
    assert (seed is not None) == format.stochastic_rounding, "a seed is for stochastic rounding"
    if seed is None:
        return None
    return _nvfp4.random_bytes(seed, input.numel(), int(transposed)).view(input.shape)


def _finished(data: Tensor, scale: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Returns data and scales in the dtypes and the layout that the ops return."""
    assert format.dtype is not None and format.scale_dtype is not None
    scale = tile(scale) if format.tiled_scales else scale
    return data.view(format.dtype), scale.view(format.scale_dtype)


def _quantize(
    input: Tensor, format: Format, amax: Tensor | None, seed: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor]:
    input = _oriented(input, format, transposed)
    random = _random(input, format, seed, transposed)
    if input.dim() == 2:
        return _finished(*_quantize_matrix(input, format, amax, random), format)
    if input.shape[0] == 0:
        one = input.new_zeros(input.shape[1:])
        data, scale = _quantize_matrix(
            one, format, one.new_zeros(1, dtype=torch.float32), None if random is None else one.byte()
        )
        scale = scale.squeeze(0) if format.family == "fp8_tensor" else scale
        return _finished(data.new_empty(0, *data.shape), scale.new_empty(0, *scale.shape), format)
    members = [
        _quantize_matrix(
            matrix,
            format,
            None if amax is None else amax[g].reshape(-1),
            None if random is None else random[g],
        )
        for g, matrix in enumerate(input)
    ]
    datas, scales = zip(*members, strict=True)
    return _finished(
        torch.stack(datas),
        torch.cat(scales) if format.family == "fp8_tensor" else torch.stack(scales),
        format,
    )


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
    """Quantizes row-wise, and the transposed matrix row-wise, rotated before if the format has ``rht``. Each matrix
    of a 3-D input and each group is quantized separately, and the tail is zero, also without ``zero_tail``. The single
    amax of ``fp8_tensor`` serves both directions. With ``rows`` the rows of the ragged matrix are ``input[rows]``,
    zeros for -1."""
    fmt = _format(format)
    if rows is not None:
        assert group_sizes is not None, "rows belong to groups"
        input = indexed_rows(input, rows, group_sizes)
    assert fmt.traits.has_group_columns or not columnwise or group_sizes is None, "a scale spans groups"
    outputs: tuple[Tensor, ...] = ()
    for transposed in [False] * rowwise + [True] * columnwise:
        of_direction = amax_t if transposed and fmt.family == "nvfp4" else amax
        if group_sizes is None:
            outputs += _quantize(input, fmt, of_direction, seed, transposed)
        else:
            outputs += _grouped_quantize(input, group_sizes, fmt, of_direction, seed, transposed)
    return outputs


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
    """Returns float(data) * scale_inv, for nvfp4 times the amax; with ``rht`` this is the rotated matrix. Each
    group is dequantized separately, and the tail is zero, also without ``zero_tail``."""
    fmt = _format(format)
    if group_sizes is not None:
        return _grouped_dequantize(data, scale_inv, group_sizes, fmt, dtype, transposed, amax)
    scale_inv = untile(scale_inv.view(torch.uint8)) if fmt.tiled_scales else scale_inv
    if fmt.family == "nvfp4":
        assert amax is not None, "nvfp4 takes the amax that it was quantized with"
        values = _nvfp4.decode(_nvfp4.unpack(data.view(torch.uint8)))
        scale = layout_of(fmt).spread(scale_inv, *values.shape[-2:])
        over = amax.view(*values.shape[:-2], values.shape[-2] if fmt.row_scaled else 1, 1)
        output = values * _nvfp4.decode_factor(scale, over, fmt)
    else:
        output = data.float() * layout_of(fmt).spread(scale_inv, *data.shape[-2:])
    quiet = torch.tensor(float("nan"), device=data.device).to(dtype)
    output = torch.where(output.isnan(), quiet, output.to(dtype))
    return (output.mT if transposed else output).contiguous()


def _groups(group_sizes: Tensor) -> list[tuple[int, int, int]]:
    """Yields the first and last row of each group, and the number of blocks of 128 rows in the groups before it."""
    groups, begin, block = [], 0, 0
    for size in group_sizes.tolist():
        groups.append((begin, begin + size, block))
        begin, block = begin + size, block + -(-size // BLOCK)
    return groups


def _group_amax(amax: Tensor | None, format: Format, g: int, rows: slice, transposed: bool) -> Tensor | None:
    """Returns the amax of a group: its single entry, or the entries of its rows."""
    if amax is None:
        return None
    if format.row_scaled:
        return amax[g] if transposed else amax[rows]
    return amax[g : g + 1]


def _grouped_quantize(
    input: Tensor,
    group_sizes: Tensor,
    format: Format,
    amax: Tensor | None,
    seed: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    layout, groups = layout_of(format), group_sizes.numel()
    scale = layout.ragged(input.shape[0], input.shape[1], groups, transposed).to(input.device)
    oriented = _oriented(input, format, transposed)
    random = _random(oriented, format, seed, transposed)
    per_byte = 2 if format.family == "nvfp4" else 1
    width = format.line_length(oriented.shape[1], groups) if transposed else oriented.shape[1]
    shape = (oriented.shape[0], width // per_byte)
    data = torch.zeros(shape, dtype=torch.uint8, device=input.device)
    for g, (begin, end, block) in enumerate(_groups(group_sizes)):
        rows = slice(begin, end)
        where = (slice(None), rows) if transposed else (rows, slice(None))
        group_data, group_scale = _quantize_matrix(
            oriented[where],
            format,
            _group_amax(amax, format, g, rows, transposed),
            None if random is None else random[where],
        )
        first = format.line_begin(begin, g)
        line = slice(first // per_byte, (first + end - begin) // per_byte)
        (data[:, line] if transposed else data[rows]).copy_(group_data)
        part = layout.of_group(scale, g, begin, end, block, transposed)
        used = tuple(slice(min(n, m)) for n, m in zip(part.shape, group_scale.shape, strict=True))
        part[used] = group_scale[used]
    return _finished(data, scale, format)


def _grouped_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    group_sizes: Tensor,
    fmt: Format,
    dtype: torch.dtype,
    transposed: bool,
    amax: Tensor | None,
) -> Tensor:
    scale_inv = untile(scale_inv.view(torch.uint8)) if fmt.tiled_scales else scale_inv
    fmt = replace(fmt, tiled_scales=False)
    per_byte = 2 if fmt.family == "nvfp4" else 1
    rows, columns = data.shape[::-1] if transposed else data.shape
    rows, columns = (rows * per_byte, columns) if transposed else (rows, columns * per_byte)
    if transposed:
        rows -= fmt.line_length(0, group_sizes.numel())
    output = torch.zeros(rows, columns, dtype=dtype, device=data.device)
    for g, (begin, end, block) in enumerate(_groups(group_sizes)):
        first = fmt.line_begin(begin, g)
        line = slice(first // per_byte, (first + end - begin) // per_byte)
        group_data = data[:, line] if transposed else data[begin:end]
        group_scale = layout_of(fmt).of_group(scale_inv, g, begin, end, block, transposed)
        group_amax = _group_amax(amax, fmt, g, slice(begin, end), transposed)
        output[begin:end] = dequantize(
            group_data, group_scale, fmt, dtype, transposed=transposed, amax=group_amax
        )
    return output


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
    """Returns the amaxes of the format: one per matrix, group or, with ``row_scaled``, row; column-wise after the
    rotation, if the format has one. float32; NaN is ignored, and the amax of no elements is 0."""
    first, *rest = (
        _amax(input, _format(format), group_sizes, transposed)
        for transposed in [False] * rowwise + [True] * columnwise
    )
    return (first, rest[0]) if rest else first


def _amax(input: Tensor, format: Format, group_sizes: Tensor | None, transposed: bool) -> Tensor:
    magnitudes = _magnitudes(_oriented(input, format, transposed))
    if group_sizes is None:
        if format.row_scaled:
            return _largest(magnitudes, -1)
        if input.dim() == 2:
            return _largest(magnitudes)
        return _largest(magnitudes.flatten(1), 1)
    groups = _groups(group_sizes)
    parts = [magnitudes[:, b:e] if transposed else magnitudes[b:e] for b, e, _ in groups]
    if not format.row_scaled:
        return torch.cat([_largest(part) for part in parts] or [magnitudes.new_zeros(0)])
    if transposed:
        return torch.stack([_largest(part, 1) for part in parts] or [magnitudes.new_zeros(input.shape[1])])[
            : len(parts)
        ]
    output = _largest(magnitudes, 1)
    output[sum(group_sizes.tolist()) :] = 0
    return output
