"""The quantize family. Bytes and scales equal those of an oracle in numpy, on both devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import oracles
from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import (
    SPECS,
    assert_all_same,
    dequantized,
    oracle_both,
    spread,
)
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    extras,
    grouped_quantize_cases,
    quantize_cases,
    width_for,
)

CASES = [c for c in quantize_cases() if not ("nvfp4" in c.name or "tiled" in c.name)]
GROUPED_CASES = [c for c in grouped_quantize_cases() if not ("nvfp4" in c.name or "tiled" in c.name)]
FORMATS = [key for key in SPECS if "tiled" not in key]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)


@pytest.mark.parametrize("case", [*quantize_cases()], ids=lambda case: case.name)
def test_reference_agrees_with_the_oracle(case: Case) -> None:
    input, format = case.arguments()
    more = extras(input, format)
    assert_all_same(reference.quantize_both(input, format, **more), oracles.both(input, format, more))


@pytest.mark.parametrize("case", [*grouped_quantize_cases()], ids=lambda case: case.name)
def test_grouped_reference_agrees_with_the_oracle(case: Case) -> None:
    input, sizes, format = case.arguments()
    more = extras(input, format, sizes)
    expected = oracles.grouped_both(input, sizes.tolist(), format, more)
    assert_all_same(reference.grouped_quantize_both(input, sizes, format, **more), expected)


@by_case
def test_quantize(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = oracle_both(input, SPECS[format])
    assert_all_same(ops.quantize_both(input, format), expected)
    assert_all_same(ops.quantize(input, format), expected[:2])
    assert_all_same(ops.quantize_transposed(input, format), expected[2:])


@by_grouped_case
def test_grouped_quantize(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    expected = oracle.grouped_quantize_both(input, sizes.tolist(), SPECS[format])
    assert_all_same(ops.grouped_quantize_both(input, sizes, format), expected)
    assert_all_same(ops.grouped_quantize(input, sizes, format), expected[:2])
    assert_all_same(ops.grouped_quantize_transposed(input, sizes, format), expected[2:])


@by_case
def test_dequantize(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    spec = SPECS[format]
    data, scale, data_t, scale_t = ops.quantize_both(input, format)
    got = ops.dequantize(data, scale, format, dtype)
    got_t = ops.dequantize(data_t, scale_t, format, dtype, transposed=True)
    assert_same_bits(got, reference.dequantize(data.cpu(), scale.cpu(), format, dtype))
    assert_same_bits(got_t, reference.dequantize(data_t.cpu(), scale_t.cpu(), format, dtype, transposed=True))
    if input.dim() == 3:
        members = range(input.shape[0])
        slices = [(data[g], scale[g : g + 1] if spec.block is None else scale[g], got[g]) for g in members]
    else:
        slices = [(data, scale, got)]
        turned = dequantized(data_t, spread(scale_t, spec, tuple(data_t.shape)), spec.element, dtype)
        assert_same_bits(got_t, turned.T.contiguous(), "transposed")
    for codes, scales, values in slices:
        factors = spread(scales, spec, tuple(codes.shape))
        assert_same_bits(values, dequantized(codes, factors, spec.element, dtype))


@by_grouped_case
def test_grouped_dequantize(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    data, scale, data_t, scale_t = ops.grouped_quantize_both(input, sizes, format)
    got = ops.grouped_dequantize(data, scale, sizes, format, torch.bfloat16)
    got_t = ops.grouped_dequantize(data_t, scale_t, sizes, format, torch.bfloat16, transposed=True)
    expected = torch.zeros(input.shape, dtype=torch.bfloat16)
    expected_t = expected.clone()
    first = 0
    for size in sizes.tolist():  # each group as a matrix of its own
        rows = slice(first, first + size)
        one = ops.quantize_both(input[rows].cpu(), format)
        expected[rows] = ops.dequantize(one[0], one[1], format, torch.bfloat16)
        expected_t[rows] = ops.dequantize(one[2], one[3], format, torch.bfloat16, transposed=True)
        first += size
    assert_same_bits(got, expected)
    assert_same_bits(got_t, expected_t)


def test_transposed_is_rowwise_of_the_transpose(device: torch.device) -> None:
    for format in FORMATS:
        rows, columns = width_for(300, format), width_for(140, format)
        input = torch.randn(rows, columns, device=device)
        assert_all_same(ops.quantize_transposed(input, format), ops.quantize(input.T.contiguous(), format))


def test_layouts(device: torch.device) -> None:
    """The shapes that other ops build on, written out."""

    def shapes(outputs: tuple[Tensor, ...]) -> list[list[int]]:
        return [list(output.shape) for output in outputs]

    input = torch.ones(257, 130, device=device)
    assert shapes(ops.quantize_both(input, "fp8_tensor")) == [[257, 130], [1], [130, 257], [1]]
    assert shapes(ops.quantize_both(input, "fp8_block")) == [[257, 130], [2, 260], [130, 257], [3, 132]]
    assert shapes(ops.quantize_both(input, "fp8_block:square")) == [[257, 130], [3, 4], [130, 257], [2, 4]]
    stack = torch.ones(5, 257, 130, device=device)
    assert shapes(ops.quantize(stack, "fp8_tensor")) == [[5, 257, 130], [5]]
    assert shapes(ops.quantize_transposed(stack, "fp8_block:square")) == [[5, 130, 257], [5, 2, 4]]
    sizes = torch.tensor([1, 128, 0], device=device)
    grouped = ops.grouped_quantize_both(input, sizes, "fp8_block")
    assert shapes(grouped) == [[257, 130], [2, 260], [130, 257], [3 + 3, 132]]
    scale, scale_t = grouped[1].cpu(), grouped[3].cpu()
    assert (scale[:, :129] == 2.0**-8).all() and (scale[:, 129:] == 0).all()
    assert (scale_t[:2, :130] == 2.0**-8).all() and (scale_t[2:] == 0).all() and (scale_t[:, 130:] == 0).all()


def test_layouts_of_mxfp8(device: torch.device) -> None:
    """TransformerEngine's compact row-wise scales, in both directions; every byte of the padding is 0."""
    one = 127 - 8  # 1 / 448, up to a power of two: 2^-8

    def check(scale: Tensor, shape: tuple[int, ...], used: tuple[slice, ...]) -> None:
        assert scale.dtype == torch.float8_e8m0fnu and tuple(scale.shape) == shape
        expected = torch.zeros(shape, dtype=torch.uint8)
        expected[used] = one
        assert_same_bits(scale.cpu().view(torch.uint8), expected)

    input = torch.ones(257, 160, device=device)
    for format in ("mxfp8", "mxfp8:square"):
        data, scale, data_t, scale_t = ops.quantize_both(input, format)
        assert (tuple(data.shape), tuple(data_t.shape)) == ((257, 160), (160, 257))
        check(scale, (384, 8), (slice(257), slice(5)))
        check(scale_t, (256, 12), (slice(160), slice(9)))
        stack = ops.quantize_both(input.expand(5, 257, 160), format)
        check(stack[1], (5, 384, 8), (slice(None), slice(257), slice(5)))
        check(stack[3], (5, 256, 12), (slice(None), slice(160), slice(9)))
    sizes = torch.tensor([1, 0, 129, 64], device=device)
    data, scale, data_t, scale_t = ops.grouped_quantize_both(input, sizes, "mxfp8")
    assert not data[194:].view(torch.uint8).any() and not data_t[:, 194:].view(torch.uint8).any()
    check(scale, (384, 8), (slice(194), slice(5)))
    # Groups of 1, 0, 129 and 64 rows have 1, 0, 5 and 2 blocks, from the columns 0, 4, 4 and 12 on.
    blocks = torch.tensor([0, 4, 5, 6, 7, 8, 12, 13])
    assert scale_t.shape == (256, 4 * (3 + 4))
    expected = torch.zeros(256, 28, dtype=torch.uint8)
    expected[:160, blocks] = one
    assert_same_bits(scale_t.cpu().view(torch.uint8), expected)


