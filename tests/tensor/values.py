"""Values of every kind, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin.formats import Format

#: Formats with and without options that change the layout of a value.
KEYS = (
    *("fp8_tensor", "fp8_row", "fp8_block", "fp8_block:e5m2,fp32", "fp8_block:square"),
    *("mxfp8", "mxfp8:tiled", "nvfp4", "nvfp4:row_scaled", "nvfp4:square"),
)
#: Which numbers a value has: of one matrix, a stack of matrices, or a ragged matrix.
KINDS = ("matrix", "stack", "ragged")
DIRECTIONS = ((True, False), (False, True), (True, True))


def numbers(kind: str, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers in the shape of a kind."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"matrix": (48, 160), "stack": (3, 48, 160), "ragged": (80, 160)}[kind]
    return torch.randn(shape, generator=generator).to(device, dtype)


def sizes(device: torch.device, kind: str = "ragged") -> Tensor | None:
    """Group sizes of a ragged value, whose last 16 rows are past them."""
    return torch.tensor([16, 0, 48], device=device) if kind == "ragged" else None


def exists(key: str, kind: str, columnwise: bool) -> bool:
    """Whether the ops have such a value."""
    format = Format.parse(key)
    if kind == "ragged" and format.square_blocks:
        return False
    return not (kind == "ragged" and columnwise and not format.traits.has_group_columns)


CASES = [
    (key, kind, directions)
    for key in KEYS
    for kind in KINDS
    for directions in DIRECTIONS
    if exists(key, kind, directions[1])
]


def quantized(case: Any, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The value of a case."""
    key, kind, (rowwise, columnwise) = case
    x = numbers(kind, device, seed, dtype)
    return tp.quantize(x, key, group_sizes=sizes(device, kind), rowwise=rowwise, columnwise=columnwise)


def stack(device: torch.device, **arguments: Any) -> Any:
    """An unquantized stack of 4 members."""
    return tp.GroupedTensor(torch.randn(4, 8, 16, device=device), **arguments)


def bytes_of(value: Any) -> dict[str, Tensor]:
    """The buffers of a value as bytes, copied."""
    return {name: tensor.view(torch.uint8).clone() for name, tensor in value._buffers.present()}


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two values have the same buffers with the same bytes."""
    left, right = bytes_of(a), bytes_of(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
