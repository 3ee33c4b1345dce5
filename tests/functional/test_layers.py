"""linear, grouped_linear, grouped_mlp and grouped_gemm_activation against the ops with formats by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.values import (
    GROUPED_COLUMNWISE,
    ROWS,
    SIZES,
    assert_ragged,
    assert_value,
    buffers,
    draw,
    seed_of,
    sizes_on,
)
from tests.nn.common import RECIPES
from transformer_plugin import ops
from transformer_plugin.formats import resolve
from transformer_plugin.recipes import DelayedScaling, NVFP4BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits

G, N, K, F = len(SIZES), 32, 64, 64
#: Without the state of delayed scaling, and without random numbers, so that a call repeats.
OF_RECIPES = {
    "none": None,
    **{
        name: NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe
        for name, (recipe, *_) in RECIPES.items()
        if not isinstance(recipe, DelayedScaling)
    },
}
by_recipe = pytest.mark.parametrize("recipe", OF_RECIPES.values(), ids=OF_RECIPES)


def formats(recipe: Recipe | None, device: torch.device | None = None) -> tuple[str, str, str]:
    """Those of the three roles; with a device those of a layer with groups."""
    if recipe is None:
        return ("none", "none", "none")
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    return keys if device is None else (resolve(keys[0], device), keys[1], resolve(keys[2], device))


def results(output: Any, leaves: list[Any]) -> list[Tensor]:
    """A result as a plain tensor, and the gradients of a loss of it."""
    plain = output.packed() if isinstance(output, tp.GroupedTensor) else output
    used = plain[: sum(SIZES)]
    return [plain, *torch.autograd.grad(used.float().square().sum(), leaves)]


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert type(one) is Tensor
        assert_same_bits(one, other, f"result {index}")


def leaf(*size: int, seed: int, device: torch.device) -> Tensor:
    return draw(*size, seed=seed, device=device, dtype=torch.bfloat16).requires_grad_()


@by_recipe
def test_linear(recipe: Recipe | None, device: torch.device) -> None:
    leaves = [leaf(ROWS, K, seed=0, device=device), leaf(N, K, seed=1, device=device)]
    bias = leaf(N, seed=2, device=device)
    expected = results(ops.linear(*leaves, bias, *formats(recipe)), [*leaves, bias])
    assert_all_same(results(tp.linear(*leaves, bias, recipe=recipe), [*leaves, bias]), expected)


@by_recipe
def test_grouped_linear(recipe: Recipe | None, device: torch.device) -> None:
    x, weight = leaf(ROWS, K, seed=0, device=device), leaf(G, N, K, seed=1, device=device)
    bias, sizes = leaf(G, N, seed=2, device=device), sizes_on(device)
    factors = draw(ROWS, seed=3, device=device)
    by_hand = formats(recipe, device)
    output = ops.grouped_linear(x, weight, sizes, bias, factors, *by_hand)
    expected = results(output, [x, weight, bias])
    got = tp.grouped_linear(x, weight, sizes, bias, bias_scale=factors, recipe=recipe)
    assert type(got) is Tensor
    assert_all_same(results(got, [x, weight, bias]), expected)
    values = [
        tp.GroupedTensor(t.detach(), s, requires_grad=True)
        for t, s in ((x, sizes), (weight, None), (bias, None))
    ]
    got = tp.grouped_linear(values[0], values[1], None, values[2], bias_scale=factors, recipe=recipe)
    assert got.group_sizes is sizes
    assert_all_same(results(got, values), expected)


@by_recipe
@pytest.mark.parametrize("activation", ("swiglu", "swiglu:interleave=32"))
def test_grouped_mlp(recipe: Recipe | None, activation: str, device: torch.device) -> None:
    x, sizes = leaf(ROWS, K, seed=0, device=device), sizes_on(device)
    weights = [leaf(G, 2 * F, K, seed=1, device=device), leaf(G, K, F, seed=2, device=device)]
    biases = [leaf(G, 2 * F, seed=3, device=device), leaf(G, K, seed=4, device=device)]
    probs = draw(ROWS, seed=5, device=device).abs().requires_grad_()
    leaves = [x, *weights, *biases, probs]
    by_hand = formats(recipe, device)
    output = ops.grouped_mlp(x, *weights, sizes, probs, *biases, *by_hand, None, None, activation)
    expected = results(output, leaves)
    options: dict[str, Any] = {"recipe": recipe, "activation": activation}
    got = tp.grouped_mlp(x, *weights, sizes, probs, fc1_bias=biases[0], fc2_bias=biases[1], **options)
    assert_all_same(results(got, leaves), expected)
    rows = tp.GroupedTensor(x.detach(), sizes, requires_grad=True)
    values = [tp.GroupedTensor(t.detach(), requires_grad=True) for t in (*weights, *biases)]
    got = tp.grouped_mlp(rows, *values[:2], probs=probs, fc1_bias=values[2], fc2_bias=values[3], **options)
    assert got.group_sizes is sizes
    assert_all_same(results(got, [rows, *values, probs]), expected)


def test_grouped_mlp_without_probabilities(device: torch.device) -> None:
    x, sizes = draw(ROWS, K, device=device), sizes_on(device)
    weights = [draw(G, 2 * F, K, seed=1, device=device), draw(G, K, F, seed=2, device=device)]
    ones = torch.ones(ROWS, device=device)
    assert_same_bits(tp.grouped_mlp(x, *weights, sizes), ops.grouped_mlp(x, *weights, sizes, ones))


@pytest.mark.parametrize("activation", ("swiglu", "swiglu:interleave=32"))
@pytest.mark.parametrize("key, columnwise", GROUPED_COLUMNWISE)
def test_grouped_gemm_activation_quantized(
    key: str, columnwise: bool, activation: str, device: torch.device
) -> None:
    a, b = draw(ROWS, K, device=device), draw(G, 2 * F, K, seed=1, device=device)
    probs, bias, sizes = (
        draw(ROWS, seed=2, device=device),
        draw(G, 2 * F, seed=3, device=device),
        sizes_on(device),
    )
    act, h = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation)
    expected = buffers(act, key, sizes, columnwise=columnwise)
    options: dict[str, Any] = {"bias": bias, "format": key, "activation": activation}
    options |= {"columnwise": columnwise, "seed": seed_of(key, device)}
    got = tp.grouped_gemm_activation(a, b, sizes, probs, **options)
    assert_value(got[0], expected, act, key)
    assert_same_bits(got[1], h)
    rows = tp.GroupedTensor(a, sizes, requires_grad=True)
    got = tp.grouped_gemm_activation(rows, tp.GroupedTensor(b), probs=probs, **options)
    assert_value(got[0], expected, act, key)
    assert_ragged(got[1], h, sizes)
    assert not got[1].requires_grad


def test_grouped_gemm_activation(device: torch.device) -> None:
    a, b, sizes = draw(ROWS, K, device=device), draw(G, 2 * F, K, seed=1, device=device), sizes_on(device)
    leaves = [a.requires_grad_(), b.requires_grad_()]
    expected = ops.grouped_gemm_activation(*leaves, sizes)
    grads = results(expected[0], leaves)
    got = tp.grouped_gemm_activation(*leaves, sizes)
    assert_same_bits(got[1], expected[1])
    assert_all_same(results(got[0], leaves), grads)
    values = [tp.GroupedTensor(a.detach(), sizes, requires_grad=True)]
    values += [tp.GroupedTensor(b.detach(), requires_grad=True)]
    got = tp.grouped_gemm_activation(*values)
    assert got[0].group_sizes is sizes and got[1].group_sizes is sizes
    assert_same_bits(got[1].packed(), expected[1])
    assert_all_same(results(got[0], values), grads)
