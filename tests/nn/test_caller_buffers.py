"""Modules that write into buffers of the caller: the bits of modules without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.common import by_recipe
from tests.nn.delayed_layers import batch, make
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear, MoE, quantized_init
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits

by_layer = pytest.mark.parametrize(
    "kind",
    ["Linear", "LayerNormLinear", "GroupedLinear", "GroupedLinear list", "GroupedMLP", "GroupedMLP hooked"],
)


def run(module: Any, inputs: Any, **buffers: Any) -> list[torch.Tensor]:
    *arguments, grad = inputs
    x = arguments[0].detach().clone().requires_grad_()
    output = module(x, *arguments[1:], **buffers)
    for p in module.parameters():
        p.grad = None
    output.backward(grad)
    return [output, x.grad, *(p.grad for p in module.parameters())]


@by_recipe
@by_layer
def test_same_bits(kind: str, name: str, device: torch.device) -> None:
    """Three steps with the same two buffers and other numbers."""
    module = make(kind, name, device=device)
    first = batch(kind, name, 0, device)
    out, dgrad_out = torch.zeros_like(first[-1]), torch.zeros_like(first[0])
    for seed in range(3):
        inputs = (first[0].detach() * (seed + 1), *first[1:])
        torch.manual_seed(seed)
        expected = run(module, inputs)
        torch.manual_seed(seed)
        got = run(module, inputs, out=out, dgrad_out=dgrad_out)
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b)
        assert got[0].data_ptr() == out.data_ptr() and out.grad_fn is None
        assert_same_bits(dgrad_out, expected[1])
        assert_same_bits(run(module, inputs, out=out)[0], out)


@pytest.mark.parametrize("argument", ["out", "dgrad_out"])
@by_layer
def test_refusals(kind: str, argument: str) -> None:
    module = make(kind)
    inputs = batch(kind, "fp8_block", 0)
    like = inputs[-1] if argument == "out" else inputs[0]
    for wrong, text in (
        (like.new_zeros(like.shape[0] + 1, *like.shape[1:]), "of the sizes"),
        (torch.zeros_like(like, requires_grad=True), "requires_grad=False"),
    ):
        with pytest.raises(ValueError, match=f"argument '{argument}': expected .*{text}"):
            run(module, inputs, **{argument: wrong})
        assert not bool(wrong.any())
    for layer in module.modules():
        if hasattr(layer, "recipe"):
            layer.recipe = DelayedScaling()
            break
    if "list" not in kind:
        with pytest.raises(ValueError, match=f"argument '{argument}': expected None with DelayedScaling"):
            run(module, inputs, **{argument: torch.zeros_like(like)})


@by_layer
def test_a_buffer_that_is_written_too_early(kind: str) -> None:
    """What the next op saved is checked by torch, as for its own ops in place."""
    module = make(kind)
    inputs = batch(kind, "fp8_block", 0)
    out = torch.zeros_like(inputs[-1])
    loss = module(*inputs[:-1], out=out).square().sum()  # saves the output
    with torch.no_grad():
        module(*inputs[:-1], out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=["fp8_block", "mxfp8"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_quantized_parameters_without_gradients(recipe: Recipe, mode: Any, device: torch.device) -> None:
    x, sizes = torch.randn(32, 128, device=device), torch.tensor([16, 0, 12], device=device)
    options: dict[str, Any] = {"recipe": recipe, "device": device}
    with quantized_init(recipe):
        layers = (
            (Linear(128, 128, **options), (x,)),
            (GroupedLinear(3, 128, 128, **options), (x, sizes)),
            (GroupedMLP(3, 128, 128, **options), (x, sizes, torch.rand(32, device=device))),
        )
    for layer, inputs in layers:
        with mode():
            out = torch.full_like(x, 7.0)
            got = layer(*inputs, out=out)
            assert_same_bits(out, layer(*inputs))
        assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear", "GroupedMLP"])
def test_compiled(kind: str, device: torch.device) -> None:
    torch._dynamo.reset()
    module = make(kind, device=device)
    inputs = batch(kind, "fp8_block", 0, device)
    expected = run(module, inputs)
    out, dgrad_out = torch.zeros_like(inputs[-1]), torch.zeros_like(inputs[0])
    got = run(
        torch.compile(module, fullgraph=True, backend="aot_eager"), inputs, out=out, dgrad_out=dgrad_out
    )
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a.detach(), b.detach())
    assert_same_bits(out, expected[0].detach())
    assert_same_bits(dgrad_out, expected[1])


def test_gradient_buffer_of_a_norm_apart_from_its_input() -> None:
    module = make("LayerNormLinear")
    x, grad = batch("LayerNormLinear", "fp8_block", 0)
    memory = torch.zeros(2, *x.shape)
    rows = memory[0].requires_grad_()
    with pytest.raises(ValueError, match="argument 'dgrad_out': expected a buffer apart from 'input'"):
        module(rows, dgrad_out=memory[0].detach())
    module(rows, dgrad_out=memory[1].detach()).backward(grad)
    assert bool(memory[1].any())


@pytest.mark.parametrize("dims", [2, 3])
def test_mixture(dims: int, device: torch.device) -> None:
    """Output and gradient are copied, in two steps into the same memory."""
    torch.manual_seed(0)
    moe = MoE(64, 32, 4, 2, device=device)
    sizes = (24, 64) if dims == 2 else (3, 8, 64)
    out, dgrad_out = torch.zeros(sizes, device=device), torch.zeros(sizes, device=device)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(sizes, generator=generator).to(device) for _ in range(2))
        results = []
        for buffers in ({}, {"out": out, "dgrad_out": dgrad_out}):
            moe.zero_grad()
            leaf = x.clone().requires_grad_()
            output = moe(leaf, **buffers).output
            output.backward(grad)
            results.append([output.detach(), leaf.grad, *(p.grad for p in moe.parameters())])
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b)
        assert output.data_ptr() == out.data_ptr() and out.grad_fn is None
        assert_same_bits(out, results[0][0])
        assert_same_bits(dgrad_out, results[0][1])
    for name in ("out", "dgrad_out"):
        with pytest.raises(ValueError, match=f"MoE: argument '{name}': expected a buffer of the sizes"):
            moe(x, **{name: out[:2]})
        with pytest.raises(ValueError, match=f"MoE: argument '{name}': expected a buffer apart from 'input'"):
            moe(x, **{name: x})
