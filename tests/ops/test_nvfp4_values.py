"""nvfp4: every value of the 16-bit types, every code with every scale, and bytes by hand."""

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
    """Rows in a format under a given amax, equal to the oracle's, of the reference and the op."""
    expected = nvfp4_oracle.quantize_direction(values, SPECS[format], amax, None, 0)
    assert_all_same(reference.quantize(values, format, amax=amax), expected)
    assert_all_same(ops.quantize(values.to(device), format, amax=amax.to(device)), expected)
    return expected


def codes_of(data: Tensor) -> Tensor:
    """One code to a byte."""
    bytes = data.cpu().view(torch.uint8)
    return torch.stack([bytes & 15, bytes >> 4], -1).flatten(-2)


# Elements.

# Magnitudes in the order of codes, and the middles between neighbours with the code that a tie goes to.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIDDLES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


def elements_by_hand() -> list[tuple[float, int]]:
    """Values and their codes: each code's own, each middle and the float32 values beside it, and the ends."""
    known = [(m, code) for code, m in enumerate(MAGNITUDES)]
    for below, (middle, tie) in enumerate(MIDDLES):
        known += [(np.nextafter(np.float32(middle), np.float32(0)), below), (middle, tie)]
        known += [(np.nextafter(np.float32(middle), np.float32(9)), below + 1)]
    known += [(1e-45, 0), (5.999, 7)]
    return [(float(v), code) for v, code in known] + [(-float(v), code | 8) for v, code in known]


@by_implementation
def test_elements_by_hand(of: ModuleType) -> None:
    """A block with a 6 under the amax 6 * 448 has the scale 1, so that values are rounded as they are."""
    known = elements_by_hand()
    assert len(known) == 2 * (8 + 3 * 7 + 2)
    rows = torch.tensor([[value] + [0.0] * 14 + [6.0] for value, _ in known])
    data, scale = of.quantize(rows, "nvfp4", amax=torch.tensor([2688.0]))
    assert (scale.view(torch.uint8)[: len(known), 0] == 0x38).all(), "E4M3 of 1"
    assert codes_of(data)[:, 0].tolist() == [code for _, code in known]
    assert (codes_of(data)[:, 1:15] == 0).all() and (codes_of(data)[:, 15] == 7).all()
    back = of.dequantize(data, scale, "nvfp4", amax=torch.tensor([2688.0]))
    signed = torch.tensor([math.copysign(MAGNITUDES[code & 7], v) for v, code in known])
    assert_same_bits(back[:, 0].contiguous(), signed)


