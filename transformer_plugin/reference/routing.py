"""References of the routing ops."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "assign_slots",
    "assign_weighted_slots",
    "aux_loss",
    "count_tokens_per_expert",
    "permute",
    "permute_backward",
    "permute_rows",
    "router_logits",
    "router_logits_backward",
    "router_logits_with_tokens",
    "router_scores",
    "topk_router",
    "topk_router_with_load",
    "unpermute",
    "unpermute_backward",
]

#: ``exp`` of this and of smaller numbers counts as 0, in float64.
LEAST_EXPONENT = -708.0
#: For smaller logits ``log(1 + exp(x))`` equals ``exp(x)`` in float64.
SMALL_LOGIT = -40.0
#: Added to the sum of sigmoid and square-root-of-softplus scores.
SUM_FLOOR = 1e-20


def exponential(exponents: Tensor) -> Tensor:
    """Returns ``exp``, or 0 up to :data:`LEAST_EXPONENT`."""
    return torch.exp(exponents).masked_fill(exponents <= LEAST_EXPONENT, 0.0)


def single_scores(logits: Tensor, score_function: str) -> Tensor:
    """Returns sigmoid or square-root-of-softplus scores of float64 logits, which do not depend on other experts."""
    small = exponential(-logits.abs())
    if score_function == "sigmoid":
        return torch.where(logits > 0, 1.0, small) / (1 + small)
    softplus = logits.clamp(min=0) + torch.log1p(small)
    return torch.where(logits < SMALL_LOGIT, exponential(logits), softplus).sqrt()


def log_scores(logits: Tensor, score_function: str) -> Tensor:
    """Returns the logarithms of the scores, which do not underflow and have a gradient everywhere."""
    if score_function == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    is_small = logits < SMALL_LOGIT
    softplus = torch.nn.functional.softplus(logits.masked_fill(is_small, 0.0))
    return torch.where(is_small, logits, softplus.log()) / 2


def masked_softmax(logits: Tensor) -> Tensor:
    """Returns the softmax, or 0 if all experts are masked."""
    dead = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)


def normalised_scores(logits: Tensor, score_function: str) -> Tensor:
    """Divides the scores of float64 logits by their sum; for sigmoid and square root of softplus plus
    :data:`SUM_FLOOR`."""
    if score_function == "softmax":
        return masked_softmax(logits)
    scores = exponential(log_scores(logits, score_function))
    return scores / (scores.sum(-1, keepdim=True) + SUM_FLOOR)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums of products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def router_logits(input: Tensor, weight: Tensor) -> Tensor:
    """Converts the operands to the dtype of the sums, without loss, and multiplies."""
    wide = sum_dtype(input.dtype)
    return input.to(wide) @ weight.to(wide).T


def router_logits_with_tokens(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the input again."""
    return router_logits(input, weight), input


def router_logits_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    for_input: bool = True,
    for_weight: bool = True,
    grad_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies the gradient; with bfloat16 operands its two parts, and adds the products. Adds the gradient of the
    tokens before rounding."""
    wide = sum_dtype(input.dtype)
    parts = bfloat16_parts(grad) if input.dtype == torch.bfloat16 else (grad,)
    grads = [input.new_empty(0), weight.new_empty(0)]
    if for_input:
        products = torch.cat(parts, 1).to(wide) @ torch.cat([weight] * len(parts)).to(wide)
        grads[0] = (products if grad_tokens is None else products + grad_tokens.to(wide)).to(input.dtype)
    if for_weight:
        halves = torch.stack([part.to(wide).T @ input.to(wide) for part in parts])
        grads[1] = halves.sum(0).to(weight.dtype)
    return grads[0], grads[1]


def bfloat16_parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two bfloat16 values whose sum is a float32 value up to a factor of 1 +- 2**-17. The first of a finite
    value is finite; the second of an infinity or a NaN is 0."""
    largest = torch.finfo(torch.bfloat16).max
    high = torch.where(values.isfinite(), values.bfloat16().clamp(-largest, largest), values.bfloat16())
    return high, torch.where(values.isfinite(), values - high.float(), 0.0).bfloat16()


