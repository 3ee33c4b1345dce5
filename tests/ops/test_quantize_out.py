"""Quantize into buffers: the bytes of quantize, written in place, or nothing written if the noop flag is set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.quantize_oracle import SPECS, assert_all_same, oracle_both
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case, randn
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS, grouped_quantize_cases, quantize_cases

OPS = torch.ops.transformer_plugin
CASES = [case for case in quantize_cases() if not ("nvfp4" in case.name or "tiled" in case.name)]
GROUPED = [case for case in grouped_quantize_cases() if not ("nvfp4" in case.name or "tiled" in case.name)]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)


def buffers_like(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns buffers of the same shapes and dtypes, with every byte 0xA5."""
    buffers = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(0xA5)
    return buffers


def raw(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [t.view(torch.uint8).clone() for t in tensors]


def check(
    function: Callable[..., None],
    case: tuple[Any, ...],
    expected: tuple[Tensor, ...],
    device: torch.device,
    **flags: bool,
) -> None:
    """Asserts that every byte is written in place, and that no byte is written if the flag is set."""
    input, *sizes, format = case
    for flag in (None, torch.full((1,), 0.5, device=device)):
        buffers = buffers_like(expected)
        addresses = [b.data_ptr() for b in buffers]
        function(input, format, buffers, *sizes, noop=flag, **flags)
        assert_all_same(tuple(buffers), expected)
        assert [b.data_ptr() for b in buffers] == addresses
    buffers = buffers_like(expected)
    initial = raw(buffers)
    function(input, format, buffers, *sizes, noop=torch.ones(1, device=device), **flags)
    for now, then in zip(raw(buffers), initial, strict=True):
        assert torch.equal(now, then)


@by_case
def test_quantize_into_buffers(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = oracle_both(input, SPECS[format])
    expected = tuple(e.to(device) for e in expected)
    for family in (ops, reference):
        if family is reference and device.type != "cpu":
            continue
        check(family.quantize_out, (input, format), expected, device, **BOTH)
        check(family.quantize_out, (input, format), expected[:2], device)
        check(family.quantize_out, (input, format), expected[2:], device, **COLUMNS)


@by_grouped_case
def test_quantize_groups_into_buffers(case: Case, device: torch.device) -> None:
    input, sizes, format = arguments = case.arguments(device)
    # Other tests compare these bytes with an oracle.
    expected = ops.quantize(input, format, sizes, columnwise=True)
    for family in (ops, reference):
        if family is reference and device.type != "cpu":
            continue
        check(family.quantize_out, arguments, expected, device, **BOTH)
        check(family.quantize_out, arguments, expected[:2], device)
        check(family.quantize_out, arguments, expected[2:], device, **COLUMNS)


def test_amax_argument(device: torch.device) -> None:
    input, amax = torch.randn(40, 32, device=device), torch.tensor([2.5], device=device)
    expected = ops.quantize(input, "fp8_tensor", amax=amax, columnwise=True)
    buffers = buffers_like(expected)
    ops.quantize_out(input, "fp8_tensor", buffers, amax=amax, columnwise=True)
    assert_all_same(tuple(buffers), expected)


@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.startswith("special")][::5], ids=lambda c: c.name
)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    flag = torch.zeros(1, device=device)
    both = list(ops.quantize(input, format, columnwise=True))
    opcheck(OPS.quantize_out.default, (input, format, both), {"noop": flag, **BOTH})
    opcheck(OPS.quantize_out.default, (input, format, both[:2]))
    opcheck(OPS.quantize_out.default, (input, format, both[2:]), COLUMNS)


@pytest.mark.parametrize("case", GROUPED[::7], ids=lambda case: case.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_grouped_opcheck(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    both = list(ops.quantize(input, format, sizes, columnwise=True))
    opcheck(OPS.quantize_out.default, (input, format, both, sizes), BOTH)
    opcheck(OPS.quantize_out.default, (input, format, both[:2], sizes))
    opcheck(OPS.quantize_out.default, (input, format, both[2:], sizes), COLUMNS)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "mxfp8"])
