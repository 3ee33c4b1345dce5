"""What the products mean: one matrix product in float32 (float64 for float64) for each group, rounded once."""

from __future__ import annotations

import math
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


def _mixed(product: Tensor, held: Tensor, beta: Tensor | None) -> Tensor:
    """product + beta * held, where a beta of 0 takes nothing, also of what is not finite."""
    if beta is None:
        return product
    return product + torch.where(beta == 0, 0.0, beta * held.to(product.dtype))


def _wide_gemm(a: Tensor, b: Tensor, bias: Tensor | None, transpose_b: bool, alpha: Tensor | None) -> Tensor:
    output = _wide(a) @ (_wide(b).T if transpose_b else _wide(b))
    if alpha is not None:
        output = output * alpha
    return output if bias is None else output + bias.to(output.dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
) -> Tensor:
    """alpha * (a @ b.T) + bias."""
    return _wide_gemm(a, b, bias, transpose_b, alpha).to(dtype or a.dtype)


def gemm_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> None:
    """out = alpha * (a @ b.T) + beta * out + bias."""
    out.copy_(_mixed(_wide_gemm(a, b, bias, transpose_b, alpha), out, beta))


def _taken(matrix: Tensor, rows: Tensor | None, group_sizes: Tensor) -> Tensor:
    """matrix[rows[i]] before the tail, zeros in it."""
    if rows is None:
        return matrix
    taken = matrix.new_zeros(rows.shape[0], matrix.shape[1])
    end = int(group_sizes.sum())
    taken[:end] = matrix[rows[:end].long()]
    return taken


def _wide_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_b: bool,
    alpha: Tensor | None,
) -> Tensor:
    output = _wide(a).new_zeros(a.shape[0], b.shape[1 if transpose_b else 2])
    for group, rows in _groups(group_sizes):
        output[rows] = _wide(a)[rows] @ (_wide(b)[group].T if transpose_b else _wide(b)[group])
        if alpha is not None:
            output[rows] *= alpha[group]
        if bias is not None:
            added = bias[group].to(output.dtype)
            output[rows] += added if bias_scale is None else bias_scale[rows, None].to(output.dtype) * added
    return output


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """alpha[g] * (a_g @ b[g].T) + bias_scale_g * bias[g] for each group; zero past the last."""
    taken = _taken(a, rows, group_sizes)
    output = _wide_grouped_gemm(taken, b, group_sizes, bias, bias_scale, transpose_b, alpha)
    return output.to(dtype or a.dtype)


def grouped_gemm_out(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """The same and beta[g] * out_g; past the last group zero, or with ``beta`` what was there."""
    taken = _taken(a, rows, group_sizes)
    output = _wide_grouped_gemm(taken, b, group_sizes, bias, bias_scale, transpose_b, alpha)
    if beta is None:
        out.copy_(output)
        return
    for group, member in _groups(group_sizes):
        out[member] = _mixed(output[member], out[member], beta[group]).to(out.dtype)


def gather_rows_backward(grad: Tensor, rows: Tensor, group_sizes: Tensor, num_rows: int) -> Tensor:
    """The sum of ``grad`` over the places that each row was taken to, in their order."""
    sums = _wide(grad).new_zeros(num_rows, grad.shape[1])
    for place in range(int(group_sizes.sum())):
        row = int(rows[place])
        if 0 <= row < num_rows:
            sums[row] += _wide(grad)[place]
    return sums.to(grad.dtype)


def grouped_gemm_wgrad(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    input_rows: Tensor | None = None,
) -> Tensor:
    """alpha[g] * (grad_g.T @ input_g) for each group; zero for an empty one, whatever its alpha."""
    taken = _taken(input, input_rows, group_sizes)
    products = [_wide(grad)[rows].T @ _wide(taken)[rows] for _, rows in _groups(group_sizes)]
    if not products:
        return grad.new_zeros(0, grad.shape[1], input.shape[1], dtype=dtype or grad.dtype)
    factors = 1.0 if alpha is None else torch.where(group_sizes == 0, 1.0, alpha)[:, None, None]
    return (torch.stack(products) * factors).to(dtype or grad.dtype)


def grouped_gemm_wgrad_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Tensor,
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
) -> None:
    """The same, and in float32 what ``out`` holds, or beta[g] times that."""
    product = grouped_gemm_wgrad(grad, input, group_sizes, torch.float32, alpha, input_rows)
    if accumulate:
        product = product + out.float()
    out.copy_(_mixed(product, out, None if beta is None else beta[:, None, None]))


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
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return gemm(rows, weight, bias).reshape(*input.shape[:-1], weight.shape[0])


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """The same for each group, operands as they come."""
    return grouped_gemm(input, weight, group_sizes, bias, bias_scale)
