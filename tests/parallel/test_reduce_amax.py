"""reduce_amax: one collective, the maximum over the ranks, and equal scales from then on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, Linear, reduce_amax
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

RECIPE = DelayedScaling(amax_history_len=3)


def reduce_once(rank: Rank) -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        [Linear(16, 24, recipe=RECIPE), GroupedLinear(2, 24, 8, recipe=RECIPE), Linear(4, 4)]
    ).to(rank.device)
    sizes = torch.tensor([5, 4], device=rank.device)

    def step(of_rank: int) -> None:
        generator = torch.Generator().manual_seed(of_rank)
        x = torch.randn(9, 16, generator=generator) * (1 + of_rank % 2)
        layers[1](layers[0](x.to(rank.device)), sizes).square().sum().backward()

    everyone = []
    for other in range(rank.size):  # the amaxes that each rank collects alone
        step(other)
        everyone.append([layer.delayed_amax.clone() for layer in layers[:2]])
        for layer in layers[:2]:
            layer.delayed_amax.zero_()
    step(rank.rank)
    calls: list[Any] = []
    all_gather = ops.all_gather

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return all_gather(*arguments)

    ops.all_gather = counted
    try:
        reduce_amax(layers, rank.group)
        reduce_amax(layers[2], rank.group)  # no layer with delayed scaling: no collective
    finally:
        ops.all_gather = all_gather
    assert len(calls) == 1
    for layer, amaxes in zip(layers[:2], zip(*everyone, strict=True), strict=True):
        assert_same_bits(layer.delayed_amax, torch.stack(amaxes).amax(0))
    step(rank.rank)
    scales = torch.cat([layer.delayed_scale for layer in layers[:2]])
    gathered = [torch.empty_like(scales) for _ in range(rank.size)]
    dist.all_gather(gathered, scales)
    for other in gathered:
        assert_same_bits(other, scales)
    assert (scales != 1).all()


def test_reduce_amax(pool: RankPool) -> None:
    pool.run(reduce_once)
