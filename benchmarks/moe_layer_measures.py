"""What :mod:`benchmarks.moe_layer` measures of one competitor: times, memory, host time and launches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    Time,
    graph_of,
    host_times,
    launched_sustained_times,
    launched_times,
    synchronize,
    time_limit,
)
from benchmarks.moe_layer_cases import Competitor, fault
from transformer_plugin.testing.launches import launched
from transformer_plugin.testing.numerics import relative_error

#: the calls of a host time, on a CPU, and the launches that the GPU's queue certainly holds.
HOST_CALLS, CPU_CALLS, QUEUE = 50, 3, 900
#: how a note begins on a peer that tunes its kernels for too long.
TOO_SLOW = "no first step within"


@dataclass
class Entry:
    """A competitor in one mode."""

    competitor: Competitor
    mode: str
    #: tokens to output.
    function: Callable[[Tensor], Tensor]
    #: columns of the JSON file that do not depend on the routing.
    measures: dict[str, Any] = field(default_factory=dict)
    #: replays of captured graphs, of the mode "graph".
    replays: dict[str, Callable[[], None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The competitor and the mode."""
        return f"{self.competitor.name}, {self.mode}"

    def clear(self) -> None:
        """Drops the gradients."""
        for leaf in (self.competitor.data.tokens, *self.competitor.leaves()):
            leaf.grad = None

    def launch_step(self) -> None:
        """A forward and backward with fresh gradients."""
        self.clear()
        self.function(self.competitor.data.tokens).backward(self.competitor.data.grad)

    def launch_forward(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self.function(self.competitor.data.tokens)

    def call(self, work: str) -> Callable[[], Any]:
        """What is timed of ``work``: "step", "forward" or "quantize"."""
        launched = {
            "step": self.launch_step,
            "forward": self.launch_forward,
            "quantize": self.competitor.quantize_weights,
        }
        return self.replays.get(work, launched[work])


def attempt(call: Callable[[], Any], limit: float) -> str | None:
    """Calls within ``limit`` seconds. Says why that failed: that a library does not run here is a result. 0: no limit,
    and errors are raised."""
    if not limit:
        call()
        return None
    try:
        # In this thread: a backward in another thread would not be interrupted.
        with torch.autograd.set_multithreading_enabled(False), time_limit(limit):
            call()
    except TimeoutError:
        return f"{TOO_SLOW} {limit:g} s"
    except Exception as error:
        return f"failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None


def first_step(entry: Entry, forward_only: bool, limit: float = 0.0) -> str | None:
    """Measures the first call of a new shape. Says why there is none, if it fails or takes more than ``limit`` s."""
    device = entry.competitor.data.device

    def call() -> None:
        entry.launch_forward() if forward_only else entry.launch_step()
        synchronize(device)

    synchronize(device)
    begin = time.perf_counter()
    note = attempt(call, limit)
    entry.measures["first_step_s"] = round(time.perf_counter() - begin, 3)
    return note


def gradients(entry: Entry) -> dict[str, Tensor]:
    """Copies of the gradients that the last step left."""
    tokens = entry.competitor.data.tokens.grad
    assert tokens is not None
    return {name: grad.clone() for name, grad in {"tokens": tokens, **entry.competitor.gradients()}.items()}


def disagreement(entry: Entry, eager: dict[str, Tensor], got: dict[str, Tensor]) -> str | None:
    """Says which result of a compiled or captured step differs from the eager one's by more than the bound."""
    return fault(entry.competitor, {name: relative_error(got[name], value) for name, value in eager.items()})


def capture(entry: Entry, works: list[str], pool: Any, found: dict[str, Tensor]) -> None:
    """Captures each work of the mode "graph". Replays the step once, and puts its gradients into ``found``."""
    for work in works:
        graph = graph_of(entry.call(work), 1, pool)
        if work == "step":
            graph.replay()
            torch.cuda.synchronize()
            found.update(gradients(entry))
        entry.replays[work] = graph.replay
        entry.clear()  # the next graph of the pool writes to that memory


def step_peak(entry: Entry) -> int:
    """Peak memory of a step in bytes, above what is allocated between two steps, gradients included."""
    entry.launch_step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    entry.launch_step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def step_launches(entry: Entry) -> dict[str, int]:
    """The launches of a forward with gradients, and of its backward."""
    data, outputs = entry.competitor.data, []
    entry.clear()
    forward = len(launched(lambda: outputs.append(entry.function(data.tokens))))
    backward = len(launched(lambda: outputs[0].backward(data.grad)))
    entry.clear()
    return {"forward_launches": forward, "backward_launches": backward}


def host(entry: Entry, forward_only: bool) -> dict[str, Time]:
    """Host time of a forward without and with gradients."""
    data = entry.competitor.data
    most = HOST_CALLS if data.device.type == "cuda" else CPU_CALLS
    repeat = max(1, min(most, QUEUE // (entry.measures.get("forward_launches") or 1)))
    calls: dict[str, Callable[[], Any]] = {"host_no_grad_us": entry.launch_forward}
    if not forward_only:
        calls["host_grad_us"] = lambda: entry.function(data.tokens)
    return host_times(calls, data.device, rounds=3, repeat=repeat, warm=1)


def fixed_measures(entry: Entry, forward_only: bool) -> None:
    """Measures what does not depend on the routing, of a mode that launches its kernels."""
    device = entry.competitor.data.device
    if device.type == "cuda" and not forward_only:
        entry.measures["peak_bytes"] = step_peak(entry)
        entry.measures.update(step_launches(entry))
    if entry.competitor.caches_weights:
        entry.measures["cached_weight_bytes"] = entry.competitor.cached_bytes()
    entry.measures.update(host(entry, forward_only))
    entry.clear()


def rested(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, Time]:
    """Device times after a pause, alternating; on a CPU the times of single calls."""
    if device.type == "cpu":
        return host_times(calls, device, rounds=rounds, repeat=1, warm=1)
    return launched_times(calls, rounds)


def sustained(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, Time]:
    """Device times without pauses; on a CPU none."""
    return launched_sustained_times(calls, 2 * rounds) if device.type == "cuda" else {}


def plus(time: Time, part: Time | None, count: int) -> Time:
    """A step, with its part of the quantization of the weights for ``count`` steps."""
    if part is None:
        return time
    sums = [getattr(time, key) + getattr(part, key) / count for key in ("median", "low", "high")]
    return Time(*(round(value, 4) for value in sums))
