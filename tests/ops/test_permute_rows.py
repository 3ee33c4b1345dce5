"""permute_rows: the rows that permute copies, for maps that were made before, and their gradient."""

from __future__ import annotations

import pytest
import torch

from tests.opcheck import opcheck
from tests.ops.test_permute import real_cases
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits

tp = torch.ops.transformer_plugin


@real_cases
def test_agrees_with_permute(case: Case, device: torch.device) -> None:
    tokens, indices, *layout = case.arguments(device)
    rows, _, slot, source, _ = ops.permute(tokens, indices, *layout)
    assert_same_bits(ops.permute_rows(tokens, slot, source), rows)
    assert_same_bits(reference.permute_rows(tokens.cpu(), slot.cpu(), source.cpu()), rows.cpu())
    of_op, of_permute = (tokens.detach().clone().requires_grad_() for _ in range(2))
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3)).to(rows)
    got = torch.autograd.grad(ops.permute_rows(of_op, slot, source), of_op, grad)
    expected = torch.autograd.grad(ops.permute(of_permute, indices, *layout)[0], of_permute, grad)
    assert_same_bits(got[0], expected[0])


@pytest.mark.parametrize("hidden", [8, 24, 1024, 9000, 20000])
def test_rows_of_any_width(hidden: int, device: torch.device) -> None:
    """Rows of one and of several pieces, and maps that disagree: the source alone decides."""
    generator = torch.Generator().manual_seed(hidden)
    tokens = torch.randn(50, hidden, generator=generator).to(device, torch.bfloat16)
    indices = torch.rand(50, 16, generator=generator).argsort(1)[:, :5]
    slot, source, *_ = ops.assign_slots(indices.to(device), 0, 16, 300, 4)
    expected = reference.permute_rows(tokens.cpu(), slot.cpu(), source.cpu())
    assert_same_bits(ops.permute_rows(tokens, slot, source).cpu(), expected)
    source[:40:3], slot[::7, 2] = -1, 299
    source[1], source[7] = 49, 60
    expected = reference.permute_rows(tokens.cpu(), slot.cpu(), source.cpu())
    assert_same_bits(ops.permute_rows(tokens, slot, source).cpu(), expected)


def test_opcheck(device: torch.device) -> None:
    tokens = torch.randn(6, 8, device=device)
    slot, source, *_ = ops.assign_slots(torch.zeros(6, 2, dtype=torch.int64, device=device), 0, 3, 20, 1)
    opcheck(tp.permute_rows.default, (tokens, slot, source))
    opcheck(tp.permute_rows.default, (tokens.requires_grad_(), slot, source))


def test_wrong_arguments(device: torch.device) -> None:
    tokens = torch.randn(6, 8, device=device)
    slot, source, *_ = ops.assign_slots(torch.zeros(6, 2, dtype=torch.int64, device=device), 0, 3, 20, 1)
    with pytest.raises(ValueError, match=r"permute_rows: argument 'slot': expected .*the rows of 'tokens'"):
        ops.permute_rows(tokens[1:], slot, source)
    with pytest.raises(TypeError, match=r"permute_rows: argument 'source': expected .*int32"):
        ops.permute_rows(tokens, slot, source.long())
    with pytest.raises(TypeError, match=r"permute_rows: argument 'tokens'"):
        ops.permute_rows(tokens.to(torch.int8), slot, source)
