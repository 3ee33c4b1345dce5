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


def _argument(
    name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = "none"
) -> Any:
    """What a call passes, a format for example; the default where the call leaves it out."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def _columns(data: Shape, format: str) -> int:
    """The number of elements in a row of quantized data."""
    return data[-1] * (2 if format.startswith("nvfp4") else 1)


def _product(position: int) -> Callable[..., int]:
    """The formula of an op whose argument ``a_format`` has this position."""

    def formula(*args: Any, out_shape: Shape, **kwargs: Any) -> int:
        return 2 * prod(out_shape) * _columns(args[0], _argument("a_format", position, args, kwargs))

    return formula


def _product_out(out: int, position: int) -> Callable[..., int]:
    """The same for an op that writes into its argument ``out``."""

    def formula(*args: Any, **kwargs: Any) -> int:
        buffer = args[out] if len(args) > out else kwargs["out"]
        return 2 * prod(buffer) * _columns(args[0], _argument("a_format", position, args, kwargs))

    return formula


def _weight_gradient(position: int) -> Callable[..., int]:
    """The formula of an op whose argument ``grad_format`` has this position."""

    def formula(grad: Shape, input: Shape, group_sizes: Shape, *args: Any, **kwargs: Any) -> int:
        key = _argument("grad_format", position - 3, args, kwargs)
        if key == "none":
            index = _argument("grad_rows", position - 8, args, kwargs, None)
            return 2 * (grad if index is None else index)[0] * grad[1] * input[1]
        rows = _columns(grad, key)
        if Format.parse(key).aligned_groups:  # the rows include the padding of each group
            rows -= GROUP_ALIGNMENT * (group_sizes[0] + 1)
        return 2 * grad[0] * input[0] * rows

    return formula


def _activation_product(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _linear(input: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    ranks: int = _argument("sequence_parallel_size", 12, args, kwargs, 1)
    return 2 * prod(input) * weight[-2] * ranks


def _router_logits_backward(
    grad: Shape, input: Shape, weight: Shape, for_input: bool = True, for_weight: bool = True, **_: Any
) -> int:
    """Each gradient once, although the product of a gradient that is split into two parts takes twice as many."""
    return 2 * prod(input) * weight[0] * (for_input + for_weight)


def _norm_linear(
    input: Shape, norm_weight: Shape, norm_bias: Shape, weight: Shape, *_: Any, **__: Any
) -> int:
    return 2 * prod(input) * weight[0]


def _grouped_linear(input: Shape, weight: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 2 * prod(input) * weight[0][-2]


def _mlp(input: Shape, fc1_weight: Sequence[Shape], fc2_weight: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 2 * prod(input) * (fc1_weight[0][-2] + fc2_weight[0][-1])


#: The formula of each op that multiplies matrices.
FORMULAS: dict[str, Callable[..., int]] = {
    "gemm": _product(8),
    "gemm_out": _product_out(2, 9),
    "grouped_gemm": _product(13),
    "grouped_gemm_out": _product_out(3, 14),
    "grouped_gemm_wgrad": _weight_gradient(11),
    "grouped_gemm_wgrad_out": _weight_gradient(13),
    "grouped_gemm_activation": _activation_product,
    "grouped_gemm_activation_quantize": _activation_product,
    "linear": _linear,
    "router_logits": _linear,
    "router_logits_with_tokens": _linear,
    "router_logits_backward": _router_logits_backward,
    "norm_linear": _norm_linear,
    "grouped_linear": _grouped_linear,
    "grouped_mlp": _mlp,
    "linear_out": _linear,
    "grouped_linear_out": _grouped_linear,
    "grouped_mlp_out": _mlp,
}


def register() -> None:
    """Registers the formulas with torch's counter."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.transformer_plugin, name))(formula)
