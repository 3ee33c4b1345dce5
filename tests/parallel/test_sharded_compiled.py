"""Compiled layers with sharded weights: one compile for equal blocks, sums into main_grad, experts; bits of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.parallel.sharded_models import RECIPES, Experts, computed, dense_batch, expert_batch
from transformer_plugin import nn as tnn
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits


class Block(torch.nn.Module):
    """Two layers."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        options: Any = {"recipe": recipe, "dtype": torch.bfloat16}
        self.up, self.down = tnn.LayerNormLinear(64, 96, **options), tnn.Linear(96, 64, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x))
        return result


def check_equal_blocks(rank: Rank, key: str) -> None:
    """Blocks that are compiled one by one have different names and weights, and one graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def blocks() -> torch.nn.Sequential:
        torch.manual_seed(0)
        made = torch.nn.Sequential(*[Block(RECIPES[key]()) for _ in range(3)])
        shard_(made, rank.group)
        return made

    eager, compiled = blocks(), blocks()
    for block in compiled:
        block.compile(backend=counter, fullgraph=True)
    for step in range(3):
        batch = dense_batch(rank.rank, step, rank.device)
        batch = batch._replace(arguments=(batch.arguments[0][:, :64].contiguous(),))
        got, want = computed(compiled, batch), computed(eager, batch)
        assert_same_bits(got.output, want.output)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[name], grad, name)
    assert counter.frame_count == 1, counter.frame_count


@pytest.mark.parametrize("key", ["bf16", "fp8_tensor"])
def test_equal_blocks_are_compiled_once(make_pool: Any, key: str) -> None:
    make_pool(2).run(check_equal_blocks, key)


class Again(torch.nn.Module):
    """A layer that is used three times in one graph, and another; the first needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16}
        self.first, self.other = tnn.Linear(24, 24, **options), tnn.LayerNormLinear(24, 24, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(self.other(self.first(self.first(x))))
        return result


def check_main_grad(rank: Rank) -> None:
    """Sums that are added to main_grad, of two micro-batches; the buffers are views of one."""
    torch._dynamo.reset()
    buffers = []
    for compiles in (False, True):
        torch.manual_seed(0)
        sharded: Any = shard_(Again(), rank.group)
        buffer = torch.zeros(2, *sharded.first.weight.shape)
        sharded.first.weight.main_grad, sharded.other.weight.main_grad = buffer.unbind(0)
        model: Any = torch.compile(sharded, backend="aot_eager", fullgraph=True) if compiles else sharded
        for step in range(2):
            x = dense_batch(rank.rank, step, rank.device).arguments[0][:, :24].contiguous()
            model(x).float().square().mean().backward()
        assert sharded.first.weight.grad is None and sharded.other.weight.grad is None
        buffers.append(buffer)
    assert buffers[0].abs().sum() > 0
    torch.testing.assert_close(buffers[1], buffers[0], rtol=1e-5, atol=1e-7)


def test_main_grad(make_pool: Any) -> None:
    make_pool(2).run(check_main_grad)


def check_experts(rank: Rank, key: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(shard_(Experts(RECIPES[key](), rank.device, 3), rank.group))
    compiled: Any = torch.compile(made[0], backend=counter, fullgraph=True)
    for step in range(3):
        batch = expert_batch(rank.rank, step, rank.device, 3)
        got, want = computed(compiled, batch), computed(made[1], batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[f"_orig_mod.{name}"], grad, name)
    assert counter.frame_count == 1, counter.frame_count


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_experts(make_pool: Any, key: str) -> None:
    make_pool(2).run(check_experts, key)


def check_quantize_weights(rank: Rank, key: str) -> None:
    """A compiled step may quantize the shards anew: one reduction for the amaxes of all."""
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(shard_(Block(RECIPES[key]()), rank.group))
    eager, changed = models

    def step(x: torch.Tensor, first_micro_batch: torch.Tensor) -> torch.Tensor:
        for layer in (changed.up, changed.down):
            layer.quantize_weights(first_micro_batch)
        result: torch.Tensor = changed(x)
        return result

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for i in range(3):
        x = dense_batch(rank.rank, i, rank.device).arguments[0][:, :64].contiguous()
        for model in models:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.5
        outputs = []
        for run in (lambda x: eager(x), lambda x: compiled(x, torch.ones(1))):
            torch.manual_seed(i)  # of stochastic rounding
            outputs.append(run(x))
            outputs[-1].float().square().mean().backward()
        assert_same_bits(outputs[1].detach(), outputs[0].detach())
        for (name, one), other in zip(eager.named_parameters(), changed.parameters(), strict=True):
            assert_same_bits(other.grad, one.grad, name)
            one.grad = other.grad = None


@pytest.mark.parametrize("key", [pytest.param("fp8_block", marks=pytest.mark.long), "fp8_tensor", "nvfp4"])
def test_quantize_weights(make_pool: Any, key: str) -> None:
    make_pool(2).run(check_quantize_weights, key)
