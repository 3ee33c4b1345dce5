"""assign_slots and count_tokens_per_expert: tables written by hand, the reference, and equal results on CPU and
CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.routing_cases import ROUTINGS, assign_slots_cases

tp = torch.ops.transformer_plugin
ASSIGN = list(assign_slots_cases())
assign_cases = pytest.mark.parametrize("case", ASSIGN, ids=lambda case: case.name)

# Indices, (first, experts, capacity, alignment) and perhaps the experts of all ranks, slot, source, source_k,
# group_sizes, total; written by hand.
GOLDEN = {
    "alignment_1": (
        [[2, 0], [1, 2], [0, 2]],
        (0, 3, 6, 1),
        [[3, 0], [2, 4], [1, 5]],
        [0, 2, 1, 0, 1, 2],
        [1, 0, 0, 0, 1, 1],
        [2, 1, 3],
        6,
    ),
    "alignment_4": (
        [[2, 0], [1, 2], [0, 2]],
        (0, 3, 14, 4),
        [[8, 0], [4, 9], [1, 10]],
        [0, 2, -1, -1, 1, -1, -1, -1, 0, 1, 2, -1, -1, -1],
        [1, 0, -1, -1, 0, -1, -1, -1, 0, 1, 1, -1, -1, -1],
        [4, 4, 4],
        12,
    ),
    "alignment_16": (
        [[1, 0], [1, 0]],
        (0, 2, 32, 16),
        [[16, 0], [17, 1]],
        [0, 1] + [-1] * 14 + [0, 1] + [-1] * 14,
        [1, 1] + [-1] * 14 + [0, 0] + [-1] * 14,
        [16, 16],
        32,
    ),
    "masked": (
        [[-1, 1], [7, -1], [2, 0], [-1, 2]],
        (0, 3, 5, 1, 8),
        [[-1, 1], [-1, -1], [2, 0], [-1, 3]],
        [2, 0, 2, 3, -1],
        [1, 1, 0, 1, -1],
        [1, 1, 2],
        4,
    ),
    "empty_first_middle_last": (
        [[1, 3], [3, 1]],
        (0, 5, 8, 2),
        [[0, 2], [3, 1]],
        [0, 1, 0, 1, -1, -1, -1, -1],
        [0, 1, 1, 0, -1, -1, -1, -1],
        [0, 2, 0, 2, 0],
        4,
    ),
    "no_tokens": ([], (0, 2, 3, 4), [], [-1, -1, -1], [-1, -1, -1], [0, 0], 0),
    "duplicates": ([[1, 1], [0, 1]], (0, 2, 4, 1), [[1, 2], [0, 3]], [1, 0, 0, 1], [0, 0, 1, 1], [1, 3], 4),
    "window": (
        [[0, 1], [2, 3], [1, 2]],
        (1, 2, 4, 1, 4),
        [[-1, 0], [2, -1], [1, 3]],
        [0, 2, 1, 2],
        [1, 0, 0, 1],
        [2, 2],
        4,
    ),
    "exact_fit": ([[0, 1], [1, 0]], (0, 2, 4, 1), [[0, 2], [3, 1]], [0, 1, 0, 1], [0, 1, 1, 0], [2, 2], 4),
    "one_row_short": ([[0, 1], [1, 0]], (0, 2, 3, 1), [[0, 2], [-1, 1]], [0, 1, 0], [0, 1, 1], [2, 1], 4),
    "alignment_pushes_over": (
        [[0, 1], [1, 0], [0, 0]],
        (0, 2, 6, 6),
        [[0, -1], [-1, 1], [2, 3]],
        [0, 1, 2, 2, -1, -1],
        [0, 1, 0, 1, -1, -1],
        [6, 0],
        12,
    ),
    "padding_itself_cut": (
        [[0, 1]],
        (0, 2, 5, 4),
        [[0, 4]],
        [0, -1, -1, -1, 0],
        [0, -1, -1, -1, 1],
        [4, 1],
        8,
    ),
}


def make_indices(rows: list[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), 2).to(device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("function", [ops.assign_slots, reference.assign_slots], ids=["op", "reference"])
def test_tables_by_hand(function, name: str, dtype: torch.dtype, device: torch.device) -> None:
    rows, layout, *expected, total = GOLDEN[name]
    got = function(make_indices(rows, dtype, device), *layout)
    for tensor, values, kind in zip(
        got[:4], expected, (torch.int32, torch.int32, torch.int32, torch.int64), strict=True
    ):
        assert tensor.dtype == kind and tensor.device.type == device.type
        assert tensor.tolist() == values
    assert got[4].dtype == torch.int64 and got[4].tolist() == [total]


@assign_cases
def test_assign_slots_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    got = ops.assign_slots(*case.arguments(device))
    expected = reference.assign_slots(*case.arguments())
    for name, a, b in zip(("slot", "source", "source_k", "group_sizes", "total"), got, expected, strict=True):
        assert_same_bits(a, b, name)


def test_many_indices_agree_with_a_stable_sort(device: torch.device) -> None:
    """More indices than one chunk of each counting pass, compared with a stable sort, which the kernels do not use."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-1, 1024, (300_000, 4), generator=generator)
    slot, source, _, sizes, total = (
        t.cpu() for t in ops.assign_slots(indices.to(device), 0, 1024, 1_200_000)
    )
    flat = indices.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    order = order[flat[order] >= 0]
    assert total.item() == order.numel() and torch.equal(
        sizes, torch.bincount(flat[flat >= 0], minlength=1024)
    )
    assert torch.equal(source[: order.numel()].long(), order // 4) and bool(
        (source[order.numel() :] == -1).all()
    )
    assert torch.equal(slot.reshape(-1)[order].long(), torch.arange(order.numel()))
    assert bool((slot.reshape(-1)[flat < 0] == -1).all())


