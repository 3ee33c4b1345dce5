"""Quantize and dequantize: every value of the 16-bit types, every code, and scales by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import (
    ROW,
    Spec,
    assert_all_same,
    dequantized,
)
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import special_values

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
