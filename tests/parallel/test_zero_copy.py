"""Results in symmetric memory, into which other ranks store rows, and ranks that make different calls: between
processes that share one GPU, with the bits of "all_gather" on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.one_sided_cases import SIZES, Setup, assert_all_same, come_late, draw, step
from tests.parallel.test_ep_context import error_of
from transformer_plugin.ops import is_symmetric
from transformer_plugin.parallel import (
    EpBuffer,
    EpContext,
    SymmetricPool,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_symm_backed,
    symm_mem_alloc,
)
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

ON_ONE_GPU = Setup("one_sided", "cuda:0", "cpu")
CAPACITY, LOCAL, ALIGNMENT = 300, 8, 4
MakePool = Callable[[int, str], RankPool]


def started(rank: Rank, **options: Any) -> tuple[Rank, EpBuffer, EpContext]:
    """The rank on its GPU, a buffer of TransformerEngine's functions, and the context of what is expected."""
    rank = ON_ONE_GPU.place(rank)
    experts, sizes = LOCAL * rank.size, tuple(SIZES.values())
    given = {"drop_on_overflow": True, "max_token_dtype": torch.float32, "device": rank.device, **options}
    ep_bootstrap(rank.group, experts, *sizes, recv_capacity_per_rank=CAPACITY, zero_copy=True, **given)
    buffer = EpBuffer(
        SIZES["num_topk"], SIZES["max_tokens_per_rank"], SIZES["hidden_dim"], LOCAL, alignment=ALIGNMENT
    )
    common = {"capacity": CAPACITY, "alignment": ALIGNMENT, "overflow": "drop", "device": "cpu"}
    return rank, buffer, EpContext(rank.group, num_experts=experts, transport="all_gather", **SIZES, **common)


def exchange(buffer: EpBuffer, drawn: Any, targets: tuple[Tensor | None, Tensor | None]) -> dict[str, Tensor]:
    """What step() returns, by TransformerEngine's functions with these tensors for rows and their gradient."""
    x, w = drawn.tokens.clone().requires_grad_(), drawn.weights.clone().requires_grad_()
    recv, recv_weights, _ = ep_dispatch(buffer, x, drawn.indices, w, recv_tokens=targets[0])
    rows = drawn.grad_rows[:CAPACITY]
    z = rows.clone().requires_grad_()
    out = ep_combine(buffer, z, grad_out=targets[1])
    (grad_rows,) = torch.autograd.grad(out, z, drawn.grad)
    grads = torch.autograd.grad((recv, recv_weights), (x, w), (rows, drawn.grad_weights))
    return {
        "recv": recv.detach(),
        "recv_weights": recv_weights.detach(),
        "out": out.detach(),
        "grad_rows": grad_rows,
        "grad_tokens": grads[0],
        "grad_weights": grads[1],
    }


def check_results(rank: Rank, count: int) -> None:
    """Each rank, for each of both results and in each exchange anew: a tensor of the pool, an ordinary one, or none."""
    rank, buffer, peer = started(rank)
    shape = (CAPACITY, SIZES["hidden_dim"])
    for seed in range(count):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        drawn = draw(rank, peer, seed, dtype)
        mine = drawn.to(rank.device)
        kinds = [(seed * (5 + 2 * i) + rank.rank * (seed % 3)) % 3 for i in range(2)]
        targets = []
        for kind in kinds:
            target = None
            if kind == 0:
                target = symm_mem_alloc(shape, dtype, rank.group, use_pool=True)
            elif kind == 1:
                target = torch.empty(shape, dtype=dtype, device=rank.device)
            if target is not None:
                assert is_symm_backed(target) == (kind == 0) and is_symm_backed(target[3:, 1:]) == (kind == 0)
                target.fill_(float("nan"))
            targets.append(target)
        if seed % (rank.size + 1) == rank.rank:
            come_late(rank)
        got = exchange(buffer, mine, (targets[0], targets[1]))
        for target, name in zip(targets, ("recv", "grad_rows"), strict=True):
            assert target is None or got[name].data_ptr() == target.data_ptr()
            assert is_symmetric(got[name]) == (target is None or is_symmetric(target))
        expected = step(peer, peer.plan(drawn.indices), drawn, True)
        assert_all_same(got, expected, f"seed {seed}")
        for name in ("recv", "grad_rows"):  # rows without a token too
            assert_same_bits(got[name].cpu(), expected[name], f"seed {seed}, all of {name}")
        del got, targets, target
    ep_finalize()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_results_in_symmetric_memory(make_pool: MakePool, size: int) -> None:
    make_pool(size, "gloo").run(check_results, 24)


