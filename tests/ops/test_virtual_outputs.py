"""Dispatches whose rows go to the slots of experts, in symmetric memory of the ranks or elsewhere, and ranks that make
different calls: the kernels of the one-sided exchange, run for several ranks of one process on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_virtual_ranks import (
    DEVICE,
    Channel,
    RankPlan,
    Routing,
    channel_for,
    draw_routing,
    draw_rows,
    plans_of,
    tp,
    wide_type,
)
from transformer_plugin.testing.numerics import assert_same_bits

gpu = pytest.mark.gpu

MOST_ALLOCATIONS = 64
REPORT_WORDS = 8
CANARY = 7.0


class Outputs:
    """Output rows of every rank within memory that must stay as it is, and the table of addresses."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, where: list[int]) -> None:
        self.where = (
            where  # of each rank: 1 others find its output, 0 they do not, -1 nor does it put into any
        )
        self.memory, self.rows = [], []
        self.begin = [64 * (r + 1) for r in range(len(where))]
        for begin in self.begin:
            memory = torch.full((begin + capacity * width + 64,), CANARY, dtype=dtype, device=DEVICE)
            rows = memory[begin : begin + capacity * width].view(capacity, width)
            rows.fill_(float("nan"))
            self.memory.append(memory)
            self.rows.append(rows)
        table = torch.zeros(MOST_ALLOCATIONS, len(where), dtype=torch.int64)
        for r, memory in enumerate(self.memory):
            table[self.number(r) - 1, r] = memory.data_ptr()
        self.table = table.to(DEVICE)

    @staticmethod
    def number(rank: int) -> int:
        return 1 + rank % 3 * 31  # 1, 32 or 63

    def options(self) -> dict[str, Any]:
        numbers = [self.number(r) if w > 0 else w for r, w in enumerate(self.where)]
        itemsize = self.memory[0].element_size()
        return {
            "allocations": self.table,
            "allocation": numbers,
            "offset": [itemsize * b for b in self.begin],
        }

    def checked(self) -> list[Tensor]:
        for memory, begin, rows in zip(self.memory, self.begin, self.rows, strict=True):
            assert (memory[:begin] == CANARY).all() and (memory[begin + rows.numel() :] == CANARY).all()
        return [rows.cpu() for rows in self.rows]


def source_of(plan: RankPlan, capacity: int) -> Tensor:
    source = torch.full((capacity,), -1, dtype=torch.int32)
    for j, row in enumerate(plan.slot.tolist()):
        for slot in row:
            if slot >= 0:
                source[slot] = j
    return source


def check_rows_of_experts(
    channel: Channel, routing: Routing, width: int, dtype: torch.dtype, seed: int, where: list[int] | None
) -> None:
    """One dispatch. ``where`` as in Outputs; None: without a table of addresses."""
    generator = torch.Generator().manual_seed(seed)
    plans = plans_of(routing.indices, routing.experts, routing.capacity, routing.spare_rows)
    counts = [len(each) for each in routing.indices]
    tokens = draw_rows(counts, width, dtype, generator)
    weights = draw_rows(counts, routing.indices[0].shape[1], wide_type(dtype), generator)
    outputs = Outputs(routing.capacity, width, dtype, where or [0] * len(plans))
    of_weights = [
        weights[0].new_full((len(plan.slot), weights[0].shape[1]), torch.nan).to(DEVICE) for plan in plans
    ]
    sources = [source_of(plan, routing.capacity) for plan in plans]
    channel.memory.view(-1, channel.bytes)[:, : channel.flags] = 0xFF
    tp.virtual_exchange(
        channel.memory,
        channel.state,
        "dispatch",
        [each.to(DEVICE) for each in tokens],
        [each.to(DEVICE) for each in weights],
        [plan.slot.to(DEVICE) for plan in plans],
        [each.to(DEVICE) for each in sources],
        [plan.peer_rows.to(DEVICE) for plan in plans],
        [plan.records.to(DEVICE) for plan in plans],
        outputs.rows,
        of_weights,
        *channel.sizes,
        **(outputs.options() if where else {}),
    )
    got = outputs.checked()
    for rank, (plan, source) in enumerate(zip(plans, sources, strict=True)):
        expected = torch.zeros_like(got[rank])
        for slot, j in enumerate(source.tolist()):
            if j >= 0:
                r, t = plan.received[j]
                expected[slot] = tokens[r][t]
        assert_same_bits(got[rank], expected, f"rows of rank {rank}")
        expected = torch.zeros_like(of_weights[rank].cpu())
        for j, (r, t) in enumerate(plan.received):
            expected[j] = weights[r][t]
        assert_same_bits(of_weights[rank].cpu(), expected, f"weights of rank {rank}")
        if where and where[rank] == 1 and -1 not in where:
            for begin in channel.data:  # of both regions, which take turns
                row = channel.memory.view(-1, channel.bytes)[rank, begin : begin + width * dtype.itemsize]
                assert (row == 0xFF).all(), "a row went to the region of a rank whose output is known"


@gpu
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_experts(ranks: int, dtype: torch.dtype) -> None:
    """All kinds of routing on one channel; others find the outputs of all ranks, of none, or of some."""
    generator = torch.Generator().manual_seed(ranks)
    channel = channel_for(ranks, dtype, epoch=2**32 - 3)
    for number in range(7):
        routing = draw_routing(ranks, number, generator)
        patterns = [
            None,
            [1] * ranks,
            [(r + number) % 2 for r in range(ranks)],
            [(r + number) % 3 - 1 for r in range(ranks)],
        ]
        width = (64, 17, 1000)[number % 3]
        for where in patterns if ranks < 64 else [patterns[number % 4]]:
            check_rows_of_experts(channel, routing, width, dtype, number, where)
    assert channel.state[:, 2:].count_nonzero() == 0


@gpu
@pytest.mark.parametrize("direction", ["dispatch", "combine"])
def test_different_calls_are_reported(direction: str) -> None:
    """Every rank finds that one has made another call, says which, and does nothing afterwards."""
    generator = torch.Generator().manual_seed(3)
    routing = draw_routing(3, 1, generator)
    plans = plans_of(routing.indices, routing.experts, routing.capacity, 0)
    counts = [len(each) for each in routing.indices]
    heights = [len(plan.slot) for plan in plans]
    rows = draw_rows(counts if direction == "dispatch" else heights, 64, torch.float32, generator)
    channel = channel_for(3, torch.float32)
    report = torch.zeros(3, REPORT_WORDS, dtype=torch.int32, device=DEVICE)
    arguments = (direction, plans, rows, [], heights if direction == "dispatch" else counts)
    channel.exchange(*arguments, phases=[5, 5, 5], failure=report)
    assert not report.any() and channel.state[:, 0].tolist() == [1, 1, 1]
    channel.exchange(*arguments, phases=[5, 6, 5], failure=report)
    for rank, (wait, other, own_phase, other_phase, *_) in enumerate(report.tolist()):
        assert wait == 6
        assert (own_phase, other_phase) == ((6, 5) if rank == 1 else (5, 6))
        assert other == 1 if rank != 1 else other in (0, 2)
    assert channel.state[:, 0].tolist() == [1, 1, 1] and channel.state[:, 5].tolist() == [6, 6, 6]
    output, _ = channel.exchange(*arguments)
    assert all(each.isnan().all() for each in output)
