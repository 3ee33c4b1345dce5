"""Products of indexed rows: the bits of a product of copied rows, gradients summed in order, and out-of-range
entries that are never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import poison, row_buffers
from tests.ops.test_grouped_gemm import EXACT, RANDOM, each
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import integers, normals, row_index
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin


def with_zeros(matrix: Tensor, rows: Tensor) -> Tensor:
    """Copies the indexed rows; -1 is a row of zeros."""
    return torch.cat([matrix, matrix.new_zeros(1, matrix.shape[1])])[rows.long()]


def with_indexed_rows(
    case: Case, device: torch.device, matrix: int, seed: int = 11
) -> tuple[list[Any], Tensor, Tensor]:
    """Replaces argument `matrix` of the case by a matrix of another number of rows. Also returns an index into it and
    a copy of the indexed rows, with zeros for entries of -1.

    Rows that the index does not contain are NaN, index entries of the tail are out of range, and the tail of the copy
    is NaN.
    """
    arguments = list(case.arguments(device))
    sizes, like = arguments[2], arguments[matrix]
    capacity, end = like.shape[0], int(sizes.sum())
    generator = torch.Generator().manual_seed(seed)
    rows = row_index(sizes.cpu(), capacity, capacity // 2 + 1, torch.device("cpu"), generator)
    source = integers((capacity // 2 + 1, like.shape[1]), like.dtype, torch.device("cpu"), generator)
    rows[:end][torch.rand(end, generator=generator) < 0.15] = -1
    unused = torch.ones(source.shape[0], dtype=torch.bool)
    unused[rows[:end][rows[:end] >= 0].long()] = False
    source[unused] = float("nan")
    copied = torch.full_like(like, float("nan"))
    copied[:end] = with_zeros(source, rows[:end]).to(device)
    arguments[matrix] = source.to(device)
    return arguments, rows.to(device), copied


@each(EXACT[::2])
def test_indexed_rows_equal_a_copy(case: Case, device: torch.device) -> None:
    arguments, rows, copied = with_indexed_rows(case, device, 0)
    expected = ops.grouped_gemm(copied, *arguments[1:])
    poison(tuple(expected.shape), expected.dtype, device)
    assert_same_bits(ops.grouped_gemm(*arguments, rows=rows), expected)
    host = [t.cpu() if isinstance(t, Tensor) else t for t in arguments]
    wanted = reference.grouped_gemm(*host, rows=rows.cpu())
    assert_same_bits(wanted + 0, expected.cpu() + 0, "reference")
    for out in row_buffers((rows.shape[0], expected.shape[1]), expected.dtype, device):
        out.fill_(float("nan"))
        ops.grouped_gemm_out(*arguments[:3], out, *arguments[3:], rows=rows)
        assert_same_bits(out + 0, expected + 0)


@each(RANDOM[::5])
def test_gradient(case: Case, device: torch.device) -> None:
    """The gradient of a is gather_rows_backward of the gradient of the copy; the other gradients are those of the
    copy's product."""
    arguments, rows, copied = with_indexed_rows(case, device, 0)
    sizes, num_rows = arguments[2], arguments[0].shape[0]
    leaves = [t for i, t in enumerate(arguments) if isinstance(t, Tensor) and i != 2]
    for leaf in (*leaves, copied):
        leaf.requires_grad_()
    output = ops.grouped_gemm(*arguments, rows=rows)
    grad = normals(tuple(output.shape), output.dtype, device, torch.Generator().manual_seed(2))
    got = torch.autograd.grad(output, leaves, grad)
    expected = torch.autograd.grad(
        ops.grouped_gemm(copied, *arguments[1:]), [copied, *leaves[1:]], grad, materialize_grads=True
    )
    assert_same_bits(got[0], ops.gather_rows_backward(expected[0], rows, sizes, num_rows))
    for one, other in zip(got[1:], expected[1:], strict=True):
        assert_same_bits(one, other)


