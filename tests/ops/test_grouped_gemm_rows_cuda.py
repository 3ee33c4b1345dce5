"""Products of indexed rows on a GPU, gathered by the kernel or copied first: the bits of a product of copied rows,
memory, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import poison, rows_fp64
from tests.ops.on_gpu import most_memory
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import apart, factors, integers, normals, row_index
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
MATRIX_ROWS = 97

GROUPS = {
    "many, some empty": tuple(7 * i % 61 if i % 5 else 0 for i in range(70)),
    "any": (0, 1, 127, 0, 128, 129, 255, 257, 300, 0),
    "all rows in one group": (0, 0, 700, 0),
    "one": (385,),
    "none": (0, 0, 0),
}
# Several tiles of columns, also an odd number; K of a part of a step, of one step and of many.
WIDTHS = [(8, 8), (256, 64), (264, 72), (520, 200), (776, 1016)]

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw_operands(
    groups: tuple[int, ...],
    n: int,
    k: int,
    transpose_b: bool = True,
    dtype: torch.dtype = BF16,
    index: torch.dtype = torch.int32,
    draw: Callable[..., Tensor] = integers,
    seed: int = 0,
) -> Operands:
    """Returns the matrix, the groups' weights, sizes, the row index, and a copy of the indexed rows. Rows that are
    not indexed and the tail of the copy are NaN; index entries of the tail are out of range."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(groups, dtype=index)
    end, capacity = int(sizes.sum()), int(sizes.sum()) + 37
    rows = row_index(sizes, capacity, MATRIX_ROWS, CPU, generator)
    a = draw((MATRIX_ROWS, k), dtype, CPU, generator)
    unused = torch.ones(MATRIX_ROWS, dtype=torch.bool)
    unused[rows[:end].long()] = False
    a[unused] = float("nan")
    copied = torch.full((capacity, k), float("nan"), dtype=dtype)
    copied[:end] = a[rows[:end].long()]
    b = draw((len(groups), n, k) if transpose_b else (len(groups), k, n), dtype, CPU, generator)
    return tuple(t.to(CUDA) for t in (a, b, sizes, rows, copied))  # type: ignore[return-value]


@pytest.mark.gpu
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "transpose_b", "index"),
    [(BF16, True, torch.int32), (BF16, False, torch.int64), (FP16, True, torch.int64), (FP16, False, torch.int32)],
)  # fmt: skip
def test_exact_sums(
    groups: tuple[int, ...], n: int, k: int, dtype: torch.dtype, transpose_b: bool, index: torch.dtype
) -> None:
    """With a stack and a list, on the whole GPU and on two multiprocessors that process all tiles."""
    a, b, sizes, rows, copied = draw_operands(groups, n, k, transpose_b, dtype, index)
    expected = rows_fp64(copied, b, sizes, None, None, transpose_b).to(dtype)
    for max_sms in (0, 2):
        poison(tuple(expected.shape), dtype, CUDA)
        got = ops.grouped_gemm(a, b, sizes, transpose_b=transpose_b, rows=rows, max_sms=max_sms)
        assert_same_bits(got + 0, expected, f"stack, max_sms {max_sms}")
        got = ops.grouped_gemm(a, apart(b), sizes, transpose_b=transpose_b, rows=rows, max_sms=max_sms)
        assert_same_bits(got + 0, expected, f"list, max_sms {max_sms}")


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_indexed_rows_have_the_bits_of_a_copy(dtype: torch.dtype, transpose_b: bool) -> None:
    """With bias, scale and alpha in the epilogue, repeated many times."""
    a, b, sizes, rows, copied = draw_operands(GROUPS["any"], 520, 1016, transpose_b, dtype, draw=normals)
    generator = torch.Generator().manual_seed(1)
    bias = normals((len(sizes), 520), torch.float32, CUDA, generator)
    scale = normals((rows.shape[0],), torch.float32, CUDA, generator)
    alpha = factors(len(sizes), CUDA, generator)
    more = (sizes, bias, scale, transpose_b, None, alpha)
    expected = ops.grouped_gemm(copied, b, *more)
    exact = rows_fp64(copied, b, sizes, bias, scale, transpose_b, alpha)
    above = (bias.abs(), scale.abs(), transpose_b, alpha.abs())
    magnitude = rows_fp64(copied.abs(), b.abs(), sizes, *above)
    assert_rounded_sum(expected, exact, magnitude, a.shape[1] + 3)
    for _ in range(20):
        assert_same_bits(ops.grouped_gemm(a, b, *more, rows), expected)


@pytest.mark.gpu
def test_more_tiles_than_thread_blocks() -> None:
    """With long sums, so that the pipeline stages wrap around many times."""
    groups = (3000, 0, 129, 5000, 1, 1270, 64, 2111)
    a, b, sizes, rows, copied = draw_operands(groups, 1304, 2056)
    expected = rows_fp64(copied, b, sizes, None, None, True).to(BF16)
    for _ in range(3):
        assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows) + 0, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 130, 299])
