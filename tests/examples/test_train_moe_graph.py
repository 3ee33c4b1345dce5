"""``--cuda-graph`` of examples/train_moe.py: the losses, bit for bit, of the same training without a graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_lm.config import PRESETS, Config
from moe_lm.graph import WARM_UP

from tests.examples.conftest import assert_same_results, losses_of, train
from tests.examples.trainers import trainer_of
from transformer_plugin.testing.distributed import Rank, RankPool

pytestmark = pytest.mark.gpu
STEPS = WARM_UP + 8
LAYOUTS = ("packed", "list", "grouped")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1, "nccl") as pool:
        yield pool


@pytest.fixture(scope="module")
def config(text_file: Path) -> Config:
    settings = {**PRESETS["tiny"], "warmup_steps": 4}
    return Config(**settings, text=str(text_file), dtype="float32", ranks=1, data_parallel="none")


def numbers(rank: Rank, config: Config, cuda_graph: bool) -> list[list[float]]:
    """Loss, balance loss and gradient norm of each step, and the losses of evaluations between and after them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # as the command does
    torch.utils.deterministic.fill_uninitialized_memory = False
    trainer = trainer_of(rank, config, cuda_graph)
    results = []
    for step in range(STEPS):
        results.append(trainer.step(step).tolist())
        if step in (1, STEPS - 3, STEPS - 1):
            results.append([trainer.evaluate()])
    graph: Any = trainer.iterate
    assert not cuda_graph or graph.graph is not None
    return results


def assert_same_numbers(pool: RankPool, config: Config, **changes: Any) -> None:
    config = replace(config, **changes)
    (graphed,), (eager,) = (pool.run(numbers, config, graph, timeout=280) for graph in (True, False))
    assert graphed == eager
    assert eager[-1][0] < eager[0][0] - 0.5, "nothing was learned, so nothing is compared"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "format", ["none", "bf16", "fp8_tensor", "fp8_row", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"]
)
def test_formats(pool: RankPool, config: Config, format: str, dtype: str) -> None:
    assert_same_numbers(pool, config, format=format, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "nvfp4"])
def test_weights_that_are_quantized_in_the_graph(
    pool: RankPool, config: Config, format: str, layout: str
) -> None:
    """After the optimizer's step, in the memory that the next replay reads."""
    assert_same_numbers(pool, config, format=format, parameters=layout, cached_weights=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(pool: RankPool, config: Config, layout: str) -> None:
    assert_same_numbers(pool, config, parameters=layout)


@pytest.mark.parametrize("cached", [False, True], ids=["fresh", "cached"])
def test_compiled(pool: RankPool, config: Config, cached: bool) -> None:
    """Compiled before the capture."""
    changes: dict[str, Any] = {"compile": True, "dtype": "bfloat16", "format": "fp8_block"}
    assert_same_numbers(pool, config, **changes, cached_weights=cached)


def test_the_command(text_file: Path, tmp_path: Path) -> None:
    """Stopped and resumed with a graph, and the same checkpoint as without."""
    options = ["--text", str(text_file), "--steps", "16", "--eval-every", "6", "--ranks", "1"]
    options += ["--data-parallel", "none", "--format", "fp8_block", "--cached-weights"]
    plain, whole, out = (tmp_path / name for name in ("plain", "whole", "run"))
    train(plain, *options, gpu=True)
    train(whole, *options, "--cuda-graph", gpu=True)
    train(out, *options, "--cuda-graph", "--stop-at", "7", gpu=True)
    train(out, *options, "--cuda-graph", "--resume", gpu=True)
    assert len(losses_of(plain)) == 16
    for run in (whole, out):
        assert_same_results(run, plain, 16)
