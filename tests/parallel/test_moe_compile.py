"""The model of the compile tests with its experts on two ranks, compiled in one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compile.model import Everything, assert_same, batch, of_any_rows, step
from transformer_plugin.nn import DispatchConfig
from transformer_plugin.recipes import recipe_from_name
from transformer_plugin.testing.distributed import Rank, RankPool


def check_compiled(rank: Rank, recipe: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(rank.rank)
    model = Everything(recipe_from_name(recipe), rank.group, DispatchConfig(max_tokens=64), rank.device)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(model, fullgraph=True, backend=counter)
    # The ranks have different routings; first the same number of tokens, then different numbers.
    counts = (
        [24, 24, 24] if backend == "inductor" else [24, 24, 24, 40, 17 + rank.rank, 64, 1 + 40 * rank.rank]
    )
    for seed, tokens in enumerate(counts):
        data = batch(tokens, 10 * seed + rank.rank, rank.device)
        expected = step(model, data)
        limit = of_any_rows(recipe, rank.device) if backend == "aot_eager" else 1e-5
        assert_same(step(fast, data), expected, limit)
        if seed == 2:
            assert counter.frame_count == 1
    assert counter.frame_count <= 2 + (rank.rank == 0)  # torch compiles a size of 1 separately


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("fp8_block", "aot_eager"),
        pytest.param("none", "aot_eager", marks=pytest.mark.long),
        pytest.param("fp8_block", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_equals_eager(pair: RankPool, recipe: str, backend: str) -> None:
    pair.run(check_compiled, recipe, backend, timeout=280)