def test_gradcheck() -> None:
    sizes, rows = torch.tensor([2, 0, 3]), torch.tensor([1, 1, 3, 0, 1, 99])
    alpha = torch.tensor([0.5, 1.0, -2.0])
    for transpose_b in (True, False):
        shapes = [(5, 3), (3, 2, 3) if transpose_b else (3, 3, 2), (3, 2)]
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

        def function(a: Tensor, b: Tensor, c: Tensor, t: bool = transpose_b) -> Tensor:
            return ops.grouped_gemm(a, b, sizes, c, None, t, None, alpha, rows)

        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("capacity", "num_rows", "width"), [(300, 40, 33), (70, 500, 8), (64, 1, 136), (0, 3, 8)]
)
def test_gather_rows_backward_sums_in_order(
    capacity: int, num_rows: int, width: int, index: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """Sums in the order of the rows of grad: the same bits as the sequential sum of the reference."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.tensor([capacity // 3, 0, capacity // 2], dtype=index)
    rows = row_index(sizes, capacity, num_rows, torch.device("cpu"), generator)
    if capacity:
        rows[1], rows[2] = -1, num_rows  # a row of zeros and an invalid entry, whose gradients are dropped
    grad = normals((capacity, width), dtype, torch.device("cpu"), generator)
    grad[int(sizes.sum()) :] = float("nan")
    expected = reference.gather_rows_backward(grad, rows, sizes, num_rows)
    poison((num_rows, width), dtype, device)
    arguments = [t.to(device) for t in (grad, rows, sizes)]
    assert_same_bits(ops.gather_rows_backward(*arguments, num_rows), expected.to(device))
    opcheck(_ops.gather_rows_backward.default, (*arguments, num_rows))


@each(EXACT[::11])
def test_opcheck(case: Case, device: torch.device) -> None:
    (a, b, sizes, bias, scale, transpose_b), rows, _ = with_indexed_rows(case, device, 0)
    a[a.isnan()] = 0.0
    arguments = (a.requires_grad_(), [b.requires_grad_()], sizes, bias, scale, transpose_b, None, None, rows)
    opcheck(_ops.grouped_gemm.default, arguments)
    n = b.shape[1 if transpose_b else 2]
    out = torch.zeros(rows.shape[0], n, device=device)
    arguments = (a.detach(), [b.detach()], sizes, out, bias, scale, transpose_b, None, None, rows)
    opcheck(_ops.grouped_gemm_out.default, arguments)


def test_compiled(device: torch.device) -> None:
    """Forward and backward compile without graph breaks, and run with other numbers of rows."""
    sizes = torch.tensor([2, 0, 3], device=device)
    b = integers((3, 16, 8), torch.float32, device, torch.Generator().manual_seed(0)).requires_grad_()

    def step(a: Tensor, rows: Tensor) -> Tensor:
        return ops.grouped_gemm(a, b, sizes, rows=rows)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7):
        a = torch.randn(count, 8, device=device, requires_grad=True)
        rows = torch.tensor([3, 3, 0, 1, 3, 0][: count + 1], device=device)
        for got, expected in zip(
            *(
                (f, *torch.autograd.grad(f.square().sum(), [a, b]))
                for f in (compiled(a, rows), step(a, rows))
            ),
            strict=True,
        ):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_rows_of_zeros(num_rows: int, device: torch.device) -> None:
    """Entries of -1 alone give products of zeros, also of a matrix without rows, and no error in a later call."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.full((num_rows, 16), float("nan"), dtype=dtype, device=device)
        b, sizes = torch.ones(2, 8, 16, dtype=dtype, device=device), torch.tensor([2, 3], device=device)
        for index in (torch.int32, torch.int64):
            rows = torch.full((6,), -1, dtype=index, device=device)
            assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows), b.new_zeros(6, 8))
            grad = torch.ones(6, 8, dtype=dtype, device=device)
            wgrad = ops.grouped_gemm_wgrad(grad, a, sizes, input_rows=rows)
            assert_same_bits(wgrad, b.new_zeros(2, 8, 16))
            taken = ops.gather_rows_backward(grad, rows, sizes, num_rows)
            assert_same_bits(taken, b.new_zeros(num_rows, 8))
    if device.type == "cuda":
        torch.cuda.synchronize()
    ops.check_group_sizes()


def test_strided_matrix_gives_the_same_bits(device: torch.device) -> None:
    sizes, rows = torch.tensor([3, 2], device=device), torch.tensor([1, 4, 1, 0, 2], device=device)
    b = torch.randn(2, 8, 16, device=device)
    wide = torch.randn(10, 32, device=device)
    for a in (wide[::2, :16], wide[:5, 1:17], wide[:5, ::2], torch.randn(16, 5, device=device).T):
        expected = ops.grouped_gemm(a[rows].contiguous(), b, sizes)
        assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows), expected)


