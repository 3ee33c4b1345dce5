"""Wrapped or replaced layers: the modules that contain them require only a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from transformer_plugin.nn import (
    GroupedLinear,
    GroupedMLP,
    LayerNorm,
    LayerNormLinear,
    Linear,
    MoE,
    RMSNorm,
    TopKRouter,
)
from transformer_plugin.recipes import Float8BlockScaling, NVFP4BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits


class Plus(torch.nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Wrapper(torch.nn.Module):
    """A module that contains the layer and adds to its weight during a call, as parameter adapters do."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        innermost = layer.base_layer if isinstance(layer, Wrapper) else layer
        *groups, rows, columns = innermost.weight.shape
        self.num_experts = groups[0] if groups else 1  # as PEFT's wrapper has it
        self.a = torch.nn.Parameter(torch.randn(*groups, 2, columns))
        self.b = torch.nn.Parameter(torch.randn(*groups, rows, 2) / 10)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.base_layer
        if isinstance(layer, Wrapper):
            return layer(x, *args, **kwargs)
        parametrize.register_parametrization(layer, "weight", Plus(self.b @ self.a))
        try:
            with parametrize.cached():
                return layer(x, *args, **kwargs)
        finally:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


class PassThrough(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args)


def moe_of(bias: bool, recipe: Any = None) -> MoE:
    torch.manual_seed(0)
    return MoE(64, 32, 4, 2, bias=bias, recipe=recipe)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("names", [("fc1",), ("fc2",), ("fc1", "fc2"), ("fc2", "fc2")], ids=str)
def test_adapters_of_parameters(names: tuple[str, ...], bias: bool) -> None:
    moe, added = moe_of(bias), moe_of(bias)
    moe.requires_grad_(False)
    for name in names:
        setattr(moe.experts, name, Wrapper(getattr(moe.experts, name)))
    wrappers = {name: getattr(moe.experts, name) for name in names}
    for name, wrapper in wrappers.items():
        inner = wrapper.base_layer if isinstance(wrapper.base_layer, Wrapper) else wrapper
        getattr(added.experts, name).weight.data += (inner.b @ inner.a).detach()
    x = torch.randn(20, 64)
    output = moe(x).output
    assert_same_bits(output.detach(), added(x).output.detach())
    output.square().sum().backward()
    added(x).output.square().sum().backward()
    for name, wrapper in wrappers.items():
        inner = wrapper.base_layer if isinstance(wrapper.base_layer, Wrapper) else wrapper
        grad = getattr(added.experts, name).weight.grad
        torch.testing.assert_close(inner.a.grad, inner.b.mT @ grad)
        torch.testing.assert_close(inner.b.grad, grad @ inner.a.mT)


def test_an_adapter_of_the_router() -> None:
    moe, added = moe_of(False), moe_of(False)
    moe.requires_grad_(False)
    moe.router = wrapper = Wrapper(moe.router)  # type: ignore[assignment]
    added.router.weight.data += (wrapper.b @ wrapper.a).detach()
    x = torch.randn(20, 64)
    output = moe(x).output
    assert_same_bits(output.detach(), added(x).output.detach())
    output.square().sum().backward()
    added(x).output.square().sum().backward()
    grad = added.router.weight.grad
    assert grad is not None and moe.topk == 2
    torch.testing.assert_close(wrapper.a.grad, wrapper.b.mT @ grad)
    torch.testing.assert_close(wrapper.b.grad, grad @ wrapper.a.mT)
    moe.router = Wrapper(TopKRouter(64, 3, 2))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="expected a router of 4 experts, got one of 3"):
        moe(x)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_wrappers_that_pass_on(bias: bool) -> None:
    moe, plain = moe_of(bias), moe_of(bias)
    moe.experts.fc1 = PassThrough(moe.experts.fc1)
    moe.experts.fc2 = PassThrough(PassThrough(moe.experts.fc2))
    moe.experts = PassThrough(moe.experts)
    moe.router = PassThrough(moe.router)
    x = torch.randn(20, 64)
    assert_same_bits(moe(x).output.detach(), plain(x).output.detach())
    for recipe in (Float8BlockScaling(), NVFP4BlockScaling(stochastic_rounding=False)):
        moe.recipe = plain.recipe = recipe
        results = [module(x).output for module in (moe, plain)]
        assert_same_bits(results[0].detach(), results[1].detach())
        results[0].sum().backward()
    assert moe.recipe == recipe

    moe.experts.inner.quantize_weights()
    assert moe.experts.inner.fc1.inner.quantized_weight is not None
    assert_same_bits(moe(x).output.detach(), plain(x).output.detach())
    moe.experts.inner.forget_quantized_weights()
    torch.manual_seed(4)
    moe.experts.inner.reset_parameters()
    torch.manual_seed(4)
    plain.experts.reset_parameters()
    assert_same_bits(moe(x).output.detach(), plain(x).output.detach())


