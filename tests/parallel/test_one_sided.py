"""The transport "one_sided" on GPUs: the bits of "all_gather" in layers, in many exchanges of one channel with late
ranks and streams, and in replays of a CUDA graph with other routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.one_sided_cases import (
    SIZES,
    Setup,
    assert_all_same,
    check_graph,
    check_many,
    check_two_channels,
    check_two_graphs,
    draw,
    step,
)
from tests.parallel.test_all_to_all import CONFIGS, check_layers, error_of
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank, RankPool

BETWEEN_GPUS = Setup("one_sided")


@pytest.fixture
def two(make_pool: Any) -> RankPool:
    return make_pool(2, "nccl")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("recipe", ["none", "bf16", "fp8_block", "mxfp8", "nvfp4"])
def test_same_bits_as_all_gather(two: RankPool, recipe: str) -> None:
    for sizes in CONFIGS:
        for copies in (False, True):
            two.run(check_layers, recipe, sizes, copies, ("one_sided", "all_gather"))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 150, "overflow": "drop"}, {"max_num_sms": 2}],
    ids=["all", "drops", "few-multiprocessors"],
)
def test_many_exchanges(two: RankPool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    two.run(check_many, BETWEEN_GPUS, 40, (options,), (dtype,))


@pytest.mark.gpus(2)
def test_graph(two: RankPool) -> None:
    two.run(check_graph, BETWEEN_GPUS)


@pytest.mark.gpus(2)
def test_graphs_of_forward_and_backward(two: RankPool) -> None:
    two.run(check_two_graphs, BETWEEN_GPUS)


@pytest.mark.gpus(2)
def test_two_channels_at_the_same_time(two: RankPool) -> None:
    two.run(check_two_channels, BETWEEN_GPUS, 20)


def check_streams(rank: Rank) -> None:
    """Calls on one stream and then another, which nothing else orders."""
    ours, peer = BETWEEN_GPUS.contexts(rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    made = []
    for seed in range(12):
        drawn = draw(rank, ours, seed, torch.bfloat16).to(rank.device)
        torch.cuda.synchronize()
        for each in streams[seed % 2 :: 2]:
            with torch.cuda.stream(each):
                torch.cuda._sleep(500_000 * (1 + seed % 3))
        with torch.cuda.stream(streams[seed % 3]):
            plan = ours.plan(drawn.indices)
        with torch.cuda.stream(streams[(seed + 1) % 3]):
            ours.plan(drawn.indices)  # of which nothing is used
        streams[(seed + 2) % 3].wait_stream(streams[seed % 3])
        with torch.cuda.stream(streams[(seed + 2) % 3]):
            made.append((drawn, step(ours, plan, drawn, True)))
    torch.cuda.synchronize()
    for seed, (drawn, got) in enumerate(made):
        assert_all_same(got, step(peer, peer.plan(drawn.indices), drawn, True), f"seed {seed}")


@pytest.mark.gpus(2)
def test_streams_take_turns(two: RankPool) -> None:
    two.run(check_streams)


def check_default(rank: Rank) -> None:
    """By itself a context takes this transport where all ranks have it, and says why where they have not."""
    sizes = {**SIZES, "num_experts": 8 * rank.size}
    for device in (None, "cuda", rank.device):
        with EpContext(rank.group, **sizes, device=device) as context:
            assert context.transport == "one_sided"
            assert context.transport_reason.startswith("stores of each row")
    text = error_of(lambda: EpContext(rank.group, **{**sizes, "num_experts": 8192}))
    assert "expected at most 1024 for each rank, got 8192" in text
    with EpContext(rank.group, **sizes, transport="all_gather") as context:
        assert (context.transport, context.transport_reason) == (
            "all_gather",
            'transport="all_gather" was given',
        )


@pytest.mark.gpus(2)
def test_default(two: RankPool) -> None:
    two.run(check_default)


def check_refusals(rank: Rank) -> None:
    sizes = {**SIZES, "num_experts": 2 * rank.size}
    text = error_of(lambda: EpContext(rank.group, **sizes, transport="one_sided", device="cpu"))
    assert (
        "argument 'transport': expected ranks that reach each other's memory, got symmetric memory is of GPUs"
        in text
    )
    with EpContext(rank.group, **sizes, device="cpu") as context:
        assert context.transport == "all_gather"


def test_a_cpu_has_no_peer_memory(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_refusals)
