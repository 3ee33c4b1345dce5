"""Slots: the rows of tokens to their experts, and back.

Shapes: T tokens, H hidden size, K experts of each token, capacity rows of the expert-major layout.

A *slot* is a row of the expert-major layout: all rows of expert 0, padded up to a multiple of ``alignment``, then all
of expert 1, and so on; inside an expert in the order of (token, k). ``slot [T, K]`` and ``source [capacity]`` are the
two directions of the map; -1 means none. The capacity is an argument, so that no size is ever read on the host:
``tokens * K + num_experts * (alignment - 1)`` rows always suffice.

An index names an expert, or is -1 for none. Any other is a ``ValueError`` on a CPU. On a GPU, whose values the host
does not read, it counts as -1, and the GPU counts it: a later call with indices or group sizes raises, and so does
:func:`~transformer_plugin.ops.check_group_sizes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "assign_slots",
    "assign_weighted_slots",
    "permute",
    "permute_backward",
    "permute_rows",
    "unpermute",
    "unpermute_backward",
]

_ops = torch.ops.transformer_plugin


def assign_slots(
    indices: Tensor,
    first_expert: int,
    num_experts: int,
    capacity: int,
    alignment: int = 1,
    total_experts: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Give each (token, k) whose expert is one of ``num_experts`` from ``first_expert`` on a row of the layout.

    Args:
        indices: ``[T, K]`` int32 or int64, the experts of each token, -1 for none. Experts outside
            ``[first_expert, first_expert + num_experts)``, those of other ranks, get no row. A token that names an
            expert twice gets two rows.
        first_expert: number of the layout's first expert.
        num_experts: experts in the layout, 0 to 1024.
        capacity: rows of the layout. What would come after is dropped: its slot is -1.
        alignment: each expert's rows are padded up to a multiple of it.
        total_experts: the experts of all ranks, which ``indices`` may name; -1: ``first_expert + num_experts``.

    Returns:
        ``slot`` int32 ``[T, K]``, the row of each (token, k) or -1; ``source`` and ``source_k`` int32 ``[capacity]``,
        the token and the k of each row, or -1 in padding; ``group_sizes`` int64 ``[num_experts]``, each expert's
        rows with padding, cut where the capacity ends, so that their sum is at most the capacity; ``total`` int64
        ``[1]``, the exact sum before anything was cut: more than ``capacity`` means that rows were dropped.

    Not differentiable: every output is an integer. The same on CPU and CUDA; on CUDA without a host read, and right
    when replayed in a CUDA graph with other indices.

    Raises:
        TypeError: another dtype. ValueError: ``indices`` not 2-D or of 2^31 elements or more, or, on a CPU, with a
        value that is neither an expert nor -1; ``num_experts``, ``capacity`` (0 to 2^31 - 1), ``alignment`` (1 to
        2^31 - 1) or ``total_experts`` out of range.
    """
    return _ops.assign_slots.default(indices, first_expert, num_experts, capacity, alignment, total_experts)


