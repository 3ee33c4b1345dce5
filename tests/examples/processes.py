"""Runs of examples/train_moe.py that a test interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.examples.conftest import environment, losses_of

SOON = 20.0  # seconds: one or two on an idle machine, and much less than the longest wait for another rank
DEADLINE = 120.0


def wait_for(condition: Callable[[], object], run: subprocess.Popen[str], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_done(steps: int, out: Path) -> bool:
    """Whether a run has written the losses of at least so many steps."""
    return (out / "metrics.jsonl").exists() and len(losses_of(out)) >= steps


@contextmanager
def started(command: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command as a shell with job control does: in a separate process group. Kills what is left of it."""
    run = subprocess.Popen(
        command, env={**environment(), **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield run
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def state(process: int) -> str:
    """Returns the state letter of /proc, or "" if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ranks_of(run: subprocess.Popen[str]) -> dict[int, int]:
    """Returns the process ids by rank."""
    found = {}
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        content = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(entry[5:]): int(child) for entry in content if entry.startswith(b"RANK=")}
    return found


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + SOON
    while left := [process for process in processes if state(process) not in ("", "Z")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def finish(run: subprocess.Popen[str], processes: list[int], seconds: float) -> str:
    """Waits for a run that must end in time with status 130 and without remaining processes; returns its output."""
    began = time.monotonic()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert time.monotonic() - began < seconds, output
    assert "Traceback" not in output
    assert_gone(processes)
    return output
