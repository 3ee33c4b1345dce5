#!/usr/bin/env python3
"""Trains a mixture-of-experts language model on text, byte by byte.

    python examples/train_moe.py                      # 2 ranks, the source of Python's standard library
    python examples/train_moe.py --text book.txt --format fp8_block --steps 500
    python examples/train_moe.py --reference          # the same model and data in plain PyTorch
    python examples/train_moe.py --compare            # both, step by step
    python examples/train_moe.py --resume             # continues a stopped run, bit for bit
    python examples/train_moe.py --resume --steps 800 # makes it longer, with the last learning rate
    python examples/train_moe.py --data-parallel ddp --parameters list --expert-ranks 1
    python examples/train_moe.py --ranks 4 --tensor-parallel 2 --shard 2
    python examples/train_moe.py --ranks 1 --data-parallel none --cuda-graph --format fp8_block --cached-weights
    torchrun --nproc_per_node 2 examples/train_moe.py # the same as the first, with another launcher

Every rank reads different data (FSDP2 or DDP) and has its share of the experts (expert parallelism). It runs on GPUs
if there is one for each rank, otherwise on the CPU. Results are in --out: loss.png, metrics.jsonl, sample.txt,
checkpoints. A new run renames an earlier one to <out>.previous; it never moves or deletes other files. Ctrl-C finishes
the step, saves and exits. After a second Ctrl-C, or if a rank does not respond, the run ends without saving.

--resume takes the options of the run from its config.json. Only --steps may be another one, and how the ranks divide
the work (--ranks, --batch-size, --tensor-parallel, --shard, --expert-ranks), if a step has as many sequences as before.
The learning rate of a step stays what it was: the schedule has the --steps of the first command, or its
--schedule-steps, and further steps have the last learning rate, a twentieth of --lr. How a run is executed is not
saved: repeat --cuda-graph, --checkpoint-every, --sample-length.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_lm.config import PRESETS, Config, Options, memory_here
from moe_lm.limits import CHOICES, UserError, shortened
from moe_lm.resume import continued
from moe_lm.stopping import INTERRUPTED, StopRequest

CPU_STEPS = 400  # default on a CPU: three to four minutes on two cores
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # the disk failed, not the program


class Parser(argparse.ArgumentParser):
    """Raises errors in the form of the other errors here: one line, and the exit status 2 from :func:`main`."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)", r"argument '\1'", message).rstrip(".")
        raise UserError.of_line(f"train_moe: {message}. See --help.")


def number(kind: Callable[[str], float], name: str) -> Callable[[str], float]:
    """Returns a parser of option values. ``config.py`` checks their limits."""

    def read(text: str) -> float:
        try:
            return kind(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"expected {name}, got '{shortened(text)}'.") from None

    return read


INTEGER, FLOAT = number(int, "a whole number"), number(float, "a number")


def _parser() -> Parser:
    """Every field of the configuration is an option."""
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser._negative_number_matcher = re.compile(
        r"-(\.?\d|inf|nan)", re.IGNORECASE
    )  # "-1e3" and "-inf" are values
    flag = argparse.BooleanOptionalAction
    words = {
        "format": "number format of the experts' products (default: none)",
        "dtype": "dtype of parameters (default: float32 on CPU)",
        "parameters": "layout of the experts' weights (default: packed)",
        "data_parallel": "none: one rank (default: fsdp, ddp with --tensor-parallel or --shard)",
    }
    parser.add_argument("--preset", choices=PRESETS, help="model size (default: small)")
    for name, text in words.items():
        parser.add_argument(f"--{name.replace('_', '-')}", choices=CHOICES[name], help=text)
    parser.add_argument(
        "--steps", type=INTEGER, metavar="INT",
        help=f"default {Config.steps}, {CPU_STEPS} on a CPU; with --resume also more than before",
    )  # fmt: skip
    parser.add_argument(
        "--schedule-steps", type=INTEGER, metavar="INT",
        help="steps until the learning rate has fallen to a twentieth, where it stays (default: --steps of a new run)",
    )  # fmt: skip
    parser.add_argument("--text", help="file or folder (default: the standard library of this Python)")
    parser.add_argument("--reference", action=flag, help="run the experts in plain PyTorch")
    parser.add_argument(
        "--tensor-parallel",
        type=INTEGER,
        metavar="T",
        help="T ranks share sequences and dense layers (default: 1)",
    )
    parser.add_argument(
        "--shard", type=INTEGER, metavar="N",
        help="shard dense layers, and experts that all ranks would hold, over N ranks with other data (default: 1)",
    )  # fmt: skip
    parser.add_argument("--cached-weights", action=flag, help="quantize the experts' weights once per step")
    parser.add_argument("--cuda-graph", action=flag, help="a training step is one CUDA graph (one GPU)")
    parser.add_argument("--compile", action=flag, help="torch.compile the model")
    parser.add_argument("--compare", action=flag, help="train both implementations, alternating step by step")
    parser.add_argument("--resume", action=flag, help="continue the run in --out, with its options")
    parser.add_argument("--out", help=f"folder for the results (default: {Options.out})")
    for field in (*fields(Config), *fields(Options)):
        option = "--" + field.name.replace("_", "-")
        if option not in parser._option_string_actions:
            kind = {"int": INTEGER, "float": FLOAT}[str(field.type)]
            name = str(field.type).upper()
            parser.add_argument(option, type=kind, metavar=name, help=f"default {field.default}")
    return parser


