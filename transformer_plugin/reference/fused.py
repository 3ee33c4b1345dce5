"""References of the fused ops: their steps in sequence. What an op leaves out without ``zero_tail`` is zero."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.activations import Activation
from transformer_plugin.formats import Format
from transformer_plugin.reference import activations, gemm
from transformer_plugin.reference.quantize import quantize

__all__ = [
    "activation_backward_quantize",
    "activation_quantize",
    "bias_backward_quantize",
]


def activation_quantize(
    input: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    zero_tail: bool = True,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, ...]:
    """The activation in the dtype of its input, quantized."""
    act = activations.activation(input, probs, None, activation)
    return quantize(act, format, group_sizes, amax, amax_t, seed, rowwise, columnwise)


def activation_backward_quantize(
    grad: Tensor,
    input: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    zero_tail: bool = True,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient in the dtype of the input, quantized in both directions; the probability's is 0 past the groups."""
    grad_input, grad_probs = activations.activation_backward(grad, input, probs, group_sizes, activation)
    data, scale, data_t, scale_t = quantize(
        grad_input, format, group_sizes, amax, amax_t, seed, columnwise=True
    )
    return data, scale, data_t, scale_t, grad_probs


def _bias_gradient(grad: Tensor, group_sizes: Tensor | None) -> Tensor:
    if group_sizes is None:
        return gemm.bias_backward(grad)
    return gemm.grouped_bias_backward(grad, group_sizes)[0]


def bias_backward_quantize(
    grad: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    zero_tail: bool = True,
) -> tuple[Tensor, ...]:
    """The gradient quantized, and the bias's gradient."""
    values = quantize(grad, format, group_sizes, amax, amax_t, seed, rowwise, columnwise)
    return *values, _bias_gradient(grad, group_sizes)
