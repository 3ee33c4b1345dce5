"""Groups that are destroyed and created again under the same name, with other ranks or another size."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from transformer_plugin.errors import PeerTimeoutError
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank, RankPool

SIZES = {"num_experts": 12, "max_tokens_per_rank": 2, "hidden_dim": 3, "num_topk": 1, "timeout": 20.0}


def remake(store: dist.Store, name: str, rank: int, size: int) -> str:
    """Creates the world group again; returns its c10d name, which is the old group's."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def exchange(name: str, rank: int, size: int) -> None:
    """Sends two tokens of each rank to the first expert of the next rank, through the ops alone."""
    experts = 12
    to = (rank + 1) % size * (experts // size)
    indices = torch.full((2, 1), to, dtype=torch.int32)
    plan = ep.plan(indices, experts, 2, 2 * size, 1, size, name, timeout_ms=20_000)
    tokens = torch.full((2, 3), float(rank), requires_grad=True)
    recv, _ = ep.dispatch(tokens, None, plan.slot, plan.source, name, 20_000)
    expected = torch.zeros(2 * size, 3)
    expected[:2] = (rank - 1) % size
    assert torch.equal(recv, expected), (rank, size, recv)
    output = ep.combine(recv * 2, plan.slot, plan.source, 2, name, 20_000)
    assert torch.equal(output, 2 * tokens)
    output.sum().backward()
    assert torch.equal(tokens.grad, torch.full((2, 3), 2.0))


def check_recreated(rank: Rank, with_context: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    names = set()
    # (ranks of the two processes, size); None: the process is not in the group.
    worlds = [(0, 1), (1, 0), (0, None), (1, 0), (None, 0), (0, 1)]
    for number, places in enumerate(worlds):
        place = places[rank.rank]
        if place is None:
            continue
        size = sum(each is not None for each in places)
        name = remake(store, f"world-{number}-{size}", place, size)
        names.add(name)
        if with_context:
            with EpContext(dist.group.WORLD, **SIZES) as context:
                plan = context.plan(torch.full((2, 1), place * (12 // size)))
                assert (context.rank, context.num_ranks) == (place, size)
                assert plan.required.tolist() == [2] * size
        exchange(name, place, size)
    assert len(names) == 1, "the names must be the same for this to be a test"


@pytest.mark.parametrize("with_context", [True, False], ids=["context", "ops"])
def test_recreated_groups(with_context: bool) -> None:
    with RankPool(2) as pool:
        pool.run(check_recreated, with_context)
        pool.dismiss()
        assert [pool.wait(rank, 20) for rank in range(2)] == [0, 0]


def check_stale_context(rank: Rank) -> None:
    store = dist.distributed_c10d._get_default_store()
    context = EpContext(rank.group, **SIZES)
    remake(store, "stale", 1 - rank.rank, 2)
    with pytest.raises(RuntimeError, match="got a destroyed group"):
        context.plan(torch.zeros(2, 1, dtype=torch.int32))


def test_a_context_does_not_take_another_group_for_its_own() -> None:
    with RankPool(2) as pool:
        pool.run(check_stale_context)


def check_own_connections(rank: Rank) -> None:
    """Collectives of the program never mix with those of this library, also if a rank leaves out a call."""
    indices = torch.zeros(3, 1, dtype=torch.int32)
    arguments = (2, 3, 6, 1, 2, rank.group_name, False, 2000)
    plan = ep.plan(indices, *arguments)
    gathered = torch.zeros(2000)
    if rank.rank == 0:
        with pytest.raises(PeerTimeoutError, match=r"rank\(s\) 1 did not take part"):
            ep.dispatch(torch.ones(3, 3), None, plan.slot, plan.source, rank.group_name, 2000)
        dist.all_gather_into_tensor(gathered, torch.full((1000,), 1.0))
    else:
        dist.all_gather_into_tensor(gathered, torch.full((1000,), 2.0))
        begun = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="which came too late or left out a call"):
            ep.plan(indices, *arguments)
        assert time.monotonic() - begun < 7.0
    assert gathered.tolist() == [1.0] * 1000 + [2.0] * 1000


def test_other_collectives_on_the_group_meet_none_of_ours() -> None:
    with RankPool(2) as pool:
        pool.run(check_own_connections)


def error_of(action, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def check_compared(rank: Rank) -> None:
    name, me = rank.group_name, rank.rank
    ep.compare_header(name, torch.float32, 8, 2000)
    ep.compare_header(name, torch.float32, 8, 2000)  # already compared: no communication
    if me == 0:
        ep.compare_header(name, torch.float32, 8, 2000)
    text = error_of(
        lambda: (
            ep.compare_header(name, torch.float32, 8 + 8 * me, 2000)
            if me
            else ep.compare_header(name, torch.bfloat16, 8, 2000)
        ),
        ValueError,
    )
    assert text == (
        f"transformer_plugin::dispatch: argument 'dtype': expected the same call on all 2 ranks of group '{name}', "
        "got different ones: dtype is bfloat16 on rank 0, float32 on rank 1; width is 8 on rank 0, 16 on rank 1. "
        "Make the same calls in the same order, with the same constants, on every rank."
    )
    ep.compare_header(name, torch.float16, 8, 2000)  # the group still works
    begun = time.monotonic()
    if me == 0:  # new on this rank, already compared on the other
        text = error_of(lambda: ep.compare_header(name, torch.float64, 8, 2000), PeerTimeoutError)
        assert "transformer_plugin::dispatch" in text and "rank(s) 1 did not take part" in text, text
        assert time.monotonic() - begun < 7.0
    else:
        ep.compare_header(name, torch.float32, 8, 2000)
        time.sleep(5)
        text = error_of(lambda: ep.compare_header(name, torch.float64, 8, 2000), PeerTimeoutError)
        assert "This is rank 1, which came too late or left out a call" in text, text


def test_kinds_of_calls_are_compared_once_through_the_store() -> None:
    """What the host does for CUDA calls, without a GPU."""
    with RankPool(2) as pool:
        pool.run(check_compared)
