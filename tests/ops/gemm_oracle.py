"""Grouped products in float64, and buffers in which a read or a write at a wrong place shows."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.testing.numerics import fp8_sums


def rows_fp64(
    a: Tensor,
    b: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    transpose_b: bool,
    alpha: Tensor | None = None,
) -> Tensor:
    blocks, begin = [], 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(begin, begin + size)
        block = a[rows].double() @ (b[g].double().T if transpose_b else b[g].double())
        if alpha is not None:
            block = block * alpha[g].double()
        if bias is not None:
            block = block + (1 if scale is None else scale[rows, None].double()) * bias[g].double()
        blocks.append(block)
        begin += size
    tail = a.new_zeros(a.shape[0] - begin, b.shape[1 if transpose_b else 2], dtype=torch.float64)
    if not blocks:
        return tail + b.double().sum()  # an empty result that is still differentiable
    return torch.cat([*blocks, tail]) + 0.0  # a sum that starts at 0 is never -0


def wgrad_fp64(grad: Tensor, input: Tensor, sizes: Tensor, alpha: Tensor | None = None) -> Tensor:
    out = grad.new_zeros(sizes.numel(), grad.shape[1], input.shape[1], dtype=torch.float64)
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        out[g] = grad[begin : begin + size].double().T @ input[begin : begin + size].double()
        begin += size
    return (out if alpha is None else out * alpha.double()[:, None, None]) + 0.0


def rows_in_units(
    a: Tensor, b: Tensor, sizes: Tensor, transpose_b: bool, alpha: Tensor | None = None
) -> Tensor:
    """Returns the error that :func:`fp8_sums` allows for each element of :func:`rows_fp64`."""
    out = a.new_zeros(a.shape[0], b.shape[1 if transpose_b else 2], dtype=torch.float64)
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(begin, begin + size)
        out[rows] = fp8_sums(a[rows].double(), b[g].double().T if transpose_b else b[g].double())
        out[rows] *= 1 if alpha is None else alpha[g].double().abs()
        begin += size
    return out


def wgrad_in_units(grad: Tensor, input: Tensor, sizes: Tensor, alpha: Tensor | None = None) -> Tensor:
    """Returns the error that :func:`fp8_sums` allows for each element of :func:`wgrad_fp64`."""
    out = grad.new_zeros(sizes.numel(), grad.shape[1], input.shape[1], dtype=torch.float64)
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(begin, begin + size)
        out[g] = fp8_sums(grad[rows].double().T, input[rows].double())
        begin += size
    return out if alpha is None else out * alpha.double().abs()[:, None, None]


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leaves NaN in the memory that the next output of this size will probably reuse."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole storage that a tensor is a view of."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def row_buffers(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns zero matrices: contiguous, with padded rows, columns of a wider matrix at an unaligned address, and
    an unaligned slice of a flat buffer."""
    m, n = shape
    return [
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(m, n + 16, dtype=dtype, device=device)[:, :n],
        torch.zeros(m, n + 5, dtype=dtype, device=device)[:, 3 : 3 + n],
        torch.zeros(m * n + 3, dtype=dtype, device=device)[3:].view(shape),
    ]
