"""Sharded weights under autocast, whose copies of weights exist for as long as a rank needs them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.nn._weight_source import ShardedWeight
from transformer_plugin.parallel import WeightShard, shard_
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

RECIPES: dict[str, Recipe | None] = {"values": None, "delayed": DelayedScaling()}


def layers(rank: Rank, recipe: Recipe | None) -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = {"device": rank.device, "recipe": Float8BlockScaling()}
    return torch.nn.Sequential(
        tnn.Linear(128, 128, **blocks),
        tnn.Linear(128, 128, device=rank.device, recipe=recipe),
        tnn.Linear(128, 128, **blocks),
    )


def check_kept_copies(rank: Rank, key: str, compiled: bool) -> None:
    """One rank keeps the graphs of earlier forwards, and with them autocast's copies of weights that have changed."""
    full, sharded = layers(rank, RECIPES[key]), layers(rank, RECIPES[key])
    shard_(sharded, rank.group)
    run = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    input = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).to(rank.device)
    kept: list[Tensor] = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in (*full.parameters(), *sharded.parameters()):
                parameter.mul_(1.25)
        for layer in (*full[::2], *(sharded[::2] if compiled else ())):
            layer.quantize_weights()  # as shards are: from float32
        with torch.autocast(rank.device.type, torch.bfloat16):
            want, got = full(input), run(input)
        assert_same_bits(got, want)
        if rank.rank == 0:
            kept.append(got)
        del got
    with torch.autocast(rank.device.type, torch.bfloat16):
        run(input).float().sum().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


@pytest.mark.parametrize("key", RECIPES)
def test_copies_that_one_rank_keeps(pair: RankPool, key: str) -> None:
    pair.run(check_kept_copies, key, False)


def test_compiled(pair: RankPool) -> None:
    pair.run(check_kept_copies, "values", True)


def check_quantized_shards(rank: Rank) -> None:
    """Quantized shards are no copies of autocast, and are gathered early."""
    model = torch.nn.Sequential(*list(layers(rank, None))[::2])
    shard_(model, rank.group)
    before = ops.count_gathers(rank.group_name)
    for _ in range(2):
        with torch.autocast(rank.device.type, torch.bfloat16):
            model(torch.ones(16, 128, device=rank.device)).float().sum().backward()
    now = ops.count_gathers(rank.group_name)
    assert now.hits - before.hits > 0


def test_quantized_shards_are_gathered_early(pair: RankPool) -> None:
    pair.run(check_quantized_shards)


def test_keys_without_a_param_group() -> None:
    """A copy of a layer is gathered alone."""
    for shard, want in (
        (WeightShard(8, 2, "0", param_group=13, name="a"), "rows=8,ranks=2,mean,name=a,group=0"),
        (
            WeightShard(8, 2, "a,param_group=2,b", mean=False, param_group=1),
            "rows=8,ranks=2,group=a,param_group=2,b",
        ),
        (WeightShard(8, 2, "a,param_group=2,b", mean=False), "rows=8,ranks=2,group=a,param_group=2,b"),
    ):
        assert ShardedWeight(shard, {}, False).of_copy(None).named_weight_shard == want
