"""permute, unpermute and topk_router: the tensors of the ops, as ragged values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.values import draw
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

T, H, E, TOPK = 24, 32, 4, 2


def choices(device: torch.device) -> Tensor:
    """Two experts for each token; one is masked, and no token goes to expert 2."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.stack(
        [torch.tensor([0, 1, 3])[torch.randperm(3, generator=generator)[:TOPK]] for _ in range(T)]
    )
    indices[5, 1] = -1
    return indices.to(torch.int32).to(device)


@pytest.mark.parametrize("alignment", (1, 16))
@pytest.mark.parametrize("capacity", (T * TOPK + 64, 30))
def test_permute(alignment: int, capacity: int, device: torch.device) -> None:
    tokens, indices = draw(T, H, device=device), choices(device)
    rows, sizes, slot, source, total = ops.permute(tokens, indices, E, capacity, alignment)
    value, where = tp.permute(tokens, indices, E, capacity, alignment=alignment)
    assert type(value) is tp.GroupedTensor and value.is_ragged and value.num_groups == E
    assert_same_bits(value.packed(), rows)
    assert_same_bits(value.group_sizes, sizes)
    for got, expected in zip(where, (slot, source, total), strict=True):
        assert_same_bits(got, expected)
    assert where._fields == ("slot", "source", "total") and type(where) is tp.Permutation


@pytest.mark.parametrize("ragged", (False, True))
def test_unpermute(ragged: bool, device: torch.device) -> None:
    tokens, indices, weights = (
        draw(T, H, device=device),
        choices(device),
        draw(T, TOPK, seed=1, device=device),
    )
    value, where = tp.permute(tokens, indices, E, 64)
    rows = value if ragged else value.packed()
    for given in (None, weights):
        got = tp.unpermute(rows, where, given)
        assert type(got) is Tensor
        assert_same_bits(got, ops.unpermute(value.packed(), where.slot, where.source, given))


def test_router_is_the_op() -> None:
    assert tp.topk_router is ops.topk_router


def test_gradient_of_both(device: torch.device) -> None:
    indices, weights = choices(device), draw(T, TOPK, seed=1, device=device).requires_grad_()
    tokens = draw(T, H, device=device).requires_grad_()
    rows, _, slot, source, _ = ops.permute(tokens, indices, E, 64)
    expected = torch.autograd.grad(
        ops.unpermute(rows * rows, slot, source, weights).square().sum(), (tokens, weights)
    )
    value, where = tp.permute(tokens, indices, E, 64)
    assert value.requires_grad and not value.is_leaf
    packed = value.packed()
    got = torch.autograd.grad(tp.unpermute(packed * packed, where, weights).square().sum(), (tokens, weights))
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
