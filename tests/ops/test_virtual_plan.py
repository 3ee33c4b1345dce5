"""The kernels of a plan by puts, run for several ranks of one process on one GPU: the bits of plans that are computed
here with tensor operations, which a test on the CPU compares with the reference. Many plans follow on one channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from transformer_plugin.ops.expert_parallel import CompactPlan
from transformer_plugin.reference.expert_parallel import by_records, compact_plan
from transformer_plugin.testing.numerics import assert_same_bits

gpu = pytest.mark.gpu
tp = torch.ops.transformer_plugin_testing
DEVICE = torch.device("cuda")

PLANS = 20
#: The number of finished plans before the first, so that the epoch wraps.
FIRST_EPOCH = 2**32 - 7
STATE_WORDS = 16
GUARD = 256  # bytes before and after the channel


@dataclass(frozen=True)
class Case:
    """Sizes of a plan. ``kind`` says how experts are chosen, ``shares`` how many of the rows and tokens that the
    fullest rank needs there is room for; None: for all that could come."""

    ranks: int
    topk: int
    tokens: int  # the most of a rank
    local: int = 4
    kind: str = "apart"
    alignment: int = 1
    shares: tuple[float | None, float | None] = (None, None)
    dtype: torch.dtype = torch.int32

    def name(self) -> str:
        sizes = f"ranks{self.ranks}-k{self.topk}-tokens{self.tokens}-local{self.local}-{self.kind}"
        return f"{sizes}-align{self.alignment}-{self.shares[0]}-{self.shares[1]}-{str(self.dtype)[6:]}"


@dataclass
class Problem:
    indices: list[Tensor]
    experts: int
    max_tokens: int
    capacity: int
    alignment: int
    bound: int | None

    @property
    def topk(self) -> int:
        return self.indices[0].shape[1]

    @property
    def received_rows(self) -> int:
        tokens = len(self.indices) * self.max_tokens
        return min(tokens, self.capacity, tokens if self.bound is None else self.bound)


def draw_indices(case: Case, generator: torch.Generator, most: int) -> list[Tensor]:
    """Of each rank, which has up to ``most`` tokens: the last one all of them, the second one none."""
    experts = case.ranks * case.local
    drawn = []
    for rank in range(case.ranks):
        tokens = int(torch.randint(most + 1, (1,), generator=generator))
        tokens = {case.ranks - 1: most, 1: 0 if case.ranks > 2 else tokens}.get(rank, tokens)
        if case.kind == "one expert":
            chosen = torch.full((tokens, case.topk), experts - 1)
        elif case.kind == "any" or case.topk > experts:  # also several times in one token
            chosen = torch.randint(experts, (tokens, case.topk), generator=generator)
        else:
            chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, : case.topk]
        if case.kind != "apart":
            chosen[torch.rand(tokens, case.topk, generator=generator) < 0.3] = -1
        drawn.append(chosen.to(case.dtype))
    return drawn


def draw_problem(case: Case, seed: int = 0) -> Problem:
    indices = draw_indices(case, torch.Generator().manual_seed(seed), case.tokens)
    align = max(1, case.alignment)
    all_tokens = case.ranks * case.tokens
    worst = all_tokens * case.topk + case.local * (align - 1)
    problem = Problem(indices, case.ranks * case.local, case.tokens, worst, case.alignment, None)
    needs = expected_plans(problem)[0]
    of_rows, of_tokens = case.shares
    if of_rows is not None:
        problem.capacity = int(int(needs.required.max()) * of_rows)
    if of_tokens is not None:
        problem.bound = int(int(needs.required_tokens.max()) * of_tokens)
    return problem


def expected_plans(problem: Problem) -> list[CompactPlan]:
    """The plans by records of all ranks."""
    ranks, tokens, topk = len(problem.indices), problem.max_tokens, problem.topk
    local, align = problem.experts // ranks, max(1, problem.alignment)
    indices = torch.full((ranks, tokens, topk), -1)
    for r, each in enumerate(problem.indices):
        indices[r, : len(each)] = each.long()
    indices = indices.view(-1, topk)
    rank_of = torch.where(indices >= 0, indices // local, ranks)  # `ranks`: none
    goes = torch.zeros(ranks * tokens, ranks + 1, dtype=torch.bool).scatter_(1, rank_of, True)[:, :ranks]

    def padded(chosen: Tensor) -> Tensor:
        counts = torch.bincount(chosen[chosen >= 0], minlength=problem.experts)
        return ((counts + align - 1) // align * align).view(ranks, local)

    required, required_tokens = padded(indices).sum(1), goes.sum(0)
    bound = ranks * tokens if problem.bound is None else problem.bound
    overflow = (required > problem.capacity).any() | (required_tokens > bound).any()
    is_in = torch.cat([goes & (goes.cumsum(0) <= bound), torch.zeros(ranks * tokens, 1, dtype=torch.bool)], 1)
    kept = torch.where(is_in.gather(1, rank_of), indices, -1)
    ends = padded(kept).cumsum(1)
    starts = ends - padded(kept)
    slots = slots_of(kept, starts.flatten(), problem.capacity)
    rank_of = torch.where(slots >= 0, rank_of, ranks)
    has_row = torch.zeros(ranks * tokens, ranks + 1, dtype=torch.bool).scatter_(1, rank_of, True)[:, :ranks]
    shared = (required, overflow.view(1).int())
    rooms = ends.clamp(max=problem.capacity) - starts.clamp(max=problem.capacity)
    plans = []
    for me in range(ranks):
        rows = has_row[:, me].nonzero()[:, 0]
        slot = torch.full((problem.received_rows, topk), -1)
        slot[: len(rows)] = torch.where(rank_of[rows] == me, slots[rows], -1)
        source = torch.full((problem.capacity,), -1, dtype=torch.int32)
        of_row = torch.arange(len(slot)).view(-1, 1).expand(-1, topk)
        source[slot[slot >= 0]] = of_row[slot >= 0].int()
        peer_rows = peer_rows_of(has_row.view(ranks, tokens, ranks).sum(1), me)
        mine = slice(me * tokens, (me + 1) * tokens)
        records = records_of(has_row[mine], slots[mine], rank_of[mine], min(topk, ranks))
        plans.append(CompactPlan(slot.int(), source, rooms[me], *shared, peer_rows, records, required_tokens))
    return plans


def slots_of(chosen: Tensor, starts: Tensor, capacity: int) -> Tensor:
    """The slot of each (token, k) that has an expert and is in the capacity, else -1."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ordered = flat[order]
    within = torch.arange(len(flat)) - torch.searchsorted(ordered, ordered)
    slots = torch.full_like(flat, -1)
    slots[order] = torch.where(ordered >= 0, starts[ordered.clamp(min=0)] + within, -1)
    return torch.where(slots < capacity, slots, -1).view(chosen.shape)


