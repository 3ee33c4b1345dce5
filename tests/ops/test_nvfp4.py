"""nvfp4, and the tiled scales that mxfp8 has too: bytes equal those of the oracles, on both devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import nvfp4_oracle, oracles
from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    GROUPED_NV_FORMATS,
    columns_of,
    extras,
    grouped_quantize_cases,
    quantize_cases,
    rows_of,
)

OPS = torch.ops.transformer_plugin
CASES = [c for c in quantize_cases() if "nvfp4" in c.name or "tiled" in c.name]
GROUPED_CASES = [c for c in grouped_quantize_cases() if "nvfp4" in c.name or "tiled" in c.name]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)


def amax_of(more: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """What dequantize is given."""
    return {"amax": more[name]} if name in more else {}


@by_case
def test_quantize(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    more = extras(input, format)
    expected = oracles.both(input, format, more)
    assert_all_same(ops.quantize_both(input, format, **more), expected)
    assert_all_same(ops.quantize(input, format, **rows_of(more)), expected[:2])
    assert_all_same(ops.quantize_transposed(input, format, **columns_of(more)), expected[2:])


@by_grouped_case
def test_grouped_quantize(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    expected = oracles.grouped_both(input, sizes.tolist(), format, more)
    assert_all_same(ops.grouped_quantize_both(input, sizes, format, **more), expected)
    assert_all_same(ops.grouped_quantize(input, sizes, format, **rows_of(more)), expected[:2])
    assert_all_same(ops.grouped_quantize_transposed(input, sizes, format, **columns_of(more)), expected[2:])


@by_case
def test_dequantize(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    more = extras(input, format)
    data, scale, data_t, scale_t = ops.quantize_both(input, format, **more)
    of_rows, of_columns = amax_of(more, "amax"), amax_of(more, "amax_t")
    got = ops.dequantize(data, scale, format, dtype, **of_rows)
    got_t = ops.dequantize(data_t, scale_t, format, dtype, transposed=True, **of_columns)
    if format in nvfp4_oracle.SPECS and input.dim() == 2 and input.numel() > 0:
        spec = nvfp4_oracle.SPECS[format]
        assert_same_bits(got, nvfp4_oracle.dequantized(data, scale, spec, more["amax"], dtype))
        expected_t = nvfp4_oracle.dequantized(data_t, scale_t, spec, more["amax_t"], dtype, transposed=True)
        assert_same_bits(got_t, expected_t, "transposed")
        return
    cpu = {name: value.cpu() for name, value in more.items()}
    of_rows, of_columns = amax_of(cpu, "amax"), amax_of(cpu, "amax_t")
    assert_same_bits(got, reference.dequantize(data.cpu(), scale.cpu(), format, dtype, **of_rows))
    expected_t = reference.dequantize(data_t.cpu(), scale_t.cpu(), format, dtype, True, **of_columns)
    assert_same_bits(got_t, expected_t, "transposed")


@by_grouped_case
def test_grouped_dequantize(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    data, scale, data_t, scale_t = ops.grouped_quantize_both(input, sizes, format, **more)
    for direction in (False, True):
        codes, scales = (data_t, scale_t) if direction else (data, scale)
        given = amax_of(more, "amax_t" if direction else "amax")
        got = ops.grouped_dequantize(codes, scales, sizes, format, torch.bfloat16, direction, **given)
        cpu = {name: value.cpu() for name, value in given.items()}
        expected = reference.grouped_dequantize(
            codes.cpu(), scales.cpu(), sizes.cpu(), format, torch.bfloat16, direction, **cpu
        )
        assert_same_bits(got, expected)


@pytest.mark.parametrize("case", [c for c in CASES if "nvfp4" in c.name], ids=lambda case: case.name)
def test_amax(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = reference.amax_both(input.cpu(), format)
    assert_all_same(ops.amax_both(input, format), expected)
    assert_same_bits(ops.amax(input, format), expected[0])
    assert_same_bits(ops.amax_transposed(input, format), expected[1])


@pytest.mark.parametrize("case", [c for c in GROUPED_CASES if "nvfp4" in c.name], ids=lambda case: case.name)
def test_grouped_amax(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    expected = reference.amax_both(input.cpu(), format, sizes.cpu())
    assert_all_same(ops.amax_both(input, format, sizes), expected)
    assert_same_bits(ops.amax(input, format, sizes), expected[0])
    assert_same_bits(ops.amax_transposed(input, format, sizes), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("format", GROUPED_NV_FORMATS)
def test_groups_of_broken_blocks_on_a_gpu(format: str) -> None:
    """Nobody sees there that sizes are no multiples of 16. Rows are right; of the transposed copy the blocks that are
    whole, and the others are NaN with codes 0."""
    sizes = torch.tensor([16, 40, 8, 3, 129, 32])  # from row 0, 16, 56, 64, 67, 196
    input = torch.randn(256, 48, generator=torch.Generator().manual_seed(0))
    if "row_scaled" in format:
        amax, amax_t = torch.full((256,), 4.0), torch.full((6, 48), 4.0)
    else:
        amax, amax_t = torch.full((6,), 4.0), torch.full((6,), 4.0)
    given = {"seed": torch.tensor([7])} if "sr" in format else {}
    expected = reference.grouped_quantize(input, sizes, format, amax, **given)
    cuda = {name: value.cuda() for name, value in given.items()}
    got = ops.grouped_quantize_both(input.cuda(), sizes.cuda(), format, amax.cuda(), amax_t.cuda(), **cuda)
    assert_all_same(got[:2], expected)
    groups = torch.tensor([16, 32, 0, 0, 0, 0])
    whole = reference.grouped_quantize_transposed(input, groups, format, amax_t, **given)
    codes = got[2].view(torch.uint8).cpu()
    assert torch.equal(codes[:, :24], whole[0].view(torch.uint8)[:, :24]), "rows 0 to 47"
    assert not codes[:, 24:].any()
    values = ops.grouped_dequantize(
        got[2], got[3], sizes.cuda(), format, transposed=True, amax=amax_t.cuda()
    ).cpu()
    expected_values = reference.grouped_dequantize(*whole, groups, format, transposed=True, amax=amax_t)
    assert_same_bits(values[:48], expected_values[:48])
    assert values[48:228].isnan().all() and (values[228:] == 0).all()


@pytest.mark.parametrize("format", ["nvfp4:rht,sr", "nvfp4:row_scaled,4over6,tiled", "mxfp8:tiled"])
def test_into_given_buffers(format: str, device: torch.device) -> None:
    input = torch.randn(48, 64, device=device)
    more = extras(input, format)
    expected = ops.quantize_both(input, format, **more)
    buffers = [torch.full_like(t.view(torch.uint8), 0xA5).view(t.dtype) for t in expected]
    kept = [t.view(torch.uint8).clone() for t in buffers]
    ops.quantize_both_out(input, format, *buffers, **more, noop=torch.ones(1, device=device))
    for buffer, before in zip(buffers, kept, strict=True):
        assert torch.equal(buffer.view(torch.uint8), before)
    ops.quantize_both_out(input, format, *buffers, **more, noop=torch.zeros(1, device=device))
    assert_all_same(tuple(buffers), expected)


@pytest.mark.gpu
def test_given_buffers_are_aligned_on_a_gpu() -> None:
    input, amax = torch.randn(16, 32, device="cuda"), torch.ones(1, device="cuda")
    scale = ops.quantize(input, "nvfp4", amax)[1]
    bytes = torch.zeros(16 * 16 + 4, dtype=torch.uint8, device="cuda")
    odd = bytes[4:].view(16, 16).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError) as caught:
        ops.quantize_out(input, "nvfp4", odd, scale, amax)
    assert str(caught.value) == (
        "transformer_plugin::quantize_out: argument 'data': expected buffers that begin at a multiple of 8 bytes, "
        "got float4_e2m1fn_x2[16, 16] on cuda:0. Make them as the op without _out returns them."
    )
    assert not bytes.any()


# As ops.

NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# torch 2.11 finds a NaN different from itself, and compares neither FP8 nor E2M1 before and after a call.
OPCHECK_CASES = [case for case in CASES if not case.name.startswith("special")]


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    more = extras(input, format)
    data, scale, data_t, scale_t = ops.quantize_both(input, format, **more)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.quantize.default, (input, format), rows_of(more), test_utils=checks)
    torch.library.opcheck(
        OPS.quantize_transposed.default, (input, format), columns_of(more), test_utils=checks
    )
    torch.library.opcheck(OPS.quantize_both.default, (input.clone().requires_grad_(), format), more)
    torch.library.opcheck(
        OPS.dequantize.default,
        (data, scale, format, torch.bfloat16),
        amax_of(more, "amax"),
        test_utils=NOT_SCHEMA,
    )
    turned = (data_t, scale_t, format, torch.float32, True)
    torch.library.opcheck(OPS.dequantize.default, turned, amax_of(more, "amax_t"), test_utils=NOT_SCHEMA)
    if "nvfp4" in format:
        torch.library.opcheck(OPS.amax_both.default, (input, format))


@by_grouped_case
def test_grouped_opcheck(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    outputs = ops.grouped_quantize_both(input, sizes, format, **more)
    torch.library.opcheck(
        OPS.grouped_quantize_both.default, (input, sizes, format), more, test_utils=NOT_SCHEMA
    )
    torch.library.opcheck(
        OPS.grouped_dequantize.default,
        (*outputs[2:], sizes, format, torch.float32, True),
        amax_of(more, "amax_t"),
        test_utils=NOT_SCHEMA[:2],
    )
    if "nvfp4" in format:
        torch.library.opcheck(OPS.amax_both.default, (input.nan_to_num(), format, sizes))


ONES = torch.ones(16, 32)
SIZES = torch.tensor([8, 8])
AMAX = torch.ones(1)
SEED = torch.zeros(1, dtype=torch.int64)
PAD = "Pad it with zeros, for example with torch.nn.functional.pad."
E2M1 = torch.zeros(16, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
SCALE = torch.zeros(128, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)


def missing(sizes: str, key: str, transposed: bool = False) -> str:
    return (
        f"expected a float32 tensor of sizes {sizes}, the largest magnitudes that '{key}' scales by, got None. "
        f"Compute it with transformer_plugin.ops.amax{'_transposed' if transposed else ''}."
    )


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize, (ONES, "nvfp4"), ValueError, f"quantize: argument 'amax': {missing('[1]', 'nvfp4')}"),
        (ops.quantize_transposed, (ONES[None], "nvfp4:rht"), ValueError,
         f"quantize_transposed: argument 'amax': {missing('[1]', 'nvfp4:rht', True)}"),
        (ops.quantize_both, (ONES, "nvfp4:row_scaled", torch.ones(16)), ValueError,
         f"quantize_both: argument 'amax_t': {missing('[32]', 'nvfp4:row_scaled', True)}"),
        (ops.grouped_quantize_transposed, (ONES, SIZES, "nvfp4:row_scaled"), ValueError,
         "grouped_quantize_transposed: argument 'amax': "
         f"{missing('[2, 32]', 'nvfp4:row_scaled', True)}"),
        (ops.quantize, (ONES, "nvfp4", torch.ones(16)), ValueError,
         "quantize: argument 'amax': expected sizes [1], the largest magnitudes that 'nvfp4' scales by, got "
         "float32[16] on cpu. Compute it with transformer_plugin.ops.amax."),
        (ops.quantize, (ONES, "nvfp4", AMAX, SEED), ValueError,
         "quantize: argument 'seed': expected None for 'nvfp4', which has no use for it, got int64[1] on cpu. "
         "Leave it out."),
        (ops.quantize, (ONES, "nvfp4:sr", AMAX), ValueError,
         "quantize: argument 'seed': expected an int64 tensor of size [1], which 'nvfp4:sr' draws its roundings "
         "from, got None. Pass another number in each step, for example of torch.randint."),
        (ops.quantize, (ONES, "nvfp4:sr", AMAX, SEED.int()), TypeError,
         "quantize: argument 'seed': expected one of the dtypes int64, got int32. Convert it with .to() first."),
        (ops.quantize, (ONES, "nvfp4:sr", AMAX, SEED.expand(2)), ValueError,
         "quantize: argument 'seed': expected size 1 in dimension 0 (one seed for the call), got int64[2] on "
         "cpu. Pass tensors whose sizes agree."),
        (ops.quantize, (ONES[:, :24], "nvfp4", AMAX), ValueError,
         "quantize: argument 'input': expected a last dimension that is a multiple of 16, the block of nvfp4, "
         f"got float32[16, 24] on cpu. {PAD}"),
        (ops.quantize_both, (ONES[:8], "nvfp4", AMAX, AMAX), ValueError,
         "quantize_both: argument 'input': expected a number of rows that is a multiple of 16, the block of "
         f"nvfp4 in transposed data, got float32[8, 32] on cpu. {PAD}"),
        (ops.amax_transposed, (ONES[:8], "nvfp4"), ValueError,
         "amax_transposed: argument 'input': expected a number of rows that is a multiple of 16, the block of "
         f"nvfp4 in transposed data, got float32[8, 32] on cpu. {PAD}"),
        (ops.grouped_quantize_transposed, (ONES, SIZES, "nvfp4", torch.ones(2)), ValueError,
         "grouped_quantize_transposed: argument 'group_sizes': expected sizes that are multiples of 16, the "
         "block of nvfp4 in transposed data, got 8 for group 0. Pad the rows of each group with zeros."),
        (ops.amax_both, (ONES, "nvfp4", SIZES), ValueError,
         "amax_both: argument 'group_sizes': expected sizes that are multiples of 16, the block of nvfp4 in "
         "transposed data, got 8 for group 0. Pad the rows of each group with zeros."),
        (ops.dequantize, (E2M1, SCALE, "nvfp4"), ValueError,
         f"dequantize: argument 'amax': {missing('[1]', 'nvfp4')}"),
        (ops.dequantize, (E2M1.view(torch.uint8), SCALE, "nvfp4"), TypeError,
         "dequantize: argument 'data': expected one of the dtypes float4_e2m1fn_x2, got uint8. Convert it with "
         ".to() first."),
        (ops.dequantize, (E2M1, SCALE.float(), "nvfp4"), TypeError,
         "dequantize: argument 'scale_inv': expected one of the dtypes float8_e4m3fn, got float32. Convert it "
         "with .to() first."),
        (ops.dequantize, (E2M1[:, :12], SCALE, "nvfp4"), ValueError,
         "dequantize: argument 'data': expected a last dimension that is a multiple of 8 bytes, the block of "
         "nvfp4, got float4_e2m1fn_x2[16, 12] on cpu. Pass data as the quantize ops return it."),
        (ops.gemm_quantized, (E2M1, SCALE, E2M1, SCALE, "nvfp4", "nvfp4", torch.float32, None, True, AMAX),
         ValueError, f"gemm_quantized: argument 'b_amax': {missing('[1]', 'nvfp4')}"),
        (ops.gemm_quantized,
         (E2M1, SCALE, E2M1[:, :8], SCALE, "nvfp4", "nvfp4", torch.float32, None, True, AMAX, AMAX), ValueError,
         "gemm_quantized: argument 'b': expected size 16 in dimension 1 (the columns of 'a', summed over), got "
         "float4_e2m1fn_x2[16, 8] on cpu. Pass tensors whose sizes agree."),
        (ops.requantize_transposed, (E2M1, SCALE, "nvfp4"), ValueError,
         "requantize_transposed: argument 'format': expected fp8_tensor, fp8_block or mxfp8, got 'nvfp4'. Take "
         "both copies of nvfp4 from quantize_both: each is scaled by an amax of its own."),
        (ops.linear, (ONES, ONES, None, "nvfp4:rht", "nvfp4", "nvfp4"), ValueError,
         "linear: argument 'grad_format': expected 'rht' if and only if input_format, 'nvfp4:rht', has it, got "
         "'nvfp4'. Take all three formats from one recipe."),
        (ops.linear, (ONES, ONES, None, "nvfp4", "nvfp4:rht", "nvfp4"), ValueError,
         "linear: argument 'weight_format': expected no 'rht', which only the other two formats may have "
         "together, got 'nvfp4:rht'. Take all three formats from one recipe."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{text}"
