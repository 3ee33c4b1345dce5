"""NVFP4 quantization in numpy, written from the formulas alone. The tables and the rounding are those of
quantize_oracle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tests.ops.quantize_oracle import (
    FLT_MAX,
    TABLES,
    as_numpy,
    round_to_fp8,
    table,
    tiled,
    tiled_offsets,
)

E2M1 = table("e2m1")
#: Philox adds these constants to the words of its key after each round.
WEYL = (0x9E3779B9, 0xBB67AE85)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


@dataclass(frozen=True)
class NvSpec:
    """The options of a format."""

    key: str
    square: bool = False
    rht: bool = False
    sr: bool = False
    row_scaled: bool = False
    four_over_six: str = ""
    tiled: bool = False

    @property
    def bound(self) -> int:
        """The largest scale of a block."""
        return 256 if self.four_over_six else 448


def make_nv_spec(**options: bool | str) -> NvSpec:
    """Returns the spec of these options, with its format key."""
    spec = NvSpec("", **options)  # type: ignore[arg-type]
    over = {"": "", "mae": "4over6", "mse": "4over6_mse"}[spec.four_over_six]
    names = [name for name in ("square", "rht", "sr", "row_scaled") if getattr(spec, name)]
    return replace(spec, key=",".join(["nvfp4:e2m1", *names, *filter(None, [over]), *["tiled"] * spec.tiled]))


SPECS = {
    spec.key: spec
    for spec in (
        NvSpec("nvfp4"),
        NvSpec("nvfp4:square", square=True),
        NvSpec("nvfp4:rht", rht=True),
        NvSpec("nvfp4:sr", sr=True),
        NvSpec("nvfp4:rht,sr", rht=True, sr=True),
        NvSpec("nvfp4:square,sr,tiled", square=True, sr=True, tiled=True),
        NvSpec("nvfp4:row_scaled", row_scaled=True),
        NvSpec("nvfp4:4over6", four_over_six="mae"),
        NvSpec("nvfp4:4over6_mse,tiled", four_over_six="mse", tiled=True),
        NvSpec("nvfp4:row_scaled,4over6,tiled", row_scaled=True, four_over_six="mae", tiled=True),
    )
}


def e4m3(values: np.ndarray) -> np.ndarray:
    """Rounds magnitudes to E4M3 bit patterns."""
    return round_to_fp8(values.astype(np.float32), "e4m3")


def value_of(data: np.ndarray) -> np.ndarray:
    """Returns the float32 values of E4M3 bit patterns that are not NaN."""
    return TABLES["e4m3"][data].astype(np.float32)


def e2m1(values: np.ndarray) -> np.ndarray:
    """Rounds to E2M1, one element per byte: to nearest, ties to even, saturating. The sign is in bit 3, and NaN
    becomes +6."""
    magnitude = np.abs(values.astype(np.float64))
    below = np.clip(np.searchsorted(E2M1, magnitude, side="right") - 1, 0, 7)
    above = np.minimum(below + 1, 7)
    to_below, to_above = magnitude - E2M1[below], E2M1[above] - magnitude
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(up, above, below) | np.where(np.signbit(values), 8, 0)
    return np.where(np.isnan(values), 7, code).astype(np.uint8)


def e2m1_stochastic(values: np.ndarray, bytes: np.ndarray) -> np.ndarray:
    """Rounds stochastically: returns the largest magnitude not above ``|x| + byte/256 * step``, computed exactly."""
    magnitude = np.abs(values.astype(np.float64))
    step = np.select([magnitude < 2, magnitude < 4], [0.5, 1.0], 2.0)
    code = np.searchsorted(E2M1, magnitude + bytes / 256 * step, side="right") - 1
    code = np.clip(code, 0, 7) | np.where(np.signbit(values), 8, 0)
    return np.where(np.isnan(values), 7, code).astype(np.uint8)


def philox(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """Philox4x32-10 of 32-bit words, stored as uint64 so that their products fit."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [np.asarray(word, np.uint64) for word in counter]
    for round in range(10):
        k = [np.uint64((word + round * weyl) % 2**32) for word, weyl in zip(key, WEYL, strict=True)]
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [q >> half ^ c[1] ^ k[0], q & low, p >> half ^ c[3] ^ k[1], p & low]
    return c


def random_bytes(seed: int, blocks: np.ndarray, direction: int) -> np.ndarray:
    """Returns the 16 random bytes of each block, in little-endian order within each word."""
    key = [seed % 2**32, (seed >> 32) % 2**32]
    words = philox([blocks % 2**32, blocks >> 32, np.full_like(blocks, direction), 0 * blocks], key)
    return np.stack(words, -1).astype("<u4").view(np.uint8)


