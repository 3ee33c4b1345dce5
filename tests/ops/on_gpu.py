"""What tests on a GPU do with a call: record it in a graph, and see what memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of the call, which ran once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def most_memory(call: Callable[[], Any]) -> int:
    """The most bytes that the second of two calls holds at a time beside what was there; it may not wait for a GPU."""
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