def test_compiles_without_graph_breaks(format: str, device: torch.device) -> None:
    """Compiled code writes the caller's buffers, and respects the flag."""
    input = torch.randn(70, 96, device=device)
    flag = torch.zeros(1, device=device)

    def fill(x: Tensor, data: Tensor, scale: Tensor, noop: Tensor) -> Tensor:
        ops.quantize_out(x * 2, format, [data, scale], noop=noop)
        return ops.dequantize(data, scale, format)

    # torch 2.11's Inductor does not support E8M0 tensors that an op writes ("auto_functionalized_v2 was not
    # removed").
    backend = "aot_eager" if format == "mxfp8" else "inductor"
    compiled = torch.compile(fill, fullgraph=True, backend=backend)
    expected = ops.quantize(input * 2, format)
    buffers = buffers_like(expected)
    got = compiled(input, *buffers, flag)
    assert_all_same(tuple(buffers), expected)
    assert_same_bits(got, ops.dequantize(*expected, format))
    compiled(input + 1, *buffers, flag + 1)
    assert_all_same(tuple(buffers), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block:square", "mxfp8"])
def test_graph_replays_write_the_same_buffers(format: str) -> None:
    """Each replay fills the same buffers from new data, or leaves them unchanged, as the flag says."""
    weight = torch.randn(300, 160, device="cuda")
    flag = torch.zeros(1, device="cuda")
    buffers = buffers_like(ops.quantize(weight, format, columnwise=True))
    addresses = [b.data_ptr() for b in buffers]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.quantize_out(weight, format, buffers, noop=flag, columnwise=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.quantize_out(weight, format, buffers, noop=flag, columnwise=True)
    expected = None
    for seed, now in enumerate([0.0, 1.0, 0.0, 1.0]):
        weight.copy_(torch.randn(300, 160, generator=torch.Generator().manual_seed(seed)))
        flag.fill_(now)
        graph.replay()
        if now == 0.0:
            expected = ops.quantize(weight.cpu(), format, columnwise=True)
        assert_all_same(tuple(buffers), expected)
    assert [b.data_ptr() for b in buffers] == addresses


# Lists of tensors.


def list_of(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    shapes = [(3, 5), (0, 7), (130, 129), (1, 1), (64, 512), (1, 16385), (300, 301)]
    tensors = [
        randn(shapes[i % len(shapes)], dtype, device, generator, float(1 + i % 5)) for i in range(count)
    ]
    if count > 4:
        tensors[2][0, 1], tensors[4][1, 1] = float("nan"), float("-inf")
        tensors[3].fill_(float("nan"))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 300])
def test_amax_list_agrees_with_a_loop(count: int, dtype: torch.dtype, device: torch.device) -> None:
    tensors = list_of(count, dtype, device)
    expected = torch.zeros(count)
    for i, tensor in enumerate(tensors):
        numbers = [abs(v) for v in tensor.flatten().tolist() if v == v]
        expected[i] = max(numbers, default=0.0)
    for family in (ops, reference):
        amax, amax_t = torch.full((count,), 77.0, device=device), torch.full((count,), -1.0, device=device)
        family.amax_list_out(tensors, "fp8_tensor", amax, amax_t, torch.zeros(1, device=device))
        assert_same_bits(amax.cpu(), expected)
        assert_same_bits(amax_t.cpu(), expected)
        initial = torch.full((count,), 77.0, device=device)
        family.amax_list_out(tensors, "fp8_tensor", initial, noop=torch.ones(1, device=device))
        assert (initial == 77).all()


def test_amax_list_of_strided_tensors(device: torch.device) -> None:
    wide = torch.randn(40, 66, device=device)
    flat = torch.randn(1 + 64 * 1024, device=device)
    tensors = [wide[:, ::2], wide.T, wide[3:9, 5:8], flat[1:].view(64, 1024)]
    amax = torch.zeros(4, device=device)
    ops.amax_list_out(tensors, "fp8_tensor:e5m2", amax)
    assert_same_bits(amax, torch.stack([t.abs().amax() for t in tensors]))


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:square,sr", "nvfp4:4over6"])
def test_amax_list_of_nvfp4_agrees_with_amax(format: str, device: torch.device) -> None:
    tensors = [torch.randn(16 * (i % 3), 48, device=device).bfloat16() * (i + 1) for i in range(140)]
    amax, amax_t = torch.zeros(140, device=device), torch.zeros(140, device=device)
    for family in (ops, reference):
        family.amax_list_out(tensors, format, amax, amax_t)
        for i, tensor in enumerate(tensors):
            one, one_t = ops.amax(tensor, format, columnwise=True)
            assert_same_bits(amax[i : i + 1], one)
            assert_same_bits(amax_t[i : i + 1], one_t)
    rotated = torch.zeros(140, device=device)
    ops.amax_list_out(tensors, "nvfp4:rht", rotated)
    assert_same_bits(rotated, amax)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_amax_list_opcheck(count: int, device: torch.device) -> None:
    tensors = [torch.randn(5, 7, device=device) for _ in range(count)]
    buffers = torch.zeros(count, device=device), torch.zeros(count, device=device)
    opcheck(OPS.amax_list_out.default, (tensors, "fp8_tensor", *buffers))
    opcheck(OPS.amax_list_out.default, (tensors, "fp8_tensor", buffers[0]))


@pytest.mark.gpu
def test_graph_replays_of_amax_list() -> None:
    """The graph keeps the addresses, also after the captured list is gone."""
    tensors = [torch.randn(100 + i, 33, device="cuda") for i in range(140)]
    amax, flag = torch.zeros(140, device="cuda"), torch.zeros(1, device="cuda")
    ops.amax_list_out(tensors, "fp8_tensor", amax, noop=flag)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.amax_list_out(list(tensors), "fp8_tensor", amax, noop=flag)
    for seed in range(3):
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.randn(100 + i, 33, generator=torch.Generator().manual_seed(seed * 200 + i)))
        graph.replay()
        assert_same_bits(amax, torch.stack([t.abs().amax() for t in tensors]))
    flag.fill_(1)
    initial = amax.clone()
    tensors[0].fill_(100.0)
    graph.replay()
    assert_same_bits(amax, initial)


