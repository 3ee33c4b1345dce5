"""Delayed weight gradients in compiled code and in CUDA graphs: the bits of eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.common import by_recipe
from tests.nn.delayed_layers import (
    GROUPS,
    LAYERS,
    assert_same_gradients,
    batch,
    make,
    run,
    set_main_grads,
    weights_of,
)

COMPILED = [kind for kind in LAYERS if "hooked" not in kind]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


#: Each layer in two recipes, one of them with buffers, and each recipe with layers of every kind: `make test-long` runs
#: the others, too.
CASES = [
    pytest.param(kind, name, into, marks=[] if (i + j) % 4 == 2 * into else [pytest.mark.long])
    for i, kind in enumerate(COMPILED)
    for j, name in enumerate(["none", "fp8_block", "fp8_tensor", "mxfp8"])
    for into in (False, True)
]


@pytest.mark.parametrize(("kind", "name", "into"), CASES)
def test_fullgraph(kind: str, name: str, into: bool, device: torch.device) -> None:
    """Micro-batches of several sizes, two forwards before two backwards, several steps."""
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": into, "device": device}
    layers = [make(kind, name, **options), make(kind, name, **options)]
    for layer in layers:
        set_main_grads(layer)
    forwards: list[Any] = [torch.compile(layers[0], fullgraph=True), layers[1]]
    for seed in range(3):
        for layer, forward in zip(layers, forwards, strict=True):
            first, second = (batch(kind, name, seed + more, device) for more in range(2))
            outputs = [forward(*x[:-1]) for x in (first, second)]
            for output, arguments in zip(outputs, (first, second), strict=True):
                output.backward(arguments[-1])
            assert layer.need_backward_dw()
            before = [weight.main_grad.clone() for weight in weights_of(layer).values()]  # type: ignore[attr-defined]
            layer.backward_dw()
            after = [weight.main_grad for weight in weights_of(layer).values()]  # type: ignore[attr-defined]
            changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert changed == into
        assert_same_gradients(*layers)


class Stack(torch.nn.Module):
    """Layers whose intermediate tensors have equal sizes, so that Inductor reuses memory."""

    def __init__(self, delay: bool, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            make("Linear", "none", device=device, delay_wgrad_compute=delay) for _ in range(4)
        )
        for layer in self.layers:
            layer.weight = torch.nn.Parameter(torch.randn(64, 64, device=device) / 8)
            layer.bias = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(torch.cos(x) * 2)) + 1
        return x


def test_memory_that_inductor_reuses(device: torch.device) -> None:
    models = [Stack(True, device), Stack(False, device)]
    compiled = torch.compile(models[0], fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 64, generator=generator).to(device)
        for model, forward in zip(models, (compiled, models[1]), strict=True):
            forward(x).square().sum().backward()
            torch.randn(64, 64, device=device)
            for layer in model.layers:
                layer.backward_dw()
    # Inductor's cosine and sine differ in the last bit, and three layers follow one another.
    for got, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-4)


def test_backward_dw_in_a_compiled_step() -> None:
    """The layer is compiled; the step around it has a graph break at the backward, as every step has."""
    layers = [make("GroupedLinear", "fp8_block", delay_wgrad_compute=True) for _ in range(2)]

    def step(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        run(layer, arguments)
        layer.backward_dw()

    compiled = torch.compile(step)
    for seed in range(2):
        compiled(layers[0], batch("GroupedLinear", "fp8_block", seed))
        step(layers[1], batch("GroupedLinear", "fp8_block", seed))
        assert_same_gradients(*layers)


@pytest.mark.gpu
@by_recipe
@pytest.mark.parametrize("kind", COMPILED)
def test_cuda_graph_with_changing_sizes(kind: str, name: str) -> None:
    """Two micro-batches and backward_dw() in one graph, replayed with other sizes and data."""
    options = {"fuse_wgrad_accumulation": True, "device": "cuda"}
    graphed, eager = make(kind, name, delay_wgrad_compute=True, **options), make(kind, name, **options)
    for layer in (graphed, eager):
        set_main_grads(layer)
    rows = batch(kind, name, 2, "cuda")[0].shape[0]

    def padded(seed: int) -> tuple[Tensor, ...]:
        """A batch with the rows of the largest; a dense layer multiplies all of them."""
        tensors = []
        for tensor in batch(kind, name, seed, "cuda"):
            if tensor.shape == (GROUPS,) and not tensor.is_floating_point():
                tensors.append(tensor)
                continue
            whole = tensor.new_zeros(rows, *tensor.shape[1:])
            whole[: tensor.shape[0]] = tensor.detach()
            tensors.append(whole.requires_grad_(tensor.requires_grad))
        return tuple(tensors)

    held = [padded(0), padded(1)]

    def step(layer: Any, batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
        outputs = [layer(*arguments[:-1]) for arguments in batches]
        for output, arguments in zip(outputs, batches, strict=True):
            output.backward(arguments[-1])
        layer.backward_dw()
        return outputs

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(graphed, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(graphed, held)
    assert not graphed.need_backward_dw()
    for layer in (graphed, eager):
        for weight in weights_of(layer).values():
            weight.main_grad.fill_(0.25)  # type: ignore[attr-defined]
    for seed in (2, 0, 1):
        batches = [padded(seed), padded((seed + 1) % 3)]
        with torch.no_grad():
            for targets, sources in zip(held, batches, strict=True):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
        torch.manual_seed(seed)
        graph.replay()
        torch.manual_seed(seed)
        wanted = step(eager, batches)
        for got, expected in zip(captured, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for got, expected in zip(weights_of(graphed).values(), weights_of(eager).values(), strict=True):
            torch.testing.assert_close(got.main_grad, expected.main_grad, rtol=0, atol=0)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Linear", "GroupedMLP"])
def test_another_stream(kind: str) -> None:
    """The operands are freed on another stream than theirs while it reads them."""
    delayed, usual = make(kind, device="cuda", delay_wgrad_compute=True), make(kind, device="cuda")
    stream = torch.cuda.Stream()
    for seed in range(8):
        for layer in (delayed, usual):
            run(layer, batch(kind, "fp8_block", seed, "cuda"))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            delayed.backward_dw()
        for _ in range(8):
            torch.full((256, 64), float("nan"), device="cuda")
        torch.cuda.current_stream().wait_stream(stream)
    assert_same_gradients(delayed, usual)
