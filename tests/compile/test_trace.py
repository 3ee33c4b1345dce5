"""torch.jit.trace of every module: correct for other sizes than those of the example."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.error_text import text_of
from tests.nn.common import RECIPES
from transformer_plugin.nn import (
    DispatchConfig,
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    Linear,
    MoE,
    RouterConfig,
    TopKRouter,
)
from transformer_plugin.recipes import DelayedScaling, NVFP4BlockScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

MODULES = {
    "Linear": lambda **options: Linear(64, 32, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(64, 32, return_normalized=True, **options),
    "GroupedLinear": lambda **options: GroupedLinear(2, 64, 32, **options),
    "GroupedMLP": lambda **options: GroupedMLP(2, 64, 32, bias=True, **options),
    "TopKRouter": lambda **options: TopKRouter(64, 4, 2, RouterConfig(aux_loss_coeff=0.1)),
    "MoE": lambda **options: MoE(64, 32, 4, 2, router=RouterConfig(aux_loss_coeff=0.1), **options),
    "MoE, capacity": lambda **options: MoE(64, 32, 4, 2, dispatch=DispatchConfig(capacity=96), **options),
    "MoE, alignment": lambda **options: MoE(64, 32, 4, 2, dispatch=DispatchConfig(alignment=32), **options),
}


def recipe_of(name: str) -> Recipe | None:
    if name == "fp8_delayed":
        return DelayedScaling(amax_history_len=2)
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else RECIPES[name][0]


def arguments(kind: str, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    x = torch.randn(rows // 16, 16, 64, generator=torch.Generator().manual_seed(rows)).to(device)
    if kind.startswith("MoE") or kind in ("Linear", "LayerNormLinear"):
        return (x,)
    if kind == "TopKRouter":
        return (x.view(-1, 64),)
    sizes = torch.tensor([16, rows - 32], device=device)
    return (x.view(-1, 64), sizes, torch.linspace(0, 1, rows, device=device))[
        : 2 if kind == "GroupedLinear" else 3
    ]


class AsTuple(torch.nn.Module):
    """Returns a plain tuple, because traces do not support named tuples."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        result = self.module(*arguments)
        return tuple(result) if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", [*RECIPES, "fp8_delayed"])
@pytest.mark.parametrize("kind", list(MODULES))
def test_other_sizes(kind: str, name: str, training: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    module = AsTuple(MODULES[kind](recipe=recipe_of(name)).to(device)).train(training)
    eager = copy.deepcopy(module)
    traced = torch.jit.trace(module, arguments(kind, 32, device), check_trace=False)
    eager(
        *arguments(kind, 32, device)
    )  # the trace made this call, which has updated the state of delayed scaling
    for rows in (96, 48, 32):
        given = arguments(kind, rows, device)
        results = list(zip(traced(*given), eager(*given), strict=True))
        if kind == "MoE" and device.type == "cuda":
            # The rows with their padding, of which eager calls have none for so few tokens. A trace is for any number.
            received, _ = results.pop()
            assert received >= 2 * rows
        for got, expected in results:
            assert got.shape == expected.shape
            assert_same_bits(got.detach(), expected.detach())
    if training:
        for one in (traced, eager):
            sum(result.sum() for result in one(*given) if result.requires_grad).backward()
        for got, expected in zip(module.parameters(), eager.parameters(), strict=True):
            assert (got.grad is None) == (expected.grad is None)
            if got.grad is not None:
                assert_same_bits(got.grad, expected.grad)


def trace_over_ranks(rank: Rank) -> str:
    moe = MoE(64, 32, 4, 2, group=rank.group, dispatch=DispatchConfig(max_tokens=16))
    try:
        torch.jit.trace(moe, torch.randn(8, 64), check_trace=False)
    except ValueError as error:
        return text_of(error)
    return "traced"


def test_over_ranks_it_is_refused() -> None:
    with RankPool(2) as pool:
        for text in pool.run(trace_over_ranks):
            assert text == (
                "transformer_plugin::MoE: argument 'group': expected None under torch.jit.trace, which would record "
                "the example's number of tokens, got a group of 2 ranks. Use torch.export or torch.compile."
            )
