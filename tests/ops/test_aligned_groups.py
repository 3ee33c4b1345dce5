"""Aligned groups: in the transposed data of a ragged matrix, each group begins at a column that is a multiple of 32.

Other tests of the quantize family check the quantized data and scales. Here the expected data is assembled group by
group from data of the same format without ``aligned``, and products of it must have the same bits as products without
``aligned``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.gemm_cases import wgrad_arguments
from transformer_plugin.testing.numerics import assert_same_bits

FORMATS = ["fp8_block:e4m3", "fp8_block:e5m2,fp32", "fp8_tensor:e4m3"]
#: Rows of the buffer, and group sizes: empty groups first, last and in between, tails, ends next to multiples
#: of 32 and 128.
CASES = [
    (300, [0, 5, 0, 129, 33, 0, 100]),
    (257, [0, 0, 257]),
    (64, [31, 1, 32]),
    (128, [128]),
    (160, [1, 0]),
    (1024, [100, 200, 0, 300, 256]),
    (96, [0, 0]),
    (0, [0, 0, 0]),
]


def aligned(format: str) -> str:
    return format + ",aligned"


def align_groups(data: Tensor, sizes: list[int], rows: int) -> Tensor:
    """Returns ``data`` [columns, rows] with group g moved to column round_up(begin, 32) + 32 g, and zeros
    elsewhere."""

    def round_up(row: int) -> int:
        return (row + 31) // 32 * 32

    bits = data.view(torch.uint8)
    aligned_data = bits.new_zeros(bits.shape[0], round_up(rows) + 32 * (len(sizes) + 1))
    begin = 0
    for group, size in enumerate(sizes):
        at = round_up(begin) + 32 * group
        aligned_data[:, at : at + size] = bits[:, begin : begin + size]
        begin += size
    return aligned_data.view(data.dtype)


def matrix(rows: int, columns: int, device: torch.device, seed: int = 0) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(device, torch.bfloat16)


def amax_of(input: Tensor, sizes: Tensor, format: str) -> Tensor | None:
    return reference.amax(input, format, sizes) if format.startswith("fp8_tensor") else None


@pytest.mark.parametrize(("rows", "sizes"), CASES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_aligns_groups(format: str, rows: int, sizes: list[int], device: torch.device) -> None:
    input, group_sizes = matrix(rows, 192, device), torch.tensor(sizes, device=device)
    input[sum(sizes) :] = float("nan")  # rows past the groups must have no effect
    data, scale, data_t, scale_t = ops.quantize(input, format, group_sizes, columnwise=True)
    expected = (data, scale, align_groups(data_t, sizes, rows), scale_t)
    for got, want in zip(
        ops.quantize(input, aligned(format), group_sizes, columnwise=True), expected, strict=True
    ):
        assert_same_bits(got, want)
    transposed = ops.quantize(input, aligned(format), group_sizes, rowwise=False, columnwise=True)
    for got, want in zip(transposed, expected[2:], strict=True):
        assert_same_bits(got, want)
    meaning = reference.quantize(
        input, aligned(format), group_sizes, amax=amax_of(input, group_sizes, format), columnwise=True
    )
    for got, want in zip(meaning, expected, strict=True):
        assert_same_bits(got, want)
    assert expected[2].shape[1] == Format.parse(aligned(format)).line_length(rows, len(sizes))


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_out_aligns_groups(format: str, device: torch.device) -> None:
    """Every byte is written, including those between groups; with the flag set, no byte is written."""
    rows, sizes = CASES[0]
    input, group_sizes = matrix(rows, 192, device), torch.tensor(sizes, device=device)
    expected = ops.quantize(input, aligned(format), group_sizes, columnwise=True)
    buffers = [torch.full_like(tensor.view(torch.uint8), 0x5A).view(tensor.dtype) for tensor in expected]
    noop = torch.ones(1, device=device)
    ops.quantize_out(input, aligned(format), buffers, group_sizes, noop=noop, columnwise=True)
    assert all((buffer.view(torch.uint8) == 0x5A).all() for buffer in buffers)
    ops.quantize_out(input, aligned(format), buffers, group_sizes, noop=noop.zero_(), columnwise=True)
    for got, want in zip(buffers, expected, strict=True):
        assert_same_bits(got, want)


#: Sizes that end around multiples of 16, 32 and 128; gaps longer than a cache line; empty first and last
#: groups; groups of many tiles between short ones.
SHORT = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
MANY_GROUPS = [
    [0, *SHORT, 0, 0, 0, 0, 0, 0, 0, 0, 0, *SHORT[::-1], 0],
    [0] * 40 + [700] + [0] * 40,
    [3] * 96,
    [900, *SHORT, 1100],
]


@pytest.mark.parametrize("columns", [8, 128, 200])
@pytest.mark.parametrize("tail", [0, 1, 200])
@pytest.mark.parametrize("sizes", MANY_GROUPS, ids=["short", "alone", "tiny", "long"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantize_aligns_many_groups(
    dtype: torch.dtype, format: str, sizes: list[int], tail: int, columns: int, device: torch.device
) -> None:
    """Groups that are short on average and longer groups use different kernels on a GPU. Every byte is written."""
    rows = sum(sizes) + tail
    input = matrix(rows, columns, torch.device("cpu")).to(dtype)
    group_sizes = torch.tensor(sizes)
    data, scale, data_t, scale_t = ops.quantize(input, format, group_sizes, columnwise=True)
    expected = (data, scale, align_groups(data_t, sizes, rows), scale_t)
    buffers = [
        torch.full(want.shape, 0x5A, dtype=torch.uint8, device=device).view(want.dtype)
        if want.element_size() == 1
        else torch.full_like(want, float("nan"), device=device)
        for want in expected
    ]
    input[sum(sizes) :] = float("nan")
    there = input.to(device), group_sizes.to(device)
    ops.quantize_out(there[0], aligned(format), buffers, there[1], columnwise=True)
    for got, want in zip(buffers, expected, strict=True):
        assert_same_bits(got.cpu(), want)
    transposed = ops.quantize(there[0], aligned(format), there[1], rowwise=False, columnwise=True)
    for got, want in zip(transposed, expected[2:], strict=True):
        assert_same_bits(got.cpu(), want)


@pytest.mark.parametrize(("rows", "sizes"), CASES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_removes_the_alignment(
    format: str, rows: int, sizes: list[int], device: torch.device
) -> None:
    """Dequantized data has the rows of the buffer, and additional rows of zeros up to a multiple of 32."""
    input, group_sizes = matrix(rows, 192, device), torch.tensor(sizes, device=device)
    plain = ops.quantize(input, format, group_sizes, rowwise=False, columnwise=True)
    aligned_data = ops.quantize(input, aligned(format), group_sizes, rowwise=False, columnwise=True)
    values = ops.dequantize(*plain, format, group_sizes=group_sizes, transposed=True)
    got = ops.dequantize(*aligned_data, aligned(format), group_sizes=group_sizes, transposed=True)
    assert_same_bits(got[:rows], values)
    assert got.shape[0] == -(-rows // 32) * 32 and not got[rows:].any()
    meaning = reference.dequantize(*aligned_data, aligned(format), group_sizes=group_sizes, transposed=True)
    assert_same_bits(got, meaning)


@pytest.mark.parametrize(("rows", "sizes"), [case for case in CASES if case[0]], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_weight_gradient_has_the_bits_without_alignment(
    format: str, rows: int, sizes: list[int], device: torch.device
) -> None:
    input, grad = matrix(rows, 192, device), matrix(rows, 160, device, seed=1)
    group_sizes = torch.tensor(sizes, device=device)

    def product(format: str, out: Tensor | None = None) -> Tensor:
        operands = [
            ops.quantize(x, format, group_sizes, rowwise=False, columnwise=True) for x in (grad, input)
        ]
        arguments = wgrad_arguments(operands[0], operands[1], format, format) | {"group_sizes": group_sizes}
        if out is None:
            return ops.grouped_gemm_wgrad(**arguments)
        ops.grouped_gemm_wgrad_out(**arguments, out=out)
        return out

    assert_same_bits(product(aligned(format)), product(format))
    before = matrix(len(sizes) * 160, 192, device, seed=2).float().view(len(sizes), 160, 192)
    assert_same_bits(product(aligned(format), before.clone()), product(format, before.clone()))


@pytest.mark.parametrize("format", ["fp8_block:e4m3", "fp8_block:e5m2,fp32"])
def test_fused_ops_align_groups(format: str, device: torch.device) -> None:
    rows, sizes = CASES[0]
    group_sizes, probs = torch.tensor(sizes, device=device), torch.rand(rows, device=device)
    h, grad = matrix(rows, 512, device), matrix(rows, 256, device, seed=1)
    calls: list[Callable[[str], tuple[Tensor, ...]]] = [
        lambda key: ops.activation_quantize(h, key, probs, group_sizes, columnwise=True),
        lambda key: ops.activation_backward_quantize(grad, h, key, probs, group_sizes),
        lambda key: ops.bias_backward_quantize(grad, key, group_sizes, columnwise=True),
    ]
    for call in calls:
        data, scale, data_t, *rest = call(format)
        expected = (data, scale, align_groups(data_t, sizes, rows), *rest)
        for got, want in zip(call(aligned(format)), expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("format", ["fp8_tensor:e4m3", "fp8_block:e4m3"])
def test_requantize_transposed_aligns_groups(format: str, device: torch.device) -> None:
    rows, sizes = CASES[0]
    group_sizes = torch.tensor(sizes, device=device)
    data, scale = ops.quantize(matrix(rows, 192, device), format, group_sizes)
    data_t, scale_t = ops.requantize_transposed(data, scale, format, torch.bfloat16, group_sizes)
    got = ops.requantize_transposed(data, scale, aligned(format), torch.bfloat16, group_sizes)
    assert_same_bits(got[0], align_groups(data_t, sizes, rows))
    assert_same_bits(got[1], scale_t)


def test_aligned_has_no_effect_without_groups(device: torch.device) -> None:
    input = matrix(300, 192, device)
    for got, want in zip(
        ops.quantize(input, "fp8_block:aligned", columnwise=True),
        ops.quantize(input, "fp8_block", columnwise=True),
        strict=True,
    ):
        assert_same_bits(got, want)


def test_wgrad_refuses_mixed_alignment(device: torch.device) -> None:
    group_sizes = torch.tensor([40, 20], device=device)
    plain = ops.quantize(matrix(64, 64, device), "fp8_block", group_sizes, rowwise=False, columnwise=True)
    aligned_data = ops.quantize(
        matrix(64, 64, device), "fp8_block:aligned", group_sizes, rowwise=False, columnwise=True
    )
    with pytest.raises(ValueError, match="'input_format': expected 'aligned' if and only if grad_format"):
        arguments = wgrad_arguments(plain, aligned_data, "fp8_block", "fp8_block:aligned")
        ops.grouped_gemm_wgrad(**arguments, group_sizes=group_sizes)
    with pytest.raises(ValueError, match="'grad': expected rows of aligned groups, a multiple of 32"):
        arguments = wgrad_arguments(plain, aligned_data, "fp8_block:aligned", "fp8_block:aligned")
        ops.grouped_gemm_wgrad(**arguments, group_sizes=group_sizes)
    with pytest.raises(ValueError, match="expected a format key"):
        ops.quantize(matrix(64, 64, device), "mxfp8:aligned", group_sizes, rowwise=False, columnwise=True)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_graph_replays_with_new_sizes(format: str) -> None:
    device = torch.device("cuda")
    input, group_sizes = matrix(300, 192, device), torch.tensor([100, 100, 50], device=device)
    ops.quantize(input, aligned(format), group_sizes, rowwise=False, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data_t, scale_t = ops.quantize(input, aligned(format), group_sizes, rowwise=False, columnwise=True)
    for seed, sizes in enumerate(([0, 299, 1], [33, 0, 128], [0, 0, 0])):
        input.copy_(matrix(300, 192, device, seed))
        group_sizes.copy_(torch.tensor(sizes))
        graph.replay()
        plain, scale = ops.quantize(input, format, group_sizes, rowwise=False, columnwise=True)
        assert_same_bits(data_t, align_groups(plain, sizes, 300))
        assert_same_bits(scale_t, scale)
