"""What it means to quantize into given buffers, and to requantize."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference.quantize import amax as _amax
from transformer_plugin.reference.quantize import (
    dequantize,
    grouped_dequantize,
    grouped_quantize,
    grouped_quantize_both,
    grouped_quantize_transposed,
    quantize,
    quantize_both,
    quantize_transposed,
)


def _write(buffers: tuple[Tensor, ...], values: tuple[Tensor, ...], noop: Tensor | None) -> None:
    """Every byte, or none."""
    if noop is not None and noop.item() == 1:
        return
    for buffer, value in zip(buffers, values, strict=True):
        buffer.view(torch.uint8).copy_(value.view(torch.uint8))


def quantize_out(
    input: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`quantize` into buffers."""
    _write((data, scale_inv), quantize(input, format, amax, seed), noop)


def quantize_transposed_out(
    input: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`quantize_transposed` into buffers."""
    _write((data, scale_inv), quantize_transposed(input, format, amax, seed), noop)


def quantize_both_out(
    input: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`quantize_both` into buffers."""
    _write((data, scale_inv, data_t, scale_t), quantize_both(input, format, amax, amax_t, seed), noop)


def grouped_quantize_out(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`grouped_quantize` into buffers."""
    _write((data, scale_inv), grouped_quantize(input, group_sizes, format, amax, seed), noop)


def grouped_quantize_transposed_out(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`grouped_quantize_transposed` into buffers."""
    _write((data, scale_inv), grouped_quantize_transposed(input, group_sizes, format, amax, seed), noop)


def grouped_quantize_both_out(
    input: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    data: Tensor,
    scale_inv: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """:func:`grouped_quantize_both` into buffers."""
    _write(
        (data, scale_inv, data_t, scale_t),
        grouped_quantize_both(input, group_sizes, format, amax, amax_t, seed),
        noop,
    )


def amax_list_out(
    inputs: list[Tensor],
    format: str | Format,
    amax: Tensor,
    amax_t: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """The amax of each tensor."""
    values = torch.cat([amax.new_zeros(0), *(_amax(input, format) for input in inputs)])
    _write((amax,), (values,), noop)
    if amax_t is not None:
        _write((amax_t,), (values,), noop)


def _amaxes(inputs: list[Tensor], format: str | Format, amax: Tensor | None) -> list[Tensor | None]:
    """The given ones, or their own."""
    if amax is not None:
        return list(amax.split(1))
    if (format if isinstance(format, Format) else Format.parse(format)).family in ("fp8_tensor", "nvfp4"):
        return [_amax(input, format) for input in inputs]
    return [None] * len(inputs)


def quantize_list(
    inputs: list[Tensor], format: str | Format, amax: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Each by itself."""
    given = _amaxes(inputs, format, amax)
    outputs = [quantize(input, format, one) for input, one in zip(inputs, given, strict=True)]
    return [data for data, _ in outputs], [scale for _, scale in outputs]


def quantize_list_both(
    inputs: list[Tensor], format: str | Format, amax: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Each by itself, both directions, for which one amax serves."""
    given = _amaxes(inputs, format, amax)
    outputs = [quantize_both(input, format, one, one) for input, one in zip(inputs, given, strict=True)]
    data, scale_inv, data_t, scale_t = ([output[i] for output in outputs] for i in range(4))
    return data, scale_inv, data_t, scale_t


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
    """Back to values, then along columns; the codes as they are where one scale serves both directions."""
    fmt = format if isinstance(format, Format) else Format.parse(format)
    if fmt.family == "fp8_tensor":
        codes = data.view(torch.uint8).mT
        if group_sizes is None:
            return codes.contiguous().view(data.dtype), scale_inv.clone()
        groups = group_sizes.numel()
        lines = codes.new_zeros(codes.shape[0], fmt.line_length(codes.shape[1], groups))
        begin = 0
        for group, size in enumerate(group_sizes.tolist()):
            first = fmt.line_begin(begin, group)
            lines[:, first : first + size] = codes[:, begin : begin + size]
            begin += size
        return lines.view(data.dtype), scale_inv.clone()
    if group_sizes is not None:
        values = grouped_dequantize(data, scale_inv, group_sizes, format, dtype, amax=amax)
        return grouped_quantize_transposed(values, group_sizes, format, amax_t, seed)
    values = dequantize(data, scale_inv, format, dtype, amax=amax)
    return quantize_transposed(values, format, amax_t, seed)
