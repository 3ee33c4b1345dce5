"""What the products mean: one matrix product in float32 (float64 for float64) for each group, rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _groups(group_sizes: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for group, size in enumerate(group_sizes.tolist()):
        yield group, slice(begin, begin + size)
        begin += size


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """a @ b.T + bias."""
    output = _wide(a) @ (_wide(b).T if transpose_b else _wide(b))
    if bias is not None:
        output = output + bias
    return output.to(dtype or a.dtype)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """a_g @ b[g].T + bias_scale_g * bias[g] for each group; zero past the last."""
    output = _wide(a).new_zeros(a.shape[0], b.shape[1 if transpose_b else 2])
    for group, rows in _groups(group_sizes):
        output[rows] = _wide(a)[rows] @ (_wide(b)[group].T if transpose_b else _wide(b)[group])
        if bias is not None:
            scale = 1.0 if bias_scale is None else bias_scale[rows, None]
            output[rows] += scale * _wide(bias)[group]
    return output.to(dtype or a.dtype)


def grouped_gemm_wgrad(
    grad: Tensor, input: Tensor, group_sizes: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """grad_g.T @ input_g for each group."""
    products = [_wide(grad)[rows].T @ _wide(input)[rows] for _, rows in _groups(group_sizes)]
    if not products:
        return grad.new_zeros(0, grad.shape[1], input.shape[1], dtype=dtype or grad.dtype)
    return torch.stack(products).to(dtype or grad.dtype)


def grouped_gemm_wgrad_out(
    grad: Tensor, input: Tensor, group_sizes: Tensor, out: Tensor, accumulate: bool = True
) -> None:
    """The same, added to ``out`` in float32."""
    product = grouped_gemm_wgrad(grad, input, group_sizes, dtype=torch.float32)
    out.copy_(product + out.float() if accumulate else product)


def sum_rows(rows: Tensor) -> Tensor:
    """The sum over the rows in the order of every gradient of a bias: neighbours, then neighbouring sums, until one is
    left; of an odd number the last goes up as it is. A sum of 0 has no sign."""
    while rows.shape[0] > 1:
        pairs = rows.shape[0] // 2
        rows = torch.cat([rows[0 : 2 * pairs : 2] + rows[1 : 2 * pairs : 2], rows[2 * pairs :]])
    return rows[0] + 0.0 if rows.shape[0] else rows.new_zeros(rows.shape[1])


def bias_backward(grad: Tensor) -> Tensor:
    """Column sums."""
    return sum_rows(_wide(grad))


def grouped_bias_backward(
    grad: Tensor, group_sizes: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Column sums of each group and weighted row sums."""
    scaled = _wide(grad) if bias_scale is None else _wide(grad) * bias_scale[:, None]
    grad_bias = scaled.new_zeros(group_sizes.shape[0], grad.shape[1])
    with_scale = bias is not None and bias_scale is not None
    grad_scale = torch.zeros(grad.shape[0] if with_scale else 0, dtype=torch.float32, device=grad.device)
    for group, rows in _groups(group_sizes):
        grad_bias[group] = sum_rows(scaled[rows])
        if bias is not None and bias_scale is not None:
            grad_scale[rows] = (_wide(grad)[rows] * _wide(bias)[group]).sum(1).float()
    return grad_bias, grad_scale


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, operands as they come."""
    return gemm(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """The same for each group, operands as they come."""
    return grouped_gemm(input, weight, group_sizes, bias, bias_scale)
