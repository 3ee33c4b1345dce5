"""The ops of the quantize family: opcheck, compilation without graph breaks, CUDA graphs, and the text of each
error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.quantize_oracle import (
    assert_all_same,
)
from transformer_plugin import ops
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    BOTH,
    COLUMNS,
    amax_of,
    columns_of,
    extras,
    grouped_quantize_cases,
    quantize_cases,
    rows_of,
    width_for,
)

CASES = list(quantize_cases())
GROUPED_CASES = list(grouped_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)


OPS = torch.ops.transformer_plugin
# torch 2.11 cannot compare FP8 inputs before and after a call; test_dequantize_does_not_change_its_inputs
# does.
# torch 2.11 treats an FP8 NaN as not equal to itself, so cases with NaN are left out.
OPCHECK_CASES = [case for case in CASES if not case.name.startswith("special")]
# The slowest check runs only for one of the ops that share their code, and with a gradient requested.
NOT_DISPATCH = ("test_schema", "test_autograd_registration", "test_faketensor")
NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    more = extras(input, format)
    data, scale, data_t, scale_t = ops.quantize(input, format, **more, columnwise=True)
    check = opcheck
    check(OPS.quantize.default, (input, format), {**more, **BOTH})
    check(OPS.quantize.default, (input, format), rows_of(more))
    check(OPS.quantize.default, (input.requires_grad_(), format), {**columns_of(more), **COLUMNS})
    rows, columns = (
        (data, scale, format, torch.bfloat16),
        (data_t, scale_t, format, torch.float32, None, True),
    )
    check(OPS.dequantize.default, rows, amax_of(more), test_utils=NOT_SCHEMA)
    check(OPS.dequantize.default, columns, amax_of(more, transposed=True), test_utils=NOT_SCHEMA)


@by_grouped_case
def test_grouped_opcheck(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    more = extras(input, format, sizes)
    data, scale, data_t, scale_t = ops.quantize(input, format, sizes, **more, columnwise=True)
    check, arguments = opcheck, (input, format, sizes)
    check(OPS.quantize.default, arguments, rows_of(more), test_utils=NOT_DISPATCH)
    check(OPS.quantize.default, arguments, {**columns_of(more), **COLUMNS}, test_utils=NOT_DISPATCH)
    check(OPS.quantize.default, (input.requires_grad_(), format, sizes), {**more, **BOTH})
    rows = (data, scale, format, torch.bfloat16, sizes)
    columns = (data_t, scale_t, format, torch.float32, sizes, True)
    check(OPS.dequantize.default, rows, amax_of(more), test_utils=NOT_SCHEMA[:2])
    check(OPS.dequantize.default, columns, amax_of(more, transposed=True), test_utils=NOT_SCHEMA)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "nvfp4:rht,sr"])
def test_dequantize_does_not_change_its_inputs(format: str, device: torch.device) -> None:
    input = torch.randn(144, width_for(140, format), device=device)
    more = extras(input, format)
    data, scale, data_t, scale_t = ops.quantize(input, format, **more, columnwise=True)
    before = [tensor.clone() for tensor in (data, scale, data_t, scale_t)]
    ops.dequantize(data, scale, format, **amax_of(more))
    ops.dequantize(data_t, scale_t, format, transposed=True, **amax_of(more, transposed=True))
    sizes = torch.tensor([16, 112], device=device)
    more = extras(input, format, sizes)
    grouped = ops.quantize(input, format, sizes, **rows_of(more))
    before_grouped = [tensor.clone() for tensor in grouped]
    ops.dequantize(*grouped, format, group_sizes=sizes, **amax_of(more))
    for now, then in zip((data, scale, data_t, scale_t, *grouped), before + before_grouped, strict=True):
        assert_same_bits(now, then)


def extras_on_device(
    input: Tensor, format: str, sizes: Tensor, seed: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the arguments of :func:`extras`, computed by ops, so that a CUDA graph can contain them."""
    if not format.startswith("nvfp4"):
        return {}
    both = dict(zip(("amax", "amax_t"), ops.amax(input, format, sizes, columnwise=True), strict=True))
    return both if seed is None else {**both, "seed": seed}


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "nvfp4:rht"])
def test_compiles_without_graph_breaks(format: str, device: torch.device) -> None:

    def round_trip(input: Tensor, sizes: Tensor) -> Tensor:
        double = input * 2
        more = extras_on_device(double, format, sizes)
        data, scale, data_t, scale_t = ops.quantize(double, format, sizes, **more, columnwise=True)
        rows = ops.dequantize(data, scale, format, torch.bfloat16, sizes, **amax_of(more))
        columns = (data_t, scale_t, format, torch.bfloat16, sizes, True)
        return rows + ops.dequantize(*columns, **amax_of(more, transposed=True))

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True)
    for rows in (144, 48):
        input, sizes = torch.randn(rows, 64, device=device), torch.tensor([rows - 32, 0, 16], device=device)
        assert_same_bits(compiled(input, sizes), round_trip(input, sizes))


