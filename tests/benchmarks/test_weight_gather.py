"""The gathers of the benchmark have the bytes of the full weight."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.weight_gather import FORMATS, Gather
from transformer_plugin.testing.distributed import Rank, RankPool


def check(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(rank.rank)
    rows = torch.randn(256, 192, generator=generator).bfloat16()
    full = rows.new_empty(256 * rank.size, 192)
    dist.all_gather_into_tensor(full, rows)
    for key in FORMATS:
        gather = Gather(rank, rows, key)
        gather.check(full)
        assert gather.bytes < 0.6 * full.nbytes
        rows.mul_(1.5)
        full.mul_(1.5)
        gather.check(full)


def test_bytes() -> None:
    with RankPool(2) as pool:
        pool.run(check)