def assign_weighted_slots(
    indices: Tensor,
    weights: Tensor,
    first_expert: int,
    num_experts: int,
    capacity: int,
    alignment: int = 1,
    total_experts: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`assign_slots`, and the weight of each row.

    Args:
        indices, first_expert, num_experts, capacity, alignment, total_experts: as in :func:`assign_slots`.
        weights: ``[T, K]`` float32, on the device of ``indices``. Any strides.

    Returns:
        ``slot``, ``source``, ``group_sizes`` and ``total`` as in :func:`assign_slots`; ``probs``, float32
        ``[capacity]``, the weight of each row's (token, k), 0 in rows without one. The weight of a pair without a row
        is not used.

    Differentiable in ``weights``: the gradient comes back in the order of the input, 0 where a pair has no slot.
    The same bits on CPU and CUDA, no host read.

    Raises:
        TypeError: another dtype. ValueError: what :func:`assign_slots` refuses, ``weights`` of another size or device.
    """
    return _ops.assign_weighted_slots.default(
        indices, weights, first_expert, num_experts, capacity, alignment, total_experts
    )


def permute(
    tokens: Tensor, indices: Tensor, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy each token's row to its experts: a buffer of fixed capacity, expert by expert.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, uint8 or int8. Any strides.
        indices: ``[T, K]`` int32 or int64, K at most 1024; -1: no expert.
        num_experts, capacity, alignment: as in :func:`assign_slots`.

    Returns:
        ``rows [capacity, H]`` in the dtype of ``tokens``, zero in padding and past the last expert; ``group_sizes``,
        ``slot``, ``source`` and ``total`` as in :func:`assign_slots`.

    Differentiable in ``tokens``: the sum of the gradients of a token's rows, in float32 (float64 for float64) in
    ascending order of slot, rounded once; gradients of padding rows are not read. The same bits on CPU and CUDA, no
    host read.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, another device, a number out of range; on a CPU an index
        that is neither an expert nor -1.
    """
    return _ops.permute.default(tokens, indices, num_experts, capacity, alignment)


def permute_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """The gradient of :func:`permute` to its tokens: ``[T, H]`` from ``grad [capacity, H]`` and ``slot [T, K]``."""
    return _ops.permute_backward.default(grad, slot)


def permute_rows(tokens: Tensor, slot: Tensor, source: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """Copy each token's row to slots that were assigned before: what :func:`permute` does after it assigned them.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16 or float64. Any strides.
        slot, source: int32 ``[T, K]`` (K at most 1024) and ``[capacity]``, both from the same
            :func:`assign_weighted_slots` or :func:`assign_slots`. Values out of range count as -1.
        group_sizes: int32 or int64 ``[G]``, of the same call: rows past the last group are not written, and their
            content is unspecified. None to write all rows.

    Returns:
        ``[capacity, H]`` in the dtype of ``tokens``, zero where a row has no token. The same bits on CPU and CUDA, no
        host read.

    Differentiable in ``tokens``, as :func:`permute`.

    Raises:
        TypeError: another dtype. ValueError: sizes that disagree, another device; on a CPU also group sizes that are
            negative or sum to more than the capacity.
    """
    return _ops.permute_rows.default(tokens, slot, source, group_sizes)


def unpermute(rows: Tensor, slot: Tensor, source: Tensor, weights: Tensor | None = None) -> Tensor:
    """Bring the rows back: each token gets the weighted sum of its slots' rows.

    ``output[t] = sum_k weights[t, k] * rows[slot[t, k]]`` in float32 (float64 for float64), over the token's slots in
    ascending order of slot (so of expert), one fused multiply-add at a time from zero, rounded once; without weights
    a plain sum. A token without slots gets zeros. Rows of padding are not read.

    Args:
        rows: ``[capacity, H]`` float32, bfloat16, float16 or float64. Any strides.
        slot, source: int32 ``[T, K]`` (K at most 1024) and ``[capacity]``, both from the same :func:`permute` or
            :func:`assign_slots`. Values out of range count as -1.
        weights: ``[T, K]`` float32 (float64 for float64 rows), or None for 1.

    Returns:
        ``[T, H]`` in the dtype of ``rows``. The same bits on CPU and CUDA, no host read.

    Differentiable in ``rows`` (zero in padding) and ``weights``; the gradient of a weight is a dot product in
    float32 in a fixed order (lane ``l`` of 32 adds columns ``l, l + 32, ...``; lanes are folded in halves).

    Raises:
        TypeError: another dtype. ValueError: sizes that disagree, another device.
    """
    return _ops.unpermute.default(rows, slot, source, weights)


def unpermute_backward(
    grad: Tensor, rows: Tensor | None, slot: Tensor, source: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`unpermute`.

    Args:
        grad: ``[T, H]``, the gradient of the output.
        rows, slot, source, weights: what the forward was given; ``rows`` may be None when the weights need no gradient.

    Returns:
        ``grad_rows [capacity, H]`` and ``grad_weights [T, K]`` (``[0]`` when ``rows`` or ``weights`` is None).
    """
    return _ops.unpermute_backward.default(grad, rows, slot, source, weights)
