"""A rank that dies or stops before a tensor-parallel op, or its gradient: the others name it, in time (Gloo)."""

from __future__ import annotations

import pytest
import torch

from tests.faults.test_expert_parallel_faults import PROMISE, TIMEOUT, Outcome, leave, observe
from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool

VICTIM = 1
PHASES = (
    "all_gather",
    "reduce_scatter",
    "all_gather's gradient",
    "all_gather_list_out",
    "reduce_scatter_out",
    "vocab_parallel_cross_entropy",
)


def lose(rank: Rank, phase: str, how: str) -> Outcome:
    group = rank.size, rank.group_name, int(TIMEOUT * 1000)
    part = torch.full((3, 2), float(rank.rank), requires_grad=True)
    full = ops.all_gather(part, *group)
    action = {
        "all_gather": lambda: ops.all_gather(part, *group),
        "reduce_scatter": lambda: ops.reduce_scatter(full.detach(), *group),
        "all_gather's gradient": full.sum().backward,
        "all_gather_list_out": lambda: ops.all_gather_list_out([part.detach()], [full.detach()], *group),
        "reduce_scatter_out": lambda: ops.reduce_scatter_out(full.detach(), part.detach(), True, *group),
        "vocab_parallel_cross_entropy": lambda: ops.vocab_parallel_cross_entropy(
            part, torch.zeros(3, dtype=torch.int64), 6, rank.size, rank.group_name, timeout_ms=group[2]
        ),
    }[phase]
    if rank.rank == VICTIM:
        leave(how)
    return observe(action)


@pytest.mark.parametrize("how", ["dies", "stops"])
@pytest.mark.parametrize("phase", PHASES)
def test_lost_rank_is_named(phase: str, how: str) -> None:
    op = "reduce_scatter" if phase == "all_gather's gradient" else phase
    with RankPool(3) as pool:
        pool.start(lose, phase, how)
        for survivor in (0, 2):
            outcome = pool.result(survivor)
            assert outcome.error == "PeerTimeoutError", outcome
            assert (outcome.rank, outcome.ranks) == (VICTIM, (VICTIM,)), outcome
            assert (outcome.op, outcome.phase) == (op, "input"), outcome
            assert outcome.seconds < PROMISE, outcome
        pool.kill(VICTIM)
        pool.dismiss()
