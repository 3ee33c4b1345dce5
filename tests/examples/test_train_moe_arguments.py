"""Invalid options of examples/train_moe.py: one line, exit status 2, and nothing is started or written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import train_moe
from moe_lm.config import Config, Options
from moe_lm.limits import FLOATS, INTEGERS, UserError

from tests.examples.conftest import train

INTEGER_OPTIONS = [field.name for field in (*fields(Config), *fields(Options)) if field.type == "int"]
FLOAT_OPTIONS = [field.name for field in (*fields(Config), *fields(Options)) if field.type == "float"]
NO_ZERO = {
    *("layers", "dim", "heads", "hidden", "experts", "topk", "text_bytes", "seq_len", "batch_size", "ranks"),
    *("tensor_parallel", "shard", "steps", "eval_every", "eval_batches", "checkpoint_every", "clip_norm"),
}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the error line of a rejected command."""
    assert train_moe.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and len(printed.err) < 300
    return printed.err.strip()


def test_every_number_has_limits() -> None:
    assert set(INTEGERS) == set(INTEGER_OPTIONS) and set(FLOATS) == set(FLOAT_OPTIONS)


@pytest.mark.parametrize("name", INTEGER_OPTIONS)
def test_whole_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = ["nan", "inf", "-inf", "1.5", "1e3", "", "x", "9" * 30, "-" + "9" * 30, "9" * 5000]
    values += ["0"] if name in NO_ZERO else []
    values += ["-1"] if name != "seed" else []
    for value in values:
        line = refusal(capsys, option(name), value)
        assert line.startswith(f"train_moe: argument '{option(name)}': expected ") and ", got " in line, line
        shown = value if len(value) < 50 else value[:50]
        assert shown in line, line


@pytest.mark.parametrize("name", FLOAT_OPTIONS)
def test_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = ["nan", "-nan", "inf", "-inf", "-1", "-1e-3", "1e300", "1e999", "", "x", "0x10"]
    values += ["0"] if name in NO_ZERO else []
    for value in values:
        line = refusal(capsys, option(name), value)
        assert line.startswith(f"train_moe: argument '{option(name)}': expected "), line
        assert ", got " in line, line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--heads 0", "argument '--heads': expected at least 1, got 0. Raise it."),
        ("--ranks 0", "argument '--ranks': expected at least 1, got 0. Raise it."),
        ("--checkpoint-every 0", "argument '--checkpoint-every': expected at least 1, got 0. Raise it."),
        ("--lr nan", "argument '--lr': expected a finite number, got nan. The default is 0.001."),
        ("--lr -1", "argument '--lr': expected at least 0.0, got -1.0. Raise it."),
        ("--steps 1e3", "argument '--steps': expected a whole number, got '1e3'. See --help."),
        ("--step 3", "unrecognized arguments: --step 3. See --help."),
        ("--experts 2000", "argument '--experts': expected at most 1024, got 2000. Lower it."),
        (
            "--compare --resume",
            "argument '--resume': expected no --compare, got both. A comparison always starts anew.",
        ),
        (
            "--reference --format mxfp8",
            "argument '--format': expected none, because plain PyTorch supports no other, got mxfp8. "
            "Leave out one of them, or --compare the two.",
        ),
        (
            "--data-parallel none",
            "argument '--data-parallel': expected fsdp or ddp, which average the gradients of 2 ranks, got none. "
            "Choose one of them, or use --ranks 1.",
        ),
        (
            "--expert-ranks 2 --ranks 3 --experts 12",
            "argument '--expert-ranks': expected a divisor of the number of ranks (3), got 2. "
            "Use for example --expert-ranks 1.",
        ),
        (
            "--parameters list --expert-ranks 2",
            "argument '--parameters': expected packed, for experts that are sharded over 2 ranks, got list. "
            "Use --expert-ranks 1.",
        ),
        (
            "--parameters list --expert-ranks 1 --format fp8_delayed",
            "argument '--parameters': expected packed or grouped, for the scales of --format fp8_delayed, got list. "
            "Choose one of them, or another --format.",
        ),
        (
            "--parameters grouped --reference",
            "argument '--parameters': expected packed, the only one in plain PyTorch, got grouped. Leave it out.",
        ),
        (
            "--reference --data-parallel ddp",
            "argument '--data-parallel': expected fsdp, for plain PyTorch with experts that are sharded over ranks, "
            "got ddp. Use --expert-ranks 1.",
        ),
        (
            "--compare --data-parallel ddp",
            "argument '--data-parallel': expected fsdp, for plain PyTorch with experts that are sharded over ranks, "
            "got ddp. Use --expert-ranks 1.",
        ),
        (
            "--cached-weights --data-parallel ddp --format fp8_delayed",
            "argument '--cached-weights': expected a format that quantizes weights from their present values, got "
            "--format fp8_delayed. Leave it out, or choose another --format.",
        ),
        (
            "--cached-weights --format fp8_block",
            "argument '--cached-weights': expected --data-parallel ddp or none, because FSDP2 gathers new weights in "
            "each forward, got fsdp. Choose one of them.",
        ),
        (
            "--ranks 4 --tensor-parallel 3",
            "argument '--tensor-parallel': expected a divisor of the number of ranks (4), got 3. Change one of them.",
        ),
        (
            "--ranks 4 --tensor-parallel 2 --shard 4",
            "argument '--shard': expected a divisor of the 2 ranks with different sequences, got 4. "
            "Change it, --ranks or --tensor-parallel.",
        ),
        (
            "--ranks 3 --experts 6 --tensor-parallel 3",
            "argument '--heads': expected a multiple of --tensor-parallel (3), got 4. Change one of them.",
        ),
        (
            "--tensor-parallel 2 --batch-size 3",
            "argument '--batch-size': expected a multiple of --tensor-parallel (2), got 3. Change one of them.",
        ),
        (
            "--tensor-parallel 2 --expert-ranks 1",
            "argument '--expert-ranks': expected experts over a multiple of the 2 tensor-parallel ranks, got experts "
            "over 1. Leave it out, or raise --expert-ranks.",
        ),
        (
            "--tensor-parallel 2 --parameters list",
            "argument '--parameters': expected experts over a multiple of the 2 tensor-parallel ranks, got experts "
            "over 1. Leave it out, or raise --expert-ranks.",
        ),
        (
            "--tensor-parallel 2 --data-parallel fsdp",
            "argument '--data-parallel': expected ddp, for --tensor-parallel, got fsdp. Leave it out.",
        ),
        (
            "--shard 2 --data-parallel fsdp",
            "argument '--data-parallel': expected ddp, for --shard, got fsdp. Leave it out.",
        ),
        (
            "--shard 2 --reference",
            "argument '--shard': expected 1, for plain PyTorch, got 2. Leave out one of them, or --compare the two.",
        ),
        (
            "--cuda-graph --compare",
            "argument '--cuda-graph': expected no --compare, which reads sizes on the host, got both. "
            "Leave out one of them.",
        ),
        (
            "--hidden 100 --format nvfp4",
            "argument '--hidden': expected a multiple of 16, the block of nvfp4, got 100. "
            "Use for example --hidden 112.",
        ),
    ],
)
def test_the_whole_line(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *arguments.split()) == f"train_moe: {line}"


