"""plan, dispatch, combine and their gradients: bit for bit those of the reference, which simulates all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from transformer_plugin import reference
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.reference import expert_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import (
    EpCase,
    duplicated,
    ep_cases,
    masked,
    one_expert,
    uniform,
)
from transformer_plugin.testing.numerics import assert_same_bits

CASES = list(ep_cases())
TIMEOUT_MS = 60_000


def make_plan(rank: Rank, case: EpCase, indices: torch.Tensor, **options: object) -> ep.Plan:
    return ep.plan(
        indices.to(rank.device),
        case.experts(rank.size),
        case.max_tokens,
        case.capacity,
        case.alignment,
        rank.size,
        rank.group_name,
        timeout_ms=TIMEOUT_MS,
        **options,
    )


def with_nan_outside(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sets padding and unused rows to NaN, so that any use of them is visible."""
    return torch.where((source >= 0)[:, None], rows, torch.nan)


def check_case(rank: Rank, case: EpCase) -> None:
    name, me, device = rank.group_name, rank.rank, rank.device
    drawn = [case.draw(r, rank.size) for r in range(rank.size)]
    indices, tokens, weights = (list(each) for each in zip(*drawn, strict=True))
    counts = [len(each) for each in tokens]
    plans = all_ranks.plan(indices, case.experts(rank.size), case.max_tokens, case.capacity, case.alignment)
    plan = make_plan(rank, case, indices[me])
    for field, got, expected in zip(ep.Plan._fields, plan, plans[me], strict=True):
        assert_same_bits(got, expected, field)

    x = tokens[me].to(device).requires_grad_()
    w = weights[me].to(device).requires_grad_()
    recv, recv_weights = ep.dispatch(x, w, plan.slot, plan.source, name, TIMEOUT_MS)
    expected = all_ranks.dispatch(tokens, weights, plans)[me]
    assert_same_bits(recv, expected[0], "recv")
    assert_same_bits(recv_weights, expected[1], "recv_weights")

    # Every rank's rows, the same on every rank, with NaN in rows that must not be read.
    generator = torch.Generator().manual_seed(5)
    shape = (case.capacity, case.hidden)
    draws = [torch.randn(shape, generator=generator).to(case.dtype) for _ in range(rank.size)]
    rows = [with_nan_outside(draw, each.source) for draw, each in zip(draws, plans, strict=True)]
    grad_weights = [torch.randn(case.capacity, generator=generator).to(weights[0].dtype) for _ in plans]
    grad_weights = [
        torch.where(each.source >= 0, grad, torch.nan) for grad, each in zip(grad_weights, plans, strict=True)
    ]
    got = torch.autograd.grad(
        (recv, recv_weights), (x, w), (rows[me].to(device), grad_weights[me].to(device))
    )
    expected = all_ranks.dispatch_backward(rows, grad_weights, plans, counts)[me]
    assert_same_bits(got[0], expected[0], "grad_tokens")
    assert_same_bits(got[1], expected[1], "grad_topk_weights")

    z = rows[me].to(device).requires_grad_()
    output = ep.combine(z, plan.slot, plan.source, counts[me], name, TIMEOUT_MS)
    assert_same_bits(output, all_ranks.combine(rows, plans, counts)[me], "combine")
    grads = [torch.randn(c, case.hidden, generator=generator).to(case.dtype) for c in counts]
    (got_rows,) = torch.autograd.grad(output, z, grads[me].to(device))
    assert_same_bits(got_rows, all_ranks.combine_backward(grads, plans)[me], "grad_rows")


def check_cases(rank: Rank, cases: list[EpCase]) -> None:
    for case in cases:
        if rank.device.type == "cuda" and case.dtype == torch.float64:
            continue
        try:
            check_case(rank, case)
        except Exception as error:
            raise AssertionError(f"case {case.name}: {error}") from error


@pytest.mark.parametrize("part", range(6))
def test_bits_of_the_reference(pool: RankPool, part: int) -> None:
    pool.run(check_cases, CASES[part::6])


