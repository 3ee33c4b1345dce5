"""References of the expert-parallel ops. One process computes all ranks: arguments and results are lists with one
entry per rank."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.ops.expert_parallel import Plan
from transformer_plugin.reference.routing import check_expert_indices


def plan(
    topk_idx: list[Tensor], num_experts: int, max_tokens: int, capacity: int, alignment: int = 1
) -> list[Plan]:
    """Returns every rank's plan, whose slots are assigned in ascending order of (expert, rank, token, k)."""
    ranks = len(topk_idx)
    local = num_experts // ranks
    topk = topk_idx[0].shape[-1]
    align = max(1, alignment)
    chosen = [[] for _ in range(num_experts)]  # type: list[list[tuple[int, int]]]
    for r, indices in enumerate(topk_idx):
        check_expert_indices(indices, num_experts)
        for t, row in enumerate(indices.reshape(-1, topk).tolist()):
            for k, expert in enumerate(row):
                if expert >= 0:
                    chosen[expert].append((r * max_tokens + t, k))
    sizes = [-(-len(pairs) // align) * align for pairs in chosen]
    required = torch.tensor(
        [sum(sizes[r * local : (r + 1) * local]) for r in range(ranks)], dtype=torch.int64
    )
    overflow = torch.tensor([int(required.max() > capacity)], dtype=torch.int32)
    plans = []
    for r in range(ranks):
        slot = torch.full((ranks * max_tokens, topk), -1, dtype=torch.int32)
        source = torch.full((capacity,), -1, dtype=torch.int32)
        counts, start = [], 0
        for expert in range(r * local, (r + 1) * local):
            for row, (n, k) in enumerate(chosen[expert], start):
                if row < capacity:
                    slot[n, k], source[row] = row, n
            end = start + sizes[expert]
            counts.append(min(end, capacity) - min(start, capacity))
            start = end
        plans.append(Plan(slot, source, torch.tensor(counts, dtype=torch.int64), required, overflow))
    return plans


def dispatch(
    tokens: list[Tensor], topk_weights: list[Tensor] | None, plans: list[Plan]
) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each row, the token and the weight of its (token, k)."""
    ranks = len(tokens)
    max_tokens = plans[0].slot.shape[0] // ranks
    received = []
    for each in plans:
        capacity = each.source.shape[0]
        recv = tokens[0].new_zeros(capacity, tokens[0].shape[1])
        weights = torch.zeros(0 if topk_weights is None else capacity, dtype=_weight_type(tokens[0]))
        for n, row in enumerate(each.slot.tolist()):
            for k, s in enumerate(row):
                if s >= 0:
                    recv[s] = tokens[n // max_tokens][n % max_tokens]
                    if topk_weights is not None:
                        weights[s] = topk_weights[n // max_tokens][n % max_tokens, k]
        received.append((recv, weights))
    return received


def combine(rows: list[Tensor], plans: list[Plan], num_tokens: list[int]) -> list[Tensor]:
    """Sums each rank's slots in ascending order and rounds; then sums the ranks in ascending order and rounds."""
    ranks = len(rows)
    max_tokens = plans[0].slot.shape[0] // ranks
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    combined = []
    for r, count in enumerate(num_tokens):
        output = rows[0].new_zeros(count, rows[0].shape[1])
        for t in range(count):
            total = torch.zeros(rows[0].shape[1], dtype=wide)
            for each, layout in zip(rows, plans, strict=True):
                part = torch.zeros(rows[0].shape[1], dtype=wide)
                for s in sorted(layout.slot[r * max_tokens + t].tolist()):
                    if s >= 0:
                        part = part + each[s].to(wide)
                total = total + part.to(rows[0].dtype).to(wide)
            output[t] = total.to(rows[0].dtype)
        combined.append(output)
    return combined


def dispatch_backward(
    grad_recv: list[Tensor], grad_recv_weights: list[Tensor], plans: list[Plan], num_tokens: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the combine of the rows' gradients, and the gradient of each weight at its (token, k)."""
    max_tokens = plans[0].slot.shape[0] // len(plans)
    grad_tokens = combine(grad_recv, plans, num_tokens)
    grads = []
    for r, count in enumerate(num_tokens):
        weights = grad_recv_weights[0].new_zeros(count, plans[0].slot.shape[1])
        for grad, layout in zip(grad_recv_weights, plans, strict=True):
            for t in range(count):
                for k, s in enumerate(layout.slot[r * max_tokens + t].tolist()):
                    if s >= 0:
                        weights[t, k] = grad[s]
        grads.append((grad_tokens[r], weights))
    return grads


def combine_backward(grad: list[Tensor], plans: list[Plan]) -> list[Tensor]:
    """Returns the dispatch of the gradients, without weights; tokens that the combine did not return have zeros."""
    max_tokens = plans[0].slot.shape[0] // len(plans)
    padded = [torch.cat([g, g.new_zeros(max_tokens - g.shape[0], g.shape[1])]) for g in grad]
    return [recv for recv, _ in dispatch(padded, None, plans)]


def _weight_type(tokens: Tensor) -> torch.dtype:
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32
