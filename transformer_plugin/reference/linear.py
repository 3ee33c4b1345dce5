"""References of linear layers. They read group sizes on the host; only the results are specified."""

from __future__ import annotations

import math

from torch import Tensor

from transformer_plugin.ops._operands import Tensors
from transformer_plugin.reference.delayed_scaling import quantize_scaled
from transformer_plugin.reference.gemm import gemm, grouped_gemm, watched, watched_weight
from transformer_plugin.reference.quantize import dequantize

__all__ = ["grouped_linear", "linear"]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    main_grad: Tensor | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    input_format: str = "fp8_tensor:e4m3",
    weight_format: str = "fp8_tensor:e4m3",
) -> Tensor:
    """input @ weight.T + bias, without quantizing the operands. The gradient of the weight, in the weight's dtype, goes
    into a ``main_grad``. With a ``scale`` (delayed scaling) it is the product of the operands' values in FP8, and the
    amaxes of input and weight are collected."""
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    if scale is None:
        weight = watched(weight, main_grad, accumulate, weight_grad)
    else:
        data, inverse = quantize_scaled(rows, scale, input_format, amax)
        rows = dequantize(data, inverse, input_format)
        data, inverse = quantize_scaled(weight, scale, weight_format, amax, first=1)
        weight = dequantize(data, inverse, weight_format)
    return gemm(rows, weight, bias, dtype=input.dtype).reshape(*input.shape[:-1], weight.shape[0])


def grouped_linear(
    input: Tensor,
    weight: Tensors,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    main_grad: Tensors | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    input_format: str = "fp8_tensor:e4m3",
    weight_format: str = "fp8_tensor:e4m3",
) -> Tensor:
    """:func:`linear` for each group, with separate scales."""
    if scale is None:
        stacked = watched_weight(weight, main_grad, accumulate, weight_grad)
        return grouped_gemm(input, stacked, group_sizes, bias, bias_scale)
    assert isinstance(weight, Tensor)
    data, inverse = quantize_scaled(input, scale, input_format, amax, group_sizes)
    rows = dequantize(data, inverse, input_format, group_sizes=group_sizes)
    data, inverse = quantize_scaled(weight, scale, weight_format, amax, first=len(weight))
    matrices = dequantize(data, inverse, weight_format)
    return grouped_gemm(rows, matrices, group_sizes, bias, bias_scale, dtype=input.dtype)
