"""nvfp4: every value of the 16-bit types, every bit pattern with every scale, and bytes computed by hand."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import nvfp4_oracle
from tests.ops.nvfp4_oracle import SPECS
from tests.ops.quantize_oracle import assert_all_same
from tests.ops.test_quantize_values import every_value
from transformer_plugin import ops, reference
from transformer_plugin.recipes import NVFP4BlockScaling
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

by_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
by_implementation = pytest.mark.parametrize("of", [reference, ops], ids=["reference", "ops"])


def check(values: Tensor, format: str, amax: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Quantizes row-wise with this amax, and asserts that reference and op have the bytes of the oracle."""
    expected = nvfp4_oracle.quantize_direction(values, SPECS[format], amax, None, 0)
    assert_all_same(reference.quantize(values, format, amax=amax), expected)
    assert_all_same(ops.quantize(values.to(device), format, amax=amax.to(device)), expected)
    return expected


def unpack(data: Tensor) -> Tensor:
    """Unpacks 4-bit elements, one per byte."""
    bytes = data.cpu().view(torch.uint8)
    return torch.stack([bytes & 15, bytes >> 4], -1).flatten(-2)


# Elements.

# Magnitudes in the order of their bit patterns; midpoints between neighbors, with the bit pattern that a tie
# rounds to.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIDPOINTS = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


def elements_by_hand() -> list[tuple[float, int]]:
    """Returns values and their expected bit patterns: each magnitude, each midpoint and its float32 neighbors, and
    the ends."""
    known = [(m, bits) for bits, m in enumerate(MAGNITUDES)]
    for below, (midpoint, tie) in enumerate(MIDPOINTS):
        known += [(np.nextafter(np.float32(midpoint), np.float32(0)), below), (midpoint, tie)]
        known += [(np.nextafter(np.float32(midpoint), np.float32(9)), below + 1)]
    known += [(1e-45, 0), (5.999, 7)]
    return [(float(v), bits) for v, bits in known] + [(-float(v), bits | 8) for v, bits in known]


@by_implementation
def test_elements_by_hand(of: ModuleType) -> None:
    """With the amax 6 * 448, a block that contains 6 has the scale 1, so that values are rounded without scaling."""
    known = elements_by_hand()
    assert len(known) == 2 * (8 + 3 * 7 + 2)
    rows = torch.tensor([[value] + [0.0] * 14 + [6.0] for value, _ in known])
    data, scale = of.quantize(rows, "nvfp4", amax=torch.tensor([2688.0]))
    assert (scale.view(torch.uint8)[: len(known), 0] == 0x38).all(), "E4M3 of 1"
    assert unpack(data)[:, 0].tolist() == [bits for _, bits in known]
    assert (unpack(data)[:, 1:15] == 0).all() and (unpack(data)[:, 15] == 7).all()
    back = of.dequantize(data, scale, "nvfp4", amax=torch.tensor([2688.0]))
    signed = torch.tensor([math.copysign(MAGNITUDES[bits & 7], v) for v, bits in known])
    assert_same_bits(back[:, 0].contiguous(), signed)


