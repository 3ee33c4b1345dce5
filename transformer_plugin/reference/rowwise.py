"""What FP8 with a scale for each row means."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from transformer_plugin.formats import Element, Format
from transformer_plugin.reference._fp8 import encode_scale, round_to_fp8


def quantize_rowwise(
    input: Tensor, *, element: str = "e4m3", power_of_two_scales: bool = False, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The rule of ``fp8_tensor``, a row in place of the tensor."""
    format = Format("fp8_tensor", cast(Element, element), power_of_two_scales, epsilon=epsilon)
    numbers = input.float().abs().nan_to_num(nan=0.0, posinf=float("inf"))
    amax = numbers.amax(-1) if input.shape[-1] else numbers.sum(-1)
    factor = encode_scale(amax, format, torch.finfo(torch.float32).max)
    return round_to_fp8(input.float() * factor[..., None], format), 1 / factor
