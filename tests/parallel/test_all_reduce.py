"""all_reduce and copy_to_group: values bit for bit those of the reference, gradients, errors, fullgraph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.parallel.test_tensor_parallel_ops import FLOATS, SHAPES, drawn, group_of, strided
from transformer_plugin import ops
from transformer_plugin.reference import tensor_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin
#: More than one collective, with and without elements that do not divide by the ranks.
LARGE = [(301, 517), (512, 512)]


def check_values(rank: Rank) -> None:
    for shape in [(), *SHAPES, *LARGE]:
        for dtype in FLOATS:
            parts = drawn(rank.size, shape, dtype)
            expected = all_ranks.all_reduce(parts)[rank.rank]
            given = parts[rank.rank].to(rank.device)
            for part in strided(given) if shape else [given]:
                before = part.clone()
                got = ops.all_reduce(part, *group_of(rank))
                assert got.is_contiguous() and got.shape == shape
                assert_same_bits(got, expected if rank.size > 1 else part, f"{shape} {dtype}")
                assert_same_bits(part, before, "the input is not changed")
                assert got.numel() == 0 or got.data_ptr() != part.data_ptr()


def test_values(pool: RankPool) -> None:
    pool.run(check_values)


def check_gradients(rank: Rank) -> None:
    """A product with a sharded inner dimension: all ranks have the loss of the whole, which counts once."""
    group = group_of(rank)
    x, w = (drawn(1, (4 * rank.size, 4 * rank.size), torch.float64, seed)[0] for seed in (1, 2))
    x, w = x.to(rank.device, torch.float32), w.to(rank.device, torch.float32)
    full = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    (full[0] @ full[1]).square().sum().backward()
    part = slice(4 * rank.rank, 4 * rank.rank + 4)
    mine = [x.clone().requires_grad_(), w[part].clone().requires_grad_()]
    rows = ops.copy_to_group(mine[0], *group)
    assert_same_bits(rows.detach(), x)
    ops.all_reduce(rows[:, part] @ mine[1], *group).square().sum().backward()
    torch.testing.assert_close(mine[0].grad, full[0].grad, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(mine[1].grad, full[1].grad[part], rtol=1e-4, atol=1e-2)  # type: ignore[index]


def test_gradients(pool: RankPool) -> None:
    pool.run(check_gradients)


def check_sum_of_gradients(rank: Rank) -> None:
    """Other gradients on each rank; one rank has none."""
    factors = drawn(rank.size, (7, 3), torch.bfloat16)
    x = torch.ones(7, 3, dtype=torch.bfloat16, device=rank.device, requires_grad=True)
    used = ops.copy_to_group(x, *group_of(rank))
    both = torch.stack([used * factors[rank.rank].to(rank.device), torch.ones_like(used)])
    (both[0] if rank.rank else both[1] * 0.0 + used.detach()).sum().backward()
    factors[0].zero_()
    assert_same_bits(x.grad, all_ranks.all_reduce(factors)[0])


def test_sum_of_gradients(pair: RankPool) -> None:
    pair.run(check_sum_of_gradients)


def check_compiled(rank: Rank, backend: str) -> None:
    """One graph; the sizes change without another one."""
    size, name, timeout = group_of(rank)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return ops.all_reduce(ops.copy_to_group(x * 2.0, size, name, timeout) @ w, size, name, timeout)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 6, 10):
        x = drawn(1, (rows, 8), torch.float32, seed=rows)[0].to(rank.device)
        w = drawn(size, (8, 6), torch.float32)[rank.rank].to(rank.device)
        results = []
        for function in (step, compiled):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            output = function(*leaves)
            (output * output.detach().cos()).sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in leaves)])
        for got, expected in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(pair: RankPool, backend: str) -> None:
    pair.run(check_compiled, backend)


def test_opcheck(device: torch.device) -> None:
    for shape in SHAPES:
        x = torch.randn(shape, device=device, requires_grad=True)
        opcheck(_ops.all_reduce.default, (x, 1))
        opcheck(_ops.copy_to_group.default, (x, 1))


def test_meta() -> None:
    x = torch.empty(6, 5, dtype=torch.bfloat16, device="meta")
    assert ops.all_reduce(x, 4, "a group that is not here").shape == (6, 5)
    assert ops.copy_to_group(x, 3, "a group that is not here").shape == (6, 5)


def test_second_derivatives(device: torch.device) -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ops.all_reduce(ops.copy_to_group(x)) ** 3, x)


@pytest.mark.parametrize("op", [ops.all_reduce, ops.copy_to_group])
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (torch.ones(2), 0),
            ValueError,
            "argument 'num_ranks': expected at least 1, got 0. Pass group.size()",
        ),
        ((torch.ones(2), 2), ValueError, "argument 'num_ranks': expected 1, the size of the group, got 2"),
        (
            (torch.ones(2, dtype=torch.int64),),
            TypeError,
            "argument 'input': expected one of the dtypes float32",
        ),
        (
            (torch.ones(2), 1, "nowhere"),
            ValueError,
            "argument 'group_name': expected the name of a c10d process",
        ),
    ],
)
def test_errors(op: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        op(*arguments)


def check_disagreements(rank: Rank) -> None:
    """Every rank raises, no payload moves, and the group stays usable."""
    group = group_of(rank)
    with pytest.raises(ValueError, match="rows is 1 on rank 0, 2 on rank 1"):
        ops.all_reduce(torch.ones(rank.rank + 1, 3), *group)
    with pytest.raises(ValueError, match="dtype is float32 on rank 0, bfloat16 on rank 1"):
        ops.all_reduce(torch.ones(2, dtype=FLOATS[rank.rank]), *group)
    assert ops.all_reduce(torch.ones(1), *group).item() == 2


def test_disagreements(make_pool: Any) -> None:
    make_pool(2).run(check_disagreements)
