"""What the quantize ops mean. Sizes of groups are read on the host: this is the meaning, not the way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, Format


def _format(format: str | Format) -> Format:
    return Format.parse(format) if isinstance(format, str) else format


def encode_scale(amax: Tensor, format: Format, overflow: float) -> Tensor:
    """The float32 factor before rounding; ``overflow`` stands for one that float32 cannot hold."""
    a = amax.float().clamp(min=format.epsilon)
    scale = torch.full_like(a, format.largest) / a
    scale = torch.where(scale.isinf(), torch.full_like(scale, overflow), scale)
    scale = torch.where((a == 0) | a.isinf(), torch.ones_like(scale), scale)
    if format.power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def round_to_fp8(values: Tensor, format: Format) -> Tensor:
    """Nearest even, saturating, NaN of either sign to 0x7F."""
    assert format.dtype is not None
    codes = values.clamp(-format.largest, format.largest).to(format.dtype).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(codes, 0x7F), codes).view(format.dtype)


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """[M, K] as [blocks down, blocks across, height, width], padded with zeros."""
    m, k = matrix.shape
    padded = F.pad(matrix, (0, -k % width, 0, -m % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)


def _quantize_matrix(matrix: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """One matrix along rows."""
    values = matrix.float().contiguous()
    magnitudes = values.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    largest_input = torch.finfo(torch.float32 if format.block is None else matrix.dtype).max
    if format.block is None:
        amax = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
        scale = encode_scale(amax, format, largest_input)
        return round_to_fp8(values * scale, format), (1 / scale).reshape(1)
    height, width = format.block
    amax = _blocks(magnitudes, height, width).amax((2, 3))
    scale = encode_scale(amax, format, largest_input)
    m, k = matrix.shape
    spread = scale.repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
    scale_inv = 1 / scale if format.square_blocks else (1 / scale).T
    return round_to_fp8(values * spread, format), F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous()


def quantize(input: Tensor, format: str | Format) -> tuple[Tensor, Tensor]:
    """Along rows; each matrix of a 3-D input by itself."""
    fmt = _format(format)
    if input.dim() == 2:
        return _quantize_matrix(input, fmt)
    if input.shape[0] == 0:
        data, scale = _quantize_matrix(input.new_zeros(input.shape[1:]), fmt)
        scale = scale.squeeze(0) if fmt.block is None else scale
        return data.new_empty(0, *data.shape), scale.new_empty(0, *scale.shape)
    datas, scales = zip(*(_quantize_matrix(matrix, fmt) for matrix in input), strict=True)
    data = torch.stack([d.view(torch.uint8) for d in datas]).view(datas[0].dtype)
    return data, torch.cat(scales) if fmt.block is None else torch.stack(scales)


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
    values = data.float()
    if fmt.block is None:
        scale = scale_inv if data.dim() == 2 else scale_inv[:, None, None]
    else:
        height, width = fmt.block
        scale = scale_inv if fmt.square_blocks else scale_inv.mT
        scale = scale.repeat_interleave(height, -2)[..., : data.shape[-2], :]
        scale = scale.repeat_interleave(width, -1)[..., : data.shape[-1]]
    output = values * scale
    quiet = torch.tensor(float("nan"), device=data.device).to(dtype)
    output = torch.where(output.isnan(), quiet, output.to(dtype))
    return (output.mT if transposed else output).contiguous()


def _groups(group_sizes: Tensor) -> list[tuple[int, int]]:
    ends = group_sizes.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def grouped_quantize(input: Tensor, group_sizes: Tensor, format: str | Format) -> tuple[Tensor, Tensor]:
    """Each group along its rows; the tail is zero."""
    fmt = _format(format)
    assert fmt.dtype is not None
    rows, columns = input.shape
    data = torch.zeros(rows, columns, dtype=torch.uint8, device=input.device)
    scale = torch.zeros(group_sizes.numel(), dtype=torch.float32, device=input.device)
    if fmt.block is not None:
        scale = scale.new_zeros(-(-columns // BLOCK), (rows + 3) // 4 * 4)
    for g, (begin, end) in enumerate(_groups(group_sizes)):
        group_data, group_scale = _quantize_matrix(input[begin:end], fmt)
        data[begin:end] = group_data.view(torch.uint8)
        if fmt.block is None:
            scale[g] = group_scale[0]
        else:
            scale[:, begin:end] = group_scale[:, : end - begin]
    return data.view(fmt.dtype), scale


def grouped_quantize_transposed(
    input: Tensor, group_sizes: Tensor, format: str | Format
) -> tuple[Tensor, Tensor]:
    """Each group along the rows of its transposed matrix; blocks begin anew at each group."""
    fmt = _format(format)
    assert fmt.dtype is not None
    rows, columns = input.shape
    data = torch.zeros(columns, rows, dtype=torch.uint8, device=input.device)
    scale = torch.zeros(group_sizes.numel(), dtype=torch.float32, device=input.device)
    if fmt.block is not None:
        scale = scale.new_zeros(-(-rows // BLOCK) + group_sizes.numel(), (columns + 3) // 4 * 4)
    used = 0
    for g, (begin, end) in enumerate(_groups(group_sizes)):
        group_data, group_scale = _quantize_matrix(input[begin:end].T, fmt)
        data[:, begin:end] = group_data.view(torch.uint8)
        if fmt.block is None:
            scale[g] = group_scale[0]
        else:
            scale[used : used + group_scale.shape[0]] = group_scale
            used += group_scale.shape[0]
    return data.view(fmt.dtype), scale


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
    used = 0
    for g, (begin, end) in enumerate(_groups(group_sizes)):
        blocks = -(-(end - begin) // BLOCK)
        group_data = data[:, begin:end] if transposed else data[begin:end]
        if fmt.block is None:
            group_scale = scale_inv[g : g + 1]
        else:
            group_scale = scale_inv[used : used + blocks] if transposed else scale_inv[:, begin:end]
        output[begin:end] = dequantize(group_data, group_scale, fmt, dtype, transposed)
        used += blocks
    return output
