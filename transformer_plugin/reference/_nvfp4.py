"""The arithmetic of nvfp4, FP32 throughout: scales, elements, the rotation, and stochastic rounding.

Source: "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), Four Over Six (arXiv:2512.02010), with the
conventions of NVIDIA TransformerEngine; Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import NV_BLOCK, Format
from transformer_plugin.reference._fp8 import round_to_fp8

#: E2M1: the magnitudes of the bit patterns 0 to 7; bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Signs of the rotation's rows.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_E4M3 = Format("fp8_tensor")
_FLT_MAX = torch.finfo(torch.float32).max


def _largest(format: Format) -> float:
    """Returns the product of a block's scale and an element to which the amax of the matrix is mapped: 6 * 448, or
    6 * 256 if a scale may grow by half."""
    return 6.0 * (256.0 if format.four_over_six else 448.0)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def encode_scale(amax: Tensor, format: Format) -> Tensor:
    """Returns the common factor of all values and scales of a matrix (or row). A NaN amax, which only an argument
    can be, counts as the smallest amax."""
    scale = _constant(_largest(format), amax) / amax
    scale = torch.where(scale < _FLT_MAX, scale, _FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def decode_factor(scale: Tensor, amax: Tensor, format: Format) -> Tensor:
    """Returns the factor of an element, from its block's scale in float32 and its matrix's (or row's) amax."""
    product = scale * amax
    wide = (
        scale.double() * amax.double() / _largest(format)
    ).float()  # a product that overflows float32 is computed in float64
    usual = product * _constant(1 / _largest(format), amax)
    return torch.where(product.isinf() & amax.isfinite(), wide, usual)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Rounds to E2M1 bit patterns, one per byte: nearest even, saturating, zeros keep their sign, NaN becomes +6."""
    a = values.abs()
    bits = torch.zeros_like(a, dtype=torch.uint8)
    # A midpoint goes to the even neighbor: up at 0.75, 1.75 and 3.5, which are below an even element.
    for midpoint, goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False):
        bits += (a >= midpoint if goes_up else a > midpoint).to(torch.uint8)
    bits |= values.signbit().to(torch.uint8) << 3
    return torch.where(values.isnan(), torch.full_like(bits, 0x7), bits)


def round_stochastically(values: Tensor, bytes: Tensor) -> Tensor:
    """Rounds to one of the two neighboring E2M1 bit patterns, up with a probability that makes the mean exact, in
    steps of 1/256. ``bytes`` are uint8, one per value."""
    a = values.abs().double()  # float64, in which the sum is exact where it matters
    t = a + bytes.double() / 256 * _step(a)
    t = ((t / _step(t)).floor() * _step(t)).clamp(max=6.0)
    bits = torch.zeros_like(a, dtype=torch.uint8)
    for magnitude in MAGNITUDES[1:]:
        bits += (t >= magnitude).to(torch.uint8)
    bits |= values.signbit().to(torch.uint8) << 3
    return torch.where(values.isnan(), torch.full_like(bits, 0x7), bits)


def _step(a: Tensor) -> Tensor:
    """Returns the distance of the neighbors of ``a``."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def decode(bits: Tensor) -> Tensor:
    """Returns the float32 values of E2M1 bit patterns, one per byte."""
    magnitude = torch.tensor(MAGNITUDES, device=bits.device)[(bits & 7).long()]
    return torch.where(bits >= 8, -magnitude, magnitude)


def pack(bits: Tensor) -> Tensor:
    """Packs two elements per byte along the last dimension, the even one in the low half."""
    return bits[..., 0::2] | bits[..., 1::2] << 4


def unpack(bytes: Tensor) -> Tensor:
    """Reverses :func:`pack`."""
    return torch.stack([bytes & 0xF, bytes >> 4], -1).flatten(-2)


def rotate(matrix: Tensor) -> Tensor:
    """Multiplies each 16 neighboring elements of a row by ``diag(signs) @ H / 4``, where H is the Hadamard matrix
    in Sylvester's order. Sums are in float32 in the order of the butterflies, and are rounded to the matrix's
    dtype. 16-bit values are divided by 4 before the sums, where that is exact and avoids overflow; float32 values
    are divided after them."""
    first, last = (1.0, 0.25) if matrix.dtype == torch.float32 else (0.25, 1.0)
    v = matrix.float().unflatten(-1, (-1, NV_BLOCK)) * first
    v = v * torch.tensor(SIGNS, device=matrix.device).float()
    for stride in (1, 2, 4, 8):
        pairs = v.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack([a + b, a - b], -2).flatten(-3)
    return (v * last).flatten(-2).to(matrix.dtype)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: returns four 32-bit words from a counter of four words and a key of two, all in int64."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64, so the bits are those of the product
        c0, c1, c2, c3 = (b >> 32 & mask) ^ c1 ^ k0, b & mask, (a >> 32 & mask) ^ c3 ^ k1, a & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3


def random_bytes(seed: Tensor, elements: int, direction: int) -> Tensor:
    """Returns uint8, one per element of a matrix or a stack in memory order: direction 0 is row-wise, 1 is the
    transposed copy. Block b of 16 has the counter (b, b >> 32, direction, 0), and uses 4 bytes of each word."""
    mask = 0xFFFFFFFF
    key = (seed.reshape(()).long() & mask, seed.reshape(()).long() >> 32 & mask)
    block = torch.arange(elements // NV_BLOCK, device=seed.device)
    zero = torch.zeros_like(block)
    words = torch.stack(philox((block & mask, block >> 32, zero + direction, zero), key), -1)
    shifts = torch.arange(0, 32, 8, device=seed.device)
    return (words[:, :, None] >> shifts & 0xFF).to(torch.uint8).flatten()


def quantize_matrix(
    matrix: Tensor, format: Format, amax: Tensor, bytes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the packed row-wise data of one matrix, and the E4M3 bytes ``[blocks down, blocks across]`` of its
    scales.

    ``amax`` is ``[1]`` or has one entry per row. ``bytes`` are those of stochastic rounding, in the shape of the
    matrix.
    """
    assert format.block is not None
    height, width = format.block
    values = matrix.float().contiguous()
    magnitudes = values.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    rows, columns = values.shape
    down, across = -(-rows // height), columns // width
    padded = torch.nn.functional.pad(magnitudes, (0, 0, 0, down * height - rows))
    block_amax = padded.view(down, height, across, width).amax((1, 3))
    common = encode_scale(amax, format).unsqueeze(-1)
    if format.four_over_six:
        return _four_over_six(values, block_amax, common, amax, format)
    target = block_amax * (common * _constant(1 / 6, common))
    scale = round_to_fp8(target.clamp(max=_FLT_MAX), _E4M3)
    factor = spread_blocks(encode_factor(scale, common), format, rows)
    bits = round_to_e2m1(values * factor) if bytes is None else round_stochastically(values * factor, bytes)
    return pack(bits), scale.view(torch.uint8)


def encode_factor(scale: Tensor, common: Tensor) -> Tensor:
    """Returns the factor by which the values of a block are multiplied before they are rounded."""
    return (1 / (scale.float() * (1 / common))).clamp(max=_FLT_MAX)


def spread_blocks(blocks: Tensor, format: Format, rows: int) -> Tensor:
    """Expands the entries of blocks to one per element of a matrix with this number of rows."""
    assert format.block is not None
    return blocks.repeat_interleave(format.block[0], 0)[:rows].repeat_interleave(format.block[1], 1)


def _four_over_six(
    values: Tensor, block_amax: Tensor, common: Tensor, amax: Tensor, format: Format
) -> tuple[Tensor, Tensor]:
    """Maps the block's amax to 6, or to 4 if that has the smaller error; errors are summed in index order. An error
    that is NaN is not smaller."""
    target = block_amax / _constant(6, common) * common
    candidates = []
    for wanted in (target, target * 1.5):
        scale = round_to_fp8(wanted.clamp(max=448.0), _E4M3)
        bits = round_to_e2m1(values * encode_factor(scale, common).repeat_interleave(NV_BLOCK, 1))
        scaled = decode(bits) * scale.float().repeat_interleave(NV_BLOCK, 1) * amax.unsqueeze(-1)
        difference = (scaled / _constant(_largest(format), amax) - values).abs()
        terms = difference * difference if format.four_over_six == "mse" else difference
        terms = terms.unflatten(1, (-1, NV_BLOCK))
        error = torch.zeros_like(block_amax)
        for i in range(NV_BLOCK):
            error = error + terms[..., i]
        candidates.append((bits, scale.view(torch.uint8), error))
    (bits6, scale6, error6), (bits4, scale4, error4) = candidates
    four = error4 < error6
    bits = torch.where(four.repeat_interleave(NV_BLOCK, 1), bits4, bits6)
    return pack(bits), torch.where(four, scale4, scale6)
