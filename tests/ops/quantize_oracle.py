"""Quantization in numpy, written from the formulas alone.

An FP8 type is the table of its values. Rounding finds the nearest entry; a tie goes to the entry with the even bit
pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_plugin.testing.numerics import assert_same_bits

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FLT_MAX = np.float32(3.4028234663852886e38)
LARGEST_INPUT = {
    torch.float32: FLT_MAX,
    torch.bfloat16: np.float32(3.3895313892515355e38),
    torch.float16: 65504.0,
}


def table(element: str) -> np.ndarray:
    """Returns the values of the bit patterns 0, 1, ... up to the largest finite value, from the definition of the
    type."""
    mantissa_bits, bias, last = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B), "e2m1": (1, 1, 7)}[element]
    values = []
    for code in range(last + 1):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


TABLES = {element: table(element) for element in DTYPES}


def round_to_fp8(values: np.ndarray, element: str) -> np.ndarray:
    """Returns uint8 bit patterns: rounded to nearest, ties to even, saturating; NaN is 0x7F."""
    entries = TABLES[element]
    magnitude = np.abs(values.astype(np.float64))
    below = np.clip(np.searchsorted(entries, magnitude, side="right") - 1, 0, len(entries) - 1)
    above = np.minimum(below + 1, len(entries) - 1)
    to_below, to_above = magnitude - entries[below], entries[above] - magnitude
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(up, above, below) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


ROW, SQUARE = (1, 128), (128, 128)
MX_ROW, MX_SQUARE = (1, 32), (32, 32)


@dataclass(frozen=True)
class Spec:
    """The options of a format. ``block`` is None, (1, 128) or (128, 128); for MXFP8 it is (1, 32) or (32, 32)."""

    element: str
    pow2: bool
    block: tuple[int, int] | None
    epsilon: float = 0.0
    tiled: bool = False

    @property
    def is_mx(self) -> bool:
        return self.block in (MX_ROW, MX_SQUARE)

    @property
    def key(self) -> str:
        if self.is_mx:
            square = ",square" if self.block == MX_SQUARE else ""
            return f"mxfp8:{self.element}{square}{',tiled' if self.tiled else ''}"
        family = "fp8_tensor" if self.block is None else "fp8_block"
        square = ",square" if self.block == (128, 128) else ""
        return f"{family}:{self.element},{'pow2' if self.pow2 else 'fp32'}{square},eps={self.epsilon!r}"


def scale_of(block: np.ndarray, spec: Spec, overflow: float) -> np.float32:
    """Returns the scale by which one block of float32 values is multiplied before rounding."""
    numbers = np.abs(block[~np.isnan(block)])
    amax = np.float32(numbers.max()) if numbers.size else np.float32(0)
    amax = max(amax, np.float32(spec.epsilon))
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(TABLES[spec.element][-1]) / amax
    scale = np.float32(overflow) if np.isinf(scale) else scale
    if spec.pow2:
        scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
    return scale


#: 2^-127 for byte 0 up to 2^127 for byte 254; 255 is NaN.
MX_SCALES = np.append(2.0 ** np.arange(-127, 128), np.nan)


def exponents_of(amax: np.ndarray, element: str) -> np.ndarray:
    """Returns the E8M0 bytes of float32 amaxes: the least e with ``2**(e - 127) >= amax * (1 / largest)``, where
    the product is rounded to float32; 254 for an infinite amax. Compares in float64, which represents all these
    powers of two."""
    wanted = (amax * (np.float32(1) / np.float32(TABLES[element][-1]))).astype(np.float64)
    return np.minimum(np.searchsorted(MX_SCALES[:255], wanted), 254)


def quantize_mx(values: np.ndarray, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row-wise quantized data of one float32 matrix, and its scale bytes ``[roundup(M, 128), 4 * ceil(K
    / 128)]``."""
    rows, columns = values.shape
    height, width = spec.block or (1, 1)
    down, across = -(-rows // height), -(-columns // width)
    magnitudes = np.zeros((down * height, across * width), np.float32)
    magnitudes[:rows, :columns] = np.where(np.isnan(values), np.float32(0), np.abs(values))
    amax = magnitudes.reshape(down, height, across, width).max((1, 3), initial=0)
    exponents = np.repeat(exponents_of(amax, spec.element), height, 0)[:rows]
    stored = np.zeros((-(-rows // 128) * 128, 4 * -(-columns // 128)), np.uint8)
    stored[:rows, :across] = exponents
    factors = (2.0 ** (127 - np.repeat(exponents, width, 1)[:, :columns])).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to_fp8(values * factors, spec.element), stored


def quantize(values: np.ndarray, spec: Spec, overflow: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row-wise quantized data of one float32 matrix, and its decode scales in the order of the ops."""
    if spec.is_mx:
        return quantize_mx(values, spec)
    rows, columns = values.shape
    height, width = spec.block or (max(rows, 1), max(columns, 1))
    factors = np.ones_like(values)
    scales = np.zeros((-(-rows // height), -(-columns // width)), dtype=np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            factors[where] = scale_of(values[where], spec, overflow)
            scales[i, j] = np.float32(1) / factors[i * height, j * width]
    with np.errstate(over="ignore", invalid="ignore"):
        data = round_to_fp8(values * factors, spec.element)
    if spec.block is None:
        empty_scale = np.float32(1) / scale_of(values.reshape(-1), spec, overflow)
        return data, np.array([empty_scale], dtype=np.float32)
    stored = scales if spec.block == (128, 128) else scales.T
    return data, np.pad(stored, ((0, 0), (0, -stored.shape[1] % 4)))


def tiled(scales: np.ndarray) -> np.ndarray:
    """Rearranges scales into tiles of 128 rows by 4 columns: byte (r, c) goes to tile (r / 128, c / 4), and tiles
    are in row-major order."""
    rows, columns = scales.shape[-2:]
    flat = np.zeros((*scales.shape[:-2], rows * columns), scales.dtype)
    flat[..., tiled_offsets(rows, columns).reshape(-1)] = scales.reshape(*scales.shape[:-2], rows * columns)
    return flat.reshape(scales.shape)


def tiled_offsets(rows: int, columns: int) -> np.ndarray:
    """Returns the offset of byte (r, c)."""
    r, c = np.indices((rows, columns))
    return (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Returns float32 values; exact for every input dtype."""
    return tensor.detach().cpu().float().numpy()


def overflow_of(spec: Spec, dtype: torch.dtype) -> float:
    return float(FLT_MAX if spec.block is None else LARGEST_INPUT[dtype])


def both_directions(input: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four outputs of ``quantize`` in both directions for a 2-D or 3-D tensor, on the CPU."""
    overflow = overflow_of(spec, input.dtype)
    matrices = [as_numpy(m) for m in (input if input.dim() == 3 else [input])]
    outputs: list[Tensor] = []
    for matrix_of in (lambda m: m, lambda m: m.T):
        parts = [quantize(np.ascontiguousarray(matrix_of(m)), spec, overflow) for m in matrices]
        data, scales = np.stack([c for c, _ in parts]), np.stack([s for _, s in parts])
        if input.dim() == 2 or spec.block is None:
            scales = scales.reshape(-1) if spec.block is None else scales[0]
        scales = tiled(scales) if spec.tiled else scales
        outputs += [torch.from_numpy(data if input.dim() == 3 else data[0]), torch.from_numpy(scales)]
        outputs[-2] = outputs[-2].contiguous().view(DTYPES[spec.element])
        outputs[-1] = outputs[-1].view(torch.float8_e8m0fnu if spec.is_mx else torch.float32)
    return outputs[0], outputs[1], outputs[2], outputs[3]


def grouped_both_directions(
    input: Tensor, sizes: list[int], spec: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the same for a ragged matrix: each group is quantized separately, and everything past the groups is
    0."""
    total, columns = input.shape
    values, overflow = as_numpy(input), overflow_of(spec, input.dtype)
    data, data_t = np.zeros((total, columns), np.uint8), np.zeros((columns, total), np.uint8)
    scale = np.zeros((-(-columns // 128), -(-total // 4) * 4), np.float32)
    scale_t = np.zeros((-(-total // 128) + len(sizes), -(-columns // 4) * 4), np.float32)
    if spec.is_mx:
        scale = np.zeros((-(-total // 128) * 128, 4 * -(-columns // 128)), np.uint8)
        scale_t = np.zeros((-(-columns // 128) * 128, 4 * (-(-total // 128) + len(sizes))), np.uint8)
    tensor_scales, first, block = [], 0, 0
    for size in sizes:
        rows = slice(first, first + size)
        data[rows], s = quantize(values[rows], spec, overflow)
        data_t[:, rows], s_t = quantize(np.ascontiguousarray(values[rows].T), spec, overflow)
        if spec.block is None:
            tensor_scales.append(s[0])
        elif spec.is_mx:
            scale[rows] = s[:size]
            scale_t[:, 4 * block : 4 * block + s_t.shape[1]] = s_t
        else:
            scale[:, rows] = s[:, :size]
            scale_t[block : block + s_t.shape[0]] = s_t
        first, block = first + size, block + -(-size // 128)
    if spec.block is None:
        scale = scale_t = np.array(tensor_scales, np.float32)
    if spec.tiled:
        scale, scale_t = tiled(scale), tiled(scale_t)
    dtype, scale_dtype = DTYPES[spec.element], torch.float8_e8m0fnu if spec.is_mx else torch.float32
    return (
        torch.from_numpy(data).view(dtype),
        torch.from_numpy(scale).view(scale_dtype),
        torch.from_numpy(data_t).view(dtype),
        torch.from_numpy(scale_t.copy()).view(scale_dtype),
    )


SPECS = {
    "fp8_tensor": Spec("e4m3", False, None),
    "fp8_tensor:e5m2,pow2": Spec("e5m2", True, None),
    "fp8_tensor:e5m2,eps=0.25": Spec("e5m2", False, None, 0.25),
    "fp8_block": Spec("e4m3", True, ROW),
    "fp8_block:e5m2,fp32": Spec("e5m2", False, ROW),
    "fp8_block:fp32,eps=1e-3": Spec("e4m3", False, ROW, 1e-3),
    "fp8_block:square": Spec("e4m3", True, SQUARE),
    "fp8_block:e5m2,fp32,square": Spec("e5m2", False, SQUARE),
    "mxfp8": Spec("e4m3", True, MX_ROW),
    "mxfp8:e5m2": Spec("e5m2", True, MX_ROW),
    "mxfp8:square": Spec("e4m3", True, MX_SQUARE),
    "mxfp8:tiled": Spec("e4m3", True, MX_ROW, tiled=True),
    "mxfp8:e5m2,square,tiled": Spec("e5m2", True, MX_SQUARE, tiled=True),
}
NAMES = ("data", "scale", "data_transposed", "scale_transposed")


def assert_all_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for g, e, name in zip(got, expected, NAMES[: len(got)], strict=True):
        assert_same_bits(g, e, name)
        assert g.is_contiguous(), name


def oracle_both(input: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """Returns the oracle's outputs. For a stack of no matrices they are empty, with the shapes of one matrix."""
    if input.dim() == 2 or input.shape[0] > 0:
        return both_directions(input, spec)
    one = both_directions(torch.zeros(1, *input.shape[1:]), spec)
    return tuple(output[:0] for output in one)


def dequantized(data: Tensor, scales: np.ndarray, element: str, dtype: torch.dtype) -> Tensor:
    """Returns table[bit pattern] * scale in float32, then rounded; every NaN is the quiet NaN. ``scales`` has one
    entry per element."""
    bits = data.cpu().view(torch.uint8).numpy().astype(np.int64)
    entries = np.concatenate([TABLES[element], np.full(128 - len(TABLES[element]), np.nan)])
    if element == "e5m2":
        entries[0x7C] = np.inf
    values = np.where(bits & 0x80, -entries[bits & 0x7F], entries[bits & 0x7F]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = torch.from_numpy(values * scales)
    quiet = torch.tensor(float("nan")).to(dtype)
    return torch.where(product.isnan(), quiet, product.to(dtype))


def spread(scale: Tensor, spec: Spec, shape: tuple[int, int]) -> np.ndarray:
    """Expands the stored scales of row-wise data [rows, columns] to one per element."""
    if spec.is_mx:
        index, bytes = np.indices(shape), scale.cpu().view(torch.uint8).numpy()
        if spec.tiled:
            bytes = bytes.reshape(-1)[tiled_offsets(*bytes.shape)]
        exponents = bytes[index[0], index[1] // 32]
        return MX_SCALES[exponents].astype(np.float32)
    stored = scale.cpu().numpy()
    if spec.block is None:
        return np.full(shape, stored[0])
    index = np.indices(shape)
    height, width = spec.block
    if height == 1:
        return stored[index[1] // width, index[0]]
    return stored[index[0] // height, index[1] // width]