def test_square_blocks_of_mxfp8_have_the_same_values_in_both_directions(device: torch.device) -> None:
    input = torch.randn(70, 96, device=device)
    data, scale, data_t, scale_t = ops.quantize_both(input, "mxfp8:square")
    assert_same_bits(data, data_t.T.contiguous())
    bytes, bytes_t = (s.cpu().view(torch.uint8) for s in (scale, scale_t))
    assert_same_bits(bytes[:70:32, :3].contiguous(), bytes_t[:96:32, :3].T.contiguous())
    got = ops.dequantize(data_t, scale_t, "mxfp8:square", transposed=True)
    assert_same_bits(got, ops.dequantize(data, scale, "mxfp8:square"))


def test_inputs_of_any_strides(device: torch.device) -> None:
    wide = torch.randn(40, 2 * 300, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 128, device=device).bfloat16()
    inputs = [
        wide[:, ::2],
        wide.T,
        torch.ones((), device=device).expand(130, 36),  # a gradient of stride 0
        flat[1:].view(24, 128),  # contiguous, but not aligned to a vector
        wide[3:17, 5:200],
        wide[3:17, 5:229],
    ]
    sizes = torch.tensor([3, 0, 8], device=device)
    for input in inputs:
        copy = input.clone(memory_format=torch.contiguous_format)
        for format in FORMATS:
            if input.shape[1] != width_for(input.shape[1], format):
                continue
            assert_all_same(ops.quantize_both(input, format), ops.quantize_both(copy, format))
            if "square" not in format:
                got = ops.grouped_quantize_both(input, sizes, format)
                assert_all_same(got, ops.grouped_quantize_both(copy, sizes, format))
    data, scale = ops.quantize(wide.T, "fp8_block")
    strided_data, strided_scale = data.T.contiguous().T, scale.T.contiguous().T
    assert not strided_data.is_contiguous()
    assert_same_bits(
        ops.dequantize(strided_data, strided_scale, "fp8_block"), ops.dequantize(data, scale, "fp8_block")
    )


