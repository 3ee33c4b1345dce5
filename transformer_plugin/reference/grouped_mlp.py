"""Reference of the experts' op: its steps in sequence."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.activations import Activation
from transformer_plugin.ops._operands import Tensors
from transformer_plugin.reference import activations
from transformer_plugin.reference.linear import grouped_linear
from transformer_plugin.reference.routing import permute_rows, unpermute

__all__ = [
    "grouped_mlp",
]


def grouped_mlp(
    input: Tensor,
    fc1_weight: Tensors,
    fc2_weight: Tensors,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    fc1_main_grad: Tensors | None = None,
    fc2_main_grad: Tensors | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    slot: Tensor | None = None,
    source: Tensor | None = None,
    activation: str | Activation = "swiglu",
) -> Tensor:
    """A product, an activation times probability, and a product whose bias is multiplied by the probability. Operands
    are not quantized. With maps of slots the rows are copies of tokens, and each token's are added."""
    if slot is not None and source is not None:
        rows = permute_rows(input, slot, source)
        own = (fc1_weight, fc2_weight, group_sizes, probs, fc1_bias, fc2_bias, fc1_main_grad, fc2_main_grad)
        return unpermute(
            grouped_mlp(rows, *own, accumulate, weight_grad, activation=activation), slot, source
        )
    options = (accumulate, weight_grad)
    linear = grouped_linear(input, fc1_weight, group_sizes, fc1_bias, None, fc1_main_grad, *options)
    scale = None if fc2_bias is None else probs
    hidden = activations.activation(linear, probs, None, activation)
    return grouped_linear(hidden, fc2_weight, group_sizes, fc2_bias, scale, fc2_main_grad, *options)
