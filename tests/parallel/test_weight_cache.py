"""Layers that keep their quantized weights, over ranks: experts and slices are kept, what FSDP2 gathers is not."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.parallel.gathered_model import made, shard, step_of
from transformer_plugin import ops
from transformer_plugin.nn import DispatchConfig, Linear, MoE
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.parallel import data_parallel, fully_shard
from transformer_plugin.recipes import Float8BlockScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def kept_by(model: torch.nn.Module) -> list[Tensor]:
    """The copies that layers keep."""
    found = [layer._weight_source for layer in model.modules() if isinstance(layer, RecipeModule)]
    return [t for source in found for t in getattr(source._cache._kept, "tensors", None) or ()]  # type: ignore[attr-defined]


class Count:
    """Counts the weights that are quantized to be kept."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Count:
        self.original, ops.quantize_weight = ops.quantize_weight, self.count
        return self

    def count(self, *arguments: Any) -> list[Tensor]:
        self.calls += 1
        return self.original(*arguments)

    def __exit__(self, *_: Any) -> None:
        ops.quantize_weight = self.original


def caching(model: torch.nn.Module) -> Any:
    for layer in model.modules():
        if isinstance(layer, RecipeModule):
            layer.cache_weights = True
    return model


def fsdp(rank: Rank, recipe: Recipe, used_before: bool, options: dict[str, Any]) -> None:
    """The memory of gathered weights returns after each forward and backward, and copies would have outlived it."""
    first = caching(made(rank, recipe))
    if used_before:
        step_of(first, rank, 0)
        assert kept_by(first)
        first.zero_grad()
    models = [shard(rank, model, **options) for model in (first, made(rank, recipe))]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) for model in models]
    with Count() as count:
        for step in range(3):
            for got, expected in zip(*(step_of(model, rank, step) for model in models), strict=True):
                assert_same_bits(got, expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            gc.collect()
            assert not kept_by(models[0])
    assert count.calls == 0


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
def test_fsdp_keeps_no_copy(pair: RankPool, used_before: bool, options: dict[str, Any]) -> None:
    pair.run(fsdp, Float8BlockScaling(), used_before, options)


def moe(rank: Rank, recipe: Recipe, caches: bool, wraps: str) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"recipe": recipe, "cache_weights": caches, "device": rank.device}
    options["dispatch"] = DispatchConfig(max_tokens=32)
    if wraps == "fully_shard":
        mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("copies", "experts"))
        return fully_shard(MoE(64, 128, 4, 2, mesh=mesh["experts"], **options), mesh)
    layer = MoE(64, 128, 4, 2, group=dist.group.WORLD, dtensor=wraps != "plain", **options)
    return data_parallel(layer) if wraps == "data_parallel" else layer


def experts(rank: Rank, recipe: Recipe, wraps: str, fused: bool) -> None:
    layers = [moe(rank, recipe, caches, wraps) for caches in (True, False)]
    # A fused kernel takes DTensors or plain tensors.
    groups = [[{"params": [p]} for p in layer.parameters()] for layer in layers]
    optimizers = [torch.optim.AdamW(each, lr=0.05, fused=fused) for each in groups]
    for step in range(3):
        with Count() as count:
            for micro_batch in range(3):
                outputs = []
                for layer in layers:
                    generator = torch.Generator().manual_seed(10 * step + micro_batch)
                    x = torch.randn(24 + rank.rank, 64, generator=generator).to(rank.device).requires_grad_()
                    result = layer(x).output
                    result.square().sum().backward()
                    outputs.append((result.detach(), x.grad))
                for got, expected in zip(*outputs, strict=True):
                    assert_same_bits(got, expected)
        assert count.calls == (0 if wraps == "fully_shard" else 2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("wraps", ["dtensor", "plain", "data_parallel", "fully_shard"])
@pytest.mark.parametrize("fused", [False, True])
def test_experts(pair: RankPool, wraps: str, fused: bool) -> None:
    pair.run(experts, MXFP8BlockScaling(), wraps, fused)


def slices(rank: Rank, recipe: Recipe) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    layers = []
    for caches in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Sequential(Linear(256, 256, recipe=recipe, cache_weights=caches)).to(rank.device)
        layers.append(parallelize_module(layer, mesh, {"0": ColwiseParallel()}))
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True) for layer in layers]
    for step in range(3):
        with Count() as count:
            for micro_batch in range(3):
                x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3 * step + micro_batch))
                outputs = [layer(x.to(rank.device)) for layer in layers]
                assert_same_bits(outputs[0].detach(), outputs[1].detach())
                for output in outputs:
                    output.square().sum().backward()
        assert count.calls == 1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_dtensors_of_tensor_parallelism(pair: RankPool) -> None:
    pair.run(slices, Float8BlockScaling())
