"""MasterWeights whose parameters something else changes: master weights follow, or the step raises an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear
from transformer_plugin.optim import MasterWeights
from transformer_plugin.recipes import Float8BlockScaling, MXFP8BlockScaling


def quantized(make: Callable[[], torch.nn.Module], recipe: Any, keeps: bool = False) -> torch.nn.Module:
    with tp.quantized_init(recipe, preserve_high_precision_init_val=keeps):
        return make()


#: Models with plain, grouped and quantized parameters.
MODELS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "float32": lambda device: torch.nn.Linear(64, 32, device=device),
    "bfloat16": lambda device: Linear(64, 32, device=device, dtype=torch.bfloat16),
    "grouped": lambda device: GroupedLinear(
        2, 64, 32, device=device, dtype=torch.bfloat16, parameters="grouped"
    ),
    "quantized": lambda device: quantized(lambda: Linear(64, 32, device=device), Float8BlockScaling()),
    "quantized, values kept": lambda device: quantized(
        lambda: Linear(64, 32, device=device, dtype=torch.bfloat16), Float8BlockScaling(), True
    ),
    "quantized experts": lambda device: quantized(
        lambda: GroupedMLP(2, 64, 32, device=device), MXFP8BlockScaling()
    ),
}


def make(kind: str, device: Any = "cpu", seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind](device)


def sgd(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=2e-4)  # less than a bit of most weights


def give_gradients(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def train(model: torch.nn.Module, masters: MasterWeights) -> None:
    give_gradients(model)
    masters.step()
    masters.zero_grad()


def values(model: torch.nn.Module) -> list[Tensor]:
    return [value.float() for value in plain_state(model).values()]


def plain_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The values of a model, as a checkpoint in high precision has them."""
    state = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "dequantize") and isinstance(value, tp.QuantizedTensor | tp.GroupedTensor):
            value = value.dequantize() if value.format.is_quantized else value.packed()
        state[name] = value.detach().clone()
    return state


