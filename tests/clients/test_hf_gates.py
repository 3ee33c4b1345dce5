"""Gates that classes of experts define themselves: which of them one op computes, and that it computes them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clients.hf_experts import EXPERTS, are_near, classes, differences, kind_of, make, results, routed
from transformer_plugin.integrations import hf
from transformer_plugin.nn._experts import activation_of, flags_of, has_own_gate, not_one_op
from transformer_plugin.recipes import Float8BlockScaling, MXFP8BlockScaling

#: The key of each class with a gate of its own that the ops have, of the limit 0.5 and the alpha 1.702.
KEYS = {
    "DeepseekV4Experts": "swiglu:limit=0.5",
    "Glm5NextTextExperts": "swiglu:limit=0.5",
    "HYV4Experts": "swiglu:limit=0.5",
    "HYV4VLExperts": "swiglu:limit=0.5",
    "MiniMaxM3VLExperts": "swiglu:offset=1,limit=0.5,alpha=1.702",
    "GptOssExperts": "swiglu:interleave=1,offset=1,limit=0.5,alpha=1.702",
    "OpenAIPrivacyFilterExperts": "swiglu:offset=1,limit=0.5,alpha=1.702",
}


def test_every_gate_of_transformers() -> None:
    found = {}
    for name in classes():
        experts = make(name)
        if has_own_gate(experts):
            found[name] = activation_of(experts, flags_of(experts))
    assert {name: key for name, key in found.items() if key} == KEYS and len(found) > len(KEYS)


def without_biases(name: str, device: torch.device) -> Any:
    """Experts with the gate of a class that has biases and transposed weights, and without those."""
    experts: Any = make("MixtralExperts", _experts_implementation=hf.NAME).to(device)
    gate = {"_apply_gate": kind_of(name)._apply_gate}
    experts.__class__ = type("WithoutBiases", (type(experts),), gate)
    experts.is_concatenated, experts.limit, experts.alpha = name != "GptOssExperts", 0.5, 1.702
    del experts.act_fn
    return experts


def stepwise(experts: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Every expert in a loop, in float64, with the gate of the class."""
    tokens, index, weights = inputs
    leaves = [tokens.double(), weights.double(), experts.gate_up_proj.double(), experts.down_proj.double()]
    x, p, first, second = (leaf.detach().requires_grad_() for leaf in leaves)
    output = torch.zeros_like(x)
    for expert in range(EXPERTS):
        row, choice = (index == expert).nonzero(as_tuple=True)
        hidden = experts._apply_gate(x[row] @ first[expert].T)
        output = output.index_add(0, row, (hidden @ second[expert].T) * p[row, choice, None])
    output.square().sum().backward()
    assert x.grad is not None and p.grad is not None and first.grad is not None and second.grad is not None
    return [output.detach(), x.grad, p.grad, first.grad, second.grad]


@pytest.mark.parametrize("name", ["GptOssExperts", "OpenAIPrivacyFilterExperts"])
def test_without_biases_it_is_one_op(name: str, device: torch.device) -> None:
    experts = without_biases(name, device)
    inputs: Any = tuple(each.to(device) for each in routed())
    assert not_one_op(experts) == ""
    found = differences(results(experts, inputs), stepwise(experts, inputs))
    assert are_near(found), found
    torch.compiler.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert are_near(differences(results(compiled, inputs), stepwise(experts, inputs)))
    for recipe in (Float8BlockScaling(), MXFP8BlockScaling()):
        hf.set_recipe(experts, recipe)
        found = differences(results(experts, inputs)[:1], stepwise(experts, inputs)[:1])
        assert 1e-4 < found[0] < 0.15


@pytest.mark.parametrize("name", ["DeepseekV4Experts", "MiniMaxM3VLExperts"])
def test_layers_with_different_limits_compile(name: str, device: torch.device) -> None:
    """Numbers are constants of a graph, also where layers of one class have different ones."""
    layers = [
        make(name, swiglu_limit=limit, _experts_implementation=hf.NAME).to(device)
        for limit in (0.5, 0.25, 2.0)
    ]
    inputs: Any = tuple(each.to(device) for each in routed())
    torch.compiler.reset()
    compiled = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]
    for one, layer in zip(compiled, layers, strict=True):
        assert differences(results(one, inputs), results(layer, inputs)) == [0.0] * 5
    outputs = [layer(*inputs) for layer in layers]
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def other_offset(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.swiglu_limit)
    up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
    glu = gate * torch.sigmoid(gate * self.swiglu_alpha)
    return (up + 2.0) * glu


def other_clamp(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=self.swiglu_limit)
    up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
    glu = gate * torch.sigmoid(gate * self.swiglu_alpha)
    return (up + 1.0) * glu


@pytest.mark.parametrize("gate", [other_offset, other_clamp])
def test_another_gate_runs_itself(gate: Any) -> None:
    experts = make("MiniMaxM3VLExperts", _experts_implementation=hf.NAME)
    before = experts(*routed())
    experts.__class__ = type("Another", (type(experts),), {"_apply_gate": gate})
    assert not_one_op(experts) == "a gate of its own"
    found = differences(results(experts, routed()), stepwise(experts, routed()))
    assert are_near(found) and not torch.equal(experts(*routed()), before)


def test_what_an_instance_changes_is_kept() -> None:
    experts = make("DeepseekV4Experts", _experts_implementation=hf.NAME)
    assert not_one_op(experts) == ""
    for name, value in (
        ("act_fn", torch.nn.GELU()),
        ("limit", None),
        ("limit", 0.0),
        ("limit", torch.tensor(0.5)),
        ("_apply_gate", types.MethodType(other_clamp, experts)),
    ):
        changed = make("DeepseekV4Experts", _experts_implementation=hf.NAME)
        setattr(changed, name, value)
        assert not_one_op(changed) == "a gate of its own", name
    experts.limit = 0.25
    assert activation_of(experts, flags_of(experts)) == "swiglu:limit=0.25"
    assert are_near(differences(results(experts, routed()), stepwise(experts, routed())))
