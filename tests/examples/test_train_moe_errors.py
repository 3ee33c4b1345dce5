"""Bad input to examples/train_moe.py: the exact text, before anything is started or changed."""

from __future__ import annotations

import json
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
