"""A rank that exits before a function waits for it the first time, over NCCL: the other names it, and the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.faults.test_expert_parallel_faults import Outcome, leave, observe
from transformer_plugin import nn as tnn
from transformer_plugin import ops, recipes
from transformer_plugin.parallel import clip_grad_norm_
from transformer_plugin.testing.distributed import Rank, RankPool

VICTIM, TIMEOUT = 1, 8.0


def clip(rank: Rank) -> Callable[[], Any]:
    model = tnn.Linear(16, 16, parallel_mode="column", tp_group=rank.group, device=rank.device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return lambda: clip_grad_norm_(model, 1.0)


def reduce_amax(rank: Rank) -> Callable[[], Any]:
    model = tnn.Linear(16, 16, recipe=recipes.DelayedScaling(), device=rank.device)
    return lambda: tnn.reduce_amax(model, rank.group)


def delayed(rank: Rank) -> Callable[[], Any]:
    model = tnn.Linear(16, 16, recipe=recipes.DelayedScaling(amax_group=rank.group), device=rank.device)
    return lambda: model(torch.ones(16, 16, device=rank.device))


ACTIONS = {
    "clip_grad_norm_": (clip, "norms"),
    "reduce_amax": (reduce_amax, "amaxes"),
    "update_delayed_scale_": (delayed, "amax"),
}


def lose(rank: Rank, name: str) -> Outcome:
    action = ACTIONS[name][0](rank)
    ops.all_gather(torch.ones(3, 5, device=rank.device), rank.size, rank.group_name)  # makes the communicator
    torch.cuda.synchronize()
    if rank.rank == VICTIM:
        leave("dies")
    return observe(action)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ACTIONS)
def test_the_function_and_the_lost_rank_are_named(name: str) -> None:
    with RankPool(2, "nccl", group_timeout=TIMEOUT) as pool:
        pool.start(lose, name)
        outcome = pool.result(1 - VICTIM, 120)
        pool.kill(1 - VICTIM)
    assert outcome.error == "PeerTimeoutError", outcome
    assert (outcome.op, outcome.phase, outcome.ranks) == (name, ACTIONS[name][1], (VICTIM,)), outcome
    assert outcome.seconds < TIMEOUT + 5.0, outcome
