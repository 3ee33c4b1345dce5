"""Cached quantized weights under DistributedDataParallel, with different rows on each rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import transformer_plugin as tp
from transformer_plugin.nn import GroupedMLP
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

STEPS, MICRO_BATCHES = 3, 2


def train(rank: Rank, layer: GroupedMLP, cached: bool) -> list[torch.Tensor]:
    """Returns the parameters after some steps."""
    model = DistributedDataParallel(layer, process_group=rank.group, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank.rank)
    for _ in range(STEPS):
        if cached:
            layer.quantize_weights()
        for micro_batch in range(MICRO_BATCHES):
            sizes = torch.tensor([5 + rank.rank, 0, 11 + micro_batch], dtype=torch.int32)
            rows = torch.randn(20, 128, generator=generator).to(rank.device)
            probs = torch.rand(20, generator=generator).to(rank.device)
            with torch.enable_grad() if micro_batch else model.no_sync():
                model(rows, sizes.to(rank.device), probs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in layer.parameters()]


def same_steps(rank: Rank) -> None:
    torch.manual_seed(0)
    layer = GroupedMLP(3, 128, 256, recipe=Float8BlockScaling()).to(rank.device)
    before = copy.deepcopy(layer)
    plain = train(rank, copy.deepcopy(layer), False)
    quantized = train(rank, layer, True)
    for got, expected, first in zip(quantized, plain, before.parameters(), strict=True):
        assert_same_bits(got, expected)
        assert not torch.equal(got, first)
        everyone = [torch.empty_like(got) for _ in range(rank.size)]
        torch.distributed.all_gather(everyone, got)
        for other in everyone:
            assert_same_bits(got, other)


def two_forwards_with_defaults(rank: Rank) -> None:
    """DDP broadcasts buffers before each forward, into memory that a backward has saved."""
    results = []
    for cached in (True, False):
        torch.manual_seed(0)
        layer = GroupedMLP(3, 128, 256, recipe=Float8BlockScaling()).to(rank.device)
        model = DistributedDataParallel(layer, process_group=rank.group)
        if cached:
            layer.quantize_weights()
        generator, outputs = torch.Generator().manual_seed(rank.rank), []
        for _ in range(2):
            rows, probs = torch.randn(20, 128, generator=generator), torch.rand(20, generator=generator)
            sizes = torch.tensor([5, 4 + rank.rank, 10], device=rank.device)
            outputs.append(model(rows.to(rank.device), sizes, probs.to(rank.device)))
        torch.cat(outputs).square().sum().backward()
        results.append([p.grad for p in layer.parameters()])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def quantized_parameters(rank: Rank) -> None:
    """Made with one seed they need no broadcast. The steps are those of a layer in high precision."""
    recipe, results = Float8BlockScaling(), []
    for quantized in (True, False):
        torch.manual_seed(0)
        with tp.quantized_init(recipe, preserve_high_precision_init_val=True) if quantized else nullcontext():
            layer = GroupedMLP(3, 128, 256, recipe=recipe, device=rank.device)
        model = DistributedDataParallel(layer, process_group=rank.group, init_sync=not quantized)
        optimizer: Any = (
            tp.optim.MasterWeights(layer.parameters(), lambda weights: torch.optim.AdamW(weights, lr=0.01))
            if quantized
            else torch.optim.AdamW(layer.parameters(), lr=0.01)
        )
        generator, outputs = torch.Generator().manual_seed(rank.rank), []
        for _ in range(STEPS):
            rows, probs = torch.randn(20, 128, generator=generator), torch.rand(20, generator=generator)
            sizes = torch.tensor([5, 4 + rank.rank, 10], device=rank.device)
            outputs.append(model(rows.to(rank.device), sizes, probs.to(rank.device)))
            outputs[-1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(outputs)
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got.detach(), expected.detach())


def test_quantized_parameters(pair: RankPool) -> None:
    pair.run(quantized_parameters)


def test_two_forwards_with_the_defaults_of_ddp(pair: RankPool) -> None:
    pair.run(two_forwards_with_defaults)


def test_steps_are_those_of_weights_quantized_in_each_forward(pair: RankPool) -> None:
    pair.run(same_steps)
