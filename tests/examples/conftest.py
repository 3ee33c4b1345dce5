"""Runs examples/train_moe.py as a user would."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.examples import fork_server
from transformer_plugin.testing.distributed import RankError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "train_moe.py"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """torch's attention in bfloat16 looks at what the CPU has, and its loops at what ATEN_CPU_CAPABILITY leaves."""
    try:
        return (yield)
    except RankError as error:
        text = "pack_vnni2 is only supported when avx512 is supported"
        if "ATEN_CPU_CAPABILITY" in os.environ and text in str(error):
            pytest.skip(f"torch's attention: {text}")
        raise


def arguments(out: Path, *more: str) -> list[str]:
    """The command line of a run of the smallest model on the CPU."""
    return [sys.executable, str(SCRIPT), "--preset", "tiny", "--sample-length", "8", "--out", str(out), *more]


def environment(gpu: bool = False) -> dict[str, str]:
    """One thread per rank, no GPU unless requested, and the package of this tree."""
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


@functools.cache
def forking() -> dict[str, str]:
    """Starts a server of forked runs, which lives as long as this process; returns what their environment needs."""
    folder = Path(tempfile.mkdtemp())
    server = fork_server.started(folder, EXAMPLES, environment())
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)  # closes its input, so that it ends, and waits
    return {fork_server.SOCKET: str(folder / "socket")}


def run_forked(
    command: list[str], file_size: tuple[int, int] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, in processes that are forked from one that has imported torch."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        output = (stdout.fileno(), stderr.fileno())
        process = fork_server.ForkedRun(command, {**environment(), **forking()}, *output, file_size)
        status = process.wait(240)
        texts = [file.seek(0) or file.read() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, status, *texts)


def run_on_ranks(program: Path, ranks: int) -> tuple[list[int], str]:
    """Runs on forked ranks with the environment of torchrun. Returns their statuses and what they printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **environment(), **forking()}
    with tempfile.TemporaryFile("w+") as output:
        runs = [
            fork_server.ForkedRun(
                [sys.executable, str(program)],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                output.fileno(),
                output.fileno(),
            )
            for rank in range(ranks)
        ]
        statuses = [run.wait(240) for run in runs]
        output.seek(0)
        return statuses, output.read()


def train(out: Path, *more: str, status: int = 0, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs to the end and checks the exit status."""
    command = arguments(out, *more)
    if gpu:
        done = subprocess.run(
            command, env=environment(gpu), capture_output=True, text=True, timeout=240, check=False
        )
    else:
        done = run_forked(command)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(out) if "loss" in record}


def read_checkpoint(out: Path, step: int) -> dict[str, Any]:
    """Loads a complete checkpoint on one rank."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(out / f"checkpoints/step-{step:08d}", file.name)
        content: dict[str, Any] = torch.load(file.name, weights_only=True)["trainer"]
        return content


def assert_same_results(out: Path, expected_out: Path, steps: int) -> None:
    """Equal metrics except for times, and equal bits in the checkpoints of a step."""
    got_metrics, expected_metrics = (
        [
            {name: value for name, value in record.items() if name != "tokens_per_second"}
            for record in read_metrics(run)
        ]
        for run in (out, expected_out)
    )
    assert got_metrics == expected_metrics
    got, expected = read_checkpoint(out, steps), read_checkpoint(expected_out, steps)
    assert got["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(got["model"][name], value), name
    assert got["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for name, moments in expected["optimizer"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(got["optimizer"]["state"][name][key], value), (name, key)
    assert got["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is the same for every version of Python."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    lines = [
        f"def f{i}(x, y):\n    if x > {i % 7}:\n        return x * {i % 13} + y\n"
        f"    return f{i // 2}(y, x)\n\n"
        for i in range(4000)
    ]
    path.write_text("".join(lines))
    return path