@by_implementation
def test_two_elements_to_a_byte(of: ModuleType) -> None:
    """The even element in the low half."""
    row = torch.tensor([MAGNITUDES + [-m for m in MAGNITUDES]])
    data, _ = of.quantize(row, "nvfp4", amax=torch.tensor([2688.0]))
    assert data.view(torch.uint8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


# Scales.


@by_implementation
@pytest.mark.parametrize(
    ("first", "amax", "format", "code", "scale"),
    [
        (0.0, 0.0, "nvfp4", 0, 0x00),
        (0.0, 5.0, "nvfp4", 0, 0x00),
        (6.0, 2688.0, "nvfp4", 7, 0x38),  # S = 1; 6 / 6
        (6.0, 6.0, "nvfp4", 7, 0x7E),  # S = 448; the amax itself has the largest scale
        (3.0, 6.0, "nvfp4", 7, 0x76),  # 224
        (-3.0, 6.0, "nvfp4", 15, 0x76),
        (7.0, 6.0, "nvfp4", 7, 0x7E),  # above the amax: saturates
        (
            1.0,
            float("inf"),
            "nvfp4",
            7,
            0x23,
        ),  # S = 1; 1/6 = 0.1666, to 1.375 / 8 = 0.171875; 1 / 0.171 = 5.8
        (float("inf"), float("inf"), "nvfp4", 7, 0x7E),
        (float("inf"), 6.0, "nvfp4", 7, 0x7E),
        (6.0, float("nan"), "nvfp4", 7, 0x7E),  # an amax that is NaN counts as the least one
        (float("nan"), 6.0, "nvfp4", 7, 0x00),  # NaN is in no amax; with the scale 0 only NaN is not 0
        (1e-45, 2688.0, "nvfp4", 0, 0x00),  # times the largest float32 is 4.8e-7
        (2.0**-120, 2688.0, "nvfp4", 7, 0x00),  # times the largest float32 saturates; times the scale it is 0
        (2.0**-149, 2.0**-149, "nvfp4", 0, 0x00),  # S is the largest float32, not infinite
        (6.0, 6.0, "nvfp4:4over6", 7, 0x78),  # S = 256: both map 6 exactly; the tie goes to 6
        (6.0, 6.0, "nvfp4:4over6_mse,tiled", 7, 0x78),
    ],
)
def test_scales_by_hand(
    of: ModuleType, first: float, amax: float, format: str, code: int, scale: int
) -> None:
    row = torch.tensor([[first] + [0.0] * 15])
    data, scales = of.quantize(row, format, amax=torch.tensor([amax]))
    assert (codes_of(data)[0, 0].item(), scales.view(torch.uint8)[0, 0].item()) == (code, scale)
    assert not scales.view(torch.uint8).flatten()[1:].any()


@by_implementation
def test_four_over_six_by_hand(of: ModuleType) -> None:
    """Under the amax 6 (S = 256) a block of amax 4 takes 4 -> 4 with all of its values exact; 6 -> 6 would miss 3."""
    row = torch.tensor([[4.0, 3.0, 2.0, 1.0] + [0.0] * 12])
    for format in ("nvfp4:4over6", "nvfp4:4over6_mse,tiled"):
        data, scale = of.quantize(row, format, amax=torch.tensor([6.0]))
        assert codes_of(data)[0, :4].tolist() == [6, 5, 4, 2]
        assert scale.view(torch.uint8)[0, 0].item() == 0x78  # 4 * 256 / 6 * 1.5 = 256
    data, scale = of.quantize(row, "nvfp4", amax=torch.tensor([6.0]))
    assert codes_of(data)[0, :4].tolist() == [7, 6, 5, 3]  # 4 / 6 of everything: 6, 4.5, 3, 1.5
    back = of.dequantize(
        *of.quantize(row, format, amax=torch.tensor([6.0])), format, amax=torch.tensor([6.0])
    )
    torch.testing.assert_close(back, row, rtol=1e-6, atol=0)


def every_bfloat16_under(amax: float) -> Tensor:
    """[n, 16]: the bf16 values up to a magnitude and NaN, 15 to a row, and in front the bf16 next to ``amax``."""
    values = every_value(torch.bfloat16).reshape(-1)
    first = torch.tensor(amax).bfloat16()
    values = values[~(values.abs() > first)]
    values = torch.cat([values, values.new_zeros(-values.numel() % 15)]).reshape(-1, 15)
    return torch.cat([first.expand(values.shape[0], 1), values], 1)


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:4over6", "nvfp4:4over6_mse,tiled"])
@pytest.mark.parametrize("amax", [0.0, 1e-40, 2.0**-126, 3.1e-5, 0.37, 6.0, 448.0, 3.3e38, np.inf])
def test_every_bfloat16(amax: float, format: str, device: torch.device) -> None:
    """Blocks of one amax hold every value that such a block may hold, 65536 at the infinite one; under amaxes of the
    matrix from below the block's to far above it, where the scale is subnormal or 0."""
    values = every_bfloat16_under(amax)
    for over in (0.25, 1.0, 3.0, 448.0, 1e5, 1e8):
        check(values, format, torch.tensor([amax * over]), device)
    for given in (0.0, 1.0, np.inf):
        check(values, format, torch.tensor([given]), device)


@by_dtype
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:row_scaled", "nvfp4:4over6"])
def test_every_value_as_the_amax_of_a_block(dtype: torch.dtype, format: str, device: torch.device) -> None:
    """One value and 15 zeros, under one amax, or for each row its own."""
    values = every_value(dtype).reshape(-1, 1)[: 2**16]
    values = torch.cat([values, values.new_zeros(values.shape[0], 15)], 1)
    own = reference.amax(values, "nvfp4:row_scaled")
    amaxes = [own] if format == "nvfp4:row_scaled" else [torch.tensor([a]) for a in (1e-30, 6e4)]
    for amax in amaxes:
        check(values, format, amax, device)


# Back.


@by_dtype
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-30, 1.0, 2688.0, 3e38, float("inf")])
def test_dequantize_every_code_with_every_scale(
    dtype: torch.dtype, amax: float, device: torch.device
) -> None:
    """256 rows of every pair of codes, one for each byte of a scale: 0x7F and 0xFF are NaN."""
    data = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().view(torch.float4_e2m1fn_x2)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous()
    scales, given = scales.view(torch.float8_e4m3fn), torch.tensor([amax])
    for format in ("nvfp4", "nvfp4:4over6"):
        expected = nvfp4_oracle.dequantized(data, scales, SPECS[format], given, dtype)
        assert_same_bits(reference.dequantize(data, scales, format, dtype, amax=given), expected, "reference")
        arguments = (data.to(device), scales.to(device), format, dtype)
        assert_same_bits(ops.dequantize(*arguments, amax=given.to(device)), expected)
        turned = ops.dequantize(*arguments, transposed=True, amax=given.to(device))
        assert_same_bits(turned, expected.T.contiguous(), "transposed")


