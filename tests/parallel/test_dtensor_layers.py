"""Layers whose parameters are DTensors, on two ranks, with every recipe: compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.parallel.dtensor_model import INNER, RECIPES, ROWS, Model, no_worse, plan, results
from transformer_plugin.nn import Linear
from transformer_plugin.recipes import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool


def model_of(rank: Rank, recipe: Recipe | None, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model(recipe, dtype).to(rank.device)


def compare(
    rank: Rank, recipe: Recipe | None, dtype: torch.dtype, sequence: bool, dim: int, both: bool
) -> None:
    """Eager, and with ``both`` compiled."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    indices = torch.randint(ROWS, (4, 32), generator=torch.Generator().manual_seed(1)).to(rank.device)
    exact, single = (results(m, m, indices) for m in (model_of(rank, None), model_of(rank, recipe, dtype)))
    for compiled in (False, True) if both else (False,):
        torch._dynamo.reset()
        model = model_of(rank, recipe, dtype)
        parallelize_module(model, mesh, plan(sequence, dim))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        no_worse(results(model, run, indices), single, exact)


def equal_bits(rank: Rank, style: Any, recipe: Recipe, dtype: torch.dtype) -> None:
    """With slices of whole blocks, what no rank adds to is what one process computes."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    found = []
    for parallel in (False, True):
        torch.manual_seed(0)
        layer = Linear(INNER, 256, recipe=recipe, dtype=dtype).to(rank.device)
        x = torch.randn(2, 64, INNER, dtype=dtype).to(rank.device).requires_grad_()
        if parallel:
            parallelize_module(layer, mesh, style)
        found.append(results(layer, layer, x))
    single, got = found
    names = {"weight", "bias", "output" if isinstance(style, ColwiseParallel) else "input 0"}
    for name in single:
        bound = 1e-5 if dtype == torch.float32 else 0.02  # of sums over ranks, rounded in each
        if name in names and rank.device.type == "cpu":  # a GPU may take another tile for other sizes
            bound = 0.0
        torch.testing.assert_close(got[name], single[name], rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_every_recipe(pair: RankPool, recipe: Recipe | None) -> None:
    """Compiled with activations that are sharded between the products."""
    dtypes = (torch.float32, torch.bfloat16) if recipe is None else (torch.bfloat16,)
    for sequence, dim in ((False, 1), (True, 0), (True, 1)):
        for dtype in dtypes:
            both = dtype == torch.bfloat16 and sequence and dim == 1
            pair.run(compare, recipe, dtype, sequence, dim, both)


#: The plan without sharded activations is compiled for one recipe; which recipe it is does not matter to the layouts.
PLAIN_PLAN = [
    recipe if type(recipe) is Float8BlockScaling else pytest.param(recipe, marks=pytest.mark.long)
    for recipe in RECIPES
]


@pytest.mark.parametrize("recipe", PLAIN_PLAN, ids=lambda recipe: type(recipe).__name__)
def test_compiled_with_full_activations(pair: RankPool, recipe: Recipe | None) -> None:
    pair.run(compare, recipe, torch.bfloat16, False, 1, True)


@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), MXFP8BlockScaling(), Float8RowwiseScaling()], ids=repr
)
def test_bits_of_slices(pair: RankPool, recipe: Recipe) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pair.run(equal_bits, ColwiseParallel(output_layouts=Replicate()), recipe, dtype)
        pair.run(equal_bits, RowwiseParallel(input_layouts=Replicate()), recipe, dtype)
