"""The numbered programs of examples/ep check themselves: on two ranks, on torchrun's, and when they are wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, environment, run_forked, run_on_ranks

PROGRAMS = sorted((EXAMPLES / "ep").glob("[0-9]*.py"))
LAYER, BY_HAND = PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_two_ranks(program: Path) -> None:
    done = run_forked([sys.executable, str(program)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("the same")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_two_gpus(program: Path) -> None:
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, env=environment(gpu=True), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("the same")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_four_ranks_of_torchrun(program: Path) -> None:
    statuses, text = run_on_ranks(program, 4)
    assert statuses == [0] * 4, text
    assert text.count("the same") == 1  # the first rank prints


@pytest.mark.parametrize(
    ("program", "right", "wrong"),
    [
        (LAYER, "tp.parallel.data_parallel(over_ranks)", "over_ranks"),
        (
            LAYER,
            "over_ranks.load_state_dict(one.state_dict())",
            "torch.nn.init.zeros_(over_ranks.norm.weight)",
        ),
        (BY_HAND, "hidden * weights[:, None]", "hidden"),
    ],
    ids=["gradients not averaged", "other weights", "weights left out"],
)
def test_a_wrong_program_ends_with_status_1(program: Path, right: str, wrong: str, tmp_path: Path) -> None:
    text = program.read_text()
    assert text.count(right) == 1
    shutil.copy(program.parent / "ranks.py", tmp_path)
    changed = tmp_path / program.name
    changed.write_text(text.replace(right, wrong))
    done = run_forked([sys.executable, str(changed)])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout
