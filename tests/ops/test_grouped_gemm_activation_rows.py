"""Products with SwiGLU of indexed rows: the bits of those of copied rows, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.test_grouped_gemm_activation import EXACT, RANDOM, each
from tests.ops.test_grouped_gemm_rows import with_indexed_rows
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn
_ops = torch.ops.transformer_plugin


@each(EXACT)
def test_indexed_rows_equal_a_copy(case: Case, device: torch.device) -> None:
    """Rows that the index does not name are NaN; entries past the groups are no rows."""
    arguments, rows, copied = with_indexed_rows(case, device, 0)
    expected = ops.grouped_gemm_activation(copied, *arguments[1:])
    got = ops.grouped_gemm_activation(*arguments, rows=rows)
    wanted = reference.grouped_gemm_activation(
        *[t.cpu() if isinstance(t, Tensor) else t for t in arguments], rows=rows.cpu()
    )
    for result, equal, oracle in zip(got, expected, wanted, strict=True):
        assert_same_bits(result, equal)
        assert result.shape == oracle.shape and result.dtype == oracle.dtype
    alone, none = ops.grouped_gemm_activation(*arguments, keep_input=False, rows=rows)
    assert_same_bits(alone, expected[0], "without h")
    assert none.shape[0] == 0
    assert_same_bits(ops.grouped_gemm_activation(*arguments, rows=rows.long())[0], expected[0], "int64")


@each(RANDOM[::4])
def test_an_entry_of_minus_one_is_a_row_of_zeros(case: Case, device: torch.device) -> None:
    arguments, rows, copied = with_indexed_rows(case, device, 0)
    end = int(arguments[2].sum())
    rows[:end:3] = -1
    copied[:end:3] = 0
    got = ops.grouped_gemm_activation(*arguments, rows=rows)
    for result, equal in zip(got, ops.grouped_gemm_activation(copied, *arguments[1:]), strict=True):
        assert_same_bits(result, equal)


@pytest.mark.parametrize("keep_input", [True, False], ids=["kept", "again"])
@each(RANDOM[::5])
def test_gradient(case: Case, keep_input: bool, device: torch.device) -> None:
    """The gradient of a is gather_rows_backward of that of the copy; the others are those of the copy."""
    arguments, rows, copied = with_indexed_rows(case, device, 0)
    sizes, num_rows = arguments[2], arguments[0].shape[0]
    copied[int(sizes.sum()) :] = 0

    def run(a: Tensor, **more: Any) -> list[Tensor]:
        given = [t.detach().clone() if isinstance(t, Tensor) else t for t in (a, *arguments[1:])]
        leaves = [t.requires_grad_() for i, t in enumerate(given) if isinstance(t, Tensor) and i != 2]
        act, _ = ops.grouped_gemm_activation(*given, keep_input=keep_input, **more)
        grad = normals(tuple(act.shape), act.dtype, device, torch.Generator().manual_seed(3))
        return list(torch.autograd.grad(act, leaves, grad))

    got, expected = run(arguments[0], rows=rows), run(copied)
    expected[0] = ops.gather_rows_backward(expected[0], rows, sizes, num_rows)
    for result, equal in zip(got, expected, strict=True):
        assert_same_bits(result, equal)


@each(RANDOM[::9])
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments, rows, _ = with_indexed_rows(case, device, 0)
    arguments[0] = arguments[0].nan_to_num()
    opcheck(_ops.grouped_gemm_activation.default, tuple(arguments), {"rows": rows})
    arguments[0].requires_grad_()
    opcheck(_ops.grouped_gemm_activation.default, tuple(arguments), {"rows": rows})


def test_wrong_rows(device: torch.device) -> None:
    a, b, sizes = torch.ones(4, 8, device=device), torch.ones(2, 16, 8, device=device), [2, 3]
    group_sizes = torch.tensor(sizes, device=device)
    with pytest.raises(TypeError, match=r"grouped_gemm_activation: argument 'rows': expected .*int32"):
        ops.grouped_gemm_activation(a, b, group_sizes, rows=torch.zeros(5, device=device))
    with pytest.raises(
        ValueError, match=r"grouped_gemm_activation: argument 'probs': expected .*rows of 'rows'"
    ):
        ops.grouped_gemm_activation(
            a,
            b,
            group_sizes,
            torch.ones(4, device=device),
            rows=torch.zeros(5, dtype=torch.int32, device=device),
        )
    if device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"grouped_gemm_activation: argument 'rows': expected .*got 4 at 1"
        ):
            ops.grouped_gemm_activation(a, b, group_sizes, rows=torch.tensor([0, 4, 0, 0, 0]))