def test_groups_that_are_aligned_equal_separate_matrices(device: torch.device) -> None:
    """A group's bytes do not depend on its neighbours or on the length of the buffer."""
    sizes = torch.tensor([128, 256], dtype=torch.int32, device=device)
    for format in FORMATS:
        if "square" in format:
            continue
        input = torch.randn(384, width_for(200, format), device=device)
        got = ops.grouped_quantize_both(torch.cat([input, torch.full_like(input, 1e4)]), sizes, format)
        for rows in (slice(0, 128), slice(128, 384)):
            one = ops.quantize_both(input[rows], format)
            assert_same_bits(got[0][rows].contiguous(), one[0])
            assert_same_bits(got[2][:, rows].contiguous(), one[2])


def test_not_differentiable(device: torch.device) -> None:
    input = torch.randn(4, 8, device=device, requires_grad=True)
    outputs = ops.quantize_both(input, "fp8_block")
    assert not any(output.requires_grad for output in outputs)
    assert not ops.dequantize(outputs[0], outputs[1].requires_grad_(), "fp8_block").requires_grad


def test_a_format_may_be_an_object() -> None:
    input = torch.randn(4, 8)
    format = Format("fp8_block", "e5m2", power_of_two_scales=False)
    assert_all_same(ops.quantize(input, format), ops.quantize(input, "fp8_block:e5m2,fp32"))
    sizes = torch.tensor([2, 1])
    data, scale = ops.grouped_quantize(input, sizes, format)
    assert_same_bits(
        ops.grouped_dequantize(data, scale, sizes, format),
        ops.grouped_dequantize(data, scale, sizes, "fp8_block:e5m2,fp32"),
    )
