"""Weight gradients of indexed rows, of the gradient, the input or both: the bits of a product of copied rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.test_grouped_gemm import WGRAD_EXACT, each
from tests.ops.test_grouped_gemm_rows import with_indexed_rows
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import apart, integers, normals
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin
OPERANDS = ("grad", "input")
by_indexed = pytest.mark.parametrize("indexed", [("input",), ("grad",), OPERANDS], ids="+".join)
by_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


def indexed_case(
    case: Case, device: torch.device, indexed: tuple[str, ...], index: torch.dtype = torch.int32
) -> tuple[list[Any], dict[str, Tensor], list[Any]]:
    """Returns the arguments with matrices that are indexed, the indices, and the arguments with copied rows."""
    arguments = list(case.arguments(device))
    copies, rows = list(arguments), {}
    for seed, name in enumerate(indexed):
        place = OPERANDS.index(name)
        replaced, rows[f"{name}_rows"], copies[place] = with_indexed_rows(case, device, place, 11 + seed)
        arguments[place] = replaced[place]
    return arguments, {name: entries.to(index) for name, entries in rows.items()}, copies


@by_index
@by_indexed
@each(WGRAD_EXACT[::2])
def test_indexed_rows_equal_a_copy(
    case: Case, indexed: tuple[str, ...], index: torch.dtype, device: torch.device
) -> None:
    arguments, rows, copies = indexed_case(case, device, indexed, index)
    for dtype in (None, torch.float32):
        expected = ops.grouped_gemm_wgrad(*copies, dtype)
        assert_same_bits(ops.grouped_gemm_wgrad(*arguments, dtype, **rows), expected)
    host = [t.cpu() for t in arguments]
    wanted = reference.grouped_gemm_wgrad(
        *host, torch.float32, **{name: entries.cpu() for name, entries in rows.items()}
    )
    assert_same_bits(wanted + 0, expected.cpu() + 0, "reference")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@by_indexed
@each(WGRAD_EXACT[::3])
def test_into_buffers(
    case: Case, indexed: tuple[str, ...], out_dtype: torch.dtype, device: torch.device
) -> None:
    """A stack and a list, added to, overwritten and with alpha and beta."""
    arguments, rows, copies = indexed_case(case, device, indexed)
    groups, shape = arguments[2].numel(), (arguments[0].shape[1], arguments[1].shape[1])
    generator = torch.Generator().manual_seed(4)
    alpha, beta = (torch.rand(groups, generator=generator).to(device) for _ in range(2))
    before = integers((groups, *shape), out_dtype, device, generator)
    for options in (
        {"accumulate": True, "alpha": alpha},
        {"accumulate": False},
        {"accumulate": False, "alpha": alpha, "beta": beta},
    ):
        got, expected = before.clone(), before.clone()
        ops.grouped_gemm_wgrad_out(*copies, expected, **options)
        ops.grouped_gemm_wgrad_out(*arguments, got, **options, **rows)
        assert_same_bits(got, expected)
        if 1 <= groups <= 1024:
            matrices = apart(before)
            ops.grouped_gemm_wgrad_out(*arguments, matrices, **options, **rows)
            assert_same_bits(torch.stack(matrices), expected, "a list")


@by_index
@by_indexed
@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 129])
def test_group_sizes_around_a_stage(
    size: int, indexed: tuple[str, ...], index: torch.dtype, device: torch.device
) -> None:
    """Empty groups first, in the middle and last, and rows that repeat, of one row alone or of none."""
    generator = torch.Generator().manual_seed(size)
    sizes = torch.tensor([0, size, 0, 1, size, 0])
    capacity, matrix_rows = int(sizes.sum()) + 3, 5
    for n, k, dtype in ((8, 24, torch.bfloat16), (136, 264, torch.float16), (5, 3, torch.float32)):
        named, rows, taken = {}, {}, {}
        for name, width in zip(OPERANDS, (n, k), strict=True):
            if name not in indexed:
                named[name] = taken[name] = integers((capacity, width), dtype, device, generator)
                continue
            named[name] = integers((matrix_rows, width), dtype, device, generator)
            entries = torch.randint(-1, matrix_rows, (capacity,), generator=generator, dtype=index)
            entries[size : size + 1] = -1  # all of the second group that is not empty
            rows[f"{name}_rows"] = entries.to(device)
            with_zeros = torch.cat([named[name], named[name].new_zeros(1, width)])
            taken[name] = with_zeros[entries.long().to(device)]
        expected = ops.grouped_gemm_wgrad(**taken, group_sizes=sizes.to(device))
        assert_same_bits(ops.grouped_gemm_wgrad(**named, group_sizes=sizes.to(device), **rows), expected)


@by_index
def test_matrices_with_any_strides(index: torch.dtype, device: torch.device) -> None:
    """Slices, steps, overlapping rows and columns in any order give the bits of a contiguous copy."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([3, 0, 2], device=device)
    rows = torch.tensor([1, 4, 1, 0, -1], dtype=index, device=device)
    other, wide = (normals(s, torch.bfloat16, device, generator) for s in ((5, 8), (16, 32)))
    flat = wide.flatten()
    for matrix in (
        *(wide[::2, :16], wide[:5, 8:24], wide[:5, 1:17], wide[:5, ::2], wide[:, :5].T[:, :16]),
        *(flat.as_strided((5, 16), (8, 1)), wide[:1, :16].expand(5, 16)),
    ):
        copied = torch.cat([matrix, matrix.new_zeros(1, 16)])[rows.long()]
        expected = ops.grouped_gemm_wgrad(other, copied, sizes)
        assert_same_bits(ops.grouped_gemm_wgrad(other, matrix, sizes, input_rows=rows), expected)
        expected = ops.grouped_gemm_wgrad(copied, other, sizes)
        assert_same_bits(ops.grouped_gemm_wgrad(matrix, other, sizes, grad_rows=rows), expected)


