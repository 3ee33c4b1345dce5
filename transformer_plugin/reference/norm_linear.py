"""Reference of a linear layer of a norm: the two steps."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.reference.linear import linear
from transformer_plugin.reference.norm import layer_norm, rms_norm

__all__ = [
    "norm_linear",
]


def norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normalization: str = "rms_norm",
    zero_centered: bool = False,
    return_normalized: bool = False,
    *,
    main_grad: Tensor | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
) -> tuple[Tensor, Tensor]:
    """A norm, rounded to the dtype of the input, and a product. Operands are not quantized."""
    if normalization == "layer_norm":
        normalized = layer_norm(input, norm_weight, norm_bias, eps, zero_centered)
    else:
        normalized = rms_norm(input, norm_weight, eps, zero_centered)
    output = linear(normalized, weight, bias, main_grad, accumulate, weight_grad)
    return output, normalized if return_normalized else input.new_empty(0)