def check_pool(rank: Rank) -> None:
    """A pool without room: later results are ordinary tensors, and right."""
    row = SIZES["hidden_dim"] * 4
    rank, buffer, peer = started(rank, symm_mem_pool_bytes=2 * (CAPACITY * row + 256))
    held, expected = [], []
    for seed in range(2, 5):
        drawn = draw(rank, peer, seed, torch.float32)
        mine = drawn.to(rank.device)
        held.append(ep_dispatch(buffer, mine.tokens, mine.indices, mine.weights)[0])
        expected.append(peer.dispatch(peer.plan(drawn.indices), drawn.tokens, drawn.weights)[0])
    assert [is_symm_backed(each) for each in held] == [True, True, False]
    for got, of_peer in zip(held, expected, strict=True):
        assert_same_bits(got.cpu(), of_peer)
    shape = (CAPACITY, SIZES["hidden_dim"])
    text = error_of(lambda: symm_mem_alloc(shape, torch.float32, rank.group, use_pool=True))
    assert "symmetric_empty: argument 'num_bytes': expected at most the" in text
    del held, got
    assert is_symm_backed(symm_mem_alloc(shape, torch.float32, rank.group, use_pool=True))
    ep_finalize()
    text = error_of(lambda: symm_mem_alloc(shape, torch.float32, rank.group, use_pool=True), RuntimeError)
    assert "expected a call of ep_bootstrap(zero_copy=True) for this group first" in text


@pytest.mark.gpu
def test_pool_without_room(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_pool)


def check_overwritten(rank: Rank) -> None:
    """Rows that a backward still needs, in memory that a later dispatch fills: torch's error, and no wrong gradient."""
    rank, buffer, peer = started(rank)
    target = symm_mem_alloc((CAPACITY, SIZES["hidden_dim"]), torch.float32, rank.group, rank.device)
    drawn = draw(rank, peer, 3, torch.float32).to(rank.device)
    x = drawn.tokens.clone().requires_grad_()
    first, *_ = ep_dispatch(buffer, x, drawn.indices, drawn.weights, recv_tokens=target)
    loss = first.square().sum()
    second, *_ = ep_dispatch(buffer, x, drawn.indices, drawn.weights, recv_tokens=target)
    assert "modified by an inplace operation" in error_of(loss.backward, RuntimeError)
    second.square().sum().backward()
    assert x.grad is not None
    ep_finalize()


@pytest.mark.gpu
def test_overwritten_rows_are_an_error(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_overwritten)


def check_graph_of_results(rank: Rank) -> None:
    """A captured graph with results in symmetric memory, replayed with other routing and numbers of tokens."""
    rank, buffer, peer = started(rank)
    most, topk = SIZES["max_tokens_per_rank"], SIZES["num_topk"]
    target = symm_mem_alloc((CAPACITY, SIZES["hidden_dim"]), torch.bfloat16, rank.group, rank.device)
    tokens = torch.zeros(most, SIZES["hidden_dim"], dtype=torch.bfloat16, device=rank.device)
    indices = torch.full((most, topk), -1, device=rank.device)
    weights = torch.zeros(most, topk, device=rank.device)

    def call() -> Tensor:
        recv, *_ = ep_dispatch(buffer, tokens, indices, weights, recv_tokens=target)
        return ep_combine(buffer, recv)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    for seed in range(2, 10):
        drawn = draw(rank, peer, seed, torch.bfloat16)
        count = len(drawn.tokens)
        for buffer_of, values in ((tokens, drawn.tokens), (indices, drawn.indices), (weights, drawn.weights)):
            buffer_of.fill_(-1 if buffer_of is indices else 0)[:count] = values.to(rank.device)
        if rank.rank == seed % rank.size:
            come_late(rank)
        graph.replay()
        plan = peer.plan(drawn.indices)
        recv, _ = peer.dispatch(plan, drawn.tokens, drawn.weights)
        assert_same_bits(target.cpu(), recv, f"seed {seed}")
        assert_same_bits(out[:count].cpu(), peer.combine(plan, recv), f"seed {seed}")
    ep_finalize()