@by_indexed
def test_matrices_of_another_number_of_rows(indexed: tuple[str, ...], device: torch.device) -> None:
    """A matrix without rows, which -1 alone can index, and no entries at all."""
    for count in (0, 6):
        sizes = torch.tensor([count // 2, 0, count // 3], device=device)
        rows = torch.full((count,), -1, device=device)
        matrices = [torch.zeros(0 if name in indexed else count, 8, device=device) for name in OPERANDS]
        got = ops.grouped_gemm_wgrad(*matrices, sizes, **{f"{name}_rows": rows for name in indexed})
        assert_same_bits(got, torch.zeros(3, 8, 8, device=device))


@by_indexed
@each(WGRAD_EXACT[::11])
def test_opcheck(case: Case, indexed: tuple[str, ...], device: torch.device) -> None:
    arguments, rows, _ = indexed_case(case, device, indexed)
    for matrix in arguments[:2]:
        matrix[matrix.isnan()] = 0.0
    indices = [rows.get("input_rows"), rows.get("grad_rows")]
    opcheck(_ops.grouped_gemm_wgrad.default, (*arguments, None, None, *indices))
    shape = (arguments[2].numel(), arguments[0].shape[1], arguments[1].shape[1])
    out = torch.zeros(shape, device=device)
    opcheck(_ops.grouped_gemm_wgrad_out.default, (*arguments, [out], True, None, None, *indices))


def test_compiled(device: torch.device) -> None:
    """Compiles without graph breaks, and runs with other numbers of rows and entries."""
    sizes = torch.tensor([2, 0, 3], device=device)

    def product(grad: Tensor, input: Tensor, input_rows: Tensor, grad_rows: Tensor) -> Tensor:
        return ops.grouped_gemm_wgrad(grad, input, sizes, input_rows=input_rows, grad_rows=grad_rows)

    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7):
        grad, input = torch.randn(count, 8, device=device), torch.randn(count + 1, 5, device=device)
        input_rows, grad_rows = (
            torch.tensor(rows[: count + 1], device=device)
            for rows in ([3, 3, 0, 1, -1, 0, 0, 0], [0, 1, 2, 3, 3, 0, 0, 0])
        )
        arguments = (grad, input, input_rows, grad_rows)
        assert_same_bits(compiled(*arguments), product(*arguments))


A, S = torch.zeros(4, 6), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("op", "rows", "error", "text"),
    [
        (
            "grouped_gemm_wgrad",
            {"grad_rows": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "'input': expected size 3 in dimension 0 (the entries of 'grad_rows'), got float32[4, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad",
            {"grad_rows": torch.zeros(3, dtype=torch.int64), "input_rows": torch.zeros(4, dtype=torch.int64)},
            ValueError,
            "'input_rows': expected size 3 in dimension 0 (the entries of 'grad_rows'), got int64[4] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad_out",
            {"grad_rows": torch.tensor([0, -2, 0, 0])},
            ValueError,
            "'grad_rows': expected entries from 0 to 3, the rows of 'grad', or -1 for a row of zeros, got -2 at 1. "
            "Pass the row that each place takes.",
        ),
        (
            "grouped_gemm_wgrad_out",
            {"input_rows": torch.tensor([0, 0, 4, 0], dtype=torch.int32)},
            ValueError,
            "'input_rows': expected entries from 0 to 3, the rows of 'input', or -1 for a row of zeros, got 4 at 2. "
            "Pass the row that each place takes.",
        ),
        (
            "grouped_gemm_wgrad_out",
            {"grad_rows": torch.zeros(4)},
            TypeError,
            "'grad_rows': expected one of the dtypes int32, int64, got float32. Convert it with .to() first.",
        ),
        (
            "grouped_gemm_wgrad_out",
            {"grad_rows": torch.zeros(8, dtype=torch.int64)[::2]},
            ValueError,
            "'grad_rows': expected a contiguous tensor, got int64[4] on cpu with strides [2]. "
            "Call .contiguous() on it first.",
        ),
    ],
)
def test_errors(op: str, rows: dict[str, Tensor], error: type[Exception], text: str) -> None:
    """A refused call leaves the buffer unchanged."""
    out = torch.ones(2, 6, 6)
    buffer = {"out": out} if op.endswith("out") else {}
    with pytest.raises(error) as caught:
        getattr(ops, op)(A, A, S, **buffer, **rows)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
    assert bool((out == 1).all())
