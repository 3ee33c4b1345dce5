"""GroupedMLP and MoE with each activation: the bits of their steps, gradients, layouts of parameters, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, recipes
from transformer_plugin.activations import EXPECTED_KEY, Activation
from transformer_plugin.nn import GroupedMLP, MoE
from transformer_plugin.testing.numerics import assert_same_bits

GROUPS, HIDDEN, FEATURES, ROWS = 3, 64, 128, 96
SIZES = [32, 0, 48]
ACTIVATIONS = (
    "swiglu:limit=0.3",
    "swiglu:interleave=1,limit=0.3,alpha=1.702,offset=1",
    "swiglu:interleave=32,limit=0.3,offset=1",
    "geglu_tanh",
    "geglu_tanh:interleave=1",
    "relu2",
)
RECIPES = (None, recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling())
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def layer(activation: Any, device: torch.device, **options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(GROUPS, HIDDEN, FEATURES, activation=activation, device=device, **options)


def given(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, sizes and probabilities."""
    generator = torch.Generator().manual_seed(1)
    rows = 2 * torch.randn(ROWS, HIDDEN, generator=generator)
    rows[sum(SIZES) :] = 0
    probs = torch.rand(ROWS, generator=generator).to(device)
    return rows.to(dtype).to(device), torch.tensor(SIZES, device=device), probs


def results(module: Any, call: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The output, and the gradients of rows, probabilities and parameters."""
    rows, sizes, probs = inputs
    leaves = [rows.clone().requires_grad_(), probs.clone().requires_grad_(), *module.parameters()]
    output = call(leaves[0], sizes, leaves[1])
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    grad[sum(SIZES) :] = 0
    of_rows, of_probs, *others = torch.autograd.grad(output, leaves, grad)
    end = sum(SIZES)
    return [output.detach()[:end], of_rows[:end], of_probs[:end], *others]


@by_activation
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_steps(activation: str, recipe: Any, bias: bool, device: torch.device) -> None:
    module = layer(activation, device, recipe=recipe, bias=bias, dtype=torch.bfloat16)
    inputs = given(device, torch.bfloat16)

    def steps(rows: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        hidden = ops.activation(module.fc1(rows, sizes), probs, sizes, activation)
        output: Tensor = module.fc2(hidden, sizes, probs if bias else None)
        return output

    expected = results(module, steps, inputs)
    for one, other in zip(results(module, module, inputs), expected, strict=True):
        assert_same_bits(one, other)
    hooked = copy.deepcopy(module)
    hooked.fc1.register_forward_hook(lambda *_: None)  # the layers one by one
    for one, other in zip(results(hooked, hooked, inputs), expected, strict=True):
        assert_same_bits(one, other)
    plain = layer(
        "relu2" if activation == "relu2" else "swiglu", device, recipe=recipe, bias=bias, dtype=torch.bfloat16
    )
    if activation != "relu2":
        plain.load_state_dict(module.state_dict())
        assert not torch.equal(plain(*inputs), module(*inputs))


@by_activation
def test_in_float64(activation: str, device: torch.device) -> None:
    module, (rows, sizes, probs) = layer(activation, device), given(device, torch.float32)
    described = Activation.parse(activation)
    leaves = [each.detach().double().requires_grad_() for each in (rows, probs, *module.parameters())]
    x, p, fc1, fc2 = leaves
    outputs, start = [], 0
    for group, size in enumerate(SIZES):
        here = slice(start, start + size)
        hidden = x[here] @ fc1[group].T
        start += size
        outputs.append((value(hidden, described) * p[here, None]) @ fc2[group].T)
    expected = torch.cat([*outputs, 0 * x[start:]])
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(expected)
    grad[start:] = 0
    wanted = [expected.detach()[:start]]
    of_rows, of_probs, *others = torch.autograd.grad(expected, leaves, grad)
    wanted += [of_rows[:start], of_probs[:start], *others]
    for one, other in zip(results(module, module, (rows, sizes, probs)), wanted, strict=True):
        assert float((one.double() - other).abs().max()) <= 2e-5 * float(other.abs().max())


def value(hidden: Tensor, activation: Activation) -> Tensor:
    if activation.function == "relu2":
        return hidden.relu().square()
    order = activation.interleave or hidden.shape[1] // 2
    gate, linear = (part.flatten(1) for part in hidden.unflatten(1, (-1, 2, order)).unbind(2))
    if activation.function == "geglu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * linear
    gate, linear = gate.clamp(max=activation.limit), linear.clamp(-activation.limit, activation.limit)
    return (linear + activation.offset) * gate * torch.sigmoid(activation.alpha * gate)


@by_activation
@pytest.mark.parametrize("recipe", [None, recipes.Float8BlockScaling()], ids=str)
def test_moe(activation: str, recipe: Any, device: torch.device) -> None:
    """As GroupedMLP of copied rows; compiled; delayed weight gradients; a copy and a state dict."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": activation, "recipe": recipe, "device": device}
    moe = MoE(HIDDEN, FEATURES, 4, 2, **options)
    key = Activation.parse(activation).key
    assert moe.activation.key == moe.experts.activation.key == key and f"activation={key}" in repr(moe)
    tokens = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)

    def step(module: MoE, call: Any) -> list[Tensor]:
        x = tokens.clone().requires_grad_()
        module.zero_grad()
        output = call(x).output
        output.square().sum().backward()
        assert x.grad is not None
        module.experts.fc1.backward_dw() if module.experts.fc1.delay_wgrad_compute else None
        module.experts.fc2.backward_dw() if module.experts.fc2.delay_wgrad_compute else None
        return [
            output.detach(),
            x.grad,
            *(each.grad.clone() for each in module.parameters() if each.grad is not None),
        ]

    expected = step(moe, moe)
    assert len(expected) == 5
    torch.compiler.reset()
    for one, other in zip(
        step(moe, torch.compile(moe, fullgraph=True, backend="aot_eager")), expected, strict=True
    ):
        assert_same_bits(one, other)
    hooked, delayed = copy.deepcopy(moe), MoE(HIDDEN, FEATURES, 4, 2, delay_wgrad_compute=True, **options)
    hooked.experts.fc1.register_forward_hook(lambda *_: None)
    delayed.load_state_dict(moe.state_dict())
    for module in (hooked, delayed):
        for one, other in zip(step(module, module), expected, strict=True):
            assert_same_bits(one, other)