# GPU only.


@pytest.mark.gpu
def test_sizes_on_a_gpu_are_limited_to_the_buffer() -> None:
    input = torch.randn(200, 96, device="cuda")
    for sizes, limited in [([150, 100, 7], [150, 50, 0]), ([-5, 60, -1], [0, 60, 0]), ([2**40, 3], [200, 0])]:
        for format in ("fp8_tensor", "fp8_block", "mxfp8"):
            got = ops.quantize(input, format, torch.tensor(sizes, device="cuda"), columnwise=True)
            assert_all_same(got, ops.quantize(input.cpu(), format, torch.tensor(limited), columnwise=True))
            with pytest.raises(ValueError, match="sizes that fit their buffer in the calls before this one"):
                ops.check_group_sizes()


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_tensor:e5m2", "fp8_block", "mxfp8", "nvfp4:rht,sr"])
def test_graph_replays_with_new_sizes_and_data(format: str) -> None:
    columns, nvfp4 = width_for(130, format), format.startswith("nvfp4")
    input = torch.randn(304, columns, device="cuda").bfloat16()
    sizes = torch.tensor([96, 208], device="cuda")
    seed = torch.tensor([1], device="cuda") if nvfp4 else None

    def step() -> tuple[Tensor, ...]:
        more = extras_on_device(input, format, sizes, seed)
        outputs = ops.quantize(input, format, sizes, **more, columnwise=True)
        return (
            *outputs,
            ops.dequantize(*outputs[:2], format, group_sizes=sizes, **amax_of(more)),
            *(more.values() if nvfp4 else ops.quantize(input, format, columnwise=True)),
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")  # synchronization is an error
    try:
        with torch.cuda.graph(graph):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for replay, now in enumerate([[0, 0], [304, 0], [144, 48] if nvfp4 else [129, 44], [0, 256]]):
        torch.manual_seed(replay)
        input.copy_(torch.randn(304, columns) * (replay + 1))
        sizes.copy_(torch.tensor(now))
        if seed is not None:
            seed.fill_(replay - 2)
        graph.replay()
        expected = step()
        for got, wanted in zip(captured, expected, strict=True):
            assert_same_bits(got, wanted)
        here = [None if seed is None else seed.cpu(), torch.tensor(now)]
        more = extras_on_device(input.cpu(), format, here[1], here[0])
        assert_all_same(captured[:4], ops.quantize(input.cpu(), format, here[1], **more, columnwise=True))


# Errors for bad arguments: the full text.

FLOATS = "one of the dtypes float32, bfloat16, float16"
KEYS = (
    "a format key: none, bf16, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, "
    "then options like fp8_block:e4m3,pow2,square,eps=1e-12"
)
ONES = torch.ones(4, 256)
SIZES = torch.tensor([1, 2])
E4M3 = ONES.to(torch.float8_e4m3fn)
SCALE = torch.ones(2, 4)
E8M0 = torch.full((128, 8), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
# mxfp8 requires whole blocks along the columns.
ODD = torch.ones(4, 40)
WIDTH = "a last dimension that is a multiple of 32, the block of mxfp8"
PAD = "Pad it with zeros, for example with torch.nn.functional.pad."


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize, (ONES.double(), "fp8_block"), TypeError,
         f"quantize: argument 'input': expected {FLOATS}, got float64. Convert it with .to() first."),
        (partial(ops.quantize, **COLUMNS), (ONES[0], "fp8_block"), ValueError,
         "quantize: argument 'input': expected 2 or 3 dimensions, got float32[256] on cpu. "
         "Reshape it first."),
        (partial(ops.quantize, **BOTH), (ONES[None, None], "fp8_tensor"), ValueError,
         "quantize: argument 'input': expected 2 or 3 dimensions, got float32[1, 1, 4, 256] on cpu. "
         "Reshape it first."),
        (ops.quantize, (ONES, "fp9"), ValueError,
         f"quantize: argument 'format': expected {KEYS}, got 'fp9'. transformer_plugin.formats lists them."),
        (ops.quantize, (ONES, "bf16"), ValueError,
         "quantize: argument 'format': expected a format with scales, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, "
         "got 'bf16'. Use the unquantized tensor, or convert it with .to()."),
        (ops.quantize, (ONES, "mxfp8:pow2"), ValueError,
         f"quantize: argument 'format': expected {KEYS}, got 'mxfp8:pow2'. "
         "transformer_plugin.formats lists them."),
        (ops.quantize, (ODD, "mxfp8"), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got float32[4, 40] on cpu. {PAD}"),
        (partial(ops.quantize, **COLUMNS), (ODD[None], "mxfp8:square"), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got float32[1, 4, 40] on cpu. {PAD}"),
        (partial(ops.quantize, **BOTH), (ODD.bfloat16(), "mxfp8:e5m2"), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got bfloat16[4, 40] on cpu. {PAD}"),
        (ops.quantize, (ODD, "mxfp8", SIZES), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got float32[4, 40] on cpu. {PAD}"),
        (partial(ops.quantize, **COLUMNS), (ODD, "mxfp8", SIZES), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got float32[4, 40] on cpu. {PAD}"),
        (partial(ops.quantize, **BOTH), (ODD, "mxfp8", SIZES), ValueError,
         f"quantize: argument 'input': expected {WIDTH}, got float32[4, 40] on cpu. {PAD}"),
        (ops.quantize, (ONES, "fp8_block:square", SIZES), ValueError,
         "quantize: argument 'format': expected blocks along a row for a ragged matrix, whose groups "
         "do not end "
         "on square blocks, got 'fp8_block:square'. Leave out 'square'."),
        (partial(ops.quantize, **COLUMNS), (ONES[None], "fp8_block", SIZES), ValueError,
         "quantize: argument 'input': expected 2 dimensions, got float32[1, 4, 256] "
         "on cpu. "
         "Reshape it first."),
        (partial(ops.quantize, **BOTH), (ONES, "fp8_block", SIZES.float()), TypeError,
         "quantize: argument 'group_sizes': expected one of the dtypes int32, int64, got "
         "float32. "
         "Convert it with .to() first."),
        (ops.quantize, (ONES, "fp8_block", SIZES[None]), ValueError,
         "quantize: argument 'group_sizes': expected 1 dimensions, got int64[1, 2] on cpu. "
         "Reshape it first."),
        (ops.quantize, (ONES, "fp8_block", torch.tensor([2, -1])), ValueError,
         "quantize: argument 'group_sizes': expected sizes that are not negative, got -1 for "
         "group 1. "
         "Pass the number of rows of each group."),
        (ops.quantize, (ONES, "fp8_tensor", torch.tensor([2, 3])), ValueError,
         "quantize: argument 'group_sizes': expected sizes that sum to at most 4, the rows of "
         "the buffer, "
         "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes."),
        (ops.dequantize, (ONES, SCALE, "fp8_block"), TypeError,
         "dequantize: argument 'data': expected one of the dtypes float8_e4m3fn, got float32. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, SCALE, "fp8_block:e5m2"), TypeError,
         "dequantize: argument 'data': expected one of the dtypes float8_e5m2, got float8_e4m3fn. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, SCALE.double(), "fp8_block"), TypeError,
         "dequantize: argument 'scale_inv': expected one of the dtypes float32, got float64. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, SCALE, "mxfp8"), TypeError,
         "dequantize: argument 'scale_inv': expected one of the dtypes float8_e8m0fnu, got float32. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, E8M0.float(), "mxfp8:square"), TypeError,
         "dequantize: argument 'scale_inv': expected one of the dtypes float8_e8m0fnu, got float32. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, E8M0, "fp8_block"), TypeError,
         "dequantize: argument 'scale_inv': expected one of the dtypes float32, got float8_e8m0fnu. "
         "Convert it with .to() first."),
        (ops.dequantize, (E4M3, E8M0[:4], "mxfp8"), ValueError,
         "dequantize: argument 'scale_inv': expected size 128 in dimension 0 (what the format gives data "
         "of this size), got float8_e8m0fnu[4, 8] on cpu. Pass tensors whose sizes agree."),
        (ops.dequantize, (E4M3, E8M0[:, :4], "mxfp8"), ValueError,
         "dequantize: argument 'scale_inv': expected size 8 in dimension 1 (what the format gives data "
         "of this size), got float8_e8m0fnu[128, 4] on cpu. Pass tensors whose sizes agree."),
        (ops.dequantize, (E4M3, E8M0[:, :4], "mxfp8", torch.float32, SIZES), ValueError,
         "dequantize: argument 'scale_inv': expected size 8 in dimension 1 (what the format gives "
         "data of this size), got float8_e8m0fnu[128, 4] on cpu. Pass tensors whose sizes agree."),
        (ops.dequantize, (E4M3, SCALE, "fp8_tensor"), ValueError,
         "dequantize: argument 'scale_inv': expected 1 dimensions, got float32[2, 4] on cpu. Reshape it "
         "first."),
        (ops.dequantize, (E4M3, SCALE[:1], "fp8_block"), ValueError,
         "dequantize: argument 'scale_inv': expected size 2 in dimension 0 (what the format gives data "
         "of this "
         "size), got float32[1, 4] on cpu. Pass tensors whose sizes agree."),
        (ops.dequantize, (E4M3, SCALE, "fp8_block", torch.float64), TypeError,
         f"dequantize: argument 'dtype': expected {FLOATS}, got float64. Convert the result with .to()."),
        (ops.dequantize, (E4M3[0], SCALE, "fp8_block"), ValueError,
         "dequantize: argument 'data': expected 2 or 3 dimensions, got float8_e4m3fn[256] on cpu. "
         "Reshape it first."),
        (ops.dequantize, (E4M3, torch.ones(3), "fp8_tensor", torch.float32, SIZES), ValueError,
         "dequantize: argument 'scale_inv': expected size 2 in dimension 0 (what the format "
         "gives data of "
         "this size), got float32[3] on cpu. Pass tensors whose sizes agree."),
        (ops.dequantize, (E4M3, SCALE, "fp8_block", torch.float32, torch.tensor([9])), ValueError,
         "dequantize: argument 'group_sizes': expected sizes that sum to at most 4, the rows of the "
         "buffer, got a sum of 9 at group 0. Enlarge the buffer or fix the sizes."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{text}"


@pytest.mark.gpu
def test_sizes_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        ops.quantize(ONES.cuda(), "fp8_block", SIZES)
    assert str(caught.value) == (
        "transformer_plugin::quantize: argument 'group_sizes': expected a tensor on cuda:0, like "
        "input, "
        'got int64[2] on cpu. Move it with .to("cuda:0") first.'
    )
