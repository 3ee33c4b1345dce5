"""References of the products: one matrix product in float32 (float64 for float64) per group, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, listed
from transformer_plugin.reference._operands import Operand, is_stack, operand, output_dtype, stack, wide
from transformer_plugin.reference._rows import indexed_rows

__all__ = [
    "bias_backward",
    "embedding",
    "gather_rows_backward",
    "gemm",
    "gemm_out",
    "grouped_bias_backward",
    "grouped_gemm",
    "grouped_gemm_out",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_out",
]


def _groups(group_sizes: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for group, size in enumerate(group_sizes.tolist()):
        yield group, slice(begin, begin + size)
        begin += size


def _mixed(product: Tensor, contents: Tensor, beta: Tensor | None) -> Tensor:
    """Returns product + beta * contents. If beta is 0, the contents are not used, even if they are not finite."""
    if beta is None:
        return product
    return product + torch.where(beta == 0, 0.0, beta * contents.to(product.dtype))


def _wide_gemm(
    a: Operand, b: Operand, bias: Tensor | None, transpose_b: bool, alpha: Tensor | None
) -> Tensor:
    output = a[0] @ (b[0].T if transpose_b else b[0])
    if a[1] is not None and b[1] is not None:
        output = output * (a[1][:, None] * b[1])
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
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
) -> Tensor:
    """alpha * (a @ b.T) + bias."""
    left, right = operand(a, a_scale, a_format), operand(b, b_scale, b_format)
    return _wide_gemm(left, right, bias, transpose_b, alpha).to(output_dtype(a, a_format, dtype))


def gemm_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
    accumulate: bool = False,
) -> None:
    """out = alpha * (a @ b.T) + beta * out + bias, with a beta of 1 if it accumulates."""
    left, right = operand(a, a_scale, a_format), operand(b, b_scale, b_format)
    if accumulate:
        beta = torch.ones(1, device=out.device)
    out.copy_(_mixed(_wide_gemm(left, right, bias, transpose_b, alpha), out, beta))


def _wide_grouped_gemm(
    a: Operand,
    b: Operand,
    group_sizes: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_b: bool,
    alpha: Tensor | None,
) -> Tensor:
    output = a[0].new_zeros(a[0].shape[0], b[0].shape[1 if transpose_b else 2])
    for group, rows in _groups(group_sizes):
        left = a[0][rows], None if a[1] is None else a[1][rows]
        right = b[0][group], None if b[1] is None else b[1][group]
        factor = None if alpha is None else alpha[group]
        output[rows] = _wide_gemm(left, right, None, transpose_b, factor)
        if bias is not None:
            added = bias[group].to(output.dtype)
            output[rows] += added if bias_scale is None else bias_scale[rows, None].to(output.dtype) * added
    return output


def grouped_gemm(
    a: Tensor,
    b: Tensors,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
    zero_tail: bool = True,
) -> Tensor:
    """alpha[g] * (a_g @ b[g].T) + bias_scale_g * bias[g] for each group; rows past the groups are zero, also without
    ``zero_tail``."""
    left = operand(indexed_rows(a, rows, group_sizes), a_scale, a_format, group_sizes)
    right = stack(b, b_scale, b_format)
    output = _wide_grouped_gemm(left, right, group_sizes, bias, bias_scale, transpose_b, alpha)
    return output.to(output_dtype(a, a_format, dtype))


def grouped_gemm_out(
    a: Tensor,
    b: Tensors,
    group_sizes: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    a_scale: Tensors | None = None,
    b_scale: Tensors | None = None,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
) -> None:
    """Writes :func:`grouped_gemm` + beta[g] * out_g. Rows past the groups become zero, or with ``beta`` stay
    unchanged."""
    left = operand(indexed_rows(a, rows, group_sizes), a_scale, a_format, group_sizes)
    right = stack(b, b_scale, b_format)
    output = _wide_grouped_gemm(left, right, group_sizes, bias, bias_scale, transpose_b, alpha)
    if beta is None:
        out.copy_(output)
        return
    for group, member in _groups(group_sizes):
        out[member] = _mixed(output[member], out[member], beta[group]).to(out.dtype)


def gather_rows_backward(grad: Tensor, rows: Tensor, group_sizes: Tensor, num_rows: int) -> Tensor:
    """Sums ``grad`` over the places at which each row was used, in their order; other entries are ignored."""
    sums = wide(grad).new_zeros(num_rows, grad.shape[1])
    for place in range(int(group_sizes.sum())):
        row = int(rows[place])
        if 0 <= row < num_rows:
            sums[row] += wide(grad)[place]
    return sums.to(grad.dtype)


def grouped_gemm_wgrad(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    grad_scale: Tensors | None = None,
    input_scale: Tensors | None = None,
    grad_format: str | Format = "none",
    input_format: str | Format = "none",
) -> Tensor:
    """alpha[g] * (grad_g.T @ input_g) for each group; zero for an empty group, whatever its alpha."""
    g, _ = operand(indexed_rows(grad, grad_rows, group_sizes), grad_scale, grad_format, group_sizes, True)
    x, _ = operand(indexed_rows(input, input_rows, group_sizes), input_scale, input_format, group_sizes, True)
    to = output_dtype(grad, grad_format, dtype)
    products = [g[rows].T @ x[rows] for _, rows in _groups(group_sizes)]
    if not products:
        return grad.new_zeros(0, g.shape[1], x.shape[1], dtype=to)
    factors = 1.0 if alpha is None else torch.where(group_sizes == 0, 1.0, alpha)[:, None, None]
    return (torch.stack(products) * factors).to(to)


def grouped_gemm_wgrad_out(
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor,
    out: Tensors,
    accumulate: bool = True,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    grad_scale: Tensors | None = None,
    input_scale: Tensors | None = None,
    grad_format: str | Format = "none",
    input_format: str | Format = "none",
) -> None:
    """Writes :func:`grouped_gemm_wgrad`, plus ``out`` if it accumulates, or plus beta[g] * out_g, in float32."""
    product = grouped_gemm_wgrad(
        grad,
        input,
        group_sizes,
        torch.float32,
        alpha,
        input_rows,
        grad_rows,
        grad_scale=grad_scale,
        input_scale=input_scale,
        grad_format=grad_format,
        input_format=input_format,
    )
    buffers = listed(out, "reference", "out")
    contents = buffers[0] if is_stack(buffers) else torch.stack(buffers)
    if accumulate:
        product = product + contents.float()
    results = _mixed(product, contents, None if beta is None else beta[:, None, None])
    for buffer, result in zip(buffers, [results] if is_stack(buffers) else results, strict=True):
        buffer.copy_(result)


def sum_rows(rows: Tensor) -> Tensor:
    """Sums rows in the order of all gradients of a bias: a tree that adds neighboring rows, then neighboring sums,
    until one is left. The last of an odd number goes to the next level unchanged. A sum of 0 is +0."""
    while rows.shape[0] > 1:
        pairs = rows.shape[0] // 2
        rows = torch.cat([rows[0 : 2 * pairs : 2] + rows[1 : 2 * pairs : 2], rows[2 * pairs :]])
    return rows[0] + 0.0 if rows.shape[0] else rows.new_zeros(rows.shape[1])


def bias_backward(grad: Tensor) -> Tensor:
    """Column sums."""
    return sum_rows(wide(grad))


def grouped_bias_backward(
    grad: Tensor, group_sizes: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Column sums of each group, and weighted row sums."""
    scaled = wide(grad) if bias_scale is None else wide(grad) * bias_scale[:, None]
    grad_bias = scaled.new_zeros(group_sizes.shape[0], grad.shape[1])
    with_scale = bias is not None and bias_scale is not None
    grad_scale = torch.zeros(grad.shape[0] if with_scale else 0, dtype=torch.float32, device=grad.device)
    for group, rows in _groups(group_sizes):
        grad_bias[group] = sum_rows(scaled[rows])
        if bias is not None and bias_scale is not None:
            grad_scale[rows] = (wide(grad)[rows] * wide(bias)[group]).sum(1).float()
    return grad_bias, grad_scale


