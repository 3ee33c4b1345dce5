"""Operands of the products as float values, from data, scales, a format and possibly a list of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, key_of, listed
from transformer_plugin.reference.quantize import dequantize

#: The values, and where rows have scales the scale of each row, which multiplies the sum.
Operand = tuple[Tensor, Tensor | None]


def wide(tensor: Tensor) -> Tensor:
    """Returns float64 unchanged, and everything else as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def operand(
    data: Tensor,
    scales: Tensors | None,
    format: str | Format,
    group_sizes: Tensor | None = None,
    transposed: bool = False,
) -> Operand:
    """Returns the values of a matrix, a stack or a ragged matrix."""
    key = key_of(format, "reference")
    if key == "none":
        return wide(data), None
    assert scales is not None
    scale, amax = (*listed(scales, "reference", "scales"), None)[:2]
    assert scale is not None
    if Format.parse(key).traits.has_row_scales:
        return data.float(), scale
    return dequantize(data, scale, key, torch.float32, group_sizes, transposed, amax), None


def is_stack(matrices: list[Tensor]) -> bool:
    """Whether there is one tensor for all groups."""
    return len(matrices) == 1 and matrices[0].dim() != 2


def stack(b: Tensors, scales: Tensors | None, format: str | Format) -> Operand:
    """Returns the values of one tensor for all groups, or of one matrix per group, as a stack."""
    each = [] if scales is None else listed(scales, "reference", "scales")
    matrices = listed(b, "reference", "b")
    if is_stack(matrices):
        return operand(matrices[0], each, format)
    groups = len(matrices)
    operands = [operand(matrix, each[g::groups], format) for g, matrix in enumerate(matrices)]
    row_scales = [scale for _, scale in operands if scale is not None]
    return torch.stack([values for values, _ in operands]), torch.stack(row_scales) if row_scales else None


def output_dtype(data: Tensor, format: str | Format, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the result: that of an operand without a format, or bfloat16 for a quantized operand."""
    return dtype or (data.dtype if key_of(format, "reference") == "none" else torch.bfloat16)
