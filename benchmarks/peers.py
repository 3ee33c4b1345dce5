"""Each format as a user writes it for torch.compile: what the ops of :mod:`benchmarks.quantize_cases` stand beside.

The reference says what the bytes are of any input. These say it of finite values, in matrices whose sides are multiples
of 128, and in a form of which Inductor makes few kernels. Blocks lie along a dimension of their own: their amax is a
reduction, and the same kernel rounds what it reduced. E8M0 and packed E2M1, which Inductor does not know, are uint8.
The scale of a block of zeros may be another than the op's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, MX_BLOCK, NV_BLOCK, Format

Tensors = tuple[Tensor, ...]

LARGEST = 448.0  # of E4M3
_WHOLE, _WHOLE_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23, and as float32 stores it


def quantizer(format: Format, direction: str) -> Callable[..., Tensors]:
    """Of a matrix, and of the amaxes that the format scales by. In 1x128 and 1x32 blocks also of several matrices,
    which count as one, side by side."""
    return _QUANTIZERS[format.family + (" square" if format.square_blocks else ""), direction]


def _exponent(amax: Tensor) -> Tensor:
    """Of ``amax / 448`` rounded up to a power of two, the scale of ``fp8_block`` and ``mxfp8``; as float32 stores it.
    Taken from the bits, because a GPU's logarithm and quick division may miss a power of two."""
    return ((amax * (1 / LARGEST)).view(torch.int32) + 0x7FFFFF) >> 23


def _power(exponent: Tensor) -> Tensor:
    """The power of two with this exponent."""
    return (exponent << 23).view(torch.float32)


def _over(value: float, amax: Tensor) -> Tensor:
    """``value / amax``. Of a plain number torch makes a product with the reciprocal, which is rounded twice."""
    return torch.full_like(amax, value) / amax


