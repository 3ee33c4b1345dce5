"""Every module in a backward that is split as torch's zero-bubble schedules do: first the gradients of the inputs, then
those of the weights. They are those of a backward that is not split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tests.parallel.pipeline_stages import STAGES, H, Layer, Stage, T, make_stage, name_of, probs, sizes
from transformer_plugin import nn
from transformer_plugin.nn import DispatchConfig
from transformer_plugin.parallel import shard_
from transformer_plugin.recipes import NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.distributed import Rank, RankPool

RECIPES = ("none", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4")
KEYS = [pytest.param(key, id=name_of(key)) for key in STAGES]


def recipe_of(name: str) -> Recipe | None:
    """Without stochastic rounding, whose numbers are others in a second backward."""
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe_from_name(name)


def microbatch(seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An input that requires a gradient, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(T, H, generator=generator).to(device, dtype) for _ in range(2))
    return x.requires_grad_(), grad


def unsplit(stage: torch.nn.Module, x: Tensor, grad: Tensor) -> None:
    stage(x).backward(grad)


def split(stage: torch.nn.Module, x: Tensor, grad: Tensor) -> None:
    _, groups = stage_backward_input([stage(x)], [grad], [x], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)


def gradients(
    stage: torch.nn.Module, backward: Any, device: torch.device, first_seed: int = 0
) -> dict[str, Tensor]:
    """Of the inputs of two microbatches, and of all parameters."""
    results: dict[str, Tensor] = {}
    for seed in range(2):
        x, grad = microbatch(10 * first_seed + seed, device, torch.bfloat16)
        backward(stage, x, grad)
        assert x.grad is not None
        results[f"input {seed}"] = x.grad
    results.update((name, plain(p.grad)) for name, p in stage.named_parameters() if p.grad is not None)
    return results


def plain(grad: Any) -> Tensor:
    """Of a GroupedTensor or a DTensor, this rank's."""
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    return grad.packed() if hasattr(grad, "packed") else grad


def test_every_module_is_in_the_table() -> None:
    modules = {value for name in nn.__all__ if isinstance(value := getattr(nn, name), type)}
    classes = {kind for kind in modules if issubclass(kind, torch.nn.Module)} | {nn.QuantizedWeight}
    assert {kind for kind, _ in STAGES} == classes


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_an_unsplit_backward(
    key: tuple[type, str], recipe: str, device: torch.device
) -> None:
    if recipe == "fp8_delayed" and "list" in key[1]:
        pytest.skip("lists have no delayed scaling")
    if key[0] is nn.QuantizedWeight and recipe in ("none", "fp8_delayed"):
        pytest.skip("nothing is quantized once")
    stage = make_stage(key, recipe_of(recipe)).to(device)
    expected = gradients(copy.deepcopy(stage), unsplit, device)
    got = gradients(stage, split, device)
    wanted_of = {name for name, p in stage.named_parameters() if p.requires_grad} | {"input 0", "input 1"}
    assert got.keys() == expected.keys() and (set(got) == wanted_of or "alone" in key[1])
    for name, wanted in expected.items():
        assert wanted.any(), name
        assert torch.equal(got[name], wanted), name


def over_ranks(rank: Rank, recipe: str) -> dict[str, torch.nn.Module]:
    """Layers whose backward exchanges tensors with other ranks."""
    options: Any = {"dtype": torch.bfloat16, "recipe": recipe_of(recipe), "device": rank.device}
    tokens = DispatchConfig(max_tokens=T, alignment=16)

    def moe(**more: Any) -> torch.nn.Module:
        layer = nn.MoE(H, H, 4, 2, group=rank.group, dispatch=tokens, **more, **options)
        return Layer(layer, lambda m, x: m(x).output)

    def dense(**more: Any) -> torch.nn.Module:
        column = nn.LayerNormLinear(H, 96, parallel_mode="column", tp_group=rank.group, **more, **options)
        row = nn.Linear(96, H, parallel_mode="row", tp_group=rank.group, **more, **options)
        return torch.nn.Sequential(column, row)

    def experts(**more: Any) -> torch.nn.Module:
        return Layer(nn.GroupedMLP(3, H, 96, True, **more, **options), lambda m, x: m(x, sizes(x), probs(x)))

    linear = torch.nn.Sequential(nn.Linear(H, H, **options), nn.LayerNormLinear(H, H, **options))
    return {
        "experts": moe(dtensor=False),
        "experts as DTensors": moe(),
        "tensor parallel": dense(),
        "sequence parallel": dense(sequence_parallel=True),
        "tensor-parallel experts": experts(tp_group=rank.group),
        "sharded": shard_(linear, rank.group),
        "sharded experts": shard_(experts(parameters="list"), rank.group),
    }


def check_over_ranks(rank: Rank, recipe: str) -> None:
    results: list[dict[str, dict[str, Tensor]]] = []
    for backward in (unsplit, split):
        torch.manual_seed(0)
        layers = over_ranks(rank, recipe)
        stages = {name: Stage(layer).to(rank.device, torch.bfloat16) for name, layer in layers.items()}
        results.append(
            {name: gradients(stage, backward, rank.device, rank.rank) for name, stage in stages.items()}
        )
    for name, expected in results[0].items():
        for key, wanted in expected.items():
            assert torch.equal(results[1][name][key], wanted), f"{key} of {name}"


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
def test_layers_over_ranks(pair: RankPool, recipe: str) -> None:
    pair.run(check_over_ranks, recipe)
