"""``--compile`` of examples/train_moe.py: one graph for all blocks, without a break, and the losses of eager."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_lm.config import PRESETS, Config
from torch._dynamo.utils import counters

from tests.examples.trainers import losses
from transformer_plugin.testing.distributed import Rank, RankPool


def train_both_ways(
    rank: Rank, config: Config, backend: str
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Returns the losses in eager mode and compiled, and what the compiler counted."""
    eager = losses(rank, config)
    torch._dynamo.reset()
    counters.clear()
    torch.compile = functools.partial(
        torch.compile, backend=backend
    )  # in this process, which is the test's own
    compiled = losses(rank, replace(config, compile=True))
    return eager, compiled, {name: dict(counters[name]) for name in ("stats", "graph_break")}


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        pytest.param("gloo", "aot_eager", id="cpu"),
        pytest.param("nccl", "inductor", id="cuda", marks=pytest.mark.gpus(2)),
    ],
)
def test_one_graph(place: str, backend: str, text_file: Path) -> None:
    """Every block has the same graph, one for training and one for evaluation. aot_eager runs the kernels of eager.

    In bfloat16 aot_eager of torch 2.15 rounds otherwise than eager, also for layers of torch alone.
    """
    dtype = "float32" if backend == "aot_eager" else "bfloat16"
    config = Config(**PRESETS["tiny"], text=str(text_file), dtype=dtype, format="fp8_block")
    with RankPool(2, place) as pool:
        for eager, compiled, counted in pool.run(train_both_ways, config, backend, timeout=280):
            assert counted["graph_break"] == {}
            assert counted["stats"]["unique_graphs"] == 2
            assert compiled == pytest.approx(eager, rel=0 if backend == "aot_eager" else 2**-7)
            assert eager[-1] < eager[0] - 0.2, "nothing was learned, so nothing is compared"
