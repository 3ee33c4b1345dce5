"""fp8_row: data and scales have the bytes of the rule, which is written in numpy here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.quantize_oracle import DTYPES, FLT_MAX, Spec, as_numpy, round_to_fp8, scale_of
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    BOTH,
    COLUMNS,
    PER_ROW_FORMATS,
    grouped_per_row_cases,
    per_row_cases,
    special_matrix,
)

CASES, GROUPED = list(per_row_cases()), list(grouped_per_row_cases())
OPS = torch.ops.transformer_plugin
each_format = pytest.mark.parametrize("format", PER_ROW_FORMATS)


def oracle(input: Tensor, key: str = "fp8_row") -> tuple[Tensor, Tensor]:
    """Quantizes each row as a separate matrix with one scale."""
    format = Format.parse(key)
    spec = Spec(str(format.element), bool(format.power_of_two_scales), None, format.epsilon)
    rows = as_numpy(input).reshape(input.shape[:-1].numel(), input.shape[-1])
    factors = np.array([scale_of(row, spec, float(FLT_MAX)) for row in rows], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        data = round_to_fp8(rows * factors[:, None], spec.element)
    scale = torch.from_numpy(np.float32(1) / factors).view(input.shape[:-1])
    return torch.from_numpy(data).view(input.shape).view(DTYPES[spec.element]), scale


def oracle_both(input: Tensor, key: str = "fp8_row") -> tuple[Tensor, ...]:
    return *oracle(input, key), *oracle(input.mT.contiguous(), key)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], name: str = "") -> None:
    for part, one, other in zip(("data", "scale") * 2, got, expected, strict=False):
        assert_same_bits(one, other.to(one.device), f"{name} {part}")
    assert len(got) == len(expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quantize_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    input, format = case.arguments()
    expected = oracle_both(input, format)
    assert_same(reference.quantize(input, format, **BOTH), expected, "reference")
    assert_same(ops.quantize(input.to(device), format, **BOTH), expected)
    assert_same(ops.quantize(input.to(device), format), expected[:2])
    assert_same(ops.quantize(input.to(device), format, **COLUMNS), expected[2:])


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups_agree_with_the_oracle(case: Case, device: torch.device) -> None:
    """Rows do not depend on their group. Data and scales past the groups are 0, whatever the input contains there."""
    input, sizes, format = case.arguments()
    used = int(sizes.sum())
    data, scale = oracle(torch.cat([input[:used], torch.zeros_like(input[used:])]), format)
    scale[used:] = 0.0
    assert_same(reference.quantize(input, format, sizes), (data, scale), "reference")
    got = ops.quantize(input.to(device), format, sizes.to(device))
    assert_same(got, (data, scale))
    for dtype in FLOAT_DTYPES:
        values = ops.dequantize(*got, format, dtype, sizes.to(device))
        assert_same_bits(values.cpu(), reference.dequantize(data, scale, format, dtype, sizes))
        assert not values[used:].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dequantize_multiplies_by_the_scale(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    data, scale, data_t, scale_t = ops.quantize(input, format, **BOTH)
    values, values_t = data.float() * scale[..., None], (data_t.float() * scale_t[..., None]).mT
    assert_same_bits(ops.dequantize(data, scale, format, dtype), values.to(dtype))
    got = ops.dequantize(data_t, scale_t, format, dtype, transposed=True)
    assert_same_bits(got, values_t.to(dtype).contiguous())
    assert_same_bits(
        got.cpu(), reference.dequantize(data_t.cpu(), scale_t.cpu(), format, dtype, transposed=True)
    )


@each_format
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("width", [288, 291])
def test_extreme_values_agree_with_the_oracle(
    width: int, dtype: torch.dtype, format: str, device: torch.device
) -> None:
    """NaN, infinities, subnormals and the ends of the range; also rows of one such value, whose scales overflow or
    are 1."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    alone = [0.0, float("nan"), float("-inf"), tiny, -tiny, torch.finfo(dtype).max]
    rows = torch.tensor(alone, dtype=dtype)[:, None].repeat(1, width)
    input = torch.cat([special_matrix(dtype, width), rows])
    expected = oracle_both(input, format)
    assert_same(reference.quantize(input, format, **BOTH), expected, "reference")
    assert_same(ops.quantize(input.to(device), format, **BOTH), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_strided_inputs_give_the_same_bytes(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(40, 3 * 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_device = wide.to(device)
    for view in (
        lambda x: x[:, ::3],
        lambda x: x.T,
        lambda x: x.flatten()[1:4097].view(64, 64),  # rows that are not aligned to 16 bytes
        lambda x: x[3:9, 5:37],
        lambda x: x[:1].expand(7, 192),
        lambda x: x[:, None],
    ):
        assert_same(ops.quantize(view(on_device), "fp8_row", **BOTH), oracle_both(view(wide)))


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    for flags in ({}, COLUMNS, BOTH):
        opcheck(OPS.quantize.default, (input, format), flags)
        out = list(ops.quantize(input, format, **flags))
        opcheck(OPS.quantize_out.default, (input, format, out), flags)


@each_format
def test_quantize_into_buffers(format: str, device: torch.device) -> None:
    """Every byte is written in place; if the flag is set, no byte is written."""
    input = torch.randn(37, 200, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    sizes = torch.tensor([5, 0, 19], device=device)
    for groups, flags in ((None, {}), (None, COLUMNS), (None, BOTH), (sizes, {})):
        expected = ops.quantize(input, format, groups, **flags)
        out = [torch.full_like(o.view(torch.uint8), 0xA5).view(o.dtype) for o in expected]
        ops.quantize_out(input, format, out, groups, noop=torch.ones(1, device=device), **flags)
        assert all(bool((o.view(torch.uint8) == 0xA5).all()) for o in out)
        ops.quantize_out(input, format, out, groups, noop=torch.zeros(1, device=device), **flags)
        assert_same(tuple(out), expected)


def test_list_has_the_bytes_of_quantize(device: torch.device) -> None:
    tensors = [torch.randn(3 + i, 40, device=device) for i in range(70)]
    for family in (ops, reference):
        for one, tensor in zip(family.quantize_list(tensors, "fp8_row", **BOTH), tensors, strict=True):
            assert_same(one, ops.quantize(tensor, "fp8_row", **BOTH))


def test_outputs_do_not_require_gradients(device: torch.device) -> None:
    input = torch.randn(3, 16, device=device, requires_grad=True)
    assert not any(o.requires_grad for o in ops.quantize(input, "fp8_row", **BOTH))


def test_compiled(device: torch.device) -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return ops.quantize(x * 2, "fp8_row:e5m2,pow2", **BOTH)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 40), (7, 24)):
        x = torch.randn(shape, device=device)
        assert_same(compiled(x), step(x))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 1024, 2048, 8193])
