"""save_original_input: layers that keep their input, not its quantized copy, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.common import by_recipe
from tests.nn.delayed_layers import batch, make, run, weights_of
from tests.ops.test_linear_ops import saved_bytes
from transformer_plugin import nn
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, NVFP4BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

by_layer = pytest.mark.parametrize(
    "kind",
    ["Linear", "GroupedLinear", "GroupedLinear list", "GroupedMLP", "GroupedMLP hooked"],
)


def layers_in(module: Any) -> list[Any]:
    return [m for m in module.modules() if hasattr(m, "save_original_input")]


@by_recipe
@by_layer
def test_same_bits(kind: str, name: str, device: torch.device) -> None:
    results = []
    for saves in (False, True):
        module = make(kind, name, device=device)
        for layer in layers_in(module):
            assert layer.save_original_input is False
            layer.save_original_input = saves
            assert ("save_original_input=True" in repr(layer)) == saves
        torch.manual_seed(1)
        outputs = run(module, batch(kind, name, 0, device))
        results.append([*outputs, *(p.grad for p in module.parameters())])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_constructors(kind: str) -> None:
    layer = make(kind, save_original_input=True)
    assert layer.save_original_input
    layer.recipe = DelayedScaling()
    *inputs, _ = batch(kind, "fp8_block", 0)
    with pytest.raises(
        ValueError, match=f"{kind}: argument 'recipe': expected save_original_input=False with Del"
    ):
        layer(*inputs)
    layer.save_original_input = False
    layer(*inputs)


def test_which_layers_are_one_op() -> None:
    """The op of both layers keeps no original inputs."""
    results = []
    for saves in ((), ("fc1",), ("fc2",), ("fc1", "fc2")):
        module = make("GroupedMLP")
        for name in saves:
            getattr(module, name).save_original_input = True
        assert module._can_fuse(module.fc1, module.fc2) == (not saves)
        outputs = run(module, batch("GroupedMLP", "fp8_block", 0))
        results.append([*outputs, *(p.grad for p in module.parameters())])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert_same_bits(got, expected)


def test_inputs_that_layers_share_are_kept_once() -> None:
    layers = [nn.Linear(256, 128, False, recipe=Float8BlockScaling()) for _ in range(2)]
    input = torch.randn(128, 256)
    without = saved_bytes(lambda: layers[0](input) + layers[1](input))
    for layer in layers:
        layer.save_original_input = True
    copies, scales = 2 * input.numel(), 2 * 4 * 256
    assert (
        without - saved_bytes(lambda: layers[0](input) + layers[1](input))
        == copies + scales - 4 * input.numel()
    )


def test_random_rounding_of_the_input_is_refused() -> None:
    class Random(NVFP4BlockScaling):
        input_format = "nvfp4:rht,sr"  # type: ignore[assignment]

    layer = nn.Linear(32, 16, recipe=Random(), save_original_input=True)
    assert "sr" in layer._formats.input
    with pytest.raises(ValueError, match=r"argument 'save_original_input': expected .*stochastic rounding"):
        layer(torch.randn(16, 32))


@by_layer
def test_main_grad_and_delay(kind: str) -> None:
    results = []
    for saves in (False, True):
        module = make(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
        for layer in layers_in(module):
            layer.save_original_input = saves
        for weight in weights_of(module).values():
            weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        for seed in range(2):
            run(module, batch(kind, "fp8_block", seed))
        module.backward_dw()
        results.append([w.main_grad for w in weights_of(module).values()])  # type: ignore[attr-defined]
    assert any(got.any() for got in results[1])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)
