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


def gemm_rowwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """alpha * (a_scale * a) @ (b_scale * b).T + bias, the scales after the sum."""
    return _wide(a, a_scale, b, b_scale, alpha, bias, None).to(dtype)


def _wide(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
    bias_scale: Tensor | None,
) -> Tensor:
    output = (a.float() @ b.float().T) * (a_scale[:, None] * b_scale)
    if alpha is not None:
        output = output * alpha
    if bias is not None:
        output = output + (bias.float() if bias_scale is None else bias_scale[:, None] * bias.float())
    return output


def grouped_gemm_rowwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_sizes: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """The same for each group; zero past the last."""
    output, begin = a_scale.new_zeros(a.shape[0], b.shape[1]), 0
    for group, size in enumerate(group_sizes.tolist()):
        rows = slice(begin, begin + size)
        output[rows] = _wide(
            a[rows],
            a_scale[rows],
            b[group],
            b_scale[group],
            None if alpha is None else alpha[group],
            None if bias is None else bias[group],
            None if bias_scale is None else bias_scale[rows],
        )
        begin += size
    return output.to(dtype)
