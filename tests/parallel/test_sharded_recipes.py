"""Recipes that are set on layers that are sharded already: every pair of recipes, on every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from transformer_plugin import nn as tnn
from transformer_plugin import recipes
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool

RECIPES: dict[str, Any] = {
    **{
        name: recipes.recipe_from_name(name)
        for name in ("none", "bf16", "fp8_tensor", "fp8_delayed", "fp8_row")
    },
    **{name: recipes.recipe_from_name(name) for name in ("fp8_block", "mxfp8")},
    "mxfp8 with square weights": recipes.MXFP8BlockScaling(square_weights=True),
    "nvfp4": recipes.NVFP4BlockScaling(stochastic_rounding=False),
}
ROWS, WIDTH = 64, 96


class Layers(torch.nn.Module):
    """160 outputs: on two ranks 80 rows each, 96 with the blocks of MXFP8, 128 with those of FP8."""

    def __init__(self, recipe: Any, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"recipe": recipe, "device": device}
        self.linear = tnn.Linear(WIDTH, 160, **options)
        self.norm_linear = tnn.LayerNormLinear(160, WIDTH, **options)
        self.grouped = tnn.GroupedLinear(3, WIDTH, WIDTH, **options)
        self.mlp = tnn.GroupedMLP(3, WIDTH, 64, True, **options)
        self.moe = tnn.MoE(WIDTH, 64, 4, 2, **options)

    def forward(self, input: Tensor) -> Tensor:
        sizes = torch.tensor([32, 0, 16], device=input.device)
        probs = torch.linspace(0.1, 1, ROWS, device=input.device)
        rows = self.grouped(self.norm_linear(self.linear(input)), sizes)
        output: Tensor = self.moe(self.mlp(rows, sizes, probs) + input).output
        return output


class Lists(torch.nn.Module):
    """Of which values travel, with no state of delayed scaling."""

    def __init__(self, recipe: Any, device: torch.device) -> None:
        super().__init__()
        self.mlp = tnn.GroupedMLP(3, WIDTH, 64, True, recipe=recipe, device=device, parameters="list")

    def forward(self, input: Tensor) -> Tensor:
        sizes = torch.tensor([32, 0, 16], device=input.device)
        output: Tensor = self.mlp(input, sizes, torch.linspace(0.1, 1, ROWS, device=input.device))
        return output


def set_recipe(model: torch.nn.Module, recipe: Any) -> None:
    for child in model.children():
        child.recipe = recipe


def close(got: Tensor, expected: Tensor, what: object) -> None:
    """Products in bfloat16 of a shard and of the full weight may be rounded in other places on a CPU."""
    error = float(
        (got.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    )
    assert error < 0.01, (what, error)


def compare(full: Any, sharded: Any, rank: Rank, step: int, what: object, compiled: bool = False) -> None:
    results = []
    for model in (full, sharded):
        for parameter in model.parameters():
            parameter.grad = None
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        input = torch.randn(ROWS, WIDTH, generator=generator).to(rank.device).requires_grad_()
        run = torch.compile(model, backend="aot_eager") if compiled and model is sharded else model
        output = run(input)
        output.square().mean().backward()
        results.append((output.detach(), input.grad))
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected, what)
    for (name, one), other in zip(full.named_parameters(), sharded.parameters(), strict=True):
        shard = shard_of_parameter(other)
        if shard is None or other.grad is None:
            continue
        total = one.grad.clone()
        dist.all_reduce(total, group=rank.group)
        close(other.grad, shard.local_shard_of(total / rank.size), (name, what))


def check_pairs(rank: Rank, kind: Any, first: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(RECIPES[first], rank.device))
    full, sharded = models
    shard_(sharded, rank.group)
    for step, (name, recipe) in enumerate([*RECIPES.items(), (first, RECIPES[first])]):
        if kind is Lists and isinstance(recipe, recipes.DelayedScaling):
            continue
        for model in models:
            set_recipe(model, recipe)
        compare(full, sharded, rank, step, (first, name))
        with torch.no_grad():  # the next step reads the new weight, of all ranks
            for one, other in zip(full.parameters(), sharded.parameters(), strict=True):
                one.mul_(0.9)
                other.mul_(0.9)
                assert torch.equal(full_weight(other), one)


@pytest.mark.parametrize("first", RECIPES)
def test_every_pair(pair: RankPool, first: str) -> None:
    pair.run(check_pairs, Layers, first)


# Weights in lists travel unquantized whatever the recipe, so that two recipes begin in every run of the tests.
@pytest.mark.parametrize(
    "first",
    [
        key if key in ("none", "fp8_block") else pytest.param(key, marks=pytest.mark.long)
        for key in RECIPES
        if key != "fp8_delayed"
    ],
)
def test_every_pair_of_lists(pair: RankPool, first: str) -> None:
    pair.run(check_pairs, Lists, first)


def check_compiled(rank: Rank) -> None:
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            torch.nn.Sequential(tnn.Linear(WIDTH, WIDTH, recipe=RECIPES["fp8_block"], device=rank.device))
        )
    full, sharded = models
    shard_(sharded, rank.group)
    for step, name in enumerate(("none", "bf16", "fp8_block")):
        for model in models:
            set_recipe(model, RECIPES[name])
        if name == "fp8_block":
            sharded[0].quantize_weights()  # type: ignore[operator]
        else:
            with pytest.raises(
                ValueError, match=r"expected a (recipe that quantizes|weight whose ranks exchange)"
            ):
                sharded[0].quantize_weights()  # type: ignore[operator]
        compare(full, sharded, rank, step, name, compiled=True)


def test_compiled(pair: RankPool) -> None:
    pair.run(check_compiled)