@by_implementation
def test_two_elements_per_byte(of: ModuleType) -> None:
    """The element with the even index is in the low half."""
    row = torch.tensor([MAGNITUDES + [-m for m in MAGNITUDES]])
    data, _ = of.quantize(row, "nvfp4", amax=torch.tensor([2688.0]))
    assert data.view(torch.uint8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


# Scales.


@by_implementation
@pytest.mark.parametrize(
    ("first", "amax", "format", "bits", "scale"),
    [
        (0.0, 0.0, "nvfp4", 0, 0x00),
        (0.0, 5.0, "nvfp4", 0, 0x00),
        (6.0, 2688.0, "nvfp4", 7, 0x38),  # S = 1; scale 6 / 6
        (6.0, 6.0, "nvfp4", 7, 0x7E),  # S = 448; a block with the amax of the matrix has the largest scale
        (3.0, 6.0, "nvfp4", 7, 0x76),  # 224
        (-3.0, 6.0, "nvfp4", 15, 0x76),
        (7.0, 6.0, "nvfp4", 7, 0x7E),  # larger than the amax: saturates
        (
            1.0,
            float("inf"),
            "nvfp4",
            7,
            0x23,
        ),  # S = 1; 1/6 = 0.1666, to 1.375 / 8 = 0.171875; 1 / 0.171 = 5.8
        (float("inf"), float("inf"), "nvfp4", 7, 0x7E),
        (float("inf"), 6.0, "nvfp4", 7, 0x7E),
        (6.0, float("nan"), "nvfp4", 7, 0x7E),  # a NaN amax counts as the smallest amax
        (float("nan"), 6.0, "nvfp4", 7, 0x00),  # the amax ignores NaN; if the scale is 0, only NaN is not 0
        (1e-45, 2688.0, "nvfp4", 0, 0x00),  # 1e-45 times the largest float32 is 4.8e-7
        (2.0**-120, 2688.0, "nvfp4", 7, 0x00),  # the element saturates, but the scale is 0
        (2.0**-149, 2.0**-149, "nvfp4", 0, 0x00),  # S is limited to the largest float32
        (6.0, 6.0, "nvfp4:4over6", 7, 0x78),  # S = 256: 6 is exact with both choices; the tie selects 6
        (6.0, 6.0, "nvfp4:4over6_mse,tiled", 7, 0x78),
    ],
)
def test_scales_by_hand(
    of: ModuleType, first: float, amax: float, format: str, bits: int, scale: int
) -> None:
    row = torch.tensor([[first] + [0.0] * 15])
    data, scales = of.quantize(row, format, amax=torch.tensor([amax]))
    assert (unpack(data)[0, 0].item(), scales.view(torch.uint8)[0, 0].item()) == (bits, scale)
    assert not scales.view(torch.uint8).flatten()[1:].any()


@by_implementation
def test_four_over_six_by_hand(of: ModuleType) -> None:
    """With the amax 6 (S = 256), mapping the block's amax of 4 to 4 makes all of its values exact; mapping it to 6
    would round 3."""
    row = torch.tensor([[4.0, 3.0, 2.0, 1.0] + [0.0] * 12])
    for format in ("nvfp4:4over6", "nvfp4:4over6_mse,tiled"):
        data, scale = of.quantize(row, format, amax=torch.tensor([6.0]))
        assert unpack(data)[0, :4].tolist() == [6, 5, 4, 2]
        assert scale.view(torch.uint8)[0, 0].item() == 0x78  # scale 4 * 256 / 6 * 1.5 = 256
    data, scale = of.quantize(row, "nvfp4", amax=torch.tensor([6.0]))
    assert unpack(data)[0, :4].tolist() == [7, 6, 5, 3]  # values times 6 / 4: 6, 4.5, 3, 1.5
    back = of.dequantize(
        *of.quantize(row, format, amax=torch.tensor([6.0])), format, amax=torch.tensor([6.0])
    )
    torch.testing.assert_close(back, row, rtol=1e-6, atol=0)


@by_implementation
@pytest.mark.parametrize(
    ("format", "second", "bits"),
    [
        ("nvfp4:4over6", 1.125, 0x70),  # 2.390625 / 6 * S = 136, a tie of 128 and 144: to the even pattern
        ("nvfp4:4over6_mse,tiled", 1.125, 0x70),
        ("nvfp4:4over6", 1.828125, 0x75),  # 204, from 192 or 208, maps 1.828125 to 3, exactly
        ("nvfp4", 1.125, 0x77),  # 2.390625 * (448 * 6 / 4.5 * (1 / 6)) = 238, from 224 or 240
    ],
)
def test_a_tie_of_two_scales(of: ModuleType, format: str, second: float, bits: int) -> None:
    """With the amax 4.5, S = 256 * 6 / 4.5 is rounded up, so that the block's amax times S / 6 would be above the
    tie. The bits are those of TransformerEngine."""
    row = torch.tensor([[2.390625] + [second] * 15])
    data, scale = of.quantize(row, format, amax=torch.tensor([4.5]))
    assert scale.view(torch.uint8)[0, 0].item() == bits
    assert unpack(data)[0, 1].item() == 5  # 3, exactly


@by_implementation
@pytest.mark.parametrize("format", ["nvfp4:4over6", "nvfp4:4over6_mse,tiled"])
@pytest.mark.parametrize(("second", "amax"), [(float("nan"), 6.0), (3.0, np.inf)])
def test_four_over_six_keeps_six(of: ModuleType, format: str, second: float, amax: float) -> None:
    """An error that is NaN is not smaller: where a value of the block is NaN, or the amax of the matrix is infinite,
    the amax of the block becomes 6, though the values 4, 3, 2 and 1 would be exact with 4."""
    row = torch.tensor([[4.0, second, 2.0, 1.0] + [0.0] * 12])
    data, _ = of.quantize(row, format, amax=torch.tensor([amax]))
    assert unpack(data)[0, 0].item() == 7


def bfloat16_values_up_to(amax: float) -> Tensor:
    """Returns [n, 16]: all bfloat16 values up to a magnitude, and NaN, 15 per row; the first column is ``amax``
    rounded to bfloat16."""
    values = every_value(torch.bfloat16).reshape(-1)
    first = torch.tensor(amax).bfloat16()
    values = values[~(values.abs() > first)]
    values = torch.cat([values, values.new_zeros(-values.numel() % 15)]).reshape(-1, 15)
    return torch.cat([first.expand(values.shape[0], 1), values], 1)


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:4over6", "nvfp4:4over6_mse,tiled"])
@pytest.mark.parametrize("amax", [0.0, 1e-40, 2.0**-126, 3.1e-5, 0.37, 6.0, 448.0, 3.3e38, np.inf])
def test_every_bfloat16_value(amax: float, format: str, device: torch.device) -> None:
    """Blocks of one amax contain every value that such a block may contain, all 65536 if it is infinite. The amax
    of the matrix ranges from below the block's amax to far above it, where scales are subnormal or 0."""
    values = bfloat16_values_up_to(amax)
    for over in (0.25, 1.0, 3.0, 448.0, 1e5, 1e8):
        check(values, format, torch.tensor([amax * over]), device)
    for amax_tensor in (0.0, 1.0, np.inf):
        check(values, format, torch.tensor([amax_tensor]), device)


@pytest.mark.parametrize("amax", [4.5, 1.0, 3.390625, 448.0, 6e4, 2.0**-100, 2.0**120])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:4over6", "nvfp4:4over6_mse,tiled"])
def test_every_bfloat16_amax_of_a_block(format: str, amax: float, device: torch.device) -> None:
    """Blocks with every bfloat16 amax from that of the matrix down to 2^-16 of it, whose scales range down to 0. The
    other values are 2/3 of the block's amax, which are better mapped to 4 of 6, or 3/4 of it, to 3 of 4."""
    every = every_value(torch.bfloat16).reshape(-1).float()
    own = every[(every >= amax * 2.0**-16) & (every <= amax)][:, None]
    for others in (2 / 3, 3 / 4):
        check(
            torch.cat([own, own * others * torch.ones(15)], 1).bfloat16(),
            format,
            torch.tensor([amax]),
            device,
        )


@by_dtype
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:row_scaled", "nvfp4:4over6"])
def test_every_value_as_the_amax_of_a_block(dtype: torch.dtype, format: str, device: torch.device) -> None:
    """Blocks of one value and 15 zeros, with one amax for the matrix, or one per row."""
    values = every_value(dtype).reshape(-1, 1)[: 2**16]
    values = torch.cat([values, values.new_zeros(values.shape[0], 15)], 1)
    own = reference.amax(values, "nvfp4:row_scaled")
    amaxes = [own] if format == "nvfp4:row_scaled" else [torch.tensor([a]) for a in (1e-30, 6e4)]
    for amax in amaxes:
        check(values, format, amax, device)


# Dequantization.


@by_dtype
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-30, 1.0, 2688.0, 3e38, float("inf")])
def test_dequantize_every_bit_pattern_with_every_scale(
    dtype: torch.dtype, amax: float, device: torch.device
) -> None:
    """256 rows of all pairs of elements, one row for each scale byte; scales 0x7F and 0xFF are NaN."""
    data = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().view(torch.float4_e2m1fn_x2)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous()
    scales, amax_tensor = scales.view(torch.float8_e4m3fn), torch.tensor([amax])
    for format in ("nvfp4", "nvfp4:4over6"):
        expected = nvfp4_oracle.dequantized(data, scales, SPECS[format], amax_tensor, dtype)
        assert_same_bits(
            reference.dequantize(data, scales, format, dtype, amax=amax_tensor), expected, "reference"
        )
        arguments = (data.to(device), scales.to(device), format, dtype)
        assert_same_bits(ops.dequantize(*arguments, amax=amax_tensor.to(device)), expected)
        transposed = ops.dequantize(*arguments, transposed=True, amax=amax_tensor.to(device))
        assert_same_bits(transposed, expected.T.contiguous(), "transposed")


