"""Expert parallelism: tokens to the experts of other ranks and back.

Shapes: R ranks of the group, E experts (E / R on each rank), T tokens of this rank (may differ between ranks and be
0), max_tokens an upper bound of T that all ranks share, K experts of each token, H hidden size, capacity rows of the
layout that one rank receives.

The layout is expert-major: all rows of this rank's first expert, padded with zero rows to a multiple of
``alignment``, then all of the next. Inside an expert rows are in ascending order of (rank, token, k), so the layout is
deterministic. All sizes are static and nothing is read on the host: a CUDA graph captured once,
and a compiled function, stay right when the routing changes.

All ranks of the group must make the same calls in the same order, with the same constants. On a CPU every call is
announced first, and where the ranks differ (in the op, dtype, width, plan, weights or gradients) every one of them
raises ``ValueError``, which says what differs on which ranks, before payload moves; the group stays usable. On CUDA a
kind of call is compared the first time, through the store of the group and outside of captures. A rank that makes no
call at all is a lost rank: ``PeerTimeoutError``, after which the group cannot be used again. ``group_name`` is
``group.group_name`` of a c10d process group (Gloo for CPU tensors, NCCL for CUDA tensors), or ``""`` for this process
alone. ``timeout_ms`` bounds each wait, at most 10^12; 0 or less means the timeout of the group. For a layer that checks
that the ranks agree, see :class:`transformer_plugin.parallel.EpContext`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_plugin.errors import peer_timeout

_ops = torch.ops.transformer_plugin


class Plan(NamedTuple):
    """Where every (token, k) of the group goes. Plain tensors on the device of the indices."""

    #: int32 ``[R * max_tokens, K]``: the row of this rank's layout that (token t of rank r, k) has, at index
    #: ``r * max_tokens + t``, or -1 where its expert is on another rank, masked, or the row was dropped.
    slot: Tensor
    #: int32 ``[capacity]``: ``r * max_tokens + t`` of each row, or -1 in padding and in unused rows.
    source: Tensor
    #: int64 ``[E / R]``: rows of each of this rank's experts, padding included; their sum is at most the capacity.
    #: The group sizes of a grouped GEMM.
    tokens_per_expert: Tensor
    #: int64 ``[R]``: the rows that each rank needs, padding included, before any is dropped.
    required: Tensor
    #: int32 ``[1]``: 1 when any rank needs more than the capacity, the same on every rank.
    overflow: Tensor


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
    """Gather every rank's choice of experts and give each (token, k) its row.

    Args:
        topk_idx: ``[..., K]`` int32 or int64, contiguous, 2 dimensions or more: the experts of this rank's tokens. Any
            value outside ``[0, num_experts)``, -1 for one, is masked: no row, no weight, no gradient. A token that
            names an expert twice gets two rows.
        num_experts: E, a multiple of the ranks.
        max_tokens: the most tokens that any rank brings, the same on every rank.
        capacity: rows of the layout, the same on every rank. Rows past it are dropped (the last experts' first):
            they take no part in dispatch, count 0 in combine and get no gradient.
        alignment: 0, 1 or a power of two.
        num_ranks: R, the size of the group.
        raise_on_overflow: on a CPU raises at once, on every rank; on CUDA, where reading would stop the host, the
            next op of the group after the GPU has counted raises.

    Returns:
        A :class:`Plan`. Not differentiable.

    Raises:
        TypeError: indices of another dtype.
        ValueError: a constant out of range, too many tokens, an index tensor that is not contiguous or has fewer
            than 2 dimensions, a group of another size, rows that do not fit (``raise_on_overflow``), ranks that make
            another call.
        PeerTimeoutError: a rank did not take part in time.

    Source: the layout and semantics of TransformerEngine pull request 3035, with static sizes; duplicates and
    out-of-range indices have a meaning here.
    """
    try:
        out = _ops.plan.default(
            topk_idx,
            num_experts,
            max_tokens,
            capacity,
            alignment,
            num_ranks,
            group_name,
            raise_on_overflow,
            timeout_ms,
        )
    except RuntimeError as error:
        raise peer_timeout(error) or error from None
    return Plan(*out)


def dispatch(
    tokens: Tensor,
    topk_weights: Tensor | None,
    slot: Tensor,
    source: Tensor,
    group_name: str = "",
    timeout_ms: int = -1,
    wanted: int = -1,
) -> tuple[Tensor, Tensor]:
    """Send every token to the rows of its experts.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16 (float64 on a CPU), any strides.
        topk_weights: ``[T, K]`` float32 (float64 with float64 tokens), or None.
        slot, source: of the plan of these tokens.
        wanted: do not pass it. Autograd stores here which gradients it needs (1: tokens, 2: weights), so that the ranks
            can compare them, and a compiled graph keeps it.

    Returns:
        ``recv [capacity, H]`` in the dtype of ``tokens``, copied bit for bit, zero in padding and past the last
        expert; ``recv_weights [capacity]`` float32, the weight of each row's (token, k), 0 where there is none (``[0]``
        without weights).

    Differentiable in ``tokens`` (the sum that :func:`combine` makes) and ``topk_weights`` (in the order of the
    input). The backward exchanges with the other ranks whenever the forward was recorded, also where a gradient is
    absent, which counts as zero; whether inputs require gradients must be the same on every rank.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices that do not agree, here or between the ranks.
        PeerTimeoutError: a rank did not take part.
    """
    try:
        return _ops.dispatch.default(tokens, topk_weights, slot, source, group_name, timeout_ms, wanted)
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


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
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`dispatch`: ``[T, H]`` in ``dtype`` and ``[T, K]`` float32, ``[0, 0]`` where not wanted.

    None counts as zero. Rows without a (token, k) are not read.
    """
    try:
        return _ops.dispatch_backward.default(
            grad_recv,
            grad_recv_weights,
            slot,
            num_tokens,
            hidden_size,
            dtype,
            for_tokens,
            for_weights,
            group_name,
            timeout_ms,
        )
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