def test_arguments(device: torch.device) -> None:
    module = layer(Activation("swiglu", 1, 7), device)
    assert module.activation == Activation("swiglu", 1, 7) and module.glu_interleave == 1
    assert "activation=swiglu:interleave=1,limit=7" in repr(module)
    assert "activation" not in repr(layer("swiglu", device))
    assert layer("swiglu:limit=7", device, glu_interleave=32).activation.key == "swiglu:interleave=32,limit=7"
    assert layer("relu2", device).fc1.weight.shape == (GROUPS, FEATURES, HIDDEN)
    with pytest.raises(ValueError, match="attribute 'activation': expected Activation"):
        module.activation = Activation()
    text = "transformer_plugin::GroupedMLP: argument 'activation': expected"
    with pytest.raises(ValueError) as caught:
        layer("swish", device)
    assert str(caught.value) == (
        f"{text} {EXPECTED_KEY}, got 'swish'. transformer_plugin.activations lists them."
    )
    with pytest.raises(TypeError) as wrong:
        MoE(HIDDEN, FEATURES, 4, 2, activation=torch.nn.SiLU())  # type: ignore[arg-type]
    assert str(wrong.value) == (
        f"{text} an activation key or a transformer_plugin.activations.Activation, got SiLU. Pass for example 'swiglu'."
    )
    for key, order, expected in (("swiglu:interleave=1", 32, 1), ("relu2", 1, 0)):
        with pytest.raises(ValueError) as caught:
            layer(key, device, glu_interleave=order)
        assert str(caught.value) == (
            f"transformer_plugin::GroupedMLP: argument 'glu_interleave': expected {expected} with the activation "
            f"'{key}', got {order}. Name the order of the rows once."
        )
