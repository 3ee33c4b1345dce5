"""Shared by all benchmarks: a description of machine and versions, timing, and writing JSON.

How to time (each rule prevents an error that has occurred):

- Competitors alternate in one run, and only ratios from one run are compared. Report the median and the quartiles.
- Host time: several calls without waiting for the device, few enough that its queue never fills, then one wait.
- Device time: the same calls replayed from a CUDA graph after a pause, so that neither the host nor a GPU that has
  lowered its clock is measured. The clock is recorded.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import transformer_plugin

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Time:
    """Microseconds per call: the median of the rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> Time:
        """Computes it from one value per round, in microseconds."""
        low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return Time(round(median, 4), round(low, 4), round(high, 4))


def synchronize(device: torch.device) -> None:
    """Waits for the device if it is asynchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_times(
    calls: dict[str, Callable[[], Any]],
    device: torch.device,
    rounds: int = 31,
    repeat: int = 200,
    seldom: Collection[str] = (),
    warm: int = 3,
) -> dict[str, Time]:
    """Returns the host time of each call; the calls alternate. There is one wait after ``repeat`` calls.

    The calls named in ``seldom`` are slow: they run once, in every third round. ``warm`` rounds are not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + warm):
        for name, call in calls.items():
            if name in seldom and turn % 3:
                continue
            times = 1 if name in seldom else repeat
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(times):
                call()
            seconds = time.perf_counter() - begin
            if turn >= warm:  # the first rounds load code and fill caches
                samples[name].append(seconds / times * 1e6)
    synchronize(device)
    return {name: Time.of(values) for name, values in samples.items()}


def device_times(
    calls: dict[str, Callable[[], Any]], rounds: int = 9, repeat: int = 8, rest: float = 0.1
) -> dict[str, Time]:
    """Returns the device time of each CUDA call: a graph of ``repeat`` calls, replayed after a pause, alternating."""
    graphs = {name: graph_of(call, repeat) for name, call in calls.items()}
    return rested_times({name: graph.replay for name, graph in graphs.items()}, repeat, rounds, rest)


def rested_times(
    calls: dict[str, Callable[[], Any]],
    repeat: int,
    rounds: int = 9,
    rest: float = 0.1,
    ready: Callable[[], Any] | None = None,
) -> dict[str, Time]:
    """Returns the device time of CUDA calls that do a thing ``repeat`` times, divided by that number.

    The calls alternate, each after a pause, as often on every rank of a group. ``ready`` lets ranks begin together.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            time.sleep(rest)
            if ready is not None:
                ready()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3 / repeat)
    return {name: Time.of(values) for name, values in samples.items()}


def sustained_times(
    calls: dict[str, Callable[[], Any]], rounds: int = 18, warm: float = 0.3
) -> dict[str, Time]:
    """Returns the device time of each CUDA call under sustained load, at the clock to which the GPU then falls.

    The calls alternate without pauses, and are timed after ``warm`` seconds.
    """
    return launched_sustained_times(
        {name: graph_of(call, 1).replay for name, call in calls.items()}, rounds, warm
    )


def launched_sustained_times(
    calls: dict[str, Callable[[], Any]], rounds: int = 18, warm: float = 0.3
) -> dict[str, Time]:
    """Like :func:`sustained_times`, but the calls are made as they are: replays of graphs, or launches."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            both = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            both[0].record()
            call()
            both[1].record()
            events[name].append(both)
    torch.cuda.synchronize()
    return {name: Time.of([a.elapsed_time(b) * 1e3 for a, b in pairs]) for name, pairs in events.items()}


def launched_times(
    calls: dict[str, Callable[[], Any]],
    rounds: int = 5,
    rest: float = 0.12,
    most: int = 8,
    budget: float = 30e3,
) -> dict[str, Time]:
    """Returns the device time of each CUDA call, made as it is: a replay of a graph, or a launch with its host time.

    The calls alternate. Each runs up to ``most`` times after a pause, fewer if that takes more than ``budget``
    microseconds, after which the GPU lowers its clock.
    """

    def rested(call: Callable[[], Any], times: int) -> float:
        torch.cuda.synchronize()
        time.sleep(rest)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / times

    for call in calls.values():
        call()
    repeats = {name: max(1, min(most, int(budget / rested(call, 1)))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(rested(call, repeats[name]))
    return {name: Time.of(values) for name, values in samples.items()}


def graph_of(call: Callable[[], Any], repeat: int = 1, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Captures calls in a CUDA graph. Graphs that are replayed one after the other may share a memory ``pool``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, may query events meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for _ in range(repeat):
            call()
    return graph


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so many seconds, and again every 5 s in case something catches it."""

    def stop(*_: object) -> None:
        raise TimeoutError

    logging.disable(logging.CRITICAL)  # interrupted compilers print whole graphs
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    query = "--query-gpu=clocks.sm,clocks.max.sm,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
    try:
        clock, limit, driver = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split(",")
    except (OSError, ValueError, subprocess.CalledProcessError):
        clock = limit = driver = "unknown"
    names = {"sm_clock_mhz": clock.strip(), "sm_clock_max_mhz": limit.strip(), "driver": driver.strip()}
    return {"name": torch.cuda.get_device_name(device), "count": torch.cuda.device_count(), **names}


def environment(device: torch.device) -> dict[str, Any]:
    """Describes versions, device and clocks, without which timings cannot be interpreted."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "transformer_plugin": transformer_plugin.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": _gpu(device) if device.type == "cuda" else None,
    }


def write(benchmark: str, device: torch.device, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Writes ``results/<benchmark>_<device>.json``. A :class:`Time` in a row becomes three numbers."""
    plain = [
        {key: asdict(value) if isinstance(value, Time) else value for key, value in row.items()}
        for row in rows
    ]
    document = {
        "benchmark": benchmark,
        "device": device.type,
        "environment": environment(device),
        **more,
        "rows": plain,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}_{device.type}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")
    return path


def devices() -> list[torch.device]:
    """Returns the CPU, and the GPU if there is one."""
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def number(value: Any, digits: int = 0, scale: float = 1.0) -> str:
    """A figure in a table, or the median of a measured one; nothing for None."""
    if value is None:
        return ""
    value = value["median"] if isinstance(value, dict) else value
    return f"{value / scale:.{digits}f}"


def table(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, without the columns that are empty in every line."""
    kept = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(row[i] for i in kept)} |\n" for row in rows)
