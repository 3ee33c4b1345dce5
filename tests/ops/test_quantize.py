"""The quantize family: bytes and scales equal those of an oracle in numpy, on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import nvfp4_oracle, oracles
from tests.ops.oracles import FORMATS
from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    amax_of,
    columns_of,
    extras,
    grouped_quantize_cases,
    quantize_cases,
    rows_for,
    rows_of,
    width_for,
)

CASES = list(quantize_cases())
GROUPED_CASES = list(grouped_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)


@by_case
def test_reference_agrees_with_the_oracle(case: Case) -> None:
    input, format = case.arguments()
    more = extras(input, format)
    assert_all_same(
        reference.quantize(input, format, **more, columnwise=True), oracles.both(input, format, more)
    )


@by_grouped_case
def test_grouped_reference_agrees_with_the_oracle(case: Case) -> None:
    input, sizes, format = case.arguments()
    more = extras(input, format, sizes)
    expected = oracles.grouped_both(input, sizes.tolist(), format, more)
    assert_all_same(reference.quantize(input, format, sizes, **more, columnwise=True), expected)


@by_case
def test_quantize_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    more = extras(input, format)
    expected = oracles.both(input, format, more)
    assert_all_same(ops.quantize(input, format, **more, columnwise=True), expected)
    assert_all_same(ops.quantize(input, format, **rows_of(more)), expected[:2])
    assert_all_same(
        ops.quantize(input, format, **columns_of(more), rowwise=False, columnwise=True), expected[2:]
    )


@by_grouped_case
def test_quantize_groups_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    expected = oracles.grouped_both(input, sizes.tolist(), format, more)
    assert_all_same(ops.quantize(input, format, sizes, **more, columnwise=True), expected)
    assert_all_same(ops.quantize(input, format, sizes, **rows_of(more)), expected[:2])
    got = ops.quantize(input, format, sizes, **columns_of(more), rowwise=False, columnwise=True)
    assert_all_same(got, expected[2:])


def member(tensor: Tensor | None, g: int) -> Tensor | None:
    """Returns the data, scale or amax of one matrix of a stack."""
    return tensor if tensor is None else tensor[g : g + 1] if tensor.dim() == 1 else tensor[g]


@by_case
def test_dequantize_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    more = extras(input, format)
    quantized = ops.quantize(input, format, **more, columnwise=True)
    for transposed, data, scale in ((False, *quantized[:2]), (True, *quantized[2:])):
        amax = amax_of(more, transposed)
        got = ops.dequantize(data, scale, format, dtype, transposed=transposed, **amax)
        here = {name: value.cpu() for name, value in amax.items()}
        expected = reference.dequantize(data.cpu(), scale.cpu(), format, dtype, transposed=transposed, **here)
        assert_same_bits(got, expected, f"transposed={transposed}")
        stack = input.dim() == 3
        for g in range(input.shape[0] if stack else 1):
            parts = (data, scale, here.get("amax"))
            one, of, over = (member(part, g) for part in parts) if stack else parts
            values = oracles.dequantized(one, of, format, over, dtype)
            one_got = got[g] if stack else got
            assert_same_bits(one_got, values.T.contiguous() if transposed else values, "oracle")


@pytest.mark.parametrize(
    "case", [case for case in GROUPED_CASES if "sr" not in case.name], ids=lambda case: case.name
)
def test_dequantize_groups_agrees_with_separate_matrices(case: Case, device: torch.device) -> None:
    """Compares each group with the group quantized as a separate matrix. Stochastic rounding is left out, because
    it depends on the position in the buffer."""
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    data, scale, data_t, scale_t = ops.quantize(input, format, sizes, **more, columnwise=True)
    got = ops.dequantize(data, scale, format, torch.bfloat16, sizes, **amax_of(more))
    transposed = (data_t, scale_t, format, torch.bfloat16, sizes, True)
    got_t = ops.dequantize(*transposed, **amax_of(more, transposed=True))
    expected = torch.zeros(input.shape, dtype=torch.bfloat16)
    expected_t = expected.clone()
    first = 0
    for size in sizes.tolist():
        rows = slice(first, first + size)
        group = input[rows].cpu()
        own = extras(group, format)
        one = reference.quantize(group, format, **own, columnwise=True)
        expected[rows] = reference.dequantize(*one[:2], format, torch.bfloat16, **amax_of(own))
        amax = amax_of(own, transposed=True)
        back = reference.dequantize(*one[2:], format, torch.bfloat16, transposed=True, **amax)
        expected_t[rows] = back
        first += size
    assert_same_bits(got, expected)
    assert_same_bits(got_t, expected_t)


def test_columnwise_equals_rowwise_of_the_transpose(device: torch.device) -> None:
    for format in FORMATS:
        if "rht" in format or "sr" in format:
            continue  # the transposed copy is rotated, or uses other random numbers
        rows, columns = rows_for(width_for(300, format), format), width_for(140, format)
        input = torch.randn(rows, columns, device=device)
        more = extras(input, format)
        amax = amax_of(more, transposed=True)
        transposed = ops.quantize(input.T.contiguous(), format, **amax)
        assert_all_same(
            ops.quantize(input, format, **columns_of(more), rowwise=False, columnwise=True), transposed
        )


def test_layouts_of_fp8(device: torch.device) -> None:
    """The shapes that other ops rely on."""

    def shapes(outputs: tuple[Tensor, ...]) -> list[list[int]]:
        return [list(output.shape) for output in outputs]

    input = torch.ones(257, 130, device=device)
    assert shapes(ops.quantize(input, "fp8_tensor", columnwise=True)) == [[257, 130], [1], [130, 257], [1]]
    assert shapes(ops.quantize(input, "fp8_block", columnwise=True)) == [
        [257, 130],
        [2, 260],
        [130, 257],
        [3, 132],
    ]
    assert shapes(ops.quantize(input, "fp8_block:square", columnwise=True)) == [
        [257, 130],
        [3, 4],
        [130, 257],
        [2, 4],
    ]
    stack = torch.ones(5, 257, 130, device=device)
    assert shapes(ops.quantize(stack, "fp8_tensor")) == [[5, 257, 130], [5]]
    assert shapes(ops.quantize(stack, "fp8_block:square", rowwise=False, columnwise=True)) == [
        [5, 130, 257],
        [5, 2, 4],
    ]
    sizes = torch.tensor([1, 128, 0], device=device)
    grouped = ops.quantize(input, "fp8_block", sizes, columnwise=True)
    assert shapes(grouped) == [[257, 130], [2, 260], [130, 257], [3 + 3, 132]]
    scale, scale_t = grouped[1].cpu(), grouped[3].cpu()
    assert (scale[:, :129] == 2.0**-8).all() and (scale[:, 129:] == 0).all()
    assert (scale_t[:2, :130] == 2.0**-8).all() and (scale_t[2:] == 0).all() and (scale_t[:, 130:] == 0).all()


def test_layouts_of_mxfp8(device: torch.device) -> None:
    """Scales have TransformerEngine's compact row-wise layout in both directions, and every byte of the padding is
    0."""
    one = 127 - 8  # 1 / 448, rounded up to a power of two: 2^-8

    def check(scale: Tensor, shape: tuple[int, ...], used: tuple[slice, ...]) -> None:
        assert scale.dtype == torch.float8_e8m0fnu and tuple(scale.shape) == shape
        expected = torch.zeros(shape, dtype=torch.uint8)
        expected[used] = one
        assert_same_bits(scale.cpu().view(torch.uint8), expected)

    input = torch.ones(257, 160, device=device)
    for format in ("mxfp8", "mxfp8:square"):
        data, scale, data_t, scale_t = ops.quantize(input, format, columnwise=True)
        assert (tuple(data.shape), tuple(data_t.shape)) == ((257, 160), (160, 257))
        check(scale, (384, 8), (slice(257), slice(5)))
        check(scale_t, (256, 12), (slice(160), slice(9)))
        stack = ops.quantize(input.expand(5, 257, 160), format, columnwise=True)
        check(stack[1], (5, 384, 8), (slice(None), slice(257), slice(5)))
        check(stack[3], (5, 256, 12), (slice(None), slice(160), slice(9)))
    sizes = torch.tensor([1, 0, 129, 64], device=device)
    data, scale, data_t, scale_t = ops.quantize(input, "mxfp8", sizes, columnwise=True)
    assert not data[194:].view(torch.uint8).any() and not data_t[:, 194:].view(torch.uint8).any()
    check(scale, (384, 8), (slice(194), slice(5)))
    # Groups of 1, 0, 129 and 64 rows have 1, 0, 5 and 2 blocks, which begin at the columns 0, 4, 4 and 12.
    blocks = torch.tensor([0, 4, 5, 6, 7, 8, 12, 13])
    assert scale_t.shape == (256, 4 * (3 + 4))
    expected = torch.zeros(256, 28, dtype=torch.uint8)
    expected[:160, blocks] = one
    assert_same_bits(scale_t.cpu().view(torch.uint8), expected)


@pytest.mark.parametrize("format", ["mxfp8:square", "nvfp4:square"])
def test_square_blocks_have_the_same_values_in_both_directions(format: str, device: torch.device) -> None:
    input = torch.randn(80 if format.startswith("nvfp4") else 70, 96, device=device)
    more, block = extras(input, format), 16 if format.startswith("nvfp4") else 32
    data, scale, data_t, scale_t = ops.quantize(input, format, **more, columnwise=True)
    bytes, bytes_t = (s.cpu().view(torch.uint8) for s in (scale, scale_t))
    across, down = -(-96 // block), -(-input.shape[0] // block)
    corner = bytes[: input.shape[0] : block, :across].contiguous()
    assert_same_bits(corner, bytes_t[:96:block, :down].T.contiguous())
    got = ops.dequantize(data_t, scale_t, format, transposed=True, **amax_of(more, transposed=True))
    assert_same_bits(got, ops.dequantize(data, scale, format, **amax_of(more)))


def test_layouts_of_nvfp4(device: torch.device) -> None:
    """Scales of 1x16 blocks have TransformerEngine's compact row-wise layout in both directions, and the padding is
    0."""
    one = 0x7E  # the amax of every block is the amax of the matrix: 448

    def check(scale: Tensor, shape: tuple[int, ...], used: tuple[slice, ...]) -> None:
        assert scale.dtype == torch.float8_e4m3fn and tuple(scale.shape) == shape
        expected = torch.zeros(shape, dtype=torch.uint8)
        expected[used] = one
        assert_same_bits(scale.cpu().view(torch.uint8), expected)

    input, amax = torch.ones(272, 160, device=device), torch.ones(5, device=device)
    for format in ("nvfp4", "nvfp4:square"):
        data, scale, data_t, scale_t = ops.quantize(
            input, format, amax=amax[:1], amax_t=amax[:1], columnwise=True
        )
        assert (tuple(data.shape), tuple(data_t.shape)) == ((272, 80), (160, 136))
        assert data.dtype == data_t.dtype == torch.float4_e2m1fn_x2
        check(scale, (384, 12), (slice(272), slice(10)))
        check(scale_t, (256, 20), (slice(160), slice(17)))
        stack = ops.quantize(input.expand(5, 272, 160), format, amax=amax, amax_t=amax, columnwise=True)
        check(stack[1], (5, 384, 12), (slice(None), slice(272), slice(10)))
        check(stack[3], (5, 256, 20), (slice(None), slice(160), slice(17)))
    sizes = torch.tensor([16, 0, 144, 64], device=device)
    data, scale, data_t, scale_t = ops.quantize(
        input, "nvfp4", sizes, amax=amax[:4], amax_t=amax[:4], columnwise=True
    )
    assert not data[224:].cpu().view(torch.uint8).any()
    assert not data_t[:, 112:].cpu().view(torch.uint8).any()
    check(scale, (384, 12), (slice(224), slice(10)))
    # Groups of 16, 0, 144 and 64 rows have 1, 0, 9 and 4 blocks, which begin at the columns 0, 8, 8 and 24.
    blocks = torch.tensor([0, *range(8, 17), *range(24, 28)])
    assert scale_t.shape == (256, 8 * (3 + 4))
    expected = torch.zeros(256, 56, dtype=torch.uint8)
    expected[:160, blocks] = one
    assert_same_bits(scale_t.cpu().view(torch.uint8), expected)


def test_rowwise_nvfp4_supports_any_number_of_rows(device: torch.device) -> None:
    """Only a transposed copy requires whole blocks of rows."""
    for rows in (1, 15, 17, 129):
        input = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(device)
        for format, spec in nvfp4_oracle.SPECS.items():
            amax = reference.amax(input.cpu(), format)
            seed = torch.tensor([3], device=device) if spec.sr else None
            expected = nvfp4_oracle.quantize_direction(input, spec, amax, 3 if spec.sr else None, 0)
            assert_all_same(ops.quantize(input, format, amax=amax.to(device), seed=seed), expected)
    sizes = torch.tensor([3, 0, 14], device=device)
    for format in ("nvfp4", "nvfp4:row_scaled"):
        amax = reference.amax(input.cpu(), format, sizes.cpu())
        expected = nvfp4_oracle.grouped_quantize_direction(
            input, [3, 0, 14], nvfp4_oracle.SPECS[format], amax, None, 0
        )
        assert_all_same(ops.quantize(input, format, sizes, amax=amax.to(device)), expected)


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(40, 2 * 300, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 128, device=device).bfloat16()
    inputs = [
        wide[:, ::2],
        wide.T,
        torch.ones((), device=device).expand(130, 36),  # a gradient with stride 0
        flat[1:].view(24, 128),  # contiguous, but not aligned to a vector
        wide[3:17, 5:200],
        wide[3:17, 5:229],
        wide[3:19, 5:229],
        wide.T[:, ::5][:256],
    ]
    tried: set[str] = set()
    for input in inputs:
        copy = input.clone(memory_format=torch.contiguous_format)
        for format in FORMATS:
            rows, columns = input.shape
            if columns != width_for(columns, format) or rows != rows_for(rows, format):
                continue
            tried.add(format)
            more = extras(copy, format)
            assert_all_same(
                ops.quantize(input, format, **more, columnwise=True),
                ops.quantize(copy, format, **more, columnwise=True),
            )
            if "square" not in format:
                sizes = torch.tensor([16, 0, 0] if format.startswith("nvfp4") else [3, 0, 8], device=device)
                more = extras(copy, format, sizes)
                got = ops.quantize(input, format, sizes, **more, columnwise=True)
                assert_all_same(got, ops.quantize(copy, format, sizes, **more, columnwise=True))
    assert tried == set(FORMATS)
    data, scale = ops.quantize(wide.T, "fp8_block")
    strided_data, strided_scale = data.T.contiguous().T, scale.T.contiguous().T
    assert not strided_data.is_contiguous()
    assert_same_bits(
        ops.dequantize(strided_data, strided_scale, "fp8_block"), ops.dequantize(data, scale, "fp8_block")
    )


def test_groups_of_whole_blocks_equal_separate_matrices(device: torch.device) -> None:
    """A group's bytes depend neither on its neighbors nor on the length of the buffer."""
    sizes = torch.tensor([128, 256], dtype=torch.int32, device=device)
    for format in FORMATS:
        if "square" in format or "sr" in format:
            continue
        input = torch.randn(384, width_for(200, format), device=device)
        longer = torch.cat([input, torch.full_like(input, 1e4)])
        got = ops.quantize(longer, format, sizes, **extras(longer, format, sizes), columnwise=True)
        for rows in (slice(0, 128), slice(128, 384)):
            one = ops.quantize(input[rows], format, **extras(input[rows], format), columnwise=True)
            columns = slice(rows.start // 2, rows.stop // 2) if format.startswith("nvfp4") else rows
            assert_same_bits(got[0][rows].contiguous(), one[0])
            assert_same_bits(got[2][:, columns].contiguous(), one[2])


def test_outputs_do_not_require_gradients(device: torch.device) -> None:
    input = torch.randn(4, 8, device=device, requires_grad=True)
    outputs = ops.quantize(input, "fp8_block", columnwise=True)
    assert not any(output.requires_grad for output in outputs)
    assert not ops.dequantize(outputs[0], outputs[1].requires_grad_(), "fp8_block").requires_grad


def test_format_object_equals_its_key() -> None:
    input = torch.randn(4, 8)
    format = Format("fp8_block", "e5m2", power_of_two_scales=False)
    assert_all_same(ops.quantize(input, format), ops.quantize(input, "fp8_block:e5m2,fp32"))
    sizes = torch.tensor([2, 1])
    data, scale = ops.quantize(input, format, sizes)
    assert_same_bits(
        ops.dequantize(data, scale, format, group_sizes=sizes),
        ops.dequantize(data, scale, "fp8_block:e5m2,fp32", group_sizes=sizes),
    )
