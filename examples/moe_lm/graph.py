"""A training iteration as one CUDA graph, captured once and replayed for every batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3  # iterations before the capture: they create the optimizer's state and compile


class GraphedIteration:
    """Calls an iteration, and after some calls replays what it launches on the GPU.

    Each call trains on its batch, so the losses are those without a graph.

    Args:
        iterate: computes numbers from a batch, with tensors that stay in their places, and without waiting for the GPU.
        before_capture: called once, before the capture.
    """

    def __init__(
        self, iterate: Callable[[Tensor, Tensor], Tensor], before_capture: Callable[[], None]
    ) -> None:
        self.iterate, self.before_capture = iterate, before_capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Runs one iteration; returns its numbers."""
        self.calls += 1
        if self.calls <= WARM_UP:
            return self._on_another_stream(inputs, targets)
        if self.graph is None:
            self._capture(inputs, targets)
        assert self.graph is not None
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.numbers.clone()  # the next replay overwrites them

    def _on_another_stream(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Runs it as it is: autograd must not have seen the stream on which the work outside of the graph is."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            numbers = self.iterate(inputs, targets)
        torch.cuda.current_stream().wait_stream(self.stream)
        return numbers

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        """Records the iteration without running it."""
        self.before_capture()
        self.inputs, self.targets = inputs.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may call CUDA in the meantime.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.numbers = self.iterate(self.inputs, self.targets)
        self.graph = graph
