"""Quantize and dequantize: every value of the 16-bit types, every FP8 bit pattern, and scales computed by hand."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import (
    MX_ROW,
    ROW,
    Spec,
    assert_all_same,
    dequantized,
)
from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import special_values

# Every value of the 16-bit types, and the ends of the float32 range.


def every_value(dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0))
        values = torch.cat([special_values(), bits.to(torch.int32).view(torch.float32)])
        return values[: values.numel() // 8 * 8].reshape(8, -1)
    return torch.arange(2**16).to(torch.uint16).view(dtype).reshape(256, 256)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_with_scale_one(dtype: torch.dtype, element: str, device: torch.device) -> None:
    values = every_value(dtype)
    values[0, 0] = float("inf")  # an infinite amax makes the scale 1
    spec = Spec(element, False, None)
    got = ops.quantize(values.to(device), spec.key, columnwise=True)
    assert_all_same(got, oracle.both_directions(values, spec))
    assert got[1].item() == 1.0
    data, nan = got[0].cpu().view(torch.uint8), values.isnan()
    assert (data[nan] == 0x7F).all(), "NaN of either sign is 0x7F"
    largest = 0x7E if element == "e4m3" else 0x7B
    assert (data[values == float("inf")] == largest).all()
    assert (data[values == float("-inf")] == largest | 0x80).all()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1e-38, 3.1e-5, 0.37, 448.0, 61440.0, 2e38])
def test_every_value_with_other_scales(
    dtype: torch.dtype, element: str, largest: float, device: torch.device
) -> None:
    """epsilon determines the scale if it is larger than every magnitude."""
    values = every_value(dtype).reshape(-1)
    values = values[~(values.abs() > largest)]
    values = torch.cat([values, values.new_zeros(-values.numel() % 128)]).reshape(-1, 128)
    for spec in (Spec(element, False, None, largest), Spec(element, True, ROW, largest)):
        assert_all_same(ops.quantize(values.to(device), spec.key), oracle.both_directions(values, spec)[:2])


def bfloat16_values_up_to(amax: float) -> Tensor:
    """Returns [n, 32]: all bfloat16 values up to a magnitude, and NaN, 31 per row; the first column is ``amax``
    rounded to bfloat16."""
    values = every_value(torch.bfloat16).reshape(-1)
    first = torch.tensor(amax).bfloat16()
    values = values[~(values.abs() > first)]
    values = torch.cat([values, values.new_zeros(-values.numel() % 31)]).reshape(-1, 31)
    return torch.cat([first.expand(values.shape[0], 1), values], 1)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("amax", [0.0, 1e-40, 2.0**-126, 1e-38, 3.1e-5, 0.37, 448.0, 61440.0, 3.3e38, np.inf])
def test_every_bfloat16_value_in_blocks_of_mxfp8(amax: float, element: str, device: torch.device) -> None:
    """Blocks of one amax contain every value that such a block may contain: all 65536 if it is infinite."""
    values, spec = bfloat16_values_up_to(amax), Spec(element, True, MX_ROW)
    expected = oracle.both_directions(values, spec)
    got = reference.quantize(values, spec.key)
    assert_all_same(got, expected[:2])
    exponents = got[1].view(torch.uint8)[: values.shape[0], 0]
    assert (exponents == exponents[0]).all()
    assert_all_same(ops.quantize(values.to(device), spec.key, columnwise=True), expected)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_as_the_amax_of_a_block_of_mxfp8(
    dtype: torch.dtype, element: str, device: torch.device
) -> None:
    """Blocks of one value and 31 zeros: the scale of every amax, including the ends of the float32 range."""
    values = every_value(dtype).reshape(-1, 1)
    values = torch.cat([values, values.new_zeros(values.shape[0], 31)], 1)
    spec = Spec(element, True, MX_ROW)
    expected = oracle.both_directions(values, spec)[:2]
    assert_all_same(reference.quantize(values, spec.key), expected)
    assert_all_same(ops.quantize(values.to(device), spec.key), expected)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize_every_bit_pattern_with_every_scale_of_mxfp8(
    dtype: torch.dtype, element: str, device: torch.device
) -> None:
    """256 rows of all bit patterns, one row for each scale byte: 0 is 2^-127, and 255 is NaN."""
    data = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().view(oracle.DTYPES[element])
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    scales = scales.view(torch.float8_e8m0fnu)
    expected = dequantized(data, oracle.MX_SCALES.astype(np.float32)[:, None], element, dtype)
    key = f"mxfp8:{element}"
    assert_same_bits(reference.dequantize(data, scales, key, dtype), expected, "reference")
    assert_same_bits(ops.dequantize(data.to(device), scales.to(device), key, dtype), expected)
    transposed = ops.dequantize(data.to(device), scales.to(device), key, dtype, transposed=True)
    assert_same_bits(transposed, expected.T.contiguous(), "transposed")


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 0.1, 2.0**-130, 1e-40, 3e38, float("inf"), float("nan"), -2.0])
def test_dequantize_every_bit_pattern(
    scale: float, dtype: torch.dtype, element: str, device: torch.device
) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(oracle.DTYPES[element]).reshape(16, 16)
    scales = torch.tensor([scale])
    got = ops.dequantize(data.to(device), scales.to(device), f"fp8_tensor:{element}", dtype)
    assert_same_bits(got, dequantized(data, np.full((16, 16), scale, np.float32), element, dtype))


# Scales that follow from the formulas by hand.


@pytest.mark.parametrize(
    ("values", "dtype", "format", "bits", "scale_inv"),
    [
        ([0.0, -0.0], torch.float32, "fp8_tensor", 0x00, 1.0),
        ([224.0, 1.0], torch.float32, "fp8_tensor", 0x7E, 0.5),
        (
            [3.0, -1.0],
            torch.float32,
            "fp8_tensor:pow2",
            0x7C,
            2.0**-7,
        ),  # 448/3 = 149.3, rounded down to 128; 384
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
    values: list[float], dtype: torch.dtype, format: str, bits: int, scale_inv: float, device: torch.device
) -> None:
    data, scale = ops.quantize(torch.tensor([values], dtype=dtype, device=device), format)
    assert data.cpu().view(torch.uint8)[0, 0].item() == bits
    assert scale.reshape(-1)[0].item() == scale_inv


@pytest.mark.parametrize("of", [reference, ops], ids=["reference", "ops"])
@pytest.mark.parametrize(
    ("values", "format", "bits", "exponent"),
    [
        ([0.0, -0.0], "mxfp8", 0x00, 0),
        ([float("nan"), float("nan")], "mxfp8", 0x7F, 0),
        ([float("nan"), 448.0], "mxfp8", 0x7F, 127),  # the amax ignores NaN
        ([448.0, 1.0], "mxfp8", 0x7E, 127),
        ([449.0, 1.0], "mxfp8", 0x76, 128),  # rounded up to 2: 224.5 becomes 224
        ([3.0, -1.0], "mxfp8", 0x7C, 127 - 7),  # 3/448 = 0.0067, rounded up to 2^-7; 384
        (
            [3.0, -1.0],
            "mxfp8:e5m2",
            0x7A,
            127 - 14,
        ),  # 3/57344 = 0.000052, rounded up to 2^-14; 49152 = 1.5 2^15
        ([float("inf"), 1.0], "mxfp8", 0x7E, 254),
        ([-float("inf"), 1.0], "mxfp8:e5m2", 0xFB, 254),
        ([2.0**-149, 0.0], "mxfp8", 0x00, 0),  # times 2^127 is 2^-22
        ([448 * 2.0**-127, 0.0], "mxfp8", 0x7E, 0),
        ([449 * 2.0**-127, 0.0], "mxfp8", 0x76, 1),
    ],
)
def test_scales_of_mxfp8_by_hand(
    of: ModuleType, values: list[float], format: str, bits: int, exponent: int
) -> None:
    block = torch.tensor([values + [0.0] * 30])
    data, scale = of.quantize(block, format)
    assert data.view(torch.uint8)[0, 0].item() == bits
    assert scale.view(torch.uint8)[0, 0].item() == exponent


def test_overflowing_scale_is_the_largest_input_value(device: torch.device) -> None:
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
