"""Routing: which experts a token takes, and its rows to them and back.

Shapes: T tokens, H hidden size, E experts, K experts of each token, capacity rows of the expert-major layout.

A *slot* is a row of the expert-major layout: all rows of expert 0, padded up to a multiple of ``alignment``, then all
of expert 1, and so on; inside an expert in the order of (token, k). ``slot [T, K]`` and ``source [capacity]`` are the
two directions of the map; -1 means none. The capacity is an argument, so that no size is ever read on the host:
``tokens * K + num_experts * (alignment - 1)`` rows always suffice.

How :func:`topk_router` orders experts:

- Without a bias by the logit, the largest first: every score grows with its logit, and logits distinguish experts whose
  scores round to the same number, for example 0 or 1. With a bias by the score, sigmoid ``1 / (1 + exp(-logit))`` or
  sqrtsoftplus ``sqrt(log(1 + exp(logit)))``, plus the expert's bias, the sum rounded to float32's precision; where that
  is equal, by the logit. So a bias of zeros chooses as None does.
- An expert whose logit is -inf is masked: it ranks below all others, whatever its bias; a token with fewer than
  ``topk`` unmasked experts still gets ``topk`` distinct ones. NaN ranks highest, as in ``torch.topk``, so that it is
  seen in the weights. Ties go to the lowest index, of groups too.
- With ``num_groups`` > 1, groups of ``E / num_groups`` neighbouring experts are ranked by the sum of their best
  ``group_score_topk`` choice values, masked experts left out: the softmax with ``pre_softmax``, the logit with the
  softmax without, or the score plus the bias. Sums are rounded to float32's precision; where sums
  of scores underflow float64, the best logit decides. A group with one expert ranks as that expert. Only
  experts of the best ``group_topk`` groups can be chosen, also where all their values are negative.

``group_score_topk`` is 1 in DeepSeek-V2, with the softmax over all experts; 2 in DeepSeek-V3, with the sigmoid (256
experts, topk 8, 8 groups, group_topk 4); and None, ``topk // group_topk``, in Megatron-LM and TransformerEngine.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "assign_slots",
    "assign_weighted_slots",
    "aux_loss",
    "aux_loss_backward",
    "count_tokens_per_expert",
    "permute",
    "permute_backward",
    "permute_rows",
    "permute_weights",
    "permute_weights_backward",
    "router_logits",
    "router_logits_backward",
    "router_scores",
    "router_scores_backward",
    "topk_router",
    "topk_router_backward",
    "unpermute",
    "unpermute_backward",
]

_ops = torch.ops.transformer_plugin

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]


def router_logits(input: Tensor, weight: Tensor) -> Tensor:
    """The logit of each token for each expert: ``input @ weight.T``, summed in float32 and not rounded to the dtype of
    the operands.

    Products of two bfloat16 or float16 values are exact in float32, so the result is as accurate as the product of
    float32 copies of the operands; on CUDA it is one GEMM that reads the operands themselves. Each logit is within
    ``H * 2**-24 * (|input| @ |weight|.T)`` of the exact one.

    Args:
        input: ``[T, H]`` bfloat16, float16, float32 or float64. Any strides.
        weight: ``[E, H]`` in the same dtype. Any strides.

    Returns:
        ``[T, E]`` float32; float64 for float64 operands. For float32 the bits of :func:`transformer_plugin.ops.linear`.

    Differentiable in both, see :func:`router_logits_backward`.

    Raises:
        TypeError: another dtype, or two different ones. ValueError: not 2-D, sizes that disagree, another device.
    """
    return _ops.router_logits.default(input, weight)


def router_logits_backward(
    grad: Tensor, input: Tensor, weight: Tensor, for_input: bool = True, for_weight: bool = True
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`router_logits`: ``grad @ weight`` and ``grad.T @ input``, summed in float32 (float64 for
    float64) and rounded once.

    With bfloat16 operands each value ``d`` of ``grad`` is the sum of two bfloat16 values, ``high = bfloat16(d)`` and
    ``low = bfloat16(d - high)``, which are multiplied in place of it, so that no operand is converted to float32.
    ``abs(d - (high + low))`` is at most ``2**-17 * abs(d)`` where ``abs(d) >= 2**-109``, and at most ``2**-126``
    elsewhere. Where ``d`` is infinite or NaN, ``low`` is 0. An infinity in ``input`` or ``weight`` makes the sums that
    contain it NaN if a ``low`` that it is multiplied with is 0. Other operands are multiplied in float32 or float64.

    Args:
        grad: ``[T, E]`` float32 (float64 for float64), the gradient of the logits. Any strides.
        input, weight: what the forward was given.
        for_input, for_weight: which gradients to compute.

    Returns:
        The gradients of ``input [T, H]`` and of ``weight [E, H]`` in their dtype; ``[0]`` for one that is not computed.

    Raises:
        TypeError: another dtype. ValueError: not 2-D, sizes that disagree, another device.
    """
    return _ops.router_logits_backward.default(grad, input, weight, for_input, for_weight)


