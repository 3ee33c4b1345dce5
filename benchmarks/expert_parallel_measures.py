"""Times, bytes and agreement of several ranks, for :mod:`benchmarks.expert_parallel`.

All ranks make the same calls as often. Each round begins on all of them together, and its time is that of the slowest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Time, graph_of, synchronize
from transformer_plugin.testing.numerics import relative_error

#: the microseconds of load after which a GPU lowers its clock.
BUDGET = 30e3
#: the most calls in a row, and the calls in one graph of a short work.
MOST, IN_GRAPH = 8, 8
#: relative, of a result of a graph: sums with atomics are made in another order.
GRAPH_BOUND = 2**-8


@dataclass(frozen=True)
class Call:
    """What is timed."""

    function: Callable[[], Any]
    #: "graph" (replayed), or "eager" with the host's time.
    mode: str
    #: how often the function does the work.
    repeat: int = 1
    #: what has to live as long: a graph reads its inputs where they were.
    inputs: Any = None


def agreed(note: str | None) -> str | None:
    """The note of the first rank that has one, on every rank: no rank goes on alone."""
    notes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, note)
    return next((each for each in notes if each is not None), None)


def tried(call: Callable[[], Any]) -> str | None:
    """Calls it. Says why that failed, on this rank or another: that a competitor does not run here is a result."""
    note = None
    try:
        call()
    except Exception as error:
        note = f"failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return agreed(note)


def largest(values: list[float], device: torch.device) -> list[float]:
    """The largest value of any rank, for each."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def begin_together(device: torch.device) -> None:
    """Returns on all ranks at about the same time."""
    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def _microseconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Runs the calls one after the other, without waiting between them."""
    if device.type == "cpu":
        found = []
        for call in calls:
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) * 1e6)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    synchronize(device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]


def _slowest(samples: dict[str, list[float]], device: torch.device) -> dict[str, Time]:
    rounds = {name: largest(values, device) for name, values in samples.items()}
    return {name: Time.of(values) for name, values in rounds.items()}


def rested(calls: dict[str, Call], device: torch.device, rounds: int, rest: float) -> dict[str, Time]:
    """Times after ``rest`` seconds. The calls alternate; each runs a few times in a row, as often on every rank."""

    def sample(call: Call, times: int) -> float:
        synchronize(device)
        time.sleep(rest if device.type == "cuda" else 0.0)
        begin_together(device)
        return sum(_microseconds([call.function] * times, device)) / times

    once = largest([sample(call, 1) for call in calls.values()], device)
    counts = [max(1, min(MOST, int(BUDGET / value))) for value in once]
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for (name, call), count in zip(calls.items(), counts, strict=True):
            samples[name].append(sample(call, count) / call.repeat)
    return _slowest(samples, device)


def sustained(
    calls: dict[str, Call], device: torch.device, rounds: int, warm: float = 0.3
) -> dict[str, Time]:
    """Times without pauses, after about ``warm`` seconds of load; on a CPU none."""
    if device.type == "cpu" or not calls:
        return {}
    begin_together(device)
    functions = [call.function for call in calls.values()]
    (once,) = largest([sum(_microseconds(functions, device))], device)
    times = max(1, int(warm * 1e6 / once))
    found = _microseconds(functions * (times + rounds), device)[times * len(functions) :]
    samples = {name: found[i :: len(functions)] for i, name in enumerate(calls)}
    return _slowest(samples, device)


def captured(
    call: Callable[[], Any], finish: Callable[[Any], Tensor], device: torch.device, pool: Any
) -> tuple[Call, str | None]:
    """A graph of several calls of a short work, whose result after a replay is compared with the one without a graph.

    ``finish`` makes of a result what is compared. On a CPU, and if there is no right graph, the call itself, and why.
    """
    eager = Call(call, "eager")
    if device.type == "cpu":
        return eager, None
    graphs: list[torch.cuda.CUDAGraph] = []
    kept: list[Any] = [None]
    errors: list[float] = []

    def keep() -> None:
        kept[0] = call()

    def capture() -> None:
        graphs.append(graph_of(keep, IN_GRAPH, pool))

    def check() -> None:
        graphs[0].replay()
        errors.append(relative_error(finish(kept[0]), finish(call())))

    note = tried(capture) or tried(check)
    if note is not None:
        return eager, f"not captured: {note}"
    (error,) = largest(errors, device)
    if not error < GRAPH_BOUND:
        return eager, f"wrong in a graph: relative error {error:.1e}"
    return Call(graphs[0].replay, "graph", IN_GRAPH, inputs=call), None


def link_bytes(text: str) -> list[int]:
    """Bytes sent and received over all links of a GPU, as ``nvidia-smi nvlink -gt d`` prints them in KiB."""
    return [
        1024 * sum(int(value) for value in re.findall(rf"Data {way}: (\d+) KiB", text))
        for way in ("Tx", "Rx")
    ]


class LinkCounters:
    """The bytes that this process's GPU has sent and received over NVLink, as its driver counts them."""

    def __init__(self, device: torch.device) -> None:
        self.command: list[str] = []
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", uuid]

    def _read(self) -> list[int]:
        if not self.command:
            return [0, 0]
        # Not through NVML's Python module: with one field for each link, its process ended with a broken heap.
        run = subprocess.run(self.command, capture_output=True, text=True, timeout=60, check=False)
        return link_bytes(run.stdout)

    def of(self, call: Call, device: torch.device, times: int = 4) -> dict[str, int]:
        """The bytes of one work, the most of any rank; nothing where they are not counted."""
        before = self._read()
        begin_together(device)  # no rank sends before all have read
        for _ in range(times):
            call.function()
        synchronize(device)
        begin_together(device)
        after = self._read()
        each = [(new - old) / times / call.repeat for new, old in zip(after, before, strict=True)]
        sent, received = (round(value) for value in largest(each, device))
        return {"counted_sent": sent, "counted_received": received} if sent > 0 else {}
