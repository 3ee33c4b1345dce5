"""Devices of the tests: the same test runs on CPU and, marked `gpu`, on CUDA."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        wanted = max(
            [1 for _ in item.iter_markers("gpu")] + [int(m.args[0]) for m in item.iter_markers("gpus")],
            default=0,
        )
        if wanted > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {count}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
