"""The Python blocks of the manual's page on modules run, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modules.md"


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_blocks_run() -> None:
    text = PAGE.read_text()
    namespace: dict[str, Any] = {"__name__": "manual"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 8
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), namespace)
    assert namespace["loss"].requires_grad and int(namespace["expert_load"].sum()) == 200
    model = namespace["model"]  # of the last block, which initializes a model on "meta"
    assert all(not p.is_meta and p.std() > 0 for p in model.parameters())
    assert model(torch.ones(3, 64)).output.shape == (3, 64)
