"""References of quantizing into buffers and lists, and of requantizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference.quantize import amax as _amax
from transformer_plugin.reference.quantize import dequantize, quantize

__all__ = [
    "amax_list_out",
    "quantize_list",
    "quantize_out",
    "requantize_transposed",
]


def _write(buffers: Sequence[Tensor], values: tuple[Tensor, ...], noop: Tensor | None) -> None:
    """Writes every byte, or none."""
    if noop is not None and noop.item() == 1:
        return
    for buffer, value in zip(buffers, values, strict=True):
        buffer.view(torch.uint8).copy_(value.view(torch.uint8))


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
    """Writes the results of :func:`quantize` into buffers."""
    _write(out, quantize(input, format, group_sizes, amax, amax_t, seed, rowwise, columnwise), noop)


def amax_list_out(
    inputs: list[Tensor],
    format: str | Format,
    amax: Tensor,
    amax_t: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """Writes the amax of each tensor."""
    values = torch.cat([amax.new_zeros(0), *(_amax(input, format) for input in inputs)])
    _write((amax,), (values,), noop)
    if amax_t is not None:
        _write((amax_t,), (values,), noop)


def _amaxes(inputs: list[Tensor], format: str | Format, amax: Tensor | None) -> list[Tensor | None]:
    """Returns the amaxes of the argument, or those of the tensors."""
    if amax is not None:
        return list(amax.split(1))
    if (format if isinstance(format, Format) else Format.parse(format)).family in ("fp8_tensor", "nvfp4"):
        return [_amax(input, format) for input in inputs]
    return [None] * len(inputs)


def quantize_list(
    inputs: list[Tensor],
    format: str | Format,
    amax: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    stacked: bool = False,
) -> list[tuple[Tensor, ...]]:
    """Quantizes each tensor separately, or their stack; one amax serves both directions."""
    fmt = format if isinstance(format, Format) else Format.parse(format)
    if stacked:
        of_all = None if fmt.family not in ("fp8_tensor", "nvfp4") else amax
        if of_all is None and fmt.family == "nvfp4":
            of_all = _amax(torch.stack(inputs), fmt)
        of_columns = of_all if fmt.family == "nvfp4" else None
        return [quantize(torch.stack(inputs), fmt, None, of_all, of_columns, None, rowwise, columnwise)]
    outputs = []
    for input, one in zip(inputs, _amaxes(inputs, format, amax), strict=True):
        amax_t = one if fmt.family == "nvfp4" else None
        outputs.append(quantize(input, fmt, amax=one, amax_t=amax_t, rowwise=rowwise, columnwise=columnwise))
    return outputs


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
    """Dequantizes, then quantizes column-wise. If one scale serves both directions, the data is only transposed."""
    fmt = format if isinstance(format, Format) else Format.parse(format)
    if fmt.family == "fp8_tensor":
        bits = data.view(torch.uint8).mT
        if group_sizes is None:
            return bits.contiguous().view(data.dtype), scale_inv.clone()
        groups = group_sizes.numel()
        aligned_data = bits.new_zeros(bits.shape[0], fmt.line_length(bits.shape[1], groups))
        begin = 0
        for group, size in enumerate(group_sizes.tolist()):
            first = fmt.line_begin(begin, group)
            aligned_data[:, first : first + size] = bits[:, begin : begin + size]
            begin += size
        return aligned_data.view(data.dtype), scale_inv.clone()
    values = dequantize(data, scale_inv, format, dtype, group_sizes, amax=amax)
    data_t, scale_t = quantize(
        values, format, group_sizes, amax_t=amax_t, seed=seed, rowwise=False, columnwise=True
    )
    return data_t, scale_t
