"""opcheck, torch.compile and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from tests.opcheck import opcheck
from tests.parallel.test_expert_parallel_gradients import CASE, context_of, drawn_leaves
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import EpCase, ep_cases
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin


def check_ops(rank: Rank, cases: list[EpCase]) -> None:
    for case in cases:
        if case.dtype == torch.float64 and rank.device.type == "cuda":
            continue
        indices, tokens, weights = (each.to(rank.device) for each in case.draw(rank.rank, rank.size))
        sizes = (case.experts(rank.size), case.max_tokens, case.capacity, case.alignment, rank.size)
        tail = (rank.group_name, 60_000)
        opcheck(_ops.plan.default, (indices, *sizes, rank.group_name, False, 60_000))
        plan = ep.plan(indices, *sizes, rank.group_name)
        maps = (plan.slot, plan.source)
        count = len(tokens)
        for wanted in (False, True):
            x, w = tokens.clone().requires_grad_(wanted), weights.clone().requires_grad_(wanted)
            rows = torch.randn(case.capacity, case.hidden, device=rank.device).to(case.dtype)
            opcheck(_ops.dispatch.default, (x, w, *maps, *tail))
            opcheck(_ops.dispatch.default, (x, None, *maps, *tail))
            opcheck(_ops.combine.default, (rows.requires_grad_(wanted), *maps, count, *tail))
        grad_weights = torch.randn(case.capacity, device=rank.device).to(weights.dtype)
        sizes = (count, case.hidden, case.dtype)
        rows = rows.detach()
        opcheck(_ops.dispatch_backward.default, (rows, grad_weights, plan.slot, *sizes, True, True, *tail))
        opcheck(_ops.dispatch_backward.default, (None, None, plan.slot, *sizes, True, False, *tail))
        opcheck(_ops.combine_backward.default, (tokens, *maps, *tail))


FEW = [case for case in ep_cases() if case.name in ("bfloat16", "nobody-has-any", "capacity-4")]


# What is registered does not depend on the case, and a case takes seconds: others than on two ranks. A GPU runs all.
@pytest.mark.parametrize(
    "cases", [FEW[:1], pytest.param(list(ep_cases())[::3], marks=pytest.mark.long)], ids=len
)
def test_opcheck_one_rank(make_pool, cases: list[EpCase]) -> None:
    make_pool(1, "gloo").run(check_ops, cases)


@pytest.mark.gpus(1)
def test_opcheck_one_gpu(make_pool) -> None:
    make_pool(1, "nccl").run(check_ops, list(ep_cases()))


@pytest.mark.parametrize("cases", [FEW[1:], pytest.param(FEW[:1], marks=pytest.mark.long)], ids=len)
def test_opcheck_two_ranks(pair: RankPool, cases: list[EpCase]) -> None:
    pair.run(check_ops, cases)


def check_compiled(rank: Rank) -> None:
    """fullgraph, forward and backward, equal to eager, also with other routings and sizes."""
    torch._dynamo.reset()
    context = context_of(rank)

    def layer(tokens: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        plan = context.plan(indices)
        recv, recv_weights = context.dispatch(plan, tokens, weights)
        rows = recv * recv_weights[:, None] * (plan.tokens_per_expert.sum() > 0)
        return context.combine(plan, rows)

    compiled = torch.compile(layer, fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()  # graphs of other tests in these processes
    for seed in range(4):
        indices, tokens, weights = drawn_leaves(rank, seed=seed)
        expected = layer(tokens, weights, indices)
        output = compiled(tokens, weights, indices)
        assert_same_bits(output, expected)
        grads = torch.autograd.grad(output.sum(), (tokens, weights))
        expected_grads = torch.autograd.grad(expected.sum(), (tokens, weights))
        assert_same_bits(grads[0], expected_grads[0])
        torch.testing.assert_close(grads[1], expected_grads[1])  # the row sum has another order
    assert graphs["unique_graphs"] == 1, "compiled again for another routing"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graphs.clear()
    for count in (5, 4, 3):
        indices = torch.zeros(count, CASE.topk, dtype=torch.int64, device=rank.device)
        tokens = torch.randn(count, CASE.hidden, device=rank.device)
        weights = torch.rand(count, CASE.topk, device=rank.device)
        assert_same_bits(compiled(tokens, weights, indices), layer(tokens, weights, indices))
    assert graphs["unique_graphs"] <= 2, "compiled more than once for another number of tokens"


def test_compile(pair: RankPool) -> None:
    pair.run(check_compiled, timeout=280)


def check_graph(rank: Rank) -> None:
    """Forward and backward are captured once and replayed with other routings, tokens and masked entries."""
    context = context_of(rank)
    indices, tokens, weights = drawn_leaves(rank)
    static = [each.detach().clone() for each in (indices, tokens, weights)]
    static[1].requires_grad_(), static[2].requires_grad_()

    def step() -> list[torch.Tensor]:
        plan = context.plan(static[0])
        recv, recv_weights = context.dispatch(plan, static[1], static[2])
        output = context.combine(plan, torch.tanh(recv) * recv_weights[:, None])
        grads = torch.autograd.grad(output.square().sum(), static[1:])
        return [output, *grads, plan.tokens_per_expert, plan.required]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for seed in range(5):
        with torch.no_grad():
            for to, drawn in zip(static, drawn_leaves(rank, seed=seed), strict=True):
                to.copy_(drawn)
        graph.replay()
        got = [each.detach().clone() for each in captured]
        for first, second in zip(got, step(), strict=True):  # an eager step between replays
            assert_same_bits(first, second)
    del graph, captured
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (1, 2, 4)])
def test_graph_replays_with_another_routing(make_pool, size: int) -> None:
    make_pool(size, "nccl").run(check_graph)


@torch.jit.script
def scripted_layer(
    tokens: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, experts: int, ranks: int, group: str
) -> torch.Tensor:
    slot, source, _counts, _required, _overflow = torch.ops.transformer_plugin.plan(
        indices, experts, 8, 64, 1, ranks, group, False, -1
    )
    recv, recv_weights = torch.ops.transformer_plugin.dispatch(tokens, weights, slot, source, group, -1)
    rows = recv * recv_weights.unsqueeze(1)
    return torch.ops.transformer_plugin.combine(rows, slot, source, tokens.size(0), group, -1)


def check_scripted(rank: Rank) -> None:
    indices, tokens, weights = drawn_leaves(rank)
    args = (indices, CASE.experts(rank.size), rank.size, rank.group_name)
    output = scripted_layer(tokens, weights, *args)
    # One expert returns its input, so the output is the token times the sum of its weights.
    scale = (weights * (indices >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(output, tokens * scale)
    grads = torch.autograd.grad(output.sum(), (tokens, weights))
    torch.testing.assert_close(grads[0], scale.expand_as(tokens))
    torch.testing.assert_close(grads[1], tokens.sum(1, keepdim=True) * (indices >= 0))


def test_torchscript(pool: RankPool) -> None:
    pool.run(check_scripted)


def check_compiled_with_eager(rank: Rank) -> None:
    """One rank is compiled, the other is eager: they make the same calls, also if only one needs a gradient."""
    context = context_of(rank)
    indices, tokens, weights = drawn_leaves(rank)
    plan = context.plan(indices)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        recv, recv_weights = ep.dispatch(x, w, plan.slot, plan.source, rank.group_name, 60_000)
        rows = recv * recv_weights[:, None]
        return ep.combine(rows, plan.slot, plan.source, x.shape[0], rank.group_name, 60_000)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(tokens, weights).sum(), (tokens, weights))
    for who in range(2):
        run = compiled if rank.rank == who else step
        for got, each in zip(
            torch.autograd.grad(run(tokens, weights).sum(), (tokens, weights)), expected, strict=True
        ):
            assert_same_bits(got, each)
        for wants in range(2):
            mine = tokens if rank.rank == wants else tokens.detach()
            with pytest.raises(ValueError, match=r"the gradient of the rows is .*, (not )?needed on rank 1"):
                run(mine, weights)


def test_a_compiled_rank_with_an_eager_one(make_pool) -> None:
    make_pool(2).run(check_compiled_with_eager)