def topk_router(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose ``topk`` experts for each token and weigh them.

    Each row on its own, in float64, rounded to float32 at the end. The choice is the first ``topk`` experts in the
    order that the head of this page describes. The weights, without the bias:

    - softmax with ``pre_softmax``: the softmax over all experts, not renormalized; without: the softmax over the chosen
      logits;
    - sigmoid and sqrtsoftplus: the score, when ``topk`` > 1 divided by the sum of the chosen scores plus 1e-20, as in
      Megatron-LM and transformers. Weights sum to 1 unless every chosen score is tiny: two experts with logits of -50
      have scores of 2e-22, and weights that sum to 0.04;
    - masked experts have weight 0, also when all are masked; a logit of +inf makes weights of the softmax NaN.

    All times ``scaling_factor``. Weights and gradients are within 2e-6 of those of float64 over float32's whole range.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16, E at most 1024. Any strides. float64 is refused.
        expert_bias: float32 ``[E]`` or None; not with softmax. It has no gradient: training code updates it.
        topk: 1 to E, and at most the experts of ``group_topk`` groups.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        pre_softmax: only with softmax.
        num_groups: divides E; 1 for no groups.
        group_topk: 1 to ``num_groups``; at most ``topk`` where ``group_score_topk`` is None.
        scaling_factor: of the weights.
        group_score_topk: how many of its experts a group is worth, 1 to ``E / num_groups``, or None.

    Returns:
        ``weights [T, topk]`` float32 and ``indices [T, topk]`` int32, always distinct and in ``[0, E)``. The same bits
        on CPU and CUDA, no host read.

    Differentiable in ``logits``; the choice is a constant of the gradient.

    Raises:
        TypeError: another dtype. ValueError: a number out of its range, a bias with softmax, ``pre_softmax`` without.

    Source: Megatron-LM ``topk_routing_with_score_function`` and TransformerEngine
    ``fused_topk_with_score_function``, with ties, masks and NaN as above; DeepSeek-V3 (arXiv:2412.19437), 2.1.2.
    """
    return _ops.topk_router.default(
        logits,
        expert_bias,
        topk,
        score_function,
        pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        group_score_topk,
    )


def topk_router_backward(
    grad: Tensor,
    logits: Tensor,
    indices: Tensor,
    score_function: ScoreFunction,
    pre_softmax: bool,
    scaling_factor: float,
) -> Tensor:
    """The gradient of :func:`topk_router` to its logits.

    Args:
        grad: ``[T, topk]`` float32, the gradient of the weights.
        logits, score_function, pre_softmax, scaling_factor: what the forward was given.
        indices: ``[T, topk]`` int32, what it chose; values outside ``[0, E)`` are left out.

    Returns:
        ``[T, E]`` in the dtype of ``logits``, computed in float64 and rounded to float32, then to the dtype; 0 for
        experts masked with -inf.
    """
    return _ops.topk_router_backward.default(
        grad, logits, indices, score_function, pre_softmax, scaling_factor
    )


def router_scores(logits: Tensor, score_function: ScoreFunction = "softmax") -> Tensor:
    """The scores of all experts, for the auxiliary loss: each row sums to 1, as long as a score is not tiny.

    softmax: the softmax over all experts. sigmoid, sqrtsoftplus: the score over the row's sum of scores plus 1e-20. In
    float64, rounded to float32.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16. Any strides.
        score_function: as in :func:`topk_router`.

    Returns:
        ``[T, E]`` float32; 0 for experts masked with -inf, also when all are. The same bits on CPU and CUDA.

    Differentiable.

    Raises:
        TypeError: another dtype. ValueError: not 2-D, an unknown score function.

    Source: Megatron-LM ``compute_routing_scores_for_aux_loss``.
    """
    return _ops.router_scores.default(logits, score_function)


def router_scores_backward(grad: Tensor, logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """The gradient of :func:`router_scores`: ``[T, E]`` in the dtype of ``logits`` from ``grad [T, E]`` float32."""
    return _ops.router_scores_backward.default(grad, logits, score_function)


def aux_loss(
    scores: Tensor, tokens_per_expert: Tensor, total_tokens: Tensor | int, topk: int, coeff: float
) -> Tensor:
    """The load-balancing loss: small when each expert gets as many tokens as its scores ask for.

    ``coeff * E / (topk * total_tokens ** 2) * sum_e tokens_per_expert[e] * sum_t scores[t, e]``: ``coeff`` at perfect
    balance with scores that sum to 1 per token, whatever E and topk. 0 when ``total_tokens`` is 0.

    Args:
        scores: ``[T, E]`` float32, from :func:`router_scores`.
        tokens_per_expert: int64 ``[E]``, from :func:`count_tokens_per_expert`; when the loss is over several ranks,
            their sum.
        total_tokens: how many tokens were counted, over the same ranks: a number, or int64 of one element on the
            device of ``scores`` (then nothing is read on the host).
        topk: experts of each token.
        coeff: factor of the loss.

    Returns:
        float32 scalar. The sums have a fixed order (csrc/routing/aux_loss.h): the result repeats bit for bit, the same
        on CPU and CUDA.

    Differentiable in ``scores``.

    Raises:
        TypeError: another dtype. ValueError: sizes that disagree, another device, ``topk`` below 1.

    Source: Switch Transformer (arXiv:2101.03961), equations 4 to 6; Megatron-LM ``switch_load_balancing_loss_func``.
    """
    if not isinstance(total_tokens, Tensor):
        total_tokens = torch.full((), total_tokens, dtype=torch.int64, device=scores.device)
    return _ops.aux_loss.default(scores, tokens_per_expert, total_tokens, topk, coeff)


def aux_loss_backward(
    grad: Tensor, tokens_per_expert: Tensor, total_tokens: Tensor, tokens: int, topk: int, coeff: float
) -> Tensor:
    """The gradient of :func:`aux_loss`: ``[tokens, E]`` float32, each row ``grad * factor * tokens_per_expert``."""
    return _ops.aux_loss_backward.default(grad, tokens_per_expert, total_tokens, tokens, topk, coeff)


def assign_slots(
    indices: Tensor, first_expert: int, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Give each (token, k) whose expert is one of ``num_experts`` from ``first_expert`` on a row of the layout.

    Args:
        indices: ``[T, K]`` int32 or int64, the experts of each token. Values outside
            ``[first_expert, first_expert + num_experts)``, -1 for one, are masked: they get no row. A token that
            names an expert twice gets two rows.
        first_expert: number of the layout's first expert.
        num_experts: experts in the layout, 0 to 1024.
        capacity: rows of the layout. What would come after is dropped: its slot is -1.
        alignment: each expert's rows are padded up to a multiple of it.

    Returns:
        ``slot`` int32 ``[T, K]``, the row of each (token, k) or -1; ``source`` and ``source_k`` int32 ``[capacity]``,
        the token and the k of each row, or -1 in padding; ``group_sizes`` int64 ``[num_experts]``, each expert's
        rows with padding, cut where the capacity ends, so that their sum is at most the capacity; ``total`` int64
        ``[1]``, the exact sum before anything was cut: more than ``capacity`` means that rows were dropped.

    Not differentiable: every output is an integer. The same on CPU and CUDA; on CUDA without a host read, and right
    when replayed in a CUDA graph with other indices.

    Raises:
        TypeError: another dtype. ValueError: ``indices`` not 2-D or of 2^31 elements or more, ``num_experts``,
        ``capacity`` (0 to 2^31 - 1) or ``alignment`` (1 to 2^31 - 1) out of range.
    """
    return _ops.assign_slots.default(indices, first_expert, num_experts, capacity, alignment)


def assign_weighted_slots(
    indices: Tensor, weights: Tensor, first_expert: int, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`assign_slots` and :func:`permute_weights` in one: the map, and the weight of each row.

    Args:
        indices, first_expert, num_experts, capacity, alignment: as in :func:`assign_slots`.
        weights: ``[T, K]`` float32, on the device of ``indices``. Any strides.

    Returns:
        ``slot``, ``source``, ``group_sizes`` and ``total`` as in :func:`assign_slots`; ``probs``, float32
        ``[capacity]``, the weight of each row's (token, k), 0 in rows without one. The weight of a masked or dropped
        pair is not used.

    Differentiable in ``weights``: the gradient comes back in the order of the input, 0 where a pair has no slot.
    The same bits as the two ops on CPU and CUDA, no host read.

    Raises:
        TypeError: another dtype. ValueError: what :func:`assign_slots` refuses, ``weights`` of another size or device.
    """
    return _ops.assign_weighted_slots.default(
        indices, weights, first_expert, num_experts, capacity, alignment
    )


def count_tokens_per_expert(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named, without padding: int64 ``[num_experts]``.

    Args:
        indices: int32 or int64 of any shape; values outside ``[0, num_experts)`` are not counted.
        num_experts: 0 to 1024.

    Raises:
        TypeError: another dtype. ValueError: ``num_experts`` out of range, 2^31 elements or more.
    """
    return _ops.count_tokens_per_expert.default(indices, num_experts)


def permute(
    tokens: Tensor, indices: Tensor, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy each token's row to its experts: a buffer of fixed capacity, expert by expert.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, uint8 or int8. Any strides.
        indices: ``[T, K]`` int32 or int64, K at most 1024; values outside ``[0, num_experts)`` are masked.
        num_experts, capacity, alignment: as in :func:`assign_slots`.

    Returns:
        ``rows [capacity, H]`` in the dtype of ``tokens``, zero in padding and past the last expert; ``group_sizes``,
        ``slot``, ``source`` and ``total`` as in :func:`assign_slots`.

    Differentiable in ``tokens``: the sum of the gradients of a token's rows, in float32 (float64 for float64) in
    ascending order of slot, rounded once; gradients of padding rows are not read. The same bits on CPU and CUDA, no
    host read.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, another device, a number out of range.
    """
    return _ops.permute.default(tokens, indices, num_experts, capacity, alignment)


def permute_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """The gradient of :func:`permute` to its tokens: ``[T, H]`` from ``grad [capacity, H]`` and ``slot [T, K]``."""
    return _ops.permute_backward.default(grad, slot)


def permute_rows(tokens: Tensor, slot: Tensor, source: Tensor) -> Tensor:
    """Copy each token's row to slots that were assigned before: what :func:`permute` does after it assigned them.

    Args:
        tokens: ``[T, H]`` float32, bfloat16, float16 or float64. Any strides.
        slot, source: int32 ``[T, K]`` (K at most 1024) and ``[capacity]``, both from the same
            :func:`assign_weighted_slots` or :func:`assign_slots`. Values out of range count as -1.

    Returns:
        ``[capacity, H]`` in the dtype of ``tokens``, zero where a row has no token. The same bits on CPU and CUDA, no
        host read.

    Differentiable in ``tokens``, as :func:`permute`.

    Raises:
        TypeError: another dtype. ValueError: sizes that disagree, another device.
    """
    return _ops.permute_rows.default(tokens, slot, source)


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


def permute_weights(weights: Tensor, slot: Tensor, source: Tensor) -> Tensor:
    """Let a value per (token, k) follow its row: ``[T, K]`` to ``[capacity]``, 0 in padding.

    Args:
        weights: ``[T, K]`` float32 or float64.
        slot, source: from the :func:`permute` or :func:`assign_slots` that moved the rows.

    Differentiable: the gradient comes back in the order of the input, 0 where a (token, k) has no slot. The same bits
    on CPU and CUDA, no host read.

    Raises:
        TypeError: another dtype. ValueError: sizes that disagree, another device.
    """
    return _ops.permute_weights.default(weights, slot, source)


def permute_weights_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """The gradient of :func:`permute_weights`: ``[T, K]`` from ``grad [capacity]`` and ``slot [T, K]``."""
    return _ops.permute_weights_backward.default(grad, slot)
