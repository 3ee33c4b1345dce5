"""Quantization in two phases: the amax alone, then quantize with an amax as an argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    BOTH,
    COLUMNS,
    TENSOR_FORMATS,
    grouped_quantize_cases,
    quantize_cases,
)

OPS = torch.ops.transformer_plugin
CASES = [case for case in quantize_cases() if case.arguments()[1] in TENSOR_FORMATS]
GROUPED_CASES = [case for case in grouped_quantize_cases() if case.arguments()[2] in TENSOR_FORMATS]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)
# opcheck compares inputs before and after the call, and NaN is not equal to itself.
NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def largest(parts: list[np.ndarray]) -> Tensor:
    """Returns the amax of each matrix, in numpy: NaN is ignored, and the amax of no elements is 0."""
    values = [np.abs(part[~np.isnan(part)]).max(initial=0) for part in parts]
    return torch.from_numpy(np.array(values, np.float32).reshape(-1))


@by_case
def test_amax(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = largest([oracle.as_numpy(m) for m in (input if input.dim() == 3 else [input])])
    assert_same_bits(reference.amax(input.cpu(), format), expected)
    assert_same_bits(ops.amax(input, format), expected)
    assert_same_bits(ops.amax(input, format, rowwise=False, columnwise=True), expected)
    both = ops.amax(input, format, columnwise=True)
    assert_all_same(both, (expected, expected))
    assert both[0].data_ptr() != both[1].data_ptr() or both[0].numel() == 0


@by_grouped_case
def test_grouped_amax(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    parts = input[: int(sizes.sum())].split(sizes.tolist())
    expected = largest([oracle.as_numpy(part) for part in parts])
    assert_same_bits(reference.amax(input.cpu(), format, sizes.cpu()), expected)
    assert_same_bits(ops.amax(input, format, sizes), expected)
    assert_same_bits(ops.amax(input, format, sizes, rowwise=False, columnwise=True), expected)
    assert_all_same(ops.amax(input, format, sizes, columnwise=True), (expected, expected))


@by_case
def test_quantize_with_its_own_amax_is_unchanged(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    amax, expected = ops.amax(input, format), ops.quantize(input, format, columnwise=True)
    assert_all_same(ops.quantize(input, format, amax=amax), expected[:2])
    assert_all_same(ops.quantize(input, format, amax=amax, rowwise=False, columnwise=True), expected[2:])
    assert_all_same(ops.quantize(input, format, amax=amax, columnwise=True), expected)


@by_grouped_case
def test_grouped_quantize_with_its_own_amax_is_unchanged(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    amax, expected = ops.amax(input, format, sizes), ops.quantize(input, format, sizes, columnwise=True)
    assert_all_same(ops.quantize(input, format, sizes, amax=amax), expected[:2])
    assert_all_same(
        ops.quantize(input, format, sizes, amax=amax, rowwise=False, columnwise=True), expected[2:]
    )
    assert_all_same(ops.quantize(input, format, sizes, amax=amax, columnwise=True), expected)


@pytest.mark.parametrize("value", [0.0, 1e-45, 0.37, 3.0, 1e30, float("inf"), float("nan")])
def test_quantize_with_another_amax(value: float, device: torch.device) -> None:
    """The scale is computed from the amax argument, and larger elements saturate. The scale is 1 if the amax is 0,
    infinite or NaN."""
    input = torch.randn(130, 140, generator=torch.Generator().manual_seed(0))
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.float32(448) / np.float32(value)
    if value == 0.0 or not np.isfinite(value):
        scale = np.float32(1)
    scale = min(scale, oracle.FLT_MAX)
    with np.errstate(over="ignore"):
        fp8 = oracle.round_to_fp8(input.numpy() * scale, "e4m3")
    data = torch.from_numpy(fp8).view(torch.float8_e4m3fn)
    scale_inv = torch.tensor([np.float32(1) / scale])
    expected = (data, scale_inv, data.T.contiguous(), scale_inv)
    amax = torch.tensor([value])
    assert_all_same(reference.quantize(input, "fp8_tensor", amax=amax, columnwise=True), expected)
    assert_all_same(
        ops.quantize(input.to(device), "fp8_tensor", amax=amax.to(device), columnwise=True), expected
    )


def test_quantize_uses_the_amax_of_each_matrix_or_group(device: torch.device) -> None:
    stack = torch.randn(3, 40, 24, device=device)
    amax = torch.tensor([0.5, 4.0, 100.0], device=device)
    got = ops.quantize(stack, "fp8_tensor", amax=amax, columnwise=True)
    assert_all_same(got, reference.quantize(stack.cpu(), "fp8_tensor", amax=amax.cpu(), columnwise=True))
    for g in range(3):
        one = ops.quantize(stack[g], "fp8_tensor", amax=amax[g : g + 1])
        assert_all_same((got[0][g], got[1][g : g + 1]), one)
    input, sizes = stack.reshape(120, 24), torch.tensor([17, 0, 90], device=device)
    grouped = ops.quantize(input, "fp8_tensor", sizes, amax=amax, columnwise=True)
    expected = reference.quantize(input.cpu(), "fp8_tensor", sizes.cpu(), amax=amax.cpu(), columnwise=True)
    assert_all_same(grouped, expected)
    one = ops.quantize(input[17:107], "fp8_tensor", amax=amax[2:])
    assert_all_same((grouped[0][17:107], grouped[1][2:]), one)


def test_halves_with_a_shared_amax_equal_the_whole(device: torch.device) -> None:
    """Two halves quantized with the larger of their amaxes equal the halves of the quantized whole."""
    input = torch.randn(256, 96, device=device).bfloat16()
    halves = input.split(128)
    shared = torch.maximum(*(ops.amax(half, "fp8_tensor") for half in halves))
    parts = [ops.quantize(half, "fp8_tensor", amax=shared) for half in halves]
    whole = ops.quantize(input, "fp8_tensor")
    for half, part in zip(whole[0].split(128), parts, strict=True):
        assert_all_same(part, (half, whole[1]))


def test_strided_amax_gives_the_same_bits(device: torch.device) -> None:
    stack = torch.randn(3, 16, 32, device=device)
    amax = torch.rand(3, 2, device=device)
    got = ops.quantize(stack, "fp8_tensor", amax=amax[:, 1])
    assert_all_same(got, ops.quantize(stack, "fp8_tensor", amax=amax[:, 1].contiguous()))


@by_case
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    special = case.name.startswith("special")
    checks = {"test_utils": NOT_SCHEMA} if special else {}
    opcheck(OPS.amax.default, (input, format), **checks)
    opcheck(OPS.amax.default, (input, format), COLUMNS, **checks)
    opcheck(OPS.amax.default, (input.clone().requires_grad_(), format), BOTH, **checks)
    if special:
        return
    amax = ops.amax(input, format)
    opcheck(OPS.quantize.default, (input, format, None, amax))
    opcheck(OPS.quantize.default, (input, format, None, amax), COLUMNS, test_utils=NOT_SCHEMA)
    opcheck(OPS.quantize.default, (input, format, None, amax.requires_grad_()), BOTH)


@by_grouped_case
def test_grouped_opcheck(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    input = input.nan_to_num()
    amax = ops.amax(input, format, sizes)
    for flags in ({}, COLUMNS, BOTH):
        opcheck(OPS.amax.default, (input, format, sizes), flags)
        opcheck(OPS.quantize.default, (input, format, sizes, amax), flags, test_utils=NOT_SCHEMA)


def test_compiles_without_graph_breaks(device: torch.device) -> None:
    def split(input: Tensor) -> tuple[Tensor, ...]:
        amax = ops.amax(input, "fp8_tensor") * 2
        return ops.quantize(input, "fp8_tensor", amax=amax, columnwise=True)

    compiled = torch.compile(split, fullgraph=True, dynamic=True)
    for rows in (130, 40):
        input = torch.randn(rows, 64, device=device)
        assert_all_same(compiled(input), split(input))


ONES = torch.ones(4, 256)
SIZES = torch.tensor([1, 2])
AMAX = torch.ones(1)
E4M3 = ONES.to(torch.float8_e4m3fn)
PER_TENSOR = (E4M3, AMAX, "fp8_tensor")
BLOCKS = (E4M3, torch.ones(2, 4))
SEED = torch.zeros(1, dtype=torch.int64)
SCALES_BY = "the largest magnitudes that 'fp8_tensor' scales by"
COMPUTE = "Compute it with transformer_plugin.ops.amax."


def one_scale(key: str) -> str:
    return f"expected scale_inv, 1 tensor for '{key}', got 2. Pass what the operand was quantized to."


def no_use(key: str, got: str) -> str:
    return f"expected None for '{key}', which has no use for it, got {got} on cpu. Leave it out."


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.amax, (ONES, "fp8_block"), ValueError,
         "amax: argument 'format': expected a format whose ops take an amax as an argument, fp8_tensor "
         "or nvfp4, got 'fp8_block'. For other formats quantize computes every scale itself."),
        (partial(ops.amax, **COLUMNS), (ONES, "mxfp8"), ValueError,
         "amax: argument 'format': expected a format whose ops take an amax as an argument, fp8_tensor "
         "or nvfp4, got 'mxfp8'. For other formats quantize computes every scale itself."),
        (partial(ops.amax, **BOTH), (ONES, "bf16"), ValueError,
         "amax: argument 'format': expected a format with scales, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, got "
         "'bf16'. Use the unquantized tensor, or convert it with .to()."),
        (ops.amax, (ONES.double(), "fp8_tensor"), TypeError,
         "amax: argument 'input': expected one of the dtypes float32, bfloat16, float16, got float64. "
         "Convert it with .to() first."),
        (ops.amax, (ONES[0], "fp8_tensor"), ValueError,
         "amax: argument 'input': expected 2 or 3 dimensions, got float32[256] on cpu. Reshape it first."),
        (ops.amax, (ONES[None], "fp8_tensor", SIZES), ValueError,
         "amax: argument 'input': expected 2 dimensions, got float32[1, 4, 256] on cpu. Reshape it first."),
        (ops.amax, (ONES, "fp8_tensor", SIZES.float()), TypeError,
         "amax: argument 'group_sizes': expected one of the dtypes int32, int64, got float32. "
         "Convert it with .to() first."),
        (partial(ops.amax, **BOTH), (ONES, "fp8_tensor", torch.tensor([2, 3])), ValueError,
         "amax: argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
         "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes."),
        (ops.quantize, (ONES, "fp8_tensor", None, AMAX.double()), TypeError,
         "quantize: argument 'amax': expected one of the dtypes float32, got float64. "
         "Convert it with .to() first."),
        (partial(ops.quantize, **COLUMNS), (ONES, "fp8_tensor", None, torch.ones(2)), ValueError,
         f"quantize: argument 'amax': expected sizes [1], {SCALES_BY}, got float32[2] on cpu. {COMPUTE}"),
        (partial(ops.quantize, **BOTH), (ONES[None, :2], "fp8_tensor", None, torch.ones(())), ValueError,
         f"quantize: argument 'amax': expected sizes [1], {SCALES_BY}, got float32[] on cpu. {COMPUTE}"),
        (ops.quantize, (ONES, "fp8_tensor", SIZES, AMAX), ValueError,
         f"quantize: argument 'amax': expected sizes [2], {SCALES_BY}, got float32[1] on cpu. "
         f"{COMPUTE}"),
        (partial(ops.quantize, **BOTH), (ONES, "fp8_tensor", SIZES, AMAX.to("meta").expand(2)), ValueError,
         "quantize: argument 'amax': expected a tensor on cpu, like input, got float32[2] on "
         'meta. Move it with .to("cpu") first.'),
        (partial(ops.quantize, **BOTH), (ONES, "fp8_tensor", None, AMAX, AMAX), ValueError,
         f"quantize: argument 'amax_t': {no_use('fp8_tensor', 'float32[1]')}"),
        (ops.quantize, (ONES, "fp8_block", None, AMAX), ValueError,
         f"quantize: argument 'amax': {no_use('fp8_block', 'float32[1]')}"),
        (partial(ops.quantize, **BOTH), (ONES, "mxfp8", None, None, AMAX), ValueError,
         f"quantize: argument 'amax_t': {no_use('mxfp8', 'float32[1]')}"),
        (ops.quantize, (ONES, "fp8_tensor", None, None, None, SEED), ValueError,
         f"quantize: argument 'seed': {no_use('fp8_tensor', 'int64[1]')}"),
        (partial(ops.quantize, **COLUMNS), (ONES, "fp8_block", SIZES, None, None, SEED), ValueError,
         f"quantize: argument 'seed': {no_use('fp8_block', 'int64[1]')}"),
        (ops.dequantize, (*PER_TENSOR, torch.float32, None, False, AMAX), ValueError,
         f"dequantize: argument 'amax': {no_use('fp8_tensor', 'float32[1]')}"),
        (ops.dequantize, (E4M3, torch.ones(2), "fp8_tensor", torch.float32, SIZES, False, AMAX),
         ValueError, f"dequantize: argument 'amax': {no_use('fp8_tensor', 'float32[1]')}"),
        (partial(ops.gemm, **quantized_arguments((*BLOCKS, AMAX), BLOCKS, "fp8_block", "fp8_block")), (),
         ValueError, f"gemm: argument 'a_scale': {one_scale('fp8_block')}"),
        (partial(ops.gemm, **quantized_arguments(BLOCKS, (*BLOCKS, AMAX), "fp8_block", "fp8_block")), (),
         ValueError, f"gemm: argument 'b_scale': {one_scale('fp8_block')}"),
        (partial(ops.grouped_gemm, group_sizes=SIZES, **quantized_arguments(
            (E4M3, torch.ones(2)), (E4M3.expand(2, 4, 256), torch.ones(2), AMAX), "fp8_tensor", "fp8_tensor")), (),
         ValueError, f"grouped_gemm: argument 'b_scale': {one_scale('fp8_tensor')}"),
        (partial(ops.grouped_gemm_wgrad, group_sizes=SIZES, **wgrad_arguments(
            (E4M3, torch.ones(2), AMAX), (E4M3, torch.ones(2)), "fp8_tensor", "fp8_tensor")), (),
         ValueError, f"grouped_gemm_wgrad: argument 'grad_scale': {one_scale('fp8_tensor')}"),
        (partial(ops.grouped_gemm_wgrad_out, group_sizes=SIZES, out=torch.ones(2, 4, 4), **wgrad_arguments(
            (E4M3, torch.ones(2)), (E4M3, torch.ones(2), AMAX), "fp8_tensor", "fp8_tensor")), (),
         ValueError, f"grouped_gemm_wgrad_out: argument 'input_scale': {one_scale('fp8_tensor')}"),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{text}"
