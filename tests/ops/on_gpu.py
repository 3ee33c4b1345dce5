"""Helpers for GPU tests: capture a call in a CUDA graph, and measure its peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any], error_mode: str = "global") -> torch.cuda.CUDAGraph:
    """Runs the call once, then returns a CUDA graph of it. With NCCL, whose watchdog queries events meanwhile, the mode
    is "thread_local"."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        call()
    return graph


def most_memory(call: Callable[[], Any]) -> int:
    """Returns the peak of additional bytes that the second of two calls allocates. Synchronization during that call
    is an error."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.cuda.max_memory_allocated() - before
