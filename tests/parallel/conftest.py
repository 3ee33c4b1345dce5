"""Pools of ranks, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from transformer_plugin.testing.distributed import RankPool

Pools = dict[tuple[int, str], RankPool]

#: (ranks, backend): Gloo on CPUs always, NCCL if there are enough GPUs.
PLACES = [
    pytest.param((1, "gloo"), id="cpu-1"),
    pytest.param((2, "gloo"), id="cpu-2"),
    pytest.param((4, "gloo"), id="cpu-4"),
    pytest.param((1, "nccl"), id="cuda-1", marks=pytest.mark.gpus(1)),
    pytest.param((2, "nccl"), id="cuda-2", marks=pytest.mark.gpus(2)),
    pytest.param((4, "nccl"), id="cuda-4", marks=pytest.mark.gpus(4)),
]


@pytest.fixture(scope="session")
def pools_on_gpus() -> Iterator[Pools]:
    """Pools with NCCL, whose start takes seconds, for all files."""
    pools: Pools = {}
    yield pools
    for each in pools.values():
        each.close()


@pytest.fixture(scope="module")
def make_pool(pools_on_gpus: Pools) -> Iterator[Callable[[int, str], RankPool]]:
    """Returns pools by size and backend, which are created once. After a failure a pool starts new processes.

    Pools with Gloo start in a tenth of a second and end with the file of tests: each group that a test makes has a
    thread that wakes up a hundred times a second, and together they would slow all later tests.
    """
    pools_on_cpus: Pools = {}

    def pool(size: int, backend: str = "gloo") -> RankPool:
        pools = pools_on_gpus if backend == "nccl" else pools_on_cpus
        if (size, backend) not in pools:
            pools[size, backend] = RankPool(size, backend)
        return pools[size, backend]

    yield pool
    for each in pools_on_cpus.values():
        each.close()


@pytest.fixture(params=PLACES)
def pool(request: pytest.FixtureRequest, make_pool: Callable[[int, str], RankPool]) -> RankPool:
    """Every size on the CPU, and on GPUs if there are enough."""
    return make_pool(*request.param)


@pytest.fixture(params=PLACES[1:2] + PLACES[4:5])
def pair(request: pytest.FixtureRequest, make_pool: Callable[[int, str], RankPool]) -> RankPool:
    """Two ranks, on CPUs and on GPUs."""
    return make_pool(*request.param)


@pytest.fixture(params=PLACES[4:5])
def pair_of_gpus(request: pytest.FixtureRequest, make_pool: Callable[[int, str], RankPool]) -> RankPool:
    """Two GPUs."""
    return make_pool(*request.param)


@pytest.fixture(params=PLACES[1:3] + PLACES[4:])
def ranks(request: pytest.FixtureRequest, make_pool: Callable[[int, str], RankPool]) -> RankPool:
    """Two and four ranks, on CPUs and on GPUs."""
    return make_pool(*request.param)


@pytest.fixture(params=[PLACES[2], PLACES[5]])
def four(request: pytest.FixtureRequest, make_pool: Callable[[int, str], RankPool]) -> RankPool:
    """Four ranks, on CPUs and on GPUs."""
    return make_pool(*request.param)