def parse(arguments: list[str]) -> tuple[Config, Options]:
    """Converts the command line to a configuration. Options override the preset, or the run that is resumed."""
    given = {
        name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None
    }
    launched = {
        name: _from_launcher(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    }
    size = launched["WORLD_SIZE"]
    if size is not None and given.setdefault("ranks", size) != size:
        raise UserError("argument '--ranks'", f"the launcher's {size}", str(given["ranks"]), "Leave it out.")
    option_names = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in given.items() if name in option_names})
    options.check()
    if options.resume:
        values = continued(Path(options.out), given)
    else:
        chosen = {name: value for name, value in given.items() if name not in option_names}
        values = {**PRESETS[options.preset], **chosen}
        if values.get("tensor_parallel", 1) > 1 or values.get("shard", 1) > 1:
            values.setdefault("data_parallel", "ddp")
    Config(**values).check()  # before the import of torch, which takes seconds
    here = launched["LOCAL_WORLD_SIZE"] or values.get("ranks", Config.ranks)
    gpus = _gpus()
    on_gpus = gpus >= here
    values.setdefault("dtype", "bfloat16" if on_gpus else "float32")
    values.setdefault("steps", Config.steps if on_gpus else CPU_STEPS)
    config = Config(**values)
    options.check_graph(config, gpus)
    if options.compare:
        replace(config, reference=False).in_plain_pytorch().check()
    if not on_gpus:
        config.check_memory(memory_here(), here)
    return config, options


def _from_launcher(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"environment variable {name}", "a number from a launcher", f"'{text}'", "Unset it.")
    return None if text is None else int(text)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()  # does not start a CUDA context


def work(config: Config, options: Options, stop: StopRequest) -> int:
    """The main function of every rank. Returns the exit status."""
    import torch
    from moe_lm.run import Run, say
    from moe_lm.world import joined_world

    try:
        with joined_world(
            config.sharing, not options.compare, tensor_parallel=config.tensor_parallel, shard=config.shard
        ) as world:
            if options.compare:
                from moe_lm.compare import compare

                compare(config, options, world, stop)
                return INTERRUPTED if stop.requested else 0
            run = Run(config, options, world, stop)
            if run.train():
                run.finish()
            elif world.first:
                of_run = "" if options.out == Options.out else f" --out {shlex.quote(options.out)}"
                say(f"stopped after step {run.step} of {config.steps}; continue with --resume{of_run}")
            return INTERRUPTED if run.interrupted else 0
    except UserError:
        raise
    except Exception as error:
        if stop.requested:  # another rank has exited, so a collective with it failed
            stop.leave()
        if isinstance(error, OSError) and error.errno in DISK:
            got, do = (
                os.strerror(error.errno),
                "Free some space; --resume continues from the last checkpoint.",
            )
            raise UserError(f"'{options.out}'", "a writable disk with free space", got, do) from None
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            do = "Lower --batch-size, --seq-len or the sizes of the model."
            got = str(error).partition("\n")[0].rstrip(".")
            print(UserError("the model and its batch", "enough memory", got, do), file=sys.stderr)
            return 2
        raise


def launch(config: Config, options: Options, arguments: list[str], stop: StopRequest) -> int:
    """Checks here what can be checked once, then starts the ranks. Returns the exit status."""
    from moe_lm.data import load_corpus
    from moe_lm.folder import check_new
    from moe_lm.launch import run_ranks

    load_corpus(config.text, config.text_bytes, config.seq_len + 1, options.out)
    if options.resume:
        from moe_lm import checkpoint  # its import of torch.distributed.checkpoint takes half a second

        checkpoint.check(Path(options.out), config)
    else:
        check_new(Path(options.out))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.ranks)))
    # By default glibc returns freed memory to the system, and each step would get it again with a page fault per 4 KiB.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    return run_ranks([sys.executable, str(Path(__file__).resolve()), *arguments], config.ranks, stop)


def main(arguments: list[str], stop: StopRequest | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 an error that the user can fix, 130 interrupted."""
    try:
        config, options = parse(arguments)
        under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        stop = stop or StopRequest()
        if under_launcher or config.ranks == 1:
            return work(config, options, stop)
        return launch(config, options, arguments, stop)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    stop = StopRequest()
    stop.end(main(sys.argv[1:], stop))
