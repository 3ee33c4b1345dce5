"""The gathers of the benchmark have the bytes of the whole weight."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.weight_gather import FORMATS, Gather
from transformer_plugin.testing.distributed import Rank, RankPool


def check(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(rank.rank)
    rows = torch.randn(256, 192, generator=generator).bfloat16()
    whole = rows.new_empty(256 * rank.size, 192)
    dist.all_gather_into_tensor(whole, rows)
    for key in FORMATS:
        gather = Gather(rank, rows, key)
        gather.check(whole)
        assert gather.bytes < 0.6 * whole.nbytes
        rows.mul_(1.5)
        whole.mul_(1.5)
        gather.check(whole)


def test_bytes() -> None:
    with RankPool(2) as pool:
        pool.run(check)
