"""--out of examples/train_moe.py: only files of a run are moved and deleted, and only one run at a time writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import train_moe
from moe_lm.config import Config, UserError
from moe_lm.folder import RunFolder, check_new
from moe_lm.run import Metrics

from tests.examples.conftest import EXAMPLES, environment, read_metrics, train


def tree(root: Path) -> dict[str, str | None]:
    """Returns everything under ``root``."""
    return {
        str(path.relative_to(root)): path.read_text() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def make_run(out: Path, step: int) -> None:
    """Makes the files of a run of so many steps."""
    folder = RunFolder.new(out, Config(seed=step))
    os.close(folder.lock)
    (out / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    (out / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "manifest.json"):
        (out / f"checkpoints/step-{step:08d}/{name}").write_text("weights")


def refused(out: Path, below: Path) -> str:
    """Returns the error; nothing under ``below`` may change."""
    before = tree(below)
    with pytest.raises(UserError) as checked:
        check_new(out)
    with pytest.raises(UserError) as caught:
        RunFolder.new(out, Config())
    assert str(checked.value) == str(caught.value) and tree(below) == before
    text = str(caught.value)
    assert text.startswith("train_moe: argument '--out': expected ") and "\n" not in text
    return text


def test_a_run_moves_the_one_before_and_deletes_the_one_before_that(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for step in (1, 2, 3):
        make_run(out, step)
    assert sorted(os.listdir(tmp_path)) == ["run", "run.previous"]
    assert json.loads((out / "config.json").read_text())["seed"] == 3
    previous = tree(tmp_path / "run.previous")
    assert json.loads(previous.pop("config.json") or "")["seed"] == 2
    assert previous == {
        "metrics.jsonl": '{"step": 2}\n',
        "checkpoints": None,
        "checkpoints/step-00000002": None,
        "checkpoints/step-00000002/.metadata": "weights",
        "checkpoints/step-00000002/__0_0.distcp": "weights",
        "checkpoints/step-00000002/manifest.json": "weights",
    }


def test_a_run_from_before_the_program_wrote_its_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(asdict(Config())))
    (out / "checkpoints/step-00000001").mkdir(parents=True)
    (out / "checkpoints/step-00000001/rank0.pt").write_text("weights")
    RunFolder.new(out, Config())
    assert (tmp_path / "run.previous/config.json").exists()


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"layers": 4}', '{"program": "another"}', "[" * 100_000]
)
def test_a_folder_of_somebody_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    assert refused(tmp_path / "thesis", tmp_path) == (
        f"train_moe: argument '--out': expected a new or an empty folder, or one of an earlier run, got "
        f"'{tmp_path / 'thesis'}', which holds other files. Give another --out."
    )
    (tmp_path / "thesis/config.json").write_text(content)
    refused(tmp_path / "thesis", tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", ".git", "checkpoints/mine.pt", "checkpoints/step-1"])
@pytest.mark.parametrize("where", ["run", "run.previous"])
def test_a_run_to_which_somebody_has_added(tmp_path: Path, where: str, name: str) -> None:
    for step in (1, 2):
        make_run(tmp_path / "run", step)
    (tmp_path / where / name).write_text("mine")
    text = refused(tmp_path / "run", tmp_path)
    assert (
        f"expected only files of an earlier run in '{tmp_path / where}'" in text and f"got '{name}'" in text
    )


@pytest.mark.parametrize("name", ["notes", "rank0.pt.mine", "__0_0.distcp.mine", "extra"])
@pytest.mark.parametrize("where", ["run", "run.previous"])
def test_a_checkpoint_to_which_somebody_has_added(tmp_path: Path, where: str, name: str) -> None:
    for step in (1, 1):
        make_run(tmp_path / "run", step)
    path = tmp_path / where / "checkpoints/step-00000001" / name
    if name == "extra":
        path.mkdir()
        (path / "notes").write_text("mine")
    else:
        path.write_text("mine")
    assert f"got 'checkpoints/step-00000001/{name}'" in refused(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "metrics.jsonl.tmp", "sample.txt", "loss.png", "checkpoints"]
)
def test_a_run_that_goes_on_writes_to_its_own_files(tmp_path: Path, name: str, kind: str) -> None:
    out, important = tmp_path / "run", tmp_path / "important"
    make_run(out, 1)
    os.close(RunFolder.old(out).lock)
    important.write_text("years of work")
    path = out / name
    if name == "checkpoints":
        if kind == "folder":
            return
        path.rename(tmp_path / "aside")
    path.unlink(missing_ok=True)
    {"link": lambda: path.symlink_to(important), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    with pytest.raises(
        UserError, match=rf"a run's folder, in which '{name}' is a fil|in which '{name}' is a fol"
    ):
        RunFolder.old(out)
    assert important.read_text() == "years of work"


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_previous_of_somebody_else(tmp_path: Path, kind: str) -> None:
    make_run(tmp_path / "run", 1)
    previous = tmp_path / "run.previous"
    if kind in ("folder", "empty"):
        previous.mkdir()
    if kind == "folder":
        (previous / "photo.jpg").write_text("mine")
    elif kind == "file":
        previous.write_text("mine")
    elif kind == "link":
        make_run(tmp_path / "other", 2)
        previous.symlink_to("other")
    text = refused(tmp_path / "run", tmp_path)
    assert str(previous) in text or "a name for which" in text


def test_names_that_are_no_folder_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, inside = tmp_path / "home", tmp_path / "home/project/src"
    inside.mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    make_run(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(inside)
    for out in (".", "..", "../..", "/", "//", "src/..", "../src", str(inside), str(home), str(tmp_path)):
        assert "current or the home folder" in refused(Path(out), home), out
    for name in ("link", "dangling", "loop"):
        assert "a symbolic link" in refused(tmp_path / name, home)
    for name in ("file", "pipe"):
        assert "which is not a folder" in refused(tmp_path / name, home)
    assert f"'{tmp_path / 'file'}' is not a folder" in refused(tmp_path / "file/run", home)
    refused(Path("a" * 300), home)
    with pytest.raises(UserError, match="a folder that can be made and written to, got '/proc/run'"):
        RunFolder.new(Path("/proc/run"), Config())
    assert (tmp_path / "real/config.json").exists() and not (tmp_path / "real.previous").exists()


def test_the_command_leaves_a_folder_of_somebody_else(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "run.previous").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("mine")
    before = tree(tmp_path)
    for more in ([], ["--compare"]):
        command = ["--out", str(tmp_path / "run"), "--text", str(text_file), "--steps", "2", *more]
        assert train_moe.main(command) == 2
        assert "which holds other files. Give another --out." in capsys.readouterr().err
        assert tree(tmp_path) == before


def test_two_at_a_time(tmp_path: Path) -> None:
    """The second of two runs is rejected while the first runs, also if the folder had an earlier run."""
    out = tmp_path / "run"
    make_run(out, 1)
    code = (
        "import sys, pathlib; from moe_lm.config import Config; from moe_lm.folder import RunFolder\n"
        "folder = RunFolder.new(pathlib.Path(sys.argv[1]), Config(seed=7)); print('mine', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES, env=environment()
    ) as first:
        assert first.stdout is not None and "the earlier run" in first.stdout.readline()
        assert first.stdout.readline() == "mine\n"
        before = tree(tmp_path)
        for claim in (lambda: RunFolder.new(out, Config()), lambda: RunFolder.old(out)):
            with pytest.raises(UserError, match="a folder that no other run writes to"):
                claim()
        assert tree(tmp_path) == before
        first.communicate("")
    RunFolder.new(out, Config())


def test_two_commands_at_a_time(tmp_path: Path, text_file: Path) -> None:
    """Every rank of the second command exits; one line is printed."""
    folder = RunFolder.new(tmp_path / "run", Config())
    done = train(tmp_path / "run", "--text", str(text_file), status=2)
    os.close(folder.lock)
    assert done.stderr == (
        f"train_moe: argument '--out': expected a folder that no other run writes to, got '{tmp_path / 'run'}', "
        "to which another run writes. Give another --out.\n"
    )
    assert os.listdir(tmp_path) == ["run"]


def test_many_at_once(tmp_path: Path) -> None:
    """Of eight runs that start together each one is rejected or gets the folder; no folder is lost or duplicated."""
    out = tmp_path / "run"
    code = (
        "import sys, pathlib; from moe_lm.config import Config, UserError; from moe_lm.folder import RunFolder\n"
        "try:\n    folder = RunFolder.new(pathlib.Path(sys.argv[1]), Config(seed=int(sys.argv[2])))\n"
        "except UserError as error:\n    print('refused', error)\nelse:\n    print('mine', flush=True)\n"
        "sys.stdin.read()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(out), str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES, env=environment(),
        )
        for seed in range(8)
    ]  # fmt: skip
    said = [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        process.communicate("")
    owners = [seed for seed, line in enumerate(said) if line == "mine\n"]
    assert len(owners) == 1 and all("argument '--out'" in line for line in said if line != "mine\n")
    assert json.loads((out / "config.json").read_text())["seed"] == owners[0]
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "tail", [b'{"step": 2, "lo', b"\x00" * 400, b"\xff\xfe\x80", b"7\n", b'{"loss": 1}\n', b"[" * 9999]
)
def test_records_after_a_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 5.5}\n{"step": 2, "loss": 5.0}\n{"step": 3, "loss": 4.0}\n' + tail)
    metrics = Metrics(path, 2)
    metrics.write({"step": 3, "loss": 4.5})
    assert read_metrics(tmp_path) == [{"step": s, "loss": x} for s, x in ((1, 5.5), (2, 5.0), (3, 4.5))]
    assert metrics.losses == {1: 5.5, 2: 5.0, 3: 4.5} and os.listdir(tmp_path) == ["metrics.jsonl"]