A, B, S = torch.zeros(4, 6), torch.zeros(2, 5, 6), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("op", "arguments", "options", "error", "text"),
    [
        (
            "grouped_gemm",
            (A, B, S),
            {"rows": torch.tensor([0, 4, 0])},
            ValueError,
            "'rows': expected entries from 0 to 3, the rows of 'a', or -1 for a row of zeros, got 4 at 1. "
            "Pass the row that each place takes.",
        ),
        (
            "grouped_gemm",
            (A, B, S),
            {"rows": torch.tensor([-1, 3, -2, 0], dtype=torch.int32)},
            ValueError,
            "'rows': expected entries from 0 to 3, the rows of 'a', or -1 for a row of zeros, got -2 at 2. "
            "Pass the row that each place takes.",
        ),
        (
            "grouped_gemm",
            (A, B, S),
            {"rows": torch.tensor([0, 3])},
            ValueError,
            "'group_sizes': expected sizes that sum to at most 2, the rows of the buffer, "
            "got a sum of 3 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            "grouped_gemm",
            (A, B, S),
            {"rows": torch.zeros(3)},
            TypeError,
            "'rows': expected one of the dtypes int32, int64, got float32. Convert it with .to() first.",
        ),
        (
            "grouped_gemm",
            (A, B, S, torch.zeros(2, 5), torch.zeros(4)),
            {"rows": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "'bias_scale': expected size 3 in dimension 0 (the rows of the buffer), got float32[4] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad",
            (torch.zeros(4, 5), A, S),
            {"input_rows": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "'input_rows': expected size 4 in dimension 0 (the rows of 'grad'), got int64[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad",
            (torch.zeros(4, 5), A, S),
            {"input_rows": torch.tensor([7, 0, 0, 0])},
            ValueError,
            "'input_rows': expected entries from 0 to 3, the rows of 'input', or -1 for a row of zeros, got 7 at 0. "
            "Pass the row that each place takes.",
        ),
        (
            "gather_rows_backward",
            (A, torch.zeros(4, dtype=torch.int64), S, -1),
            {},
            ValueError,
            "'num_rows': expected from 0 to 2^31 - 1, got -1. Pass the rows of the matrix that 'rows' points into.",
        ),
    ],
)
def test_errors(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments, **options)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-2, 4, 2**31 - 1])
def test_wrong_rows_stay_in_bounds_and_are_reported_later(wrong: int, index: torch.dtype) -> None:
    a, b = torch.ones(4, 16, device="cuda"), torch.ones(2, 16, 16, device="cuda")
    sizes = torch.tensor([2, 3], device="cuda")
    rows = torch.tensor([0, 3, wrong, 1, 1, 99], device="cuda", dtype=index)
    text = (
        "transformer_plugin::{}: argument 'rows': expected entries that are rows of their matrix in the calls before "
        "this one, got a call whose entry 2 is not one of its 4 rows. Out-of-range entries were treated as zeros: fix "
        "the index."
    )
    for dtype in (torch.float32, torch.bfloat16):
        got = ops.grouped_gemm(a.to(dtype), b.to(dtype), sizes, rows=rows)[:, 0]
        assert got.tolist() == [16.0, 16.0, 0.0, 16.0, 16.0, 0.0]
        torch.cuda.synchronize()
        with pytest.raises(ValueError) as caught:
            ops.check_group_sizes()
        assert str(caught.value) == text.format("check_group_sizes")
        grad = torch.ones(6, 16, device="cuda", dtype=dtype)
        weight = ops.grouped_gemm_wgrad(grad, a.to(dtype), sizes, input_rows=rows)
        assert weight[:, 0, 0].tolist() == [2.0, 2.0]
        torch.cuda.synchronize()
        with pytest.raises(ValueError) as caught:
            ops.grouped_gemm(a, b, sizes)
        assert str(caught.value) == text.format("grouped_gemm")
    ops.check_group_sizes()  # an error is reported once


@pytest.mark.gpu
def test_graph_replays_with_a_new_index() -> None:
    generator, device = torch.Generator().manual_seed(0), torch.device("cuda")
    a, b = (normals(s, torch.bfloat16, device, generator) for s in ((40, 64), (3, 32, 64)))
    a.requires_grad_()
    sizes, rows = torch.tensor([9, 0, 20], device=device), torch.arange(33, device=device) % 40
    grad = normals((33, 32), torch.bfloat16, device, generator)

    def step() -> tuple[Tensor, Tensor]:
        output = ops.grouped_gemm(a, b, sizes, rows=rows)
        return output, torch.autograd.grad(output, a, grad)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        rows.copy_(torch.randint(0, 40, (33,), generator=generator.manual_seed(seed)))
        sizes.copy_(torch.tensor([[9, 0, 20], [0, 33, 0], [1, 2, 3]][seed]))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)
