"""A function in a process of its own, so that a crash or a hang in it is a fact and not the end of the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: What stands before the result. Libraries print to the same output, NCCL for example.
_MARK = "transformer_plugin.doctor: "

#: What a child runs. It finds modules where its parent does, and says errors in one line.
_PROGRAM = f"""
import importlib, json, runpy, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["path"]
sys.argv[1:] = []
try:
    where = task["where"]
    functions = runpy.run_path(where) if where.endswith(".py") else vars(importlib.import_module(where))
    answer = {{"result": functions[task["function"]](*task["arguments"])}}
except BaseException as error:
    text = " ".join(str(error).split())
    is_import = isinstance(error, ImportError) and text.startswith("transformer_plugin: ")
    answer = {{"error": text if is_import else f"{{type(error).__name__}}: {{text}}"}}
print("\\n{_MARK}" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What a child has returned, or why it has not."""

    result: Any = None
    error: str = ""


class Child:
    """A process that calls ``function(*arguments)`` of a module, or of a file that imports nothing of the package.

    Arguments and result are what JSON has.
    """

    def __init__(self, where: str, function: str, *arguments: Any) -> None:
        task = {"path": sys.path, "where": where, "function": function, "arguments": arguments}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its own children end with it
        )

    def answer(self, seconds: float) -> Answer:
        """Waits for so many seconds at most, then ends it."""
        try:
            output, errors = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return Answer(error=f"no answer within {seconds:.3g} seconds")
        except BaseException:  # an interrupt
            self.end()
            raise
        for line in reversed(output.splitlines()):
            if line.startswith(_MARK):
                return Answer(**json.loads(line[len(_MARK) :]))
        last_words = errors.strip().splitlines()[-1:]
        return Answer(error=": ".join([_how_it_ended(self._process.returncode), *last_words]))

    def end(self) -> None:
        """Ends it and its children. A process that a driver holds may stay; nobody waits for that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"the process ended with status {code} and no answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"the process was ended by signal {name}"


def ask(seconds: float, where: str, function: str, *arguments: Any) -> Answer:
    """Calls a function in a child."""
    return Child(where, function, *arguments).answer(seconds)


def ask_all(seconds: float, tasks: Sequence[tuple[Any, ...]]) -> list[Answer]:
    """Calls functions in children that run at the same time, and have the same time."""
    children = []
    try:
        for where, function, *arguments in tasks:
            children.append(Child(where, function, *arguments))
        end = time.monotonic() + seconds
        return [child.answer(max(0.1, end - time.monotonic())) for child in children]
    finally:
        for child in children:
            child.end()
