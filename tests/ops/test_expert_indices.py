"""Indices that are neither an expert nor -1: an error on a CPU, counted and reported by a later call on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.on_gpu import captured
from transformer_plugin import functional, ops
from transformer_plugin.nn import MoE
from transformer_plugin.nn.router import Routing
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.numerics import assert_same_bits

E = 4
ADVICE = "Name an expert, or pass -1 for none"
MORE = f"{ADVICE}; with more experts on other ranks pass the number of all as total_experts"
RANKED = f"{ADVICE}; the position is [rank, token, k]"

Call = Callable[[Tensor], Any]


def weights(indices: Tensor) -> Tensor:
    return torch.ones(indices.shape, device=indices.device)


def tokens(indices: Tensor, width: int = 3) -> Tensor:
    return torch.ones(len(indices), width, device=indices.device)


def router_gradient(topk: int) -> Call:
    """topk_router_backward; few choices are computed in registers, more in shared memory."""

    def call(indices: Tensor) -> Tensor:
        wide = torch.cat([indices.int()] * topk, 1)
        return ops.topk_router_backward(weights(wide), tokens(indices, E), wide, "sigmoid", False, 1.0)

    return call


#: The name of the op and of its argument, the advice of the error, and the op as a function of the indices [T, 2].
CALLS: dict[str, tuple[str, str, str, Call]] = {
    "assign_slots": ("assign_slots", "indices", MORE, lambda i: ops.assign_slots(i, 0, E, 40)),
    "assign_slots of the last experts": (
        "assign_slots",
        "indices",
        MORE,
        lambda i: ops.assign_slots(i, 2, 2, 40),
    ),
    "assign_slots of experts in the middle": (
        "assign_slots",
        "indices",
        MORE,
        lambda i: ops.assign_slots(i, 1, 2, 40, 1, E),
    ),
    "assign_weighted_slots": (
        "assign_weighted_slots",
        "indices",
        MORE,
        lambda i: ops.assign_weighted_slots(i, weights(i), 0, E, 40),
    ),
    "count_tokens_per_expert": (
        "count_tokens_per_expert",
        "indices",
        ADVICE,
        lambda i: ops.count_tokens_per_expert(i, E),
    ),
    "permute": ("permute", "indices", ADVICE, lambda i: ops.permute(tokens(i), i, E, 40)),
    "functional.permute": (
        "permute",
        "indices",
        ADVICE,
        lambda i: functional.permute(tokens(i), i, E, 40)[1],
    ),
    "plan": ("plan", "topk_idx", RANKED, lambda i: ops.plan(i, E, len(i), 40)),
    "topk_router_backward": ("topk_router_backward", "indices", ADVICE, router_gradient(1)),
    "topk_router_backward, many": ("topk_router_backward", "indices", ADVICE, router_gradient(20)),
}
by_call = pytest.mark.parametrize("name", CALLS)
#: Some look right if they are truncated to 32 bits.
WRONG = (E, E + 7, -2, -5, 2**31 - 1, -(2**31), 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63))


def indices_of(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(-1, 2)


@by_call
def test_error_on_a_cpu(name: str) -> None:
    """Every wrong value in each dtype that has it, alone; what is right on both sides of it is not named."""
    op, argument, advice, call = CALLS[name]
    for dtype in (torch.int32, torch.int64):
        if op == "topk_router_backward" and dtype == torch.int64:
            continue
        call(indices_of(0, 3, -1, 1, 2, -1, dtype=dtype))  # right
        for wrong in WRONG:
            if not torch.iinfo(dtype).min <= wrong <= torch.iinfo(dtype).max:
                continue
            with pytest.raises(ValueError) as caught:
                call(indices_of(0, 3, -1, wrong, 2, -1, dtype=dtype))
            got = max(min(wrong, 2**31 - 1), 1 - 2**31) if op == "plan" else wrong
            place = "[0, 1, 1]" if op == "plan" else "[1, 1]"
            text = f"{got} at {place}. {advice}."
            if op == "topk_router_backward" and ", many" in name:
                text = f"{got} at [1, 1] and 19 more that are neither. {advice}."
            assert str(caught.value) == (
                f"transformer_plugin::{op}: argument '{argument}': expected experts from 0 to 3, or -1 for none, got "
                + text
            )


def test_several_are_counted() -> None:
    with pytest.raises(ValueError, match=r"got 4 at \[0, 1\] and 3 more that are neither\. Name an expert"):
        ops.count_tokens_per_expert(indices_of(0, 4, -2, 1, 9, -9), E)
    with pytest.raises(ValueError, match=r"got 7 at \[1, 0, 1\]\. Name"):
        ops.count_tokens_per_expert(indices_of(0, 1, 1, 0, 2, 7, 3, 3).view(2, 2, 2), E)
    with pytest.raises(
        ValueError, match=r"expected -1 for no expert, where there are none, got 0 at \[0, 0\]"
    ):
        ops.count_tokens_per_expert(indices_of(0, 0), 0)


@pytest.mark.parametrize("total", [0, 3, -2])
def test_total_experts_too_small(total: int) -> None:
    with pytest.raises(ValueError) as caught:
        ops.assign_slots(indices_of(0, 1), 2, 2, 40, 1, total)
    assert str(caught.value) == (
        "transformer_plugin::assign_slots: argument 'total_experts': expected at least 4, which are those up to the "
        f"last of the layout, or -1, got {total}. Pass the number of experts of all ranks."
    )


class FixedRouter(torch.nn.Module):
    """Routes every token to the given experts."""

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.indices = indices

    def forward(self, tokens: Tensor) -> Routing:
        zero = tokens.new_zeros(())
        return Routing(self.indices, weights(self.indices), zero, zero.new_zeros(E).long())


def moe_of(indices: Tensor) -> MoE:
    torch.manual_seed(0)
    layer = MoE(8, 16, E, 2).to(indices.device)
    layer.router = FixedRouter(indices)
    return layer


@pytest.mark.parametrize("wrong", [E, -2])
@pytest.mark.parametrize("compiled", [False, True])
def test_moe(wrong: int, compiled: bool) -> None:
    layer = moe_of(indices_of(0, 3, -1, wrong, 2, -1))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with pytest.raises(
        ValueError, match=rf"'indices': expected experts from 0 to 3, .* got {wrong} at \[1, 1\]"
    ):
        run(torch.ones(3, 8))


def test_context_of_one_rank() -> None:
    context = EpContext(None, num_experts=E, max_tokens_per_rank=8, hidden_dim=3, num_topk=2)
    with pytest.raises(
        ValueError, match=r"'topk_idx': expected experts from 0 to 3, .* got 4 at \[0, 1, 0\]"
    ):
        context.plan(indices_of(0, 1, 4, 1))
    assert context.plan(indices_of(0, 1, -1, 1)).tokens_per_expert.tolist() == [1, 2, 0, 0]


def late_error(op: str, count: int, place: int) -> str:
    return (
        f"transformer_plugin::{op}: argument 'indices': expected experts from 0 to 3, or -1 for none, in the calls "
        f"before this one, got {count} that are neither, one of them element {place} of its call. They were treated as "
        "-1: fix what chooses the experts."
    )


def check_late_error(count: int, places: set[int]) -> None:
    torch.cuda.synchronize()
    with pytest.raises(ValueError) as caught:
        ops.check_group_sizes()
    assert str(caught.value) in {late_error("check_group_sizes", count, place) for place in places}
    ops.check_group_sizes()  # an error is reported once


def as_tensors(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


@pytest.mark.gpu
@by_call
def test_reported_later_on_a_gpu(name: str) -> None:
    """The results are those of -1. The next call raises, and the explicit check; in a graph, too."""
    op, _, _, call = CALLS[name]
    copies = 20 if ", many" in name else 1
    right, wrong = indices_of(0, 3, -1, 1, 2, -1).cuda(), indices_of(0, 3, E, 1, 2, -2).cuda()
    expected = as_tensors(call(right))
    for got, want in zip(as_tensors(call(wrong)), expected, strict=True):
        assert_same_bits(got, want)
    places = {2, 5} if copies == 1 else set(range(3 * 2 * copies))
    check_late_error(2 * copies, places)
    call(wrong)
    torch.cuda.synchronize()
    with pytest.raises(ValueError) as caught:
        call(right)
    assert str(caught.value) in {late_error(op, 2 * copies, place) for place in places}

    indices = right.clone()
    graph = captured(lambda: call(indices))
    graph.replay()
    torch.cuda.synchronize()
    ops.check_group_sizes()
    indices.copy_(wrong)
    for _ in range(3):
        graph.replay()
    check_late_error(6 * copies, places)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [8, 4098, 40_000, 2**20 + 6])
def test_every_wrong_index_is_counted_once(numel: int) -> None:
    """One block, several chunks, a cluster and a grid; the indices of whole warps are wrong, and a single one."""
    indices = torch.zeros(numel, dtype=torch.int32)
    indices[numel // 2 :] = E
    indices[3] = -7
    wrong = numel - numel // 2 + 1
    there = indices.cuda().view(-1, 2)
    for call in (
        lambda: ops.count_tokens_per_expert(there, E),
        lambda: ops.assign_slots(there, 0, E, numel),
        lambda: ops.plan(there, E, len(there), numel),
    ):
        call()
        check_late_error(wrong, {3, *range(numel // 2, numel)})


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_moe_on_a_gpu(compiled: bool) -> None:
    right, wrong = indices_of(0, 3, -1, 1, 2, -1).cuda(), indices_of(0, 3, E, 1, 2, -2).cuda()
    layer, x = moe_of(right.clone()), torch.ones(3, 8, device="cuda")
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    expected = run(x).output
    layer.router.indices.copy_(wrong)  # type: ignore[union-attr,operator]
    torch.cuda._sleep(200_000_000)  # the GPU counts after the forward, in which no later op raises then
    assert_same_bits(run(x).output, expected)
    check_late_error(2, {2, 5})
