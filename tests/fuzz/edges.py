"""Calls every op with each of its sizes at the limits of 32 and 64 bits: it must raise or have nothing to do.

The tensors are on meta, or on a CPU if they need no memory because they have no elements or one value everywhere. Each
integer argument of a valid call is varied, too. If a call ends the process, it is the last line of the output.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.arguments import copied
from tests.fuzz.run import CLOCK_SECONDS, SECONDS, call, describe, limit_memory
from transformer_plugin.testing.every_op import Call, Sizes, calls, registered

SIZES = (0, 1, 2**31 - 1, 2**31, 2**39, 2**62)
EMPTY = Sizes(T=0, N=0, K=0, groups=(0, 0, 0))


def tables() -> Iterator[Call]:
    """Valid calls, except that one or two sizes are at a limit."""
    for size in SIZES:
        for dimension in ("T", "N", "K"):
            for device, others in (("meta", Sizes()), ("cpu", EMPTY), ("cpu", Sizes(T=0, groups=(0, 0, 0)))):
                yield from calls(replace(others, **{dimension: size}), device, strict=False)
        yield from calls(Sizes(T=size, K=size), "meta", strict=False)


def integers() -> Iterator[Call]:
    """Valid calls with one integer at a limit, or negative."""
    schemas = registered()
    for own in calls():
        for argument in schemas[own.op].arguments:
            if str(argument.type) == "int" and isinstance(own.arguments.get(argument.name), int):
                for size in (-(2**63), -1, *SIZES, 2**63 - 1):
                    yield Call(own.op, own.name, {**copied(own.arguments), argument.name: size})


def listed(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in arguments.items())


def main() -> None:
    torch.set_num_threads(1)
    limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    made = {"release_group"}
    for source in (tables(), integers()):
        for own in source:
            line = f"{own.op}({listed(own.arguments)})"
            if (
                line in made or own.op in made
            ):  # many sizes give an op the same arguments: it does not use all of them
                continue
            made.add(line)
            print(line, flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
            call(own.op, own.arguments)


if __name__ == "__main__":
    main()
