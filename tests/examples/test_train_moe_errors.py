"""Bad input to examples/train_moe.py: the exact text, before anything is started or changed."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from moe_lm import checkpoint
from moe_lm.config import Config, UserError
from moe_lm.data import draw_batch, load_corpus

from tests.examples.conftest import train


def text_of(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def test_text_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.txt"
    assert text_of(load_corpus, str(path), 100, 10) == (
        f"train_moe: argument '--text': expected a file or a folder, got '{path}', which does not exist. "
        "Check the path."
    )


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_text_that_is_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    assert text_of(load_corpus, str(path), 100, 10) == (
        f"train_moe: argument '--text': expected a file with text, got '{path}', which is empty. "
        "Give another file."
    )


@pytest.mark.parametrize("content", [b"abc\0def" * 50, b"caf\xe9 " * 50], ids=["zeros", "latin-1"])
def test_text_that_is_not_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    assert text_of(load_corpus, str(path), 100, 10) == (
        f"train_moe: argument '--text': expected UTF-8 text, got '{path}', which is not. "
        "Give a text file, or convert it to UTF-8."
    )


def test_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0\1")
    assert text_of(load_corpus, str(tmp_path), 100, 10) == (
        f"train_moe: argument '--text': expected a folder with text files, got '{tmp_path}', which has none. "
        "Give another folder."
    )


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_text_that_would_be_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "text"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    text = text_of(load_corpus, str(path), 100, 10)
    assert text.startswith("train_moe: argument '--text': expected a file") and f"got '{path}'" in text
    (tmp_path / "b.txt").write_text("b" * 50)  # in a folder it is passed over
    assert load_corpus(str(tmp_path), 100, 2).source.startswith(f"1 files of {tmp_path}")


@pytest.mark.parametrize("name", ["", "a\0b", "a" * 300, "file/text"])
def test_text_with_a_name_that_no_file_has(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    text = text_of(load_corpus, name, 100, 10)
    assert text.startswith("train_moe: argument '--text': expected a file")
    assert "got '" in text and text.isprintable()


def test_text_that_cannot_be_read(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a" * 50)
    (tmp_path / "b.txt").write_text("b" * 50)
    really = os.open

    def no_access(path, flags, *more):  # root may read everything, so no mode of a file does this
        if Path(path).name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags, *more)

    monkeypatch.setattr(os, "open", no_access)
    assert text_of(load_corpus, str(tmp_path / "a.txt"), 100, 10) == (
        f"train_moe: argument '--text': expected a file that can be read, got '{tmp_path / 'a.txt'}': Permission "
        "denied. Check the path."
    )
    assert load_corpus(str(tmp_path), 100, 2).source == (
        f"1 files of {tmp_path} (1 that cannot be read skipped)"
    )


@pytest.mark.parametrize("folder", [False, True])
def test_no_more_is_read_than_is_taken(tmp_path: Path, folder: bool) -> None:
    """A file of 64 GiB, of which the disk holds the first kilobyte; the rest would be zeros, which are no text."""
    path = tmp_path / "huge.txt"
    path.write_bytes("é".encode() * 512)
    os.truncate(path, 2**36)
    (tmp_path / "later.txt").mkdir()
    tracemalloc.start()
    corpus = load_corpus(str(tmp_path if folder else path), 1001, 10)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    whole = bytes(corpus.train.tolist() + corpus.validation.tolist())
    assert whole == "é".encode() * 500 + b"\xc3"  # the 1001st byte is half of a character


def test_results_of_the_run_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 50)
    for name in ("run", "run.previous"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("metrics" * 50)
    corpus = load_corpus(str(tmp_path), 1000, 2, str(tmp_path / "runs/run"))
    assert corpus.source == f"1 files of {tmp_path}"


def test_text_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word " * 20)
    assert text_of(load_corpus, str(path), 100, 65) == (
        f"train_moe: argument '--text': expected at least 65 bytes of validation text, got 5 bytes "
        f"from {path}. Give more text, or lower --seq-len."
    )


def test_folder_takes_whole_text_files_in_order_and_says_what_it_skipped(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"b" * 50,
        "a.txt": b"a" * 50,
        "c.bin": b"\0" * 9,
        "d.txt": b"d" * 50,
    }.items():
        (tmp_path / name).write_bytes(content)
    corpus = load_corpus(str(tmp_path), 120, 2)
    whole = bytes(corpus.train.tolist() + corpus.validation.tolist())
    assert whole == b"a" * 50 + b"\n" + b"b" * 50 + b"\n" + b"d" * 20
    assert corpus.source == f"3 files of {tmp_path} (1 that are not text skipped)"


def test_batches_differ_by_rank_step_and_seed_and_are_repeatable(text_file: Path) -> None:
    text = load_corpus(str(text_file), 10**6, 65).train

    def draw(**at: int) -> torch.Tensor:
        at = {"seed": 0, "step": 5, "rank": 0, **at}
        inputs, targets = draw_batch(text, 4, 64, device=torch.device("cpu"), **at)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        return inputs

    assert torch.equal(draw(), draw())
    for other in ({"seed": 1}, {"step": 6}, {"rank": 1}):
        assert not torch.equal(draw(), draw(**other))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"experts": 2, "ranks": 4},
            "train_moe: argument '--ranks': expected at most one rank per expert (2 experts), got 4 ranks. "
            "Use fewer ranks or more --experts.",
        ),
        (
            {"experts": 7, "ranks": 2},
            "train_moe: argument '--experts': expected a multiple of the number of ranks (2), got 7. "
            "Use for example --experts 8.",
        ),
        ({"topk": 9}, "train_moe: argument '--topk': expected at most the 8 experts, got 9. Lower it."),
        (
            {"dim": 250},
            "train_moe: argument '--dim': expected a multiple of twice the number of heads (4), got 250. "
            "Change --dim or --heads.",
        ),
        (
            {"hidden": 100, "format": "mxfp8"},
            "train_moe: argument '--hidden': expected a multiple of 32, the block of mxfp8, got 100. "
            "Use for example --hidden 128.",
        ),
        (
            {"dim": 264, "heads": 4, "format": "nvfp4"},
            "train_moe: argument '--dim': expected a multiple of 16, the block of nvfp4, got 264. "
            "Use for example --dim 272.",
        ),
        (
            {"alignment": 8, "format": "nvfp4"},
            "train_moe: argument '--alignment': expected a multiple of 16, the block of nvfp4, got 8. "
            "Use for example --alignment 16.",
        ),
        ({"batch_size": 0}, "train_moe: argument '--batch-size': expected at least 1, got 0. Raise it."),
    ],
)
def test_configurations_that_cannot_run(changes: dict[str, object], text: str) -> None:
    assert text_of(replace(Config(), **changes).check) == text


@pytest.fixture
def saved(tmp_path: Path):
    """Two checkpoints of one rank, saved by the code under test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = SimpleNamespace(first=True, rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu"))
    config = replace(Config(), ranks=1)
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, config, {"step_tensor": torch.tensor(step)}, world)
    yield tmp_path, config, world
    dist.destroy_process_group()


