"""Errors name the layer that raised them, profiles the layer that ran."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests import error_text
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear, MoE, TopKRouter
from transformer_plugin.recipes import MXFP8BlockScaling


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"linear": Linear(64, 64), "moe": MoE(64, 32, 4, 2)}) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["moe"](layer["linear"](x)).output
        return x


def note_of(function: object, *arguments: object) -> str:
    """Returns the note of the error; its text must be unchanged."""
    with pytest.raises((ValueError, TypeError)) as error:
        function(*arguments)
    text = "".join(traceback.format_exception_only(error.value))
    assert str(error.value).startswith("transformer_plugin::") and str(error.value) in text
    lines = [line for line in text.splitlines() if line.startswith("raised in the layer ")]
    assert len(lines) == 1
    return lines[0]


def test_the_name_in_the_model() -> None:
    model, x = Model(), torch.randn(4, 64)
    model.layers[1]["moe"].experts.fc1.bias = torch.nn.Parameter(torch.zeros(3))
    assert note_of(model, x) == (
        "raised in the layer 'layers.1.moe.experts' of Model: "
        "GroupedMLP(num_groups=4, hidden=64, ffn_hidden=32, bias=False)"
    )
    model.layers[1]["moe"].experts.fc1.register_forward_hook(lambda *_: None)
    assert note_of(model, x) == (
        "raised in the layer 'layers.1.moe.experts.fc1' of Model: "
        "GroupedLinear(num_groups=4, in_features=64, out_features=64, bias=True)"
    )
    model.layers[0]["linear"].weight = torch.nn.Parameter(torch.zeros(64, 63))
    expected = "Linear(in_features=64, out_features=64, bias=True)"
    assert note_of(model, x) == f"raised in the layer 'layers.0.linear' of Model: {expected}"
    whole = torch.nn.Sequential(torch.nn.Identity(), model)
    assert note_of(whole, x) == f"raised in the layer '1.layers.0.linear' of Sequential: {expected}"


def test_a_layer_by_itself() -> None:
    x, sizes = torch.randn(4, 48), torch.tensor([2, 2])
    recipe = MXFP8BlockScaling()
    assert note_of(Linear(64, 32, recipe=recipe), x) == (
        f"raised in the layer Linear(in_features=64, out_features=32, bias=True, recipe={recipe})"
    )
    assert "layer GroupedLinear(num_groups=2," in note_of(GroupedLinear(2, 64, 32), x, sizes)
    assert "layer GroupedMLP(num_groups=2, hidden=64" in note_of(
        GroupedMLP(2, 64, 32), x, sizes, torch.rand(4)
    )
    assert "layer TopKRouter(hidden=64, num_experts=4, topk=2" in note_of(TopKRouter(64, 4, 2), x)
    assert "layer MoE(hidden=64, ffn_hidden=32, num_experts=4" in note_of(MoE(64, 32, 4, 2), x)


def test_ranges_in_a_profile() -> None:
    model, x = Model(), torch.randn(4, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    count = {event.key: event.count for event in profile.key_averages()}
    assert {name: count.get(f"transformer_plugin.nn.{name}") for name in ("Linear", "MoE", "GroupedMLP")} == {
        "Linear": 3,
        "MoE": 3,
        "GroupedMLP": 3,
    }
    assert count["transformer_plugin.nn.TopKRouter"] == 3
    ranges = [event for event in profile.events() if event.name == "transformer_plugin.nn.MoE"]
    inner = {child.name for child in ranges[0].cpu_children}
    assert {"transformer_plugin.nn.TopKRouter", "transformer_plugin.nn.GroupedMLP"} <= inner


def test_a_layer_with_parametrizations_has_its_own_name() -> None:
    """And not that of the class that torch gives it; a class of the user's keeps its name."""
    layer = GroupedLinear(2, 8, 8)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Softplus())
    assert type(layer).__name__ == "ParametrizedGroupedLinear"
    with pytest.raises(
        ValueError, match=r"^transformer_plugin::GroupedLinear: attribute 'num_groups'"
    ) as fixed:
        layer.num_groups = 3
    assert "Parametrized" not in str(fixed.value)
    layer.delay_wgrad_compute = True
    with pytest.raises(ValueError, match=r"^transformer_plugin::GroupedLinear: argument 'weight'") as caught:
        layer(torch.ones(4, 8), torch.tensor([2, 2]))
    assert " GroupedLinear(" in error_text.note_of(caught.value)

    sharded = Linear(8, 8)
    own = {"__module__": "torch.distributed.fsdp._fully_shard._fsdp_init"}  # as fully_shard() makes it
    sharded.__class__ = type("FSDPLinear", (FSDPModule, Linear), own)
    with pytest.raises(ValueError) as wrong:
        sharded(torch.ones(4, 7))
    assert " Linear(in_features=8" in error_text.note_of(wrong.value)

    class Mine(Linear):
        pass

    with pytest.raises(TypeError, match=r"^transformer_plugin::Mine: argument 'bias'"):
        Mine(8, 8, bias="yes")
