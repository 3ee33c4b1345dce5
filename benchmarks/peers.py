"""Each format as a user would write it for torch.compile: the peers of the ops of :mod:`benchmarks.quantize_cases`.

The reference defines the bytes for any input. These functions give the same bytes for finite values, in matrices whose
sides are multiples of 128, in a form that Inductor compiles to few kernels. Blocks are a separate dimension: their amax
is a reduction, and the same kernel rounds the block. E8M0 and packed E2M1, which Inductor does not support, are uint8.
The scale of an all-zero block may differ from the op's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, MX_BLOCK, NV_BLOCK, Format

Tensors = tuple[Tensor, ...]

LARGEST = 448.0  # the largest E4M3 value
_WHOLE, _WHOLE_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23, as a value and as float32 bits


def quantizer(format: Format, direction: str) -> Callable[..., Tensors]:
    """Returns the function that quantizes a matrix, with the amaxes that the format needs. For 1x128 and 1x32 blocks
    it also takes several matrices, as if they were concatenated along the columns."""
    return _QUANTIZERS[format.family + (" square" if format.square_blocks else ""), direction]


def _exponent(amax: Tensor) -> Tensor:
    """Returns the exponent bits of ``amax / 448`` rounded up to a power of two, the scale of ``fp8_block`` and
    ``mxfp8``. Computed from the bits, because a GPU's logarithm and fast division may miss a power of two."""
    return ((amax * (1 / LARGEST)).view(torch.int32) + 0x7FFFFF) >> 23


def _power(exponent: Tensor) -> Tensor:
    """Returns the power of two with these exponent bits."""
    return (exponent << 23).view(torch.float32)


def _over(value: float, amax: Tensor) -> Tensor:
    """Returns ``value / amax``. For a Python number torch would multiply by the reciprocal, which rounds twice."""
    return torch.full_like(amax, value) / amax


