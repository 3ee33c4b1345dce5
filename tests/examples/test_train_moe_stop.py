"""Ctrl-C and SIGTERM in examples/train_moe.py: immediate, exit status 130, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.examples.conftest import SCRIPT, arguments, losses_of
from tests.examples.processes import SOON, assert_gone, finish, has_done, ranks_of, started, wait_for


@pytest.fixture
def begun(text_file: Path, tmp_path: Path):
    """A run of two ranks that has done a few of very many steps, with a checkpoint: its folder, process and ranks."""
    out = tmp_path / "run"
    more = ["--checkpoint-every", "2", "--eval-every", "1000", "--steps", "10000", "--text", str(text_file)]
    with started(arguments(out, *more)) as run:
        wait_for(lambda: has_done(5, out), run)
        ranks = ranks_of(run)
        assert sorted(ranks) == [0, 1]
        yield out, run, ranks


@pytest.mark.parametrize("who", ["launcher", "rank 1"])
def test_the_step_is_finished_and_saved(begun, who: str) -> None:
    """SIGTERM; test_train_moe.py has Ctrl-C, which a terminal sends to the process group."""
    out, run, ranks = begun
    os.kill(run.pid if who == "launcher" else ranks[1], signal.SIGTERM)
    output = finish(run, list(ranks.values()), SOON)
    stopped = max(losses_of(out))
    assert f"stopped after step {stopped} of 10000; continue with --resume" in output
    assert (out / f"checkpoints/step-{stopped:08d}/manifest.json").exists()
    assert not list((out / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("twice", [pytest.param(False, marks=pytest.mark.long), True], ids=["once", "twice"])
def test_a_rank_that_does_not_answer(begun, twice: bool) -> None:
    """Rank 0 waits for rank 1, which is suspended; the wait would end after five minutes."""
    out, run, ranks = begun
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1)
    steps = len(losses_of(out))
    time.sleep(0.3)
    assert len(losses_of(out)) == steps, "rank 0 waits"
    began = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    if twice:
        time.sleep(1.3)
        os.killpg(run.pid, signal.SIGINT)
    output = finish(run, list(ranks.values()), 8 + SOON)
    assert twice or time.monotonic() - began > 1
    saved = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*[0-9]"))
    assert "train_moe: stopping after " in output
    line = rf"rank 0: interrupted during (a step|saving), exited at once; --resume continues after step {saved}\n"
    assert re.search(line, output), output


def test_a_rank_that_is_lost_ends_the_others(begun) -> None:
    _, run, ranks = begun
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and "train_moe: rank 1 was killed by SIGKILL" in output
    assert_gone(list(ranks.values()))


def test_a_launcher_that_is_lost_ends_its_ranks(begun) -> None:
    _, run, ranks = begun
    os.kill(run.pid, signal.SIGKILL)
    assert_gone(list(ranks.values()))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["SIGINT", "SIGTERM"]
)
def test_a_wait_for_a_rank_that_never_comes(number: signal.Signals, tmp_path: Path, text_file: Path) -> None:
    """As with a launcher whose second machine is missing."""
    command = [*arguments(tmp_path / "run"), "--text", str(text_file)]
    one = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with started(command, **one, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0") as run:
        wait_for(lambda: listens(run.pid), run)
        run.send_signal(number)
        output = finish(run, [run.pid], SOON)
    assert "rank 0: interrupted during the start, exited at once" in output
    assert not (tmp_path / "run").exists()


def listens(process: int) -> bool:
    """Whether a process has a listening socket."""
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
        tables = [
            Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
        ]
    except OSError:
        return False
    inodes = {line.split()[9] for table in tables for line in table if line.split()[3] == "0A"}
    return any(link == f"socket:[{inode}]" for link in links for inode in inodes)


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_the_start_is_left_at_once(ranks: str, tmp_path: Path, text_file: Path) -> None:
    """The signal comes while torch is imported, which takes seconds."""
    with started([*arguments(tmp_path / "run"), "--text", str(text_file), "--ranks", ranks]) as run:
        wait_for(lambda: "libtorch" in Path(f"/proc/{run.pid}/maps").read_text(), run)
        run.send_signal(signal.SIGINT)
        output = finish(run, [run.pid], SOON)
    assert "train_moe: interrupted during the start, exited at once" in output


def test_one_rank_is_stopped_twice_and_goes_on(tmp_path: Path, text_file: Path) -> None:
    """It goes on after a line that a full disk has cut, and stops even if nobody reads its output any more: Ctrl-C
    also ends the ``tee`` of ``train_moe.py 2>&1 | tee log``."""
    out = tmp_path / "run"
    command = arguments(out, "--ranks", "1", "--text", str(text_file), "--steps", "10000")
    with started(command) as run:
        wait_for(lambda: has_done(3, out), run)
        run.send_signal(signal.SIGTERM)
        output = finish(run, [run.pid], SOON)
    first = max(losses_of(out))
    assert f"stopped after step {first} of 10000; continue with --resume" in output
    cut = b'{"step": %d, "loss"\xff' % (first + 1)
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    with started([*command, "--resume"]) as run:
        wait_for(lambda: cut not in (out / "metrics.jsonl").read_bytes() and has_done(first + 3, out), run)
        assert run.stdout is not None
        run.stdout.close()
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    second = max(losses_of(out))
    assert list(losses_of(out)) == list(range(1, second + 1))
    assert (out / f"checkpoints/step-{second:08d}/manifest.json").exists()


def test_under_torchrun(tmp_path: Path, text_file: Path) -> None:
    out = tmp_path / "run"
    command = arguments(out, "--text", str(text_file), "--steps", "10000")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with started([*launcher, str(SCRIPT), *command[2:]]) as run:
        wait_for(lambda: has_done(3, out), run)
        ranks = ranks_of(run)
        os.killpg(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=60)
        assert run.returncode != 0
        assert f"stopped after step {max(losses_of(out))} of 10000; continue with --resume" in output
        assert_gone(list(ranks.values()))
