"""What the routing ops mean."""

from __future__ import annotations

import torch
from torch import Tensor


def single_scores(logits: Tensor, score_function: str) -> Tensor:
    """The scores that do not compete."""
    return (
        torch.sigmoid(logits) if score_function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    )


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax; 0 where all experts are masked."""
    return torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, logits.softmax(-1))


def topk_router(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Rank, choose, weigh. Stable sorts give ties to the lowest index, and rank NaN highest."""
    logits = logits.float()
    if score_function == "softmax":
        scores = masked_softmax(logits) if pre_softmax else logits
    else:
        scores = single_scores(logits, score_function)
    choice = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    choice = choice.masked_fill(logits == -torch.inf, -torch.inf)
    order = choice.sort(dim=1, descending=True, stable=True).indices
    if num_groups > 1:
        allowed = allowed_experts(choice, topk, num_groups, group_topk).gather(1, order)
        order = order.gather(1, allowed.long().sort(dim=1, descending=True, stable=True).indices)
    indices = order[:, :topk]
    weights = scores.gather(1, indices)
    if score_function == "softmax" and not pre_softmax:
        weights = masked_softmax(weights)
    elif score_function != "softmax" and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, indices.int()


def allowed_experts(choice: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Which experts are in the best groups: bool ``[T, E]``."""
    grouped = choice.view(choice.shape[0], num_groups, -1)
    best = grouped.sort(dim=2, descending=True).values[:, :, : topk // group_topk]
    values = best.masked_fill(best == -torch.inf, 0).sum(-1)
    values = values.masked_fill((grouped == -torch.inf).all(-1), -torch.inf)
    groups = values.sort(dim=1, descending=True, stable=True).indices[:, :group_topk]
    allowed = torch.zeros_like(values, dtype=torch.bool).scatter(1, groups, True)
    return allowed[:, :, None].expand_as(grouped).reshape(choice.shape)


def router_scores(logits: Tensor, score_function: str = "softmax") -> Tensor:
    """Normalised over all experts."""
    if score_function == "softmax":
        return masked_softmax(logits.float())
    scores = single_scores(logits.float(), score_function)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def aux_loss(
    scores: Tensor, tokens_per_expert: Tensor, total_tokens: Tensor | int, topk: int, coeff: float
) -> Tensor:
    """The formula; 0 without tokens."""
    total = float(total_tokens)
    factor = coeff * scores.shape[1] / (topk * total * total) if total else 0.0
    return (scores.sum(0) * tokens_per_expert).sum() * factor


def assign_slots(
    indices: Tensor, first_expert: int, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One (token, k) after the other takes the next row of its expert."""
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


def count_tokens_per_expert(indices: Tensor, num_experts: int) -> Tensor:
    """A histogram that leaves out what is not an expert."""
    experts = indices[(indices >= 0) & (indices < num_experts)]
    return torch.bincount(experts.long(), minlength=num_experts)


def permute(
    tokens: Tensor, indices: Tensor, num_experts: int, capacity: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows by source, zeros where there is none."""
    slot, source, _, group_sizes, total = assign_slots(indices, 0, num_experts, capacity, alignment)
    return gather_rows(tokens, source), group_sizes, slot, source, total


def gather_rows(rows: Tensor, source: Tensor) -> Tensor:
    """``rows[source]``, zeros for -1."""
    padded = torch.cat(
        [rows, torch.zeros_like(rows[:1]) if rows.shape[0] else rows.new_zeros(1, rows.shape[1])]
    )
    return padded[torch.where(source < 0, rows.shape[0], source.long())]


def permute_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """The sum of each token's slots."""
    return unpermute(grad, slot, torch.empty(0, dtype=torch.int32))


def unpermute(rows: Tensor, slot: Tensor, source: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's slots in ascending order (the op fuses multiply and add)."""
    ordered, k = slot.long().masked_fill(slot < 0, rows.shape[0]).sort(dim=1, stable=True)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    padded = torch.cat([rows.to(wide), rows.new_zeros(1, rows.shape[1], dtype=wide)])
    output = padded[-1:].expand(slot.shape[0], -1)
    for j in range(slot.shape[1]):
        scale = 1 if weights is None else weights.to(wide).gather(1, k)[:, j : j + 1]
        output = output + padded[ordered[:, j]] * scale
    return output.to(rows.dtype)


def unpermute_backward(
    grad: Tensor, rows: Tensor | None, slot: Tensor, source: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row gets its token's gradient times its weight; each weight the dot product of the two."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    grad_rows = gather_rows(grad.to(wide), source)
    grad_weights = torch.empty(0, dtype=wide, device=grad.device)
    if weights is not None:
        grad_rows = grad_rows * permute_weights(weights, slot, source)[:, None]
        if rows is not None:
            grad_weights = (
                gather_rows(rows.to(wide), slot.reshape(-1)).view(*slot.shape, -1) * grad.to(wide)[:, None]
            ).sum(-1)
    return grad_rows.to(grad.dtype), grad_weights


def permute_weights(weights: Tensor, slot: Tensor, source: Tensor) -> Tensor:
    """Each weight into its slot."""
    output = weights.new_zeros(source.shape[0])
    placed = slot >= 0
    return output.index_put((slot[placed].long(),), weights[placed])


def permute_weights_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """Each slot's value back."""
    return gather_rows(grad[:, None], slot.reshape(-1)).view(slot.shape)
