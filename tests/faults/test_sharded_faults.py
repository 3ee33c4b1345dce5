"""A rank that dies or stops while others gather its part of a weight, or add gradients: the others name it, and the
weight, in time (Gloo)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.faults.test_expert_parallel_faults import PROMISE, TIMEOUT, leave
from transformer_plugin import nn as tnn
from transformer_plugin.errors import PeerTimeoutError, peer_errors
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank, RankPool

VICTIM = 1


class Experts(torch.nn.Module):
    """Experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = tnn.GroupedLinear(2, 8, 6, parameters="list")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(input, [1, 3])
        return output


def lose(rank: Rank, phase: str, how: str, experts: bool = False) -> tuple[Any, ...]:
    import time

    torch.manual_seed(0)
    model = Experts() if experts else torch.nn.Sequential(tnn.Linear(8, 12), tnn.Linear(12, 6))
    shard_(model, rank.group, timeout_ms=int(TIMEOUT * 1000))
    input = torch.randn(4, 8, requires_grad=True)
    output = model(input).sum() if phase == "backward" else None
    if rank.rank == VICTIM:
        leave(how)
    begin = time.monotonic()
    try:
        with peer_errors():
            model(input) if output is None else output.backward()
    except PeerTimeoutError as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return error.rank, error.op, f"{error} {notes}", time.monotonic() - begin
    return ()


@pytest.mark.parametrize("how", ["dies", "stops"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("experts", [False, True])
def test_lost_rank_and_weight_are_named(phase: str, how: str, experts: bool) -> None:
    name, op = ("0.weight", "gather_weight") if phase == "forward" else ("1.weight", "reduce_scatter_out")
    name = "layer.weight*" if experts else name
    with RankPool(3) as pool:
        pool.start(lose, phase, how, experts)
        for survivor in (0, 2):
            rank, of, text, seconds = pool.result(survivor)
            assert rank == VICTIM, text
            assert of in (op, "gather_weight"), text
            assert f"The weight is '{name}'." in text, text
            assert seconds < PROMISE, text
        pool.kill(VICTIM)
        pool.dismiss()
