"""Gradients: numerical checks, absent gradients, twice, unusual strides, any order of backwards."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.parallel.test_expert_parallel import make_plan
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import EpCase, duplicated, masked
from transformer_plugin.testing.numerics import assert_same_bits

CASE = EpCase("plain", masked, topk=4, local_experts=4, capacity=48, hidden=6)


def context_of(rank: Rank, case: EpCase = CASE, **options: object) -> EpContext:
    sizes = {
        "num_experts": case.experts(rank.size),
        "max_tokens_per_rank": case.max_tokens,
        "hidden_dim": case.hidden,
        "num_topk": case.topk,
        "capacity": case.capacity,
        "alignment": case.alignment,
        "overflow": "drop",
        "device": rank.device,
    }
    return EpContext(rank.group, **{**sizes, **options})


def drawn_leaves(
    rank: Rank, case: EpCase = CASE, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indices, tokens, weights = (each.to(rank.device) for each in case.draw(rank.rank, rank.size, seed))
    return indices, tokens.requires_grad_(), weights.requires_grad_()


def check_numerically(rank: Rank) -> None:
    """Compares with finite differences of plan, dispatch and combine. Every evaluation is collective, so all ranks
    change their inputs together.

    The loss is the sum over all ranks of a function of every output, so a rank's gradient includes the effect of its
    tokens on other ranks.
    """
    case = EpCase("double", duplicated, tokens=(3, 2), topk=3, capacity=11, hidden=3, dtype=torch.float64)
    context = context_of(rank, case)
    indices, tokens, weights = drawn_leaves(rank, case)
    plan = context.plan(indices)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        recv, recv_weights = context.dispatch(plan, x, w)
        output = context.combine(plan, torch.sin(recv) * recv_weights[:, None] ** 2)
        return (output * torch.cos(torch.arange(output.numel()).view_as(output) + rank.rank)).sum() + (
            recv**3
        ).sum()

    def total(x: torch.Tensor, w: torch.Tensor) -> float:
        value = loss(x, w).detach().reshape(1)
        torch.distributed.all_reduce(value)
        return float(value)

    got = torch.autograd.grad(loss(tokens, weights), (tokens, weights))
    base = (tokens.detach(), weights.detach())
    step = 1e-6
    for which, r in itertools.product((0, 1), range(rank.size)):
        count = case.draw(r, rank.size)[1 + which].numel()
        for i in range(count):
            moved = [each.clone() for each in base]
            ends = []
            for sign in (1, -1):
                if r == rank.rank:
                    moved[which].view(-1)[i] = base[which].reshape(-1)[i] + sign * step
                ends.append(total(*moved))
            if r == rank.rank:
                slope = (ends[0] - ends[1]) / (2 * step)
                assert abs(slope - float(got[which].reshape(-1)[i])) < 1e-6 * max(1, abs(slope)), (which, i)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_numerically(make_pool, size: int) -> None:
    make_pool(size, "gloo").run(check_numerically)


def check_absent_gradients(rank: Rank) -> None:
    """The loss uses different outputs on each rank: absent gradients count as zero, and no rank waits for ever."""
    context = context_of(rank)
    uses = list(itertools.product((True, False), repeat=2))
    for mine, shift in itertools.product(range(4), (0, 1)):
        use_rows, use_weights = uses[(mine + shift * rank.rank) % 4]
        indices, tokens, weights = drawn_leaves(rank)
        plan = context.plan(indices)
        recv, recv_weights = context.dispatch(plan, tokens, weights)
        # Through one more node, so that the engine runs the backward even if no output is used.
        rows, factors = Passing.apply(recv, recv_weights, use_rows, use_weights)
        (rows.sum() + factors.sum()).backward()
        # The rank that receives a row decides whether the row has a gradient: 1 for each of my rows on such a rank.
        slots = [(indices.cpu() // CASE.local_experts == r) & (indices.cpu() >= 0) for r in range(rank.size)]
        per_rank = [uses[(mine + shift * r) % 4] for r in range(rank.size)]
        in_rows = sum(s * float(u[0]) for s, u in zip(slots, per_rank, strict=True))
        in_weights = sum(s * float(u[1]) for s, u in zip(slots, per_rank, strict=True))
        if not bool(plan.overflow):
            assert tokens.grad.cpu().tolist() == in_rows.sum(1, keepdim=True).expand_as(tokens).tolist()
            assert weights.grad.cpu().tolist() == in_weights.tolist()
        else:
            raise AssertionError("the case must fit")


class Passing(torch.autograd.Function):
    """Passes gradients on, or returns None."""

    @staticmethod
    def forward(ctx, a, b, pass_a, pass_b):
        ctx.keep = pass_a, pass_b
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx, a, b):
        return (a if ctx.keep[0] else None), (b if ctx.keep[1] else None), None, None


def test_absent_gradients_count_as_zero_and_hold_nobody_up(pool: RankPool) -> None:
    pool.run(check_absent_gradients)


def check_absent_combine_gradient(rank: Rank) -> None:
    context = context_of(rank)
    indices, tokens, _ = drawn_leaves(rank)
    plan = context.plan(indices)
    rows = torch.randn(CASE.capacity, CASE.hidden, device=rank.device, requires_grad=True)
    used = rank.rank == 0
    output, _ = Passing.apply(context.combine(plan, rows), torch.zeros((), device=rank.device), used, False)
    output.sum().backward()
    from_rank_0, _ = context.dispatch(plan, torch.full_like(tokens, float(used)))
    if plan.received is None:  # then the rows name their tokens
        source = plan.source
        from_rank_0 = (source >= 0) & (source // CASE.max_tokens == 0)
        from_rank_0 = from_rank_0.float()[:, None].expand_as(rows)
    assert from_rank_0.any() and rows.grad.tolist() == from_rank_0.tolist()


def test_an_absent_gradient_of_combine_counts_as_zero(pool: RankPool) -> None:
    pool.run(check_absent_combine_gradient)


def check_what_is_wanted(rank: Rank) -> None:
    """Only inputs that require gradients get one; if none does, no graph is recorded."""
    context = context_of(rank)
    for for_tokens, for_weights in itertools.product((True, False), repeat=2):
        indices, tokens, weights = drawn_leaves(rank)
        tokens.requires_grad_(for_tokens), weights.requires_grad_(for_weights)
        plan = context.plan(indices)
        recv, recv_weights = context.dispatch(plan, tokens, weights)
        assert (recv.requires_grad, recv_weights.requires_grad) == (for_tokens, for_weights)
        if for_tokens or for_weights:
            sum(each.sum() for each in (recv, recv_weights) if each.requires_grad).backward()
        assert (tokens.grad is not None, weights.grad is not None) == (for_tokens, for_weights)
    recv, none = context.dispatch(plan, tokens.requires_grad_())
    assert none.shape == (0,) and not none.requires_grad
    recv.sum().backward()
    assert tokens.grad is not None


def test_only_what_is_wanted(pool: RankPool) -> None:
    pool.run(check_what_is_wanted)


def check_strides_and_repeats(rank: Rank) -> None:
    context = context_of(rank)
    indices, tokens, weights = drawn_leaves(rank)
    wide = torch.zeros(tokens.shape[0], 2 * CASE.hidden, device=rank.device)
    wide[:, ::2] = tokens.detach()
    plan = context.plan(indices)
    recv, recv_weights = context.dispatch(plan, tokens, weights)
    strided, _ = context.dispatch(plan, wide[:, ::2], weights.detach().t().contiguous().t())
    assert_same_bits(strided, recv)
    loss = recv.sum() + recv_weights.sum()  # gradients of stride 0
    first = torch.autograd.grad(loss, (tokens, weights), retain_graph=True)
    second = torch.autograd.grad(loss, (tokens, weights))
    full = torch.ones_like(recv), torch.ones_like(recv_weights)
    recv, recv_weights = context.dispatch(plan, tokens, weights)
    third = torch.autograd.grad((recv, recv_weights), (tokens, weights), full)
    for each in (second, third):
        assert_same_bits(each[0], first[0])
        assert_same_bits(each[1], first[1])
    rows = torch.randn(CASE.hidden, CASE.capacity, device=rank.device).t().requires_grad_()
    output = context.combine(plan, rows)
    assert_same_bits(output, context.combine(plan, rows.detach().contiguous()))
    (grad,) = torch.autograd.grad(output.sum(), rows)
    assert grad.cpu().tolist() == (plan.source >= 0).float()[:, None].expand_as(rows).tolist()


def test_strides_and_repeats(pool: RankPool) -> None:
    pool.run(check_strides_and_repeats)


def check_interleaved(rank: Rank) -> None:
    """Two contexts and three microbatches in the order F0 F1 B0 F2 B1 B2, compared with one after the other."""
    contexts = [context_of(rank), context_of(rank, alignment=8, capacity=96), context_of(rank)]
    leaves = [drawn_leaves(rank, seed=m) for m in range(3)]

    def forward(m: int) -> torch.Tensor:
        indices, tokens, weights = leaves[m]
        plan = contexts[m].plan(indices)
        recv, recv_weights = contexts[m].dispatch(plan, tokens, weights)
        return contexts[m].combine(plan, torch.tanh(recv) * recv_weights[:, None])

    def gradients(m: int, output: torch.Tensor) -> list[torch.Tensor]:
        return [output, *torch.autograd.grad(output.square().sum(), leaves[m][1:])]

    outputs = {}
    got = {}
    for step in ("F0", "F1", "B0", "F2", "B1", "B2"):
        m = int(step[1])
        if step[0] == "F":
            outputs[m] = forward(m)
        else:
            got[m] = gradients(m, outputs[m])
    for m in range(3):
        for first, second in zip(got[m], gradients(m, forward(m)), strict=True):
            assert_same_bits(first, second)
    for context in contexts:
        context.finalize()


def test_microbatches_and_contexts_interleaved(pool: RankPool) -> None:
    pool.run(check_interleaved)


def check_repeats(rank: Rank) -> None:
    case = EpCase("repeat", topk=6, local_experts=4, capacity=64, hidden=40, dtype=torch.bfloat16)
    indices, tokens, _ = (each.to(rank.device) for each in case.draw(rank.rank, rank.size))
    plan = make_plan(rank, case, indices)
    outputs = set()
    for _ in range(30):
        recv, _ = ep.dispatch(tokens, None, plan.slot, plan.source, rank.group_name)
        output = ep.combine(recv, plan.slot, plan.source, len(tokens), rank.group_name)
        outputs.add(output.cpu().view(torch.int16).numpy().tobytes())
    assert len(outputs) == 1


def test_repeats_bit_for_bit(pool: RankPool) -> None:
    pool.run(check_repeats)


def check_checkpointed(rank: Rank) -> None:
    """With plan, dispatch and combine recomputed in the backward, the gradients are the same."""
    context = context_of(rank)

    def layer(tokens: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        plan = context.plan(indices)
        recv, recv_weights = context.dispatch(plan, tokens, weights)
        return context.combine(plan, torch.tanh(recv) * recv_weights[:, None])

    indices, tokens, weights = drawn_leaves(rank)
    expected = torch.autograd.grad(layer(tokens, weights, indices).sum(), (tokens, weights))
    output = torch.utils.checkpoint.checkpoint(layer, tokens, weights, indices, use_reentrant=False)
    for got, each in zip(torch.autograd.grad(output.sum(), (tokens, weights)), expected, strict=True):
        assert_same_bits(got, each)


def test_activation_checkpoint(pool: RankPool) -> None:
    pool.run(check_checkpointed)


def check_second_derivatives(rank: Rank) -> None:
    context = context_of(rank)
    indices, tokens, weights = drawn_leaves(rank)
    plan = context.plan(indices)
    recv, _ = context.dispatch(plan, tokens, weights)
    for op, loss in (
        ("dispatch_backward", recv.square().sum()),
        ("combine_backward", context.combine(plan, recv).square().sum()),
    ):
        with pytest.raises(NotImplementedError) as caught:
            torch.autograd.grad(loss, tokens, create_graph=True)
        assert str(caught.value) == (
            f"transformer_plugin::{op}: argument 'grad': expected a gradient that requires none, got one that does. "
            "Second derivatives are not implemented."
        )


def test_second_derivatives_are_refused(pool: RankPool) -> None:
    pool.run(check_second_derivatives)
