"""What sharded weights send: bytes of each format by formula, gathers and sums of each use, gathers that were early."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential

from tests.parallel.sharded_models import RECIPES, Experts, expert_batch
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import WeightShard, shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

#: The rows that a scale covers.
ALIGN = {"bf16": 1, "fp8_tensor": 1, "fp8_block": 128, "mxfp8": 32, "nvfp4": 16}
LAYERS = 3


def bytes_of_shard(key: str, rows: int, columns: int) -> float:
    """Of a shard of a weight: what a forward sends to each other rank, and a backward, too."""
    of_blocks = 4 * math.ceil(columns / 512) * 4 / (128 * columns)  # float32, in rows of four
    each = {
        "bf16": 2,
        "fp8_tensor": 1,
        "fp8_block": 1 + of_blocks,
        "mxfp8": 1 + 1 / 32,
        "nvfp4": 1 / 2 + 1 / 16,
    }
    return each[key] * rows * columns


def layers(key: str, rows: int, fused: bool = False) -> torch.nn.Module:
    options: Any = {"recipe": RECIPES[key](), "dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    return torch.nn.Sequential(*[tnn.Linear(rows, rows, i != 1, **options) for i in range(LAYERS)])


def padded(rows: int, ranks: int, align: int) -> int:
    return -(-rows // (align * ranks)) * align * ranks


def counted(rank: Rank, before: Any) -> list[int]:
    return [now - then for now, then in zip(ops.count_gathers(rank.group_name), before, strict=True)]


def check_bytes(rank: Rank, key: str) -> None:
    """(N - 1) / N of the bytes of a weight, padding included, for each forward, backward and repeated forward."""
    ranks = rank.size
    others = {
        "fp8_block": 128 * (ranks - 1),
        "mxfp8": 256 * ranks,
        "nvfp4": 256 * ranks,
    }  # whole tiles of scales
    for rows in (128 * ranks, others.get(key, 160)):
        model = shard_(layers(key, rows), rank.group)
        x = torch.randn(32, rows).bfloat16().requires_grad_()
        for step, recomputes in enumerate((False, False, True, True, True)):
            before = ops.count_gathers(rank.group_name)
            output = checkpoint_sequential(model, LAYERS, x, use_reentrant=False) if recomputes else model(x)
            output.float().sum().backward()
            if step in (2, 3):
                continue  # the new order of use is being learned
            made = counted(rank, before)
            uses = 2 * LAYERS + (LAYERS - 1 if recomputes else 0)  # the last of the segments is not repeated
            want = (ranks - 1) * uses * bytes_of_shard(key, padded(rows, ranks, ALIGN[key]) // ranks, rows)
            assert (made[0], made[4]) == (uses, want), (key, rows, made, uses, want)


@pytest.mark.parametrize("key", RECIPES)
def test_bytes_by_formula(make_pool: Any, key: str) -> None:
    for ranks in (2, 3):
        make_pool(ranks).run(check_bytes, key)


def check_sums(rank: Rank) -> None:
    """Each use of a weight in a backward is one sum of its gradient: two bytes an element, or four with `main_grad`."""
    for fused in (False, True):
        model = shard_(layers("bf16", 33, fused), rank.group)
        for layer in model.children():
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)  # type: ignore[union-attr]
        model[1].weight.requires_grad_(False)  # type: ignore[index]
        x = torch.randn(8, 33).bfloat16()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            model[0](model(x)).float().sum().backward()  # type: ignore[index]
        sums = [
            (event.shapes()[0], event.dtypes()[0])
            for event in seen.profiler.kineto_results.events()
            if event.name() == "transformer_plugin::reduce_scatter_out"
        ]
        sizes = [padded(33, rank.size, 1), 33]
        assert sums == [(sizes, "float" if fused else "c10::BFloat16")] * 3, sums


def test_sums_of_gradients(make_pool: Any) -> None:
    make_pool(2).run(check_sums)


def check_sets(rank: Rank) -> None:
    """A stack of experts is one gather, and one reduction finds the largest magnitudes of all weights of a model."""
    model = shard_(Experts(RECIPES["fp8_block"](), rank.device, 5), rank.group)
    before = ops.count_gathers(rank.group_name)
    x, sizes, probs = expert_batch(rank.rank, 0, rank.device, 5).arguments
    model(x.requires_grad_(), sizes, probs).float().sum().backward()
    assert counted(rank, before)[0] == 2 * 3
    model = shard_(layers("fp8_tensor", 32), rank.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(32, 32, dtype=torch.bfloat16)).float().sum().backward()
    with mock.patch.object(ops, "all_gather", wraps=ops.all_gather) as gathers:
        optimizer.step()
    assert gathers.call_count == 1 and gathers.call_args.args[0].numel() == LAYERS


def test_sets_of_weights(make_pool: Any) -> None:
    make_pool(2).run(check_sets)


def check_stamps(rank: Rank, distance: int) -> None:
    """Of several weights that are gathered ahead, those that change are gathered again, and no others."""
    name, count = rank.group_name, 6
    shard = str(WeightShard(rows=2 * rank.size, ranks=rank.size, group_name=name, param_group=1))
    values = [10.0 * i for i in range(count)]
    weights = [torch.full((2, 3), value + rank.rank) for value in values]
    ops.clear_gathers(name)
    ops.configure_gathers(name, distance)

    def use(i: int) -> None:
        got = ops.gather_weight(weights[i], None, None, "none", False, False, shard)[0]
        want = torch.arange(float(rank.size)).repeat_interleave(2) + values[i]
        assert_same_bits(got, want[:, None].expand(-1, 3).contiguous())

    for _ in range(3):
        for i in range(count):
            use(i)
    for changed in ([1], [2], [1, 2], [2, 3]):
        before = ops.count_gathers(name)
        use(0)
        for i in changed:
            weights[i] += 1
            values[i] += 1
        for i in range(1, count):
            use(i)
        made = counted(rank, before)
        early = [i for i in changed if i <= distance]
        assert made[3] == len(early), (distance, changed, made)
        assert made[0] == count + len(early), (distance, changed, made)
    before = ops.count_gathers(name)
    ops.invalidate_prefetched()
    for i in range(count):
        use(i)
    # What the last use has gathered ahead, of the next round.
    assert counted(rank, before)[3] == distance
    ops.clear_gathers(name)
    ops.configure_gathers(name, 1)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_stamps_of_several_early_gathers(make_pool: Any, distance: int) -> None:
    make_pool(2).run(check_stamps, distance)
    make_pool(3).run(check_stamps, distance)


def check_kept(rank: Rank, distance: int) -> None:
    """Weights that were gathered for nothing do not add up, whatever the order of use."""
    name = rank.group_name
    generator = torch.Generator().manual_seed(distance)
    shard = str(WeightShard(rows=rank.size, ranks=rank.size, group_name=name, param_group=1))
    weights = [torch.ones(1, 2) for _ in range(12)]
    ops.clear_gathers(name)
    ops.configure_gathers(name, distance)
    start, most = ops.count_gathers(name), 0
    for i in torch.randint(12, (150,), generator=generator).tolist():
        ops.gather_weight(weights[i], None, None, "none", False, False, shard)
        made = counted(rank, start)
        most = max(most, made[1] - made[2] - made[3])
    assert 0 < most <= distance + distance * (distance + 1) // 2, most
    ops.clear_gathers(name)
    made = counted(rank, start)
    assert made[1] == made[2] + made[3]
    ops.configure_gathers(name, 1)


@pytest.mark.parametrize("distance", [1, 2])
def test_early_gathers_do_not_add_up(make_pool: Any, distance: int) -> None:
    pool: RankPool = make_pool(2)
    pool.run(check_kept, distance)