@assign_cases
def test_count_tokens_per_expert_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    indices, *_, experts = case.arguments(device)
    got = ops.count_tokens_per_expert(indices, experts)
    assert_same_bits(got, reference.count_tokens_per_expert(indices.cpu(), experts))
    assert_same_bits(ops.count_tokens_per_expert(indices.reshape(-1), experts), got)


@pytest.mark.parametrize("experts", [1, 3, 128, 300, 1024])
@pytest.mark.parametrize("count", [0, 1, 4095, 4097, 16_385, 40_000, 2**20, 2**20 + 1])
def test_any_number_of_indices_is_counted(count: int, experts: int, device: torch.device) -> None:
    """One block, clusters of 2 to 8 blocks, and a grid; addresses that are and are not multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(-1, experts, (count + 1,), generator=generator)
    for indices in (values[:-1], values[1:]):
        expected = torch.bincount(indices[indices >= 0], minlength=experts)
        for dtype in (torch.int32, torch.int64):
            there = torch.empty(count + 1, dtype=dtype, device=device)
            there = there[1:] if indices.data_ptr() % 16 else there[:-1]
            assert_same_bits(ops.count_tokens_per_expert(there.copy_(indices), experts), expected)


@pytest.mark.parametrize("experts", [1, 5, 300, 1000])
@pytest.mark.parametrize(("tokens", "topk"), [(511, 8), (2049, 2), (20_000, 7), (140_000, 8)])
def test_ranges_of_many_indices(tokens: int, topk: int, experts: int, device: torch.device) -> None:
    """One block and many chunks, of one or more steps of a warp, with padding and dropped rows: the CPU on a GPU, and a
    stable sort."""
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, experts + 3, (tokens, topk), generator=generator, dtype=torch.int32)
    capacity = tokens * topk // 2
    layout = (1, experts, capacity, 4, experts + 3)
    got = ops.assign_slots(indices.to(device), *layout)
    for a, b in zip(got, ops.assign_slots(indices, *layout), strict=True):
        assert_same_bits(a, b)
    slot, _, _, _, total = (t.cpu() for t in got)
    flat = indices.reshape(-1) - 1
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts).long()
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    padded = (counts + 3) // 4 * 4
    assert total.item() == int(padded.sum())
    order = torch.sort(flat, stable=True).indices[: int(counts.sum())]
    rank = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[flat[order]]
    rows = (padded.cumsum(0) - padded)[flat[order]] + rank
    expected = torch.full_like(flat, -1)
    expected[order] = torch.where(rows < capacity, rows, -1)
    assert torch.equal(slot.reshape(-1).long(), expected)


@assign_cases
def test_opcheck_assign_slots(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(tp.assign_slots.default, arguments)
    opcheck(tp.count_tokens_per_expert.default, (arguments[0], arguments[5]))


def test_cases_contain_drops_masks_and_duplicates() -> None:
    """The cases contain enough dropped, masked and duplicated entries; otherwise the tests above would prove
    little."""
    drops = masks = duplicates = 0
    for routing in ROUTINGS:
        indices = routing.indices(torch.device("cpu"), torch.Generator().manual_seed(0))
        slot, _, _, sizes, total = ops.assign_slots(
            indices, 0, routing.experts, routing.capacity, routing.alignment
        )
        valid = indices >= 0
        drops += int((valid & (slot < 0)).sum())
        masks += int((~valid).sum())
        ordered = indices.masked_fill(~valid, -1).sort(dim=1).values
        duplicates += int(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum())
        assert int(sizes.sum()) == min(int(total), routing.capacity)
    assert min(drops, masks, duplicates) > 50
