"""Expert parallelism: sends tokens to the experts on other ranks and back.

Shapes: R ranks of the group, E experts (E / R on each rank), T tokens of this rank (may differ between ranks and be
0), max_tokens an upper bound of T that is the same on all ranks, K experts per token, H hidden size, capacity rows of
the layout that one rank receives.

The layout is expert-major: all rows of this rank's first expert, padded with zero rows to a multiple of
``alignment``, then all rows of the next expert. Within an expert, rows are in ascending order of (rank, token, k), so
the layout does not depend on timing. All sizes are static and nothing is read on the host: a captured CUDA graph and a
compiled function stay valid when the routing changes.

All ranks of the group must make the same calls in the same order, with the same constants. On a CPU the ranks compare
each call (op, dtype, width, plan, weights, gradients) before payload moves; if they differ, every rank raises a
``ValueError`` that says what differs on which ranks, and the group stays usable. On CUDA each new kind of call is
compared once, through the store of the group and not during graph capture. A rank that makes no call counts as lost:
``PeerTimeoutError``, after which the group cannot be used again. ``group_name`` is ``group.group_name`` of a c10d
process group (Gloo for CPU tensors, NCCL for CUDA tensors), or ``""`` for this process alone. ``timeout_ms`` bounds
each wait, at most 10^12; 0 or less means the timeout of the group. For a layer that also compares the configurations of
the ranks, see :class:`transformer_plugin.parallel.EpContext`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_plugin.errors import peer_errors

__all__ = [
    "all_gather_text",
    "combine",
    "combine_backward",
    "combine_backward_out",
    "compact_plan",
    "dispatch",
    "dispatch_backward",
    "dispatch_out",
    "plan",
    "select_transport",
]

_ops = torch.ops.transformer_plugin


class Plan(NamedTuple):
    """The rows that this rank receives, and where its experts have them: plain tensors on the device of the indices.

    Token t of rank r has the number ``r * max_tokens + t``. This rank receives N rows, each token once: the tokens of
    all ranks, N = R * max_tokens.
    """

    #: int32 ``[N, K]``: for each received row the rows of its (token, k) in the layout of this rank's experts, or -1 if
    #: the expert is on another rank, there is none, or the row was dropped.
    slot: Tensor
    #: int32 ``[capacity]``: the received row of each row of the layout, or -1 in padding and in unused rows.
    source: Tensor
    #: int64 ``[E / R]``: rows of each of this rank's experts including padding: the group sizes of a grouped GEMM.
    #: Their sum is at most the capacity.
    tokens_per_expert: Tensor
    #: int64 ``[R]``: the rows that each rank needs including padding, before any is dropped.
    required: Tensor
    #: int32 ``[1]``: 1 if any rank needs more than the capacity, else 0; the same on every rank.
    overflow: Tensor


class CompactPlan(NamedTuple):
    """A :class:`Plan` whose N received rows are the tokens that have a row in the layout, in ascending order."""

    #: int32 ``[N, K]``; this and the next three are those of :class:`Plan`.
    slot: Tensor
    #: int32 ``[capacity]``.
    source: Tensor
    #: int64 ``[E / R]``.
    tokens_per_expert: Tensor
    #: int64 ``[R]``.
    required: Tensor
    #: int32 ``[1]``: 1 if any rank needs more than the capacity or ``max_received_tokens``; the same on every rank.
    overflow: Tensor
    #: int32 ``[N]``: the token of each received row, or -1 past the last one. By records int32 ``[4, R + 1]``, where a
    #: record is a row that this rank sends to a rank, numbered by (rank, token). From rank r come the rows
    #: ``received[0, r]`` to ``received[0, r + 1] - 1``; to it go the records ``received[1, r]`` to
    #: ``received[1, r + 1] - 1``. ``received[2, r]``: which of the rows that rank r receives from other ranks is the
    #: first record to it. ``received[3, r]``: which of the records of rank r to other ranks is the first row from it.
    received: Tensor
    #: int32 ``[R * max_tokens]``: the received row of each token, or -1. By records int32
    #: ``[3, max_tokens, min(K, R)]``: ``position[0]`` are the records of each token, in ascending order of ranks, then
    #: -1; ``position[1]``, flat, the token of each record, then -1; ``position[2]``, flat, the first of each record's
    #: slots at the rank it goes to, by k, then -1.
    position: Tensor
    #: int64 ``[R]``: the tokens of which each rank has an expert, before any is dropped.
    required_tokens: Tensor


def plan(
    topk_idx: Tensor,
    num_experts: int,
    max_tokens: int,
    capacity: int,
    alignment: int = 1,
    num_ranks: int = 1,
    group_name: str = "",
    raise_on_overflow: bool = False,
    timeout_ms: int = -1,
) -> Plan:
    """Gather the expert indices of all ranks and assign a row to each (token, k).

    Args:
        topk_idx: ``[..., K]`` int32 or int64, contiguous, 2 dimensions or more: the experts of this rank's tokens, or
            -1 for none: no row, no weight, no gradient. A token that names an expert twice gets two rows.
        num_experts: E, a multiple of R.
        max_tokens: an upper bound of the tokens of each rank, the same on every rank.
        capacity: rows of the layout, the same on every rank. Rows past it are dropped, those of the last expert first:
            dispatch skips them, combine counts them as zero, and they get no gradient.
        alignment: 0, 1 or a power of two.
        num_ranks: R, the size of the group.
        raise_on_overflow: raise an error if rows are dropped. On a CPU this call raises, on every rank. On CUDA, where
            a read would synchronize, a later op on the group raises after the GPU has counted the rows.

    Returns:
        A :class:`Plan`. Not differentiable.

    Raises:
        TypeError: indices of another dtype.
        ValueError: a constant out of range, too many tokens, an index tensor that is not contiguous or has fewer
            than 2 dimensions, a group of another size, rows that do not fit (``raise_on_overflow``), ranks that make
            different calls. An index of any rank that is neither an expert nor -1: on a CPU this call raises, on every
            rank; on CUDA such an index counts as -1, and a later call with indices or group sizes raises, or
            :func:`~transformer_plugin.ops.check_group_sizes`.
        PeerTimeoutError: a rank did not take part in time.

    Source: the layout and semantics of TransformerEngine pull request 3035, with static sizes; duplicate and
    wrong indices are defined here.
    """
    arguments = (topk_idx, num_experts, max_tokens, capacity, alignment, num_ranks, group_name)
    with peer_errors():
        return Plan(*_ops.plan.default(*arguments, raise_on_overflow, timeout_ms))


def compact_plan(
    topk_idx: Tensor,
    num_experts: int,
    max_tokens: int,
    capacity: int,
    alignment: int = 1,
    num_ranks: int = 1,
    group_name: str = "",
    raise_on_overflow: bool = False,
    timeout_ms: int = -1,
    max_received_tokens: int | None = None,
    records: bool = False,
) -> CompactPlan:
    """The plan of :func:`plan`, where of the tokens of all ranks only those are kept that have a row here.

    It saves memory where the capacity or ``max_received_tokens`` is less than R * max_tokens. Pass ``received`` and
    ``position`` to :func:`dispatch` and :func:`combine`.

    Args:
        max_received_tokens: the tokens that one rank can receive, its own included, the same on every rank. Of the
            tokens of which a rank has an expert, in the order of their numbers, those past this many are dropped there,
            with all their rows, before rows past the capacity are; with ``raise_on_overflow`` that is an error. None:
            enough for all.
        records: whether the plan is by records: ranks exchange how many rows each sends to each in place of their
            indices, and dispatch and combine send each row once to the ranks that need it. The other tensors, and all
            results, have the same bits; ``received`` and ``position`` are those of :class:`CompactPlan` by records.
            Where the group's name has no channel, the rows travel in an all-to-all of uneven parts, for which the host
            reads the numbers of rows: on CUDA it waits for the stream, and the call cannot be captured in a CUDA graph.

    The others are those of :func:`plan`.

    Returns:
        A :class:`CompactPlan` of N = min(R * max_tokens, capacity, max_received_tokens) received rows. Not
        differentiable.

    Raises:
        TypeError, ValueError, PeerTimeoutError: as :func:`plan`, and tokens that do not fit.
    """
    arguments = (topk_idx, num_experts, max_tokens, capacity, alignment, num_ranks, group_name)
    options = (raise_on_overflow, timeout_ms, max_received_tokens, records)
    with peer_errors():
        return CompactPlan(*_ops.compact_plan.default(*arguments, *options))


def dispatch(
    tokens: Tensor,
    topk_weights: Tensor | None,
    slot: Tensor,
    source: Tensor,
    group_name: str = "",
    timeout_ms: int = -1,
    grads_needed: int = -1,
    expand: bool = True,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Send every token once to each rank that has an expert of it.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16 (float64 on a CPU), any strides.
        topk_weights: ``[T, K]`` float32 (float64 with float64 tokens), or None.
        slot, source: of the plan of these tokens.
        grads_needed: internal; do not pass it. Autograd sets it to the gradients that it will compute (1: tokens, 2:
            weights), so that the ranks can compare it, also in a compiled graph.
        expand: whether to copy the received rows to the rows of the experts. Experts that read rows by an index, as
            :func:`~transformer_plugin.ops.grouped_mlp` does with ``slot`` and ``source``, need no copies.
        received, position: of a compact plan, or None.

    Returns:
        ``recv`` in the dtype of ``tokens``, copied bit for bit: with ``expand`` ``[capacity, H]``, zero in padding and
        past the last expert; otherwise the received rows ``[N, H]``, of which those without a slot have any tokens or
        zeros. ``recv_weights [capacity]`` float32, the weight of each row's (token, k), 0 in padding (shape ``[0]``
        without weights).

    Differentiable in ``tokens`` (the sum that :func:`combine` computes) and ``topk_weights`` (in the order of the
    input). The backward is collective whenever autograd has recorded the forward: an absent gradient counts as zero.
    Whether inputs require gradients must be the same on every rank.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices do not match, on this rank or between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    rest = (group_name, timeout_ms, grads_needed, expand, received, position)
    with peer_errors():
        out: tuple[Tensor, Tensor] = _ops.dispatch.default(tokens, topk_weights, slot, source, *rest)
        return out


def dispatch_out(
    tokens: Tensor,
    topk_weights: Tensor | None,
    slot: Tensor,
    source: Tensor,
    recv: Tensor,
    recv_weights: Tensor | None = None,
    group_name: str = "",
    timeout_ms: int = -1,
    grads_needed: int = -1,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> None:
    """:func:`dispatch` into the caller's buffers, without a gradient.

    Args:
        recv: ``[capacity, H]`` in the dtype of ``tokens``, contiguous.
        recv_weights: ``[capacity]`` float32, contiguous; None without weights. Neither shares memory with another
            argument.
        grads_needed: 0, or the gradients that a custom backward computes (1: tokens, 2: weights), so that ranks
            compare it.

    The others, and the errors, are those of :func:`dispatch` with ``expand``.
    """
    rest = (group_name, timeout_ms, grads_needed, received, position)
    with peer_errors():
        _ops.dispatch_out.default(tokens, topk_weights, slot, source, recv, recv_weights, *rest)


def dispatch_backward(
    grad_recv: Tensor | None,
    grad_recv_weights: Tensor | None,
    slot: Tensor,
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    for_tokens: bool = True,
    for_weights: bool = True,
    group_name: str = "",
    timeout_ms: int = -1,
    expand: bool = True,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`dispatch`: ``[T, H]`` in ``dtype`` and ``[T, K]`` float32, ``[0, 0]`` if not needed.

    None counts as zero. With ``expand`` padding and unused rows are not read. Without it the gradient is that of the
    received rows, ``[N, H]``, zero in those without a slot.
    """
    sizes = (num_tokens, hidden_size, dtype, for_tokens, for_weights)
    rest = (group_name, timeout_ms, expand, received, position)
    with peer_errors():
        out: tuple[Tensor, Tensor] = _ops.dispatch_backward.default(
            grad_recv, grad_recv_weights, slot, *sizes, *rest
        )
        return out


