"""gather_weight: the bytes that quantizing the full weight gives, for every format and direction, with rows that do
not divide by the ranks, and ranks without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.parallel import WeightShard
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

FORMATS = ("fp8_tensor", "fp8_block", "fp8_block:square", "mxfp8", "mxfp8:square", "nvfp4", "nvfp4:square")
WIDTHS = (16, 48, 64, 96, 128, 160, 256, 1024)


def quantized(rows: Tensor, key: str, columnwise: bool, amax: Tensor | None) -> list[Tensor]:
    """Data, scales and, of nvfp4, the amax, along one direction."""
    format = Format.parse(key)
    given = (None, amax) if columnwise and format.needs_amax else (amax, None)
    made = ops.quantize(rows, key, None, *given, None, rowwise=not columnwise, columnwise=columnwise)
    tensors = [tensor for tensor in made if tensor.numel()]
    return [*tensors, amax] if format.needs_amax and amax is not None else tensors


Values = tuple[Tensor, Tensor | None]


def compare(full: Values, mine: Values, key: str, columnwise: bool, shard: str) -> None:
    """What is gathered with what quantizing the full weight gives; each with its amax, if there is one."""
    want = quantized(full[0], key, columnwise, full[1])
    part: list[Any] = [*quantized(mine[0], key, columnwise, mine[1]), None]
    for backward in (False, True, True):
        got = ops.gather_weight(*part[:3], key, columnwise, backward, shard)
        for one, other in zip(got, want, strict=False):
            assert_same_bits(one, other, f"{key} {list(full[0].shape)} columnwise={columnwise}")


def check_matrix(rank: Rank, key: str) -> None:
    format = Format.parse(key)
    block = 1 if format.block is None else max(format.block)
    align = max(16, block)
    seed = 0
    for rows in (align * rank.size, 3 * align * rank.size, 56, 120, 16):
        for width in WIDTHS:
            seed += 1
            if format.family in ("mxfp8", "nvfp4") and (width % block or rows % block):
                continue
            full = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
            full = full.to(rank.device)
            shard = WeightShard(rows, rank.size, rank.group_name, align=align)
            mine = shard.shard_of(full, rank.rank)
            takes_amax = format.needs_amax or format.family == "fp8_tensor"
            amax = ops.amax(full, key) if takes_amax else None
            for columnwise in (False, True):
                compare((full, amax), (mine, amax), key, columnwise, str(shard))


@pytest.mark.parametrize("key", FORMATS)
def test_matrices(pool: RankPool, key: str) -> None:
    pool.run(check_matrix, key)


def test_three_ranks(make_pool: Any) -> None:
    for key in FORMATS:
        make_pool(3).run(check_matrix, key)


def check_stack(rank: Rank, key: str) -> None:
    """Full matrices: no block of a format crosses ranks, whatever its rows."""
    for matrices in (1, rank.size, 2 * rank.size + 1):
        generator = torch.Generator().manual_seed(matrices)
        full = torch.randn(matrices, 96, 160, generator=generator).bfloat16().to(rank.device)
        shard = WeightShard(matrices, rank.size, rank.group_name)
        mine = shard.shard_of(full, rank.rank)
        needs_amax = Format.parse(key).needs_amax
        amax = ops.amax(full, key) if needs_amax else None
        own = ops.amax(mine, key) if needs_amax else None
        for columnwise in (False, True):
            compare((full, amax), (mine, own), key, columnwise, str(shard))


@pytest.mark.parametrize("key", FORMATS)
def test_stacks(ranks: RankPool, key: str) -> None:
    ranks.run(check_stack, key)


def check_changes(rank: Rank) -> None:
    """What was gathered early is not used after a change, counted by torch or announced."""
    name = rank.group_name
    shard = str(WeightShard(rows=4 * rank.size, ranks=rank.size, group_name=name, param_group=1))
    weights = [torch.full((4, 8), float(rank.rank + 10 * i), device=rank.device) for i in range(3)]

    def use(i: int) -> None:
        got = ops.gather_weight(weights[i], None, None, "none", False, False, shard)[0]
        want = torch.arange(rank.size, device=rank.device).float().repeat_interleave(4) + float(base[i])
        assert_same_bits(got, want[:, None].expand(-1, 8).contiguous())

    ops.clear_gathers(name)
    base = [0, 10, 20]
    for _ in range(3):
        for i in range(3):
            use(i)
    start = ops.count_gathers(name)
    use(0)  # gathers 1 early
    weights[1] += 5
    base[1] += 5
    use(1)
    after = ops.count_gathers(name)
    assert (after.dropped - start.dropped, after.gathers - start.gathers) == (1, 3)
    weights[2].data.fill_(rank.rank + 50.0)  # torch does not count it
    base[2] = 50
    ops.invalidate_prefetched()
    use(2)
    assert ops.count_gathers(name).dropped == after.dropped + 1
    ops.clear_gathers(name)


def test_changed_weights_are_gathered_again(ranks: RankPool) -> None:
    ranks.run(check_changes)


def check_random_order(rank: Rank, seed: int) -> None:
    """Any order of use, the same on all ranks, gives the right values."""
    name = rank.group_name
    generator = torch.Generator().manual_seed(seed)
    ops.configure_gathers(name, int(torch.randint(4, (), generator=generator)))
    shard = str(WeightShard(rows=3 * rank.size, ranks=rank.size, group_name=name, param_group=1))
    weights = [torch.full((3, 5), float(rank.rank + 10 * i), device=rank.device) for i in range(4)]
    for _ in range(60):
        i, backward = (
            int(torch.randint(4, (), generator=generator)),
            bool(torch.rand((), generator=generator) < 0.5),
        )
        if torch.rand((), generator=generator) < 0.2:
            weights[i] += 1
        got = ops.gather_weight(weights[i], None, None, "none", False, backward, shard)[0]
        want = torch.arange(rank.size, device=rank.device).repeat_interleave(3) - rank.rank + weights[i][0, 0]
        assert_same_bits(got, want.float()[:, None].expand(-1, 5).contiguous())
    ops.configure_gathers(name, 1)
    ops.clear_gathers(name)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.long)], ids=str)
def test_any_order_of_use(ranks: RankPool, seeds: range) -> None:
    for seed in seeds:
        ranks.run(check_random_order, seed)


def check_dead_weights(rank: Rank) -> None:
    """Weights that are gone are neither gathered nor kept, also where others take their memory."""
    name = rank.group_name
    for value in range(12):
        shard = str(WeightShard(rows=2 * rank.size, ranks=rank.size, group_name=name))
        weight = torch.full((2, 64), float(rank.rank + value), device=rank.device)
        got = ops.gather_weight(weight, None, None, "none", False, False, shard)[0]
        assert (got[::2, 0] == torch.arange(rank.size, device=rank.device) + value).all()
        del weight, got


def test_weights_that_are_gone(ranks: RankPool) -> None:
    ranks.run(check_dead_weights)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"shard": "rows=4"}, "expected '', or a key such as"),
        ({"shard": ""}, "argument 'shard': expected the key of a weight that is sharded over ranks, got ''"),
        ({"shard": "rows=9,ranks=1,group="}, "argument 'data': expected at least 9 of the 9 rows"),
        ({"format": "mxfp8"}, "argument 'scale_inv': expected the scales of 'mxfp8', got None"),
        ({"scale_inv": torch.ones(1)}, "argument 'scale_inv': expected None of 'none'"),
        ({"amax": torch.ones(1)}, "argument 'amax': expected None of 'none'"),
        ({"data": torch.ones(4)}, "argument 'data': expected a matrix, or a stack of matrices"),
        ({"data": torch.ones(4, 8).t()}, "argument 'data'"),
        ({"format": "nvfp4:tiled"}, "argument 'format': expected a format without 'tiled' and 'row_scaled'"),
    ],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"data": torch.ones(4, 8), "scale_inv": None, "amax": None, "format": "none"}
    given |= {"columnwise": False, "backward": False, "shard": "rows=4,ranks=1,group="} | arguments
    if "tiled" in given["format"]:
        given |= {"scale_inv": torch.ones(1), "amax": torch.ones(1)}
    with pytest.raises(ValueError, match="transformer_plugin::gather_weight") as caught:
        ops.gather_weight(**given)
    assert text in str(caught.value)