def block_indices(rows: int, columns: int, member: int = 0) -> np.ndarray:
    """Returns the block indices of one matrix [rows, columns] of a stack, in memory order."""
    row, block = np.indices((rows, columns // 16))
    return ((member * rows + row) * columns + 16 * block) // 16


def hadamard(v: np.ndarray) -> np.ndarray:
    """Multiplies by the Hadamard matrix along the last dimension, recursively from the transforms of the two
    halves."""
    if v.shape[-1] == 1:
        return v
    half = v.shape[-1] // 2
    a, b = hadamard(v[..., :half]), hadamard(v[..., half:])
    return np.concatenate([a + b, a - b], -1)


def rotate(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Applies the randomized Hadamard transform to chunks of 16 along rows, and rounds to the dtype. 16-bit values
    are multiplied by a quarter first, so that the largest ones do not overflow."""
    chunks = values.reshape(*values.shape[:-1], values.shape[-1] // 16, 16)
    first, last = map(np.float32, (1, 0.25) if dtype == torch.float32 else (0.25, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        rotated = (hadamard(chunks * SIGNS * first) * last).reshape(values.shape)
    return torch.from_numpy(rotated).to(dtype).float().numpy()


def magnitudes_of(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.float32(0), np.abs(values))


def encode_scale(amax: np.ndarray, spec: NvSpec) -> np.ndarray:
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.fmin(np.float32(6 * spec.bound) / amax.astype(np.float32), FLT_MAX)
    return np.where((amax == 0) | (scale == 0), np.float32(1), scale).astype(np.float32)


def quantize(
    values: np.ndarray, spec: NvSpec, amax: np.ndarray, bytes: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row-wise quantized data of one float32 matrix, one element per byte, and its scale bytes ``[rows,
    columns / 16]``."""
    rows, columns = values.shape
    height = 16 if spec.square else 1
    whole = np.zeros((-(-rows // height) * height, columns), np.float32)
    whole[:rows] = magnitudes_of(values)
    block_amax = whole.reshape(len(whole) // height, height, columns // 16, 16).max((1, 3), initial=0)
    block_amax = np.repeat(block_amax, height, 0)[:rows]
    common = encode_scale(amax, spec).reshape(-1, 1)
    one = np.float32(1)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):

        def factor(scale: np.ndarray) -> np.ndarray:
            return np.repeat(np.minimum(one / (value_of(scale) * (one / common)), FLT_MAX), 16, 1)

        if not spec.four_over_six:
            scale = e4m3(np.minimum(block_amax * (common * np.float32(1 / 6)), FLT_MAX))
            scaled = values * factor(scale)
            return e2m1(scaled) if bytes is None else e2m1_stochastic(scaled, bytes), scale
        target = block_amax / np.float32(6) * common
        tried = []
        for times in (1.0, 1.5):
            scale = e4m3(np.minimum(target * np.float32(times), np.float32(448)))
            data = e2m1(values * factor(scale))
            back = np.where(data & 8, -E2M1[data & 7], E2M1[data & 7]).astype(np.float32)
            scaled = back * np.repeat(value_of(scale), 16, 1) * amax.astype(np.float32).reshape(-1, 1)
            missed = np.abs(scaled / np.float32(6 * spec.bound) - values)
            missed = missed * missed if spec.four_over_six == "mse" else missed
            missed = missed.reshape(rows, columns // 16, 16)
            error = np.zeros(missed.shape[:2], np.float32)
            for i in range(16):
                error += missed[:, :, i]
            tried.append((data, scale, error))
    four = tried[1][2] < tried[0][2]
    data = np.where(np.repeat(four, 16, 1), tried[1][0], tried[0][0])
    return data, np.where(four, tried[1][1], tried[0][1])


def stored(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Returns the scales in the upper left corner of a matrix of zeros."""
    whole = np.zeros(shape, np.uint8)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole


def finished(data: np.ndarray, scales: np.ndarray, spec: NvSpec) -> tuple[Tensor, Tensor]:
    """Returns packed data and scales, in the layout and dtypes of the ops."""
    packed = (data[..., 0::2] | data[..., 1::2] << 4).astype(np.uint8)
    scales = tiled(scales) if spec.tiled else scales
    return (
        torch.from_numpy(np.ascontiguousarray(packed)).view(torch.float4_e2m1fn_x2),
        torch.from_numpy(np.ascontiguousarray(scales)).view(torch.float8_e4m3fn),
    )


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def transposed_input(values: np.ndarray, spec: NvSpec, dtype: torch.dtype) -> np.ndarray:
    """Returns the matrix whose row-wise quantization is the transposed copy."""
    values = np.ascontiguousarray(values.swapaxes(-1, -2))
    return rotate(values, dtype) if spec.rht else values


def quantize_direction(
    input: Tensor, spec: NvSpec, amax: Tensor, seed: int | None, direction: int
) -> tuple[Tensor, Tensor]:
    """Quantizes a 2-D or 3-D tensor: direction 0 is row-wise, 1 is transposed."""
    stack = as_numpy(input if input.dim() == 3 else input[None])
    stack = transposed_input(stack, spec, input.dtype) if direction else stack
    members, rows, columns = stack.shape
    data = np.zeros(stack.shape, np.uint8)
    scales = np.zeros((members, up(rows, 128), up(columns // 16, 4)), np.uint8)
    for g, values in enumerate(stack):
        of = amax.cpu().numpy() if input.dim() == 2 else amax.cpu().numpy()[g : g + 1].reshape(-1)
        bytes = None
        if seed is not None:
            bytes = random_bytes(seed, block_indices(rows, columns, g), direction).reshape(values.shape)
        data[g], scale = quantize(values, spec, of, bytes)
        scales[g] = stored(scale, scales.shape[1:])
    return finished(*((data, scales) if input.dim() == 3 else (data[0], scales[0])), spec)


def grouped_quantize_direction(
    input: Tensor, sizes: list[int], spec: NvSpec, amax: Tensor, seed: int | None, direction: int
) -> tuple[Tensor, Tensor]:
    """Quantizes each group separately; everything past the groups is 0. If transposed, group sizes are multiples of
    16."""
    total, columns = input.shape
    values, of = as_numpy(input), amax.cpu().numpy()
    shape = (columns, total) if direction else (total, columns)
    data = np.zeros(shape, np.uint8)
    scales = np.zeros((up(total, 128), up(columns // 16, 4)), np.uint8)
    if direction:
        scales = np.zeros((up(columns, 128), 8 * (up(total, 128) // 128 + len(sizes))), np.uint8)
    bytes = None
    if seed is not None:
        bytes = random_bytes(seed, block_indices(*shape), direction).reshape(shape)
    first, before = 0, 0
    for g, size in enumerate(sizes):
        rows = slice(first, first + size)
        group_bytes = None if bytes is None else bytes[:, rows] if direction else bytes[rows]
        if direction:
            group = transposed_input(values[rows], spec, input.dtype)
            one = of[g] if spec.row_scaled else of[g : g + 1]
            data[:, rows], scale = quantize(group, spec, one, group_bytes)
            scales[:columns, 8 * before : 8 * before + size // 16] = scale
        else:
            one = of[rows] if spec.row_scaled else of[g : g + 1]
            data[rows], scale = quantize(values[rows], spec, one, group_bytes)
            scales[rows, : columns // 16] = scale
        first, before = first + size, before + up(size, 128) // 128
    return finished(data, scales, spec)


def amax(input: Tensor, spec: NvSpec, sizes: list[int] | None, direction: int) -> Tensor:
    """Returns the amax of each matrix, group or row; 0 where there are no elements."""
    values = as_numpy(input)

    def largest(of: np.ndarray) -> np.ndarray:
        of = magnitudes_of(transposed_input(of, spec, input.dtype) if direction else of)
        if spec.row_scaled:
            return of.max(-1, initial=0)
        return of.max((-1, -2), initial=0, keepdims=True)[..., 0, 0]

    if sizes is None:
        found = largest(values)
        return torch.from_numpy(np.asarray(found, np.float32).reshape(-1) if input.dim() == 2 else found)
    ends = np.cumsum([0, *sizes])
    parts = [largest(values[begin:end]) for begin, end in itertools.pairwise(ends)]
    if not spec.row_scaled:
        return torch.from_numpy(np.array(parts, np.float32))
    if direction:
        return torch.from_numpy(np.array(parts, np.float32).reshape(len(sizes), input.shape[1]))
    tail = np.zeros(input.shape[0] - int(ends[-1]), np.float32)
    return torch.from_numpy(np.concatenate([*parts, tail]).astype(np.float32))


def dequantized(data: Tensor, scale: Tensor, spec: NvSpec, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantizes one matrix: element * ((scale * amax) * (1 / (6 * bound))), rounded; every NaN is the quiet NaN.
    If scale * amax overflows, the factor is computed in float64."""
    bytes = data.cpu().view(torch.uint8).numpy()
    elements = np.stack([bytes & 15, bytes >> 4], -1).reshape(bytes.shape[0], 2 * bytes.shape[1])
    values = np.where(elements & 8, -E2M1[elements & 7], E2M1[elements & 7]).astype(np.float32)
    scales = scale.cpu().view(torch.uint8).numpy()
    scales = scales.reshape(-1)[tiled_offsets(*scales.shape)] if spec.tiled else scales
    row, column = np.indices(elements.shape)
    scales = scales[row, column // 16]
    wide = np.append(TABLES["e4m3"], np.nan)[scales & 0x7F]
    wide = np.where(scales & 0x80, -wide, wide).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        of = amax.cpu().numpy().reshape(-1, 1)
        factor = (wide * of) * np.float32(1 / (6 * spec.bound))
        in_fp64 = (wide.astype(np.float64) * of / (6 * spec.bound)).astype(np.float32)
        factor = np.where(np.isinf(wide * of) & np.isfinite(of), in_fp64, factor)
        product = torch.from_numpy(values * factor)
    return torch.where(product.isnan(), torch.tensor(float("nan")).to(dtype), product.to(dtype))
