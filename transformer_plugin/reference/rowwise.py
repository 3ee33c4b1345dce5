"""What products of FP8 with a scale for each row mean."""

from __future__ import annotations

import torch
from torch import Tensor


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
