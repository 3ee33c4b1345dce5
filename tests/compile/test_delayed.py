"""Delayed scaling under torch.compile(fullgraph=True) and in CUDA graphs: the results and the state of eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_plugin as tp
from tests.compile.model import Batch, Everything, assert_same, batch, step
from transformer_plugin.nn import Linear
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.numerics import assert_same_bits

RECIPE = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(device: torch.device) -> tuple[Everything, Everything]:
    """Two equal models."""
    torch.manual_seed(0)
    models = Everything(RECIPE, device=device), Everything(RECIPE, device=device)
    models[1].load_state_dict(models[0].state_dict())
    return models


def assert_same_state(compiled: torch.nn.Module, eager: torch.nn.Module, limit: float) -> None:
    named = dict(eager.named_buffers())
    assert any("delayed" in name for name in named)
    if limit == 0:
        for name, buffer in compiled.named_buffers():
            assert_same_bits(buffer, named[name.replace("_orig_mod.", "")], name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_steps_equal_eager(backend: str, device: torch.device) -> None:
    """Several steps, so that each uses scales of earlier steps; the same bits if nothing is fused."""
    eager, model = pair(device)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(model, fullgraph=True, backend=counter)
    limit = 0 if backend == "aot_eager" else 1e-4
    for seed in range(5):
        data = batch(24, seed, device)
        assert_same(step(fast, data), step(eager, data), limit)
        assert_same_state(model, eager, limit)
    assert counter.frame_count == 1
    eager.eval(), model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        data = batch(24, 9, device)
        for got, expected in zip(fast(*data), eager(*data), strict=True):
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit)
    for name, buffer in model.named_buffers():
        assert_same_bits(buffer, before[name], name)


def test_any_number_of_rows(device: torch.device) -> None:
    eager, model = pair(device)
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    step(fast, batch(24, 0, device)), step(eager, batch(24, 0, device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (24, 40, 17):
            data = batch(tokens, tokens, device)
            assert_same(step(fast, data), step(eager, data), 0)
            assert_same_state(model, eager, 0)


def test_a_module_used_twice_in_one_graph(device: torch.device) -> None:
    """The second use depends on the amaxes of the first; one backward computes both gradients."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(16, 16, device=device, recipe=RECIPE)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x) * 3)

    torch.manual_seed(0)
    eager, model = Twice(), Twice()
    model.load_state_dict(eager.state_dict())
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device)
        results = []
        for module, call in ((eager, eager), (model, fast)):
            output = call(x)
            (grad,) = torch.autograd.grad(output.square().sum() / 7, module.linear.weight)
            results.append([output.detach(), grad, *(b.clone() for b in module.buffers())])
        for got, expected in zip(*reversed(results), strict=True):
            assert_same_bits(got, expected)


def test_two_compiled_forwards_before_two_backwards_are_refused(device: torch.device) -> None:
    """The first backward would overwrite the amaxes of the second forward, so torch raises an error."""
    fast = torch.compile(Linear(16, 24, device=device, recipe=RECIPE), fullgraph=True, backend="aot_eager")
    outputs = [fast(torch.ones(8, 16, device=device)) for _ in range(2)]
    outputs[1].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@pytest.mark.parametrize(
    "checkpoint", [torch.utils.checkpoint.checkpoint, tp.checkpoint], ids=["torch", "tp"]
)
def test_activation_checkpointing(checkpoint: Callable[..., Any], device: torch.device) -> None:
    """A recomputed forward gives the same gradients and does not update the state again."""
    eager, model = pair(device)

    def checkpointed(*args: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(model, *args, use_reentrant=False)

    def step_of(call: object, data: Batch) -> dict[str, Tensor]:
        wrapped = torch.nn.Module()
        wrapped.forward = call  # type: ignore[assignment]
        wrapped.model = model
        return {name.replace("model.", ""): value for name, value in step(wrapped, data).items()}

    fast = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        data = batch(24, seed, device)
        expected = step(eager, data)
        assert_same(step_of(fast, data), expected, 0)
        assert_same_state(model, eager, 0)


@pytest.mark.gpu
def test_cuda_graph_of_a_training_step() -> None:
    """Replays update the state as eager steps do, with other data and group sizes."""
    eager, model = pair(torch.device("cuda"))
    held = batch(48, 0, "cuda")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, held)
    model.load_state_dict(start)
    for seed in (1, 2, 3, 0):
        data = batch(48, seed, "cuda")
        if seed == 3:
            data.group_sizes.zero_()
        for target, source in zip(held, data, strict=True):
            target.copy_(source)
        graph.replay()
        assert_same(captured, step(eager, data), 0)
        assert_same_state(model, eager, 0)


@pytest.mark.gpu
def test_no_host_read() -> None:
    model, _ = pair(torch.device("cuda"))
    data = batch(48, 0, "cuda")
    step(model, data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
