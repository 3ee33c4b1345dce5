"""What the fused ops mean: their steps, one after the other."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference import activation, gemm
from transformer_plugin.reference import quantize as _quantize


def quantize_rows(
    matrix: Tensor, group_sizes: Tensor | None, format: str | Format, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Along rows, of a plain or a ragged matrix."""
    if group_sizes is None:
        return _quantize.quantize(matrix, format, amax)
    return _quantize.grouped_quantize(matrix, group_sizes, format, amax)


def quantize_columns(
    matrix: Tensor, group_sizes: Tensor | None, format: str | Format, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Along columns, of a plain or a ragged matrix."""
    if group_sizes is None:
        return _quantize.quantize_transposed(matrix, format, amax)
    return _quantize.grouped_quantize_transposed(matrix, group_sizes, format, amax)


def swiglu_quantize(
    input: Tensor, probs: Tensor | None, group_sizes: Tensor | None, format: str | Format
) -> tuple[Tensor, Tensor]:
    """The activation in the dtype of its input, quantized along rows."""
    return quantize_rows(activation.swiglu(input, probs), group_sizes, format)


def swiglu_quantize_transposed(
    input: Tensor, probs: Tensor | None, group_sizes: Tensor | None, format: str | Format
) -> tuple[Tensor, Tensor]:
    """The activation in the dtype of its input, quantized along columns."""
    return quantize_columns(activation.swiglu(input, probs), group_sizes, format)


def swiglu_quantize_both(
    input: Tensor, probs: Tensor | None, group_sizes: Tensor | None, format: str | Format
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both directions."""
    output = activation.swiglu(input, probs)
    return *quantize_rows(output, group_sizes, format), *quantize_columns(output, group_sizes, format)


def swiglu_backward_quantize_both(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None,
    group_sizes: Tensor | None,
    format: str | Format,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient in the dtype of the input, quantized in both directions; the probability's is 0 past the groups."""
    grad_input, grad_probs = activation.swiglu_backward(grad, input, probs)
    if group_sizes is not None and probs is not None:
        grad_probs[int(group_sizes.sum()) :] = 0.0
    rows = quantize_rows(grad_input, group_sizes, format)
    return *rows, *quantize_columns(grad_input, group_sizes, format), grad_probs


def _bias_gradient(grad: Tensor, group_sizes: Tensor | None) -> Tensor:
    if group_sizes is None:
        return gemm.bias_backward(grad)
    return gemm.grouped_bias_backward(grad, group_sizes)[0]


def bias_backward_quantize(
    grad: Tensor, group_sizes: Tensor | None, format: str | Format, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient quantized along rows, and the bias's gradient."""
    return *quantize_rows(grad, group_sizes, format, amax), _bias_gradient(grad, group_sizes)


def bias_backward_quantize_transposed(
    grad: Tensor, group_sizes: Tensor | None, format: str | Format, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient quantized along columns, and the bias's gradient."""
    return *quantize_columns(grad, group_sizes, format, amax), _bias_gradient(grad, group_sizes)


def bias_backward_quantize_both(
    grad: Tensor, group_sizes: Tensor | None, format: str | Format, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both directions, and the bias's gradient."""
    rows = quantize_rows(grad, group_sizes, format, amax)
    columns = quantize_columns(grad, group_sizes, format, amax)
    return *rows, *columns, _bias_gradient(grad, group_sizes)
