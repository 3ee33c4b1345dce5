"""Gradients that pass through ragged values: those of the same ops on plain tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.test_layers import OF_RECIPES, formats
from tests.functional.test_routing import TOPK, E, H, T, choices
from tests.functional.values import ROWS, SIZES, draw, sizes_on
from transformer_plugin import ops
from transformer_plugin.recipes import Recipe
from transformer_plugin.testing.numerics import assert_same_bits

WIDTH = 64
G = len(SIZES)

#: What is called by the function on a value and by the op on a plain tensor, each with what has a gradient.
STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "packed": (lambda x, s: x.packed(), lambda x, s: x, ()),
    "activation": (lambda x, s: tp.activation(x), lambda x, s: ops.activation(x), ()),
    "activation of probs": (
        lambda x, s, p: tp.activation(x, p),
        lambda x, s, p: ops.activation(x, p),
        ((ROWS,),),
    ),
    "rms_norm": (
        lambda x, s, w: tp.rms_norm(x, w, 1e-5),
        lambda x, s, w: ops.rms_norm(x, w, 1e-5),
        ((WIDTH,),),
    ),
    "layer_norm": (
        lambda x, s, w, b: tp.layer_norm(x, w, b, 1e-5),
        lambda x, s, w, b: ops.layer_norm(x, w, b, 1e-5),
        ((WIDTH,), (WIDTH,)),
    ),
    "grouped_gemm": (
        lambda x, s, w: tp.grouped_gemm(x, w),
        lambda x, s, w: ops.grouped_gemm(x, w, s),
        ((G, 32, WIDTH),),
    ),
    "grouped_gemm with a list": (
        lambda x, s, *w: tp.grouped_gemm(x, w),
        lambda x, s, *w: ops.grouped_gemm(x, w, s),
        ((32, WIDTH),) * G,
    ),
}


def loss(output: Any) -> Tensor:
    """Of the rows of the groups, different for each element."""
    plain = output.packed() if isinstance(output, tp.GroupedTensor) else output
    weights = draw(*plain.shape, seed=9, device=plain.device)
    return (plain * weights)[: sum(SIZES)].sum()


@pytest.mark.parametrize("name", STEPS)
def test_gradient_of_one_step(name: str, device: torch.device) -> None:
    function, op, shapes = STEPS[name]
    more = [draw(*shape, seed=i + 1, device=device).requires_grad_() for i, shape in enumerate(shapes)]
    x, sizes = draw(ROWS, WIDTH, device=device).requires_grad_(), sizes_on(device)
    expected = torch.autograd.grad(loss(op(x, sizes, *more)), [x, *more])
    value = tp.GroupedTensor(x.detach(), sizes, requires_grad=True)
    output = function(value, sizes, *more)
    assert output.requires_grad
    got = torch.autograd.grad(loss(output), [value, *more])
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
    if name != "packed":
        with torch.no_grad():
            assert not function(value, sizes, *more).requires_grad


@pytest.mark.parametrize("name", STEPS)
def test_backward_fills_the_gradients_of_leaves(name: str, device: torch.device) -> None:
    function, op, shapes = STEPS[name]
    more = [draw(*shape, seed=i + 1, device=device) for i, shape in enumerate(shapes)]
    x, sizes = draw(ROWS, WIDTH, device=device).requires_grad_(), sizes_on(device)
    loss(op(x, sizes, *more)).backward()
    value = tp.GroupedTensor(x.detach(), sizes, requires_grad=True)
    for factor in (1, 2):
        loss(function(value, sizes, *more)).backward()
        assert type(value.grad) is Tensor
        assert_same_bits(value.grad, factor * x.grad)


@pytest.mark.parametrize("recipe", OF_RECIPES.values(), ids=OF_RECIPES)
def test_gradient_of_a_whole_layer(recipe: Recipe | None, device: torch.device) -> None:
    """Tokens to experts, a norm, an MLP, and back: six values in a chain."""
    indices, weights = choices(device), draw(T, TOPK, seed=1, device=device).requires_grad_()
    tokens, gamma = (
        draw(T, H, device=device).requires_grad_(),
        draw(H, seed=2, device=device).requires_grad_(),
    )
    fc1 = draw(E, 2 * H, H, seed=3, device=device).requires_grad_()
    fc2 = draw(E, H, H, seed=4, device=device).requires_grad_()
    leaves = [tokens, weights, gamma, fc1, fc2]
    capacity, keys = 128, formats(recipe, device)

    rows, sizes, slot, source, _ = ops.permute(tokens, indices, E, capacity, 16)
    normed = ops.rms_norm(rows, gamma, 1e-5)
    h = ops.grouped_linear(normed, fc1, sizes, None, None, *keys)
    out = ops.grouped_linear(ops.activation(h), fc2, sizes, None, None, *keys)
    by_hand = ops.unpermute(out, slot, source, weights)
    expected = torch.autograd.grad(by_hand.square().sum(), leaves)

    value, where = tp.permute(tokens, indices, E, capacity, alignment=16)
    h = tp.grouped_linear(tp.rms_norm(value, gamma, 1e-5), fc1, recipe=recipe)
    output = tp.unpermute(tp.grouped_linear(tp.activation(h), fc2, recipe=recipe), where, weights)
    assert_same_bits(output, by_hand)
    for one, other in zip(torch.autograd.grad(output.square().sum(), leaves), expected, strict=True):
        assert_same_bits(one, other)


def test_value_of_a_tensor_with_a_gradient_passes_it_on(device: torch.device) -> None:
    x, sizes = draw(ROWS, WIDTH, device=device).requires_grad_(), sizes_on(device)
    weight = draw(G, 32, WIDTH, seed=1, device=device).requires_grad_()
    expected = torch.autograd.grad(loss(ops.grouped_linear(x.sin(), weight, sizes)), (x, weight))
    got = tp.grouped_linear(tp.GroupedTensor(x.sin(), sizes), weight)
    for one, other in zip(torch.autograd.grad(loss(got), (x, weight)), expected, strict=True):
        assert_same_bits(one, other)


def test_detached_result_has_no_gradient(device: torch.device) -> None:
    x = draw(ROWS, WIDTH, device=device).requires_grad_()
    result = tp.activation(tp.GroupedTensor(x, sizes_on(device)))
    assert result.requires_grad and not result.rowwise_data.requires_grad
    assert not tp.activation(result.detach()).requires_grad
    assert not tp.rms_norm(result, None, 1e-5, format="fp8_tensor").requires_grad


def test_two_uses_of_a_value_add_their_gradients(device: torch.device) -> None:
    x, sizes = draw(ROWS, WIDTH, device=device).requires_grad_(), sizes_on(device)
    expected = torch.autograd.grad(loss(ops.activation(x)) + loss(ops.rms_norm(x, None, 1e-5)), x)[0]
    value = tp.GroupedTensor(x.detach(), sizes, requires_grad=True)
    got = torch.autograd.grad(loss(tp.activation(value)) + loss(tp.rms_norm(value, None, 1e-5)), value)[0]
    assert_same_bits(got, expected)
    twice = tp.activation(value)  # a value in the middle of the graph
    expected = torch.autograd.grad(loss(ops.activation(x)) + 2 * loss(ops.activation(x)), x)[0]
    got = torch.autograd.grad(loss(twice) + 2 * loss(twice), value)[0]
    torch.testing.assert_close(got, expected)