def _to_fp8(blocks: Tensor, dim: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the quantized data of blocks along ``dim``, and their exponents, without that dimension."""
    values = blocks.float()
    exponent = _exponent(values.abs().amax(dim, keepdim=True))
    # 254 - e is the exponent of the reciprocal. The scale was rounded up, so no value exceeds 448.
    return (values * _power(254 - exponent)).to(torch.float8_e4m3fn), exponent.squeeze(dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates parts, contiguous. Inductor drops a ``torch.cat`` of one part, and its memory order with it."""
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()


def _rows_to_fp8(parts: Sequence[Tensor], width: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the data [M, K], and for each part the exponents [M, K / width]."""
    data, exponents = zip(*(_to_fp8(part.unflatten(1, (-1, width)), 2) for part in parts), strict=True)
    return _joined(data, 1).flatten(1), exponents


def _columns_to_fp8(parts: Sequence[Tensor], height: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the data [K, M], and for each part the exponents [M / height, K]."""
    data, exponents = zip(*(_to_fp8(part.unflatten(0, (-1, height)), 1) for part in parts), strict=True)
    return _transposed(data), exponents


def _transposed(parts: Sequence[Tensor]) -> Tensor:
    """Transposes blocks of rows [M / height, height, K] to [K, M]. Parts are concatenated after the transpose, which
    otherwise becomes a separate kernel."""
    return _joined([part.permute(2, 0, 1) for part in parts], 0).flatten(1)


def fp8_block_rows(*parts: Tensor) -> Tensors:
    """1x128 blocks; scales [K / 128, M]."""
    data, exponents = _rows_to_fp8(parts, BLOCK)
    return data, _joined([_power(exponent).t() for exponent in exponents], 0)


def fp8_block_transposed(*parts: Tensor) -> Tensors:
    """128x1 blocks; scales [M / 128, K]."""
    data, exponents = _columns_to_fp8(parts, BLOCK)
    return data, _joined([_power(exponent) for exponent in exponents], 1)


def fp8_block_both(*parts: Tensor) -> Tensors:
    """Both directions."""
    return *fp8_block_rows(*parts), *fp8_block_transposed(*parts)


def _square_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the data [M, K] and the scales [M / 128, K / 128]."""
    data, exponent = _to_fp8(x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))
    return data.flatten(2).flatten(0, 1), _power(exponent)


def _up4(scale: Tensor) -> Tensor:
    """Pads the columns with zeros to a multiple of 4."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


def fp8_block_square_rows(x: Tensor) -> Tensors:
    """128x128 blocks; scales [M / 128, up4(K / 128)]."""
    data, scale = _square_to_fp8(x)
    return data, _up4(scale)


def fp8_block_square_both(x: Tensor) -> Tensors:
    """Both directions; a block has the same data in both."""
    data, scale = _square_to_fp8(x)
    return data, _up4(scale), data.t().contiguous(), _up4(scale.t())


def fp8_tensor_rows(x: Tensor) -> Tensors:
    """One scale, from the amax of the whole matrix."""
    scale = _over(LARGEST, x.abs().amax().float().view(1))
    return (x.float() * scale).to(torch.float8_e4m3fn), 1 / scale


def fp8_tensor_both(x: Tensor) -> Tensors:
    """Both directions; they have the same data."""
    data, scale_inv = fp8_tensor_rows(x)
    return data, scale_inv, data.t().contiguous(), scale_inv.clone()


def scaled_rows(x: Tensor, scale: Tensor, amax: Tensor) -> Tensors:
    """The scale is an argument; ``amax`` is raised to at least that of ``x``."""
    values = x.float()
    # A kernel that reduces rows can also round them; one that reduces the whole matrix cannot.
    amax.copy_(torch.maximum(amax, values.abs().amax(1).amax(0)))
    return (values * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), 1 / scale


def scaled_both(x: Tensor, scale: Tensor, amax: Tensor) -> Tensors:
    """Both directions; they have the same data."""
    data, scale_inv = scaled_rows(x, scale, amax)
    return data, scale_inv, data.t().contiguous(), scale_inv.clone()


def mxfp8_rows(*parts: Tensor) -> Tensors:
    """1x32 blocks; scales [M, K / 32]."""
    data, exponents = _rows_to_fp8(parts, MX_BLOCK)
    return data, _joined([exponent.to(torch.uint8) for exponent in exponents], 1)


def mxfp8_transposed(*parts: Tensor) -> Tensors:
    """32x1 blocks; scales [K, M / 32]."""
    data, exponents = _columns_to_fp8(parts, MX_BLOCK)
    return data, _joined([exponent.to(torch.uint8).t() for exponent in exponents], 0)


def mxfp8_both(*parts: Tensor) -> Tensors:
    """Both directions."""
    return *mxfp8_rows(*parts), *mxfp8_transposed(*parts)


def _to_e2m1(values: Tensor) -> Tensor:
    """Rounds to the nearest E2M1 code, ties to even, as int32."""
    a = values.abs()
    # The code is the least of 2a, a + 2, a / 2 + 4 and 7. Adding 1.5 * 2^23 rounds each to an integer, which is in the
    # last bits. Compared as integers the sums have the same order, and integer minima need no NaN handling.
    sums = (a * 2 + _WHOLE, a + (_WHOLE + 2), a * 0.5 + (_WHOLE + 4))
    twice, plus, half = (total.view(torch.int32) for total in sums)
    least = torch.minimum(torch.minimum(twice, plus), half).clamp(max=_WHOLE_BITS + 7)
    return (least & 7) | (values.view(torch.int32) >> 28 & 8)


def _to_nvfp4(even: Tensor, odd: Tensor, amax: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the data, two neighbors in one byte, and the scales without ``dim``. A block comes as two halves, so
    that there are as many bytes as elements in the reduction, and one kernel does both."""
    even, odd = even.float(), odd.float()
    common = _over(6 * LARGEST, amax)
    block = torch.maximum(even.abs(), odd.abs()).amax(dim, keepdim=True)
    scale = (block * (common * (1 / 6))).to(torch.float8_e4m3fn)
    factor = (1 / (scale.float() * (1 / common))).clamp(max=torch.finfo(torch.float32).max)
    data = _to_e2m1(even * factor) | _to_e2m1(odd * factor) << 4
    return data.to(torch.uint8), scale.squeeze(dim)


def nvfp4_rows(x: Tensor, amax: Tensor) -> Tensors:
    """1x16 blocks; scales [M, K / 16]."""
    even, odd = x.unflatten(1, (-1, NV_BLOCK // 2, 2)).unbind(3)
    data, scale = _to_nvfp4(even, odd, amax, 2)
    return data.flatten(1), scale


def nvfp4_both(x: Tensor, amax: Tensor, amax_t: Tensor) -> Tensors:
    """Both directions: also 16x1 blocks; scales [K, M / 16]."""
    even, odd = x.unflatten(0, (-1, NV_BLOCK // 2, 2)).unbind(2)
    data, scale = _to_nvfp4(even, odd, amax_t, 1)
    return *nvfp4_rows(x, amax), _transposed([data]), scale.t().contiguous()


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
    """Dequantizes row-wise ``fp8_block`` or ``mxfp8`` to bfloat16."""
    assert format.block is not None
    scale = _power(scale_inv.int()) if format.family == "mxfp8" else scale_inv.t()
    return (data.unflatten(1, (-1, format.block[1])).float() * scale[:, :, None]).flatten(1).bfloat16()


def swiglu(x: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * linear * probs."""
    gate, linear = x.float().chunk(2, 1)
    return (F.silu(gate) * linear * probs[:, None]).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor, probs: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate, linear and probabilities. The last is summed by blocks first, which a kernel that
    reduces blocks to an amax can do, too. Concatenating gate and linear would write them before quantization."""
    gate, linear = x.float().chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    scaled = grad.float() * probs[:, None]
    of_gate = scaled * linear * (sigmoid + silu * (1 - sigmoid))
    of_probs = (grad.float() * (silu * linear)).unflatten(1, (-1, block)).sum(2).sum(1)
    return of_gate.to(x.dtype), (scaled * silu).to(x.dtype), of_probs


def bias_backward(grad: Tensor, block: int) -> Tensor:
    """Sums the rows, by blocks first: a kernel that reduces blocks to an amax can do that, too."""
    return grad.unflatten(0, (-1, block)).float().sum(1).sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the output, and the reciprocal root mean square of each row."""
    values = x.float()
    rstd = torch.rsqrt(values.square().mean(1) + eps)
    return (values * rstd[:, None] * weight.float()).to(x.dtype), rstd


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, and the mean and the reciprocal standard deviation of each row."""
    values = x.float()
    variance, mean = torch.var_mean(values, 1, correction=0)
    rstd = torch.rsqrt(variance + eps)
    output = (values - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    return output.to(x.dtype), mean, rstd