def test_checkpoint_is_found_loaded_and_the_oldest_removed(saved) -> None:
    out, config, world = saved
    folder = checkpoint.check(out, config)
    step, state = checkpoint.load(folder, world)
    assert step == 30 and int(state["step_tensor"]) == 30
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000020", "step-00000030"]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert text_of(checkpoint.check, tmp_path, Config()) == (
        f"train_moe: argument '--resume': expected a checkpoint under '{tmp_path / 'checkpoints'}', got "
        "none. Start without --resume, or give the --out of an earlier run."
    )


def corrupt(folder: Path, got: str) -> str:
    return (
        f"train_moe: checkpoint '{folder}': expected the files that its manifest.json lists, unchanged, "
        f"got {got}. Remove this folder: --resume then takes the checkpoint before it."
    )


def test_checkpoint_with_a_changed_byte(saved) -> None:
    out, config, _ = saved
    path = out / "checkpoints/step-00000030/rank0.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert text_of(checkpoint.check, out, config) == corrupt(
        path.parent, "a file 'rank0.pt' with other content"
    )


def test_checkpoint_cut_short_missing_or_without_manifest(saved) -> None:
    out, config, _ = saved
    folder = out / "checkpoints/step-00000030"
    path = folder / "rank0.pt"
    path.write_bytes(path.read_bytes()[:-5])
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "a file 'rank0.pt' with other content")
    path.unlink()
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "no file 'rank0.pt'")
    manifest = folder / "manifest.json"
    good = manifest.read_text()
    manifest.write_text(good[: len(good) // 2])
    assert text_of(checkpoint.check, out, config) == corrupt(
        folder, "a file 'manifest.json' that cannot be read"
    )
    manifest.write_text(json.dumps({**json.loads(good), "version": 99}))
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "version 99")
    manifest.unlink()
    assert text_of(checkpoint.check, out, config) == corrupt(folder, "no file 'manifest.json'")


@pytest.mark.parametrize(
    "change",
    [
        {"config": None}, {"config": []}, {"config": "x"}, {"files": None}, {"files": ["rank0.pt"]}, {"files": {}},
        {"files": {"rank0.pt": 3}}, {"files": {"rank0.pt": {}}}, {"files": {"../rank0.pt": {}}}, {"step": "30"},
        {"files": {"rank0.pt": {"bytes": "1", "sha256": 2}}}, {"step": 10}, {"step": None}, {"config": {}},
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
    os.mkfifo(manifest)  # would be waited for
    assert text_of(checkpoint.check, out, config) == expected


def test_folders_of_somebody_else_among_the_checkpoints(saved) -> None:
    out, config, world = saved
    (out / "checkpoints/step-best").mkdir()
    (out / "checkpoints/step-99999999").write_text("a file")
    assert checkpoint.check(out, config).name == "step-00000030"
    checkpoint.save(out, 40, config, {}, world)
    assert (out / "checkpoints/step-best").exists() and (out / "checkpoints/step-99999999").exists()


def test_checkpoint_before_a_corrupt_one_is_taken_once_that_is_removed(saved) -> None:
    out, config, _ = saved
    (out / "checkpoints/step-00000030/rank0.pt").unlink()
    (out / "checkpoints/step-00000030/manifest.json").unlink()
    (out / "checkpoints/step-00000030").rmdir()
    assert checkpoint.check(out, config).name == "step-00000020"


def test_resume_with_another_configuration(saved) -> None:
    out, config, _ = saved
    folder = out / "checkpoints/step-00000030"
    assert text_of(checkpoint.check, out, replace(config, lr=0.5, layers=3)) == (
        f"train_moe: argument '--resume': expected the configuration of '{folder}', got "
        "layers was 4 and is 3; lr was 0.001 and is 0.5. Resume with the options of the first run, or "
        "start anew in another --out."
    )


def test_the_command_prints_one_line_and_starts_nothing(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--ranks", "8", status=2)
    assert done.stderr.strip() == (
        "train_moe: argument '--ranks': expected at most one rank per expert (4 experts), got 8 ranks. "
        "Use fewer ranks or more --experts."
    )
    assert done.stdout == "" and not (tmp_path / "run").exists()