# Layouts by hand: (indices of each rank, experts, max_tokens, capacity, alignment) and, for each rank, slot,
# source, tokens_per_expert; then required and overflow. N means -1.
N = -1
TWO = [[[0, 1], [2, 0], [3, N]], [[1, 2], [0, 0]]]
FOUR = [[[3, 0]], [], [[0, 1], [0, 3]], [[N, 2], [2, 2]]]
TABLES = {
    "2-align-1": (
        (TWO, 4, 3, 8, 1),
        [
            ([[0, 4], [N, 1], [N, N], [5, N], [2, 3], [N, N]], [0, 1, 4, 4, 0, 3, N, N], [4, 2]),
            ([[N, N], [0, N], [2, N], [N, 1], [N, N], [N, N]], [1, 3, 2, N, N, N, N, N], [2, 1]),
        ],
        ([6, 3], 0),
    ),
    "2-align-4": (
        (TWO, 4, 3, 8, 4),
        [
            ([[0, 4], [N, 1], [N, N], [5, N], [2, 3], [N, N]], [0, 1, 4, 4, 0, 3, N, N], [4, 4]),
            ([[N, N], [0, N], [4, N], [N, 1], [N, N], [N, N]], [1, 3, N, N, 2, N, N, N], [4, 4]),
        ],
        ([8, 8], 0),
    ),
    "2-one-row-short": (
        (TWO, 4, 3, 5, 1),
        [
            ([[0, 4], [N, 1], [N, N], [N, N], [2, 3], [N, N]], [0, 1, 4, 4, 0], [4, 1]),
            ([[N, N], [0, N], [2, N], [N, 1], [N, N], [N, N]], [1, 3, 2, N, N], [2, 1]),
        ],
        ([6, 3], 1),
    ),
    "2-exact-fit": (
        (TWO, 4, 3, 6, 1),
        [
            ([[0, 4], [N, 1], [N, N], [5, N], [2, 3], [N, N]], [0, 1, 4, 4, 0, 3], [4, 2]),
            ([[N, N], [0, N], [2, N], [N, 1], [N, N], [N, N]], [1, 3, 2, N, N, N], [2, 1]),
        ],
        ([6, 3], 0),
    ),
    # Six rows would fit into seven, but with padding expert 1 would begin at row 4 and end at 8.
    "2-alignment-pushes-over": (
        (TWO, 4, 3, 7, 4),
        [
            ([[0, 4], [N, 1], [N, N], [5, N], [2, 3], [N, N]], [0, 1, 4, 4, 0, 3, N], [4, 3]),
            ([[N, N], [0, N], [4, N], [N, 1], [N, N], [N, N]], [1, 3, N, N, 2, N, N], [4, 3]),
        ],
        ([8, 8], 1),
    ),
    "4-align-1": (
        (FOUR, 4, 2, 3, 1),
        [
            ([[N, 0], [N, N], [N, N], [N, N], [1, N], [2, N], [N, N], [N, N]], [0, 4, 5], [3]),
            ([[N, N], [N, N], [N, N], [N, N], [N, 0], [N, N], [N, N], [N, N]], [4, N, N], [1]),
            ([[N, N], [N, N], [N, N], [N, N], [N, N], [N, N], [N, 0], [1, 2]], [6, 7, 7], [3]),
            ([[0, N], [N, N], [N, N], [N, N], [N, N], [N, 1], [N, N], [N, N]], [0, 5, N], [2]),
        ],
        ([3, 1, 3, 2], 0),
    ),
    "4-align-16": (
        (FOUR, 4, 2, 16, 16),
        [
            (
                [[N, 0], [N, N], [N, N], [N, N], [1, N], [2, N], [N, N], [N, N]],
                [0, 4, 5] + 13 * [N],
                [16],
            ),
            ([[N, N], [N, N], [N, N], [N, N], [N, 0], [N, N], [N, N], [N, N]], [4] + 15 * [N], [16]),
            (
                [[N, N], [N, N], [N, N], [N, N], [N, N], [N, N], [N, 0], [1, 2]],
                [6, 7, 7] + 13 * [N],
                [16],
            ),
            ([[0, N], [N, N], [N, N], [N, N], [N, N], [N, 1], [N, N], [N, N]], [0, 5] + 14 * [N], [16]),
        ],
        ([16, 16, 16, 16], 0),
    ),
}


