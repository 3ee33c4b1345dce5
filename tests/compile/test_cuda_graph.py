"""One CUDA graph of a whole training step, replayed with other data, other routing and other group sizes."""

from __future__ import annotations

import pytest
import torch

from tests.compile.model import Everything, batch, step
from tests.nn.common import RECIPES, by_recipe, row_unit
from transformer_plugin.testing.numerics import assert_same_bits


@pytest.mark.gpu
@by_recipe
def test_replays_with_changing_sizes(name: str) -> None:
    torch.manual_seed(0)
    model = Everything(RECIPES[name][0], device="cuda")
    held = batch(48, 0, "cuda", row_unit(name))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, held)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, held)
    for seed in (1, 2, 3, 0):
        data = batch(48, seed, "cuda", row_unit(name))
        if seed == 3:
            data.group_sizes.zero_()
        for target, source in zip(held, data, strict=True):
            target.copy_(source)
        torch.manual_seed(seed)  # the graph draws the seeds of stochastic rounding
        graph.replay()
        torch.manual_seed(seed)
        for (key, got), expected in zip(captured.items(), step(model, data).values(), strict=True):
            assert_same_bits(got, expected, key)


@pytest.mark.gpu
@by_recipe
def test_no_host_read(name: str) -> None:
    """A training step while synchronization is an error."""
    torch.manual_seed(0)
    model = Everything(RECIPES[name][0], device="cuda")
    data = batch(48, 0, "cuda", row_unit(name))
    step(model, data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
