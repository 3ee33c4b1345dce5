"""The quantize family. Bytes and scales equal those of an oracle in numpy, on both devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import Spec
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    grouped_quantize_cases,
    quantize_cases,
    special_values,
)

ROW, SQUARE = (1, 128), (128, 128)
SPECS = {
    "fp8_tensor": Spec("e4m3", False, None),
    "fp8_tensor:e5m2,pow2": Spec("e5m2", True, None),
    "fp8_tensor:e5m2,eps=0.25": Spec("e5m2", False, None, 0.25),
    "fp8_block": Spec("e4m3", True, ROW),
    "fp8_block:e5m2,fp32": Spec("e5m2", False, ROW),
    "fp8_block:fp32,eps=1e-3": Spec("e4m3", False, ROW, 1e-3),
    "fp8_block:square": Spec("e4m3", True, SQUARE),
    "fp8_block:e5m2,fp32,square": Spec("e5m2", False, SQUARE),
}
CASES = list(quantize_cases())
GROUPED_CASES = list(grouped_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)
NAMES = ("data", "scale", "data_transposed", "scale_transposed")


def assert_all_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for g, e, name in zip(got, expected, NAMES[: len(got)], strict=True):
        assert_same_bits(g, e, name)
        assert g.is_contiguous(), name


def oracle_both(input: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """The oracle, and what a stack of no matrices must be: nothing, in the shapes of one."""
    if input.dim() == 2 or input.shape[0] > 0:
        return oracle.quantize_both(input, spec)
    one = oracle.quantize_both(torch.zeros(1, *input.shape[1:]), spec)
    return tuple(output[:0] for output in one)


@by_case
def test_reference_agrees_with_the_oracle(case: Case) -> None:
    input, format = case.arguments()
    assert_all_same(reference.quantize_both(input, format), oracle_both(input, SPECS[format]))


@by_grouped_case
def test_grouped_reference_agrees_with_the_oracle(case: Case) -> None:
    input, sizes, format = case.arguments()
    expected = oracle.grouped_quantize_both(input, sizes.tolist(), SPECS[format])
    assert_all_same(reference.grouped_quantize_both(input, sizes, format), expected)


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


def dequantized(codes: Tensor, scales: np.ndarray, element: str, dtype: torch.dtype) -> Tensor:
    """table[code] * scale in float32, then rounded; every NaN the quiet one. One of ``scales`` for each "
    "code."""
    bits = codes.cpu().view(torch.uint8).numpy().astype(np.int64)
    entries = np.concatenate([oracle.TABLES[element], np.full(128 - len(oracle.TABLES[element]), np.nan)])
    if element == "e5m2":
        entries[0x7C] = np.inf
    values = np.where(bits & 0x80, -entries[bits & 0x7F], entries[bits & 0x7F]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = torch.from_numpy(values * scales)
    quiet = torch.tensor(float("nan")).to(dtype)
    return torch.where(product.isnan(), quiet, product.to(dtype))


def spread(scale: Tensor, spec: Spec, shape: tuple[int, int]) -> np.ndarray:
    """The stored scales of row-wise data [rows, columns], one for each element."""
    stored = scale.cpu().numpy()
    if spec.block is None:
        return np.full(shape, stored[0])
    index = np.indices(shape)
    height, width = spec.block
    if height == 1:
        return stored[index[1] // width, index[0]]
    return stored[index[0] // height, index[1] // width]


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


# Every value of the 16-bit types, and the edges of float32.


def every_value(dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0))
        values = torch.cat([special_values(), bits.to(torch.int32).view(torch.float32)])
        return values[: values.numel() // 8 * 8].reshape(8, -1)
    return torch.arange(2**16).to(torch.uint16).view(dtype).reshape(256, 256)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_at_scale_one(dtype: torch.dtype, element: str, device: torch.device) -> None:
    values = every_value(dtype)
    values[0, 0] = float("inf")  # an infinite amax makes the scale 1
    spec = Spec(element, False, None)
    got = ops.quantize_both(values.to(device), spec.key)
    assert_all_same(got, oracle.quantize_both(values, spec))
    assert got[1].item() == 1.0
    codes, nan = got[0].cpu().view(torch.uint8), values.isnan()
    assert (codes[nan] == 0x7F).all(), "NaN of either sign is 0x7F"
    largest = 0x7E if element == "e4m3" else 0x7B
    assert (codes[values == float("inf")] == largest).all()
    assert (codes[values == float("-inf")] == largest | 0x80).all()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1e-38, 3.1e-5, 0.37, 448.0, 61440.0, 2e38])
def test_every_value_at_other_scales(
    dtype: torch.dtype, element: str, largest: float, device: torch.device
) -> None:
    """epsilon sets the scale where it is above every magnitude."""
    values = every_value(dtype).reshape(-1)
    values = values[~(values.abs() > largest)]
    values = torch.cat([values, values.new_zeros(-values.numel() % 128)]).reshape(-1, 128)
    for spec in (Spec(element, False, None, largest), Spec(element, True, ROW, largest)):
        assert_all_same(ops.quantize(values.to(device), spec.key), oracle.quantize_both(values, spec)[:2])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 0.1, 2.0**-130, 1e-40, 3e38, float("inf"), float("nan"), -2.0])