# Errors for bad arguments.

ONES = torch.ones(4, 64)
DATA, SCALE = (t.clone() for t in ops.quantize(ONES, "fp8_block"))


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize_out, (ONES, "fp8_block", [DATA.float(), SCALE]), TypeError,
         "argument 'out[0]': expected one of the dtypes float8_e4m3fn, got float32. Allocate it as quantize does."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA[:3], SCALE]), ValueError,
         "argument 'out[0]': expected a contiguous tensor of sizes [4, 64], got float8_e4m3fn[3, 64] on cpu with "
         "strides [64, 1]. Allocate it as quantize does."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA.T.contiguous().T, SCALE]), ValueError,
         "argument 'out[0]': expected a contiguous tensor of sizes [4, 64], got float8_e4m3fn[4, 64] on cpu with "
         "strides [1, 4]. Allocate it as quantize does."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA, SCALE.double()]), TypeError,
         "argument 'out[1]': expected one of the dtypes float32, got float64. Allocate it as quantize does."),
        (ops.quantize_out, (ONES, "mxfp8", [DATA, SCALE]), TypeError,
         "argument 'out[1]': expected one of the dtypes float8_e8m0fnu, got float32. Allocate it as quantize does."),
        (partial(ops.quantize_out, **BOTH), (ONES, "fp8_block", [DATA, SCALE]), ValueError,
         "argument 'out': expected 4 tensors, data and scale of each direction, got 2. Pass the tensors that quantize "
         "returns for the same directions."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA, SCALE, DATA]), ValueError,
         "argument 'out': expected 2 tensors, data and scale of each direction, got 3. Pass the tensors that quantize "
         "returns for the same directions."),
        (partial(ops.quantize_out, rowwise=False), (ONES, "fp8_block", []), ValueError,
         "argument 'rowwise': expected True unless 'columnwise' is, so that there is a result, got False for both. "
         "Pass True for one of them."),
        (partial(ops.quantize_out, **COLUMNS), (ONES, "fp8_block", [DATA, SCALE]), ValueError,
         "argument 'out[0]': expected a contiguous tensor of sizes [64, 4], got float8_e4m3fn[4, 64] on cpu with "
         "strides [64, 1]. Allocate it as quantize does."),
        (partial(ops.quantize_out, **BOTH), (ONES, "fp8_block", [DATA, SCALE, DATA.T.contiguous(), SCALE]), ValueError,
         "argument 'out[3]': expected a contiguous tensor of sizes [1, 64], got float32[1, 4] on cpu with strides "
         "[4, 1]. Allocate it as quantize does."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA, SCALE], None, None, None, None, torch.zeros(2)), ValueError,
         "argument 'noop': expected size 1 in dimension 0 (one flag: 1 leaves every byte unchanged), got float32[2] on "
         "cpu. Pass tensors whose sizes agree."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA, SCALE], None, None, None, None, torch.zeros(1).int()), TypeError,
         "argument 'noop': expected one of the dtypes float32, got int32. Convert it with .to() first."),
        (ops.quantize_out, (ONES, "fp8_block", [DATA, SCALE], torch.tensor([2, 9])), ValueError,
         "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 11 at "
         "group 1. Enlarge the buffer or fix the sizes."),
        (ops.amax_list_out, ([ONES, ONES.half()], "fp8_tensor", torch.zeros(2)), TypeError,
         "argument 'inputs': expected float32, like the first, got float16. Convert one of them with .to() first."),
        (ops.amax_list_out, ([ONES, ONES[0]], "fp8_tensor", torch.zeros(2)), ValueError,
         "argument 'inputs': expected 2 dimensions, got float32[64] on cpu. Reshape it first."),
        (ops.amax_list_out, ([ONES], "fp8_tensor", torch.zeros(2)), ValueError,
         "argument 'amax': expected size 1 in dimension 0 (one for each of 'inputs'), got float32[2] on cpu. Pass "
         "tensors whose sizes agree."),
        (ops.amax_list_out, ([ONES], "mxfp8", torch.zeros(1)), ValueError,
         "argument 'format': expected fp8_tensor, or nvfp4 without row_scaled, whose ops take one amax for a "
         "matrix, got 'mxfp8'. With row_scaled take transformer_plugin.ops.amax; for other formats quantize computes "
         "every scale itself."),
        (ops.amax_list_out, ([ONES], "nvfp4:rht", torch.zeros(1), torch.zeros(1)), ValueError,
         "argument 'amax_t': expected None for 'nvfp4:rht', whose columns are rotated first, got float32[1] on cpu. "
         "Take those of transformer_plugin.ops.amax with columnwise=True."),
        (ops.amax_list_out, ([ONES[:, :24]], "nvfp4", torch.zeros(1)), ValueError,
         "argument 'inputs': expected a last dimension that is a multiple of 16, the block of nvfp4, got "
         "float32[4, 24] on cpu. Pad it with zeros, for example with torch.nn.functional.pad."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., None], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    buffers = [b for a in arguments[2:] for b in (a if isinstance(a, list) else [a]) if isinstance(b, Tensor)]
    initial = [b.clone() for b in buffers]
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{getattr(op, 'func', op).__name__}: {text}"
    for now, then in zip(buffers, initial, strict=True):
        assert_same_bits(now, then)
