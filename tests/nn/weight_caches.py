"""What tests of kept quantized weights share: equal modules with and without them, and a count of what is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.test_quantized_weights import MAKERS, RECIPES, width_of
from transformer_plugin import ops
from transformer_plugin.nn import Linear
from transformer_plugin.nn._recipe import RecipeModule


def pair(
    kind: str, name: str = "fp8_block", device: torch.device | str = "cpu", **options: Any
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two equal modules, of which the first keeps its quantized weights."""
    made = []
    for caches in (True, False):
        torch.manual_seed(0)
        recipe = RECIPES[name][0]
        options = {**options, "device": device, "recipe": recipe, "cache_weights": caches}
        made.append(MAKERS[kind](width_of(name, 48), **options))
    return made[0], made[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list that grows with each weight that is quantized to be kept."""
    calls: list[Any] = []
    quantize = ops.quantize_weight

    def counted(weight: Any, *formats: str) -> list[Tensor]:
        calls.append(weight)
        return quantize(weight, *formats)

    monkeypatch.setattr(ops, "quantize_weight", counted)
    yield calls


def fresh(layer: Any) -> Linear:
    """A layer without a cache that has the present weight."""
    made = Linear(layer.in_features, layer.out_features, recipe=layer.recipe)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(getattr(layer, name))
    return made


def copied(layer: RecipeModule) -> list[Tensor] | None:
    """What a layer keeps."""
    kept = layer._weight_source._cache._kept  # type: ignore[attr-defined]
    return None if kept is None else kept.tensors
