"""How many floating-point operations each product is, for ``torch.utils.flop_counter.FlopCounterMode``.

As torch counts its own: two for every multiplication and addition of a product, nothing for a bias, an activation or a
conversion between formats. A grouped product counts all the rows of its buffer, those past the last group too, because
the sizes of the groups are on the device: with a buffer of twice the rows in use it says twice what is multiplied.

The counter sees what is below autograd: one op of these for a product without a gradient, and for one with a gradient
those that its forward and its backward call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from transformer_plugin.formats import GROUP_ALIGNMENT, Format

Shape = Sequence[int]


def _argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A format of a call; defaults at the end of a call are left out."""
    return args[position] if len(args) > position else kwargs.get(name, "none")


def _columns(data: Shape, format: str) -> int:
    """The elements in a row of data."""
    return data[-1] * (2 if format.startswith("nvfp4") else 1)


def _product(position: int) -> Callable[..., int]:
    """Of an op whose argument ``a_format`` is at a position."""

    def formula(*args: Any, out_shape: Shape, **kwargs: Any) -> int:
        return 2 * prod(out_shape) * _columns(args[0], _argument("a_format", position, args, kwargs))

    return formula


def _product_out(out: int, position: int) -> Callable[..., int]:
    """The same, into a buffer that is an argument."""

    def formula(*args: Any, **kwargs: Any) -> int:
        buffer = args[out] if len(args) > out else kwargs["out"]
        return 2 * prod(buffer) * _columns(args[0], _argument("a_format", position, args, kwargs))

    return formula


def _weight_gradient(position: int) -> Callable[..., int]:
    """Of an op whose argument ``grad_format`` is at a position."""

    def formula(grad: Shape, input: Shape, group_sizes: Shape, *args: Any, **kwargs: Any) -> int:
        key = _argument("grad_format", position - 3, args, kwargs)
        if key == "none":
            return 2 * grad[0] * grad[1] * input[1]
        rows = _columns(grad, key)
        if Format.parse(key).aligned_groups:  # T comes back rounded up to a multiple of the alignment
            rows -= GROUP_ALIGNMENT * (group_sizes[0] + 1)
        return 2 * grad[0] * input[0] * rows

    return formula


def _swiglu(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _linear(input: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * weight[-2]


def _mlp(input: Shape, fc1_weight: Shape, fc2_weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * (fc1_weight[1] + fc2_weight[2])


#: of each op that multiplies.
FORMULAS: dict[str, Callable[..., int]] = {
    "gemm": _product(8),
    "gemm_out": _product_out(2, 9),
    "grouped_gemm": _product(13),
    "grouped_gemm_out": _product_out(3, 14),
    "grouped_gemm_wgrad": _weight_gradient(10),
    "grouped_gemm_wgrad_out": _weight_gradient(12),
    "grouped_gemm_swiglu": _swiglu,
    "grouped_gemm_swiglu_quantize": _swiglu,
    "linear": _linear,
    "linear_scaled": _linear,
    "grouped_linear": _linear,
    "grouped_linear_scaled": _linear,
    "grouped_mlp": _mlp,
}


def register() -> None:
    """Tells torch's counter."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.transformer_plugin, name))(formula)