def combine(
    rows: Tensor,
    slot: Tensor,
    source: Tensor,
    num_tokens: int,
    group_name: str = "",
    timeout_ms: int = -1,
    wanted: int = -1,
) -> Tensor:
    """Bring the experts' rows back and sum them for each token, without weights.

    Args:
        rows: ``[capacity, H]`` float32, bfloat16, float16 (float64 on a CPU), any strides. Padding and rows past the
            last expert are not read, whatever they hold.
        slot, source: of the plan.
        num_tokens: T of this rank. Tokens that the plan does not have get zeros.
        wanted: as in :func:`dispatch`.

    Returns:
        ``[num_tokens, H]``. The sum has one order, so it repeats bit for bit: each rank adds its own rows of a token
        in ascending slot (so in ascending expert) in float32 from zero, and rounds to the dtype of ``rows``; the
        token's rank adds these parts in ascending rank in float32 from zero, ranks without a row for it included as
        zero, and rounds once. In float64 both sums are float64.

    Differentiable in ``rows``: each row gets its token's gradient, padding gets zero.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices that do not agree, here or between the ranks.
        PeerTimeoutError: a rank did not take part.
    """
    try:
        return _ops.combine.default(rows, slot, source, num_tokens, group_name, timeout_ms, wanted)
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


def combine_backward(
    grad: Tensor, slot: Tensor, source: Tensor, group_name: str = "", timeout_ms: int = -1
) -> Tensor:
    """The gradient of :func:`combine`: ``[num_tokens, H]`` to ``[capacity, H]``, zero in padding."""
    try:
        return _ops.combine_backward.default(grad, slot, source, group_name, timeout_ms)
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


def agree(text: str, group_name: str, timeout_ms: int = -1) -> list[str]:
    """Every rank's ``text``, in ascending rank, through the store of the group: to compare configurations.

    Raises:
        PeerTimeoutError: a rank did not take part in time.
    """
    try:
        return list(_ops.agree.default(group_name, text, timeout_ms))
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


def compare_call(group_name: str, dtype: torch.dtype, width: int, timeout_ms: int = -1) -> None:
    """Compare a dispatch of ``width`` columns of ``dtype`` between the ranks, as CUDA does for a new kind of call.

    No payload is sent. For programs that check before the first step that their ranks agree.

    Raises:
        ValueError: the ranks announced different calls. PeerTimeoutError: a rank announced none in time.
    """
    try:
        _ops.compare_call.default(group_name, dtype, width, timeout_ms)
    except RuntimeError as error:
        raise peer_timeout(error) or error from None
