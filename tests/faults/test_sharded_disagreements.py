"""Ranks that use sharded weights differently get an error in time, and never a payload that is another's (Gloo); so do
those whose peer is gone while they compare the largest magnitudes of their parts."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.test_expert_parallel_faults import leave
from transformer_plugin import nn as tnn
from transformer_plugin import ops, recipes
from transformer_plugin.errors import PeerTimeoutError, peer_errors
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank, RankPool

TIMEOUT = 2.0
PROMISE = TIMEOUT + 5.0


def model_of(group: Any, recipe: Any = None) -> Any:
    torch.manual_seed(0)
    layers = [tnn.Linear(16, 16, recipe=recipe, dtype=torch.bfloat16) for _ in range(3)]
    return shard_(torch.nn.Sequential(*layers), group, timeout_ms=int(1000 * TIMEOUT))


def skips_a_layer(model: Any, x: torch.Tensor, differs: bool) -> None:
    output = model[1](model[0](x))
    (output if differs else model[2](output)).sum().backward()


def freezes_a_layer(model: Any, x: torch.Tensor, differs: bool) -> None:
    model[1].weight.requires_grad_(not differs)
    model(x).sum().backward()
    model(x)


def evaluates(model: Any, x: torch.Tensor, differs: bool) -> None:
    with torch.set_grad_enabled(not differs):
        output = model(x)
    if not differs:
        output.sum().backward()
    model(x)


def changes_its_shard(model: Any, x: torch.Tensor, differs: bool) -> None:
    for _ in range(2):
        model(x)
    output = model[0](x)  # the next weight is gathered early
    if differs:
        with torch.no_grad():
            model[1].weight.add_(1)
    model[2](model[1](output))
    model(x)


def gathers_further_ahead(model: Any, x: torch.Tensor, differs: bool) -> None:
    ops.configure_gathers(model[0].parameter_shards["weight"].group.group_name, 2 if differs else 1)
    for _ in range(3):
        model(x).sum().backward()


PROGRAMS = [skips_a_layer, freezes_a_layer, evaluates, changes_its_shard, gathers_further_ahead]


def check_program(rank: Rank, number: int, recipe: Any) -> tuple[str, str, float]:
    group = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=20))
    model, x = model_of(group, recipe), torch.ones(16, 16, dtype=torch.bfloat16)
    model(x)
    dist.barrier()
    begin = time.monotonic()
    try:
        with peer_errors():
            PROGRAMS[number](model, x, rank.rank == 1)
    except (ValueError, PeerTimeoutError) as error:
        text = f"{error} {' '.join(getattr(error, '__notes__', []))}"
        return type(error).__name__, text, time.monotonic() - begin
    return "", "", time.monotonic() - begin


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["bf16", "fp8_tensor"])
def test_ranks_that_differ_are_told(recipe: Any) -> None:
    with RankPool(2) as pool:
        for number, program in enumerate(PROGRAMS):
            for kind, text, seconds in pool.run(check_program, number, recipe):
                about = f"{program.__name__} {kind} {seconds} {text}"
                assert kind == "ValueError" and seconds < PROMISE, about
                assert "expected the same call on all 2 ranks of group" in text, about
                assert "The weight is '" in text or "raised in the layer" in text, about


def lose(rank: Rank, how: str) -> tuple[Any, ...]:
    model = model_of(rank.group, recipes.Float8CurrentScaling())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(16, 16, dtype=torch.bfloat16)).sum().backward()
    dist.barrier()
    if rank.rank == 1:
        leave(how)
    begin = time.monotonic()
    try:
        optimizer.step()
    except PeerTimeoutError as error:
        return error.rank, error.op, str(error), time.monotonic() - begin
    return ()


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_rank_that_is_lost_in_a_step(how: str) -> None:
    with RankPool(3, group_timeout=60) as pool:
        pool.start(lose, how)
        for survivor in (0, 2):
            rank, op, text, seconds = pool.result(survivor)
            assert (rank, op) == (1, "all_gather"), text
            assert "The largest magnitudes of '0.weight'" in text, text
            assert seconds < PROMISE, text
        pool.kill(1)
        pool.dismiss()