def peer_rows_of(counts: Tensor, me: int) -> Tensor:
    """``counts`` [R, R]: the rows from each rank to each rank."""
    ranks = len(counts)
    rows = torch.zeros(4, ranks + 1, dtype=torch.int64)
    rows[0, 1:], rows[1, 1:] = counts[:, me].cumsum(0), counts[me].cumsum(0)
    travelling = counts - torch.diag(counts.diagonal())  # a rank's own rows do not
    rows[2, :ranks], rows[3, :ranks] = travelling[:me].sum(0), travelling[:, :me].sum(1)
    rows[2:, me] = 0
    return rows.int()


def records_of(has_row: Tensor, slots: Tensor, rank_of: Tensor, most: int) -> Tensor:
    """``has_row`` [tokens, R]: whether each token has a row at each rank. ``slots``, ``rank_of`` [tokens, K]."""
    tokens, ranks = has_row.shape
    by_rank = has_row.T.flatten()
    numbers = (by_rank.cumsum(0) - 1).view(ranks, tokens).T
    last = tokens * ranks
    of_tokens = torch.where(has_row, numbers, last).sort(1).values[:, :most]
    records = torch.full((3, tokens, most), -1)
    records[0] = torch.where(of_tokens < last, of_tokens, -1)
    if tokens:
        place = by_rank.nonzero()[:, 0]
        used = place % tokens
        records[1].view(-1)[: len(used)] = used
        first = (rank_of[used] == (place // tokens)[:, None]).int().argmax(1)
        records[2].view(-1)[: len(used)] = slots[used].gather(1, first[:, None])[:, 0]
    return records.int()


class PlanChannel:
    """The symmetric memory and the states of all ranks after ``epoch`` plans: flags say so, all else is garbage."""

    def __init__(self, ranks: int, problem: Problem, epoch: int = 0) -> None:
        layout = tp.virtual_plan_layout(ranks, problem.experts, problem.received_rows, problem.topk)
        self.bytes, *self.flags = layout
        self.ranks = ranks
        self.guarded = torch.empty(ranks * self.bytes + 2 * GUARD, dtype=torch.uint8, device=DEVICE)
        self.guarded.copy_(torch.randint(256, self.guarded.shape, dtype=torch.uint8))
        self.guards = self.guards_now().clone()
        self.memory = self.guarded[GUARD : GUARD + ranks * self.bytes]
        words = self.memory.view(ranks, self.bytes).view(torch.int32)
        self.state = torch.zeros(ranks, STATE_WORDS, dtype=torch.int32, device=DEVICE)
        self.state[:, 0] = signed(epoch)
        for flags in self.flags:
            words[:, flags // 4 : flags // 4 + ranks] = signed(epoch)

    def guards_now(self) -> Tensor:
        return torch.stack([self.guarded[:GUARD], self.guarded[-GUARD:]])

    def plan(self, problem: Problem, timeout_ms: int = 10000) -> list[CompactPlan]:
        flat = tp.virtual_plan(
            [each.to(DEVICE) for each in problem.indices],
            self.memory,
            self.state,
            problem.experts,
            problem.max_tokens,
            problem.capacity,
            problem.alignment,
            problem.bound,
            timeout_ms,
        )
        assert torch.equal(self.guards_now(), self.guards)
        return [CompactPlan(*flat[r * 8 : (r + 1) * 8]) for r in range(self.ranks)]


def signed(epoch: int) -> int:
    return epoch - 2**32 if epoch >= 2**31 else epoch


def assert_same_plans(plans: list[CompactPlan], expected: list[CompactPlan]) -> None:
    for rank, (got, wanted) in enumerate(zip(plans, expected, strict=True)):
        for name, mine, other in zip(CompactPlan._fields, got, wanted, strict=True):
            assert_same_bits(mine.cpu(), other, f"{name} of rank {rank}")


NONE = (None, None)
#: Shares of room for rows and for tokens.
ROOMS = [
    *((1.0, None), (0.7, None), (0.05, None), (0.0, None)),
    *((None, 1.0), (None, 0.6), (None, 0.1), (None, 0.0)),
    *((0.9, 0.9), (0.4, 0.8), (0.8, 0.4), (0.1, 0.1)),
]
SMALL = [
    *(Case(ranks, topk, 9, kind="any") for ranks in (1, 2, 3, 8) for topk in (1, 8, 40)),
    *(Case(3, 4, 9, alignment=alignment) for alignment in (0, 16, 128)),
    *(Case(3, 8, 9, kind="one expert", alignment=16, shares=shares) for shares in (NONE, (0.5, 0.7))),
    *(Case(2, 4, 9, kind="any", alignment=4, shares=shares) for shares in ROOMS),
    *(Case(8, 8, 6, 2, "any", shares=shares) for shares in ((0.7, None), (None, 0.6), (0.6, 0.7))),
    Case(64, 8, 3, 1, dtype=torch.int64),
    Case(2, 1, 0),
]
LARGE = [
    *(Case(ranks, 8, 700, 16, alignment=16) for ranks in (1, 2, 3, 8)),
    *(Case(ranks, 8, 700, 16, "any", 16, (0.7, 0.7)) for ranks in (1, 2, 3, 8)),
    *(Case(2, 8, 900, 128, "any", 128, shares) for shares in ROOMS),
    *(Case(3, topk, 1300, 40, "any", shares=(0.8, None)) for topk in (1, 2, 3)),
    *(Case(3, 40, 90, 50, "any", shares=shares) for shares in (NONE, (0.8, 0.8))),
    *(Case(3, 8, 600, 4, "one expert", 128, shares) for shares in (NONE, (0.5, None), (None, 0.5))),
    *(Case(2, 600, 40, local, "any", shares=(0.9, 0.9)) for local in (300, 600, 1024)),
    Case(2, 1024, 3, 2, "any", shares=(0.9, None)),
    *(Case(64, 8, 40, 4, "any", 16, shares) for shares in (NONE, (0.8, None), (None, 0.8), (0.7, 0.8))),
    Case(72, 8, 10, 2, "any", shares=(0.8, 0.8)),
    Case(64, 8, 20, 64, "any"),
    Case(4, 8, 3000, 64, dtype=torch.int64),
]


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", SMALL + LARGE, ids=Case.name)
def test_plan_of_virtual_ranks(case: Case, dtype: torch.dtype) -> None:
    problem = draw_problem(replace(case, dtype=dtype))
    channel = PlanChannel(case.ranks, problem)
    assert_same_plans(channel.plan(problem), expected_plans(problem))
    assert channel.state[:, 0].tolist() == [1] * case.ranks
    assert channel.state[:, 1:].count_nonzero() == 0


@gpu
@pytest.mark.parametrize("shares", [NONE, (0.6, None), (None, 0.6), (0.6, 0.7)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_many_plans_on_one_channel(ranks: int, shares: tuple[float | None, float | None]) -> None:
    """Routings and numbers of tokens change from one plan to the next; some of them fit. The epoch wraps."""
    case = Case(ranks, 8, 300 if ranks <= 8 else 30, 8, "any", 4, shares)
    first = draw_problem(case)
    channel = PlanChannel(ranks, first, FIRST_EPOCH)
    generator = torch.Generator().manual_seed(ranks)
    for number in range(PLANS):
        kind = ("any", "one expert", "apart")[number % 3]
        most = case.tokens * (number % 5) // 4
        problem = replace(first, indices=draw_indices(replace(case, kind=kind), generator, most))
        assert_same_plans(channel.plan(problem), expected_plans(problem))
    assert channel.state[:, 0].tolist() == [PLANS - 7] * ranks
    assert channel.state[:, 1:].count_nonzero() == 0


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_wrong_indices_are_none(dtype: torch.dtype) -> None:
    """They have no expert in the plan. The next call raises, with the number of those of all ranks and a place."""
    problem = draw_problem(Case(2, 8, 300, kind="any", dtype=dtype))
    wrong = [
        problem.experts,
        -2,
        torch.iinfo(torch.int32).max,
        torch.iinfo(dtype).min,
        torch.iinfo(dtype).max,
    ]
    for i, index in enumerate(wrong):
        problem.indices[1][3 * i :: 50, i] = index
    experts = problem.experts
    problem.indices[0][7, 3] = experts
    is_wrong = [(i < -1) | (i >= experts) for i in problem.indices]
    assert is_wrong[0].any()
    channel = PlanChannel(2, problem)
    plans = channel.plan(problem)
    indices = [torch.where((i >= 0) & (i < problem.experts), i, -1) for i in problem.indices]
    assert_same_plans(plans, expected_plans(replace(problem, indices=indices)))
    count, place = sum(int(each.sum()) for each in is_wrong), 7 * problem.topk + 3
    with pytest.raises(ValueError, match=f"got {count} that are neither, one of them element {place} of"):
        channel.plan(problem)
    problem.indices[0][7, 3] = -1
    channel.plan(problem)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=f"got {count - 1} that are neither") as raised:
        channel.plan(problem)
    place = int(str(raised.value).partition("element ")[2].split()[0]) - problem.max_tokens * problem.topk
    assert is_wrong[1].flatten()[place]
    assert channel.state[:, 0].tolist() == [2, 2]


@gpu
def test_missing_rank_ends_the_plan() -> None:
    """Ranks that are at different plans give up, and later plans do nothing."""
    problem = draw_problem(Case(2, 4, 9))
    channel = PlanChannel(2, problem)
    channel.state[0, 0] = 5
    channel.plan(problem, timeout_ms=50)
    assert channel.state[:, 0].tolist() == [6, 1]
    assert channel.state[:, 2:4].tolist() == [[1, 1], [1, 0]]
    before = channel.memory.clone()
    channel.plan(problem)
    assert channel.state[:, 0].tolist() == [6, 1]
    assert torch.equal(channel.memory, before)


@gpu
def test_one_rank_after_a_failure() -> None:
    """The plan of few tokens, in one kernel, does nothing after an earlier one has failed."""
    problem = draw_problem(Case(1, 4, 9))
    channel = PlanChannel(1, problem)
    channel.state[0, 2] = 1
    before = channel.memory.clone(), channel.state.clone()
    channel.plan(problem)
    assert torch.equal(channel.memory, before[0]) and torch.equal(channel.state, before[1])


@gpu
def test_plan_is_captured() -> None:
    """A CUDA graph of a plan makes one of the indices that are there when it runs."""
    case = Case(2, 8, 300, 16, "any", 16, (0.7, 0.7))
    problem = draw_problem(case)
    channel = PlanChannel(2, problem)
    channel.plan(problem)
    problem.indices = [torch.randint(-1, 32, (300, 8), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat = tp.virtual_plan(
            problem.indices, channel.memory, channel.state, problem.experts, problem.max_tokens,
            problem.capacity, problem.alignment, problem.bound,
        )  # fmt: skip
    for _ in range(3):
        for each in problem.indices:
            each.copy_(torch.randint(-1, 32, each.shape))
        graph.replay()
        plans = [CompactPlan(*flat[r * 8 : (r + 1) * 8]) for r in range(2)]
        on_cpu = replace(problem, indices=[each.cpu() for each in problem.indices])
        assert_same_plans(plans, expected_plans(on_cpu))


@pytest.mark.parametrize("case", SMALL, ids=Case.name)
def test_expected_plans_are_those_of_the_reference(case: Case) -> None:
    problem = draw_problem(case)
    plans = compact_plan(
        problem.indices,
        problem.experts,
        problem.max_tokens,
        problem.capacity,
        problem.alignment,
        problem.bound,
    )
    assert_same_plans(by_records(plans, problem.topk), expected_plans(problem))


def test_cpu_has_no_plan_by_puts() -> None:
    channel, state = torch.zeros(0, dtype=torch.uint8), torch.zeros(1, STATE_WORDS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"The one-sided exchange is for GPUs\.$"):
        tp.virtual_plan([torch.zeros(1, 1, dtype=torch.int32)], channel, state, 1, 1, 1, 1, None)


def test_cpu_has_no_one_sided_exchange() -> None:
    channel, state = torch.zeros(0, dtype=torch.uint8), torch.zeros(1, STATE_WORDS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"The one-sided exchange is for GPUs\.$"):
        tp.virtual_exchange(channel, state, "dispatch", *[[]] * 8, 0, 0, 0)
