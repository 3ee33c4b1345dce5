"""References of the expert-parallel ops. One process computes all ranks: arguments and results are lists with one
entry per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.ops.expert_parallel import CompactPlan, Plan
from transformer_plugin.reference.routing import check_expert_indices

#: one plan for each rank.
Plans = Sequence[Plan | CompactPlan]


def plan(
    topk_idx: list[Tensor], num_experts: int, max_tokens: int, capacity: int, alignment: int = 1
) -> list[Plan]:
    """Returns every rank's plan, whose slots are assigned in ascending order of (expert, rank, token, k)."""
    tokens = len(topk_idx) * max_tokens
    return [
        Plan(*each[:5])
        for each in _plans(topk_idx, num_experts, max_tokens, capacity, alignment, tokens, tokens)
    ]


def compact_plan(
    topk_idx: list[Tensor],
    num_experts: int,
    max_tokens: int,
    capacity: int,
    alignment: int = 1,
    max_received_tokens: int | None = None,
) -> list[CompactPlan]:
    """The same, of the tokens that have a row on each rank, and with a bound on their number."""
    tokens = len(topk_idx) * max_tokens
    bound = tokens if max_received_tokens is None else max_received_tokens
    rows = min(tokens, capacity, bound)
    return _plans(topk_idx, num_experts, max_tokens, capacity, alignment, bound, rows, compact=True)


