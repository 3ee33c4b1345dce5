#!/usr/bin/env python3
"""Trains a mixture-of-experts language model on text, byte by byte.

    python examples/train_moe.py                      # 2 ranks, the source of Python's standard library
    python examples/train_moe.py --text book.txt --format fp8_block --steps 500
    python examples/train_moe.py --reference          # the same model and data in plain PyTorch
    python examples/train_moe.py --compare            # both, step by step
    python examples/train_moe.py --resume             # goes on where it was stopped, bit for bit
    torchrun --nproc_per_node 2 examples/train_moe.py # the same as the first, under your own launcher

Every rank reads different data (data parallel) and holds its share of the experts (expert parallel). It runs
on GPUs where each rank has one, else on the CPU. Results are in --out: loss.png, metrics.jsonl, sample.txt,
checkpoints.
Ctrl-C finishes the step, saves and exits.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_lm.config import PRESETS, Config, Options, UserError

FORMATS = ("none", "bf16", "fp8_tensor", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
INTERRUPTED = 130
CPU_STEPS = 400  # of a CPU: three to four minutes on two cores


def parse(arguments: list[str]) -> tuple[Config, Options]:
    """Command line to configuration. What the preset says, options override."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--preset", choices=PRESETS, default="small", help="model size (default: small)")
    parser.add_argument(
        "--format", choices=FORMATS, help="numbers that the experts multiply in (default: none)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of parameters (default: float32 on CPU)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="INT", help=f"default {Config.steps}, {CPU_STEPS} on a CPU"
    )
    parser.add_argument("--text", help="file or folder (default: the standard library of this Python)")
    parser.add_argument("--reference", action=flag, help="the experts in plain PyTorch")
    parser.add_argument("--compile", action=flag, help="torch.compile the model")
    parser.add_argument("--compare", action=flag, help="train both implementations in turn")
    parser.add_argument("--resume", action=flag, help="go on from the last checkpoint in --out")
    parser.add_argument("--out", help=f"folder for the results (default: {Options.out})")
    for field in (*fields(Config), *fields(Options)):
        option = "--" + field.name.replace("_", "-")
        if option not in parser._option_string_actions:
            kind = {"int": int, "float": float}[str(field.type)]
            parser.add_argument(
                option, type=kind, metavar=kind.__name__.upper(), help=f"default {field.default}"
            )
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if "ranks" in given and int(os.environ.get("WORLD_SIZE", given["ranks"])) != given["ranks"]:
        raise UserError(
            "argument '--ranks'",
            f"the launcher's {os.environ['WORLD_SIZE']}",
            str(given["ranks"]),
            "Leave it out.",
        )
    if "WORLD_SIZE" in os.environ:
        given["ranks"] = int(os.environ["WORLD_SIZE"])
    values = {**PRESETS[given.pop("preset")], **given}
    on_gpus = _gpus() >= values.get("ranks", Config.ranks)
    values.setdefault("dtype", "bfloat16" if on_gpus else "float32")
    values.setdefault("steps", Config.steps if on_gpus else CPU_STEPS)
    option_names = {field.name for field in fields(Options)}
    config = Config(**{name: value for name, value in values.items() if name not in option_names})
    return config, Options(**{name: value for name, value in values.items() if name in option_names})


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()  # starts no CUDA context


def work(config: Config, options: Options) -> None:
    """What every rank does."""
    from moe_lm.run import Run
    from moe_lm.world import StopRequest, joined_world

    stop = StopRequest()
    with joined_world(repeatable=not options.compare) as world:
        if options.compare:
            from moe_lm.compare import compare

            compare(config, options, world, stop)
            return
        run = Run(config, options, world, stop)
        if run.train():
            run.finish()
        elif world.first:
            print(f"stopped after step {run.step} of {config.steps}; go on with --resume (same options)")


def launch(config: Config, options: Options, arguments: list[str]) -> int:
    """Starts the ranks with torchrun, after checking here what can be checked once."""
    from moe_lm import checkpoint
    from moe_lm.data import load_corpus
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    load_corpus(config.text, config.text_bytes, config.seq_len + 1)
    if options.resume:
        checkpoint.check(Path(options.out), config)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.ranks)))
    # glibc gives freed megabytes back to the system, and each step would ask for them again, a page fault per 4 KiB.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    torchrun = [
        "--standalone",
        "--nproc_per_node",
        str(config.ranks),
        str(Path(__file__).resolve()),
        *arguments,
    ]
    try:
        run(get_args_parser().parse_args(torchrun))
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        return max(1, next(iter(error.failures.values())).exitcode)
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    from moe_lm.world import under_torchrun

    try:
        config, options = parse(arguments)
        config.check()
        if under_torchrun() or config.ranks == 1:
            work(config, options)
            return 0
        return launch(config, options, arguments)
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
