"""Invalid input to examples/train_moe.py: the exact text, before anything is started or changed."""

from __future__ import annotations

import os
import socket
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
    (tmp_path / "b.txt").write_text("b" * 50)  # in a folder, unreadable files are skipped
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

    def no_access(path, flags, *more):  # root may read every file, whatever its mode
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
    """A file of 64 GiB of which only the first kilobyte is on disk; the rest would be zeros, which are not text."""
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


def test_the_command_prints_one_line_and_starts_nothing(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--ranks", "8", status=2)
    assert done.stderr.strip() == (
        "train_moe: argument '--ranks': expected at most one rank per expert (4 experts), got 8 ranks. "
        "Use fewer ranks or more --experts."
    )
    assert done.stdout == "" and not (tmp_path / "run").exists()