def test_dequantize_from_any_byte(device: torch.device) -> None:
    """Codes may be a part of a larger buffer, from an odd byte on."""
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)).to(device)
    amax = ops.amax(values, "nvfp4")
    data, scales = ops.quantize(values, "nvfp4", amax=amax)
    buffer = torch.zeros(data.numel() + 1, dtype=torch.uint8, device=device)
    moved = buffer[1:].view(data.shape)
    moved.copy_(data.view(torch.uint8))
    got = ops.dequantize(moved.view(data.dtype), scales, "nvfp4", torch.bfloat16, amax=amax)
    assert_same_bits(got, ops.dequantize(data, scales, "nvfp4", torch.bfloat16, amax=amax))


@by_implementation
def test_values_come_back_within_half_a_step(of: ModuleType) -> None:
    """Half of the widest step, which is 2 of the 6 that a block's amax becomes, and what rounding the block's scale
    to E4M3 moves, at most 1/16."""
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
    """Where a block's scale times the amax is past float32: each value is a code times scale * amax / bound / 6, and
    those are as far from the input as smaller ones are."""
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
    codes = codes_of(data).long()
    elements = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)[codes]
    exact = elements * blocks * of_matrix / (bound * 6)
    torch.testing.assert_close(back.double().cpu(), exact, rtol=3e-7, atol=0)
    transposed = of.dequantize(data, scale, format, torch.float32, amax=amax)
    assert_same_bits(transposed, back)
    assert ((back.double() / largest - x.to(device).double()).norm() / x.double().norm().to(device)) < 0.15


@pytest.mark.parametrize(
    ("hadamard", "largest"),
    [(False, 7.7e35), (False, 1e38), (False, 3.4e38), (True, 7.7e35), (True, 2e37)],  # sums of 16, in float32
)
def test_products_of_large_values_are_finite(hadamard: bool, largest: float, device: torch.device) -> None:
    """A layer's output and gradients, each with one large operand, beside those of the operand divided by it."""
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
        given = [t if i != operand else (t.double() / 1e-4 * largest).float() for i, t in enumerate(small)]
        for i, (got, usual) in enumerate(zip(products(*given), products(*small), strict=True)):
            assert got.isfinite().all()
            unused = {0: 1, 1: 2, 2: 0}[operand]  # the product that the operand is not part of
            factor = 1.0 if i == unused else largest / 1e-4
            assert relative_error(got.double() / factor, usual.double()) < 0.02
