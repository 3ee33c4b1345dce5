"""FP8 with a scale for each row: quantizing.

A matrix is FP8 data ``[..., K]`` and float32 scales ``[...]``, ``value = float(data) * scale`` along a row: an operand
of ``fp8_row`` in :mod:`transformer_plugin.ops.gemm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.transformer_plugin


def quantize_rowwise(
    input: Tensor, *, element: str = "e4m3", power_of_two_scales: bool = False, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantizes to FP8 with one scale for each row.

    Args:
        input: ``[..., K]`` float32, bfloat16 or float16, at least 1 dimension; any strides, any sizes including 0.
        element: ``"e4m3"`` (largest 448) or ``"e5m2"`` (57344).
        power_of_two_scales: clears the mantissa of the factor before rounding.
        epsilon: an amax below it counts as it.

    Returns:
        The data, float8 in the shape of ``input``, and ``scale`` float32 ``[...]``, to multiply by when dequantizing:
        the arithmetic of ``fp8_tensor`` (:mod:`transformer_plugin.ops.quantize`) with a row in place of the tensor. The
        same bytes on CPU and CUDA. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: no dimension, another element, an epsilon that is negative or not finite.
    """
    return _ops.quantize_rowwise.default(
        input, element=element, power_of_two_scales=power_of_two_scales, epsilon=epsilon
    )
