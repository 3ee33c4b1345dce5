"""A rank that exits or stops while another gathers its part of a weight, over NCCL: the other ends in time, and its
last line names op, rank and weight."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.faults.test_expert_parallel_faults import leave
from tests.faults.test_expert_parallel_faults_gpu import TIMEOUT, VICTIM, redirect_stderr
from transformer_plugin import nn as tnn
from transformer_plugin.parallel import shard_
from transformer_plugin.testing.distributed import Rank, RankPool


def lose(rank: Rank, phase: str, how: str, path: str) -> None:
    redirect_stderr(path, rank)
    options = {"device": rank.device, "dtype": torch.bfloat16}
    model = torch.nn.Sequential(tnn.Linear(64, 64, **options), tnn.Linear(64, 64, **options))  # type: ignore[arg-type]
    shard_(model, rank.group, timeout_ms=int(TIMEOUT * 1000), prefetch=0)
    input = torch.zeros(16, 64, requires_grad=True, **options)  # type: ignore[call-overload]

    def step() -> None:
        model(input).sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if phase == "graph":
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        graph.replay()
    torch.cuda.synchronize()
    if rank.rank == VICTIM:
        leave(how)
    Path(f"{path}.begun").write_text(str(time.time()))
    if phase == "graph":
        graph.replay()
    else:
        step()
    torch.cuda.synchronize()  # never returns


@pytest.mark.gpus(2)
@pytest.mark.parametrize("how", ["dies", "stops"])
@pytest.mark.parametrize("phase", ["eager", "graph"])
def test_survivors_end_in_time_with_the_weight(tmp_path: Path, phase: str, how: str) -> None:
    path = str(tmp_path / "stderr")
    with RankPool(2, "nccl", group_timeout=600) as pool:
        pool.start(lose, phase, how, path)
        code = pool.wait(1 - VICTIM, 120)
        ended = time.time()
        words = Path(f"{path}.{1 - VICTIM}").read_text()
        assert code == 1, (code, words)
        assert ended - float(Path(f"{path}.begun").read_text()) < TIMEOUT + 5.0, words
        assert "PeerTimeoutError: transformer_plugin::gather_weight: phase '" in words, words
        assert f"rank(s) {VICTIM} did not take part. This is rank {1 - VICTIM};" in words, words
        assert "The weight is '0.weight'." in words, words
