"""``--compile`` of examples/train_moe.py: one graph for all blocks, without a break, the losses of eager, and a line
that says what takes so long."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_lm.config import PRESETS, Config
from torch._dynamo.utils import counters

from tests.examples.conftest import arguments
from tests.examples.processes import started
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


@pytest.mark.parametrize(
    ("options", "graphs"),
    [([], "one graph for all"), (["--reference"], "several graphs")],
    ids=["ours", "plain"],
)
def test_the_command_says_that_it_compiles(
    options: list[str], graphs: str, text_file: Path, tmp_path: Path
) -> None:
    """Before the bar, which goes on below. Nothing is compiled here, which would take most of a minute."""
    options = [*options, "--compile", "--text", str(text_file), "--steps", "2", "--eval-batches", "1"]
    command = arguments(tmp_path / "run", *options, "--ranks", "1", "--data-parallel", "none")
    with started(command, TORCHDYNAMO_DISABLE="1") as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    line = (
        f"torch.compile: 2 blocks, {graphs}, forward and backward. The first step compiles them, which takes about a "
        "minute; the first evaluation compiles a forward\n"
    )
    assert output.count(line) == 1 and output.index(line) < output.index("0/2 [") < output.index("2/2 [")