def by_load(model: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    model.load_state_dict(state)


def by_checkpoint(model: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Of torch.distributed.checkpoint, into the tensors of the state_dict where they are plain."""
    dcp.save(state, checkpoint_id=path, no_dist=True)
    target = model.state_dict() if type(next(model.parameters())) is torch.nn.Parameter else dict(state)
    for name, value in target.items():
        if value is state[name]:
            target[name] = torch.zeros_like(value)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    if type(next(model.parameters())) is not torch.nn.Parameter:
        model.load_state_dict(target)


def by_copy(model: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def by_values(model: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Quantized ones, in the same format, where they are."""
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    model.load_state_dict(other.state_dict())


def by_quantize(model: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Through the methods of quantized values, and bytes through ``.data``, which shares no version with its tensor."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if (
                not isinstance(parameter, tp.QuantizedTensor | tp.GroupedTensor)
                or not parameter.format.is_quantized
            ):
                parameter.copy_(state[name])
            elif i == 0:
                parameter.quantize_(state[name])
            else:
                other = parameter.detach().clone()
                parameter.data.copy_(other.copy_(state[name]))


LOADS = [by_load, by_checkpoint, by_copy, by_values, by_quantize]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("load", LOADS)
def test_masters_follow(kind: str, load: Any, device: torch.device, tmp_path: Path) -> None:
    """As if they had been made after the load, in every bit."""
    model, other = make(kind, device), make(kind, device, seed=1)
    masters = MasterWeights(model.parameters(), sgd)
    for _ in range(3):
        train(model, masters)
    state = plain_state(make(kind, device, seed=2))
    load(model, state, tmp_path / "a")
    load(other, state, tmp_path / "b")
    expected = MasterWeights(other.parameters(), sgd)
    for _ in range(2):
        assert all(map(torch.equal, masters.state_dict()["master_weights"], expected.master_weights))
        train(model, masters)
        train(other, expected)
        assert all(map(torch.equal, values(model), values(other)))
    assert any(
        not torch.equal(a, b) for a, b in zip(masters.master_weights, make_masters(other), strict=True)
    ) or (kind == "float32")


def make_masters(model: torch.nn.Module) -> list[Tensor]:
    return MasterWeights(model.parameters(), sgd).master_weights


@pytest.mark.parametrize("kind", MODELS)
def test_masters_keep_their_bits(kind: str, device: torch.device) -> None:
    """Of a model that is saved and loaded, before or after the optimizer, and where nothing has changed."""
    model = make(kind, device)
    masters = MasterWeights(model.parameters(), sgd)
    for _ in range(3):
        train(model, masters)
    own, of_model = copy.deepcopy(masters.state_dict()), plain_state(model)
    train(model, masters)
    expected = values(model)
    for model_first in (True, False):
        loaded = make(kind, device, seed=2)
        resumed = MasterWeights(loaded.parameters(), sgd)
        for first in (model_first, not model_first):
            loaded.load_state_dict(of_model) if first else resumed.load_state_dict(copy.deepcopy(own))
        assert all(map(torch.equal, resumed.master_weights, own["master_weights"]))
        train(loaded, resumed)
        assert all(map(torch.equal, values(loaded), expected))


def test_other_memory_and_what_is_not_noticed() -> None:
    layer = Linear(64, 32, dtype=torch.bfloat16)
    masters = MasterWeights(layer.parameters(), sgd)
    train(layer, masters)
    layer.weight.data = torch.full_like(layer.weight, 0.5)
    assert (masters.state_dict()["master_weights"][0] == 0.5).all()
    layer.weight.data.copy_(torch.full_like(layer.weight, 0.25))
    masters.follow_parameters()
    assert (masters.master_weights[0] == 0.25).all()
    before = [master.clone() for master in masters.master_weights]
    masters.follow_parameters()
    assert all(map(torch.equal, masters.master_weights, before))


def test_a_changed_parameter_leaves_the_others() -> None:
    """The bias keeps the bits that its parameter has not."""
    layer = Linear(64, 32, dtype=torch.bfloat16)
    masters = MasterWeights(layer.parameters(), sgd)
    for _ in range(3):
        train(layer, masters)
    bias = masters.master_weights[1].clone()
    assert not torch.equal(bias, layer.bias.float())
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(0)  # counted, and no change
    weight, grads = layer.weight.detach().float(), [torch.zeros_like(p) for p in layer.parameters()]
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        parameter.grad = grad
    masters.step()
    assert torch.equal(masters.master_weights[0], weight) and torch.equal(masters.master_weights[1], bias)


@pytest.mark.parametrize("left", ["no gradient", "zeros", "the last gradient", "main_grad"])
@pytest.mark.parametrize("how", ["assign", "attribute"])
@pytest.mark.parametrize("kind", ["float32", "quantized"])
def test_replaced_parameters(kind: str, how: str, left: str) -> None:
    """Whatever the old parameter has left as its gradient, also of copies of both."""
    model, other = make(kind), make(kind, seed=1)
    masters = MasterWeights(model.parameters(), sgd)
    train(model, masters)
    give_gradients(model)
    if left == "main_grad":
        for parameter in model.parameters():
            parameter.main_grad = torch.ones(parameter.shape)  # type: ignore[attr-defined]
    if left != "the last gradient":
        masters.zero_grad(set_to_none=left == "no gradient")
    model, masters = copy.deepcopy((model, masters))
    if how == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    else:
        model.weight = torch.nn.Parameter(torch.ones(32, 64))
    model, masters = copy.deepcopy((model, masters))
    give_gradients(model)
    before = copy.deepcopy(masters.master_weights)
    text = (
        r"transformer_plugin::MasterWeights: argument 'parameters': expected those of the model, got 'weight of "
        r"Linear', of which the module has another by now\. Make a new MasterWeights after load_state_dict\("
    )
    with pytest.raises(ValueError, match=text):
        masters.step()
    assert all(map(torch.equal, masters.master_weights, before))
    train(model, MasterWeights(model.parameters(), sgd))


@pytest.mark.parametrize("kind", ["bfloat16", "quantized"])
def test_copies_of_both(kind: str) -> None:
    """Deep copies and pickles of a model with its optimizer follow loads, too."""
    model = make(kind)
    masters = MasterWeights(model.parameters(), sgd)
    train(model, masters)
    file = io.BytesIO()
    torch.save((model, masters), file)
    file.seek(0)
    for copied, its_masters in (copy.deepcopy((model, masters)), torch.load(file, weights_only=False)):
        assert all(map(torch.equal, its_masters.master_weights, masters.master_weights))
        copied.load_state_dict(plain_state(make(kind, seed=2)))
        expected = values(copied)
        train(copied, its_masters)
        for after, loaded in zip(values(copied), expected, strict=True):
            torch.testing.assert_close(after, loaded, rtol=0, atol=0.02)
    train(model, masters)


def test_a_parameter_that_another_module_has() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    masters = MasterWeights(model.parameters(), sgd)
    shared = model[0].weight
    model[1].weight = torch.nn.Parameter(torch.ones(8, 8))
    shared.grad = torch.ones_like(shared)
    masters.step()
