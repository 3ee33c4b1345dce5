"""The kernels of the one-sided exchange, run for several ranks of one process on one GPU: dispatch and combine in
the bits of loops of torch over a plan that is written here from its meaning, with many exchanges on one channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin.reference.expert_parallel import compact_plan
from transformer_plugin.testing.numerics import assert_same_bits

gpu = pytest.mark.gpu
tp = torch.ops.transformer_plugin_testing
DEVICE = torch.device("cuda")

RANKS, EXCHANGES = [2, 3, 8], 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = [1, 17, 64, 1000, 2880]
FEW_EXCHANGES = 7  # of 64 ranks, whose plans take seconds here: one of each kind of routing
FIRST_EPOCH = 2**32 - 7  # the state before the first exchange, so that the epoch passes 32 bits among them
STATE_WORDS, MAX_TOKENS, MOST_TOPK = 16, 40, 40


@dataclass
class RankPlan:
    """What one rank knows: slot [N, K], peer_rows [4, R + 1], records [3, max_tokens, M]."""

    slot: Tensor
    peer_rows: Tensor
    records: Tensor
    received: list[tuple[int, int]]  # (rank, token) of each received row
    sent: list[tuple[int, int]]  # (rank, token) of each record


def slots_of(indices: list[Tensor], rank: int, local: int, capacity: int) -> dict[tuple[int, int], list[int]]:
    """The slots of each (rank, token) that has any on ``rank``, in ascending order of (expert, rank, token, k)."""
    chosen: dict[int, list[tuple[int, int, int]]] = {}
    for r, of_rank in enumerate(indices):
        for t, row in enumerate(of_rank.tolist()):
            for k, expert in enumerate(row):
                chosen.setdefault(expert, []).append((r, t, k))
    mine = [entry for e in range(rank * local, (rank + 1) * local) for entry in chosen.get(e, [])]
    slots: dict[tuple[int, int], list[int]] = {}
    for row, (r, t, k) in enumerate(mine[:capacity]):
        slots.setdefault((r, t), [-1] * indices[0].shape[1])[k] = row
    return slots


def starts(ranks: list[int], count: int) -> list[int]:
    """Where the entries of each rank begin in an ascending list of ranks, and its end."""
    return [sum(r < rank for r in ranks) for rank in range(count + 1)]


def plans_of(indices: list[Tensor], experts: int, capacity: int, spare_rows: int) -> list[RankPlan]:
    """The plan of every rank, with ``spare_rows`` rows past the last received one."""
    count, topk = len(indices), indices[0].shape[1]
    destinations = min(topk, count)
    slots = [slots_of(indices, rank, experts // count, capacity) for rank in range(count)]
    received = [sorted(of_rank) for of_rank in slots]
    sent = [sorted((to, t) for to in range(count) for r, t in received[to] if r == me) for me in range(count)]
    plans = []
    for me in range(count):
        rows = [slots[me][key] for key in received[me]] + [[-1] * topk] * spare_rows
        # Of the rows that rank r gets from others, and its records to others, the first of this rank.
        put, returned = [0] * count, [0] * count
        for r in set(range(count)) - {me}:
            put[r] = sum(key < (me, 0) and key[0] != r for key in received[r])
            returned[r] = sum(record < (me, 0) and record[0] != r for record in sent[r])
        begins = starts([r for r, _ in received[me]], count), starts([r for r, _ in sent[me]], count)
        records = torch.full((3, MAX_TOKENS, destinations), -1, dtype=torch.int32)
        for t in range(len(indices[me])):
            of_token = [n for n, record in enumerate(sent[me]) if record[1] == t]
            records[0, t, : len(of_token)] = torch.tensor(of_token, dtype=torch.int32)
        records[1].view(-1)[: len(sent[me])] = torch.tensor([t for _, t in sent[me]], dtype=torch.int32)
        for n, (to, t) in enumerate(sent[me]):
            records[2].view(-1)[n] = next(s for s in slots[to][me, t] if s >= 0)
        plans.append(
            RankPlan(
                torch.tensor(rows, dtype=torch.int32).reshape(-1, topk),
                torch.tensor([*begins, [*put, 0], [*returned, 0]], dtype=torch.int32),
                records,
                received[me],
                sent[me],
            )
        )
    return plans


@dataclass
class Routing:
    indices: list[Tensor]
    experts: int
    capacity: int
    spare_rows: int


def draw_routing(ranks: int, number: int, generator: torch.Generator) -> Routing:
    """Routings of several kinds in turn: one expert for each token, more of them than a rank has, all tokens to one
    expert, few rows for the experts, no tokens at all, many experts on each rank."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    kind = number % 7
    local = {1: 1, 6: MOST_TOPK}.get(kind, 2)
    experts = ranks * local
    topk = {0: 1, 6: MOST_TOPK}.get(kind, min(experts, draw(3, 6)))
    most = MAX_TOKENS if ranks <= 8 else 12
    counts = [0 if kind == 5 or draw(0, 4) == 0 else draw(1, most) for _ in range(ranks)]
    indices = []
    for tokens in counts:
        chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
        missing = torch.rand(tokens, topk, generator=generator) < 0.2
        chosen[missing] = -1
        if kind == 3:
            chosen = torch.full((tokens, topk), -1)
            chosen[:, topk // 2] = experts - 1
        indices.append(chosen.to(torch.int32))
    total = sum(int((each >= 0).sum()) for each in indices)
    capacity = max(1, total // (2 * ranks)) if kind in (2, 4) else total + 3
    return Routing(indices, experts, capacity, draw(0, 20))


def sum_slots(rows: Tensor, slot: Tensor) -> Tensor:
    """The sum of the rows of each row's slots, in ascending order, from zero, rounded once."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    last = torch.iinfo(torch.int32).max
    in_order = torch.where(slot < 0, last, slot).sort(1).values
    total = torch.zeros(slot.shape[0], rows.shape[1], dtype=wide)
    for column in in_order.unbind(1):
        is_slot = column != last
        total[is_slot] = total[is_slot] + rows[column[is_slot].long()].to(wide)
    return total.to(rows.dtype)


def combined(rows: list[Tensor], plans: list[RankPlan], counts: list[int]) -> list[Tensor]:
    """For each token the sum of its rows in ascending order of ranks, from +0, rounded once."""
    dtype = rows[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums = [torch.zeros(count, rows[0].shape[1], dtype=wide) for count in counts]
    for of_rank, plan in zip(rows, plans, strict=True):
        for j, (r, t) in enumerate(plan.received):
            sums[r][t] = sums[r][t] + of_rank[j].to(wide)
    return [each.to(dtype) for each in sums]


class Channel:
    """The symmetric memory and the states of all ranks, whose data is ``fill``, or NaN, before each exchange."""

    def __init__(self, ranks: int, rows: int, record_bytes: int, epoch: int = 0) -> None:
        self.sizes, self.fill = (rows, rows, record_bytes), torch.tensor(0xFF, dtype=torch.uint8)
        layout = tp.virtual_channel_layout(ranks, *self.sizes)
        self.bytes, *self.data, self.flags, _, _, self.credits = layout
        self.memory = torch.zeros(ranks * self.bytes, dtype=torch.uint8, device=DEVICE)
        self.state = torch.zeros(ranks, STATE_WORDS, dtype=torch.int32, device=DEVICE)
        self.set_epoch(epoch)
        words = self.memory.view(ranks, self.bytes)[:, self.flags :].view(torch.int64)
        words.fill_(epoch)  # flags and credits, as after so many exchanges

    @property
    def epochs(self) -> Tensor:
        return self.state.view(torch.int64)[:, 0]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.fill_(epoch)

    def exchange(
        self,
        direction: str,
        plans: list[RankPlan],
        rows: list[Tensor],
        weights: list[Tensor],
        heights: list[int],
        slot: bool = False,
        shift: int = 0,
        **options: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs an exchange whose outputs have ``heights`` rows, and checks that it writes nothing beside them. With
        ``shift`` all rows begin at addresses that are no multiples of 16 bytes."""
        self.memory.view(-1, self.bytes)[:, : self.flags] = self.fill
        outputs = [
            [Canary(n, each[0].shape[1], each[0].dtype, shift) for n in heights] if each else []
            for each in (rows, weights)
        ]
        tp.virtual_exchange(
            self.memory,
            self.state,
            direction,
            [shifted(each, shift) for each in rows],
            [shifted(each, shift) for each in weights],
            [plan.slot.to(DEVICE) for plan in plans] if slot else [],
            [],
            [plan.peer_rows.to(DEVICE) for plan in plans],
            [plan.records.to(DEVICE) for plan in plans],
            [each.rows for each in outputs[0]],
            [each.rows for each in outputs[1]],
            *self.sizes,
            **options,
        )
        return [each.checked() for each in outputs[0]], [each.checked() for each in outputs[1]]


def shifted(rows: Tensor, shift: int) -> Tensor:
    """A copy on the device that begins ``shift`` elements after an aligned address."""
    memory = torch.empty(rows.numel() + shift, dtype=rows.dtype, device=DEVICE)
    copy = memory[shift:].view(rows.shape)
    copy.copy_(rows)
    return copy


class Canary:
    """Rows in the middle of memory that must stay as it is."""

    VALUE = 7.0

    def __init__(self, rows: int, width: int, dtype: torch.dtype, shift: int) -> None:
        self.begin, self.end = 64 + shift, 64 + shift + rows * width
        self.memory = torch.full((self.end + 64,), self.VALUE, dtype=dtype, device=DEVICE)
        self.rows = self.memory[self.begin : self.end].view(rows, width)
        self.rows.fill_(float("nan"))

    def checked(self) -> Tensor:
        assert (self.memory[: self.begin] == self.VALUE).all()
        assert (self.memory[self.end :] == self.VALUE).all()
        return self.rows.cpu()


def draw_rows(heights: list[int], width: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Values of several magnitudes, of which some are negative zeros."""
    drawn = []
    for rows in heights:
        values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        values = values * torch.tensor([1e-2, 1.0, 30.0])[torch.randint(3, (rows, 1), generator=generator)]
        values[torch.rand(rows, width, generator=generator) < 0.1] = -0.0
        drawn.append(values.to(dtype))
    return drawn


def check_dispatch(
    channel: Channel,
    routing: Routing,
    plans: list[RankPlan],
    width: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    **options: int,
) -> None:
    counts = [len(each) for each in routing.indices]
    topk = routing.indices[0].shape[1]
    tokens = draw_rows(counts, width, dtype, generator)
    weights = draw_rows(counts, topk, wide_type(dtype), generator)
    heights = [len(plan.slot) for plan in plans]
    got = channel.exchange("dispatch", plans, tokens, weights, heights, **options)
    for inputs, outputs, name in ((tokens, got[0], "rows"), (weights, got[1], "weights")):
        for rank, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
            expected = torch.zeros_like(output)
            for j, (r, t) in enumerate(plan.received):
                expected[j] = inputs[r][t]
            assert_same_bits(output, expected, f"{name} of rank {rank}")


def check_combine(
    channel: Channel,
    routing: Routing,
    plans: list[RankPlan],
    width: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    slot: bool,
    **options: int,
) -> None:
    counts = [len(each) for each in routing.indices]
    heights = [len(plan.slot) for plan in plans]
    rows = draw_rows([routing.capacity] * len(plans) if slot else heights, width, dtype, generator)
    weights = draw_rows(heights, 3, wide_type(dtype), generator)
    got = channel.exchange("combine", plans, rows, weights, counts, slot, **options)
    received = [sum_slots(each, plan.slot) for each, plan in zip(rows, plans, strict=True)] if slot else rows
    for output, expected in zip(got[0], combined(received, plans, counts), strict=True):
        assert_same_bits(output, expected, "rows")
    for output, expected in zip(got[1], combined(weights, plans, counts), strict=True):
        assert_same_bits(output, expected, "weights")


def wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def channel_for(ranks: int, dtype: torch.dtype, width: int = WIDTHS[-1], epoch: int = 0) -> Channel:
    rows = ranks * (MAX_TOKENS if ranks <= 8 else 12) + 20
    record_bytes = (width * dtype.itemsize + 15) // 16 * 16 + MOST_TOPK * 8
    return Channel(ranks, rows, record_bytes, epoch)


@gpu
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(64, torch.bfloat16), *((r, d) for r in RANKS for d in DTYPES)], ids=str
)
def test_many_exchanges_on_one_channel(ranks: int, dtype: torch.dtype) -> None:
    """Routings, widths, directions and numbers of blocks change from one exchange to the next; epochs pass 32 bits."""
    generator = torch.Generator().manual_seed(ranks)
    channel = channel_for(ranks, dtype, epoch=FIRST_EPOCH)
    count = EXCHANGES if ranks < 64 else FEW_EXCHANGES
    for number in range(count):
        routing = draw_routing(ranks, number, generator)
        plans = plans_of(routing.indices, routing.experts, routing.capacity, routing.spare_rows)
        width = WIDTHS[number % len(WIDTHS)]
        options = {"max_sms": number % 4, "shift": number // 3 % 2, "chunk_rows": (0, 16, 4, 8)[number % 4]}
        arguments = (channel, routing, plans, width, dtype, generator)
        if number % 3 == 0:
            check_dispatch(*arguments, **options)
        else:
            check_combine(*arguments, slot=number % 3 == 1, **options)
    assert channel.epochs.tolist() == [FIRST_EPOCH + count] * ranks
    assert channel.state[:, 2:].count_nonzero() == 0


@gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", range(7))
def test_routings(kind: int, width: int) -> None:
    """Every kind of routing with every width, in all directions."""
    generator = torch.Generator().manual_seed(kind)
    channel = channel_for(3, torch.bfloat16)
    routing = draw_routing(3, kind, generator)
    plans = plans_of(routing.indices, routing.experts, routing.capacity, routing.spare_rows)
    arguments = (channel, routing, plans, width, torch.bfloat16, generator)
    check_dispatch(*arguments)
    check_combine(*arguments, slot=False)
    check_combine(*arguments, slot=True)


@gpu
def test_one_rank_keeps_its_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    channel = channel_for(1, torch.float32)
    routing = draw_routing(1, 2, generator)
    plans = plans_of(routing.indices, routing.experts, routing.capacity, routing.spare_rows)
    arguments = (channel, routing, plans, 64, torch.float32, generator)
    check_dispatch(*arguments)
    check_combine(*arguments, slot=False)
    check_combine(*arguments, slot=True)


@gpu
@pytest.mark.parametrize(("direction", "wait"), [("dispatch", 1), ("combine", 3)])
def test_missing_rank_ends_the_exchange(direction: str, wait: int) -> None:
    """A rank whose peers have not consumed what came before gives up, and later exchanges do nothing."""
    generator = torch.Generator().manual_seed(2)
    channel = channel_for(2, torch.float32)
    routing = draw_routing(2, 1, generator)
    routing.indices = [torch.tensor([[0, 1]] * 5, dtype=torch.int32)] * 2
    plans = plans_of(routing.indices, 2, 10, 0)
    rows = draw_rows([5, 5] if direction == "dispatch" else [10, 10], 64, torch.float32, generator)
    heights = [10, 10] if direction == "dispatch" else [5, 5]
    channel.set_epoch(10)  # nobody has consumed exchange 9
    channel.exchange(direction, plans, rows, [], heights, timeout_ms=50)
    assert channel.epochs.tolist() == [10, 10]
    assert channel.state[:, 5:7].tolist() == [[wait, 1], [wait, 0]]
    output, _ = channel.exchange(direction, plans, rows, [], heights)
    assert all(each.isnan().all() for each in output)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_plan_of_these_tests(ranks: int, number: int) -> None:
    """Slots are those of compact_plan, and the two numbers of each record lead to each other."""
    routing = draw_routing(ranks, number, torch.Generator().manual_seed(ranks))
    indices, capacity = routing.indices, routing.capacity
    plans = plans_of(indices, routing.experts, capacity, routing.spare_rows)
    compact = compact_plan(indices, routing.experts, MAX_TOKENS, capacity)
    for me, (plan, expected) in enumerate(zip(plans, compact, strict=True)):
        known = [divmod(n, MAX_TOKENS) for n in expected.received.tolist() if n >= 0]
        assert plan.received == known
        assert torch.equal(plan.slot[: len(known)], expected.slot[: len(known)])
        assert (plan.slot[len(known) :] == -1).all()
        received, sent, put, returned = plan.peer_rows.tolist()
        assert received[ranks] == len(known) and put[ranks] == returned[ranks] == 0
        for r, other in enumerate(plans):
            # A rank's own rows do not travel, and have no place.
            from_others = [row for row in other.received if row[0] != r]
            to_others = [record for record in other.sent if record[0] != r]
            for n in range(sent[r], sent[r + 1]):
                token = int(plan.records[1].view(-1)[n])
                assert n in plan.records[0, token].tolist()
                if r != me:
                    assert from_others[put[r] + n - sent[r]] == (me, token)
            for j in range(received[r], received[r + 1]):
                token = plan.received[j][1]
                assert plan.received[j][0] == r
                if r != me:
                    assert to_others[returned[r] + j - received[r]] == (me, token)
        assert (plan.records[1].view(-1)[sent[ranks] :] == -1).all()
        for row in plan.records[0].tolist():
            used = [n for n in row if n >= 0]
            assert row == sorted(used) + [-1] * (len(row) - len(used))
        assert (plan.records[0] >= 0).sum() == sent[ranks]
