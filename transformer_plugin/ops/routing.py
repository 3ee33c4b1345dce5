"""Routing: which experts a token takes. Its rows to them and back: :mod:`transformer_plugin.ops.slots`.

Shapes: T tokens, H hidden size, E experts, K experts of each token.

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

from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "aux_loss",
    "aux_loss_backward",
    "count_tokens_per_expert",
    "router_logits",
    "router_logits_backward",
    "router_logits_with_tokens",
    "router_scores",
    "router_scores_backward",
    "topk_router",
    "topk_router_backward",
    "topk_router_with_load",
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


def router_logits_with_tokens(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`router_logits`, and the input again for what else reads it, such as the experts.

    The backward gets the gradients of both results, and adds that of the tokens in the product which computes the
    gradient of ``input``, without the pass in which autograd would add the two. It is rounded once; on a GPU a bfloat16
    product is rounded before it is added, as autograd's. It writes the sum
    into the memory of the gradient of the tokens where nothing else refers to that.

    Args:
        input, weight: as for :func:`router_logits`.

    Returns:
        The logits; and ``input``, or a view of it if its gradient is recorded, which may not be modified in place.

    Raises:
        TypeError, ValueError: as for :func:`router_logits`.
    """
    return _ops.router_logits_with_tokens.default(input, weight)


def router_logits_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    for_input: bool = True,
    for_weight: bool = True,
    grad_tokens: Tensor | None = None,
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
        grad_tokens: ``[T, H]`` in the dtype of ``input``, another gradient of it, which is added before the sum is
            rounded: that of the tokens of :func:`router_logits_with_tokens`. Any strides. Only with ``for_input``.

    Returns:
        The gradients of ``input [T, H]`` and of ``weight [E, H]`` in their dtype; ``[0]`` for one that is not computed.

    Raises:
        TypeError: another dtype. ValueError: not 2-D, sizes that disagree, another device.
    """
    return _ops.router_logits_backward.default(grad, input, weight, for_input, for_weight, grad_tokens)


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


def topk_router_with_load(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`topk_router`, :func:`count_tokens_per_expert` of its indices, and a zero, with fewer launches.

    On CUDA the kernel that chooses also counts, after a memset of the counters: two launches in place of three or four.

    Args:
        logits, expert_bias, topk: as in :func:`topk_router`.
        score_function, pre_softmax, num_groups, group_topk, scaling_factor, group_score_topk: the same.

    Returns:
        ``weights [T, topk]`` float32 and ``indices [T, topk]`` int32 with the bits of :func:`topk_router`; ``load [E]``
        int64, how many tokens chose each expert; and ``aux_loss``, a float32 scalar of 0, what a router without
        auxiliary loss adds to the loss. The same bits on CPU and CUDA, no host read.

    The weights are differentiable in ``logits``, as those of :func:`topk_router`; ``load`` and ``aux_loss`` have no
    gradient. Errors are those of :func:`topk_router`.
    """
    return _ops.topk_router_with_load.default(
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
        indices: ``[T, topk]`` int32, what it chose; -1 has no effect. Others as in
            :func:`~transformer_plugin.ops.assign_slots`.

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
    is_number = isinstance(total_tokens, int | torch.SymInt) and -(2**63) <= total_tokens < 2**63
    if is_number and isinstance(scores, Tensor):  # others are left to the op, which names them
        number: Any = total_tokens
        total_tokens = torch.full((), number, dtype=torch.int64, device=scores.device)
    return _ops.aux_loss.default(scores, tokens_per_expert, total_tokens, topk, coeff)


def aux_loss_backward(
    grad: Tensor, tokens_per_expert: Tensor, total_tokens: Tensor, tokens: int, topk: int, coeff: float
) -> Tensor:
    """The gradient of :func:`aux_loss`: ``[tokens, E]`` float32, each row ``grad * factor * tokens_per_expert``."""
    return _ops.aux_loss_backward.default(grad, tokens_per_expert, total_tokens, tokens, topk, coeff)


def count_tokens_per_expert(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named, without padding: int64 ``[num_experts]``.

    Args:
        indices: int32 or int64 of any shape; -1 is not counted.
        num_experts: 0 to 1024.

    Raises:
        TypeError: another dtype. ValueError: ``num_experts`` out of range, 2^31 elements or more; on a CPU an index
        that is neither an expert nor -1, on a GPU one of an earlier call, as in
        :func:`~transformer_plugin.ops.assign_slots`.
    """
    return _ops.count_tokens_per_expert.default(indices, num_experts)