def test_dequantize_unaligned_data(device: torch.device) -> None:
    """Data may be a part of a larger buffer at an odd address."""
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)).to(device)
    amax = ops.amax(values, "nvfp4")
    data, scales = ops.quantize(values, "nvfp4", amax=amax)
    buffer = torch.zeros(data.numel() + 1, dtype=torch.uint8, device=device)
    unaligned = buffer[1:].view(data.shape)
    unaligned.copy_(data.view(torch.uint8))
    got = ops.dequantize(unaligned.view(data.dtype), scales, "nvfp4", torch.bfloat16, amax=amax)
    assert_same_bits(got, ops.dequantize(data, scales, "nvfp4", torch.bfloat16, amax=amax))


@by_implementation
def test_error_is_at_most_half_a_step(of: ModuleType) -> None:
    """Half of the widest step, which is 2 if the block's amax is mapped to 6, plus the error of rounding the scale
    to E4M3, at most 1/16."""
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 3
    for format in ("nvfp4", "nvfp4:square", "nvfp4:row_scaled", "nvfp4:4over6"):
        amax = of.amax(values, format)
        back = of.dequantize(*of.quantize(values, format, amax=amax), format, amax=amax)
        block = values.abs().unflatten(1, (-1, 16)).amax(-1)
        if "square" in format:
            block = block.unflatten(0, (-1, 16)).amax(1).repeat_interleave(16, 0)
        worst = ((back - values).abs() / block.repeat_interleave(16, 1)).max()
        assert 0.1 < worst < (1 / 6) * (1 + 1 / 16) + 1 / 16, format