def test_graph_replays_with_new_data(width: int) -> None:
    x = torch.zeros(37, width, device="cuda", dtype=torch.bfloat16)
    ops.quantize(x, "fp8_row")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.quantize(x, "fp8_row")
    for seed in range(3):
        new = torch.randn(37, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
        x.copy_(new)
        graph.replay()
        assert_same(captured, oracle(new))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 1023])
def test_more_than_32_bits_of_elements(width: int) -> None:
    """The last rows are past 2**31 elements."""
    rows = 2**31 // width + 130
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    last = torch.randn(140, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-140:] = last.cuda()
    data, scale = ops.quantize(x, "fp8_row")
    assert_same((data[-140:], scale[-140:]), oracle(last))
    assert bool((scale[:-140] == 1).all())
    assert not data[:-140].view(torch.uint8).any()


ONES, SIZES, ONE = torch.ones(2, 8), torch.tensor([1]), torch.ones(1)
E4M3 = ONES.to(torch.float8_e4m3fn)
FUSED = "expected fp8_tensor, fp8_block, mxfp8 or nvfp4, got 'fp8_row'. Call quantize, which takes fp8_row."
ONE_AMAX = (
    "expected fp8_tensor, or nvfp4 without row_scaled, whose ops take one amax for a matrix, got '{}'. With row_scaled "
    "take transformer_plugin.ops.amax; for other formats quantize computes every scale itself."
)
GROUPED_COLUMNS = (
    "expected False for fp8_row with group sizes, got True. Compute weight gradients from the unquantized matrix, or "
    "quantize it to another format."
)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize, (ONES.double(), "fp8_row"), TypeError,
         "quantize: argument 'input': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it "
         "with .to() first."),
        (ops.quantize, (ONES[0], "fp8_row"), ValueError,
         "quantize: argument 'input': expected 2 or 3 dimensions, got float32[8] on cpu. Reshape it first."),
        (ops.quantize, (ONES, "fp8_row", None, ONE), ValueError,
         "quantize: argument 'amax': expected None for 'fp8_row', which has no use for it, got float32[1] on cpu. "
         "Leave it out."),
        (partial(ops.quantize, **BOTH), (ONES, "fp8_row", SIZES), ValueError,
         f"quantize: argument 'columnwise': {GROUPED_COLUMNS}"),
        (partial(ops.quantize_out, **COLUMNS), (ONES, "fp8_row", [E4M3, ONE], SIZES), ValueError,
         f"quantize_out: argument 'columnwise': {GROUPED_COLUMNS}"),
        (ops.dequantize, (E4M3, ONE, "fp8_row", torch.float32, SIZES, True), ValueError,
         f"dequantize: argument 'transposed': {GROUPED_COLUMNS}"),
        (ops.dequantize, (E4M3, ONE, "fp8_row"), ValueError,
         "dequantize: argument 'scale_inv': expected size 2 in dimension 0 (what the format gives data of this size), "
         "got float32[1] on cpu. Pass tensors whose sizes agree."),
        (ops.amax, (ONES, "fp8_row"), ValueError,
         "amax: argument 'format': expected a format whose ops take an amax as an argument, fp8_tensor or nvfp4, "
         "got 'fp8_row'. For other formats quantize computes every scale itself."),
        (ops.activation_quantize, (ONES, "fp8_row"), ValueError,
         f"activation_quantize: argument 'format': {FUSED}"),
        (ops.activation_backward_quantize, (ONES, ONES, "fp8_row"), ValueError,
         f"activation_backward_quantize: argument 'format': {FUSED}"),
        (ops.bias_backward_quantize, (ONES, "fp8_row"), ValueError,
         f"bias_backward_quantize: argument 'format': {FUSED}"),
        (ops.requantize_transposed, (E4M3, ONE, "fp8_row"), ValueError,
         f"requantize_transposed: argument 'format': {FUSED}"),
        (ops.rms_norm_quantize, (ONES, None, 1e-5, "fp8_row"), ValueError,
         f"rms_norm_quantize: argument 'format': {FUSED}"),
        (ops.layer_norm_quantize, (ONES, None, None, 1e-5, "fp8_row"), ValueError,
         f"layer_norm_quantize: argument 'format': {FUSED}"),
        (ops.amax_list_out, ([ONES], "fp8_row", ONE), ValueError,
         f"amax_list_out: argument 'format': {ONE_AMAX.format('fp8_row')}"),
        (ops.quantize_scaled, (ONES, ONE, "fp8_row"), ValueError,
         "quantize_scaled: argument 'format': expected fp8_tensor:e4m3 or fp8_tensor:e5m2, without pow2 or eps, got "
         "'fp8_row'. The scale is given: pow2 and eps are for scales that come from the data."),
    ],
)  # fmt: skip
def test_errors(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{text}"
