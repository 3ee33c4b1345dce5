"""benchmarks/hf_step.py: the competitors compute the same, and the file has a row for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import common, hf_step
from tests.clients.imported import transformers


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers()
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["hf_step", "--quick", "--no-compile"])
    hf_step.main()  # which compares outputs and losses first
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    found = {(row["work"], row["variant"], row.get("micro_batches")) for row in rows}
    steps = {("step", variant.name, count) for variant in hf_step.VARIANTS for count in (1, 2)}
    pairs = {("experts of a layer", name, None) for name in ("tp.nn.MoE", "by name")}
    assert found == steps | pairs | {("experts of gpt-oss", name, None) for name in ("stock", "by name")}
    assert all(row["us"]["median"] > 0 for row in rows)


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers()
    first = hf_step.Step.__call__

    def wrong(self: hf_step.Step, micro_batches: int = 1):
        loss = first(self, micro_batches)
        return loss * 1.1 if self.number == 2 else loss

    numbers = iter(range(9))
    made = hf_step.Step.__init__

    def numbered(self, *arguments, **options) -> None:
        self.number = next(numbers)
        made(self, *arguments, **options)

    monkeypatch.setattr(hf_step.Step, "__init__", numbered)
    monkeypatch.setattr(hf_step.Step, "__call__", wrong)
    with pytest.raises(AssertionError, match="converted"):
        hf_step.step_rows(hf_step.QUICK, common.devices()[0], compiled=False)
