"""The Python blocks of the pages for several ranks run, in order, on two and on four ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.sharded_model import everything
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "experts-over-ranks.md"
#: Other pages and the numbers of their blocks.
HOWTOS = [("howto/fsdp2.md", 3), ("howto/checkpoints.md", 3), ("training-frameworks.md", 5)]
HOWTOS += [("tensor-parallel-dtensor.md", 1), ("sharded-weights.md", 4)]


def run_blocks(page: Path, count: int, folder: str) -> dict[str, Any]:
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": "page"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == count
    here = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
            exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)
    finally:
        os.chdir(here)
    return namespace


def run_page(rank: Rank, folder: str) -> None:
    namespace = run_blocks(PAGE, 6, folder)
    assert torch.isfinite(namespace["norm"]) and namespace["norm"] > 0
    parts = [dict(namespace[name].named_parameters()) for name in ("model", "loaded", "alone")]
    assert isinstance(parts[1]["moe.experts.fc1.weight"], DTensor)
    for name, value in parts[2].items():
        for other in parts[:2]:
            assert_same_bits(everything(other[name].detach()), value.detach())


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
@pytest.mark.parametrize("ranks", [2, 4])
def test_page_runs(make_pool: Any, ranks: int, tmp_path: Path) -> None:
    pool: RankPool = make_pool(ranks, "gloo")
    pool.run(run_page, str(tmp_path), timeout=240)


def run_howto(rank: Rank, name: str, count: int, folder: str) -> None:
    namespace = run_blocks(DOCS / name, count, folder)
    for parameter in namespace["model"].parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert local.isfinite().all()


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "count"), HOWTOS)
def test_howto_runs(make_pool: Any, name: str, count: int, ranks: int, tmp_path: Path) -> None:
    pool: RankPool = make_pool(ranks, "gloo")
    pool.run(run_howto, name, count, str(tmp_path), timeout=240)
