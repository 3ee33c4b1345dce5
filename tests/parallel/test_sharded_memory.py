"""A sharded weight that gets other memory, of which some ranks keep the old one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def model_of(rank: Rank) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [tnn.Linear(16, 16, bias=False, device=rank.device) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    shard_(model, rank.group)
    return model


def step(model: Any, rank: Rank, seed: int, call: Any = None) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank.rank)
    input = torch.randn(8, 16, generator=generator).to(rank.device)
    output: Tensor = model(input) if call is None else call(input)
    output.square().sum().backward()
    return output.detach()


def check_data(rank: Rank) -> None:
    """The first rank keeps what the weights were; all go on with the values of a model that was made so."""
    model, other = model_of(rank), model_of(rank)
    for seed in range(2):
        step(model, rank, seed)
    kept = []
    for layer in (1, 2):
        weight, same = model[layer].weight, other[layer].weight
        if rank.rank == 0:
            kept.append(weight.data)
        with torch.no_grad():
            same.mul_(2)
        weight.data = weight.data * 2
    ops.clear_gathers(rank.group_name)
    for seed in range(2, 5):
        assert_same_bits(step(model, rank, seed), step(other, rank, seed))


def check_functional_call(rank: Rank) -> None:
    """Calls with other tensors and with the own ones in turns."""
    model, other = model_of(rank), model_of(rank)
    kept = []
    for seed in range(6):
        given = {name: p.detach() * (seed + 1) for name, p in other.named_parameters()}
        if rank.rank == 1:
            kept.append(given)

        def call(input: Tensor, given: dict[str, Tensor] = given) -> Tensor:
            output: Tensor = torch.func.functional_call(other, given, (input.requires_grad_(),))
            return output

        with torch.no_grad():
            want = model[0].weight.detach().clone()
        step(model, rank, seed)
        step(other, rank, seed, call)
        assert_same_bits(model[0].weight.detach(), want)


@pytest.mark.parametrize("check", [check_data, check_functional_call])
def test_other_memory(ranks: RankPool, check: Any) -> None:
    ranks.run(check)