def topk_router(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Ranks the experts, chooses and computes weights in float64. Stable sorts give ties to the lowest index and
    rank NaN highest."""
    logits = logits.double()
    seen = logits.detach()
    order = seen.sort(dim=1, descending=True, stable=True).indices
    biased = None
    if expert_bias is not None:
        biased = single_scores(seen, score_function) + expert_bias.detach().double()
        biased = to_24_bits(biased).masked_fill(seen == -torch.inf, -torch.inf)
        places = biased.gather(1, order).sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, places)
    if num_groups > 1:
        count = topk // group_topk if group_score_topk is None else group_score_topk
        function = "logit" if score_function == "softmax" and not pre_softmax else score_function
        if count == 1:
            groups = groups_of_best_experts(order, num_groups, group_topk)
        else:
            groups = groups_of_best_sums(seen, biased, function, num_groups, group_topk, count)
        allowed = torch.zeros(seen.shape[0], num_groups, dtype=torch.bool, device=seen.device)
        allowed = allowed.scatter(1, groups, True).repeat_interleave(seen.shape[1] // num_groups, dim=1)
        left = allowed.gather(1, order).long().sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, left)
    indices = order[:, :topk]
    if pre_softmax:
        weights = masked_softmax(logits).gather(1, indices)
    elif score_function != "softmax" and topk == 1:
        weights = log_scores(logits.gather(1, indices), score_function).exp()
    else:
        weights = normalised_scores(logits.gather(1, indices), score_function)
    return (weights * scaling_factor).float(), indices.int()


def topk_router_with_load(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chooses, counts, and makes a zero."""
    groups = (num_groups, group_topk, scaling_factor, group_score_topk)
    weights, indices = topk_router(logits, expert_bias, topk, score_function, pre_softmax, *groups)
    load = count_tokens_per_expert(indices, logits.shape[1])
    return weights, indices, load, torch.zeros((), dtype=torch.float32, device=logits.device)


def groups_of_best_experts(order: Tensor, num_groups: int, group_topk: int) -> Tensor:
    """Returns the groups of the experts that rank first: int64 ``[T, group_topk]``."""
    places = order.argsort(dim=1).unflatten(1, (num_groups, -1)).amin(2)
    return places.argsort(dim=1)[:, :group_topk]


def groups_of_best_sums(
    logits: Tensor, biased: Tensor | None, function: str, num_groups: int, group_topk: int, count: int
) -> Tensor:
    """Returns the groups whose best ``count`` choice values have the largest sums: int64 ``[T, group_topk]``.

    If scores underflow float64, their sum is 0. Such groups rank below all others, by their largest logit.
    """
    values = logits if biased is None else biased
    grouped = values.unflatten(1, (num_groups, -1)).sort(dim=2, descending=True).values[:, :, :count]
    live = (logits != -torch.inf).unflatten(1, (num_groups, -1)).sum(2)
    shift = logits.amax(1)[:, None, None] if function == "softmax" else 0.0
    terms = grouped
    if function == "softmax":
        terms = to_24_bits(exponential(grouped - shift))
    elif function != "logit" and biased is None:
        terms = to_24_bits(single_scores(grouped, function))
    sums = torch.zeros_like(grouped[:, :, 0])
    for i in range(count):
        sums = torch.where(i < live, sums + terms[:, :, i], sums)
    if function != "logit" and biased is None:
        sums = torch.where(sums == 0, (grouped - shift)[:, :, 0], to_24_bits(sums))
    else:
        sums = to_24_bits(sums)
    # Groups with only masked experts rank last, also after a group whose sum is -inf.
    alive = (live > 0).long()
    order = sums.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, alive.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    return order[:, :group_topk]


def to_24_bits(values: Tensor) -> Tensor:
    """Rounds float64 to the precision of float32, so that values which differ only by float64 rounding are equal."""
    bits = values.contiguous().view(torch.int64)
    rounded = (bits + 0x0FFFFFFF + (bits >> 29 & 1)) & ~0x1FFFFFFF
    return torch.where(values.isfinite(), rounded.view(torch.float64), values)


def router_scores(logits: Tensor, score_function: str = "softmax") -> Tensor:
    """Returns the scores, normalized over all experts, in float64."""
    return normalised_scores(logits.double(), score_function).float()


def aux_loss(
    scores: Tensor, tokens_per_expert: Tensor, total_tokens: Tensor | int, topk: int, coeff: float
) -> Tensor:
    """Returns the documented formula; 0 without tokens."""
    total = float(total_tokens)
    factor = coeff * scores.shape[1] / (topk * total * total) if total else 0.0
    return (scores.sum(0) * tokens_per_expert).sum() * factor


def check_expert_indices(indices: Tensor, experts: int) -> None:
    """Raises if an index is neither an expert nor -1."""
    if bool(((indices < -1) | (indices >= experts)).any()):
        raise ValueError(f"expected experts from 0 to {experts - 1}, or -1, got {indices.tolist()}")


def assign_slots(
    indices: Tensor,
    first_expert: int,
    num_experts: int,
    capacity: int,
    alignment: int = 1,
    total_experts: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Assigns to each (token, k), in order, the next row of its expert."""
    check_expert_indices(indices, first_expert + num_experts if total_experts == -1 else total_experts)
    tokens, topk = indices.shape
    experts = [[int(e) - first_expert for e in row] for row in indices.tolist()]
    counts = [sum(row.count(e) for row in experts) for e in range(num_experts)]
    padded = [(count + alignment - 1) // alignment * alignment for count in counts]
    starts = [sum(padded[:e]) for e in range(num_experts)]
    following = list(starts)
    slot = torch.full((tokens, topk), -1, dtype=torch.int32)
    source = torch.full((capacity,), -1, dtype=torch.int32)
    source_k = torch.full((capacity,), -1, dtype=torch.int32)
    for t in range(tokens):
        for k in range(topk):
            expert = experts[t][k]
            if not 0 <= expert < num_experts:
                continue
            row, following[expert] = following[expert], following[expert] + 1
            if row < capacity:
                slot[t, k], source[row], source_k[row] = row, t, k
    sizes = [min(s + p, capacity) - min(s, capacity) for s, p in zip(starts, padded, strict=True)]
    group_sizes = torch.tensor(sizes, dtype=torch.int64)
    total = torch.tensor([sum(padded)], dtype=torch.int64)
    device = indices.device
    return slot.to(device), source.to(device), source_k.to(device), group_sizes.to(device), total.to(device)


def assign_weighted_slots(
    indices: Tensor,
    weights: Tensor,
    first_expert: int,
    num_experts: int,
    capacity: int,
    alignment: int = 1,
    total_experts: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The slots of :func:`assign_slots`, and the weights in them."""
    slot, source, _, group_sizes, total = assign_slots(
        indices, first_expert, num_experts, capacity, alignment, total_experts
    )
    return slot, source, group_sizes, total, weights_to_slots(weights, slot, source)


def count_tokens_per_expert(indices: Tensor, num_experts: int) -> Tensor:
    """Returns a histogram of the indices without -1."""
    check_expert_indices(indices, num_experts)
    return torch.bincount(indices[indices >= 0].long(), minlength=num_experts)


def permute(
    tokens: Tensor, indices: Tensor, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the rows of the tokens in ``source``, and zeros where there is no token."""
    slot, source, _, group_sizes, total = assign_slots(indices, 0, num_experts, capacity, alignment)
    return gather_rows(tokens, source), group_sizes, slot, source, total


def gather_rows(rows: Tensor, source: Tensor) -> Tensor:
    """Returns ``rows[source]``, and zeros for -1."""
    padded = torch.cat(
        [rows, torch.zeros_like(rows[:1]) if rows.shape[0] else rows.new_zeros(1, rows.shape[1])]
    )
    return padded[torch.where(is_placed(source, rows.shape[0]), source.long(), rows.shape[0])]


def permute_rows(tokens: Tensor, slot: Tensor, source: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """Returns the rows of the tokens in ``source``, and zeros where there is no token, also past the groups."""
    return gather_rows(tokens, source)


def permute_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """Returns the sum of each token's slots."""
    return unpermute(grad, slot, torch.empty(0, dtype=torch.int32))


def unpermute(rows: Tensor, slot: Tensor, source: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the weighted sum of each token's slots in ascending order (the op fuses multiply and add)."""
    placed = is_placed(slot, rows.shape[0])
    ordered, k = slot.long().masked_fill(~placed, rows.shape[0]).sort(dim=1, stable=True)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    padded = torch.cat([rows.to(wide), rows.new_zeros(1, rows.shape[1], dtype=wide)])
    output = padded[-1:].expand(slot.shape[0], -1)
    # The weight of a masked pair must have no effect, even if it is infinite.
    scales = None if weights is None else torch.where(placed, weights.to(wide), 0.0).gather(1, k)
    for j in range(slot.shape[1]):
        output = output + padded[ordered[:, j]] * (1 if scales is None else scales[:, j : j + 1])
    return output.to(rows.dtype)


def is_placed(index: Tensor, count: int) -> Tensor:
    """Returns which entries are valid indices; -1 and entries out of range are not."""
    return (index >= 0) & (index < count)


def unpermute_backward(
    grad: Tensor, rows: Tensor | None, slot: Tensor, source: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of a row is its token's gradient times its weight; that of a weight is the dot product of the
    two."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    grad_rows = gather_rows(grad.to(wide), source)
    grad_weights = torch.empty(0, dtype=wide, device=grad.device)
    if weights is not None:
        grad_rows = grad_rows * weights_to_slots(weights, slot, source)[:, None]
        if rows is not None:
            placed = is_placed(slot, rows.shape[0])
            products = gather_rows(rows.to(wide), slot.flatten()).unflatten(0, slot.shape)
            dots = (products * grad.to(wide)[:, None]).sum(-1)
            grad_weights = torch.where(placed, dots, 0.0)
    return grad_rows.to(grad.dtype), grad_weights


def weights_to_slots(weights: Tensor, slot: Tensor, source: Tensor) -> Tensor:
    """Writes each weight to its slot."""
    output = weights.new_zeros(source.shape[0])
    placed = is_placed(slot, source.shape[0])
    return output.index_put((slot[placed].long(),), weights[placed])
