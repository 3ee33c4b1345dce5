"""The `device` fixture: the same test runs on CPU and, marked `gpu`, on CUDA. Also settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Read when torch is loaded. By default OpenMP's threads spin while they wait for each other, which takes the cores from
# the other test workers, and from each other in tests with more threads than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from tests.in_turn import left_out

DEVICES = torch.cuda.device_count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-dtypes", action="store_true", help="every dtype of tests marked dtypes_in_turn")


def pytest_configure(config: pytest.Config) -> None:
    """Parallel test workers share the cores of the machine; by default each would start a thread for every core."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_report_header() -> str:
    return f"{DEVICES} CUDA device(s); tests that are marked to need more are deselected"


def devices_of(item: pytest.Item) -> int:
    """The number of CUDA devices that a test needs."""
    several = [int(mark.args[0]) for mark in item.iter_markers("gpus")]
    return max([1 for _ in item.iter_markers("gpu")] + several, default=0)


def leave_out(config: pytest.Config, items: list[pytest.Item], out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-dtypes"):
        leave_out(config, items, set(left_out(items)))
    leave_out(config, items, {item for item in items if devices_of(item) > DEVICES})


def pytest_collection_finish() -> None:
    """Collections of garbage then leave out the tests themselves, which are most of the objects and live to the end."""
    gc.freeze()


# Without a GPU its half of the tests is not even collected, which each worker does for itself.
@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if DEVICES else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def schema_checks_take_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares inputs with torch.allclose, which does not support FP8, so FP8 is compared as bytes."""
    original = torch.allclose

    def allclose(a: Tensor, b: Tensor, **options: Any) -> bool:
        if a.element_size() == 1 and a.is_floating_point():
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return original(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """The compiler has no graphs of other tests, and leaves none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