def combine(
    rows: Tensor,
    slot: Tensor,
    source: Tensor,
    num_tokens: int,
    group_name: str = "",
    timeout_ms: int = -1,
    grads_needed: int = -1,
    expand: bool = True,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """Send the experts' rows back and sum them for each token, without weights.

    Args:
        rows: float32, bfloat16, float16 (float64 on a CPU), any strides. With ``expand`` the experts' rows
            ``[capacity, H]``, of which padding and rows past the last expert are not read. Otherwise the sums
            ``[N, H]`` of the experts' rows of each received row, zero without any, as
            :func:`~transformer_plugin.ops.grouped_mlp` returns them with ``slot`` and ``source``.
        slot, source: of the plan.
        num_tokens: T of this rank. Tokens without rows get zeros.
        grads_needed, received, position: as in :func:`dispatch`.
        expand: whether ``rows`` are those of the experts.

    Returns:
        ``[num_tokens, H]``. The order of the sum is fixed, so the result is bitwise reproducible: each rank adds its
        own rows of a token in ascending order of slots (so of experts) in float32, starting at zero, and rounds to the
        dtype of ``rows``; the token's rank adds these parts in ascending order of ranks in float32, starting at zero,
        and rounds once. A rank without a row for the token contributes zero. In float64 both sums are float64.

    Differentiable in ``rows``: each row gets its token's gradient, padding gets zero.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices do not match, on this rank or between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    rest = (group_name, timeout_ms, grads_needed, expand, received, position)
    with peer_errors():
        out: Tensor = _ops.combine.default(rows, slot, source, num_tokens, *rest)
        return out


def combine_backward(
    grad: Tensor,
    slot: Tensor,
    source: Tensor,
    group_name: str = "",
    timeout_ms: int = -1,
    expand: bool = True,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """The gradient of :func:`combine`: ``[num_tokens, H]`` to ``[capacity, H]``, zero in padding; or to ``[N, H]``."""
    rest = (group_name, timeout_ms, expand, received, position)
    with peer_errors():
        out: Tensor = _ops.combine_backward.default(grad, slot, source, *rest)
        return out


def combine_backward_out(
    grad: Tensor,
    slot: Tensor,
    source: Tensor,
    grad_rows: Tensor,
    group_name: str = "",
    timeout_ms: int = -1,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> None:
    """:func:`combine_backward` with ``expand`` into the caller's contiguous ``[capacity, H]``."""
    rest = (group_name, timeout_ms, received, position)
    with peer_errors():
        _ops.combine_backward_out.default(grad, slot, source, grad_rows, *rest)


class TransportSelection(NamedTuple):
    """How tokens move between the ranks of a group."""

    #: as in :class:`~transformer_plugin.parallel.EpConfig`, or ``"none"`` of one rank.
    transport: str
    reason: str


def select_transport(num_ranks: int, device_type: str, peer_memory: bool) -> TransportSelection:
    """Return the transport that contexts of a group of this size choose by themselves, and why.

    Args:
        num_ranks: the size of the group. device_type: ``"cpu"`` or ``"cuda"``, of the tokens.
        peer_memory: what :func:`~transformer_plugin.ops.peer_memory.peer_memory_support` says of the group.

    Raises:
        ValueError: another device type, or fewer than one rank.
    """
    return TransportSelection(*_ops.select_transport.default(num_ranks, device_type, peer_memory))


def all_gather_text(text: str, group_name: str, timeout_ms: int = -1) -> list[str]:
    """Return every rank's ``text`` in ascending order of ranks, through the store of the group.

    Raises:
        PeerTimeoutError: a rank did not take part in time.
    """
    with peer_errors():
        return list(_ops.all_gather_text.default(group_name, text, timeout_ms))


def compare_header(group_name: str, dtype: torch.dtype, width: int, timeout_ms: int = -1) -> None:
    """Compare a dispatch of ``width`` columns of ``dtype`` between the ranks, as CUDA does for each new kind of call.

    No payload is sent. For programs that check before the first step that their ranks make the same calls: ValueError
    if they announced different ones, PeerTimeoutError if a rank announced none in time.
    """
    with peer_errors():
        _ops.compare_header.default(group_name, dtype, width, timeout_ms)