def by_records(plans: Sequence[CompactPlan], topk: int) -> list[CompactPlan]:
    """The same plans with the maps of plans by records."""
    ranks, tokens = len(plans), len(plans[0].position)
    max_tokens, most = tokens // ranks, min(topk, ranks)
    # Of each rank the (destination, token) of its records, in ascending order.
    sent: list[list[tuple[int, int]]] = [[] for _ in plans]
    for to, each in enumerate(plans):
        for number in each.received.tolist():
            if number >= 0:
                sent[number // max_tokens].append((to, number % max_tokens))
    counts = [[sum(to == r for to, _ in records) for r in range(ranks)] for records in sent]
    results = []
    for me, each in enumerate(plans):
        rows = torch.zeros(4, ranks + 1, dtype=torch.int32)
        for r in range(ranks):
            rows[0, r + 1] = rows[0, r] + counts[r][me]
            rows[1, r + 1] = rows[1, r] + counts[me][r]
            if r != me:  # a rank's own rows do not travel
                rows[2, r] = sum(counts[before][r] for before in range(me) if before != r)
                rows[3, r] = sum(counts[r][before] for before in range(me) if before != r)
        records = torch.full((3, max_tokens, most), -1, dtype=torch.int32)
        for t in range(max_tokens):
            mine = [n for n, (_, token) in enumerate(sent[me]) if token == t]
            records[0, t, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        flat = torch.tensor([token for _, token in sent[me]], dtype=torch.int32)
        records[1].view(-1)[: len(flat)] = flat
        for n, (to, token) in enumerate(sent[me]):
            row = plans[to].slot[plans[to].position[me * max_tokens + token]]
            records[2].view(-1)[n] = row[row >= 0][0]
        results.append(each._replace(received=rows, position=records))
    return results


def _plans(
    topk_idx: list[Tensor],
    num_experts: int,
    max_tokens: int,
    capacity: int,
    alignment: int,
    bound: int,
    rows: int,
    compact: bool = False,
) -> list[CompactPlan]:
    """The plans, of ``rows`` received rows and at most ``bound`` tokens on each rank."""
    ranks = len(topk_idx)
    local = num_experts // ranks
    topk = topk_idx[0].shape[-1]
    align = max(1, alignment)
    chosen: dict[int, list[int]] = {}  # the experts of each token, by its number
    for r, indices in enumerate(topk_idx):
        check_expert_indices(indices, num_experts)
        for t, row in enumerate(indices.reshape(-1, topk).tolist()):
            chosen[r * max_tokens + t] = row
    required, required_tokens = _needs(chosen, ranks, local, align)
    overflow = max(required) > capacity or max(required_tokens) > bound
    shared = (torch.tensor(required), torch.tensor([int(overflow)], dtype=torch.int32))
    plans = []
    for r in range(ranks):
        mine = range(r * local, (r + 1) * local)
        kept = [n for n, row in chosen.items() if any(expert in mine for expert in row)][:bound]
        slots = {n: [-1] * topk for n in range(ranks * max_tokens)}
        source = [-1] * capacity
        counts, start = [], 0
        for expert in mine:
            pairs = [(n, k) for n in kept for k in range(topk) if chosen[n][k] == expert]
            for row, (n, k) in enumerate(pairs, start):
                if row < capacity:
                    slots[n][k], source[row] = row, n
            end = start + -(-len(pairs) // align) * align
            counts.append(min(end, capacity) - min(start, capacity))
            start = end
        received, position = list(range(ranks * max_tokens)), []
        if compact:
            received = [n for n, of_token in slots.items() if max(of_token) >= 0]
            position = [received.index(n) if n in received else -1 for n in slots]
            source = [-1 if n < 0 else position[n] for n in source]
        slot = [slots[n] for n in received] + [[-1] * topk] * (rows - len(received))
        number = received + [-1] * (rows - len(received))
        plans.append(
            CompactPlan(
                torch.tensor(slot, dtype=torch.int32).reshape(rows, topk),
                torch.tensor(source, dtype=torch.int32),
                torch.tensor(counts, dtype=torch.int64),
                *shared,
                torch.tensor(number, dtype=torch.int32),
                torch.tensor(position, dtype=torch.int32),
                torch.tensor(required_tokens, dtype=torch.int64),
            )
        )
    return plans


def _needs(chosen: dict[int, list[int]], ranks: int, local: int, align: int) -> tuple[list[int], list[int]]:
    """The rows, with padding, and the tokens that each rank needs."""
    required, required_tokens = [], []
    for r in range(ranks):
        mine = range(r * local, (r + 1) * local)
        counts = [sum(row.count(expert) for row in chosen.values()) for expert in mine]
        required.append(sum(-(-count // align) * align for count in counts))
        required_tokens.append(sum(any(expert in mine for expert in row) for row in chosen.values()))
    return required, required_tokens


def dispatch(
    tokens: list[Tensor], topk_weights: list[Tensor] | None, plans: Plans, expand: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Returns each row's token, or without ``expand`` the received tokens; and the weight of each row's (token, k)."""
    max_tokens = _token_count(plans[0]) // len(plans)
    results = []
    for each in plans:
        capacity = each.source.shape[0]
        rows = tokens[0].new_zeros(capacity if expand else each.slot.shape[0], tokens[0].shape[1])
        weights = torch.zeros(0 if topk_weights is None else capacity, dtype=_weight_type(tokens[0]))
        for n in range(_token_count(each)):
            r, t = divmod(n, max_tokens)
            row = _row_of(each, n)
            if t >= tokens[r].shape[0] or row < 0:
                continue
            if not expand:
                rows[row] = tokens[r][t]
            for k, s in enumerate(each.slot[row].tolist()):
                if s >= 0:
                    if expand:
                        rows[s] = tokens[r][t]
                    if topk_weights is not None:
                        weights[s] = topk_weights[r][t, k]
        results.append((rows, weights))
    return results


def combine(rows: list[Tensor], plans: Plans, num_tokens: list[int], expand: bool = True) -> list[Tensor]:
    """Sums each rank's slots in ascending order and rounds; then sums the ranks in ascending order and rounds.

    With ``expand=False`` the first sums are given.
    """
    max_tokens = _token_count(plans[0]) // len(plans)
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    combined = []
    for r, count in enumerate(num_tokens):
        output = rows[0].new_zeros(count, rows[0].shape[1])
        for t in range(count):
            total = torch.zeros(rows[0].shape[1], dtype=wide)
            for each, layout in zip(rows, plans, strict=True):
                n = r * max_tokens + t
                row = _row_of(layout, n)
                part = torch.zeros(rows[0].shape[1], dtype=wide)
                if row >= 0 and not expand:
                    part = part + each[row].to(wide)
                for s in sorted(layout.slot[row].tolist()) if row >= 0 and expand else ():
                    if s >= 0:
                        part = part + each[s].to(wide)
                total = total + part.to(rows[0].dtype).to(wide)
            output[t] = total.to(rows[0].dtype)
        combined.append(output)
    return combined


def dispatch_backward(
    grad_recv: list[Tensor],
    grad_recv_weights: list[Tensor],
    plans: Plans,
    num_tokens: list[int],
    expand: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """Returns the combine of the rows' gradients, and the gradient of each weight at its (token, k)."""
    max_tokens = _token_count(plans[0]) // len(plans)
    grad_tokens = combine(grad_recv, plans, num_tokens, expand)
    grads = []
    for r, count in enumerate(num_tokens):
        weights = grad_recv_weights[0].new_zeros(count, plans[0].slot.shape[1])
        for grad, layout in zip(grad_recv_weights, plans, strict=True):
            for t in range(count):
                n = r * max_tokens + t
                row = _row_of(layout, n)
                for k, s in enumerate(layout.slot[row].tolist() if row >= 0 else ()):
                    if s >= 0:
                        weights[t, k] = grad[s]
        grads.append((grad_tokens[r], weights))
    return grads


def combine_backward(grad: list[Tensor], plans: Plans, expand: bool = True) -> list[Tensor]:
    """Returns the dispatch of the gradients, without weights; tokens that the combine did not return have zeros."""
    max_tokens = _token_count(plans[0]) // len(plans)
    padded = [torch.cat([g, g.new_zeros(max_tokens - g.shape[0], g.shape[1])]) for g in grad]
    return [rows for rows, _ in dispatch(padded, None, plans, expand)]


def dispatch_out(
    tokens: list[Tensor],
    topk_weights: list[Tensor] | None,
    plans: Plans,
    recv: list[Tensor],
    recv_weights: list[Tensor] | None,
) -> None:
    """Writes what :func:`dispatch` returns."""
    for r, (rows, weights) in enumerate(dispatch(tokens, topk_weights, plans)):
        recv[r].copy_(rows)
        if recv_weights is not None:
            recv_weights[r].copy_(weights)


def combine_backward_out(grad: list[Tensor], plans: Plans, grad_rows: list[Tensor]) -> None:
    """Writes what :func:`combine_backward` returns."""
    for target, rows in zip(grad_rows, combine_backward(grad, plans), strict=True):
        target.copy_(rows)


def _token_count(plan: Plan | CompactPlan) -> int:
    """R * max_tokens."""
    return plan.position.numel() if isinstance(plan, CompactPlan) else plan.slot.shape[0]


def _row_of(plan: Plan | CompactPlan, token: int) -> int:
    """The received row of a token, or -1."""
    return int(plan.position[token]) if isinstance(plan, CompactPlan) else token


def _weight_type(tokens: Tensor) -> torch.dtype:
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32
