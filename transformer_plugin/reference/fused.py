"""What the fused ops mean: their steps, one after the other."""

from __future__ import annotations

from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference import activation, gemm
from transformer_plugin.reference import quantize as _quantize


def quantize_rows(
    matrix: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Along rows, of a plain or a ragged matrix."""
    if group_sizes is None:
        return _quantize.quantize(matrix, format, amax, seed)
    return _quantize.grouped_quantize(matrix, group_sizes, format, amax, seed)


def quantize_columns(
    matrix: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Along columns, of a plain or a ragged matrix."""
    if group_sizes is None:
        return _quantize.quantize_transposed(matrix, format, amax, seed)
    return _quantize.grouped_quantize_transposed(matrix, group_sizes, format, amax, seed)


def quantize_both(
    matrix: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both directions, of a plain or a ragged matrix."""
    if group_sizes is None:
        return _quantize.quantize_both(matrix, format, amax, amax_t, seed)
    return _quantize.grouped_quantize_both(matrix, group_sizes, format, amax, amax_t, seed)


def swiglu_quantize(
    input: Tensor,
    probs: Tensor | None,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The activation in the dtype of its input, quantized along rows."""
    return quantize_rows(activation.swiglu(input, probs), group_sizes, format, amax, seed)


def swiglu_quantize_transposed(
    input: Tensor,
    probs: Tensor | None,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The activation in the dtype of its input, quantized along columns."""
    return quantize_columns(activation.swiglu(input, probs), group_sizes, format, amax, seed)


def swiglu_quantize_both(
    input: Tensor,
    probs: Tensor | None,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both directions."""
    return quantize_both(activation.swiglu(input, probs), group_sizes, format, amax, amax_t, seed)


def swiglu_backward_quantize_both(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient in the dtype of the input, quantized in both directions; the probability's is 0 past the groups."""
    grad_input, grad_probs = activation.swiglu_backward(grad, input, probs)
    if group_sizes is not None and probs is not None:
        grad_probs[int(group_sizes.sum()) :] = 0.0
    return *quantize_both(grad_input, group_sizes, format, amax, amax_t, seed), grad_probs


def _bias_gradient(grad: Tensor, group_sizes: Tensor | None) -> Tensor:
    if group_sizes is None:
        return gemm.bias_backward(grad)
    return gemm.grouped_bias_backward(grad, group_sizes)[0]


def bias_backward_quantize(
    grad: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient quantized along rows, and the bias's gradient."""
    return *quantize_rows(grad, group_sizes, format, amax, seed), _bias_gradient(grad, group_sizes)


def bias_backward_quantize_transposed(
    grad: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient quantized along columns, and the bias's gradient."""
    return *quantize_columns(grad, group_sizes, format, amax, seed), _bias_gradient(grad, group_sizes)


def bias_backward_quantize_both(
    grad: Tensor,
    group_sizes: Tensor | None,
    format: str | Format,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both directions, and the bias's gradient."""
    both = quantize_both(grad, group_sizes, format, amax, amax_t, seed)
    return *both, _bias_gradient(grad, group_sizes)
