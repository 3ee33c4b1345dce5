"""TransformerEngine's names over a context: lifetime, buffers of the caller, and the text of errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parallel.test_ep_context import error_of
from tests.parallel.test_expert_parallel_gradients import CASE, drawn_leaves
from transformer_plugin.parallel import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
)
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def bootstrapped_buffer(rank: Rank) -> EpBuffer:
    experts = CASE.experts(rank.size)
    ep_bootstrap(
        rank.group, experts, CASE.max_tokens, CASE.hidden, CASE.topk, recv_capacity_per_rank=CASE.capacity
    )
    return EpBuffer(CASE.topk, CASE.max_tokens, CASE.hidden, CASE.local_experts, alignment=4)


def check_life(rank: Rank) -> None:
    assert not is_ep_bootstrapped()
    ep_finalize()
    buffer = bootstrapped_buffer(rank)
    assert is_ep_bootstrapped()
    assert error_of(lambda: bootstrapped_buffer(rank), RuntimeError) == (
        "transformer_plugin::ep_bootstrap: expected one call before ep_finalize(), got a second one. "
        "Call ep_finalize() first, or use EpContext objects for several configurations."
    )
    ep_finalize()
    ep_finalize()
    indices, _, _ = drawn_leaves(rank)
    assert error_of(lambda: ep_prepare(buffer, indices), RuntimeError) == (
        "transformer_plugin::EpContext: expected an open context, got one after finalize(). "
        "Make a new EpContext on every rank."
    )
    ep_bootstrap(rank.group, CASE.experts(rank.size), 8, 3, 2)  # now another configuration
    ep_finalize()


def check_calls(rank: Rank) -> None:
    buffer = bootstrapped_buffer(rank)
    indices, tokens, weights = drawn_leaves(rank)
    counts = ep_prepare(buffer, indices)
    assert all(count % 4 == 0 for count in counts.tolist())
    recv, recv_weights, again = ep_dispatch(buffer, tokens, indices, weights)
    assert again.tolist() == counts.tolist() and again is not counts
    assert buffer.total_recv_tokens.tolist() == [int(counts.sum())]
    output = ep_combine(buffer, recv * recv_weights[:, None])
    scale = (weights * (indices >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(output, tokens * scale)
    # Fewer and more rows than the number of dispatched tokens.
    longer = ep_combine(buffer, recv, num_local_tokens=CASE.max_tokens)
    assert longer.shape[0] == CASE.max_tokens and not longer[len(tokens) :].any()
    shorter = ep_combine(buffer, recv, num_local_tokens=3)
    assert_same_bits(shorter, longer[:3])
    (grad,) = torch.autograd.grad(shorter.sum(), recv)
    marks = torch.zeros_like(tokens)
    marks[:3] = 1
    firsts, _, _ = ep_dispatch(buffer, marks, indices, weights)
    if buffer.plan.received is None:  # then the rows name their tokens
        is_first = (buffer.plan.source >= 0) & (buffer.plan.source % CASE.max_tokens < 3)
        firsts = is_first.float()[:, None].expand_as(recv)
    assert firsts.any() and grad.tolist() == firsts.tolist()
    ep_finalize()


def check_callers_memory(rank: Rank) -> None:
    """Results and gradient in the caller's memory, twice; then the memory is overwritten."""
    buffer = bootstrapped_buffer(rank)
    indices, tokens, weights = drawn_leaves(rank)
    recv, recv_weights, _ = ep_dispatch(buffer, tokens, indices, weights)
    expected = torch.autograd.grad(
        ep_combine(buffer, recv * recv_weights[:, None]).sum(), (tokens, weights), retain_graph=True
    )
    memory = torch.full_like(recv, 7.0).detach()
    weight_memory = torch.full_like(recv_weights, 7.0).detach()
    grad_memory = torch.empty_like(memory)
    here, weights_here, _ = ep_dispatch(
        buffer, tokens, indices, weights, recv_tokens=memory, recv_topk_weights=weight_memory
    )
    assert here.data_ptr() == memory.data_ptr() and weights_here.data_ptr() == weight_memory.data_ptr()
    assert_same_bits(here, recv)
    assert_same_bits(weights_here, recv_weights)
    output = ep_combine(buffer, here * weights_here[:, None], grad_out=grad_memory)
    for _ in range(2):
        grad_memory.fill_(7.0)
        got = torch.autograd.grad(output.sum(), (tokens, weights), retain_graph=True)
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
        assert grad_memory.tolist() == (buffer.plan.source >= 0).float()[:, None].expand_as(memory).tolist()
    # After a later dispatch into the same memory, the earlier gradient raises an error instead of being wrong.
    ep_dispatch(buffer, tokens, indices, weights, recv_tokens=memory)
    text = error_of(lambda: torch.autograd.grad(output.sum(), (tokens, weights)), RuntimeError)
    assert "modified by an inplace operation" in text
    torch.distributed.barrier()
    ep_finalize()


