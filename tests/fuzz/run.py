"""Calls ops with random arguments, in forked children: for any arguments, a call must return or raise.

``python -m tests.fuzz.run --op activation --seed 17`` makes one call in this process, after printing its arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.arguments import Tables
from transformer_plugin.testing.every_op import overload

SECONDS = 10.0  # CPU time of one call; elapsed time may be longer on a busy machine
CLOCK_SECONDS = 120.0
MEMORY = 3 << 30  # in addition to what the process already uses


def describe(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(describe(item) for item in value)}]"
    if not isinstance(value, Tensor):
        return repr(value)[:200]
    text = f"{value.dtype} {tuple(value.shape) if not value.is_nested else 'nested'} {value.device.type}"
    if not value.is_nested and value.layout == torch.strided and not value.is_contiguous():
        text += f" strides {value.stride()}"
    if value.dtype in (torch.int32, torch.int64) and value.numel() <= 8 and value.device.type == "cpu":
        text += f" {value.tolist()}"
    marks = [m for m in ("requires_grad", "is_neg", "is_conj") if marked(value, m)]
    return f"<{' '.join([text, *marks])}>"


def marked(tensor: Tensor, mark: str) -> bool:
    found = getattr(tensor, mark)
    return bool(found() if callable(found) else found)


def call(op: str, arguments: dict[str, Any]) -> str:
    """Returns the error, or "" without one. Also computes the gradients of outputs that have any."""
    try:
        found = overload(op)(**arguments)
        outputs = [found] if isinstance(found, Tensor) else list(found or ())
        wanted = [o.float().sum() for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        if wanted:
            torch.stack(wanted).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def child(tables: Tables, op: str, seeds: list[int], pipe: int) -> None:
    """Writes each seed to the pipe before its call, then the result."""
    limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with os.fdopen(pipe, "w") as said:
        for seed in seeds:
            print(json.dumps({"op": op, "seed": seed}), file=said, flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
            result = call(op, tables.draw(op, seed))
            print(json.dumps({"op": op, "seed": seed, "result": result}), file=said, flush=True)


def run(tables: Tables, op: str, seeds: Iterable[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the results, and a line for each call that ended its process. A new child then continues."""
    left, results, failures = list(seeds), list[dict[str, Any]](), list[str]()
    while left:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                child(tables, op, left, writing)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as output:
            lines = [json.loads(line) for line in output]
        status = os.waitpid(pid, 0)[1]
        results += [line for line in lines if "result" in line]
        done = {line["seed"] for line in lines}
        left = [seed for seed in left if seed not in done]
        if status != 0 or (left and not done):
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"
            failures.append(f"{ended}: python -m tests.fuzz.run --op {op} --seed {lines[-1]['seed']}")
            left = [] if not done else left
    return results, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", nargs="*", help="the ops, or all")
    parser.add_argument("--sets", type=int, default=20, help="sets of arguments for each op")
    parser.add_argument("--seed", type=int, help="one set, in this process")
    parser.add_argument("--results", action="store_true", help="print what came of each call")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before any work: a forked child of a process with threads would hang
    tables = Tables()
    if arguments.seed is not None:
        [op] = arguments.op
        drawn = tables.draw(op, arguments.seed)
        print(op, *(f"  {name} = {describe(value)}" for name, value in drawn.items()), sep="\n", flush=True)
        print(call(op, drawn) or "returned")
        return
    failures = list[str]()
    for op in arguments.op or sorted(tables.schemas):
        results, failed = run(tables, op, range(arguments.sets))
        failures += failed
        for line in failed:
            print(line, flush=True)
        for result in results if arguments.results else ():
            print(json.dumps(result), flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
