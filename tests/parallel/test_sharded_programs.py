"""Any program gives what it gives with full weights: weights used more than once, in another order, frozen, or unused;
errors in a forward or a backward; recomputed activations, micro-batches, changes while weights are gathered early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.sharded_programs import run_program
from transformer_plugin.testing.distributed import Rank, RankPool


def check_programs(rank: Rank, first: int, count: int) -> None:
    for seed in range(first, first + count):
        run_program(rank, 1000 * rank.size + seed)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 2), (4, 2)])
def test_random_programs(make_pool: Any, ranks: int, count: int) -> None:
    pool: RankPool = make_pool(ranks)
    pool.run(check_programs, 0, count)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_random_programs(make_pool: Any, ranks: int) -> None:
    pool: RankPool = make_pool(ranks)
    pool.run(check_programs, 2, 5)
    pool.run(check_programs, 100, 40, timeout=280)
