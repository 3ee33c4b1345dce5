"""Scales and elements of the FP8 families: from an amax to the float32 factor before rounding, and the rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format


def encode_scale(amax: Tensor, format: Format, overflow: float) -> Tensor:
    """Returns the float32 factor before rounding; ``overflow`` replaces a factor that overflows float32. A NaN
    amax, which only an argument can be, counts as infinite."""
    a = amax.float().clamp(min=format.epsilon)
    scale = torch.full_like(a, format.largest) / a
    scale = torch.where(scale.isinf(), torch.full_like(scale, overflow), scale)
    scale = torch.where((a == 0) | ~a.isfinite(), torch.ones_like(scale), scale)
    if format.power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def encode_exponent(amax: Tensor, format: Format) -> Tensor:
    """The E8M0 byte ``e`` of an amax without NaN: ``2**(e - 127)`` is ``amax / largest`` rounded up to a power of
    two, so that no finite element overflows. An infinite amax takes the largest scale, a zero one the least.

    Source: OCP Microscaling Formats (MX) v1.0 specification for E8M0; NVIDIA TransformerEngine for rounding up,
    and for the product with the float32 nearest to ``1 / largest`` instead of a division.
    """
    largest = torch.tensor(format.largest, dtype=torch.float32, device=amax.device)
    bits = (amax.float() * (1 / largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Byte 0 is 2^-127, which as a subnormal float32 has the mantissa 0x400000.
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + up).clamp(max=254).to(torch.uint8)


def decode_exponent(exponent: Tensor) -> Tensor:
    """Returns ``2**(e - 127)`` in float32 for each byte: the subnormal 2^-127 for 0, and NaN for 255."""
    bits = torch.where(exponent == 0, 0x00400000, exponent.int() << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).int().view(torch.float32)


def round_to_fp8(values: Tensor, format: Format) -> Tensor:
    """Rounds to nearest even, saturating; NaN of either sign becomes 0x7F."""
    assert format.dtype is not None
    bits = values.clamp(-format.largest, format.largest).to(format.dtype).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(bits, 0x7F), bits).view(format.dtype)
