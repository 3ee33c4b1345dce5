"""A rank that exits or stops, over NCCL: every other process exits in time, and its last line names op and rank."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.faults.test_expert_parallel_faults import leave
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.parallel.expert import Transport
from transformer_plugin.testing.distributed import Rank, RankPool

TIMEOUT = 4.0
#: The least timeout of the first call on a group, because NCCL connects in it.
FIRST_CALL = 30.0
VICTIM = 1


def redirect_stderr(path: str, rank: Rank) -> None:
    """Redirects this process's stderr to a file, also for output at exit."""
    file = os.open(f"{path}.{rank.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)


def lose_in_phase(rank: Rank, phase: str, how: str, path: str, transport: Transport = "auto") -> None:
    redirect_stderr(path, rank)
    sizes = {"num_experts": 4, "max_tokens_per_rank": 6, "hidden_dim": 8, "num_topk": 2}
    context = EpContext(rank.group, **sizes, timeout=TIMEOUT, transport=transport)
    indices = torch.tensor([[0, 2], [1, 3]], device=rank.device)
    tokens = torch.randn(2, 8, device=rank.device, requires_grad=True)

    def step() -> None:
        plan = context.plan(indices)
        recv, _ = context.dispatch(plan, tokens)
        context.combine(plan, recv).sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if phase == "graph":
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    plan = context.plan(indices)
    recv, _ = context.dispatch(plan, tokens)
    torch.cuda.synchronize()
    if rank.rank == VICTIM:
        leave(how)
    Path(f"{path}.begun").write_text(str(time.time()))
    if phase == "graph":
        graph.replay()
    elif phase == "plan":
        context.plan(indices)
    elif phase == "dispatch":
        context.dispatch(plan, tokens)
    else:
        context.combine(plan, recv)
    torch.cuda.synchronize()  # never returns


def lose_before_the_first_call(rank: Rank, phase: str, how: str, path: str) -> None:
    """Before the first call is enqueued, the ranks compare it on the host, where an error can be caught."""
    redirect_stderr(path, rank)
    if rank.rank == VICTIM:
        leave(how)
    Path(f"{path}.begun").write_text(str(time.time()))
    indices = torch.zeros(2, 2, dtype=torch.int32, device=rank.device)
    try:
        ep.plan(indices, 4, 2, 8, 1, rank.size, rank.group_name, timeout_ms=int(TIMEOUT * 1000))
    except torch.distributed.DistError as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


LOST = [
    *product(("all_gather", "one_sided"), ("plan", "dispatch", "combine", "graph"), ("dies", "stops")),
    ("auto", "first-call", "stops"),  # of an op, which has no transport
]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("transport", "phase", "how"), LOST)
def test_survivors_end_in_time_with_the_name(
    tmp_path: Path, transport: Transport, phase: str, how: str
) -> None:
    path = str(tmp_path / "stderr")
    is_first = phase == "first-call"
    function = lose_before_the_first_call if is_first else partial(lose_in_phase, transport=transport)
    with RankPool(2, "nccl", group_timeout=600) as pool:
        pool.start(function, phase, how, path)
        code = pool.wait(1 - VICTIM, 120)
        ended = time.time()
        words = Path(f"{path}.{1 - VICTIM}").read_text()
        assert code == 1, (code, words)
        assert Path(f"{path}.begun").exists(), f"ended before the peer was lost: {words}"
        begun = float(Path(f"{path}.begun").read_text())
        limit = FIRST_CALL if is_first else TIMEOUT
        assert ended - begun < limit + 5.0, words
        op = "plan" if phase in ("graph", "first-call") else phase
        if op == "plan" and transport == "one_sided":
            op = "compact_plan"
        assert f"PeerTimeoutError: transformer_plugin::{op}: phase '" in words, words
        assert f"rank(s) {VICTIM} did not take part. This is rank {1 - VICTIM};" in words, words


def disagree(rank: Rank) -> list[str]:
    """A kind of call that is new on both ranks is compared before it is enqueued; the group stays usable."""
    context = EpContext(
        rank.group, num_experts=4, max_tokens_per_rank=6, hidden_dim=8, num_topk=2, timeout=TIMEOUT
    )
    indices = torch.tensor([[0, 2], [1, 3]], device=rank.device)
    weights = torch.rand(2, 2, device=rank.device)
    plan = context.plan(indices)
    texts = []
    me = rank.rank
    for dtype, given, wanted in (
        ((torch.float32, torch.bfloat16)[me], True, True),
        (torch.float16, me == 0, True),
        (torch.float16, True, me == 0),
    ):
        tokens = torch.ones(2, 8, device=rank.device, dtype=dtype, requires_grad=wanted)
        try:
            context.dispatch(plan, tokens, weights if given else None)
        except ValueError as error:
            texts.append(str(error))
    tokens = torch.ones(2, 8, device=rank.device, requires_grad=True)
    context.dispatch(plan, tokens, weights)[0].sum().backward()
    texts.append(str(tokens.grad.sum().item()))
    return texts


@pytest.mark.gpus(2)
def test_ranks_that_disagree_raise_before_anything_is_queued() -> None:
    with RankPool(2, "nccl") as pool:
        for texts in pool.run(disagree):
            assert len(texts) == 4, texts
            assert "dtype is float32 on rank 0, bfloat16 on rank 1" in texts[0]
            assert "topk_weights is given on rank 0, None on rank 1" in texts[1]
            assert "the gradient of the rows is needed on rank 0, not needed on rank 1" in texts[2]
            assert texts[3] == "32.0"


def new_here_known_there(rank: Rank, path: str) -> str:
    redirect_stderr(path, rank)
    context = EpContext(
        rank.group, num_experts=4, max_tokens_per_rank=6, hidden_dim=8, num_topk=2, timeout=TIMEOUT
    )
    plan = context.plan(torch.tensor([[0, 2], [1, 3]], device=rank.device))
    tokens = torch.ones(2, 8, device=rank.device)
    context.dispatch(plan, tokens)
    torch.cuda.synchronize()
    try:
        context.dispatch(plan, tokens if rank.rank else tokens.half())
        torch.cuda.synchronize()  # rank 1 never returns
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.gpus(2)
def test_a_kind_of_call_that_is_new_on_one_rank_only(tmp_path: Path) -> None:
    path = str(tmp_path / "stderr")
    with RankPool(2, "nccl", group_timeout=600) as pool:
        pool.start(new_here_known_there, path)
        text = pool.result(0, 60)
        assert "transformer_plugin::dispatch: phase 'tokens'" in text, text
        assert pool.wait(1, 60) == 1
        words = Path(f"{path}.1").read_text()
        assert "PeerTimeoutError: transformer_plugin::dispatch: phase 'tokens'" in words, words


def late(rank: Rank) -> list[int]:
    context = EpContext(
        rank.group, num_experts=2, max_tokens_per_rank=3, hidden_dim=8, num_topk=1, timeout=20
    )
    if rank.rank == VICTIM:
        time.sleep(3)
    plan = context.plan(torch.zeros(3, 1, dtype=torch.int32, device=rank.device))
    return plan.tokens_per_expert.tolist()


@pytest.mark.gpus(2)
def test_a_late_rank_is_waited_for() -> None:
    with RankPool(2, "nccl") as pool:
        assert pool.run(late) == [[6], [0]]
        pool.dismiss()
        assert [pool.wait(rank) for rank in range(2)] == [0, 0]
