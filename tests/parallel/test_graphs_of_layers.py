"""Layers with sharded weights that are captured one by one, each in graphs of its own for the forward and the backward,
and the borders between which weights are gathered early in such a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES, TOKENS, change_sharded, computed, dense_batch, twins
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Block(torch.nn.Module):
    """Three layers between borders, or without them."""

    def __init__(self, recipe: Any, rank: Rank, bordered: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"recipe": recipe, "device": rank.device, "dtype": torch.bfloat16}
        self.first = tnn.LayerNormLinear(128, 192, **options)
        self.second = tnn.Linear(192, 256, bias=False, **options)
        self.third = tnn.Linear(256, 128, **options)
        self.group_name = rank.group_name if bordered else None
        #: Of the forwards that were captured: collectives, and of them those begun early.
        self.captured: list[tuple[int, int]] = []

    def forward(self, input: Tensor) -> Tensor:
        before = ops.count_gathers(self.group_name) if self.group_name else None
        if self.group_name:
            input = ops.enter_gather_region(input, self.group_name)
        output: Tensor = self.third(self.second(self.first(input)))
        if self.group_name and before:
            output = ops.leave_gather_region(output, self.group_name)
            if output.is_cuda and torch.cuda.is_current_stream_capturing():
                now = ops.count_gathers(self.group_name)
                self.captured.append((now.gathers - before.gathers, now.prefetched - before.prefetched))
        return output


def blocks_of(rank: Rank, key: str, bordered: bool) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[Block(RECIPES[key](), rank, bordered) for _ in range(3)])


def check_eager(rank: Rank, key: str) -> None:
    """Borders change no bit, and cost no prefetch between blocks."""
    _, plain = twins(rank, lambda: blocks_of(rank, key, False))
    _, bordered = twins(rank, lambda: blocks_of(rank, key, True))
    for step in range(4):
        batch = dense_batch(rank.rank, step, rank.device)
        want = computed(plain, batch)
        before = ops.count_gathers(rank.group_name)
        got = computed(bordered, batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[name], grad, name)
        for model in (plain, bordered):
            change_sharded(model, step)
        counts = [now - then for now, then in zip(ops.count_gathers(rank.group_name), before, strict=True)]
        if step >= 2:
            assert counts[:4] == [18, 17, 17, 0], counts


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_borders_in_eager(pair: RankPool, key: str) -> None:
    pair.run(check_eager, key)


def check_compiled(rank: Rank, backend: str) -> None:
    torch._dynamo.reset()
    _, plain = twins(rank, lambda: Block(None, rank, False))
    _, bordered = twins(rank, lambda: Block(None, rank, True))

    def forward(input: Tensor) -> Tensor:
        inside = bordered.third(bordered.second(bordered.first(ops.enter_gather_region(input, name))))
        return ops.leave_gather_region(inside, name)

    name = rank.group_name
    compiled: Any = torch.compile(forward, fullgraph=True, backend=backend)
    for step in range(2):
        batch = dense_batch(rank.rank, step, rank.device)
        want = computed(plain, batch)
        input = batch.arguments[0].clone().requires_grad_()
        bordered.zero_grad()
        output = compiled(input)
        output.float().square().mean().backward()
        assert_same_bits(output.detach(), want.output)
        assert_same_bits(input.grad, want.grad_input)
        for parameter, grad in want.grads.items():
            assert_same_bits(bordered.get_parameter(parameter).grad, grad, parameter)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_borders_compiled(pair: RankPool, backend: str) -> None:
    pair.run(check_compiled, backend, timeout=300)


def check_graphs(rank: Rank, key: str, bordered: bool) -> None:
    """Replays with other weights and inputs are eager bit for bit."""
    _, eager = twins(rank, lambda: blocks_of(rank, key, False))
    _, model = twins(rank, lambda: blocks_of(rank, key, bordered))
    samples = [torch.randn(TOKENS, 128, device=rank.device).bfloat16().requires_grad_() for _ in model]
    graphed: Any = torch.cuda.make_graphed_callables(tuple(model), tuple((sample,) for sample in samples))
    if bordered:  # the first weight when it is needed, the others early
        assert [block.captured for block in model] == [[(3, 2)]] * 3
    for seed in range(3):
        for each in (eager, model):
            change_sharded(each, seed)
        for layer in model.modules():
            if getattr(layer, "gathers_quantized", False):
                layer.quantize_weights()
        batch = dense_batch(rank.rank, seed + 1, rank.device)
        want = computed(eager, batch)
        model.zero_grad()
        input = batch.arguments[0].clone().requires_grad_()
        output = input
        for layer in graphed:
            output = layer(output)
        output.float().square().mean().backward()
        assert_same_bits(output.detach(), want.output)
        assert_same_bits(input.grad, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(model.get_parameter(name).grad, grad, name)


@pytest.mark.parametrize("bordered", [False, True])
@pytest.mark.parametrize("key", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_graphs_of_layers(pair_of_gpus: RankPool, key: str, bordered: bool) -> None:
    pair_of_gpus.run(check_graphs, key, bordered)


def check_reduce_overhead(rank: Rank) -> None:
    """Each block compiled with CUDA graphs of its own."""
    torch._dynamo.reset()
    _, eager = twins(rank, lambda: blocks_of(rank, "bf16", False))
    _, model = twins(rank, lambda: blocks_of(rank, "bf16", False))
    for block in model:
        block.compile(fullgraph=True, mode="reduce-overhead")
    for step in range(6):
        batch = dense_batch(rank.rank, step, rank.device)
        want = computed(eager, batch)
        torch.compiler.cudagraph_mark_step_begin()
        got = computed(model, batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[name], grad, name)
        for each in (eager, model):
            change_sharded(each, step)


def test_reduce_overhead_of_layers(pair_of_gpus: RankPool) -> None:
    pair_of_gpus.run(check_reduce_overhead, timeout=280)