@pytest.mark.parametrize(
    ("wrong", "index"),
    [
        (-2, torch.int32),
        (MATRIX_ROWS, torch.int32),
        (2**31 - 1, torch.int32),
        (-2, torch.int64),
        (MATRIX_ROWS, torch.int64),
        (2**32, torch.int64),  # its lower 32 bits are a valid row
        (-(2**33), torch.int64),
    ],
)
def test_wrong_entry_counts_as_a_zero_row(wrong: int, index: torch.dtype, place: int) -> None:
    """Several thread blocks load the entry; it counts as a row of zeros and is reported once."""
    a, b, sizes, rows, copied = draw_operands((129, 0, 171), 776, 136, index=index)
    rows[place], copied[place] = wrong, 0.0
    expected = rows_fp64(copied, b, sizes, None, None, True).to(BF16)
    assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows) + 0, expected)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=f"whose entry {place} is not one of its {MATRIX_ROWS} rows"):
        ops.check_group_sizes()
    torch.cuda.synchronize()
    ops.check_group_sizes()


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_zeros(index: torch.dtype) -> None:
    """Entries of -1 in every tile, and all of a tile; none is reported."""
    a, b, sizes, rows, copied = draw_operands((300, 0, 171), 776, 136, index=index)
    for places in (slice(0, 471, 3), slice(128, 256)):
        rows[places], copied[places] = -1, 0.0
    expected = rows_fp64(copied, b, sizes, None, None, True).to(BF16)
    assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows) + 0, expected)
    torch.cuda.synchronize()
    ops.check_group_sizes()


@pytest.mark.gpu
def test_matrices_with_any_strides() -> None:
    """Rows at multiples of 16 bytes are gathered directly, and others are copied first; the result is the same."""
    _, b, sizes, rows, _ = draw_operands((70, 0, 200), 264, 72)
    wide = integers((2 * MATRIX_ROWS, 160), BF16, CUDA, torch.Generator().manual_seed(2))
    few = wide[:MATRIX_ROWS]
    flat = wide.flatten()
    for name, a in {
        "a slice of columns": few[:, 8:80],
        "every other row": wide[::2, 80:152],
        "rows that overlap": flat.as_strided((MATRIX_ROWS, 72), (24, 1)),
        "one row for all": wide[:1, :72].expand(MATRIX_ROWS, 72),
        "unaligned rows": few[:, 1:73],
        "an odd stride": flat.as_strided((MATRIX_ROWS, 72), (101, 1)),
        "strided columns": few[:, :144:2],
        "column-major": wide[:72, :MATRIX_ROWS].T,
    }.items():
        end = int(sizes.sum())
        taken = torch.zeros(rows.shape[0], 72, dtype=BF16, device=CUDA)
        taken[:end] = a[rows[:end].long()]
        expected = rows_fp64(taken, b, sizes, None, None, True).to(BF16)
        assert_same_bits(ops.grouped_gemm(a, b, sizes, rows=rows) + 0, expected, name)


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("n", [256, 4352])
def test_no_copies_and_no_synchronization(n: int, transpose_b: bool, listed: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs copy the rows first")
    places, k = 16384, 4096
    a = torch.randn(64, k, device=CUDA).bfloat16()
    b = torch.randn((2, n, k) if transpose_b else (2, k, n), device=CUDA).bfloat16()
    matrices = apart(b)
    rows = torch.randint(0, 64, (places,), device=CUDA)
    sizes = torch.tensor([10000, 6000], device=CUDA)

    def product() -> Tensor:
        if listed:
            return ops.grouped_gemm(a, matrices, sizes, transpose_b=transpose_b, rows=rows)
        return ops.grouped_gemm(a, b, sizes, transpose_b=transpose_b, rows=rows)

    output, copy = places * n * 2, places * k * 2
    assert most_memory(product) < output + copy // 8


@pytest.mark.gpu
def test_graph_replays_with_a_new_index_and_new_sizes() -> None:
    a, b, sizes, rows, _ = draw_operands((100, 0, 200, 33), 520, 200)
    wide = torch.full((rows.shape[0], 528), float("nan"), dtype=BF16, device=CUDA)
    out = wide[:, :520]

    def step() -> Tensor:
        ops.grouped_gemm_out(a, b, sizes, out, rows=rows)
        return ops.grouped_gemm(a, b, sizes, rows=rows)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    capacity = rows.shape[0]
    for seed, new in enumerate(
        [(0, 0, 0, 0), (0, capacity, 0, 0), (1, 2, 3, 4), (127, 1, 129, 0), (0, 0, 0, 9)]
    ):
        generator = torch.Generator().manual_seed(seed + 1)
        sizes.copy_(torch.tensor(new))
        a.copy_(integers(tuple(a.shape), BF16, CPU, generator))
        rows.copy_(row_index(torch.tensor(new), capacity, MATRIX_ROWS, CPU, generator))
        wide.fill_(float("nan"))
        graph.replay()
        end = sum(new)
        taken = torch.zeros(capacity, a.shape[1], dtype=BF16, device=CUDA)
        taken[:end] = a[rows[:end].long()]
        expected = rows_fp64(taken, b, sizes, None, None, True).to(BF16)
        assert_same_bits(captured + 0, expected, f"sizes {new}")
        assert_same_bits(out + 0, expected, f"sizes {new}, into a buffer")
        assert wide[:, 520:].isnan().all()
