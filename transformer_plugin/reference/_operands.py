"""Operands of the products as float values: what a format, its scales and a sequence of matrices mean."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, key_of, listed
from transformer_plugin.reference.quantize import dequantize

#: Values, and where rows have scales the scale of each row, a factor of the sum.
Operand = tuple[Tensor, Tensor | None]


def wide(tensor: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def operand(
    data: Tensor,
    scales: Tensors | None,
    format: str | Format,
    group_sizes: Tensor | None = None,
    transposed: bool = False,
) -> Operand:
    """A matrix, a stack or a ragged matrix."""
    key = key_of(format)
    if key == "none":
        return wide(data), None
    assert scales is not None
    scale, amax = (*listed(scales), None)[:2]
    assert scale is not None
    if Format.parse(key).traits.has_row_scales:
        return data.float(), scale
    return dequantize(data, scale, key, torch.float32, group_sizes, transposed, amax), None


def is_stack(matrices: list[Tensor]) -> bool:
    """One tensor for all groups."""
    return len(matrices) == 1 and matrices[0].dim() != 2


def stack(b: Tensors, scales: Tensors | None, format: str | Format) -> Operand:
    """One tensor for all groups, or a matrix for each."""
    matrices, each = listed(b), [] if scales is None else listed(scales)
    if is_stack(matrices):
        return operand(matrices[0], each, format)
    groups = len(matrices)
    operands = [operand(matrix, each[g::groups], format) for g, matrix in enumerate(matrices)]
    row_scales = [scale for _, scale in operands if scale is not None]
    return torch.stack([values for values, _ in operands]), torch.stack(row_scales) if row_scales else None


def output_dtype(data: Tensor, format: str | Format, dtype: torch.dtype | None) -> torch.dtype:
    """That of an operand without a format, bfloat16 of a quantized one."""
    return dtype or (data.dtype if key_of(format) == "none" else torch.bfloat16)
