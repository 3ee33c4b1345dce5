"""What the quantize ops mean. Sizes of groups are read on the host: this is the meaning, not the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, Format


def _format(format: str | Format) -> Format:
    return Format.parse(format) if isinstance(format, str) else format


# Scales: from an amax to the float32 factor that multiplies a value before it is rounded.


def encode_scale(amax: Tensor, format: Format, overflow: float) -> Tensor:
    """The float32 factor before rounding; ``overflow`` stands for one that float32 cannot hold."""
    a = amax.float().clamp(min=format.epsilon)
    scale = torch.full_like(a, format.largest) / a
    scale = torch.where(scale.isinf(), torch.full_like(scale, overflow), scale)
    scale = torch.where((a == 0) | a.isinf(), torch.ones_like(scale), scale)
    if format.power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def encode_exponent(amax: Tensor, format: Format) -> Tensor:
    """The E8M0 byte ``e`` of an amax without NaN: ``2**(e - 127)`` is ``amax / largest`` rounded up to a power of
    two, so that no finite element overflows. An infinite amax takes the largest scale, a zero one the least.

    Source: OCP Microscaling Formats (MX) v1.0 specification for E8M0; NVIDIA TransformerEngine for rounding up,
    and for the product with the float32 nearest to ``1 / largest`` instead of a division.
    """
    largest = torch.tensor(format.largest, dtype=torch.float32, device=amax.device)
    bits = (amax.float() * (1 / largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Byte 0 is 2^-127, which as a subnormal float32 has the mantissa 0x400000.
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + up).clamp(max=254).to(torch.uint8)


def decode_exponent(exponent: Tensor) -> Tensor:
    """``2**(e - 127)`` of bytes in float32, the subnormal 2^-127 for 0 and NaN for 255."""
    bits = torch.where(exponent == 0, 0x00400000, exponent.int() << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).int().view(torch.float32)


def round_to_fp8(values: Tensor, format: Format) -> Tensor:
    """Nearest even, saturating, NaN of either sign to 0x7F."""
    assert format.dtype is not None
    codes = values.clamp(-format.largest, format.largest).to(format.dtype).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(codes, 0x7F), codes).view(format.dtype)


# Layouts: where the scales of a matrix are stored.


class _Layout(Protocol):
    """How one family makes, stores and finds its scales. E8M0 has no arithmetic: in here its bytes are uint8."""

    def encode(self, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of the amax of each block: the factors before rounding, and the scales that are stored."""

    def store(self, scale: Tensor, rows: int) -> Tensor:
        """Scales ``[blocks down, blocks across]`` of a matrix with so many rows, as they lie in memory."""

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        """The float32 scale of each element, broadcast against ``[..., rows, columns]``."""

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        """Zeros for the scales of a ragged matrix ``[rows, columns]``."""

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        """The part that group ``g`` has, of rows begin to end; ``block`` is how many blocks of 128 rows the
        groups before it have."""


