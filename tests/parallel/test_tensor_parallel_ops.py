"""all_gather and reduce_scatter: bit for bit those of the reference, which simulates all ranks; gradients, errors,
fullgraph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops
from transformer_plugin.reference import tensor_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin
TIMEOUT_MS = 60_000
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)
#: Rows of a rank, and the sizes of a row: vectors, no rows, no columns, odd sizes, three dimensions, many elements.
SHAPES = [(5,), (0, 3), (3, 0), (1, 1), (3, 7), (4, 2, 5), (33, 300)]


def group_of(rank: Rank) -> tuple[int, str, int]:
    return rank.size, rank.group_name, TIMEOUT_MS


def drawn(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Returns another tensor for each rank, the same ones on every rank. They contain -0.0, and sums that round."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) * 3.0 for _ in range(ranks)]
    for each in tensors:
        each.view(-1)[::5] = -0.0
    return [each.to(dtype) for each in tensors]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.to(torch.float32)


def strided(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor, and copies of it that are not contiguous."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    forms = [tensor, wide[..., ::2]]
    return forms if tensor.dim() < 2 else [*forms, tensor.transpose(0, 1).contiguous().transpose(0, 1)]


def check_values(rank: Rank) -> None:
    group = group_of(rank)
    for shape in SHAPES:
        for dtype in (*FLOATS, *OTHERS):
            parts = drawn(rank.size, shape, dtype)
            expected = all_ranks.all_gather(parts)[rank.rank]
            for part in strided(parts[rank.rank].to(rank.device)):
                got = ops.all_gather(part, *group)
                assert got.is_contiguous() and got.shape == expected.shape
                assert torch.equal(as_bytes(got.cpu()), as_bytes(expected)), (shape, dtype)
                assert got.numel() == 0 or got.data_ptr() != part.data_ptr()
        for dtype in FLOATS:
            parts = drawn(rank.size, (rank.size * shape[0], *shape[1:]), dtype, seed=1)
            expected = all_ranks.reduce_scatter(parts)[rank.rank]
            for part in strided(parts[rank.rank].to(rank.device)):
                before = part.clone()
                got = ops.reduce_scatter(part, *group)
                assert got.is_contiguous()
                assert_same_bits(got, expected, f"{shape} {dtype}")
                assert_same_bits(part, before, "the input is not changed")


def test_values(pool: RankPool) -> None:
    pool.run(check_values)


def check_gradients(rank: Rank) -> None:
    """Every rank has its own loss; the gradient is that of their sum, with respect to this rank's tensor."""
    group = group_of(rank)
    for dtype in FLOATS:
        shape = (3, 5)
        parts = drawn(rank.size, shape, dtype)
        factors = drawn(rank.size, (rank.size * 3, 5), dtype, seed=2)
        part = parts[rank.rank].to(rank.device).requires_grad_()
        (ops.all_gather(part, *group) * factors[rank.rank].to(rank.device)).sum().backward()
        assert_same_bits(part.grad, all_ranks.reduce_scatter(factors)[rank.rank], f"all_gather {dtype}")
        wide = drawn(rank.size, (rank.size * 3, 5), dtype, seed=3)[rank.rank].to(rank.device).requires_grad_()
        (ops.reduce_scatter(wide, *group) * parts[rank.rank].to(rank.device)).sum().backward()
        assert_same_bits(wide.grad, torch.cat(parts), f"reduce_scatter {dtype}")


def test_gradients(pool: RankPool) -> None:
    pool.run(check_gradients)


def check_second_derivatives(rank: Rank) -> None:
    """The sum over ranks of the loss is a cubic function of what is gathered, so its second derivative is linear."""
    group = group_of(rank)
    parts = drawn(rank.size, (2, 3), torch.float32)
    part = parts[rank.rank].to(rank.device).requires_grad_()
    full = ops.all_gather(part, *group)
    (first,) = torch.autograd.grad((full**3).sum(), part, create_graph=True)
    torch.testing.assert_close(first, 3.0 * rank.size * part**2)
    (second,) = torch.autograd.grad(first.sum(), part)
    torch.testing.assert_close(second, 6.0 * rank.size * part.detach())


def test_second_derivatives(pair: RankPool) -> None:
    pair.run(check_second_derivatives)