def test_dequantize_every_code(scale: float, dtype: torch.dtype, element: str, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(oracle.DTYPES[element]).reshape(16, 16)
    scales = torch.tensor([scale])
    got = ops.dequantize(codes.to(device), scales.to(device), f"fp8_tensor:{element}", dtype)
    assert_same_bits(got, dequantized(codes, np.full((16, 16), scale, np.float32), element, dtype))


# Scales whose values the formulas give by hand.


@pytest.mark.parametrize(
    ("values", "dtype", "format", "code", "scale_inv"),
    [
        ([0.0, -0.0], torch.float32, "fp8_tensor", 0x00, 1.0),
        ([224.0, 1.0], torch.float32, "fp8_tensor", 0x7E, 0.5),
        ([3.0, -1.0], torch.float32, "fp8_tensor:pow2", 0x7C, 2.0**-7),  # 448/3 = 149.3, down to 128; 384
        ([3.0, -1.0], torch.float32, "fp8_tensor:eps=7", 0x74, 1 / 64),  # 448/7 = 64; 192
        (
            [3.0, -1.0],
            torch.float32,
            "fp8_tensor:eps=7,e5m2",
            0x76,
            1 / 8192,
        ),  # 57344/7 = 8192; 24576 = 1.5 2^14
        ([float("inf"), 1.0], torch.bfloat16, "fp8_block", 0x7E, 1.0),
        ([float("nan"), float("nan")], torch.float16, "fp8_block", 0x7F, 1.0),
        ([2.0**-135, 0.0], torch.float32, "fp8_tensor:pow2", 0x02, 2.0**-127),  # 448/2^-135 overflows: 2^127
        ([2.0**-133, 0.0], torch.bfloat16, "fp8_block", 0x08, 2.0**-127),
    ],
)
def test_scales_by_hand(
    values: list[float], dtype: torch.dtype, format: str, code: int, scale_inv: float, device: torch.device
) -> None:
    data, scale = ops.quantize(torch.tensor([values], dtype=dtype, device=device), format)
    assert data.cpu().view(torch.uint8)[0, 0].item() == code
    assert scale.reshape(-1)[0].item() == scale_inv


def test_a_scale_that_overflows_is_the_largest_of_the_input(device: torch.device) -> None:
    tiny = torch.full((1, 4), 1e-39).to(device)
    float32_max, bfloat16_max = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
    for format, dtype, expected in [
        ("fp8_tensor", torch.float32, float32_max),
        ("fp8_tensor", torch.bfloat16, float32_max),
        ("fp8_block:fp32", torch.float32, float32_max),
        ("fp8_block:fp32", torch.bfloat16, bfloat16_max),
    ]:
        scale = ops.quantize(tiny.to(dtype), format)[1].cpu().reshape(-1)[0]
        assert scale == 1 / torch.tensor(expected, dtype=torch.float32), (format, dtype)
        assert 0 < scale < torch.finfo(torch.float32).tiny, "a subnormal decode scale is kept"


def test_transposed_is_rowwise_of_the_transpose(device: torch.device) -> None:
    input = torch.randn(300, 140, device=device)
    for format in SPECS:
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


def test_inputs_of_any_strides(device: torch.device) -> None:
    wide = torch.randn(40, 2 * 300, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 128, device=device).bfloat16()
    inputs = [
        wide[:, ::2],
        wide.T,
        torch.ones((), device=device).expand(130, 36),  # a gradient of stride 0
        flat[1:].view(24, 128),  # contiguous, but not aligned to a vector
        wide[3:17, 5:200],
    ]
    sizes = torch.tensor([3, 0, 8], device=device)
    for input in inputs:
        copy = input.clone(memory_format=torch.contiguous_format)
        for format in SPECS:
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
    input = torch.randn(384, 200, device=device)
    sizes = torch.tensor([128, 256], dtype=torch.int32, device=device)
    for format in SPECS:
        if "square" in format:
            continue
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


OPS = torch.ops.transformer_plugin
# torch 2.11 cannot compare FP8 inputs before and after: test_dequantize_leaves_its_inputs_alone does.
# torch 2.11 finds an FP8 NaN different from itself, so the cases with NaN stay out.
OPCHECK_CASES = [case for case in CASES if not case.name.startswith("special")]
# The slowest check runs for one of the ops that share all of their code, and with a gradient wanted.
NOT_DISPATCH = ("test_schema", "test_autograd_registration", "test_faketensor")
NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    data, scale, data_t, scale_t = ops.quantize_both(input, format)
    turned = (data_t, scale_t, format, torch.float32, True)
    torch.library.opcheck(OPS.quantize_both.default, (input, format))
    torch.library.opcheck(OPS.quantize.default, (input, format))
    torch.library.opcheck(OPS.quantize_transposed.default, (input.requires_grad_(), format))
    torch.library.opcheck(
        OPS.dequantize.default, (data, scale, format, torch.bfloat16), test_utils=NOT_SCHEMA
    )
    torch.library.opcheck(OPS.dequantize.default, turned, test_utils=NOT_SCHEMA)


@by_grouped_case
def test_grouped_opcheck(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    data, scale, data_t, scale_t = ops.grouped_quantize_both(input, sizes, format)
    rowwise = (data, scale, sizes, format, torch.bfloat16)
    turned = (data_t, scale_t, sizes, format, torch.float32, True)
    torch.library.opcheck(OPS.grouped_quantize.default, (input, sizes, format), test_utils=NOT_DISPATCH)
    torch.library.opcheck(
        OPS.grouped_quantize_transposed.default, (input, sizes, format), test_utils=NOT_DISPATCH
    )
    torch.library.opcheck(OPS.grouped_quantize_both.default, (input.requires_grad_(), sizes, format))
    torch.library.opcheck(OPS.grouped_dequantize.default, rowwise, test_utils=NOT_SCHEMA[:2])
    torch.library.opcheck(OPS.grouped_dequantize.default, turned, test_utils=NOT_SCHEMA)


def test_dequantize_leaves_its_inputs_alone(device: torch.device) -> None:
    data, scale, data_t, scale_t = ops.quantize_both(torch.randn(130, 140, device=device), "fp8_block")
    before = [tensor.clone() for tensor in (data, scale, data_t, scale_t)]
    ops.dequantize(data, scale, "fp8_block")
    ops.dequantize(data_t, scale_t, "fp8_block", transposed=True)
    sizes = torch.tensor([7, 100], device=device)
    grouped = ops.grouped_quantize(torch.randn(130, 140, device=device), sizes, "fp8_block")
    kept = [tensor.clone() for tensor in grouped]
    ops.grouped_dequantize(*grouped, sizes, "fp8_block")
    for now, then in zip((data, scale, data_t, scale_t, *grouped), before + kept, strict=True):
        assert_same_bits(now, then)


def test_compiles_whole(device: torch.device) -> None:
    format = "fp8_block"

    def round_trip(input: Tensor, sizes: Tensor) -> Tensor:
        data, scale, data_t, scale_t = ops.grouped_quantize_both(input * 2, sizes, format)
        rows = ops.grouped_dequantize(data, scale, sizes, format, torch.bfloat16)
        columns = ops.grouped_dequantize(data_t, scale_t, sizes, format, torch.bfloat16, transposed=True)
        return rows + columns

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True)
    for rows in (130, 40):
        input, sizes = torch.randn(rows, 36, device=device), torch.tensor([rows - 9, 0, 4], device=device)
        assert_same_bits(compiled(input, sizes), round_trip(input, sizes))


# On a GPU only.


@pytest.mark.gpu
def test_sizes_on_a_gpu_are_cut_at_the_buffer() -> None:
    input = torch.randn(200, 70, device="cuda")
    for sizes, cut in [([150, 100, 7], [150, 50, 0]), ([-5, 60, -1], [0, 60, 0]), ([2**40, 3], [200, 0])]:
        for format in ("fp8_tensor", "fp8_block"):
            got = ops.grouped_quantize_both(input, torch.tensor(sizes, device="cuda"), format)
            assert_all_same(got, ops.grouped_quantize_both(input.cpu(), torch.tensor(cut), format))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_tensor:e5m2", "fp8_block"])
def test_cuda_graph_replays_with_other_sizes_and_data(format: str) -> None:
    input = torch.randn(300, 130, device="cuda").bfloat16()
    sizes = torch.tensor([100, 200], device="cuda")

    def step() -> tuple[Tensor, ...]:
        outputs = ops.grouped_quantize_both(input, sizes, format)
        return (
            *outputs,
            ops.grouped_dequantize(*outputs[:2], sizes, format),
            *ops.quantize_both(input, format),
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
    try:
        with torch.cuda.graph(graph):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed, now in enumerate([[0, 0], [300, 0], [129, 44], [0, 257]]):
        torch.manual_seed(seed)
        input.copy_(torch.randn(300, 130) * (seed + 1))
        sizes.copy_(torch.tensor(now))
        graph.replay()
        expected = step()
        for got, wanted in zip(captured, expected, strict=True):
            assert_same_bits(got, wanted)
        assert_all_same(captured[:4], ops.grouped_quantize_both(input.cpu(), torch.tensor(now), format))


# What bad input gets: the whole text of each error.

FLOATS = "one of the dtypes float32, bfloat16, float16"
KEYS = (
    "a format key: none, bf16, fp8_tensor or fp8_block, "
    "then options like fp8_block:e4m3,pow2,square,eps=1e-12"
)
ONES = torch.ones(4, 256)
SIZES = torch.tensor([1, 2])
E4M3 = ONES.to(torch.float8_e4m3fn)
SCALE = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize, (ONES.double(), "fp8_block"), TypeError,
         f"quantize: argument 'input': expected {FLOATS}, got float64. Convert it with .to() first."),
        (ops.quantize_transposed, (ONES[0], "fp8_block"), ValueError,
         "quantize_transposed: argument 'input': expected 2 or 3 dimensions, got float32[256] on cpu. "
         "Reshape it first."),
        (ops.quantize_both, (ONES[None, None], "fp8_tensor"), ValueError,
         "quantize_both: argument 'input': expected 2 or 3 dimensions, got float32[1, 1, 4, 256] on cpu. "
         "Reshape it first."),
        (ops.quantize, (ONES, "fp9"), ValueError,
         f"quantize: argument 'format': expected {KEYS}, got 'fp9'. transformer_plugin.formats lists them."),
        (ops.quantize, (ONES, "bf16"), ValueError,
         "quantize: argument 'format': expected a format with scales, fp8_tensor or fp8_block, got 'bf16'. "
         "Use the tensor as it is, or convert it with .to()."),
        (ops.grouped_quantize, (ONES, SIZES, "fp8_block:square"), ValueError,
         "grouped_quantize: argument 'format': expected 1x128 blocks for a ragged matrix, whose groups "
         "do not end "
         "on square blocks, got 'fp8_block:square'. Leave out 'square'."),
        (ops.grouped_quantize_transposed, (ONES[None], SIZES, "fp8_block"), ValueError,
         "grouped_quantize_transposed: argument 'input': expected 2 dimensions, got float32[1, 4, 256] "
         "on cpu. "
         "Reshape it first."),
        (ops.grouped_quantize_both, (ONES, SIZES.float(), "fp8_block"), TypeError,
         "grouped_quantize_both: argument 'group_sizes': expected one of the dtypes int32, int64, got "
         "float32. "
         "Convert it with .to() first."),
        (ops.grouped_quantize, (ONES, SIZES[None], "fp8_block"), ValueError,
         "grouped_quantize: argument 'group_sizes': expected 1 dimensions, got int64[1, 2] on cpu. "
         "Reshape it first."),
        (ops.grouped_quantize, (ONES, torch.tensor([2, -1]), "fp8_block"), ValueError,
         "grouped_quantize: argument 'group_sizes': expected sizes that are not negative, got -1 for "
         "group 1. "
         "Pass the number of rows of each group."),
        (ops.grouped_quantize, (ONES, torch.tensor([2, 3]), "fp8_tensor"), ValueError,
         "grouped_quantize: argument 'group_sizes': expected sizes that sum to at most 4, the rows of "
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
        (ops.grouped_dequantize, (E4M3, torch.ones(3), SIZES, "fp8_tensor"), ValueError,
         "grouped_dequantize: argument 'scale_inv': expected size 2 in dimension 0 (what the format "
         "gives data of "
         "this size), got float32[3] on cpu. Pass tensors whose sizes agree."),
        (ops.grouped_dequantize, (E4M3, SCALE, torch.tensor([9]), "fp8_block"), ValueError,
         "grouped_dequantize: argument 'group_sizes': expected sizes that sum to at most 4, the rows of the "
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
def test_sizes_on_another_device() -> None:
    with pytest.raises(ValueError) as caught:
        ops.grouped_quantize(ONES.cuda(), SIZES, "fp8_block")
    assert str(caught.value) == (
        "transformer_plugin::grouped_quantize: argument 'group_sizes': expected a tensor on cuda:0, like "
        "input, "
        'got int64[2] on cpu. Move it with .to("cuda:0") first.'
    )
