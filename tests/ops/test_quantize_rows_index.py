"""quantize of rows that an index names: the bytes of quantizing a copy of them. Rows of the input that no entry names
and entries of the tail have no effect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.on_gpu import captured, most_memory
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.reference._rows import indexed_rows
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    BOTH,
    COLUMNS,
    GROUPED_FORMATS,
    GROUPED_MX_FORMATS,
    GROUPED_NV_FORMATS,
    GROUPS,
    NV_GROUPS,
    PER_ROW_FORMATS,
    columns_of,
    extras,
    rows_of,
    width_for,
)

_ops = torch.ops.transformer_plugin
ALIGNED = tuple(f"{f}{',' if ':' in f else ':'}aligned" for f in GROUPED_FORMATS)
FORMATS = (*ALIGNED, *GROUPED_FORMATS, *PER_ROW_FORMATS[:2], *GROUPED_MX_FORMATS, *GROUPED_NV_FORMATS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Whole tiles and partial ones, rows that are not whole vectors, and no columns.
WIDTHS = (264, 128, 8, 130, 33, 0)


def drawn(
    sizes: list[int], tail: int, columns: int, dtype: torch.dtype, num_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns a matrix and an index into it: some rows repeat, a tenth of the entries is -1. Rows that do not occur
    are huge or NaN, and entries of the tail are out of range."""
    generator = torch.Generator().manual_seed(len(sizes) + columns + tail)
    end = sum(sizes)
    count = end // 3 + 2 if num_rows is None else num_rows
    matrix = torch.randn(count, columns, generator=generator)
    matrix *= 2.0 ** torch.randint(-9, 9, (count, 1), generator=generator)
    rows = torch.randint(0, count, (end + tail,), generator=generator)
    rows[torch.rand(end + tail, generator=generator) < 0.1] = -1
    rows[end:] = 2**31 - 1
    unused = torch.ones(count, dtype=torch.bool)
    unused[rows[:end][rows[:end] >= 0]] = False
    matrix[unused] = 6e4
    matrix[unused, 1::2] = float("nan")
    return matrix.to(dtype), rows


def check(matrix: Tensor, rows: Tensor, sizes: Tensor, format: str, amax: bool = False) -> None:
    """Compares all directions with those of a copy; with ``amax``, of an amax that is passed."""
    copy = indexed_rows(matrix.cpu(), rows.cpu(), sizes.cpu()).to(matrix.device)
    copy[int(sizes.sum()) :] = float("nan")
    more = extras(copy, format, sizes)
    if amax:
        more["amax"] = ops.amax(copy, format, sizes)
    directions = [({}, rows_of(more))]
    if Format.parse(format).traits.has_group_columns:
        directions += [(BOTH, more), (COLUMNS, columns_of(more))]
    for flags, given in directions:
        got = ops.quantize(matrix, format, sizes, **given, **flags, rows=rows)
        for one, expected in zip(got, ops.quantize(copy, format, sizes, **given, **flags), strict=True):
            assert_same_bits(one, expected, f"{format} {flags}")


@pytest.mark.parametrize("groups", range(len(GROUPS)))
@pytest.mark.parametrize("format", FORMATS)
def test_same_bytes_as_a_copy(format: str, groups: int, device: torch.device) -> None:
    index = groups + FORMATS.index(format)
    sizes, tail = (NV_GROUPS if format.startswith("nvfp4") else GROUPS)[groups]
    columns, dtype = width_for(WIDTHS[index % len(WIDTHS)], format), DTYPES[index % 3]
    matrix, rows = drawn(sizes, tail, columns, dtype)
    rows = rows.int() if index % 2 else rows
    check(matrix.to(device), rows.to(device), torch.tensor(sizes, device=device).long(), format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ALIGNED)