class _OneScale:
    """fp8_tensor: ``[1]``; ``[G]`` for a stack of matrices or a ragged one."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def encode(self, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = encode_scale(amax, self.format, torch.finfo(torch.float32).max)
        return scale, 1 / scale

    def store(self, scale: Tensor, rows: int) -> Tensor:
        return scale.reshape(1)

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        return stored[:, None, None] if stored.numel() != 1 else stored

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        return torch.zeros(groups)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        return ragged[g : g + 1]


class _BlockScales:
    """fp8_block: ``[ceil(K/128), up4(M)]``, the scales of one block of columns together; square blocks
    ``[ceil(M/128), up4(ceil(K/128))]``."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def encode(self, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = encode_scale(amax, self.format, torch.finfo(dtype).max)
        return scale, 1 / scale

    def store(self, scale: Tensor, rows: int) -> Tensor:
        stored = scale if self.format.square_blocks else scale.T
        return F.pad(stored, (0, -stored.shape[1] % 4)).contiguous()

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        assert self.format.block is not None
        height, width = self.format.block
        scale = stored if self.format.square_blocks else stored.mT
        scale = scale.repeat_interleave(height, -2)[..., :rows, :]
        return scale.repeat_interleave(width, -1)[..., :columns]

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        if transposed:
            return torch.zeros(-(-rows // BLOCK) + groups, -(-columns // 4) * 4)
        return torch.zeros(-(-columns // BLOCK), -(-rows // 4) * 4)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        return ragged[block : block + -(-(end - begin) // BLOCK)] if transposed else ragged[:, begin:end]


class _MXScales:
    """mxfp8: bytes ``[up128(M), 4 * ceil(K/128)]``, the scale of a row's blocks together, as
    TransformerEngine's row-wise scales before they are swizzled. A square block's scale is there for each row."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def encode(self, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exponent = encode_exponent(amax, self.format)
        return 1 / decode_exponent(exponent), exponent

    def store(self, scale: Tensor, rows: int) -> Tensor:
        assert self.format.block is not None
        scale = scale.repeat_interleave(self.format.block[0], 0)[:rows]
        return F.pad(scale, (0, -scale.shape[1] % 4, 0, -rows % 128))

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        assert self.format.block is not None
        scale = decode_exponent(stored.view(torch.uint8))[..., :rows, :]
        return scale.repeat_interleave(self.format.block[1], -1)[..., :columns]

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        if transposed:
            return torch.zeros(-(-columns // 128) * 128, 4 * (-(-rows // 128) + groups), dtype=torch.uint8)
        return torch.zeros(-(-rows // 128) * 128, 4 * -(-columns // 128), dtype=torch.uint8)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        if transposed:
            return ragged[:, 4 * block : 4 * (block + -(-(end - begin) // 128))]
        return ragged[begin:end]


def _layout(format: Format) -> _Layout:
    layouts: dict[str, Callable[[Format], _Layout]] = {
        "fp8_tensor": _OneScale,
        "fp8_block": _BlockScales,
        "mxfp8": _MXScales,
    }
    return layouts[format.family](format)


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """[M, K] as [blocks down, blocks across, height, width], padded with zeros."""
    m, k = matrix.shape
    padded = F.pad(matrix, (0, -k % width, 0, -m % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)


def _quantize_matrix(matrix: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """One matrix along rows; bytes of the scales where they are E8M0."""
    m, k = matrix.shape
    values = matrix.float().contiguous()
    magnitudes = values.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    if format.block is None:
        amax = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    else:
        amax = _blocks(magnitudes, *format.block).amax((2, 3))
    layout = _layout(format)
    factor, scale_inv = layout.encode(amax, matrix.dtype)
    if format.block is not None:
        height, width = format.block
        factor = factor.repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
    return round_to_fp8(values * factor, format), layout.store(scale_inv, m)


def _finished(scale: Tensor, format: Format) -> Tensor:
    """Stored scales in the dtype that ops return."""
    assert format.scale_dtype is not None
    return scale.view(format.scale_dtype)


def quantize(input: Tensor, format: str | Format) -> tuple[Tensor, Tensor]:
    """Along rows; each matrix of a 3-D input by itself."""
    fmt = _format(format)
    if input.dim() == 2:
        data, scale = _quantize_matrix(input, fmt)
        return data, _finished(scale, fmt)
    if input.shape[0] == 0:
        data, scale = _quantize_matrix(input.new_zeros(input.shape[1:]), fmt)
        scale = scale.squeeze(0) if fmt.block is None else scale
        return data.new_empty(0, *data.shape), _finished(scale.new_empty(0, *scale.shape), fmt)
    datas, scales = zip(*(_quantize_matrix(matrix, fmt) for matrix in input), strict=True)
    data = torch.stack([d.view(torch.uint8) for d in datas]).view(datas[0].dtype)
    return data, _finished(torch.cat(scales) if fmt.block is None else torch.stack(scales), fmt)


def quantize_transposed(input: Tensor, format: str | Format) -> tuple[Tensor, Tensor]:
    """Along rows of the transposed matrix."""
    return quantize(input.mT, format)


def quantize_both(input: Tensor, format: str | Format) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both directions."""
    return *quantize(input, format), *quantize_transposed(input, format)


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
) -> Tensor:
    """float(data) * scale_inv."""
    fmt = _format(format)
    scale = _layout(fmt).spread(scale_inv, *data.shape[-2:])
    output = data.float() * scale
    quiet = torch.tensor(float("nan"), device=data.device).to(dtype)
    output = torch.where(output.isnan(), quiet, output.to(dtype))
    return (output.mT if transposed else output).contiguous()


def _groups(group_sizes: Tensor) -> list[tuple[int, int, int]]:
    """First and last row of each group, and how many blocks of 128 rows the groups before it have."""
    groups, begin, block = [], 0, 0
    for size in group_sizes.tolist():
        groups.append((begin, begin + size, block))
        begin, block = begin + size, block + -(-size // BLOCK)
    return groups


def grouped_quantize(input: Tensor, group_sizes: Tensor, format: str | Format) -> tuple[Tensor, Tensor]:
    """Each group along its rows; the tail is zero."""
    return _grouped_quantize(input, group_sizes, _format(format), transposed=False)


def grouped_quantize_transposed(
    input: Tensor, group_sizes: Tensor, format: str | Format
) -> tuple[Tensor, Tensor]:
    """Each group along the rows of its transposed matrix; blocks begin anew at each group."""
    return _grouped_quantize(input, group_sizes, _format(format), transposed=True)


def _grouped_quantize(
    input: Tensor, group_sizes: Tensor, format: Format, transposed: bool
) -> tuple[Tensor, Tensor]:
    assert format.dtype is not None
    layout, groups = _layout(format), group_sizes.numel()
    shape = input.shape[::-1] if transposed else input.shape
    data = torch.zeros(shape, dtype=torch.uint8, device=input.device)
    scale = layout.ragged(input.shape[0], input.shape[1], groups, transposed).to(input.device)
    for g, (begin, end, block) in enumerate(_groups(group_sizes)):
        group = input[begin:end]
        group_data, group_scale = _quantize_matrix(group.T if transposed else group, format)
        (data[:, begin:end] if transposed else data[begin:end]).copy_(group_data.view(torch.uint8))
        part = layout.of_group(scale, g, begin, end, block, transposed)
        part.copy_(group_scale[tuple(slice(n) for n in part.shape)])
    return data.view(format.dtype), _finished(scale, format)


def grouped_quantize_both(
    input: Tensor, group_sizes: Tensor, format: str | Format
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both directions."""
    return (
        *grouped_quantize(input, group_sizes, format),
        *grouped_quantize_transposed(input, group_sizes, format),
    )


def grouped_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
) -> Tensor:
    """Each group by itself; the tail is zero."""
    fmt = _format(format)
    rows, columns = (data.shape[1], data.shape[0]) if transposed else (data.shape[0], data.shape[1])
    output = torch.zeros(rows, columns, dtype=dtype, device=data.device)
    for g, (begin, end, block) in enumerate(_groups(group_sizes)):
        group_data = data[:, begin:end] if transposed else data[begin:end]
        group_scale = _layout(fmt).of_group(scale_inv, g, begin, end, block, transposed)
        output[begin:end] = dequantize(group_data, group_scale, fmt, dtype, transposed)
    return output
