"""connect_gradient: a tensor passes its gradient on to another over the same memory."""

from __future__ import annotations

import pytest
import torch

import transformer_plugin as tp
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradient_is_passed_on(is_leaf: bool, device: torch.device) -> None:
    leaf = torch.randn(5, 8, device=device, requires_grad=True)
    source = leaf if is_leaf else leaf * 3
    value = source.detach()
    ops.connect_gradient(value, source)
    assert value.grad_fn.name() == "transformer_plugin::connect_gradient_backward_node"  # type: ignore[union-attr]
    grad = torch.randn(5, 8, device=device)
    (value * source).backward(grad)
    assert leaf.grad is not None
    factor = 2 if is_leaf else 18
    torch.testing.assert_close(leaf.grad, factor * leaf.detach() * grad)


def test_gradient_that_is_a_value(device: torch.device) -> None:
    leaf, sizes = torch.randn(5, 8, device=device, requires_grad=True), torch.tensor([2, 3], device=device)
    grad = torch.randn(5, 8, device=device)
    tp.GroupedTensor(leaf, sizes).backward(tp.GroupedTensor(grad, sizes))
    assert type(leaf.grad) is torch.Tensor
    assert_same_bits(leaf.grad, grad)


def test_nothing_without_gradients(device: torch.device) -> None:
    source = torch.randn(5, 8, device=device)
    for wanted in (source, source.clone().requires_grad_()):
        with torch.set_grad_enabled(wanted is source):
            value = source.detach()
            ops.connect_gradient(value, wanted)
            assert not value.requires_grad


def test_refusals() -> None:
    source = torch.randn(5, 8, requires_grad=True)
    cases = [
        (torch.randn(8, 5), source, ValueError, "of the sizes|the sizes"),
        (torch.randn(5, 8).double(), source, TypeError, "float32"),
        (source.detach().requires_grad_(), source, ValueError, "without a gradient"),
        (torch.randn(10, 8)[:5], source, ValueError, "no view"),
    ]
    for value, given, error, text in cases:
        before = value.grad_fn
        with pytest.raises(error, match=f"connect_gradient: argument 'value': expected .*({text})"):
            ops.connect_gradient(value, given)
        assert value.grad_fn is before
