"""quantize_list: each matrix has the bytes of quantize, in one launch for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.nvfp4_oracle import make_nv_spec, quantize_direction
from tests.ops.quantize_oracle import SPECS, assert_all_same, oracle_both
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES, randn
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, special_matrix, width_for

OPS = torch.ops.transformer_plugin
FORMATS = (
    "fp8_tensor",
    "fp8_tensor:e5m2,pow2",
    "fp8_block",
    "fp8_block:e5m2,fp32",
    "fp8_block:square",
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp8:square",
)
SHAPES = [(3, 5), (0, 7), (130, 129), (1, 1), (260, 512), (5, 0), (127, 258)]


def list_of(count: int, format: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns matrices of various sizes and magnitudes, one of them with a NaN and an infinity."""
    generator = torch.Generator().manual_seed(count)
    tensors = []
    for i in range(count):
        rows, columns = SHAPES[i % len(SHAPES)]
        shape = (rows, width_for(columns, format))
        tensors.append(randn(shape, dtype, device, generator, float(1 + i % 5)))
    if count > 2:
        tensors[1] = special_matrix(dtype, 288).to(device)
    return tensors


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [1, 8, 150])
def test_list_has_the_bytes_of_quantize(count: int, format: str, device: torch.device) -> None:
    dtype = FLOAT_DTYPES[(count + FORMATS.index(format)) % 3]
    tensors = list_of(count, format, dtype, device)
    both, rows = ops.quantize_list(tensors, format, columnwise=True), ops.quantize_list(tensors, format)
    assert len(both) == len(rows) == count
    meant = (
        reference.quantize_list(tensors, format, columnwise=True),
        reference.quantize_list(tensors, format),
    )
    for i, tensor in enumerate(tensors):
        expected = (
            oracle_both(tensor, SPECS[format]) if i < 20 else ops.quantize(tensor, format, columnwise=True)
        )
        assert_all_same(both[i], expected)
        assert_all_same(rows[i], expected[:2])
        if i < 20:
            assert_all_same(meant[0][i], expected)
            assert_all_same(meant[1][i], expected[:2])


NV_SPECS = {
    "nvfp4": make_nv_spec(),
    "nvfp4:square": make_nv_spec(square=True),
    "nvfp4:tiled": make_nv_spec(tiled=True),
    "nvfp4:square,tiled": make_nv_spec(square=True, tiled=True),
    "nvfp4:4over6": make_nv_spec(four_over_six="mae"),
    "nvfp4:4over6_mse,tiled": make_nv_spec(four_over_six="mse", tiled=True),
}
NV_SHAPES = [(16, 48), (0, 16), (144, 272), (128, 128), (32, 0), (272, 304)]


@pytest.mark.parametrize("format", NV_SPECS)
@pytest.mark.parametrize("count", [1, 7, 70])
def test_nvfp4_list_has_the_bytes_of_quantize(count: int, format: str, device: torch.device) -> None:
    generator, dtype = (
        torch.Generator().manual_seed(count),
        FLOAT_DTYPES[(count + list(NV_SPECS).index(format)) % 3],
    )
    tensors = [
        randn(NV_SHAPES[i % len(NV_SHAPES)], dtype, device, generator, float(1 + i % 5)) for i in range(count)
    ]
    if count > 2:
        tensors[2] = special_matrix(dtype, 288).to(device)
    own = torch.cat([ops.amax(tensor, format) for tensor in tensors])
    for amax_argument in (None, own * 1.5 + 1):
        amax = own if amax_argument is None else amax_argument
        both, rows = (
            ops.quantize_list(tensors, format, amax_argument, columnwise=True),
            ops.quantize_list(tensors, format, amax_argument),
        )
        first_six = (tensors[:6], format, None if amax_argument is None else amax_argument[:6])
        meant = reference.quantize_list(*first_six, columnwise=True) if device.type == "cpu" else both
        assert len(both) == len(rows) == count
        for i, tensor in enumerate(tensors):
            one = amax[i : i + 1]
            expected = ops.quantize(tensor, format, amax=one, amax_t=one, columnwise=True)
            assert_all_same(both[i], expected)
            assert_all_same(rows[i], expected[:2])
            if i < 6:
                assert_all_same(meant[i], expected)
                oracle = (
                    quantize_direction(tensor, NV_SPECS[format], one, None, direction) for direction in (0, 1)
                )
                assert_all_same(expected, tuple(part for direction in oracle for part in direction))


def test_rowwise_nvfp4_supports_any_number_of_rows(device: torch.device) -> None:
    """Only transposed copies require whole blocks of rows."""
    tensors = [torch.randn(rows, 32, device=device) for rows in (1, 9, 130)]
    for family in (ops, reference):
        for tensor, one in zip(tensors, family.quantize_list(tensors, "nvfp4"), strict=True):
            assert_all_same(one, ops.quantize(tensor, "nvfp4", amax=ops.amax(tensor, "nvfp4")))


