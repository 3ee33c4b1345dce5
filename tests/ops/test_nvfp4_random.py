"""nvfp4: the rotation, stochastic rounding and its random number generator, and tiled scales."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import nvfp4_oracle
from tests.ops.test_nvfp4_values import MAGNITUDES, unpack
from transformer_plugin import ops, reference
from transformer_plugin.reference import _nvfp4
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.numerics import assert_same_bits

by_implementation = pytest.mark.parametrize("of", [reference, ops], ids=["reference", "ops"])
UNIT = torch.tensor([2688.0])  # with this amax of the matrix, a block of amax 6 has the scale 1


# The random number generator.

# From the "known answer tests" of Random123, the authors' own library: counter, key, result.
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX)
def test_philox_gives_the_published_results(counter: str, key: str, result: str) -> None:
    c, k, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, result))
    got = nvfp4_oracle.philox([np.array([word]) for word in c], k)
    assert [int(word[0]) for word in got] == expected
    words = _nvfp4.philox(tuple(map(torch.tensor, c)), tuple(map(torch.tensor, k)))
    assert [int(word) for word in words] == expected


# Stochastic rounding.


def blocks_of_scale_one(rows: int) -> Tensor:
    """Returns blocks that begin with a 6 and have the scale 1; their other values are between -6 and 6."""
    values = torch.rand(rows, 64, generator=torch.Generator().manual_seed(1)) * 12 - 6
    values[:, ::16] = 6.0
    return values


def stochastically_rounded(
    of: ModuleType, values: Tensor, seed: int, device: str | torch.device = "cpu"
) -> Tensor:
    """Returns the dequantized values, which with the scale 1 are the rounded values."""
    seed_tensor = torch.tensor([seed], device=device)
    data, scale = of.quantize(values.to(device), "nvfp4:sr", amax=UNIT.to(device), seed=seed_tensor)
    rows, columns = values.shape
    assert (scale.view(torch.uint8)[:rows, : columns // 16] == 0x38).all()
    bits = unpack(data)
    return torch.tensor(MAGNITUDES)[(bits & 7).long()] * torch.where(bits >= 8, -1.0, 1.0)


@by_implementation
def test_values_round_to_a_neighbor(of: ModuleType) -> None:
    values = blocks_of_scale_one(256)
    grid = torch.tensor(MAGNITUDES)
    below = grid[torch.searchsorted(grid, values.abs(), right=True) - 1]
    above = grid[torch.searchsorted(grid, values.abs()).clamp(max=7)]
    seen = [stochastically_rounded(of, values, seed) for seed in (0, 1, -1, 2**62)]
    for got in seen:
        assert ((got.abs() == below) | (got.abs() == above)).all()
        assert (got.sign() * values.sign() >= 0).all()
    both = (seen[0].abs() == below) & (seen[1].abs() == above) & (below != above)
    assert both.sum() > 1000, "another seed rounds differently"
    exact = torch.tensor(MAGNITUDES * 8).view(4, 16)
    exact[:, 0] = 6.0
    assert torch.equal(stochastically_rounded(of, exact, 7), exact), "representable values do not change"


@by_implementation
@pytest.mark.parametrize("value", [0.1, 0.25, 1.4, 2.3, -2.9, 3.5, 4.5, -5.75])
def test_stochastic_rounding_is_unbiased(of: ModuleType, value: float) -> None:
    """Over 10^6 values the mean is within 1/256 of a step and four standard errors of the exact value."""
    values = torch.full((2**20 // 60, 64), value)
    values[:, ::16] = 6.0
    drawn = stochastically_rounded(of, values, 12345).unflatten(1, (-1, 16))[..., 1:].double()
    assert drawn.numel() > 10**6
    step = 0.5 if abs(value) < 2 else 1.0 if abs(value) < 4 else 2.0
    low = MAGNITUDES[torch.searchsorted(torch.tensor(MAGNITUDES), abs(value), right=True) - 1]
    up = (abs(value) - low) / step
    error = abs(float(drawn.mean()) - value)
    noise = step * (up * (1 - up) / drawn.numel()) ** 0.5
    assert error < step / 256 + 4 * noise
    assert len(drawn.unique()) == 2


def test_rounding_depends_on_seed_and_position_only(device: torch.device) -> None:
    """The seed and the position of an element determine its rounding; strides and earlier calls do not."""
    values = blocks_of_scale_one(96)
    first = stochastically_rounded(ops, values, 99, device)
    assert torch.equal(stochastically_rounded(ops, values, 99, device), first)
    assert torch.equal(stochastically_rounded(ops, values.T.contiguous().T, 99, device), first)
    assert torch.equal(stochastically_rounded(ops, values[:16], 99, device), first[:16])
    assert not torch.equal(stochastically_rounded(ops, values, 100, device), first)
    assert not torch.equal(stochastically_rounded(ops, values, 99 + 2**32, device), first), (
        "all 64 bits of the seed are used"
    )
    assert not torch.equal(stochastically_rounded(ops, values.flip(0), 99, device).flip(0), first)


def test_directions_use_different_random_numbers(device: torch.device) -> None:
    values = torch.full((64, 64), 2.5)
    values[::16] = values[:, ::16] = 6.0
    amax, seed = UNIT.to(device), torch.tensor([5], device=device)
    data, _, data_t, _ = ops.quantize(
        values.to(device), "nvfp4:sr", amax=amax, amax_t=amax, seed=seed, columnwise=True
    )
    rows, columns = unpack(data), unpack(data_t)
    assert not torch.equal(rows, columns), "the matrix is symmetric, the random numbers are not"
    assert not torch.equal(rows, columns.T)


# The rotation.


def rotation_matrix() -> Tensor:
    """Returns R in float64 from its definition: diag(signs) H / 4 with Sylvester's H."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    return torch.tensor(signs).double()[:, None] * h / 4