def check_absent_gradient(rank: Rank) -> None:
    """A rank whose loss does not use the result takes part with zeros."""
    part = torch.ones(2, 3, device=rank.device, requires_grad=True)
    full = ops.all_gather(part, *group_of(rank))
    unused, used = full.unbind(0)[0], full[1:]
    (used.sum() if rank.rank == 0 else unused.sum() * 0.0).backward()
    expected = torch.ones(2, 3)
    if rank.rank == 0:
        expected[0] = 0.0
    assert_same_bits(part.grad, expected)


def test_absent_gradient(pair: RankPool) -> None:
    pair.run(check_absent_gradient)


def check_compiled(rank: Rank, backend: str) -> None:
    """One graph; the sizes change without another one."""
    size, name, timeout = group_of(rank)

    def step(x: Tensor, w: Tensor) -> Tensor:
        full = ops.all_gather(x * 2.0, size, name, timeout)
        return ops.reduce_scatter(full @ w, size, name, timeout)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 6, 10):
        x, w = (
            t[rank.rank].to(rank.device)
            for t in (drawn(size, (rows, 8), torch.float32), drawn(size, (8, 6), torch.float32))
        )
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
        opcheck(_ops.all_gather.default, (x, 1))
        opcheck(_ops.reduce_scatter.default, (x, 1))


def test_this_process_alone(device: torch.device) -> None:
    x = torch.randn(4, 3, device=device)
    gathered = ops.all_gather(x)
    assert_same_bits(gathered, x)
    gathered.zero_()
    assert x.abs().sum() > 0
    assert_same_bits(ops.reduce_scatter(x), x + 0.0)


def test_meta() -> None:
    x = torch.empty(6, 5, dtype=torch.bfloat16, device="meta")
    assert ops.all_gather(x, 4, "a group that is not here").shape == (24, 5)
    assert ops.reduce_scatter(x, 3, "a group that is not here").shape == (2, 5)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            ops.all_gather,
            (torch.tensor(1.0),),
            ValueError,
            "all_gather: argument 'input': expected at least 1 dimension",
        ),
        (
            ops.all_gather,
            (torch.ones(2), 0),
            ValueError,
            "all_gather: argument 'num_ranks': expected at least 1, got 0",
        ),
        (
            *(ops.all_gather, (torch.ones(2), 2), ValueError),
            "all_gather: argument 'num_ranks': expected 1, the size of the group, got 2. Pass the size and the name of",
        ),
        (
            *(ops.reduce_scatter, (torch.ones(3, 2), 2), ValueError),
            "reduce_scatter: argument 'input': expected rows that 2 ranks can share evenly, got float32[3, 2] on cpu. "
            "Pad the rows to a multiple of the number of ranks",
        ),
        (
            *(ops.reduce_scatter, (torch.ones(4, dtype=torch.int64), 2), TypeError),
            "reduce_scatter: argument 'input': expected one of the dtypes float32, bfloat16, float16, float64",
        ),
        (
            *(ops.all_gather, (torch.ones(2), 1, "nowhere"), ValueError),
            "all_gather: argument 'group_name': expected the name of a c10d process group of this process",
        ),
    ],
)
def test_errors(op: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        op(*arguments)


def check_disagreements(rank: Rank) -> None:
    """Every rank raises, no payload moves, and the group stays usable."""
    group = group_of(rank)
    for rows, width, dtype, text in (
        (rank.rank + 1, 3, torch.float32, "rows is 1 on rank 0, 2 on rank 1"),
        (2, rank.rank + 1, torch.float32, "width is 1 on rank 0, 2 on rank 1"),
        (2, 3, FLOATS[rank.rank], "dtype is float32 on rank 0, bfloat16 on rank 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.all_gather(torch.ones(rows, width, dtype=dtype), *group)
    with pytest.raises(ValueError, match="op is all_gather on rank 0, reduce_scatter on rank 1"):
        (ops.all_gather, ops.reduce_scatter)[rank.rank](torch.ones(2, 3), *group)
    with pytest.raises(ValueError, match="the gradient is needed on rank 0, not needed on rank 1"):
        ops.all_gather(torch.ones(2, 3, requires_grad=rank.rank == 0), *group)
    assert ops.all_gather(torch.ones(1), *group).sum() == 2


def test_disagreements(make_pool: Any) -> None:
    make_pool(2).run(check_disagreements)
