"""``--resume`` of examples/train_moe.py: the run's own options, errors that name both values, and longer runs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import train_moe
from moe_lm.config import PRESETS, Config, difference
from moe_lm.folder import RunFolder
from moe_lm.limits import UserError
from moe_lm.resume import continued

from tests.examples.conftest import assert_same_results, losses_of, read_metrics, train

SAVED = Config(**{**PRESETS["tiny"], "format": "fp8_block", "steps": 40, "batch_size": 8, "dtype": "float32"})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run that has stopped."""
    return stopped(tmp_path / "run", SAVED)


def stopped(out: Path, config: Config) -> Path:
    os.close(RunFolder.new(out, config, "tiny").lock)
    (out / "checkpoints/step-00000010").mkdir(parents=True)
    return out


def resumed(out: Path, *more: str) -> Config:
    return train_moe.parse(["--resume", "--out", str(out), *more])[0]


def refusal(out: Path, *more: str) -> str:
    with pytest.raises(UserError) as caught:
        resumed(out, *more)
    return str(caught.value)


def test_options_are_those_of_the_run(out: Path) -> None:
    assert resumed(out) == SAVED
    assert resumed(out, "--preset", "tiny", "--format", "fp8_block", "--steps", "40", "--no-compile") == SAVED


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ("--steps 60", {"steps": 60, "schedule_steps": 40}),
        ("--steps 20", {"steps": 20, "schedule_steps": 40}),
        ("--ranks 4 --batch-size 4", {"ranks": 4, "batch_size": 4}),
        ("--expert-ranks 1", {"expert_ranks": 1}),
    ],
)
def test_options_that_may_change(out: Path, options: str, change: dict[str, Any]) -> None:
    config = resumed(out, *options.split())
    assert config == replace(SAVED, **change) and difference(asdict(SAVED), config) == []


def test_how_the_ranks_divide_dense_layers_may_change(tmp_path: Path) -> None:
    out = stopped(tmp_path / "run", replace(SAVED, data_parallel="ddp"))
    assert resumed(out, "--shard", "2") == replace(SAVED, data_parallel="ddp", shard=2)


@pytest.mark.parametrize(
    ("options", "what", "expected", "got", "do"),
    [
        ("--lr 0.5", "argument '--lr'", "0.01, as in", "0.5", "Leave it out"),
        ("--format mxfp8", "argument '--format'", "fp8_block, as in", "mxfp8", "Leave it out"),
        ("--compile", "argument '--compile'", "False, as in", "True", "Leave it out"),
        ("--text a.txt", "argument '--text'", "None, as in", "a.txt", "Leave it out"),
        ("--preset medium", "argument '--preset'", "tiny, as in", "medium", "Leave it out"),
        ("--schedule-steps 50", "argument '--schedule-steps'", "0, as in", "50", "Leave it out"),
        ("--layers 3 --lr 1", "arguments '--layers', '--lr'", "2, 0.01, as in", "3, 1.0", "Leave them out"),
        ("--shard 2", "argument '--shard'", "1, because the run has --data-parallel fsdp", "2", "Leave it out"),
    ],
)  # fmt: skip
def test_options_that_contradict_the_run(
    out: Path, options: str, what: str, expected: str, got: str, do: str
) -> None:
    expected += f" '{out / 'config.json'}'" if expected.endswith("as in") else ""
    line = refusal(out, *options.split())
    assert line == f"train_moe: {what}: expected {expected}, got {got}. {do}, or start anew in another --out."


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (b"", "a file that cannot be read"),
        (b'{"layers": ', "a file that cannot be read"),
        (b"\xff", "a file that cannot be read"),
        (b"[" * 100_000, "a file that cannot be read"),
        (b" " * (1 << 20) + b"{}", "a file that cannot be read"),
        (b"[1]", "JSON without names"),
        ({"layers": None}, "None for 'layers'"),
        ({"layers": True}, "True for 'layers'"),
        ({"lr": "0.1"}, "'0.1' for 'lr'"),
        ({"format": "fp9"}, "'fp9' for 'format'"),
        ({"compile": 1}, "1 for 'compile'"),
        ({"text": 3}, "3 for 'text'"),
        ({"width": 3}, "the unknown name 'width'"),
        ({"lr": math.nan}, "a configuration that cannot run (argument '--lr': expected a finite number, got nan. The "
         "default is 0.001)"),
        ("layers", "no 'layers'"),
    ],
    ids=lambda change: repr(change)[:20],
)  # fmt: skip
def test_config_that_no_run_has_written(out: Path, change: Any, got: str) -> None:
    path = out / "config.json"
    content = json.loads(path.read_text())
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, dict):
        path.write_text(json.dumps({**content, **change}))
    else:
        path.write_text(json.dumps({name: value for name, value in content.items() if name != change}))
    assert refusal(out) == broken(out, got)


