"""Quantized and grouped parameters when a layer is cast, moved, loaded, reset, or given another recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.nn.test_quantized_parameters import MAKERS, by_module, make, run, weights
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear
from transformer_plugin.nn.quantized_parameters import in_high_precision
from transformer_plugin.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_plugin.testing.numerics import assert_same_bits

VALUES = tp.QuantizedTensor | tp.GroupedTensor


def bytes_of(value: Any) -> list[torch.Tensor]:
    return [t.detach().clone().view(torch.uint8) for _, t in value._buffers.present()]


def assert_same_bytes(got: Any, expected: list[torch.Tensor]) -> None:
    for a, b in zip(bytes_of(got), expected, strict=True):
        assert torch.equal(a, b)


@by_module
@pytest.mark.parametrize("delay", [False, True])
def test_autocast(kind: str, delay: bool, device: torch.device) -> None:
    """The bits of a layer whose weight is quantized once; gradients have the dtype of the parameters."""
    quantized, plain = make(kind, "fp8_block", device)
    plain.quantize_weights()
    for layer in (quantized, plain):
        for part in layer.modules():
            if hasattr(part, "delay_wgrad_compute"):
                part.delay_wgrad_compute = delay
        x = torch.randn(98, 48, generator=torch.Generator().manual_seed(1)).to(device)
        arguments = [x]
        if "Grouped" in kind:
            arguments.append(torch.tensor([40, 0, 50], device=device))
        if kind == "GroupedMLP":
            arguments.append(torch.linspace(0, 1, 98, device=device))
        with torch.autocast(device.type, torch.bfloat16):
            output = layer(*arguments)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        if delay:
            layer.backward_dw()
        layer.last = output.detach()
    assert_same_bits(quantized.last, plain.last)
    for (name, p), q in zip(quantized.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, atol=2e-2, rtol=2e-2, msg=name)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=str)
def test_delayed_gradients_of_grouped_tensors(recipe: Any) -> None:
    results = []
    for delay in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"parameters": "grouped", "delay_wgrad_compute": delay}
        if recipe is None:
            layer: Any = GroupedLinear(2, 64, 32, **options)
        else:
            with tp.quantized_init(recipe):
                layer = GroupedLinear(2, 64, 32, **options)
        for _ in range(2):
            x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
            layer(x, torch.tensor([3, 5])).square().sum().backward()
            layer.backward_dw()
        results.append(layer.weight.grad)
    assert type(results[1]) is torch.Tensor
    assert_same_bits(*results)


@by_module
def test_initial_values_follow_resets_and_loads(kind: str) -> None:
    quantized, plain = make(kind, "fp8_block", torch.device("cpu"), preserve_high_precision_init_val=True)
    torch.manual_seed(1)
    quantized.reset_parameters()
    torch.manual_seed(1)
    plain.reset_parameters()
    for p, q in zip(weights(quantized), weights(plain), strict=True):
        assert_same_bits(p.get_high_precision_init_val(), q.detach())
    with torch.no_grad():
        for q in weights(plain):
            q.mul_(3)
    quantized.load_state_dict(plain.state_dict())
    for p, q in zip(weights(quantized), weights(plain), strict=True):
        kept = p.get_high_precision_init_val()
        assert_same_bits(kept, q.detach())
        assert kept.data_ptr() != q.data_ptr()
    masters = tp.optim.MasterWeights(weights(quantized), lambda w: torch.optim.SGD(w, lr=0.1))
    for master, q in zip(masters.master_weights, weights(plain), strict=True):
        assert_same_bits(master.detach(), q.detach())
    quantized.load_state_dict(copy.deepcopy(quantized.state_dict()))  # only quantized values are known
    assert all(p.get_high_precision_init_val() is None for p in weights(quantized))
    quantized.reset_parameters()  # those that were dropped stay dropped
    assert all(p.get_high_precision_init_val() is None for p in weights(quantized))


def test_a_reset_that_fails_leaves_the_parameter() -> None:
    with tp.quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        layer = Linear(32, 32)
    weight: Any = layer.weight
    before, kept = bytes_of(weight), weight.get_high_precision_init_val()
    with pytest.raises(KeyboardInterrupt), in_high_precision(layer, "weight"):
        torch.nn.init.zeros_(layer.weight)
        raise KeyboardInterrupt
    assert layer.weight is weight and weight.get_high_precision_init_val() is kept
    assert_same_bytes(weight, before)


@by_module
def test_recipes_of_another_format_are_refused(kind: str) -> None:
    quantized, _ = make(kind, "fp8_block", torch.device("cpu"))
    before = run(quantized, "fp8_block")
    recipe = quantized.recipe
    for other in (None, MXFP8BlockScaling(), Float8CurrentScaling(), DelayedScaling()):
        with pytest.raises(
            ValueError, match="argument 'recipe': expected a recipe whose weights are 'fp8_block"
        ):
            quantized.recipe = other
        with pytest.raises(
            ValueError, match="transformer_plugin::convert: argument 'recipe': expected a recipe"
        ):
            tp.convert(torch.nn.ModuleList([plain := torch.nn.Linear(32, 32), quantized]), other)
        assert type(plain) is torch.nn.Linear and quantized.recipe is recipe
    quantized.recipe = Float8BlockScaling()
    for got, expected in zip(run(quantized, "fp8_block"), before, strict=True):
        assert_same_bits(got, expected)
    with tp.quantized_init(Float8CurrentScaling()):
        layer = MAKERS[kind](48)
    with pytest.raises(ValueError, match="expected a recipe whose weights are 'fp8_tensor"):
        layer.recipe = DelayedScaling()  # the same key, but its weights have scales of earlier steps


@by_module
@pytest.mark.parametrize("target", ["meta", "cpu"])
def test_assign_of_quantized_parameters(kind: str, target: str) -> None:
    quantized, plain = make(kind, "fp8_block", torch.device("cpu"))
    with tp.quantized_init(Float8BlockScaling()), torch.device(target):
        twin = MAKERS[kind](48)
    state = quantized.state_dict()
    twin.load_state_dict(state, assign=True)
    for p, q in zip(weights(twin), weights(quantized), strict=True):
        assert isinstance(p, VALUES) and isinstance(p, torch.nn.Parameter)
        assert p.rowwise_data.data_ptr() == q.rowwise_data.data_ptr()
    for got, expected in zip(run(twin, "fp8_block"), run(quantized, "fp8_block"), strict=True):
        assert_same_bits(got, expected)
    kept = list(weights(twin))
    with pytest.raises(RuntimeError, match="with assign=True, got a plain tensor") as refusal:
        twin.load_state_dict(plain.state_dict(), assign=True)
    assert "Missing" not in str(refusal.value)
    assert all(p is q for p, q in zip(weights(twin), kept, strict=True))
    with pytest.raises(RuntimeError, match="expected a plain tensor"):
        plain.load_state_dict(state, assign=True)
    assert not any(isinstance(p, VALUES) for p in weights(plain))
    with tp.quantized_init(Float8CurrentScaling()):
        other = MAKERS[kind](48)
    with pytest.raises(RuntimeError, match="in fp8_tensor"):
        other.load_state_dict(state, assign=True)


@pytest.mark.parametrize("bias", [False, True])
def test_assign_of_grouped_parameters(bias: bool) -> None:
    packed, grouped = (GroupedMLP(3, 48, 64, bias, parameters=layout) for layout in ("packed", "grouped"))
    state = packed.state_dict()
    grouped.load_state_dict(state, assign=True)
    for (name, p), value in zip(grouped.named_parameters(), state.values(), strict=True):
        assert type(p) is tp.GroupedTensor and isinstance(p, torch.nn.Parameter) and p.requires_grad, name
        assert p.data_ptr() == value.data_ptr()
    arguments = torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6)
    assert_same_bits(grouped(*arguments).detach(), packed(*arguments).detach())
    packed.load_state_dict(grouped.state_dict(keep_vars=True), assign=True)
    assert all(type(p) is torch.nn.Parameter for p in packed.parameters())
    state["fc1.weight"] = torch.randn(3, 48, 128).transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"'fc1\.weight': expected a contiguous"):
        grouped.load_state_dict(state, assign=True)


@by_module
def test_deferred_values(kind: str) -> None:
    """to_empty() of a layer without memory: the parameters keep their types, and get their initial values later."""
    torch.manual_seed(0)
    with tp.quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        deferred, direct = MAKERS[kind](48, device="meta"), MAKERS[kind](48)
    deferred.to_empty(device="cpu")
    assert all(isinstance(p, VALUES) for p in weights(deferred))
    for layer in (deferred, direct):
        torch.manual_seed(0)
        layer.reset_parameters()
    for p, q in zip(weights(deferred), weights(direct), strict=True):
        assert_same_bytes(p, bytes_of(q))
        assert_same_bits(p.get_high_precision_init_val(), q.get_high_precision_init_val())
    grouped = GroupedLinear(2, 32, 32, parameters="grouped", device="meta").to_empty(device="cpu")
    assert type(grouped.weight) is tp.GroupedTensor and type(grouped.bias) is tp.GroupedTensor


def test_attributes_of_parameters_survive_casts() -> None:
    """As those of plain parameters do."""
    with tp.quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        layer: Any = Linear(32, 32)
    grouped: Any = GroupedLinear(2, 32, 32, parameters="grouped")
    for module in (layer, grouped, plain := torch.nn.Linear(32, 32)):
        module.weight.main_grad = buffer = torch.ones(2)
        module.weight.allreduce = False
        module.bfloat16()
        assert module.weight.main_grad is buffer and module.weight.allreduce is False
    assert plain.weight.dtype == layer.weight.dtype == grouped.weight.dtype
    assert layer.weight.get_high_precision_init_val().shape == (32, 32)
