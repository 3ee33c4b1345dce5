"""Rows that are gathered, summed and exchanged, with gradients, in stock PyTorch: what the peers of
:mod:`benchmarks.expert_parallel` are made of. Sums are made in float32, without atomics unless the name says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Sum = Callable[[Tensor, Tensor], Tensor]


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sums ``rows[places[i]]`` for each i, ``places [n, K]``; -1 is no row."""
    if len(rows) == 0:
        return rows.new_zeros(len(places), rows.shape[1])
    found = rows[places.clamp(min=0)]
    return torch.where((places >= 0).unsqueeze(2), found, 0).sum(1, dtype=torch.float32).to(rows.dtype)


def swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU, times a weight for each row."""
    gate, linear = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * linear * weights.unsqueeze(-1)).to(x.dtype)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sums the rows of each token, ``[tokens, topk, hidden]``, times their weights."""
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled for any number of rows, which differs in each step, and for each of the other sizes.

    Code for any number of columns, or of rows in a sum, would be slower.
    """
    fast = torch.compile(function, fullgraph=True)

    def call(*tensors: Tensor) -> Tensor:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            for dim in range(1, tensor.dim()):
                torch._dynamo.mark_static(tensor, dim)
        output: Tensor = fast(*tensors)
        return output

    return call


class Gather(torch.autograd.Function):
    """``rows[index]``. ``places [n, K]`` says where each row went, or -1: the gradient is the sum of these."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, places: Tensor, add: Sum) -> Tensor:
        ctx.save_for_backward(places)
        ctx.add = add
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.add(grad, *ctx.saved_tensors), None, None, None


class SumRows(torch.autograd.Function):
    """The sum of ``rows[places[i]]`` for each i. Row j is part of the sum ``index[j]``, and of no other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, index: Tensor, add: Sum) -> Tensor:
        ctx.save_for_backward(index)
        return add(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


def all_to_all(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Sends ``send[r]`` rows to each rank r."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send)
    return received


class AllToAll(torch.autograd.Function):
    """:func:`all_to_all`. Gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.lists = (receive, send)
        return all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all(grad, *ctx.lists), None, None


def all_gather(rows: Tensor) -> Tensor:
    """The rows of all ranks, as many on each."""
    whole = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous())
    return whole


def reduce_scatter(rows: Tensor) -> Tensor:
    """This rank's part of the sum over ranks."""
    part = rows.new_empty(len(rows) // dist.get_world_size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(part, rows.contiguous())
    return part


class AllGather(torch.autograd.Function):
    """:func:`all_gather`. The gradient is a :func:`reduce_scatter`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return all_gather(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter(grad)


class ReduceScatter(torch.autograd.Function):
    """:func:`reduce_scatter`. The gradient is an :func:`all_gather`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return reduce_scatter(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_gather(grad)


def index_add(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Adds rows to those of ``index`` in float32, with atomics. Index ``count`` is no row of the result."""
    sums = torch.zeros(count + 1, rows.shape[1], dtype=torch.float32, device=rows.device)
    return sums.index_add_(0, index, rows.float())[:count].to(rows.dtype)


class GatherAny(torch.autograd.Function):
    """``rows[index]``, of which the gradient is an :func:`index_add`; a last index of ``len(rows)`` is any row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index.clamp(max=len(rows) - 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return index_add(grad, *ctx.saved_tensors, ctx.count), None


class AddRows(torch.autograd.Function):
    """:func:`index_add`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = count
        return index_add(rows, index, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index.clamp(max=ctx.count - 1)), None, None