def test_rotation_is_orthogonal() -> None:
    r = rotation_matrix()
    assert torch.equal(r @ r.T, torch.eye(16, dtype=torch.float64))
    assert_same_bits(reference_rotation(torch.eye(16)), r.float())


def reference_rotation(matrix: Tensor) -> Tensor:
    return _nvfp4.rotate(matrix)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_rotation_agrees_with_the_matrix_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 64, generator=generator).to(dtype)
    exact = (x.double().unflatten(1, (-1, 16)) @ rotation_matrix()).flatten(1)
    got = reference_rotation(x)
    assert got.dtype == dtype
    # One rounding to the dtype, and five in float32 of sums that are at most a quarter of the block's
    # absolute sum.
    magnitude = x.double().abs().unflatten(1, (-1, 16)).sum(-1) / 4
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + magnitude.repeat_interleave(16, 1) * 5 * 2.0**-24
    assert ((got.double() - exact).abs() <= bound).all()
    integers = torch.randint(-8, 9, (20, 32), generator=generator).to(dtype)
    expected = (integers.double().unflatten(1, (-1, 16)) @ rotation_matrix()).flatten(1)
    assert_same_bits(reference_rotation(integers).double(), expected + 0.0, "exact sums")


def test_rotated_operands_have_the_same_product() -> None:
    """X^T Y with chunks of 16 rows rotated: R cancels, except for float32 rounding."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(256, 48, generator=generator), torch.randn(256, 32, generator=generator)
    rotated_product = (
        reference_rotation(x.T.contiguous()).double() @ reference_rotation(y.T.contiguous()).double().T
    )
    exact = x.double().T @ y.double()
    assert float((rotated_product - exact).norm() / exact.norm()) < 1e-6


def test_transposed_copy_is_quantized_after_the_rotation(device: torch.device) -> None:
    """The rotated format stores what the plain format stores of the rotated matrix, and its row-wise data is not
    rotated. The product of two such copies approximates the product of the matrices."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(512, width, generator=generator).to(device) for width in (96, 64))
    x[::7] *= 20.0
    products, dequantized = [], []
    for m in (x, y):
        amax, amax_t = ops.amax(m, "nvfp4:rht", columnwise=True)
        data, scale, data_t, scale_t = ops.quantize(m, "nvfp4:rht", amax=amax, amax_t=amax_t, columnwise=True)
        rotated = reference_rotation(m.T.contiguous())
        assert_same_bits(amax_t.cpu(), rotated.abs().max().reshape(1).cpu(), "amax after the rotation")
        for got, expected in zip((data_t, scale_t), ops.quantize(rotated, "nvfp4", amax=amax_t), strict=True):
            assert_same_bits(got, expected)
        for got, expected in zip((data, scale), ops.quantize(m, "nvfp4", amax=amax), strict=True):
            assert_same_bits(got, expected)
        dequantized.append(
            ops.dequantize(data_t, scale_t, "nvfp4:rht", transposed=True, amax=amax_t).double()
        )
        products.append(m.double())
    exact = products[0].T @ products[1]
    error = float((dequantized[0].T @ dequantized[1] - exact).norm() / exact.norm())
    assert 0.05 < error < 0.18


