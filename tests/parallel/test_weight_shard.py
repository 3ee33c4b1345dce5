"""WeightShard: its key, rows over ranks, and quantized rows that make up the bytes of the quantized weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.parallel import WeightShard
from transformer_plugin.parallel._gather_layout import Shards, buffer_layouts
from transformer_plugin.testing.numerics import assert_same_bits

RANKS = (1, 2, 3, 4)
NAMES = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
#: Formats whose columns are gathered, and the rows that a scale covers in one direction or the other.
ALIGN = {
    "fp8_block": 128,
    "fp8_block:fp32": 128,
    "mxfp8": 32,
    "nvfp4": 16,
    "nvfp4:square": 16,
    "fp8_tensor": 16,
}


@pytest.mark.parametrize(
    ("rows", "ranks", "align", "shard_rows", "valid"),
    [
        (63, 4, 16, 16, (16, 16, 16, 15)),
        (56, 4, 16, 16, (16, 16, 16, 8)),
        (128, 4, 16, 32, (32, 32, 32, 32)),
        (120, 4, 32, 32, (32, 32, 32, 24)),
        (50, 2, 16, 32, (32, 18)),
        (16, 4, 16, 16, (16, 0, 0, 0)),
        (0, 2, 16, 0, (0, 0)),
        (7, 3, 1, 3, (3, 3, 1)),
        (5, 1, 128, 128, (5,)),
    ],
)
def test_numbers(rows: int, ranks: int, align: int, shard_rows: int, valid: tuple[int, ...]) -> None:
    shard = WeightShard(rows, ranks, "0", align=align)
    assert (shard.shard_rows, shard.padded_rows) == (shard_rows, ranks * shard_rows)
    assert tuple(shard.valid_rows(rank) for rank in range(ranks)) == valid
    assert [shard.offset(rank) for rank in range(ranks)] == [rank * shard_rows for rank in range(ranks)]


def test_align_is_not_in_the_key() -> None:
    assert (
        str(WeightShard(8, 2, "0", align=16)) == str(WeightShard(8, 2, "0")) == "rows=8,ranks=2,mean,group=0"
    )


@pytest.mark.parametrize("sizes", [(), (3,), (2, 5)])
def test_shards_make_up_the_weight(sizes: tuple[int, ...]) -> None:
    for rows in (0, 1, 16, 50, 63, 200):
        full = torch.randn(rows, *sizes)
        for ranks in RANKS:
            shard = WeightShard(rows, ranks, "0", align=16)
            shards = [shard.shard_of(full, rank) for rank in range(ranks)]
            assert all(each.is_contiguous() and each.shape[0] == shard.shard_rows for each in shards)
            gathered = torch.cat(shards)
            assert_same_bits(shard.unpadded(gathered), full)
            assert (gathered[rows:] == 0).all()
            assert shard.unpadded(gathered).data_ptr() == gathered.data_ptr()


def test_a_shard_is_a_copy() -> None:
    full = torch.ones(8, 2)
    WeightShard(8, 2, "0").shard_of(full, 0).zero_()
    assert (full == 1).all()


@pytest.mark.parametrize(
    ("arguments", "name"), [((-1, 2), "rows"), ((4, 0), "ranks"), ((4, 2, 0), "align"), ((7.5, 2), "rows")]
)
def test_errors(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"WeightShard: argument '{name}': expected an integer of at least"):
        rows, ranks, *align = arguments
        WeightShard(rows, ranks, "0", **dict(zip(["align"], align, strict=False)))


def test_wrong_tensors_and_ranks() -> None:
    shard = WeightShard(8, 2, "0")
    for rows in (5, 9):
        with pytest.raises(ValueError, match="WeightShard: argument 'full': expected 8 rows"):
            shard.shard_of(torch.ones(rows, 1), 1)
        with pytest.raises(ValueError, match="WeightShard: argument 'gathered': expected 8 rows"):
            shard.unpadded(torch.ones(rows, 1))
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="WeightShard: argument 'rank': expected 0 to 1"):
            shard.shard_of(torch.ones(8, 1), rank)
    assert not shard.shard_of(torch.ones(8, 1, requires_grad=True), 0).requires_grad


def quantized(rows: Tensor, key: str, amax: Tensor | None) -> dict[str, Tensor]:
    columns = amax if Format.parse(key).needs_amax else None
    outputs = ops.quantize(
        rows, key, None, amax, columns, None, True, Format.parse(key).family != "fp8_tensor"
    )
    return dict(zip(NAMES, outputs, strict=False))


@pytest.mark.parametrize("key", ALIGN)
@pytest.mark.parametrize("ranks", RANKS)
def test_gathered_bytes_are_those_of_the_weight(ranks: int, key: str) -> None:
    """Each rank quantizes its own rows; only amaxes are reduced. Rows that no rank fills, and ranks without rows."""
    align = ALIGN[key]
    for number, (rows, width) in enumerate(
        (rows, width)
        for rows in (align * ranks, 3 * align * ranks, 56, 120, 16)
        for width in (32, 96, 160, 256)
    ):
        generator = torch.Generator().manual_seed(number)
        shard = WeightShard(rows, ranks, "0", align=align)
        full = torch.randn(rows, width, generator=generator).bfloat16()
        padded = torch.cat([full, full.new_zeros(shard.padded_rows - rows, width)])
        takes_amax = Format.parse(key).needs_amax or key == "fp8_tensor"
        amax = ops.amax(full, key) if takes_amax else None
        expected = quantized(padded, key, amax)
        own = [quantized(shard.shard_of(full, rank), key, amax) for rank in range(ranks)]
        columns: Any = "none" if key == "fp8_tensor" else "gathered"
        for layout in buffer_layouts(Shards(key, (shard.padded_rows, width), ranks, columns)):
            if layout.name.endswith("amax"):
                continue
            assert all(each[layout.name].shape == layout.shard for each in own), layout
            out = torch.empty(layout.unsharded, dtype=layout.dtype)
            out.view(torch.uint8).fill_(201)
            sent = [each[layout.name].view(torch.uint8).reshape(-1) for each in own]
            layout.assemble(sent[0] if layout.axis is None else torch.cat(sent), out)
            assert_same_bits(
                out.view(torch.uint8), expected[layout.name].view(torch.uint8), f"{layout} {rows} {width}"
            )