class _IntoMainGrad(torch.autograd.Function):
    """A weight whose gradient goes into a buffer; autograd gets none, an empty tensor or zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor, accumulate: bool, weight_grad: str) -> Tensor:
        ctx.main_grad, ctx.accumulate, ctx.weight_grad = main_grad, accumulate, weight_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        into = ctx.main_grad
        into.data.copy_(wide(grad) + into.to(wide(grad).dtype) if ctx.accumulate else grad)
        made = {"none": None, "empty": torch.empty_like(grad), "zeros": torch.zeros_like(grad)}
        return made[ctx.weight_grad], None, None, None


def watched(weight: Tensor, main_grad: Tensor | None, accumulate: bool, weight_grad: str) -> Tensor:
    if main_grad is None:
        return weight
    watched: Tensor = _IntoMainGrad.apply(weight, main_grad, accumulate, weight_grad)
    return watched


def watched_weight(weight: Tensors, main_grad: Tensors | None, accumulate: bool, weight_grad: str) -> Tensor:
    """The weight of a grouped layer as one tensor, whose gradient goes into its main_grad, if it has one."""
    weights = listed(weight, "reference", "weight")
    if main_grad is None:
        return weights[0] if is_stack(weights) else torch.stack(weights)
    buffers = listed(main_grad, "reference", "main_grad")
    if is_stack(weights) and is_stack(buffers):
        return watched(weights[0], buffers[0], accumulate, weight_grad)
    each = weights[0].unbind() if is_stack(weights) else weights
    into = buffers[0].unbind() if is_stack(buffers) else buffers
    return torch.stack([watched(w, b, accumulate, weight_grad) for w, b in zip(each, into, strict=True)])


def embedding(indices: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """The rows of a table, of which row ``padding_idx`` gets no gradient."""
    rows = (
        weight
        if padding_idx < 0
        else weight.clone().index_copy(
            0,
            torch.tensor([padding_idx], device=weight.device),
            weight[padding_idx : padding_idx + 1].detach(),
        )
    )
    return rows[indices.long()]
