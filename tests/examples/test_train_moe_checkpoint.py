"""Checkpoints of examples/train_moe.py: complete or absent, verified before use, without leftover files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_lm import checkpoint
from moe_lm.config import NEWER_OPTIONS, Config, UserError, difference
from moe_lm.folder import RunFolder
from moe_lm.world import World
from torch.distributed.device_mesh import init_device_mesh

from tests.examples.conftest import arguments, environment, forking, losses_of, run_forked, train
from tests.examples.fork_server import ForkedRun


def text_of(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


class State:
    """The smallest state that can be saved."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def saved(tmp_path: Path):
    """Two checkpoints of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(0, 1, torch.device("cpu"), dist.group.WORLD, init_device_mesh("cpu", (1,)))
    config = replace(Config(), ranks=1)
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, config, State(step), world)
    yield tmp_path, config, world
    dist.destroy_process_group()


def test_checkpoint_is_found_loaded_and_the_oldest_removed(saved) -> None:
    out, config, world = saved
    folder = checkpoint.check(out, config)
    state = State(0)
    assert checkpoint.load(folder, state, world) == 30 and int(state.value) == 30
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000020", "step-00000030"]
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert text_of(checkpoint.check, tmp_path, Config()) == (
        f"train_moe: argument '--resume': expected a checkpoint under '{tmp_path / 'checkpoints'}', got "
        "none. Start without --resume, or give the --out of an earlier run."
    )


def corrupt(folder: Path, got: str) -> str:
    return (
        f"train_moe: checkpoint '{folder}': expected the files that its manifest.json lists, unchanged, "
        f"got {got}. Remove this folder: --resume then uses the previous checkpoint."
    )


def test_checkpoint_with_a_changed_byte(saved) -> None:
    out, config, _ = saved
    path = out / "checkpoints/step-00000030/__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert text_of(checkpoint.check, out, config) == corrupt(
        path.parent, "a file '__0_0.distcp' with other content"
    )


def test_checkpoint_cut_short_missing_or_without_manifest(saved) -> None:
    out, config, _ = saved
    folder = out / "checkpoints/step-00000030"
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-5])
    assert text_of(checkpoint.check, out, config) == corrupt(
        folder, "a file '__0_0.distcp' with other content"
    )
    path.unlink()
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "no file '__0_0.distcp'")
    manifest = folder / "manifest.json"
    good = manifest.read_text()
    manifest.write_text(good[: len(good) // 2])
    assert text_of(checkpoint.check, out, config) == corrupt(
        folder, "a file 'manifest.json' that cannot be read"
    )
    for version in (1, 99):  # 1: one file per rank, before torch.distributed.checkpoint
        manifest.write_text(json.dumps({**json.loads(good), "version": version}))
        assert text_of(checkpoint.check, out, config) == corrupt(folder, f"version {version}")
    manifest.unlink()
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "no file 'manifest.json'")


@pytest.mark.parametrize(
    "change",
    [
        {"config": None}, {"config": []}, {"config": "x"}, {"files": None}, {"files": ["__0_0.distcp"]}, {"files": {}},
        {"files": {"__0_0.distcp": 3}}, {"files": {"__0_0.distcp": {}}}, {"step": "30"},
        {"files": {".metadata": {}, "../__0_0.distcp": {}}}, {"files": {".metadata": {}, "__0_0.distcp": 3}},
        {"files": {".metadata": {"bytes": "1", "sha256": 2}}}, {"step": 10}, {"step": None}, {"config": {}},
    ],
    ids=str,
)  # fmt: skip
def test_manifest_of_another_shape(saved, change: dict[str, object]) -> None:
    out, config, _ = saved
    manifest = out / "checkpoints/step-00000030/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    text = text_of(checkpoint.check, out, config)
    assert text.startswith(f"train_moe: checkpoint '{manifest.parent}': expected the files that its manifest")
    assert "got a file 'manifest.json' " in text


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"text"', "[" * 100_000, "\xff", ""], ids=lambda c: c[:9]
)
def test_manifest_that_is_none(saved, content: str) -> None:
    out, config, _ = saved
    manifest = out / "checkpoints/step-00000030/manifest.json"
    manifest.write_bytes(content.encode("latin-1"))
    expected = corrupt(manifest.parent, "a file 'manifest.json' that cannot be read")
    assert text_of(checkpoint.check, out, config) == expected
    manifest.unlink()
    os.mkfifo(manifest)  # opening it would block
    assert text_of(checkpoint.check, out, config) == expected


def test_folders_of_somebody_else_among_the_checkpoints(saved) -> None:
    out, config, world = saved
    (out / "checkpoints/step-best").mkdir()
    (out / "checkpoints/step-99999999").write_text("a file")
    assert checkpoint.check(out, config).name == "step-00000030"
    checkpoint.save(out, 40, config, State(40), world)
    assert (out / "checkpoints/step-best").exists() and (out / "checkpoints/step-99999999").exists()


def test_checkpoint_before_a_corrupt_one_is_taken_once_that_is_removed(saved) -> None:
    out, config, _ = saved
    shutil.rmtree(out / "checkpoints/step-00000030")
    assert checkpoint.check(out, config).name == "step-00000020"


def test_resume_with_another_configuration(saved) -> None:
    out, config, _ = saved
    folder = out / "checkpoints/step-00000030"
    assert text_of(checkpoint.check, out, replace(config, lr=0.5, layers=3)) == (
        f"train_moe: argument '--resume': expected the configuration of '{folder}', got "
        "layers was 4 and is 3; lr was 0.001 and is 0.5. Resume with the options of the first run, or "
        "start anew in another --out."
    )


@pytest.mark.parametrize(
    ("before", "now", "format", "got"),
    [
        ((2, 6), (4, 3), "fp8_block", ""),
        ((2, 6), (1, 12), "fp8_block", ""),
        ((2, 6), (4, 3), "fp8_delayed", ""),
        ((2, 6), (1, 12), "fp8_delayed", "ranks was 2 and is 1"),
        ((1, 6), (1, 6), "fp8_delayed", ""),
        ((2, 6), (2, 3), "none", "ranks * batch_size was 12 and is 6"),
    ],
)
def test_ranks_that_share_the_same_sequences(
    before: tuple[int, int], now: tuple[int, int], format: str, got: str
) -> None:
    old, new = (Config(ranks=ranks, batch_size=size, format=format) for ranks, size in (before, now))
    assert "; ".join(difference(asdict(old), new)) == got


@pytest.mark.parametrize(
    ("before", "now", "got"),
    [
        ({}, {"expert_ranks": 1}, ""),
        ({}, {"parameters": "list"}, "parameters was 'packed' and is 'list'"),
        ({"data_parallel": "ddp"}, {}, "data_parallel was 'ddp' and is 'fsdp'"),
        ({"format": "fp8_delayed"}, {"format": "fp8_delayed", "expert_ranks": 2}, ""),
        (
            {"format": "fp8_delayed"},
            {"format": "fp8_delayed", "expert_ranks": 1},
            "expert_ranks was 0 and is 1",
        ),
    ],
)
def test_other_ways_to_share_the_experts(before: dict[str, Any], now: dict[str, Any], got: str) -> None:
    old, new = Config(**before), Config(**now)
    assert "; ".join(difference(asdict(old), new)) == got
    saved_earlier = {name: value for name, value in asdict(old).items() if name not in NEWER_OPTIONS}
    if before.keys() <= {"format"}:  # of a program without these options
        assert "; ".join(difference(saved_earlier, new)) == got


def test_files_that_somebody_has_added_stay(saved) -> None:
    """They stay in a checkpoint that would otherwise be deleted as old."""
    out, config, world = saved
    (out / "checkpoints/step-00000020/notes").write_text("mine")
    for step in (40, 50):
        checkpoint.save(out, step, config, State(step), world)
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["step-00000020", "step-00000040", "step-00000050"]


@pytest.mark.parametrize("name", ["step-00000040.tmp", "step-00000040"])
def test_a_name_that_is_taken(saved, name: str) -> None:
    out, config, world = saved
    mine = out / "checkpoints" / name / "notes"
    mine.parent.mkdir()
    mine.write_text("mine")
    text = text_of(checkpoint.save, out, 40, config, State(40), world)
    reason = "File exists" if name.endswith("tmp") else "Directory not empty"
    assert (
        text.startswith(f"train_moe: checkpoint '{out}/checkpoints/step-00000040': expected ")
        and reason in text
    )
    assert mine.read_text() == "mine"
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert left == {"step-00000020", "step-00000030", name}


@pytest.mark.parametrize(
    "files", [[], [".metadata.tmp", "__0_0.distcp"], ["rank0.pt"], ["__1_0.distcp", "manifest.json"]], ids=str
)
def test_what_a_cut_save_has_left_is_removed(tmp_path: Path, files: list[str]) -> None:
    os.close(RunFolder.new(tmp_path / "run", Config()).lock)
    whole, cut = (tmp_path / "run/checkpoints" / name for name in ("step-00000010", "step-00000020.tmp"))
    for folder in (whole, cut):
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).write_text("weights")
    os.close(RunFolder.old(tmp_path / "run").lock)
    assert whole.exists() and not cut.exists()


@pytest.mark.parametrize("name", ["step-00000020.tmp/notes", "step-20.tmp/__0_0.distcp", "link", "file"])
def test_what_no_save_has_left_stays(tmp_path: Path, name: str) -> None:
    os.close(RunFolder.new(tmp_path / "run", Config()).lock)
    checkpoints, mine = tmp_path / "run/checkpoints", tmp_path / "mine"
    for folder in (checkpoints, mine):
        folder.mkdir()
    (mine / "__0_0.distcp").write_text("mine")
    taken = checkpoints / "step-00000020.tmp"
    if name == "link":
        taken.symlink_to(mine)
    elif name == "file":
        taken.write_text("mine")
    else:
        (checkpoints / name).parent.mkdir()
        (checkpoints / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    os.close(RunFolder.old(tmp_path / "run").lock)
    assert sorted(tmp_path.rglob("*")) == before


def assert_resumes(out: Path, options: list[str], saved: int) -> None:
    """The run resumes from the checkpoint of this step, which is complete."""
    done = train(out, *options, "--resume", "--stop-at", str(saved + 2))
    assert f"resumed from {out / f'checkpoints/step-{saved:08d}'}" in done.stdout
    assert list(losses_of(out)) == list(range(1, saved + 3))
    assert not list((out / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_a_killed_save_and_then_a_disk_that_refuses_one(text_file: Path, tmp_path: Path, ranks: str) -> None:
    """Both leave the checkpoint before. A limit of the file size simulates a full disk without a file system."""
    out = tmp_path / "run"
    options = ["--text", str(text_file), "--steps", "10000", "--ranks", ranks, "--eval-batches", "1"]
    command = arguments(out, *options, "--checkpoint-every", "1")
    run = ForkedRun(command, {**environment(), **forking()})  # which ends the ranks with their launcher
    try:
        deadline = time.monotonic() + 120
        while not (list(out.glob("checkpoints/*.tmp")) and list(out.glob("checkpoints/step-*[0-9]"))):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        run.kill()
        run.wait()
    complete = sorted(path.name for path in out.glob("checkpoints/step-*[0-9]"))
    saved = int(complete[-1][5:])
    time.sleep(1)  # ranks have a second to react

    command = arguments(out, *options, "--resume", "--stop-at", str(saved + 2))
    done = run_forked(command, file_size=(400_000, 400_000))
    assert done.returncode == 2, done.stderr
    assert f"resumed from {out / 'checkpoints' / complete[-1]}" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"train_moe: checkpoint '{out}/checkpoints/step-{saved + 2:08d}': expected a complete write, got on rank 0: "
        "File too large. Free some space, or give another --out; the earlier checkpoints are complete."
    )
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == complete
    assert_resumes(out, options, saved)


SMALL_DISK = (
    'mount -t tmpfs -o size=$0 x "$1" && shift && "$@"; status=$?; cp -r "$OUT" "$KEPT"; exit $status'
)


@pytest.mark.parametrize(
    ("ranks", "size"), [pytest.param("1", "5200k", marks=pytest.mark.long), ("2", "4600k"), ("1", "100k")]
)
def test_a_full_disk(text_file: Path, tmp_path: Path, ranks: str, size: str) -> None:
    """Two checkpoints of 2.2 MB fit, or none. The remaining files are copied to another disk and resumed there."""
    alone = ["unshare", "-rm", "bash", "-c"]
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    if shutil.which("unshare") is None or subprocess.run([*alone, "mount -t tmpfs x $0", disk]).returncode:
        pytest.skip("needs a separate file system")
    out = disk / "run"
    options = ["--text", str(text_file), "--steps", "40", "--ranks", ranks, "--eval-batches", "1"]
    command = arguments(out, *options, "--checkpoint-every", "5")
    paths = {"OUT": str(out), "KEPT": str(kept)}
    done = subprocess.run(
        [*alone, SMALL_DISK, size, disk, *command], env={**environment(), **paths}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "expected a complete write, got on rank 0: No space left on device" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
    saved = sorted(path.name for path in (kept / "checkpoints").iterdir())
    assert saved == ([] if size == "100k" else ["step-00000005", "step-00000010"])
    if saved:
        assert_resumes(kept, options, 10)


def test_a_disk_that_refuses_a_line(text_file: Path, tmp_path: Path) -> None:
    """The failed write is to metrics.jsonl, between two checkpoints."""
    out = tmp_path / "run"
    options = ["--text", str(text_file), "--steps", "200", "--ranks", "1", "--eval-batches", "1"]
    done = run_forked(arguments(out, *options), file_size=(4000, 4000))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"train_moe: '{out}': expected a writable disk with free space, got File too large. Free some space; "
        "--resume continues from the last checkpoint."
    )
