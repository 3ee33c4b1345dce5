"""A rank that fails ends its pool at once, and the next call finds new ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from transformer_plugin.testing import distributed
from transformer_plugin.testing.distributed import Rank, RankError, RankPool


def fail(rank: Rank, how: str) -> None:
    if rank.rank == 1 and how == "raises":
        raise ArithmeticError("a text")
    if rank.rank == 1:
        os._exit(3)
    dist.barrier()


def raise_everywhere(rank: Rank) -> None:
    time.sleep(0.05 * rank.rank)
    raise ArithmeticError(f"a text of rank {rank.rank}")


def add_ranks(rank: Rank) -> tuple[int, int, bool]:
    """The process, a sum over the group, and whether this process was prepared."""
    every: list[int] = [0] * rank.size
    dist.all_gather_object(every, rank.rank + 1)
    return os.getpid(), sum(every), "PREPARED" in os.environ


def prepare(rank: Rank) -> None:
    os.environ["PREPARED"] = "1"


def test_others_do_not_wait_for_a_failed_rank() -> None:
    with RankPool(3, prepare=prepare) as pool:
        before = pool.run(add_ranks)
        for how, text in (("raises", "rank 1 raised:\n.*a text"), ("exits", "rank 1 exited with code 3")):
            begun = time.monotonic()
            with pytest.raises(RankError, match=f"(?s){text}"):
                pool.run(fail, how)
            assert time.monotonic() - begun < 40.0, how  # and not the 120 s of the group
            after = pool.run(add_ranks)
            assert [total for _, total, _ in after] == [6, 6, 6]
            assert all(prepared for _, _, prepared in after), "new processes are prepared, too"
            assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}
            before = after


def test_ended_ranks_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(late_failure)
        assert "rank 1 raised" in str(caught.value)
        assert "rank 0 was ended, as rank 1 had failed" in str(caught.value)
        with monkeypatch.context() as longer, pytest.raises(RankError, match=r"(?s)of rank 0.*of rank 1"):
            longer.setattr(distributed, "_GRACE", 60.0)
            pool.run(raise_everywhere)
        with pytest.raises(RankError, match=r"rank 0 did not answer within 0\.5 s"):
            pool.run(time_passes, timeout=0.5)
        assert pool.run(add_ranks)[0][1] == 3


def late_failure(rank: Rank) -> None:
    if rank.rank == 1:
        raise ArithmeticError
    time.sleep(60)


def time_passes(rank: Rank) -> None:
    time.sleep(60)


def test_the_fixture_has_working_ranks_after_a_failure(pair: RankPool) -> None:
    with pytest.raises(RankError, match="a text"):
        pair.run(fail, "raises")


def test_and_in_the_next_test(pair: RankPool) -> None:
    assert [total for _, total, _ in pair.run(add_ranks)] == [3, 3]
