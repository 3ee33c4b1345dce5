"""An order of use that is given before the first step."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.sharded_models import RECIPES, Experts, computed, dense, dense_batch, expert_batch, twins
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import set_gather_order, shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def counted(rank: Rank, before: ops.GatherCounts) -> list[int]:
    """Collectives since then, those begun early, those of them that were used, and that were not."""
    now = ops.count_gathers(rank.group_name)
    return [new - old for new, old in zip(now, before, strict=True)][:4]


def check_first_step(rank: Rank, key: str) -> None:
    """Each gather of the first step but the first is begun early, and the values are those without an order."""
    _, plain = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    _, ordered = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    batch = dense_batch(rank.rank, 0, rank.device)
    want = computed(plain, batch)
    set_gather_order(ordered.modules())
    before = ops.count_gathers(rank.group_name)
    got = computed(ordered, batch)
    assert counted(rank, before) == [6, 5, 5, 0]
    assert_same_bits(got.output, want.output)
    assert_same_bits(got.grad_input, want.grad_input)
    for name, grad in want.grads.items():
        assert_same_bits(got.grads[name], grad, name)


@pytest.mark.parametrize("key", RECIPES)
def test_the_first_step(ranks: RankPool, key: str) -> None:
    ranks.run(check_first_step, key)


def check_experts(rank: Rank, key: str) -> None:
    _, ordered = twins(rank, lambda: Experts(RECIPES[key](), rank.device, 5))
    set_gather_order(ordered.modules())
    before = ops.count_gathers(rank.group_name)
    computed(ordered, expert_batch(rank.rank, 0, rank.device, 5))
    gathers, early, hits, dropped = counted(rank, before)
    assert (early, hits, dropped) == (gathers - 1, gathers - 1, 0)


def check_experts_without_an_order(rank: Rank, key: str) -> None:
    """The order of the first step is that of the others. The two weights of `grouped_mlp` have one key."""
    _, model = twins(rank, lambda: Experts(RECIPES[key](), rank.device, 5))
    for i in range(3):
        before = ops.count_gathers(rank.group_name)
        computed(model, expert_batch(rank.rank, i, rank.device, 5))
        gathers, *others = counted(rank, before)
        assert gathers == 6 and (i == 0 or others in ([5, 5, 0], [6, 6, 0])), (i, gathers, others)


def check_lists(rank: Rank) -> None:
    """Experts in lists, of which one collective gathers all."""

    class Both(torch.nn.Sequential):
        def forward(self, input: torch.Tensor, sizes: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self[1](self[0](input, sizes), sizes)
            return output

    def layer() -> torch.nn.Module:
        options = {"parameters": "list", "device": rank.device, "dtype": torch.bfloat16}
        return tnn.GroupedLinear(3, 128, 128, bias=False, **options)

    _, ordered = twins(rank, lambda: Both(layer(), layer()))
    set_gather_order(ordered.modules())
    before = ops.count_gathers(rank.group_name)
    computed(ordered, expert_batch(rank.rank, 0, rank.device, 3))
    assert counted(rank, before) == [4, 3, 3, 0]


def test_lists(pair: RankPool) -> None:
    pair.run(check_lists)


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_experts(pair: RankPool, key: str) -> None:
    pair.run(check_experts, key)


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_experts_without_an_order(pair: RankPool, key: str) -> None:
    pair.run(check_experts_without_an_order, key)


def check_other_order(rank: Rank) -> None:
    """An order that is not the real one costs time alone, and a table is gathered for the forward only."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(tnn.Embedding(40, 128), *dense(None, rank.device).float())
    model.to(rank.device)
    shard_(model, rank.group)
    tokens = torch.arange(rank.rank, 16 + rank.rank, device=rank.device)
    results = []
    for order in (list(model), list(model)[::-1]):
        set_gather_order(order)
        model.zero_grad()
        output = model(tokens)
        output.square().sum().backward()
        results.append([output.detach().clone(), *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)


def test_another_order(pair: RankPool) -> None:
    pair.run(check_other_order)


def test_no_sharded_layers() -> None:
    with pytest.raises(ValueError, match="set_gather_order: argument 'layers': expected layers with sharded"):
        set_gather_order([torch.nn.Linear(2, 2)])