# Large values.


@by_implementation
@pytest.mark.parametrize(
    "format", ["nvfp4", "nvfp4:square", "nvfp4:row_scaled", "nvfp4:4over6", "nvfp4:4over6_mse"]
)
@pytest.mark.parametrize("largest", [7e35, 7.7e35, 2e36, 1e38, 3.4028234663852886e38])
def test_finite_values_stay_finite(of: ModuleType, format: str, largest: float, device: torch.device) -> None:
    """A block's scale times the amax overflows float32. Each dequantized value is element * scale * amax / bound /
    6, and its error is as small as for smaller values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(32, 64, generator=generator) * 2 - 1
    x[0, 0], x[5, 7] = 1, -1
    small, large = x.to(device), (x.double() * largest).float().to(device)
    results = []
    for values in (small, large):
        amax = of.amax(values, format)
        data, scale = of.quantize(values, format, amax=amax)
        back = of.dequantize(data, scale, format, amax=amax)
        assert back.isfinite().all() and (back.abs().amax(-1) <= amax.amax()).all()
        results.append((data, scale, amax, back))
    data, scale, amax, back = results[1]
    blocks = scale.float()[:32, :4].double().cpu().repeat_interleave(16, 1)
    bound = 256 if "4over6" in format else 448
    of_matrix = amax.double().cpu().unsqueeze(-1)
    bits = unpack(data).long()
    elements = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)[bits]
    exact = elements * blocks * of_matrix / (bound * 6)
    torch.testing.assert_close(back.double().cpu(), exact, rtol=3e-7, atol=0)
    transposed = of.dequantize(data, scale, format, torch.float32, amax=amax)
    assert_same_bits(transposed, back)
    assert ((back.double() / largest - x.to(device).double()).norm() / x.double().norm().to(device)) < 0.15


@pytest.mark.parametrize(
    ("hadamard", "largest"),
    # the rotation sums 16 values in float32
    [(False, 7.7e35), (False, 1e38), (False, 3.4e38), (True, 7.7e35), (True, 2e37)],
)
def test_products_of_large_values_are_finite(hadamard: bool, largest: float, device: torch.device) -> None:
    """Compares a layer's output and gradients, with one large operand each, with those of the operand divided by a
    constant."""
    recipe = NVFP4BlockScaling(random_hadamard=hadamard, stochastic_rounding=False)
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.rand(64, 64, generator=generator).to(device) * 2 - 1 for _ in range(3))

    def products(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        keys = recipe.input_format, recipe.weight_format, recipe.grad_format
        output = ops.linear(*leaves, None, *keys)
        return [output.detach(), *torch.autograd.grad(output, leaves, g)]

    small = [t * 1e-4 for t in (x, w, g)]
    for operand in range(3):
        amax_tensor = [
            t if i != operand else (t.double() / 1e-4 * largest).float() for i, t in enumerate(small)
        ]
        for i, (got, usual) in enumerate(zip(products(*amax_tensor), products(*small), strict=True)):
            assert got.isfinite().all()
            unused = {0: 1, 1: 2, 2: 0}[operand]  # the product that does not use this operand
            factor = 1.0 if i == unused else largest / 1e-4
            assert relative_error(got.double() / factor, usual.double()) < 0.02