@pytest.mark.parametrize("of", [reference, ops], ids=["reference", "ops"])
def test_rotated_sums_of_large_16_bit_values_stay_finite(of: ModuleType, device: torch.device) -> None:
    """The sum before multiplying by a quarter would overflow float32."""
    signs = torch.from_numpy(nvfp4_oracle.SIGNS)
    x = (signs[:, None] * 2.0**125).repeat(1, 16).bfloat16().to(device)
    x[:, 1:] *= 2.0**-3
    assert of.amax(x, "nvfp4:rht", rowwise=False, columnwise=True).item() == 2.0**127, (
        "a quarter of the sum 2^129"
    )


@by_implementation
def test_nan_and_infinity_spread_over_their_chunk(of: ModuleType) -> None:
    x = torch.ones(32, 16)
    x[3, 5], x[20, 6] = float("nan"), float("inf")
    amax = of.amax(x, "nvfp4:rht", rowwise=False, columnwise=True)
    assert amax.item() == float("inf")
    data, scale = of.quantize(x, "nvfp4:rht", amax_t=torch.tensor([2688.0]), rowwise=False, columnwise=True)
    bits = unpack(data)
    assert (bits[5, :16] == 7).all() and scale.view(torch.uint8)[5, 0] == 0, "the whole chunk is NaN"
    assert ((bits[6, 16:] & 7) == 7).all() and scale.view(torch.uint8)[6, 1] == 0x7E
    assert (bits[0] & 7).any()


# Tiled scales.


@by_implementation
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp8:square", "nvfp4:square"])
def test_tiled_scales_are_a_permutation(of: ModuleType, format: str) -> None:
    """A tile is 512 bytes for 128 rows and 4 columns; row r, column c is at offset r % 32 * 16 + r / 32 * 4 + c."""
    x = torch.randn(288, 320, generator=torch.Generator().manual_seed(5))
    nvfp4 = format.startswith("nvfp4")
    both = {"amax": torch.tensor([6.0]), "amax_t": torch.tensor([5.0])} if nvfp4 else {}
    tiled_key = f"{format}{',' if ':' in format else ':'}tiled"
    plain, tiled = (
        of.quantize(x, format, **both, columnwise=True),
        of.quantize(x, tiled_key, **both, columnwise=True),
    )
    for i in (1, 3):
        assert_same_bits(tiled[i - 1], plain[i - 1])
        assert tiled[i].shape == plain[i].shape and tiled[i].dtype == plain[i].dtype
        columns = plain[i].shape[1]
        flat, bytes = tiled[i].view(torch.uint8).flatten(), plain[i].view(torch.uint8)
        for r, c in [(0, 0), (1, 0), (0, 3), (31, 2), (32, 0), (127, 3), (128, 0), (5, 4), (250, 7)]:
            place = (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert flat[place] == bytes[r, c], (r, c)
        assert torch.equal(flat.sort().values, bytes.flatten().sort().values)
        how = {"transposed": i == 3, **({"amax": both["amax_t" if i == 3 else "amax"]} if both else {})}
        assert_same_bits(
            of.dequantize(tiled[i - 1], tiled[i], tiled_key, **how),
            of.dequantize(plain[i - 1], plain[i], format, **how),
        )