def _to_fp8(blocks: Tensor, dim: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes of blocks that lie along ``dim``, and their exponents, without it."""
    values = blocks.float()
    exponent = _exponent(values.abs().amax(dim, keepdim=True))
    # 254 - e is the exponent of the reciprocal. The scale was rounded up, so nothing is above 448.
    return (values * _power(254 - exponent)).to(torch.float8_e4m3fn), exponent.squeeze(dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """In the order of memory that the shape has, which Inductor drops together with a ``torch.cat`` of one part."""
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()


def _rows_to_fp8(parts: Sequence[Tensor], width: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Codes [M, K], and of each part exponents [M, K / width]."""
    codes, exponents = zip(*(_to_fp8(part.unflatten(1, (-1, width)), 2) for part in parts), strict=True)
    return _joined(codes, 1).flatten(1), exponents


def _columns_to_fp8(parts: Sequence[Tensor], height: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Codes [K, M], and of each part exponents [M / height, K]."""
    codes, exponents = zip(*(_to_fp8(part.unflatten(0, (-1, height)), 1) for part in parts), strict=True)
    return _turned(codes), exponents


def _turned(parts: Sequence[Tensor]) -> Tensor:
    """Blocks of rows [M / height, height, K] as [K, M]. They are joined only where they lie in their new order, or a
    kernel of its own would turn them."""
    return _joined([part.permute(2, 0, 1) for part in parts], 0).flatten(1)


def fp8_block_rows(*parts: Tensor) -> Tensors:
    """1x128 blocks; scales [K / 128, M]."""
    codes, exponents = _rows_to_fp8(parts, BLOCK)
    return codes, _joined([_power(exponent).t() for exponent in exponents], 0)


def fp8_block_transposed(*parts: Tensor) -> Tensors:
    """128x1 blocks; scales [M / 128, K]."""
    codes, exponents = _columns_to_fp8(parts, BLOCK)
    return codes, _joined([_power(exponent) for exponent in exponents], 1)


def fp8_block_both(*parts: Tensor) -> Tensors:
    """Both directions."""
    return *fp8_block_rows(*parts), *fp8_block_transposed(*parts)


def _square_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M / 128, K / 128]."""
    codes, exponent = _to_fp8(x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))
    return codes.flatten(2).flatten(0, 1), _power(exponent)


def _up4(scale: Tensor) -> Tensor:
    """With zeros up to a multiple of 4 columns."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


def fp8_block_square_rows(x: Tensor) -> Tensors:
    """128x128 blocks; scales [M / 128, up4(K / 128)]."""
    codes, scale = _square_to_fp8(x)
    return codes, _up4(scale)


def fp8_block_square_both(x: Tensor) -> Tensors:
    """A block has the same codes in both directions."""
    codes, scale = _square_to_fp8(x)
    return codes, _up4(scale), codes.t().contiguous(), _up4(scale.t())


def fp8_tensor_rows(x: Tensor) -> Tensors:
    """One scale, of the amax of everything."""
    scale = _over(LARGEST, x.abs().amax().float().view(1))
    return (x.float() * scale).to(torch.float8_e4m3fn), 1 / scale


def fp8_tensor_both(x: Tensor) -> Tensors:
    """A matrix has the same codes in both directions."""
    codes, scale_inv = fp8_tensor_rows(x)
    return codes, scale_inv, codes.t().contiguous(), scale_inv.clone()


def scaled_rows(x: Tensor, scale: Tensor, amax: Tensor) -> Tensors:
    """One scale, given; ``amax`` becomes at least that of ``x``."""
    values = x.float()
    # The kernel that reduces rows can round them, one that reduces everything cannot.
    amax.copy_(torch.maximum(amax, values.abs().amax(1).amax(0)))
    return (values * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), 1 / scale


def scaled_both(x: Tensor, scale: Tensor, amax: Tensor) -> Tensors:
    """The same codes in both directions."""
    codes, scale_inv = scaled_rows(x, scale, amax)
    return codes, scale_inv, codes.t().contiguous(), scale_inv.clone()


def mxfp8_rows(*parts: Tensor) -> Tensors:
    """1x32 blocks; scales [M, K / 32]."""
    codes, exponents = _rows_to_fp8(parts, MX_BLOCK)
    return codes, _joined([exponent.to(torch.uint8) for exponent in exponents], 1)


def mxfp8_transposed(*parts: Tensor) -> Tensors:
    """32x1 blocks; scales [K, M / 32]."""
    codes, exponents = _columns_to_fp8(parts, MX_BLOCK)
    return codes, _joined([exponent.to(torch.uint8).t() for exponent in exponents], 0)


def mxfp8_both(*parts: Tensor) -> Tensors:
    """Both directions."""
    return *mxfp8_rows(*parts), *mxfp8_transposed(*parts)


def _to_e2m1(values: Tensor) -> Tensor:
    """Codes, to the nearest even, as int32."""
    a = values.abs()
    # A code is the least of 2a, a + 2, a / 2 + 4 and 7. Beside 1.5 * 2^23 a sum is rounded to a whole number, which its
    # last bits hold. As integers the sums have the same order, and minima that do not ask for NaN.
    sums = (a * 2 + _WHOLE, a + (_WHOLE + 2), a * 0.5 + (_WHOLE + 4))
    twice, plus, half = (total.view(torch.int32) for total in sums)
    least = torch.minimum(torch.minimum(twice, plus), half).clamp(max=_WHOLE_BITS + 7)
    return (least & 7) | (values.view(torch.int32) >> 28 & 8)


def _to_nvfp4(even: Tensor, odd: Tensor, amax: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes of neighbours in one byte, and scales without ``dim``. A block comes as two halves, so that there are as
    many bytes as there are maxima to reduce, and one kernel does both."""
    even, odd = even.float(), odd.float()
    common = _over(6 * LARGEST, amax)
    block = torch.maximum(even.abs(), odd.abs()).amax(dim, keepdim=True)
    scale = (block * (common * (1 / 6))).to(torch.float8_e4m3fn)
    factor = (1 / (scale.float() * (1 / common))).clamp(max=torch.finfo(torch.float32).max)
    codes = _to_e2m1(even * factor) | _to_e2m1(odd * factor) << 4
    return codes.to(torch.uint8), scale.squeeze(dim)


def nvfp4_rows(x: Tensor, amax: Tensor) -> Tensors:
    """1x16 blocks; scales [M, K / 16]."""
    even, odd = x.unflatten(1, (-1, NV_BLOCK // 2, 2)).unbind(3)
    codes, scale = _to_nvfp4(even, odd, amax, 2)
    return codes.flatten(1), scale


def nvfp4_both(x: Tensor, amax: Tensor, amax_t: Tensor) -> Tensors:
    """And 16x1 blocks; scales [K, M / 16]."""
    even, odd = x.unflatten(0, (-1, NV_BLOCK // 2, 2)).unbind(2)
    codes, scale = _to_nvfp4(even, odd, amax_t, 1)
    return *nvfp4_rows(x, amax), _turned([codes]), scale.t().contiguous()


_QUANTIZERS: dict[tuple[str, str], Callable[..., Tensors]] = {
    ("fp8_block", "rows"): fp8_block_rows,
    ("fp8_block", "transposed"): fp8_block_transposed,
    ("fp8_block", "both"): fp8_block_both,
    ("fp8_block square", "rows"): fp8_block_square_rows,
    ("fp8_block square", "both"): fp8_block_square_both,
    ("fp8_tensor", "rows"): fp8_tensor_rows,
    ("fp8_tensor", "both"): fp8_tensor_both,
    ("mxfp8", "rows"): mxfp8_rows,
    ("mxfp8", "transposed"): mxfp8_transposed,
    ("mxfp8", "both"): mxfp8_both,
    ("nvfp4", "rows"): nvfp4_rows,
    ("nvfp4", "both"): nvfp4_both,
}


def dequantize(data: Tensor, scale_inv: Tensor, format: Format) -> Tensor:
    """Codes and scales of ``fp8_block`` or ``mxfp8`` along rows, in bfloat16."""
    assert format.block is not None
    scale = _power(scale_inv.int()) if format.family == "mxfp8" else scale_inv.t()
    return (data.unflatten(1, (-1, format.block[1])).float() * scale[:, :, None]).flatten(1).bfloat16()


def swiglu(x: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * linear * probs."""
    gate, linear = x.float().chunk(2, 1)
    return (F.silu(gate) * linear * probs[:, None]).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor, probs: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate, linear and probabilities. The latter are summed by blocks first: a kernel that reduces
    blocks to an amax can do that beside. Joined, gate and linear would be written before they are quantized."""
    gate, linear = x.float().chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    scaled = grad.float() * probs[:, None]
    of_gate = scaled * linear * (sigmoid + silu * (1 - sigmoid))
    of_probs = (grad.float() * (silu * linear)).unflatten(1, (-1, block)).sum(2).sum(1)
    return of_gate.to(x.dtype), (scaled * silu).to(x.dtype), of_probs


def bias_backward(grad: Tensor, block: int) -> Tensor:
    """The sum of the rows, by blocks first: a kernel that reduces blocks to an amax can do that beside."""
    return grad.unflatten(0, (-1, block)).float().sum(1).sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and the reciprocal root of each row."""
    values = x.float()
    rstd = torch.rsqrt(values.square().mean(1) + eps)
    return (values * rstd[:, None] * weight.float()).to(x.dtype), rstd


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and the reciprocal root of each row."""
    values = x.float()
    variance, mean = torch.var_mean(values, 1, correction=0)
    rstd = torch.rsqrt(variance + eps)
    output = (values - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    return output.to(x.dtype), mean, rstd