@pytest.mark.gpu
def test_graph_of_results_in_symmetric_memory(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_graph_of_results)


def check_different_calls(rank: Rank) -> None:
    """One rank combines while the other dispatches: both learn it from the exchange, at their next call."""
    rank, buffer, peer = started(rank)
    drawn = draw(rank, peer, 3, torch.float32).to(rank.device)
    recv, *_ = ep_dispatch(buffer, drawn.tokens, drawn.indices, drawn.weights)
    ep_combine(buffer, recv)
    ep_prepare(buffer, drawn.indices)
    context, plan = buffer._context, buffer.prepared("test")
    if rank.rank == 0:
        context.dispatch(plan, drawn.tokens, drawn.weights)
    else:
        context.combine(plan, recv)
    torch.cuda.synchronize()
    text = error_of(lambda: context.combine(plan, recv))
    assert "expected the same calls in the same order on every rank, got" in text
    own, other = ("dispatch (tokens)", "combine (rows)")[:: 1 - 2 * rank.rank]
    assert f"{own} with records of" in text and f"bytes on rank {rank.rank} and {other}" in text
    assert f"on rank {1 - rank.rank}, in an earlier call" in text
    text = error_of(lambda: context.dispatch(plan, drawn.tokens))
    assert "the channel cannot be used again" in text
    ep_finalize()


@pytest.mark.gpu
def test_different_calls_are_errors(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_different_calls)


def check_one_rank(rank: Rank) -> None:
    pool = SymmetricPool(rank.group, 4096, device=rank.device)
    taken = pool.empty((3, 5), torch.float32)
    assert taken.shape == (3, 5) and is_symmetric(taken[1]) and not is_symmetric(taken.clone())
    again = pool.empty((7,), torch.bfloat16)
    assert again.data_ptr() - taken.data_ptr() == 256
    del taken
    assert pool.empty((64,), torch.float32).data_ptr() + 256 == again.data_ptr()
    text = error_of(lambda: pool.empty((4096,), torch.uint8))
    assert (
        "symmetric_empty: argument 'num_bytes': expected at most the 3584 bytes that are free in one piece"
        in text
    )
    kept = again.view(-1)[2:]
    del again
    assert pool.empty((1,), torch.uint8).data_ptr() < kept.data_ptr()


def test_pool_of_one_rank(make_pool: MakePool) -> None:
    make_pool(1, "gloo").run(check_one_rank)


def check_refusals(rank: Rank) -> None:
    text = error_of(lambda: SymmetricPool(rank.group, 64, device="cpu"))
    assert (
        "argument 'group': expected ranks that reach each other's memory, got symmetric memory is of GPUs"
        in text
    )
    text = error_of(lambda: ep_bootstrap(rank.group, 4, 8, 16, 2, zero_copy=True))
    assert "argument 'recv_capacity_per_rank': expected a number with zero_copy, got None" in text
    text = error_of(lambda: ep_bootstrap(rank.group, 4, 8, 16, 2, 32, zero_copy=True, device="cpu"))
    assert "argument 'transport': expected ranks that reach each other's memory" in text
    text = error_of(lambda: symm_mem_alloc((3,), torch.float32, rank.group, backend="NCCL"))
    assert "argument 'backend': expected \"CUDA\", got 'NCCL'" in text
    text = error_of(lambda: SymmetricPool(rank.group, 0, device="cpu"))
    assert "symmetric_allocate: argument 'num_bytes': expected from 1 to 2^40, got 0" in text


def test_refusals(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_refusals)
