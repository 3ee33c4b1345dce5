"""The number of floating-point operations of each product, for ``torch.utils.flop_counter.FlopCounterMode``.

The formulas follow torch's: two operations for every multiply-add of a product, none for a bias, an activation or a
conversion between formats. A grouped product counts all rows of its buffer, also those past the last group, because the
group sizes are on the device. If the buffer has twice the rows in use, the count is twice the actual number.

The counter sees ops below autograd: for a product without a gradient one of these ops, otherwise the ops that its
forward and backward call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from transformer_plugin.formats import GROUP_ALIGNMENT, Format

Shape = Sequence[int]


def _columns(data: Shape, format: str) -> int:
    """The number of elements in a row of quantized data."""
    return data[-1] * (2 if Format.parse(format).family == "nvfp4" else 1)


def _product(a: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


def _product_out(a: Shape, b: Shape, out: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(out) * a[-1]


def _grouped_product_out(a: Shape, b: Any, group_sizes: Shape, out: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(out) * a[-1]


def _quantized(
    a: Shape, a_scale: Shape, b: Shape, b_scale: Shape, a_format: str, *_: Any, out_shape: Shape, **__: Any
) -> int:
    return 2 * prod(out_shape) * _columns(a, a_format)


def _quantized_out(
    a: Shape,
    a_scale: Shape,
    b: Shape,
    b_scale: Shape,
    a_format: str,
    b_format: str,
    out: Shape,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(out) * _columns(a, a_format)


def _grouped_quantized(
    a: Shape,
    a_scale: Shape,
    b: Any,
    b_scale: Any,
    group_sizes: Shape,
    a_format: str,
    *_: Any,
    out_shape: Shape,
    **__: Any,
) -> int:
    return 2 * prod(out_shape) * _columns(a, a_format)


def _grouped_quantized_out(
    a: Shape,
    a_scale: Shape,
    b: Shape,
    b_scale: Shape,
    group_sizes: Shape,
    a_format: str,
    b_format: str,
    out: Shape,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(out) * _columns(a, a_format)


def _weight_gradient(grad: Shape, input: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * grad[1] * input[1]


def _quantized_weight_gradient(
    grad_t: Shape,
    grad_t_scale: Shape,
    input_t: Shape,
    input_t_scale: Shape,
    group_sizes: Shape,
    grad_format: str,
    *_: Any,
    **__: Any,
) -> int:
    rows = _columns(grad_t, grad_format)
    if Format.parse(grad_format).aligned_groups:  # the rows include the padding of each group
        rows -= GROUP_ALIGNMENT * (group_sizes[0] + 1)
    return 2 * grad_t[0] * input_t[0] * rows


def _swiglu(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _swiglu_backward(grad: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * grad[1] * b[2]


def _linear(input: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * weight[-2]


def _mlp(input: Shape, fc1_weight: Shape, fc2_weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * (fc1_weight[1] + fc2_weight[2])


#: The formula of each op that multiplies matrices.
FORMULAS: dict[str, Callable[..., int]] = {
    "gemm": _product,
    "grouped_gemm": _product,
    "grouped_gemm_list": _product,
    "gemm_rowwise": _product,
    "grouped_gemm_rowwise": _product,
    "gemm_out": _product_out,
    "grouped_gemm_out": _grouped_product_out,
    "gemm_quantized": _quantized,
    "gemm_quantized_out": _quantized_out,
    "grouped_gemm_quantized": _grouped_quantized,
    "grouped_gemm_quantized_list": _grouped_quantized,
    "grouped_gemm_quantized_out": _grouped_quantized_out,
    "grouped_gemm_wgrad": _weight_gradient,
    "grouped_gemm_wgrad_out": _weight_gradient,
    "grouped_gemm_wgrad_list_out": _weight_gradient,
    "grouped_gemm_wgrad_quantized": _quantized_weight_gradient,
    "grouped_gemm_wgrad_quantized_out": _quantized_weight_gradient,
    "grouped_gemm_swiglu": _swiglu,
    "grouped_gemm_swiglu_quantize": _swiglu,
    "grouped_gemm_swiglu_backward": _swiglu_backward,
    "linear": _linear,
    "linear_scaled": _linear,
    "grouped_linear": _linear,
    "grouped_linear_scaled": _linear,
    "grouped_mlp": _mlp,
}


def register() -> None:
    """Registers the formulas with torch's counter."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.transformer_plugin, name))(formula)