def check_rows_in_use(rank: Rank) -> None:
    """Without a capacity an eager call returns the rows in use; with buffers of the caller the worst case."""
    ep_bootstrap(rank.group, CASE.experts(rank.size), CASE.max_tokens, CASE.hidden, CASE.topk)
    buffer = EpBuffer(CASE.topk, CASE.max_tokens, CASE.hidden, CASE.local_experts, alignment=4)
    indices, tokens, weights = drawn_leaves(rank)
    recv, recv_weights, counts = ep_dispatch(buffer, tokens, indices, weights)
    assert recv.shape == (int(counts.sum()), CASE.hidden) and recv_weights.shape == recv.shape[:1]
    output = ep_combine(buffer, recv * recv_weights[:, None])
    grads = torch.autograd.grad(output.sum(), (tokens, weights))
    memory = torch.full((buffer.recv_capacity_per_rank, CASE.hidden), 7.0, device=rank.device)
    assert len(memory) > len(recv)
    here, weights_here, _ = ep_dispatch(buffer, tokens, indices, weights, recv_tokens=memory)
    assert_same_bits(here[: len(recv)], recv)
    assert not here[len(recv) :].any()
    same = ep_combine(buffer, here * weights_here[:, None])
    assert_same_bits(same, output)
    for got, expected in zip(torch.autograd.grad(same.sum(), (tokens, weights)), grads, strict=True):
        assert_same_bits(got, expected)
    ep_finalize()


@pytest.mark.parametrize("check", [check_life, check_calls, check_callers_memory, check_rows_in_use])
def test_calls(pool: RankPool, check: Callable[[Rank], None]) -> None:
    pool.run(check)


def check_errors(rank: Rank) -> None:
    text = error_of(lambda: EpBuffer(2, 8, 3, 4), RuntimeError)
    assert text.startswith("transformer_plugin::EpBuffer: expected a call of ep_bootstrap() first, got none.")
    for option, kind in (({"zero_copy": True}, ValueError), ({"max_num_sms": 8.0}, TypeError)):
        assert "transformer_plugin::ep_bootstrap: argument" in error_of(
            lambda o=option: ep_bootstrap(rank.group, 4, 8, 3, 2, **o), kind
        )
    ep_bootstrap(rank.group, 4, 8, 3, 2)
    try:
        assert error_of(lambda: EpBuffer(3, 8, 3, 4)) == (
            "transformer_plugin::EpBuffer: argument 'top_k': expected 2, as in ep_bootstrap, got 3. "
            "Pass what the context was made for."
        )
        assert "argument 'alignment': expected 0, 1 or a power of two below 2^31, got 3" in error_of(
            lambda: EpBuffer(2, 8, 3, 4, alignment=3)
        )
        buffer = EpBuffer(2, 8, 3, 4)
        text = error_of(lambda: ep_combine(buffer, torch.zeros(16, 3)), RuntimeError)
        assert text.startswith("transformer_plugin::ep_combine: expected a buffer after ep_prepare()")
        tokens, indices, weights = torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2)
        assert error_of(lambda: ep_dispatch(buffer, tokens, indices, weights.half()), TypeError) == (
            "transformer_plugin::ep_dispatch: argument 'topk_weights': expected float32, got float16. "
            "Convert it with .float() first."
        )
        assert error_of(lambda: ep_dispatch(buffer, tokens[:4], indices, weights)) == (
            "transformer_plugin::ep_dispatch: argument 'topk_weights': expected tokens [T, H], topk_idx [T, K] and "
            "topk_weights [T, K], got (4, 3), (5, 2) and (5, 2). Pass the same tokens in all three."
        )
        good = torch.zeros(16, 3)
        for bad in (good[:8], good.t().contiguous().t(), good.clone().requires_grad_()):
            assert "argument 'recv_tokens'" in error_of(
                lambda b=bad: ep_dispatch(buffer, tokens, indices, weights, recv_tokens=b)
            )
        assert "argument 'recv_tokens': expected float32, got float16" in error_of(
            lambda: ep_dispatch(buffer, tokens, indices, weights, recv_tokens=good.half()), TypeError
        )
        ep_prepare(buffer, indices)
        assert "argument 'grad_out'" in error_of(lambda: ep_combine(buffer, good, grad_out=torch.zeros(3, 3)))
    finally:
        ep_finalize()


def test_errors(make_pool) -> None:
    make_pool(1).run(check_errors)
