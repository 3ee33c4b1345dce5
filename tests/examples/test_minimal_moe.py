"""examples/minimal_moe.py learns on four ranks, notices that it does not, and fits on a page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, environment, run_on_ranks

PROGRAM = EXAMPLES / "minimal_moe.py"
MOST_LINES = 120


def losses(text: str) -> list[tuple[int, float]]:
    return [
        (int(step), float(loss))
        for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)$", text, re.MULTILINE)
    ]


def test_four_ranks() -> None:
    statuses, text = run_on_ranks(PROGRAM, 4)
    assert statuses == [0] * 4, text
    found = losses(text)
    assert [step for step, _ in found] == [*range(1, 17), *range(9, 17)]
    assert found[8:16] == found[16:]  # of the loaded model
    assert found[15][1] < 0.1 * found[0][1]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])', "pass"),
        ("        optimizer.step()\n", ""),
    ],
    ids=["nothing is loaded", "no step"],
)
def test_a_wrong_program_ends_with_status_1(right: str, wrong: str, tmp_path: Path) -> None:
    text = PROGRAM.read_text()
    assert text.count(right) == 1
    changed = tmp_path / PROGRAM.name
    changed.write_text(text.replace(right, wrong))
    statuses, text = run_on_ranks(changed, 2)
    assert statuses == [1, 1] and "WRONG" in text, text


@pytest.mark.gpus(2)
def test_two_gpus() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
    ]
    done = subprocess.run(
        command, env=environment(gpu=True), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(done.stdout)[-1][1] < 0.5


def test_it_fits_on_a_page_that_docs_show() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= MOST_LINES
    docs = EXAMPLES.parent / "docs"
    assert "{literalinclude} ../examples/minimal_moe.py" in (docs / "minimal-moe.md").read_text()
    start = re.findall(r"\n(\S+)", (docs / "index.md").read_text().split(":caption: Start")[1])
    assert start[:2] == ["install", "minimal-moe"]
