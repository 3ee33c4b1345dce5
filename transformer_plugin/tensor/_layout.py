"""Sizes of the buffers of a value, and the words of its errors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_plugin._arguments import non_strided_kind
from transformer_plugin.formats import BLOCK, Format

_parse = cache(Format.parse)


def parsed(key: str) -> Format:
    """The format of a key, one object for each. Constant for torch.compile."""
    return _parse(key)


def up(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def sizes(tensor: Tensor) -> str:
    """``[2, 3]``"""
    return str(list(tensor.shape))


def describe(value: object) -> str:
    """What an error says it got."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = non_strided_kind(value)
    if kind is not None:  # has no sizes or strides that torch would tell
        return kind
    text = f"{type(value).__name__} {sizes(value)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return text if value.is_contiguous() else f"{text} with strides {list(value.stride())}"


def message(op: str, argument: str, expected: str, got: str, advice: str) -> str:
    """The four parts of an error."""
    return f"transformer_plugin::{op}: argument '{argument}': expected {expected}, got {got}. {advice}."


class Facts(NamedTuple):
    """What functions ask of a format, in constants that torch.compile traces with."""

    key: str
    needs_amax: bool
    #: Whether fused ops quantize in this format.
    is_fused: bool
    #: Whether they find its scales in the same pass: they lie in blocks.
    is_one_pass: bool
    #: Whether the epilogue of a product finds them: the blocks lie along rows.
    is_in_epilogue: bool


def facts(key: str) -> Facts:
    """Those of a key. Constant for torch.compile."""
    return _facts(key)


@cache
def _facts(key: str) -> Facts:
    format = parsed(key)
    fused = format.traits.has_fused_ops
    one_pass = fused and format.family not in ("fp8_tensor", "nvfp4")
    return Facts(format.key, format.needs_amax, fused, one_pass, one_pass and not format.square_blocks)


class Shape(NamedTuple):
    """The sizes of one matrix of a value, or of the ragged matrix, and how many matrices or groups there are."""

    rows: int
    columns: int
    #: Matrices in a stack; None without a stack.
    stacked: int | None = None
    #: Groups of a ragged matrix; None if it is not ragged.
    groups: int | None = None

    @property
    def matrices(self) -> int:
        """How many matrices have scales of their own."""
        if self.stacked is not None:
            return self.stacked
        return 1 if self.groups is None else self.groups


def data_sizes(format: Format, shape: Shape, columnwise: bool) -> tuple[int, ...]:
    """Sizes of the data in one direction."""
    rows, columns = shape.rows, shape.columns
    if columnwise:
        length = rows if shape.groups is None else format.line_length(rows, shape.groups)
        rows, columns = columns, length
    if format.family == "nvfp4":
        columns //= 2
    return (rows, columns) if shape.stacked is None else (shape.stacked, rows, columns)


def scale_sizes(format: Format, shape: Shape, columnwise: bool) -> tuple[int, ...]:
    """Sizes of the scales in one direction: the table of :mod:`transformer_plugin.ops.quantize`."""
    if format.family == "fp8_tensor":
        return (shape.matrices,)
    rows, columns = (shape.columns, shape.rows) if columnwise else (shape.rows, shape.columns)
    blocks = -(-columns // BLOCK)  # along a row of the data
    if columnwise and shape.groups is not None:
        blocks += shape.groups  # blocks restart at each group
    if format.family == "fp8_row":
        own: tuple[int, ...] = (rows,)
    elif format.family == "fp8_block":
        own = (-(-rows // BLOCK), up(blocks, 4)) if format.square_blocks else (blocks, up(rows, 4))
    else:
        assert format.block is not None
        width = format.block[1]
        ragged = columnwise and shape.groups is not None
        own = (up(rows, 128), blocks * (128 // width) if ragged else up(-(-columns // width), 4))
    return own if shape.stacked is None else (shape.stacked, *own)


def amax_sizes(format: Format, shape: Shape, columnwise: bool) -> tuple[int, ...]:
    """Sizes of the amaxes of ``nvfp4`` in one direction."""
    if format.row_scaled:
        own = shape.columns if columnwise else shape.rows
        if columnwise and shape.groups is not None:
            return (shape.groups, own)
        return (own,) if shape.stacked is None else (shape.stacked, own)
    return (shape.matrices,)


def matrix_of(data: Tensor, format: Format, columnwise: bool) -> tuple[int, ...]:
    """Sizes of the value whose data this is; not of a ragged one along columns, whose data may be aligned."""
    *rest, rows, columns = data.shape
    if data.dtype == torch.float4_e2m1fn_x2 or (format.family == "nvfp4" and data.dtype == torch.uint8):
        columns *= 2
    return (*rest, columns, rows) if columnwise else (*rest, rows, columns)
