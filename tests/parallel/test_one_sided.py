"""The transport "one_sided" on GPUs: the bits of "all_gather" in layers, in many exchanges of one channel with late
ranks and streams, and in replays of a CUDA graph with other routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_all_to_all import CONFIGS, check_layers, error_of
from transformer_plugin.parallel import EpContext, EpPlan
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

SIZES: dict[str, Any] = {"max_tokens_per_rank": 200, "hidden_dim": 264, "num_topk": 4}


@pytest.fixture
def two(make_pool: Any) -> RankPool:
    return make_pool(2, "nccl")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("recipe", ["none", "bf16", "fp8_block", "mxfp8", "nvfp4"])
def test_same_bits_as_all_gather(two: RankPool, recipe: str) -> None:
    for sizes in CONFIGS:
        for copies in (False, True):
            two.run(check_layers, recipe, sizes, copies, ("one_sided", "all_gather"))


def contexts(rank: Rank, **options: Any) -> list[EpContext]:
    sizes = {**SIZES, "num_experts": 8 * rank.size, **options}
    return [EpContext(rank.group, **sizes, transport=name) for name in ("one_sided", "all_gather")]


def draw(
    rank: Rank, seed: int, dtype: torch.dtype, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Indices, tokens, weights, and gradients of received rows and of what combine returns; other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
    tokens = (
        int(torch.randint(0, 201, (1,), generator=generator)) if seed % 4 else 200 * (rank.rank == seed % 2)
    )
    indices = torch.rand(tokens, 8 * rank.size, generator=generator).argsort(1)[:, :4]
    indices[torch.rand(tokens, 4, generator=generator) < 0.2] = -1
    if seed % 5 == 4:
        indices[:, 0] = 3  # one expert takes all
    shapes = [(tokens, 264), (tokens, 4), (rows, 264), (tokens, 264)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    x, weights, grad_rows, grad = drawn
    return tuple(
        each.to(rank.device) for each in (indices, x.to(dtype), weights, grad_rows.to(dtype), grad.to(dtype))
    )


def step(context: EpContext, plan: EpPlan, drawn: tuple[Tensor, ...], expand: bool) -> dict[str, Tensor]:
    """dispatch and combine with their gradients."""
    _, tokens, weights, grad_rows, grad = drawn
    x, w = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    recv, recv_weights = context.dispatch(plan, x, w, expand=expand)
    z = grad_rows[: len(recv)].clone().requires_grad_()
    out = context.combine(plan, z, expand=expand)
    grads = torch.autograd.grad(out, z, grad)
    of_weights = torch.linspace(-1, 1, len(recv_weights), device=w.device)
    more = torch.autograd.grad((recv, recv_weights), (x, w), (grad_rows[: len(recv)], of_weights))
    used = plan.source >= 0 if expand else torch.ones(len(recv), dtype=torch.bool, device=w.device)
    return {
        "recv": recv.detach()[used],
        "recv_weights": recv_weights.detach(),
        "out": out.detach(),
        "grad_rows": grads[0][used],
        "grad_tokens": more[0],
        "grad_weights": more[1],
    }


def check_many(rank: Rank, dtype: torch.dtype, count: int, options: dict[str, Any]) -> None:
    ours, peer = contexts(rank, **options)
    for seed in range(count):
        drawn = draw(rank, seed, dtype, max(ours.capacity, 400))
        if seed % 3 == rank.rank:  # this rank comes late
            torch.cuda._sleep(2_000_000)
        expand = seed % 2 == 0
        got_plan, plan = ours.plan(drawn[0]), peer.plan(drawn[0], compact=True)
        assert_same_bits(got_plan.tokens_per_expert, plan.tokens_per_expert)
        if plan.received is None:  # all tokens are received: other rows than those of a plan by records
            expand = True
        got, expected = step(ours, got_plan, drawn, expand), step(peer, plan, drawn, expand)
        for name in expected:
            assert_same_bits(got[name], expected[name], f"seed {seed}, {name}")
    for context in (ours, peer):
        context.finalize()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"capacity": 150, "overflow": "drop"}], ids=["all", "drops"])
def test_many_exchanges(two: RankPool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    two.run(check_many, dtype, 40, options)


def check_graph(rank: Rank) -> None:
    """Plan, dispatch and combine of one captured graph, replayed with other routings and numbers of tokens."""
    ours, peer = contexts(rank)
    indices, tokens, weights, rows, _ = draw(rank, 1, torch.bfloat16, ours.capacity)
    static = [
        torch.zeros(200, each.shape[1], dtype=each.dtype, device=rank.device)
        for each in (indices, tokens, weights)
    ]

    def call() -> tuple[EpPlan, Tensor, Tensor, Tensor]:
        plan = ours.plan(static[0])
        recv, recv_weights = ours.dispatch(plan, static[1], static[2])
        return plan, recv, recv_weights, ours.combine(plan, rows)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan, *outputs = call()
    for seed in range(2, 14):
        indices, tokens, weights, grad_rows, _ = draw(rank, seed, torch.bfloat16, ours.capacity)
        for buffer, values in zip(static, (indices, tokens, weights), strict=True):
            buffer.fill_(-1)[: len(values)] = values
        rows.copy_(grad_rows)
        if rank.rank == seed % 2:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        same = peer.plan(indices)
        for name in ("source", "tokens_per_expert", "required", "overflow"):
            got, expected = getattr(plan, name), getattr(same, name)
            if name == "source":  # other numbers of the same rows
                got, expected = got >= 0, expected >= 0
            assert_same_bits(got, expected, name)
        recv, recv_weights = peer.dispatch(same, tokens, weights)
        used = same.source >= 0
        assert_same_bits(outputs[0][used], recv[used])
        assert_same_bits(outputs[1], recv_weights)
        assert_same_bits(outputs[2][: len(tokens)], peer.combine(same, grad_rows))
        assert not outputs[2][len(tokens) :].any()


@pytest.mark.gpus(2)
def test_graph(two: RankPool) -> None:
    two.run(check_graph)


def check_streams(rank: Rank) -> None:
    """Calls on one stream and then another, which nothing else orders."""
    ours, peer = contexts(rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    made = []
    for seed in range(12):
        drawn = draw(rank, seed, torch.bfloat16, ours.capacity)
        torch.cuda.synchronize()
        for each in streams[seed % 2 :: 2]:
            with torch.cuda.stream(each):
                torch.cuda._sleep(500_000 * (1 + seed % 3))
        with torch.cuda.stream(streams[seed % 3]):
            plan = ours.plan(drawn[0])
        with torch.cuda.stream(streams[(seed + 1) % 3]):
            ours.plan(drawn[0])  # of which nothing is used
        streams[(seed + 2) % 3].wait_stream(streams[seed % 3])
        with torch.cuda.stream(streams[(seed + 2) % 3]):
            made.append((drawn, step(ours, plan, drawn, True)))
    torch.cuda.synchronize()
    for drawn, got in made:
        expected = step(peer, peer.plan(drawn[0]), drawn, True)
        for name in expected:
            assert_same_bits(got[name], expected[name], name)


@pytest.mark.gpus(2)
def test_streams_take_turns(two: RankPool) -> None:
    two.run(check_streams)


def check_refusals(rank: Rank) -> None:
    sizes = {**SIZES, "num_experts": 2 * rank.size}
    text = error_of(lambda: EpContext(rank.group, **sizes, transport="one_sided", device="cpu"))
    assert (
        "argument 'transport': expected ranks that reach each other's memory, got symmetric memory is of GPUs"
        in text
    )
    with EpContext(rank.group, **sizes, device="cpu") as context:
        assert context.transport == "all_gather"


def test_a_cpu_has_no_peer_memory(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_refusals)