def broken(out: Path, got: str) -> str:
    manifest = out / "checkpoints/step-00000010/manifest.json"
    return (
        f"train_moe: '{out / 'config.json'}': expected the configuration that the run has written, got {got}. Write "
        f"into it what '{manifest}' has as 'config'."
    )


def test_config_that_is_not_there_or_no_file(out: Path) -> None:
    (out / "config.json").unlink()
    assert refusal(out) == broken(out, "no such file")
    os.mkfifo(out / "config.json")  # opening it would block
    assert refusal(out) == broken(out, "a file that cannot be read")


def test_config_of_a_run_before_the_newer_options(out: Path) -> None:
    path = out / "config.json"
    content = json.loads(path.read_text())
    for name in ("preset", "schedule_steps", "tensor_parallel"):
        del content[name]
    path.write_text(json.dumps(content))
    assert resumed(out, "--preset", "medium") == SAVED  # nothing says that it was another one


def test_no_checkpoint(tmp_path: Path) -> None:
    os.close(RunFolder.new(tmp_path / "run", SAVED).lock)
    for out in (tmp_path / "run", tmp_path / "none"):
        assert refusal(out) == (
            f"train_moe: argument '--resume': expected a checkpoint under '{out / 'checkpoints'}', got none. Start "
            "without --resume, or give the --out of an earlier run."
        )


def test_the_schedule_is_kept_over_several_resumes(out: Path) -> None:
    longer = resumed(out, "--steps", "60")
    folder = RunFolder.old(out)
    assert folder is not None
    folder.update(longer)
    os.close(folder.lock)
    assert resumed(out) == longer
    assert resumed(out, "--steps", "90") == replace(longer, steps=90)
    assert continued(out, {"steps": 40}) == asdict(replace(longer, steps=40))
    assert json.loads((out / "config.json").read_text())["preset"] == "tiny"


def test_a_run_made_longer(text_file: Path, tmp_path: Path) -> None:
    """Bit for bit the run that was planned as long, with the schedule of the shorter one."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    options = ["--text", str(text_file), "--eval-every", "4", "--eval-batches", "1", "--warmup-steps", "3"]
    train(whole, *options, "--steps", "20", "--schedule-steps", "12")
    done = train(out, *options, "--steps", "12", "--stop-at", "5")
    assert f"stopped after step 5 of 12; continue with --resume --out {out}" in done.stdout
    train(out, "--resume")
    done = train(out, "--resume")
    assert "all 12 steps are done; --steps makes the run longer" in done.stdout
    done = train(out, "--resume", "--steps", "20", "--stop-at", "15")
    assert "stopped after step 15 of 20" in done.stdout
    train(out, "--resume")
    assert_same_results(out, whole, 20)
    rates = {each["step"]: each["learning_rate"] for each in read_metrics(out) if "learning_rate" in each}
    assert len(losses_of(out)) == len(rates) == 20
    assert (
        min(rates[step] for step in range(3, 13)) > rates[13] == rates[20] == pytest.approx(0.05 * rates[3])
    )

    done = train(out, "--resume", "--steps", "19", status=2)
    assert done.stderr == (
        f"train_moe: argument '--steps': expected at least 20, as many as '{out}/checkpoints/step-00000020' has, got "
        "19. Raise it, or leave it out.\n"
    )
    assert json.loads((out / "config.json").read_text())["steps"] == 20
