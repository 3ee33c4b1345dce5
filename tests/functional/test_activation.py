"""activation, activation_backward and bias_backward: the bytes of the ops, in one pass and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.values import (
    DIRECTIONS,
    FORMATS,
    GROUPED_FORMATS,
    ROWS,
    SIZES,
    assert_ragged,
    assert_value,
    buffers,
    draw,
    has_columns,
    id_of,
    seed_of,
    sizes_on,
)
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

F = 128
#: A format with or without groups.
CASES = [(key, False) for key in FORMATS] + [(key, True) for key in GROUPED_FORMATS]
by_case = pytest.mark.parametrize(
    "key, grouped, directions",
    [(key, grouped, d) for key, grouped in CASES for d in DIRECTIONS if not d or has_columns(key, grouped)],
    ids=id_of,
)


def arguments(device: torch.device, grouped: bool, width: int = 2 * F) -> tuple[Tensor, Tensor, Any]:
    """Input, probabilities and group sizes."""
    x = draw(ROWS, width, device=device, dtype=torch.bfloat16)
    return x, draw(ROWS, seed=1, device=device).abs(), sizes_on(device) if grouped else None


def test_activation_of_plain_and_ragged(device: torch.device) -> None:
    x, probs, sizes = arguments(device, grouped=True)
    for given in (None, probs):
        expected = ops.activation(x, given)
        assert_same_bits(tp.activation(x, given), expected)
        assert_ragged(tp.activation(tp.GroupedTensor(x, sizes), given), expected, sizes)


@by_case
def test_activation_quantized(key: str, grouped: bool, directions: Any, device: torch.device) -> None:
    x, probs, sizes = arguments(device, grouped)
    seed = seed_of(key, device)
    for given in (probs, None):
        act = ops.activation(x, given)
        expected = buffers(act, key, sizes, **directions)
        value = tp.activation(x, given, format=key, group_sizes=sizes, seed=seed, **directions)
        assert_value(value, expected, act, key)
        if grouped:
            value = tp.activation(tp.GroupedTensor(x, sizes), given, format=key, seed=seed, **directions)
            assert_value(value, expected, act, key)


@pytest.mark.parametrize("width", (2 * F, 2 * F + 64), ids=("one-pass", "two-pass"))
@pytest.mark.parametrize("key, grouped", [case for case in CASES if has_columns(*case)])
def test_activation_backward(key: str, grouped: bool, width: int, device: torch.device) -> None:
    x, probs, sizes = arguments(device, grouped, width)
    grad = draw(ROWS, width // 2, seed=2, device=device, dtype=torch.bfloat16)
    grad_x, grad_probs = ops.activation_backward(grad, x, probs)
    options = {"format": key, "seed": seed_of(key, device)}
    calls: list[Any] = [(grad, x, sizes)]
    rows = sum(SIZES) if grouped else ROWS
    if sizes is not None:
        input, own = tp.GroupedTensor(x, sizes), tp.GroupedTensor(grad, sizes)
        calls += [(grad, input, None), (own, input, None), (own, x, None)]
    for given, input, group_sizes in calls:
        value, of_probs = tp.activation_backward(given, input, probs, group_sizes=group_sizes, **options)
        assert_value(value, buffers(grad_x, key, sizes, columnwise=True), grad_x, key)
        assert_same_bits(of_probs[:rows], grad_probs[:rows])


def test_activation_backward_without_a_format(device: torch.device) -> None:
    x, probs, sizes = arguments(device, grouped=True)
    grad = draw(ROWS, F, seed=2, device=device, dtype=torch.bfloat16)
    expected = ops.activation_backward(grad, x, probs)
    for given, input in ((grad, x), (grad, tp.GroupedTensor(x, sizes)), (tp.GroupedTensor(grad, sizes), x)):
        got = tp.activation_backward(given, input, probs.clone().requires_grad_())
        assert_same_bits(got[1], expected[1])
        assert not got[0].requires_grad and not got[1].requires_grad
        if type(given) is Tensor and type(input) is Tensor:
            assert_same_bits(got[0], expected[0])
        else:
            assert_ragged(got[0], expected[0], sizes)
    assert tp.activation_backward(grad, x)[1].shape == (0,)


@by_case
def test_bias_backward_quantized(key: str, grouped: bool, directions: Any, device: torch.device) -> None:
    x, _, sizes = arguments(device, grouped)
    directions = {"columnwise": False, **directions}
    expected = buffers(x, key, sizes, **directions)
    sums = ops.bias_backward(x) if sizes is None else ops.grouped_bias_backward(x, sizes)[0]
    for given in [(x, sizes)] + ([(tp.GroupedTensor(x, sizes), None)] if grouped else []):
        options: dict[str, Any] = {"group_sizes": given[1], "seed": seed_of(key, device), **directions}
        value, got = tp.bias_backward(given[0], format=key, **options)
        assert_value(value, expected, x, key)
        assert_same_bits(got, sums)


def test_bias_backward_without_a_format(device: torch.device) -> None:
    x, _, sizes = arguments(device, grouped=True)
    assert_same_bits(tp.bias_backward(x), ops.bias_backward(x))
    expected = ops.grouped_bias_backward(x, sizes)[0]
    assert_same_bits(tp.bias_backward(x, group_sizes=sizes), expected)
    assert_same_bits(tp.bias_backward(tp.GroupedTensor(x, sizes)), expected)


def test_bias_backward_quantizes_both_directions_by_default(device: torch.device) -> None:
    x, _, _ = arguments(device, grouped=False)
    value, _ = tp.bias_backward(x, format="fp8_block")
    assert_value(value, buffers(x, "fp8_block", columnwise=True), x, "fp8_block")


def test_quantized_results_have_no_gradient(device: torch.device) -> None:
    x, probs, sizes = arguments(device, grouped=True)
    rows = tp.GroupedTensor(x, sizes, requires_grad=True)
    for key in ("fp8_block", "fp8_tensor"):
        assert not tp.activation(rows, probs.clone().requires_grad_(), format=key).requires_grad
        value, sums = tp.bias_backward(rows, format=key)
        assert not value.requires_grad and not sums.requires_grad
