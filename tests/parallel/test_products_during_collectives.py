"""Grouped products during an all-reduce on another stream: the same bits as alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ops.grouped_products import END, FAMILIES, assert_all_same
from transformer_plugin.testing.distributed import Rank, RankPool


def products_during_an_all_reduce(rank: Rank, family: str) -> None:
    on_cuda = rank.device.type == "cuda"
    stream = torch.cuda.Stream() if on_cuda else None
    reduced = torch.ones(2**26 if on_cuda else 2**18, device=rank.device)
    for name, product in FAMILIES[family](END + 5, rank.device).items():
        first = product()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        results, works = [], []
        for i in range(100 if on_cuda else 3):
            if i % 4 == 0:
                with torch.cuda.stream(stream):
                    works.append(dist.all_reduce(reduced, dist.ReduceOp.MAX, async_op=True))
            results.append(product())
        for work in works:
            work.wait()
        if on_cuda:
            torch.cuda.synchronize()
        assert (reduced == 1).all()
        assert_all_same(results, first, name)


def test_same_bits(pair: RankPool) -> None:
    for family in FAMILIES:
        pair.run(products_during_an_all_reduce, family)