def test_strided_matrices_give_the_same_bytes(device: torch.device) -> None:
    wide = torch.randn(40, 64 * 3, device=device).bfloat16()
    tensors = [wide[:, ::2], wide.T[:, :32], wide[3:9, 5:37], wide.flatten()[1:4097].view(64, 64)]
    for format in ("fp8_tensor", "fp8_block", "mxfp8"):
        got = ops.quantize_list(tensors, format, columnwise=True)
        for i, tensor in enumerate(tensors):
            assert_all_same(got[i], ops.quantize(tensor.contiguous(), format, columnwise=True))


def test_amax_argument(device: torch.device) -> None:
    tensors = [torch.randn(9, 33, device=device) for _ in range(70)]
    amax = torch.rand(70, device=device) + 1
    for family in (ops, reference):
        got = family.quantize_list(tensors, "fp8_tensor", amax)
        for i, tensor in enumerate(tensors):
            assert_all_same(got[i], ops.quantize(tensor, "fp8_tensor", amax=amax[i : i + 1]))


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "mxfp8", "nvfp4:square"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(count: int, format: str, device: torch.device) -> None:
    tensors = [torch.randn(16 * i, 64, device=device) for i in range(count)]
    opcheck(OPS.quantize_list.default, (tensors, format))
    opcheck(OPS.quantize_list.default, (tensors, format), BOTH)


def test_compiles_without_graph_breaks(device: torch.device) -> None:
    def both(tensors: list[Tensor]) -> list[Tensor]:
        pairs = ops.quantize_list([t * 2 for t in tensors], "fp8_block")
        return [ops.dequantize(data, scale, "fp8_block") for data, scale in pairs]

    tensors = [torch.randn(5 + i, 64, device=device) for i in range(3)]
    for got, expected in zip(torch.compile(both, fullgraph=True)(tensors), both(tensors), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "mxfp8"])
def test_graph_replays_with_new_data(format: str) -> None:
    tensors = [torch.randn(100 + i, 64, device="cuda") for i in range(70)]
    ops.quantize_list(tensors, format, columnwise=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.quantize_list(list(tensors), format, columnwise=True)
    for seed in range(2):
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.randn(100 + i, 64, generator=torch.Generator().manual_seed(seed * 200 + i)))
        graph.replay()
        for i, tensor in enumerate(tensors):
            assert_all_same(captured[i], ops.quantize(tensor, format, columnwise=True))


ONES = torch.ones(4, 40)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize_list, ([ONES, ONES.half()], "fp8_block"), TypeError,
         "argument 'inputs': expected float32, like the first, got float16. Convert one of them with .to() first."),
        (ops.quantize_list, ([ONES.double()], "fp8_block"), TypeError,
         "argument 'inputs': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() "
         "first."),
        (partial(ops.quantize_list, **BOTH), ([ONES[None]], "fp8_block"), ValueError,
         "argument 'inputs': expected 2 dimensions, got float32[1, 4, 40] on cpu. Reshape it first."),
        (ops.quantize_list, ([ONES], "mxfp8"), ValueError,
         "argument 'inputs': expected a last dimension that is a multiple of 32, the block of mxfp8, got float32[4, 40]"
         " on cpu. Pad it with zeros, for example with torch.nn.functional.pad."),
        (ops.quantize_list, ([ONES], "nvfp4:sr"), ValueError,
         "argument 'format': expected fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4 (without rht, sr and row_scaled), "
         "got 'nvfp4:sr'. Quantize the matrices one by one."),
        (partial(ops.quantize_list, **BOTH), ([ONES[:, :32]], "nvfp4"), ValueError,
         "argument 'inputs': expected a number of rows that is a multiple of 16, the block of nvfp4 in transposed "
         "data, got float32[4, 32] on cpu. Pad it with zeros, for example with torch.nn.functional.pad."),
        (ops.quantize_list, ([ONES], "fp8_tensor", torch.ones(2)), ValueError,
         "argument 'amax': expected size 1 in dimension 0 (one for each of 'inputs'), got float32[2] on cpu. Pass "
         "tensors whose sizes agree."),
        (ops.quantize_list, ([], "fp8_tensor", torch.ones(0)), ValueError,
         "argument 'inputs': expected at least one matrix, got none. Skip the call if there is nothing to quantize."),
        (ops.quantize_list, ([], "fp8_block"), ValueError,
         "argument 'inputs': expected at least one matrix, got none. Skip the call if there is nothing to quantize."),
        (partial(ops.quantize_list, **BOTH), ([], "mxfp8"), ValueError,
         "argument 'inputs': expected at least one matrix, got none. Skip the call if there is nothing to quantize."),
        (ops.quantize_list, ([ONES], "fp8_block", torch.ones(1)), ValueError,
         "argument 'amax': expected None for 'fp8_block', which has no use for it, got float32[1] on cpu. Leave it "
         "out."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{getattr(op, 'func', op).__name__}: {text}"
