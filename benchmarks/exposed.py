"""How much of the communication of a step no computation hides, from a trace of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]
#: name, begin and end in microseconds.
Kernel = tuple[str, float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def length(spans: Iterable[Span]) -> float:
    """The sum of their lengths."""
    return sum(end - begin for begin, end in spans)


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """Name, begin and end in microseconds of the kernels and copies of one call on this GPU.

    It is the second of two calls after a barrier: ranks start their profilers at other times.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        dist.barrier()
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    barrier = max(end for name, _, end in kernels if "AllReduce" in name)
    return [kernel for kernel in kernels if kernel[1] >= barrier]


def is_exchange(name: str) -> bool:
    """Whether a kernel moves data between GPUs, or marks the begin and end of that."""
    return "nccl" in name.lower() or "collective_kernel" in name


def spans_of(kernels: list[Kernel], least: float = 50.0) -> list[dict[str, Any]]:
    """What to draw: kind, begin and length in microseconds of the kernels that take at least so long."""
    first = min(begin for _, begin, _ in kernels)
    return [
        {"kind": kind_of(name), "begin": round(begin - first), "length": round(end - begin)}
        for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1])
        if end - begin >= least
    ]


def kind_of(name: str) -> str:
    """ "gather", "sum" over ranks, "product" or "other"."""
    if "AllGather" in name:
        return "gather"
    if "SendRecv" in name or "ReduceScatter" in name or "sum_ranks" in name:
        return "sum"
    return "product" if "gemm" in name or "nvjet" in name or "wgrad" in name else "other"


def exposed(kernels: list[Kernel]) -> dict[str, float]:
    """Of one call: milliseconds from its first kernel to its last; of them with computation, with an exchange, with an
    exchange and nothing else; and the part of the whole that the last is."""
    exchange = merged((begin, end) for name, begin, end in kernels if is_exchange(name))
    compute = merged((begin, end) for name, begin, end in kernels if not is_exchange(name))
    both = merged([*exchange, *compute])
    whole = both[-1][1] - both[0][0]
    alone = length(both) - length(compute)
    return {
        "step_ms": round(whole / 1e3, 3),
        "compute_ms": round(length(compute) / 1e3, 3),
        "exchange_ms": round(length(exchange) / 1e3, 3),
        "exposed_ms": round(alone / 1e3, 3),
        "exposed_part": round(alone / whole, 4),
    }