@pytest.mark.parametrize(
    ("gpus", "arguments", "line"),
    [
        (0, "--ranks 1 --data-parallel none", "expected a GPU, got none. Leave it out."),
        (
            2,
            "",
            "expected --ranks 1 --data-parallel none, got --ranks 2 --data-parallel fsdp. Add these options.",
        ),
        (
            1,
            "--ranks 1",
            "expected --ranks 1 --data-parallel none, got --ranks 1 --data-parallel fsdp. Add these options.",
        ),
        (
            1,
            "--ranks 1 --data-parallel none --reference",
            "expected no --reference, which reads sizes on the host, got both. Leave out one of them.",
        ),
    ],
)
def test_steps_that_are_no_cuda_graph(
    gpus: int,
    arguments: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_moe, "_gpus", lambda: gpus)
    printed = refusal(capsys, "--cuda-graph", *arguments.split())
    assert printed == f"train_moe: argument '--cuda-graph': {line}"


def test_what_is_right_is_taken() -> None:
    command = "--seed -1 --lr 0 --warmup-steps 0 --weight-decay 0 --stop-at 3 --capacity-factor 1.5"
    config, options = train_moe.parse(command.split())
    assert (config.seed, config.lr, config.warmup_steps, config.weight_decay) == (-1, 0.0, 0, 0.0)
    assert (options.stop_at, config.capacity_factor) == (3, 1.5)
    for command, sharing in (
        ("", 2),
        ("--parameters grouped", 1),
        ("--ranks 8 --expert-ranks 4", 4),
        ("--ranks 3 --parameters list --experts 4", 1),
        ("--ranks 4 --experts 6 --expert-ranks 2 --data-parallel ddp --format fp8_block --cached-weights", 2),
    ):
        assert train_moe.parse(command.split())[0].sharing == sharing


def test_sizes_that_no_memory_holds() -> None:
    """A layer of width 1024 has 4 * 1024**2 weights in its attention, and AdamW in float32 takes 16 bytes for each."""
    config = Config(layers=2, dim=1024, heads=4, hidden=1024, experts=8, ranks=2)
    experts = 2 * (4 * 3 * 1024 * 1024) * 16  # per rank: layers, experts with three matrices
    attention = 2 * 4 * 1024 * 1024 * 16 // 2
    config.check_memory(2 * (experts + attention) * 2, 2)
    with pytest.raises(UserError, match=r"expected what fits into this machine's 0.9 GiB .* for 2 ranks"):
        config.check_memory(2 * (experts + attention), 2)


@pytest.mark.parametrize("arguments", ["--dim 1048576", "--batch-size 1048576 --seq-len 1048576"])
def test_a_command_that_no_memory_holds(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_moe, "_gpus", lambda: 0)  # with GPUs the machine's memory is not a limit
    line = refusal(capsys, *arguments.split(), "--dtype", "float32")
    assert line.startswith("train_moe: the sizes of the model, its batch and its ranks: expected what fits")


def test_environment_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert refusal(capsys) == (
        "train_moe: environment variable WORLD_SIZE: expected a number from a launcher, got 'two'. Unset it."
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refusal(capsys, "--ranks", "2") == (
        "train_moe: argument '--ranks': expected the launcher's 4, got 2. Leave it out."
    )


def test_the_command_ends_with_status_2(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--lr", "nan", status=2)
    assert done.stderr == (
        "train_moe: argument '--lr': expected a finite number, got nan. The default is 0.001.\n"
    )
    assert done.stdout == "" and not (tmp_path / "run").exists()
