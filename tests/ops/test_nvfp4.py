"""nvfp4: group sizes that are not multiples of 16 on a GPU, buffers for outputs, and the text of each error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.gemm_cases import quantized_arguments
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS, GROUPED_NV_FORMATS, extras


@pytest.mark.gpu
@pytest.mark.parametrize("format", GROUPED_NV_FORMATS)
def test_partial_blocks_of_groups_on_a_gpu(format: str) -> None:
    """On a GPU the host does not check that sizes are multiples of 16. Row-wise data is correct. In the transposed
    copy whole blocks are correct, and partial blocks have NaN scales and data of 0."""
    sizes = torch.tensor([16, 40, 8, 3, 129, 32])  # the groups begin at rows 0, 16, 56, 64, 67 and 196
    input = torch.randn(256, 48, generator=torch.Generator().manual_seed(0))
    if "row_scaled" in format:
        amax, amax_t = torch.full((256,), 4.0), torch.full((6, 48), 4.0)
    else:
        amax, amax_t = torch.full((6,), 4.0), torch.full((6,), 4.0)
    seed = {"seed": torch.tensor([7])} if "sr" in format else {}
    expected = reference.quantize(input, format, sizes, amax=amax, **seed)
    cuda = {name: value.cuda() for name, value in seed.items()}
    got = ops.quantize(
        input.cuda(), format, sizes.cuda(), amax=amax.cuda(), amax_t=amax_t.cuda(), **cuda, columnwise=True
    )
    assert_all_same(got[:2], expected)
    groups = torch.tensor([16, 32, 0, 0, 0, 0])
    whole = reference.quantize(input, format, groups, amax_t=amax_t, **seed, rowwise=False, columnwise=True)
    bits = got[2].view(torch.uint8).cpu()
    assert torch.equal(bits[:, :24], whole[0].view(torch.uint8)[:, :24]), "rows 0 to 47"
    assert not bits[:, 24:].any()
    values = ops.dequantize(
        got[2], got[3], format, group_sizes=sizes.cuda(), amax=amax_t.cuda(), transposed=True
    ).cpu()
    expected_values = reference.dequantize(*whole, format, group_sizes=groups, amax=amax_t, transposed=True)
    assert_same_bits(values[:48], expected_values[:48])
    assert values[48:228].isnan().all() and (values[228:] == 0).all()


@pytest.mark.parametrize("format", ["nvfp4:rht,sr", "nvfp4:row_scaled,4over6,tiled", "mxfp8:tiled"])
def test_quantize_into_buffers(format: str, device: torch.device) -> None:
    input = torch.randn(48, 64, device=device)
    more = extras(input, format)
    expected = ops.quantize(input, format, **more, columnwise=True)
    buffers = [torch.full_like(t.view(torch.uint8), 0xA5).view(t.dtype) for t in expected]
    initial = [t.view(torch.uint8).clone() for t in buffers]
    ops.quantize_out(input, format, buffers, noop=torch.ones(1, device=device), **more, columnwise=True)
    for buffer, before in zip(buffers, initial, strict=True):
        assert torch.equal(buffer.view(torch.uint8), before)
    ops.quantize_out(input, format, buffers, noop=torch.zeros(1, device=device), **more, columnwise=True)
    assert_all_same(tuple(buffers), expected)


@pytest.mark.gpu
def test_unaligned_buffers_are_refused_on_a_gpu() -> None:
    input, amax = torch.randn(16, 32, device="cuda"), torch.ones(1, device="cuda")
    scale = ops.quantize(input, "nvfp4", amax=amax)[1]
    bytes = torch.zeros(16 * 16 + 4, dtype=torch.uint8, device="cuda")
    odd = bytes[4:].view(16, 16).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError) as caught:
        ops.quantize_out(input, "nvfp4", [odd, scale], amax=amax)
    assert str(caught.value) == (
        "transformer_plugin::quantize_out: argument 'out': expected 8-byte-aligned buffers, "
        "got float4_e2m1fn_x2[16, 16] on cuda:0. Allocate them as quantize does."
    )
    assert not bytes.any()


# Errors for bad arguments: the full text.

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
        f"Compute it with transformer_plugin.ops.amax{' and columnwise=True' if transposed else ''}."
    )


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize, (ONES, "nvfp4"), ValueError, f"quantize: argument 'amax': {missing('[1]', 'nvfp4')}"),
        (partial(ops.quantize, **COLUMNS), (ONES[None], "nvfp4:rht"), ValueError,
         f"quantize: argument 'amax_t': {missing('[1]', 'nvfp4:rht', True)}"),
        (partial(ops.quantize, **COLUMNS), (ONES, "nvfp4", None, AMAX, AMAX), ValueError,
         "quantize: argument 'amax': expected None unless 'rowwise' is True, got float32[1] on cpu. Leave it out."),
        (ops.quantize, (ONES, "nvfp4", None, AMAX, AMAX), ValueError,
         "quantize: argument 'amax_t': expected None unless 'columnwise' is True, got float32[1] on cpu. Leave it "
         "out."),
        (partial(ops.quantize, **BOTH), (ONES, "nvfp4:row_scaled", None, torch.ones(16)), ValueError,
         f"quantize: argument 'amax_t': {missing('[32]', 'nvfp4:row_scaled', True)}"),
        (partial(ops.quantize, **COLUMNS), (ONES, "nvfp4:row_scaled", SIZES), ValueError,
         f"quantize: argument 'amax_t': {missing('[2, 32]', 'nvfp4:row_scaled', True)}"),
        (ops.quantize, (ONES, "nvfp4", None, torch.ones(16)), ValueError,
         "quantize: argument 'amax': expected sizes [1], the largest magnitudes that 'nvfp4' scales by, got "
         "float32[16] on cpu. Compute it with transformer_plugin.ops.amax."),
        (ops.quantize, (ONES, "nvfp4", None, AMAX, None, SEED), ValueError,
         "quantize: argument 'seed': expected None for 'nvfp4', which has no use for it, got int64[1] on cpu. "
         "Leave it out."),
        (ops.quantize, (ONES, "nvfp4:sr", None, AMAX), ValueError,
         "quantize: argument 'seed': expected an int64 tensor of size [1], which 'nvfp4:sr' draws its roundings "
         "from, got None. Pass another number in each step, for example of torch.randint."),
        (ops.quantize, (ONES, "nvfp4:sr", None, AMAX, None, SEED.int()), TypeError,
         "quantize: argument 'seed': expected one of the dtypes int64, got int32. Convert it with .to() first."),
        (ops.quantize, (ONES, "nvfp4:sr", None, AMAX, None, SEED.expand(2)), ValueError,
         "quantize: argument 'seed': expected size 1 in dimension 0 (one seed for the call), got int64[2] on "
         "cpu. Pass tensors whose sizes agree."),
        (ops.quantize, (ONES[:, :24], "nvfp4", None, AMAX), ValueError,
         "quantize: argument 'input': expected a last dimension that is a multiple of 16, the block of nvfp4, "
         f"got float32[16, 24] on cpu. {PAD}"),
        (partial(ops.quantize, **BOTH), (ONES[:8], "nvfp4", None, AMAX, AMAX), ValueError,
         "quantize: argument 'input': expected a number of rows that is a multiple of 16, the block of "
         f"nvfp4 in transposed data, got float32[8, 32] on cpu. {PAD}"),
        (partial(ops.amax, **COLUMNS), (ONES[:8], "nvfp4"), ValueError,
         "amax: argument 'input': expected a number of rows that is a multiple of 16, the block of "
         f"nvfp4 in transposed data, got float32[8, 32] on cpu. {PAD}"),
        (partial(ops.quantize, **COLUMNS), (ONES, "nvfp4", SIZES, None, torch.ones(2)), ValueError,
         "quantize: argument 'group_sizes': expected sizes that are multiples of 16, the "
         "block of nvfp4 in transposed data, got 8 for group 0. Pad the rows of each group with zeros."),
        (partial(ops.amax, **BOTH), (ONES, "nvfp4", SIZES), ValueError,
         "amax: argument 'group_sizes': expected sizes that are multiples of 16, the block of nvfp4 in "
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
        (partial(ops.gemm, **quantized_arguments((E2M1, SCALE, AMAX), (E2M1, SCALE), "nvfp4", "nvfp4")), (),
         ValueError, "gemm: argument 'b_scale': expected scale_inv and amax, 2 tensors for 'nvfp4', got 1. "
         "Pass what the operand was quantized to."),
        (partial(ops.gemm, **quantized_arguments((E2M1, SCALE, AMAX), (E2M1, SCALE, torch.ones(2)), *["nvfp4"] * 2)),
         (), ValueError, "gemm: argument 'b_scale[1]': expected sizes [1], the largest magnitudes that 'nvfp4' scales "
         "by, got float32[2] on cpu. Compute it with transformer_plugin.ops.amax."),
        (partial(ops.gemm, **quantized_arguments((E2M1, SCALE, AMAX), (E2M1[:, :8], SCALE, AMAX), *["nvfp4"] * 2)),
         (), ValueError, "gemm: argument 'b': expected size 16 in dimension 1 (the columns of 'a', summed over), got "
         "float4_e2m1fn_x2[16, 8] on cpu. Pass tensors whose sizes agree."),
        (ops.linear, (ONES, ONES, None, "nvfp4:rht", "nvfp4", "nvfp4"), ValueError,
         "linear: argument 'grad_format': expected 'rht' if and only if input_format, 'nvfp4:rht', has it, got "
         "'nvfp4'. Use the three formats of one recipe."),
        (ops.linear, (ONES, ONES, None, "nvfp4", "nvfp4:rht", "nvfp4"), ValueError,
         "linear: argument 'weight_format': expected no 'rht', which only the other two formats may have "
         "together, got 'nvfp4:rht'. Use the three formats of one recipe."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{text}"


def test_quantize_under_deterministic_algorithms(device: torch.device) -> None:
    """Deterministic algorithms fill new tensors, which torch does not support for FP4."""
    input, amax = torch.randn(16, 32, device=device), torch.ones(1, device=device)
    expected = ops.quantize(input, "nvfp4", amax=amax)
    torch.use_deterministic_algorithms(True)
    try:
        got = ops.quantize(input, "nvfp4", amax=amax)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_all_same(got, expected)