SIZES = torch.tensor([3, 3])
CONTAINERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: Linear(16, 16),
    "Linear, return_bias": lambda: Linear(16, 16, return_bias=True),
    "GroupedLinear": lambda: GroupedLinear(2, 16, 16),
    "GroupedMLP": lambda: GroupedMLP(2, 16, 16, bias=True),
    "RMSNorm": lambda: RMSNorm(16),
    "LayerNorm": lambda: LayerNorm(16),
    "LayerNormLinear": lambda: LayerNormLinear(16, 16, normalization="LayerNorm", return_bias=True),
    "TopKRouter": lambda: TopKRouter(16, 4, 2),
    "MoE": lambda: MoE(16, 16, 4, 2, bias=True),
}


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_every_parameter_may_be_computed(kind: str) -> None:
    """A parametrization replaces the parameter by an attribute of the same name, and may be removed again."""
    module = CONTAINERS[kind]()
    x = torch.randn(6, 16)
    arguments = {"GroupedLinear": (SIZES,), "GroupedMLP": (SIZES, torch.rand(6))}.get(kind, ())

    def run(module: torch.nn.Module) -> list[Tensor]:
        result = module(x, *arguments)
        return [part.detach() for part in (result if isinstance(result, tuple) else (result,))]

    before = run(module)
    for name, parameter in list(module.named_parameters()):
        added = copy.deepcopy(module)
        added.get_parameter(name).data += torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        path, _, last = name.rpartition(".")
        layer = module.get_submodule(path)
        parametrize.register_parametrization(
            layer, last, Plus(added.get_parameter(name) - parameter.detach())
        )
        for got, expected in zip(run(module), run(added), strict=True):
            torch.testing.assert_close(got, expected)
        assert any(not torch.equal(a, b) for a, b in zip(run(module), before, strict=True)), name
        parametrize.remove_parametrizations(layer, last, leave_parametrized=False)
        for got, expected in zip(run(module), before, strict=True):
            assert_same_bits(got, expected)


def test_submodules_may_be_plain_attributes() -> None:
    """As where a container keeps them from ``parameters()``."""
    moe, plain = moe_of(True), moe_of(True)
    x = torch.randn(20, 64)
    for module, name in ((moe.experts, "fc1"), (moe.experts, "fc2"), (moe, "experts"), (moe, "router")):
        part = getattr(module, name)
        delattr(module, name)
        module.__dict__[name] = part
        assert_same_bits(moe(x).output.detach(), plain(x).output.detach())
    del moe.__dict__["router"]
    with pytest.raises(AttributeError, match="'MoE' object has no attribute 'router'"):
        moe(x)


class Dense(torch.nn.Module):
    """One layer for all groups that has only a forward."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(columns, rows, bias=False)

    def forward(self, input: Tensor, group_sizes: Tensor, bias_scale: Tensor | None = None) -> Tensor:
        return self.inner(input)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_replaced_layers(bias: bool) -> None:
    torch.manual_seed(0)
    mlp, sizes, probs = GroupedMLP(2, 64, 32, bias), torch.tensor([3, 5]), torch.rand(8)
    mlp.fc1, mlp.fc2 = Dense(64, 64), Dense(32, 64)
    x = torch.randn(8, 64)
    gate, linear = mlp.fc1.inner(x).chunk(2, -1)
    expected = mlp.fc2.inner(torch.nn.functional.silu(gate) * linear * probs[:, None])
    torch.testing.assert_close(mlp(x, sizes, probs), expected)
    mlp.fc2 = GroupedLinear(2, 32, 64, bias=False)
    assert mlp(x, sizes, probs).shape == (8, 64)
    mlp.reset_parameters()


def hidden_by(way: str, module: torch.nn.Module, name: str, value: Any) -> None:
    """Makes ``module.name`` the value; what the module has registered under the name stays registered."""
    kind = type(module)
    if way == "property of a subclass":  # as wrappers do that keep their shards in the module
        module.__class__ = type(f"Hidden{kind.__name__}", (kind,), {name: property(lambda self: value)})
    elif way == "attribute of the instance":
        object.__setattr__(module, name, value)
    else:

        def find(self: Any, key: str) -> Any:
            return value if key == name else torch.nn.Module.__getattr__(self, key)

        module.__class__ = type(f"Hidden{kind.__name__}", (kind,), {"__getattr__": find})


@pytest.mark.parametrize("kind", list(CONTAINERS))
@pytest.mark.parametrize(
    "way", ["property of a subclass", "attribute of the instance", "__getattr__ of a subclass"]
)
def test_attributes_hide_what_is_registered(way: str, kind: str) -> None:
    """Python's order of lookup: the class, the instance, and only then what ``Module.__getattr__`` finds."""
    x = torch.randn(6, 16)
    arguments = {"GroupedLinear": (SIZES,), "GroupedMLP": (SIZES, torch.rand(6))}.get(kind, ())
    first = CONTAINERS[kind]()
    own = [name for name, _ in (*first.named_parameters(recurse=False), *first.named_children())]
    for name in own:
        module, other = CONTAINERS[kind](), CONTAINERS[kind]()
        for parameter in other.parameters():
            parameter.data.normal_()
        expected = copy.deepcopy(module)
        setattr(expected, name, getattr(other, name))
        hidden_by(way, module, name, getattr(other, name))
        for got, wanted in zip(module(x, *arguments), expected(x, *arguments), strict=True):
            assert_same_bits(got.detach(), wanted.detach(), name)


@pytest.mark.parametrize("way", ["property of a subclass", "attribute of the instance"])
def test_compiled_code_finds_hiding_attributes(way: str) -> None:
    layer, weight = Linear(16, 16), torch.randn(16, 16)
    expected = torch.nn.functional.linear(torch.eye(16), weight, layer.bias)
    hidden_by(way, layer, "weight", weight)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(torch.eye(16)), expected)
