"""rms_norm and layer_norm: the bytes of the ops, plain, ragged and quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.functional.values import (
    FORMATS,
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
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

H = 64
by_norm = pytest.mark.parametrize("name", ("rms_norm", "layer_norm"))


def norms(name: str, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """The function, the op, and the arguments after the input."""
    weight, bias = draw(H, seed=1, device=device), draw(H, seed=2, device=device)
    more = (weight, 1e-5) if name == "rms_norm" else (weight, bias, 1e-5)
    return getattr(tp, name), getattr(ops, name), more


@by_norm
def test_plain_stack_and_ragged(name: str, device: torch.device) -> None:
    function, op, more = norms(name, device)
    x, sizes = draw(ROWS, H, device=device), sizes_on(device)
    for centered in (False, True):
        expected = op(x, *more, zero_centered=centered)
        assert_same_bits(function(x, *more, zero_centered=centered), expected)
        assert_ragged(function(tp.GroupedTensor(x, sizes), *more, zero_centered=centered), expected, sizes)
    none = (None,) * (len(more) - 1)
    assert_same_bits(function(x, *none, 1e-5), op(x, *none, 1e-5))
    stack = draw(2, 3, H, device=device)
    got = function(tp.GroupedTensor(stack), *more)
    assert type(got) is torch.Tensor
    assert_same_bits(got, op(stack, *more))


@by_norm
@pytest.mark.parametrize("columnwise", (False, True))
@pytest.mark.parametrize("key", FORMATS)
def test_quantized(name: str, columnwise: bool, key: str, device: torch.device) -> None:
    function, op, more = norms(name, device)
    x = draw(48, H, device=device)
    normed = op(x, *more, zero_centered=True)
    value = function(
        x, *more, zero_centered=True, format=key, columnwise=columnwise, seed=seed_of(key, device)
    )
    assert_value(value, buffers(normed, key, columnwise=columnwise), normed, key)


@by_norm
@pytest.mark.parametrize("key, columnwise", GROUPED_COLUMNWISE)
def test_quantized_ragged(name: str, columnwise: bool, key: str, device: torch.device) -> None:
    function, op, more = norms(name, device)
    x, sizes = draw(ROWS, H, device=device, dtype=torch.bfloat16), sizes_on(device)
    more = tuple(t.bfloat16() if isinstance(t, torch.Tensor) else t for t in more)
    normed = op(x, *more)
    seed = seed_of(key, device)
    value = function(tp.GroupedTensor(x, sizes), *more, format=key, columnwise=columnwise, seed=seed)
    assert type(value) is tp.GroupedTensor and value.group_sizes is sizes and value.dtype == torch.bfloat16
    by_hand = buffers(normed, key, sizes, columnwise=columnwise)
    assert sorted(name for name, _ in value._buffers.present()) == sorted(by_hand)
    expected = tp.quantize(normed, key, group_sizes=sizes, columnwise=columnwise, seed=seed)
    rows = sum(SIZES)  # the rows past the groups are anything
    assert_same_bits(value.dequantize()[:rows], expected.dequantize()[:rows])
    assert_same_bits(value.rowwise_data[:rows], by_hand["rowwise_data"][:rows])
    assert value.scale_inv.shape == by_hand["scale_inv"].shape
    for buffer in ("columnwise_data", "columnwise_scale_inv", "columnwise_amax", "amax"):
        if buffer in by_hand:
            assert_same_bits(getattr(value, buffer), by_hand[buffer], buffer)


@by_norm
def test_quantized_results_have_no_gradient(name: str, device: torch.device) -> None:
    function, _, more = norms(name, device)
    x = tp.GroupedTensor(draw(ROWS, H, device=device), sizes_on(device), requires_grad=True)
    weights = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in more]
    for key in ("fp8_block", "fp8_tensor"):
        assert not function(x, *weights, format=key).requires_grad
