"""Experts and dense layers over two groups of the same ranks: experts are gathered one block ahead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.sharded_models import twins
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Block(torch.nn.Module):
    """A dense layer, then experts. Notes how many gathers of the experts' group were begun before each of them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.dense = tnn.Linear(32, 32, device=device)
        self.experts = tnn.GroupedLinear(3, 32, 32, device=device)
        self.noted: list[int] = []
        self.experts_group = ""

    def forward(self, input: Tensor, sizes: Tensor) -> Tensor:
        hidden = self.dense(input)
        if self.experts_group:
            self.noted.append(ops.count_gathers(self.experts_group).prefetched)
        output: Tensor = self.experts(hidden, sizes)
        return output


class Blocks(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(device) for _ in range(4))

    def forward(self, input: Tensor, sizes: Tensor) -> Tensor:
        for block in self.blocks:
            input = input + block(input, sizes)
        return input


def are_experts(_: str, layer: Any) -> bool:
    return isinstance(layer, tnn.GroupedLinear)


def check(rank: Rank) -> None:
    full, model = twins(rank, lambda: Blocks(rank.device), filter=lambda n, m: not are_experts(n, m))
    own = dist.new_group(list(range(rank.size)))
    assert isinstance(own, dist.ProcessGroup)
    shard_(model, own, filter=are_experts)
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        block.experts_group = own.group_name
    sizes = torch.tensor([4, 0, 12], device=rank.device)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        input = torch.randn(16, 32, generator=generator).to(rank.device)
        for block in blocks:
            block.noted.clear()
        start = ops.count_gathers(own.group_name).prefetched
        output = model(input, sizes)
        assert_same_bits(output.detach(), full(input, sizes).detach())
        output.square().sum().backward()
        if step >= 2:
            # When the experts of block i are used, those of block i were begun while block i - 1 ran.
            assert [block.noted[0] - start for block in blocks] == [0, 1, 2, 3]


def test_one_block_ahead(pair: RankPool) -> None:
    pair.run(check)