def compare_with_table(plan: ep.Plan, row: tuple, last: tuple) -> None:
    slot, source, counts = row
    assert plan.slot.tolist() == slot
    assert plan.source.tolist() == source
    assert plan.tokens_per_expert.tolist() == counts
    assert plan.required.tolist() == last[0]
    assert plan.overflow.tolist() == [last[1]]


def as_indices(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_reference_agrees_with_the_tables(table: tuple) -> None:
    (indices, *sizes), rows, last = table
    for plan, row in zip(all_ranks.plan([as_indices(i) for i in indices], *sizes), rows, strict=True):
        compare_with_table(plan, row, last)


def check_table(rank: Rank, table: tuple) -> None:
    (indices, *sizes), rows, last = table
    mine = as_indices(indices[rank.rank]).to(rank.device)
    compare_with_table(ep.plan(mine, *sizes, rank.size, rank.group_name), rows[rank.rank], last)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.gpus(4))],
)
def test_tables(make_pool, table: tuple, backend: str) -> None:
    make_pool(len(table[1]), backend).run(check_table, table)


def test_reference_combine_is_near_the_exact_sum() -> None:
    case = EpCase("sum", topk=6, local_experts=3, capacity=256, dtype=torch.bfloat16)
    indices = [case.draw(r, 4)[0] for r in range(4)]
    plans = all_ranks.plan(indices, 12, case.max_tokens, case.capacity)
    rows = [torch.randn(256, 8).bfloat16() for _ in range(4)]
    got = all_ranks.combine(rows, plans, [len(i) for i in indices])
    for r, each in enumerate(got):
        for t in range(len(each)):
            slots = [(q, s) for q in range(4) for s in plans[q].slot[r * 7 + t].tolist() if s >= 0]
            terms = torch.stack([rows[q][s].double() for q, s in slots])
            # One rounding per rank and one at the end, each half an ulp (2^-9) of the sum.
            bound = (4 + 1) * 2.0**-9 * terms.abs().sum(0)
            assert (each[t].double() - terms.sum(0)).abs().le(bound).all()


def test_reference_of_one_rank_agrees_with_permute() -> None:
    case = EpCase("one", topk=3, local_experts=5, capacity=40, alignment=4)
    indices, tokens, _ = case.draw(0, 1)
    (plan,) = all_ranks.plan([indices], 5, len(tokens), 40, 4)
    rows, group_sizes, slot, source, total = reference.permute(tokens, indices, 5, 40, 4)
    assert_same_bits(plan.slot, slot)
    assert_same_bits(plan.source, source)
    assert_same_bits(plan.tokens_per_expert, group_sizes)
    assert_same_bits(plan.required, total)
    assert_same_bits(all_ranks.dispatch([tokens], None, [plan])[0][0], rows)


def random_case(number: int) -> EpCase:
    draw = random.Random(number)
    return EpCase(
        f"random-{number}",
        draw.choice([uniform, duplicated, masked, one_expert]),
        tokens=tuple(draw.randint(0, 12) for _ in range(4)),
        topk=draw.choice([1, 2, 3, 4, 6, 8, 9]),
        hidden=draw.choice([1, 3, 8, 17, 64, 130]),
        local_experts=draw.choice([1, 2, 3, 8, 33]),
        capacity=draw.choice([0, 1, 7, 40, 100, 500]),
        alignment=draw.choice([0, 1, 2, 4, 16, 128]),
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        index_dtype=draw.choice([torch.int32, torch.int64]),
        max_tokens=draw.randint(12, 20),
    )


@pytest.mark.long
def test_random_routings(pool: RankPool) -> None:
    for start in range(0, 600, 50):
        pool.run(check_cases, [random_case(number) for number in range(start, start + 50)], timeout=250)
