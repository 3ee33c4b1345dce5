"""Ragged groups at any row, in both directions: on a GPU, thread blocks process strips of columns, or 128-row strips
of the buffer wherever groups begin, and store whole rows of the transposed data.

test_quantize checks the bytes of small matrices. Here several thread blocks share a strip, and CUDA gives the bytes of
the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS

pytestmark = pytest.mark.gpu

FORMATS = [
    "fp8_block:e4m3",
    "fp8_block:e5m2,pow2",
    "fp8_tensor:e4m3",
    "mxfp8:e4m3",
    "mxfp8:e5m2,tiled",
    "fp8_block:e4m3,eps=1e-3",
    "fp8_block:e4m3,aligned",
    "fp8_tensor:e4m3,aligned",
]
# Rows and columns: whole tiles and partial ones, parts of a strip, 8 columns only, rows that are not whole
# sectors.
SHAPES = [(4096, 1000), (2064, 136), (1040, 8), (16, 128), (3000, 256), (8192, 264), (520, 130)]


def sizes_of(rows: int, groups: int, multiple: int, tail: int) -> Tensor:
    """Returns skewed sizes, a fifth of them 0, that leave ``tail`` rows."""
    generator = torch.Generator().manual_seed(rows + groups)
    weights = torch.empty(groups, dtype=torch.float64).exponential_(generator=generator)
    weights *= torch.rand(groups, generator=generator) > 0.2
    weights[groups // 2] += 1e-9
    ends = (weights.cumsum(0) / weights.sum() * (max(rows - tail, 0) // multiple)).round().long() * multiple
    return ends.diff(prepend=ends.new_zeros(1)).int()


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(rows, columns, generator=generator)
    values *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "groups, multiple, tail", [(1, 1, 0), (7, 1, 77), (300, 1, 0), (64, 32, 40), (9, 128, 0)]
)
@pytest.mark.parametrize("format", FORMATS)
def test_cuda_gives_the_bytes_of_the_cpu(
    format: str, groups: int, multiple: int, tail: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if format.startswith("mxfp8"):
        shape = (shape[0], -(-shape[1] // 32) * 32)
    input, sizes = matrix(*shape, dtype), sizes_of(shape[0], groups, multiple, tail)
    check_bytes(input, sizes, format)


def check_bytes(input: Tensor, sizes: Tensor, format: str) -> None:
    """Asserts that CUDA gives the bytes of the CPU."""
    poisoned = input.cuda()
    poisoned[int(sizes.sum()) :] = float("nan")  # rows past the groups must have no effect
    poisoned[int(sizes.sum()) :, ::2] = 60000.0
    for flags in (BOTH, COLUMNS):
        there = ops.quantize(poisoned, format, sizes.cuda(), **flags)
        for got, expected in zip(there, ops.quantize(input, format, sizes, **flags), strict=True):
            assert_same_bits(got, expected)


# Ends next to blocks of 32 and of 128 rows; empty groups first, last and in between; many groups in one
# block.
SIZES = {
    "next to blocks": [1, 31, 33, 127, 129, 32, 128, 63, 65, 1, 300],
    "empty": [0, 0, 129, 0, 200, 0, 31, 0, 0],
    "single rows": [1] * 900,
    "a few rows": [2, 3, 1, 0, 5, 16, 15, 17] * 20,
    "many": [7, 0, 1] * 333 + [1],
    "one block each": [32] * 30,
    "partial blocks": [31] * 16 + [33] * 15,
    "none": [0, 0],
    "one group": [0, 1024],
    "one row": [0, 1],
}


@pytest.mark.parametrize("columns", [32, 160, 384])
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        pytest.param(sizes, rows, id=f"{name}-{rows}")
        for name, sizes in SIZES.items()
        for rows in (1024, 3072, 1040, 2999)
        if sum(sizes) <= rows
    ],
)
@pytest.mark.parametrize("format", ["mxfp8:e4m3", "mxfp8:e4m3,tiled", "fp8_block:e4m3"])
def test_groups_that_end_next_to_blocks(format: str, sizes: list[int], rows: int, columns: int) -> None:
    check_bytes(matrix(rows, columns, torch.bfloat16), torch.tensor(sizes), format)


@pytest.mark.parametrize("format", ["mxfp8:e4m3", "mxfp8:e5m2"])
def test_nan_and_inf_affect_only_the_scale_of_their_block(format: str) -> None:
    """Also if two thread blocks read the rows of a block."""
    input = matrix(1024, 256, torch.bfloat16)
    input[100:1024:97] = float("inf")
    input[::61, ::3] = float("nan")
    input[:, 5] = float("nan")
    check_bytes(input, torch.tensor([13, 500, 1, 490]), format)


@pytest.mark.parametrize("format", FORMATS[:4])
def test_graph_replays_with_new_sizes(format: str) -> None:
    """The same launch stores groups that end with whole sectors and groups that do not in different ways."""
    input = matrix(2048, 384, torch.bfloat16)
    device_input, sizes = input.cuda(), sizes_of(2048, 33, 1, 100).cuda()
    ops.quantize(device_input, format, sizes, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.quantize(device_input, format, sizes, columnwise=True)
    for multiple, tail in ((1, 0), (128, 0), (32, 500), (1, 2048), (16, 3)):
        host_sizes = sizes_of(2048, 33, multiple, tail)
        input = matrix(2048, 384, torch.bfloat16) * (tail + 1)
        device_input.copy_(input)
        sizes.copy_(host_sizes)
        graph.replay()
        for got, expected in zip(
            captured, ops.quantize(input, format, host_sizes, columnwise=True), strict=True
        ):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("format", ["fp8_block:e4m3", "mxfp8:e4m3"])
def test_sizes_past_the_buffer_are_limited(format: str) -> None:
    """Sizes are on the device: rows past the buffer are ignored, and the next check reports them."""
    input = matrix(1024, 256, torch.bfloat16).cuda()
    sizes = torch.tensor([100, 5000, 3], device="cuda")
    got = ops.quantize(input, format, sizes, columnwise=True)
    expected = ops.quantize(input.cpu(), format, torch.tensor([100, 924, 0]), columnwise=True)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="group_sizes"):
        ops.check_group_sizes()
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
