"""Values made by hand with the ops of transformer_plugin.ops, against which those of the functions are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin import GroupedTensor, QuantizedTensor, ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.numerics import assert_same_bits

Value = QuantizedTensor | GroupedTensor

#: Formats of one matrix or a stack; those with square blocks do not have groups.
FORMATS = (
    *("fp8_tensor", "fp8_tensor:e5m2,pow2,eps=0.25", "fp8_row", "fp8_row:e5m2"),
    *("fp8_block", "fp8_block:e5m2,fp32", "fp8_block:square", "mxfp8", "mxfp8:square", "mxfp8:tiled"),
    *("nvfp4", "nvfp4:square", "nvfp4:rht", "nvfp4:sr", "nvfp4:row_scaled", "nvfp4:4over6"),
)
GROUPED_FORMATS = (
    *(key for key in FORMATS if "square" not in key),
    "fp8_tensor:aligned",
    "fp8_block:aligned",
)
#: One of each family, and a key with options in another order than Format writes them.
FAMILIES = ("fp8_tensor", "fp8_row", "fp8_block:pow2,e4m3", "mxfp8", "nvfp4", "nvfp4:row_scaled")

#: Rows of the groups, whole blocks of every format, one empty; and rows of the buffer.
SIZES, ROWS = (48, 0, 80), 144
DIRECTIONS = ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True})


def has_columns(key: str, grouped: bool = True) -> bool:
    """Whether the format quantizes columns, which some formats do of matrices without groups only."""
    return not grouped or Format.parse(key).traits.has_group_columns


#: Keys of matrices with groups, and the directions that each has.
GROUPED_DIRECTIONS = [(key, d) for key in GROUPED_FORMATS for d in DIRECTIONS if not d or has_columns(key)]
GROUPED_COLUMNWISE = [(key, c) for key in GROUPED_FORMATS for c in (False, True) if not c or has_columns(key)]


def id_of(value: Any) -> str | None:
    """The id of a direction; pytest makes the others."""
    ids = ("rows", "both", "columns")
    return ids[DIRECTIONS.index(value)] if isinstance(value, dict) else None


def draw(*size: int, seed: int = 0, device: torch.device | str = "cpu", dtype: Any = torch.float32) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype).to(device)


def sizes_on(device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """The rows of the groups."""
    return torch.tensor(SIZES, device=device, dtype=dtype)


def seed_of(key: str, device: torch.device | str) -> Tensor | None:
    """A seed for formats with stochastic rounding."""
    wanted = Format.parse(key).stochastic_rounding
    return torch.tensor([1234567], device=device) if wanted else None


def buffers(
    x: Tensor, key: str, group_sizes: Tensor | None = None, rowwise: bool = True, columnwise: bool = False
) -> dict[str, Tensor]:
    """The buffers of a value by name: the ops called with each amax by hand."""
    amaxes: dict[str, Tensor] = {}
    if Format.parse(key).needs_amax:
        if rowwise:
            amaxes["amax"] = ops.amax(x, key, group_sizes)
        if columnwise:
            amaxes["amax_t"] = ops.amax(x, key, group_sizes, rowwise=False, columnwise=True)
    outputs = ops.quantize(
        x, key, group_sizes, seed=seed_of(key, x.device), rowwise=rowwise, columnwise=columnwise, **amaxes
    )
    names = ["rowwise_data", "scale_inv"] if rowwise else []
    names += ["columnwise_data", "columnwise_scale_inv"] if columnwise else []
    found = dict(zip(names, outputs, strict=True))
    if "amax" in amaxes:
        found["amax"] = amaxes["amax"]
    if "amax_t" in amaxes:
        found["columnwise_amax"] = amaxes["amax_t"]
    return found if group_sizes is None else {**found, "group_sizes": group_sizes}


def assert_value(value: Any, expected: dict[str, Tensor], like: Tensor, key: str) -> None:
    """The type that belongs to the shape, the nominal dtype, the format and every byte of every buffer."""
    is_grouped = "group_sizes" in expected or like.dim() == 3
    assert type(value) is (GroupedTensor if is_grouped else QuantizedTensor)
    assert value.shape == like.shape and value.dtype == like.dtype and value.device == like.device
    assert value.format == Format.parse(key) and not value.requires_grad
    assert sorted(name for name, _ in value._buffers.present()) == sorted(expected)
    for name, tensor in expected.items():
        assert_same_bits(getattr(value, name), tensor, name)


def assert_ragged(value: Any, expected: Tensor, group_sizes: Tensor) -> None:
    """An unquantized ragged value with these numbers and the very tensor of group sizes."""
    assert type(value) is GroupedTensor and value.is_ragged and not value.format.is_quantized
    assert value.group_sizes is group_sizes
    assert value.shape == expected.shape and value.dtype == expected.dtype
    assert_same_bits(value.rowwise_data, expected)


def scales(found: dict[str, Tensor], columnwise: bool = False) -> list[Tensor]:
    """Scale and amax of one direction, as the ops of products take them."""
    names = ("columnwise_scale_inv", "columnwise_amax") if columnwise else ("scale_inv", "amax")
    return [found[name] for name in names if name in found]
