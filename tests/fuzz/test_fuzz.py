"""With arbitrary arguments an op returns or raises; it does not crash or hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.surface.surface import ROOT


def run(sets: int) -> None:
    """Children are forked from a process that has no threads; the pytest process may have some."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", "--sets", str(sets)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(1800)
def test_sizes_at_the_edges_of_integers() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.edges"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = "".join(done.stdout.splitlines()[-1:])
    assert done.returncode == 0, f"{done.returncode} in {last}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(1800)
def test_twenty_sets_of_arguments_for_each_op() -> None:
    run(20)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_sets_of_arguments_for_each_op() -> None:
    run(200)
