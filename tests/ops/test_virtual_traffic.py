"""What the one-sided exchange stores into the memory of other ranks, counted byte by byte: each distinct row once, with
its weights, and nothing beside it. And what that memory needs: it does not grow with the ranks but for counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_virtual_ranks import Channel, RankPlan, draw_rows, plans_of
from transformer_plugin.parallel import EpConfig
from transformer_plugin.parallel.expert import _channel_sizes

gpu = pytest.mark.gpu
tp = torch.ops.transformer_plugin_testing

#: ranks, and the tokens of each
SIZES = [(2, 40), (4, 40), (8, 40), (16, 16), (64, 6)]
HIDDEN = [2048, 7168]
TOPK, LOCAL_EXPERTS = 8, 4
#: bytes that are written for each byte of a row that another rank needs
MOST = 1.02


def draw_indices(ranks: int, tokens: int) -> list[Tensor]:
    """Different experts for each token; the second rank has fewer tokens."""
    generator = torch.Generator().manual_seed(ranks)
    counts = [tokens if rank != 1 else tokens // 2 for rank in range(ranks)]
    chosen = [torch.rand(n, ranks * LOCAL_EXPERTS, generator=generator).argsort(1)[:, :TOPK] for n in counts]
    return [each.to(torch.int32) for each in chosen]


def rows_between(indices: list[Tensor]) -> Tensor:
    """``[R, R]``: the tokens of each rank of which each other rank has an expert."""
    ranks = len(indices)
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for me, of_rank in enumerate(indices):
        for token in of_rank.tolist():
            for to in {expert // LOCAL_EXPERTS for expert in token} - {me}:
                rows[me, to] += 1
    return rows


def record_bytes(hidden: int, weights: int) -> int:
    """Of a row of bfloat16 and its weights, each from a multiple of 16 bytes on."""
    return -(-hidden * 2 // 16) * 16 + -(-weights * 4 // 16) * 16


def expected_mask(channel: Channel, rows: Tensor, region: int, stride: int) -> Tensor:
    """``[R, bytes of the data]``: the places of ``rows[r]`` records in a region of each rank."""
    mask = torch.zeros(len(rows), channel.flags, dtype=torch.bool)
    for rank, count in enumerate(rows.tolist()):
        mask[rank, channel.data[region] : channel.data[region] + count * stride] = True
    return mask


def written_bytes(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """Which bytes differ from what they were in either run. What was there in the second is the complement of what was
    there in the first, so that a byte which is written differs in one of them."""
    assert len(before) == len(after) == 2 and torch.equal(before[0], ~before[1])
    return (before[0] != after[0]) | (before[1] != after[1])


def most_rows(plans: list[RankPlan]) -> int:
    return max(max(len(plan.slot), len(plan.sent)) for plan in plans)


def measured(
    channel: Channel, direction: str, plans: list[RankPlan], counts: list[int], hidden: int, weights: int
) -> list[Tensor]:
    """The bytes that two exchanges in a row write, which use one region each: ``[R, bytes of the data]`` of each."""
    generator = torch.Generator().manual_seed(hidden)
    heights = [len(plan.slot) for plan in plans]
    before_rows, after_rows = (counts, heights) if direction == "dispatch" else (heights, counts)
    rows = draw_rows(before_rows, hidden, torch.bfloat16, generator)
    of_rows = draw_rows(before_rows, weights, torch.float32, generator) if weights else []
    size = (len(plans), channel.flags)
    pattern = torch.randint(256, size, dtype=torch.uint8, device=channel.memory.device)
    start = channel.memory.clone(), channel.state.clone()
    befores, afters = [pattern, ~pattern], []
    for fill in befores:
        channel.memory.copy_(start[0])
        channel.state.copy_(start[1])
        channel.fill = fill
        for _ in range(2):
            channel.exchange(direction, plans, rows, of_rows, after_rows)
            afters.append(channel.memory.view(size[0], -1)[:, : channel.flags].clone())
    return [written_bytes(befores, [afters[i], afters[2 + i]]) for i in range(2)]


def check_written(channel: Channel, written: list[Tensor], rows: Tensor, hidden: int, weights: int) -> None:
    """``rows``: the records that each rank gets from others."""
    stride = record_bytes(hidden, weights)
    for mask in written:
        number = int(mask.sum())
        assert number == int(rows.sum()) * stride
        assert number <= MOST * int(rows.sum()) * hidden * 2
        expected = [expected_mask(channel, rows, region, stride) for region in (0, 1)]
        assert any(torch.equal(mask, each.to(mask.device)) for each in expected)
    assert not torch.equal(*written)  # regions take turns


@gpu
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(("ranks", "tokens"), SIZES)
@pytest.mark.parametrize(
    ("direction", "weights"), [("dispatch", TOPK), ("dispatch", 0), ("combine", 0), ("combine", TOPK)]
)
def test_each_row_is_written_once(ranks: int, tokens: int, hidden: int, direction: str, weights: int) -> None:
    indices = draw_indices(ranks, tokens)
    plans = plans_of(indices, ranks * LOCAL_EXPERTS, ranks * tokens * TOPK, 3)
    channel = Channel(ranks, most_rows(plans), record_bytes(hidden, TOPK))
    written = measured(channel, direction, plans, [len(each) for each in indices], hidden, weights)
    rows = rows_between(indices)
    check_written(channel, written, rows.sum(0 if direction == "dispatch" else 1), hidden, weights)


class FakeChannel:
    """A channel on a CPU, whose exchange writes the bytes of its masks."""

    def __init__(self, ranks: int, rows: int, record_bytes: int) -> None:
        layout = tp.virtual_channel_layout(ranks, rows, rows, record_bytes)
        self.bytes, *self.data, self.flags, _, _, self.credits = layout
        self.fill = torch.zeros(0)
        self.memory = torch.zeros(ranks * self.bytes, dtype=torch.uint8)
        self.state = torch.zeros(ranks, 16, dtype=torch.int32)
        self.masks: list[Tensor] = []

    def exchange(self, *arguments: Any) -> None:
        number = int(self.state[0, 0])
        data = self.memory.view(-1, self.bytes)[:, : self.flags]
        values = torch.full_like(data, 7)
        data.copy_(torch.where(self.masks[number % 2], values, self.fill))
        self.state[:, 0] += 1


@pytest.mark.parametrize("extra", [None, "past", "beside"])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 5), (8, 3)])
def test_the_count_of_written_bytes(ranks: int, tokens: int, extra: str | None) -> None:
    """On a CPU: a byte that holds the value which is written there counts, and one beside the records is found."""
    indices, hidden = draw_indices(ranks, tokens), 64
    plans = plans_of(indices, ranks * LOCAL_EXPERTS, ranks * tokens * TOPK, 3)
    channel: Any = FakeChannel(ranks, most_rows(plans), record_bytes(hidden, TOPK))
    rows, stride = rows_between(indices).sum(0), record_bytes(hidden, 0)
    assert int(rows.sum()) == sum(sum(r != me for r, _ in plan.received) for me, plan in enumerate(plans))
    channel.masks = [expected_mask(channel, rows, region, stride) for region in (0, 1)]
    if extra == "past":
        channel.masks[0][1, channel.data[0] + int(rows[1]) * stride] = True
    elif extra == "beside":
        channel.masks[0][0, channel.data[1] + 1] = True
    written = measured(channel, "dispatch", plans, [len(each) for each in indices], hidden, 0)
    if extra is None:
        check_written(channel, written, rows, hidden, 0)
    else:
        with pytest.raises(AssertionError):
            check_written(channel, written, rows, hidden, 0)


def round_up(size: int, unit: int = 128) -> int:
    return -(-size // unit) * unit


@pytest.mark.parametrize("hidden", HIDDEN)
def test_memory_grows_by_counts_only(hidden: int) -> None:
    """Of a context with ``max_received_tokens``: from 2 to 64 ranks."""
    tokens, bound, experts = 4096, 8 * 4096, 256
    config = EpConfig(
        experts, tokens, hidden, TOPK, max_received_tokens=bound, max_token_dtype=torch.bfloat16
    )
    counts_of = {}
    for ranks in (2, 4, 8, 16, 32, 64):
        sizes = _channel_sizes(config, ranks, bound * min(TOPK, experts // ranks))
        of_rows = [sizes[name] for name in ("received_rows", "returned_rows", "record_bytes")]
        channel = tp.virtual_channel_layout(ranks, *of_rows)[0]
        planned = sizes["planned_rows"]
        plan = tp.virtual_plan_layout(ranks, experts, planned, TOPK)[0]
        rows = max(of_rows[:2])
        assert rows <= bound  # whatever the ranks
        data, slots = round_up(rows * round_up(of_rows[2], 16)), round_up(planned * TOPK * 4)
        flags = 2 * round_up((rows + ranks + 1) * 8) + round_up(ranks * 8)
        announcements = 2 * round_up(ranks * 64)
        assert channel == 2 * data + flags + announcements
        counts = 2 * round_up(ranks * (experts + ranks + 2) * 4) + round_up(ranks * ranks * 4)
        assert plan == slots + counts + 3 * round_up(ranks * 4)
        counts_of[ranks] = channel + plan - 2 * data - slots - 2 * round_up(rows * 8)
    assert counts_of[64] < 256 * 1024  # beside 2 regions of more than 128 MB with a flag for each row
    # With the same rows, 48 ranks more are 48 flags and announcements of each region and 48 credits more.
    layouts = [tp.virtual_channel_layout(ranks, bound, bound, of_rows[2])[0] for ranks in (16, 64)]
    assert 0 <= layouts[1] - layouts[0] <= 3 * round_up(48 * 8) + 2 * round_up(48 * 64)