def test_aligned_groups_of_every_size(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes of 1 modulo 128, ends next to blocks, single rows; more than one part of row tiles."""
    sizes = [0, 1, 129, 257, 0, 128, 127, 31, 33, *[1] * 40, 300, 0]
    matrix, rows = drawn(sizes, 70, 392, dtype)
    group_sizes = torch.tensor(sizes, device=device)
    check(matrix.to(device), rows.to(device), group_sizes, format)
    check(matrix.to(device), rows.int().to(device), group_sizes.int(), format)
    if format.startswith("fp8_tensor"):
        check(matrix.to(device), rows.to(device), group_sizes, format, amax=True)


@pytest.mark.parametrize("format", [f for f in FORMATS if not f.startswith("nvfp4")])
def test_reference(format: str) -> None:
    """The op on a CPU has the bytes of the reference."""
    sizes, columns = torch.tensor([5, 0, 130, 1]), width_for(72, format)
    matrix, rows = drawn(sizes.tolist(), 9, columns, torch.bfloat16)
    flags = BOTH if Format.parse(format).traits.has_group_columns else {}
    wanted = reference.quantize(matrix, format, sizes, rows=rows, **flags)
    for one, expected in zip(ops.quantize(matrix, format, sizes, rows=rows, **flags), wanted, strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("format", [*ALIGNED, "fp8_row", "mxfp8"])
def test_any_memory_layout_of_the_input(format: str, device: torch.device) -> None:
    """Unaligned addresses, rows with a stride, columns with a stride."""
    sizes = torch.tensor([5, 130, 0, 40], device=device)
    matrix, rows = drawn(sizes.tolist(), 3, 160, torch.bfloat16)
    rows = rows.to(device)
    buffer = torch.zeros(matrix.numel() + 1, dtype=matrix.dtype, device=device)
    for view in (
        buffer[1:].view(matrix.shape),
        torch.zeros(matrix.shape[0], 200, dtype=matrix.dtype, device=device)[:, 8:168],
        torch.zeros(160, matrix.shape[0], dtype=matrix.dtype, device=device).t(),
    ):
        check(view.copy_(matrix), rows, sizes, format)


@pytest.mark.parametrize("format", [*ALIGNED, *GROUPED_FORMATS[:1], "fp8_row", "mxfp8", "nvfp4:rht"])
def test_only_rows_of_zeros(format: str, device: torch.device) -> None:
    """Of an input without rows, and of one whose rows do not occur; and no entries at all."""
    for count in (0, 3):
        matrix = torch.full((count, 64), float("inf"), dtype=torch.bfloat16, device=device)
        for places in (176, 0):
            rows = torch.full((places,), -1, device=device)
            sizes = torch.tensor([0, 128, 32] if places else [0, 0, 0], device=device)
            check(matrix, rows, sizes, format)


@pytest.mark.parametrize("groups", [128, 6], ids=["short groups", "long groups"])
@pytest.mark.parametrize("format", ALIGNED[:4])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.gpu
def test_many_rows_on_a_gpu(format: str, dtype: torch.dtype, groups: int) -> None:
    """Every block has several row tiles, and every multiprocessor several blocks. A copy of long groups is quantized by
    another kernel."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 76800 // groups, (groups,), generator=generator)
    matrix, rows = drawn(sizes.tolist(), 5000, 1032, dtype, 8192)
    check(matrix.cuda(), rows.int().cuda(), sizes.cuda(), format)


@pytest.mark.parametrize("groups", [64, 4], ids=["short groups", "long groups"])
@pytest.mark.parametrize("format", ALIGNED[:4])
@pytest.mark.gpu
def test_rows_are_not_copied_on_a_gpu(format: str, groups: int) -> None:
    """The peak of memory is that of the results, the table of row tiles and, for an amax, one number per row of the
    input."""
    sizes = torch.full((groups,), 16000 // groups, device="cuda")
    matrix, rows = drawn(sizes.tolist(), 384, 2048, torch.bfloat16, 512)
    matrix, rows = matrix.cuda(), rows.int().cuda()
    most = most_memory(lambda: ops.quantize(matrix, format, sizes, columnwise=True, rows=rows))
    results = ops.quantize(matrix, format, sizes, columnwise=True, rows=rows)
    copied = rows.numel() * matrix.shape[1] * 2
    assert most < sum(t.numel() * t.element_size() for t in results) + copied / 16


@pytest.mark.parametrize("format", [*ALIGNED[:1], *ALIGNED[3:4], "fp8_row", "mxfp8"])
@pytest.mark.gpu
def test_graph_replays_with_new_rows(format: str) -> None:
    columnwise = Format.parse(format).traits.has_group_columns
    sizes = torch.tensor([300, 0, 129, 71], device="cuda")
    matrix, rows = drawn([300, 0, 129, 71], 24, 256, torch.bfloat16, 90)
    matrix, rows = matrix.nan_to_num(1.0).cuda(), rows.int().cuda()
    results: list[Tensor] = []

    def call() -> None:
        results[:] = ops.quantize(matrix, format, sizes, columnwise=columnwise, rows=rows)

    graph = captured(call)
    generator = torch.Generator().manual_seed(2)
    for new_sizes in ([1, 2, 3, 4], [0, 0, 0, 524], [128, 128, 128, 128]):
        sizes.copy_(torch.tensor(new_sizes))
        rows.copy_(torch.randint(-1, 90, rows.shape, generator=generator))
        graph.replay()
        wanted = ops.quantize(matrix, format, sizes, columnwise=columnwise, rows=rows)
        for got, expected in zip(results, wanted, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("format", [*ALIGNED[:1], *ALIGNED[3:4], "fp8_block", "fp8_row"])
@pytest.mark.parametrize("wrong", [90, -2, 2**31 - 1, -(2**31)])
@pytest.mark.gpu
def test_wrong_entries_are_zeros_and_reported_on_a_gpu(format: str, wrong: int) -> None:
    columnwise = Format.parse(format).traits.has_group_columns
    sizes = torch.tensor([300, 129], device="cuda")
    matrix, rows = drawn([300, 129], 24, 256, torch.bfloat16, 90)
    matrix, rows = matrix.nan_to_num(1.0).cuda(), rows.int().cuda()
    rows[317] = -1
    expected = ops.quantize(matrix, format, sizes, columnwise=columnwise, rows=rows)
    rows[317] = wrong
    got = ops.quantize(matrix, format, sizes, columnwise=columnwise, rows=rows)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"'rows': .* a call whose entry 317 is not one of its 90 rows"):
        ops.check_group_sizes()
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


def _call(matrix: Tensor, rows: Tensor, format: str = "fp8_block:aligned", **more: object) -> None:
    arguments = {"group_sizes": torch.tensor([2, 3]), "columnwise": True, **more}
    ops.quantize(matrix, format, **arguments, rows=rows)  # type: ignore[arg-type]


ERRORS = {
    "no groups": (
        {"group_sizes": None},
        torch.zeros(6).long(),
        "'rows': expected None without 'group_sizes', got int64[6] on cpu. Pass the sizes of the groups of rows.",
    ),
    "too few": (
        {},
        torch.zeros(4).int(),
        "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at group 1. "
        "Enlarge the buffer or fix the sizes.",
    ),
    "out of range": (
        {},
        torch.tensor([0, 1, 2, 7, 0, 99]),
        "'rows': expected entries from 0 to 6, the rows of 'input', or -1 for a row of zeros, got 7 at 3. "
        "Pass the row that each place takes.",
    ),
    "negative": (
        {"format": "fp8_row", "columnwise": False},
        torch.tensor([0, 1, 2, 3, -2, 99]),
        "'rows': expected entries from 0 to 6, the rows of 'input', or -1 for a row of zeros, got -2 at 4. "
        "Pass the row that each place takes.",
    ),
    "blocks": (
        {"format": "nvfp4", "amax": torch.ones(2), "amax_t": torch.ones(2)},
        torch.zeros(24).int(),
        "'rows': expected a number of entries that is a multiple of 16, the block of nvfp4 in transposed data, got "
        "int32[24] on cpu. Append entries of -1, rows of zeros.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    more, rows, text = ERRORS[name]
    with pytest.raises(ValueError) as error:
        _call(torch.zeros(7, 32, dtype=torch.bfloat16), rows, **more)
    assert str(error.value).startswith(f"transformer_plugin::quantize: argument {text}")


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (torch.zeros(6), TypeError),
        (torch.zeros(6, 1).long(), ValueError),
        (torch.zeros(12).long()[::2], ValueError),
        (torch.zeros(6, device="meta").long(), ValueError),
    ],
    ids=["float", "two dimensions", "strided", "other device"],
)
def test_wrong_index_tensors(rows: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^transformer_plugin::quantize: argument 'rows': expected "):
        _call(torch.zeros(7, 32, dtype=torch.bfloat16), rows)


@pytest.mark.parametrize("format", ["fp8_block:aligned", "fp8_tensor:aligned", "fp8_row", "mxfp8"])
def test_opcheck(format: str, device: torch.device) -> None:
    sizes = torch.tensor([5, 0, 17], device=device)
    matrix, rows = drawn([5, 0, 17], 10, 64, torch.bfloat16)
    matrix = matrix.nan_to_num(1.0).to(device)
    flags = BOTH if Format.parse(format).traits.has_group_columns else {}
    opcheck(_ops.quantize.default, (matrix, format, sizes), {**flags, "rows": rows.to(device)})
