"""References of the norms, exact to the last bit: float32 operations in a documented order, each rounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference.gemm import sum_rows
from transformer_plugin.reference.quantize import quantize

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_quantize",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_quantize",
]

#: Columns at this distance are added first, in order.
PARTIAL_SUMS = 1024


def _add(sums: Tensor, terms: Tensor) -> Tensor:
    return sums + terms


def _add_squares(sums: Tensor, terms: Tensor) -> Tensor:
    """``fma(terms, terms, sums)``: the square is exact in float64. Where the sum is inexact, it is rounded to odd
    in float64, so that rounding to float32 cannot mistake it for a tie (Boldo and Melquiond, 2008)."""
    a, b = sums.double(), terms.double() * terms.double()
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth)
    even = (total.view(torch.int64) & 1) == 0
    up = torch.nextafter(total, total.new_tensor(float("inf")))
    down = torch.nextafter(total, total.new_tensor(-float("inf")))
    odd = torch.where(error > 0, up, torch.where(error < 0, down, total))
    return torch.where(even, odd, total).float()


def _row_sums(terms: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sums the last dimension: columns 1024 apart in order, from zero; then a tree of ten levels that adds
    neighbors."""
    padded = F.pad(terms, (0, -terms.shape[-1] % PARTIAL_SUMS)).unflatten(-1, (-1, PARTIAL_SUMS))
    sums = torch.zeros_like(padded[..., 0, :])
    for partial in padded.unbind(-2):
        sums = add(sums, partial)
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


def _row_means(terms: Tensor, add: Callable[[Tensor, Tensor], Tensor] = _add) -> Tensor:
    # Divides by a tensor, because torch may multiply by the reciprocal of a Python number instead.
    count = torch.full((), terms.shape[-1], dtype=torch.float32, device=terms.device)
    return _row_sums(terms, add) / count


def _gamma(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    if weight is None:
        return None
    return 1.0 + weight.float() if zero_centered else weight.float()


def _forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output in the input's dtype, and float32 means and reciprocal square roots of the rows."""
    x = input.float()
    mean = _row_means(x) if centered else x.new_zeros(x.shape[:-1])
    x = x - mean[..., None]
    root = torch.sqrt(
        (_row_means(x, _add_squares) + eps).double()
    ).float()  # torch's float32 square root may differ in the last bit
    rstd = torch.ones_like(root) / root
    output, gamma = x * rstd[..., None], _gamma(weight, zero_centered)
    output = output if gamma is None else output * gamma
    output = output if bias is None else output + bias.float()
    return output.to(input.dtype), mean, rstd


def _backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the input, the weight and the bias, in the input's dtype; ``mean`` is None for
    RMSNorm."""
    g, gamma, r = grad.float(), _gamma(weight, zero_centered), rstd[..., None]
    normalised = (input.float() - (0.0 if mean is None else mean[..., None])) * r
    scaled = g if gamma is None else g * gamma
    mean_grad = torch.zeros_like(rstd) if mean is None else _row_means(scaled)
    mean_product = _row_means(scaled * normalised)
    of_input = r * ((scaled - mean_grad[..., None]) - normalised * mean_product[..., None])
    columns = math.prod(input.shape[:-1]), input.shape[-1]
    of_weight = sum_rows((g * normalised).reshape(columns))
    of_bias = sum_rows(g.reshape(columns))
    return of_input.to(input.dtype), of_weight.to(input.dtype), of_bias.to(input.dtype)


def rms_norm(input: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma, rounded once."""
    return _forward(input, weight, None, eps, False, zero_centered)[0]


def rms_norm_forward(
    input: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the output, and the reciprocal square root of each row."""
    output, _, rstd = _forward(input, weight, None, eps, False, zero_centered)
    return output, rstd


def rms_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, rstd: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The chain rule, written out; without a weight its gradient is empty."""
    of_input, of_weight, _ = _backward(grad, input, weight, None, rstd, zero_centered)
    return of_input, of_weight if weight is not None else of_weight[:0]


def rms_norm_quantize(
    input: Tensor,
    weight: Tensor | None,
    eps: float,
    format: str | Format,
    zero_centered: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output in the dtype of the input, quantized row-wise."""
    output, rstd = rms_norm_forward(input, weight, eps, zero_centered)
    data, scale_inv = quantize(output, format, amax=amax, seed=seed)
    return data, scale_inv, rstd


def layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta, rounded once."""
    return _forward(input, weight, bias, eps, True, zero_centered)[0]


def layer_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, and the mean and the reciprocal square root of each row."""
    return _forward(input, weight, bias, eps, True, zero_centered)


def layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool = False,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The chain rule, written out; the gradients of missing parameters are empty."""
    of_input, of_weight, of_bias = _backward(grad, input, weight, mean, rstd, zero_centered)
    return of_input, of_weight if weight is not None else of_weight[:0], of_bias if has_bias else of_bias[:0]


def layer_norm_quantize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    format: str | Format,
    zero_centered: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the output in the dtype of the input, quantized row-wise."""
    output, mean, rstd = layer_norm_forward(input, weight, bias, eps, zero_centered)
    data, scale_inv = quantize(output, format, amax=amax, seed=seed)
    return data, scale_inv, mean, rstd
