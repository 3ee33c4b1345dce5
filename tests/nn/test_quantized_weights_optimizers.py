"""Cached quantized weights after steps of optimizers, also of fused ones, whose changes torch does not count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.nn.test_quantized_weights import assert_all_same, by_module, make, step
from transformer_plugin.nn import GroupedLinear, Linear
from transformer_plugin.recipes import Float8BlockScaling

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "Adagrad": torch.optim.Adagrad,
}
by_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def give_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


@by_module
@by_optimizer
@pytest.mark.parametrize("option", ["fused", "foreach"])
def test_steps_are_noticed(kind: str, name: str, option: str, device: torch.device) -> None:
    if (name, option, device.type) == ("Adagrad", "fused", "cuda"):
        pytest.skip("torch has no fused Adagrad on CUDA")
    module = make(kind, device=device)
    optimizer = OPTIMIZERS[name](module.parameters(), lr=0.1, **{option: True})
    for _ in range(2):
        module.quantize_weights()
        step(module)
        give_gradients(module)
        optimizer.step()
        with pytest.raises(ValueError, match="got one that was changed in place afterwards"):
            step(module)
    module.quantize_weights()
    fresh = make(kind, device=device)
    fresh.load_state_dict(module.state_dict())
    assert_all_same(step(module), step(fresh))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_capturable_steps_are_noticed(name: str) -> None:
    module = make("Linear", device=torch.device("cuda"))
    optimizer = OPTIMIZERS[name](module.parameters(), lr=0.1, fused=True, capturable=True)
    module.quantize_weights()
    give_gradients(module)
    optimizer.step()
    with pytest.raises(ValueError, match="changed in place"):
        step(module)


@pytest.mark.parametrize("layout", ["list", "grouped"])
def test_layouts(layout: Any) -> None:
    layer: Any = GroupedLinear(3, 64, 96, recipe=Float8BlockScaling(), parameters=layout)
    x, sizes = torch.randn(32, 64), torch.tensor([16, 0, 16])
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer.quantize_weights()
    layer(x, sizes).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="changed in place"):
        layer(x, sizes)
    layer.quantize_weights()
    layer(x, sizes)


def test_what_has_not_changed_stays_valid() -> None:
    """Of another optimizer, without a gradient, and a step that is not made."""
    module, other = make("Linear"), make("Linear")
    for each in (module, other):
        each.quantize_weights()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    optimizer.step()
    step(module)
    give_gradients(module)
    optimizer.step()
    step(other)
    loaded = copy.deepcopy(optimizer)
    other.weight.grad = torch.ones_like(other.weight)  # type: ignore[union-attr]
    loaded.step()
    step(other)


@pytest.mark.parametrize("early", [True, False])
def test_hooks_that_quantize(early: bool) -> None:
    """A hook of the user's, which was there before the first step of the optimizer or is added later."""
    layer = Linear(64, 96, recipe=Float8BlockScaling())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    x = torch.randn(8, 64)

    def quantize(*_: Any) -> None:
        layer.quantize_weights()

    if early:
        optimizer.register_step_post_hook(quantize)
    layer.quantize_weights()
    for _ in range(2):
        layer(x).sum().backward()
        optimizer.step()
        if not early:
            layer.quantize_weights()
            optimizer.register_step_post_hook(quantize)
            early = True
    fresh = Linear(64, 96, recipe=Float8BlockScaling())
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), fresh(x))


def test_closures() -> None:
    """The forward in a closure reads the weight of before the step, which it may quantize."""
    layer = Linear(64, 96, recipe=Float8BlockScaling())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        layer.quantize_weights()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]  # type: ignore[arg-type,union-attr]
    assert losses[2] < losses[0]
    with pytest.raises(ValueError, match="changed in place"):
        layer(x)


def test_compiled_steps(fresh_compiler: None) -> None:
    layer = Linear(64, 96, recipe=Float8BlockScaling())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer.quantize_weights()
    for run in (optimizer.step, torch.compile(optimizer.step, backend="aot_eager")):
        give_gradients(layer)
        run()
        with pytest.raises(ValueError, match="changed in place"):
            layer(torch.randn(8, 64))
        layer.quantize_weights()
