"""Weight gradients of indexed rows on a GPU, those of the gradient gathered by the kernel: the bits of a product of
copied rows, memory, errors and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import wgrad_fp64
from tests.ops.on_gpu import captured, most_memory
from tests.ops.test_grouped_gemm_rows_cuda import BF16, CPU, CUDA, FP16, GROUPS, MATRIX_ROWS
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import apart, integers, row_index
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.gpu

# Parts of a tile of 128 x 256, odd numbers of tiles, several, and more columns than are gathered.
WIDTHS = [(8, 8), (136, 72), (264, 520), (512, 256), (776, 1016), (264, 1032)]


def draw_operands(
    groups: tuple[int, ...], m: int, n: int, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradient's matrix, the input, sizes, the index, and a copy of the indexed rows. Rows that are not
    indexed and tails are NaN; index entries of the tail are out of range."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(groups, dtype=torch.int32)
    end, capacity = int(sizes.sum()), int(sizes.sum()) + 37
    rows = row_index(sizes, capacity, MATRIX_ROWS, CPU, generator)
    matrix = integers((MATRIX_ROWS, m), dtype, CPU, generator)
    unused = torch.ones(MATRIX_ROWS, dtype=torch.bool)
    unused[rows[:end].long()] = False
    matrix[unused] = float("nan")
    copied = torch.full((capacity, m), float("nan"), dtype=dtype)
    copied[:end] = matrix[rows[:end].long()]
    input = torch.full((capacity, n), float("nan"), dtype=dtype)
    input[:end] = integers((end, n), dtype, CPU, generator)
    return tuple(t.to(CUDA) for t in (matrix, input, sizes, rows, copied))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("m", "n"), WIDTHS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_values(groups: tuple[int, ...], m: int, n: int, dtype: torch.dtype) -> None:
    matrix, input, sizes, rows, copied = draw_operands(groups, m, n, dtype)
    expected = wgrad_fp64(copied, input, sizes)
    for out in (dtype, torch.float32):
        got = ops.grouped_gemm_wgrad(matrix, input, sizes, out, grad_rows=rows)
        assert_same_bits(got + 0, expected.to(out) + 0)
        assert_same_bits(got, ops.grouped_gemm_wgrad(copied, input, sizes, out), "copied rows")


@pytest.mark.parametrize("max_sms", [2, 6])
def test_few_multiprocessors(max_sms: int) -> None:
    """A cluster has many tiles, so the stages are used many times."""
    matrix, input, sizes, rows, copied = draw_operands((0, 64, 700, 1, 0, 129, 0), 776, 1016)
    got = ops.grouped_gemm_wgrad(matrix, input, sizes, grad_rows=rows, max_sms=max_sms)
    assert_same_bits(got + 0, wgrad_fp64(copied, input, sizes).to(BF16) + 0)


@pytest.mark.parametrize("accumulate", [False, True])
def test_many_groups(accumulate: bool) -> None:
    """Most of them empty: their gradients are zero, or nothing is added."""
    sizes = tuple(3 if g % 97 == 5 else 70 if g == 500 else 0 for g in range(1000))
    matrix, input, group_sizes, rows, copied = draw_operands(sizes, 136, 72)
    out = torch.full((1000, 136, 72), 2.0, device=CUDA)
    ops.grouped_gemm_wgrad_out(matrix, input, group_sizes, out, accumulate, grad_rows=rows)
    expected = wgrad_fp64(copied, input, group_sizes) + (2.0 if accumulate else 0.0)
    assert_same_bits(out + 0, expected.float() + 0)


def test_rows_of_the_next_group_are_not_added() -> None:
    """Entries past a group and in the tail name rows of the matrix, which are NaN."""
    matrix, input, sizes, rows, _ = draw_operands((65, 0, 130), 264, 520)
    rows[:65][rows[:65] == 3] = 4
    matrix.nan_to_num_(1.0)
    matrix[3], rows[65:] = float("nan"), 3
    expected = ops.grouped_gemm_wgrad(matrix[rows[:65].long()], input[:65], sizes[:1])
    got = ops.grouped_gemm_wgrad(matrix, input, torch.stack([sizes[0], sizes[1]]), grad_rows=rows)
    assert not expected.isnan().any()
    assert_same_bits(got[:1], expected)
    assert_same_bits(got[1], torch.zeros_like(got[1]))


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=str)
def test_into_buffers(out_dtype: torch.dtype) -> None:
    """Added to a stack and to a list, and with beta."""
    matrix, input, sizes, rows, copied = draw_operands((0, 1, 127, 0, 130, 65), 264, 520)
    before = integers((6, 264, 520), out_dtype, CUDA, torch.Generator().manual_seed(4))
    beta = torch.rand(6, generator=torch.Generator().manual_seed(5)).to(CUDA)
    for options in ({"accumulate": True}, {"accumulate": False, "beta": beta}):
        got, expected, listed = before.clone(), before.clone(), apart(before)
        ops.grouped_gemm_wgrad_out(copied, input, sizes, expected, **options)
        ops.grouped_gemm_wgrad_out(matrix, input, sizes, got, **options, grad_rows=rows)
        ops.grouped_gemm_wgrad_out(matrix, input, sizes, listed, **options, grad_rows=rows)
        assert_same_bits(got, expected)
        assert_same_bits(torch.stack(listed), expected, "a list")


@pytest.mark.parametrize("place", [0, 130, 299])
@pytest.mark.parametrize("wrong", [-2, MATRIX_ROWS, 2**31 - 1])
def test_wrong_entry_counts_as_a_zero_row(wrong: int, place: int) -> None:
    matrix, input, sizes, rows, copied = draw_operands((129, 0, 171), 264, 520)
    rows[place], copied[place] = wrong, 0.0
    got = ops.grouped_gemm_wgrad(matrix, input, sizes, torch.float32, grad_rows=rows)
    assert_same_bits(got + 0, wgrad_fp64(copied, input, sizes).float() + 0)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=f"whose entry {place} is not one of its {MATRIX_ROWS} rows"):
        ops.check_group_sizes()
    torch.cuda.synchronize()
    ops.check_group_sizes()


def test_no_copies_and_no_synchronization() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs copy the rows first")
    places, m, n = 16384, 4096, 64
    matrix, input = (torch.randn(shape, device=CUDA).bfloat16() for shape in ((64, m), (places, n)))
    rows = torch.randint(0, 64, (places,), device=CUDA, dtype=torch.int32)
    sizes = torch.tensor([10000, 6000], device=CUDA)
    used = most_memory(lambda: ops.grouped_gemm_wgrad(matrix, input, sizes, grad_rows=rows))
    assert used < 2 * m * n * 2 + places * m * 2 // 8


def test_graph_replays_with_a_new_index_and_new_sizes() -> None:
    matrix, input, sizes, rows, _ = draw_operands((100, 0, 200, 33), 264, 520)
    main_grad = torch.zeros(4, 264, 520, device=CUDA)

    outputs = []

    def step() -> None:
        ops.grouped_gemm_wgrad_out(matrix, input, sizes, main_grad, grad_rows=rows)
        outputs.append(ops.grouped_gemm_wgrad(matrix, input, sizes, grad_rows=rows))

    graph = captured(step)
    capacity = rows.shape[0]
    for seed, new in enumerate([(0,) * 4, (0, capacity, 0, 0), (1, 2, 3, 4), (127, 1, 129, 0), (0, 0, 0, 9)]):
        generator = torch.Generator().manual_seed(seed + 1)
        sizes.copy_(torch.tensor(new))
        matrix.copy_(integers((MATRIX_ROWS, 264), BF16, CPU, generator))
        input.copy_(integers((capacity, 520), BF16, CPU, generator))
        rows.copy_(row_index(torch.tensor(new), capacity, MATRIX_ROWS, CPU, generator))
        main_grad.fill_(1.0)
        graph.replay()
        taken = torch.zeros(capacity, 264, dtype=BF16, device=CUDA)
        taken[: sum(new)] = matrix[rows[: sum(new)].long()]
        expected = wgrad_fp64(taken, input, sizes)
        assert_same_bits(outputs[-1] + 0, expected.to(BF16) + 0, f"sizes {new}")
        assert_same_bits(main_grad, (expected + 1).float(), f"sizes {new}, added to a buffer")
