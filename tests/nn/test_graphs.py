"""CUDA graphs of layers and of training steps: captured once, replayed with other sizes, data and weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LayerNormLinear, Linear
from transformer_plugin.recipes import BFloat16, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.gpu
G, K, ROWS = 4, 64, 96
RECIPES: dict[str, Any] = {
    "none": None,
    "bf16": BFloat16(),
    "fp8_block": Float8BlockScaling(),
    "fp8_tensor": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
#: Zeros, another sum, all rows in one group, no rows at all.
SIZES = ([30, 0, 20, 40], [0, 10, 7, 3], [0, 0, 96, 0], [0, 0, 0, 0], [24, 24, 24, 24])


@pytest.fixture(autouse=True)
def graphs_are_freed_at_once() -> Iterator[None]:
    """A graphed module is in a cycle with its graphs. Collected while the next test captures, they would be destroyed
    during a capture, which invalidates it."""
    yield
    gc.collect()


def inputs(i: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(ROWS, K, generator=generator).bfloat16().cuda()
    return x, torch.tensor(SIZES[i % len(SIZES)]).cuda(), torch.rand(ROWS, generator=generator).cuda()


class Block(torch.nn.Module):
    def __init__(self, recipe: Any, **options: Any) -> None:
        super().__init__()
        fused = {name: value for name, value in options.items() if name != "parameters"}
        self.first = LayerNormLinear(K, K, recipe=recipe, device="cuda", dtype=torch.bfloat16, **fused)
        self.experts = GroupedMLP(
            G, K, 128, True, recipe=recipe, device="cuda", dtype=torch.bfloat16, **options
        )
        self.last = Linear(K, K, recipe=recipe, device="cuda", dtype=torch.bfloat16, **fused)

    def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> Any:
        return self.last(x + self.experts(self.first(x), sizes, probs))


def step(model: Any, optimizer: Any, arguments: Any) -> Tensor:
    loss: Tensor = model(*arguments).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def optimizer_of(model: torch.nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, foreach=True)


@pytest.mark.parametrize("layout", ["packed", "list", "grouped"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_whole_step(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model = Block(RECIPES[name], parameters=layout)
    twin = copy.deepcopy(model)
    optimizer, other = optimizer_of(model), optimizer_of(twin)
    arguments = inputs(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, optimizer, arguments)
    torch.cuda.current_stream().wait_stream(stream)
    step(twin, other, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer, arguments)
    for i in range(1, 6):
        fresh = inputs(i)
        for old, new in zip(arguments, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        assert_same_bits(loss, step(twin, other, fresh))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p, q = (t.packed() if isinstance(t, tp.GroupedTensor) else t for t in (p, q))
        assert_same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("name", ["none", "fp8_block"])
@pytest.mark.parametrize("layout", ["packed", "list", "grouped"])
def test_main_grad_in_a_graph(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model = Block(RECIPES[name], parameters=layout, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(model)
    buffers = []
    for module in (model, twin):
        mine = []
        for parameter_name, p in module.named_parameters():
            if "weight" in parameter_name and "norm" not in parameter_name:
                p.main_grad = torch.full(p.shape, 0.25, device="cuda")
                mine.append(p.main_grad)
        buffers.append(mine)
    arguments = inputs(0)

    def run(module: Any, inputs: Any) -> Tensor:
        output: Tensor = module(*inputs)
        output.float().square().mean().backward()
        return output.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(model, arguments)
    torch.cuda.current_stream().wait_stream(stream)
    run(twin, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(model, arguments)
    for i in range(1, 5):
        fresh = inputs(i)
        for old, new in zip(arguments, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        assert_same_bits(output, run(twin, fresh))
    for got, expected in zip(*buffers, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["none", "fp8_block", "mxfp8"])
def test_make_graphed_callables(name: str) -> None:
    torch.manual_seed(0)
    layer = GroupedLinear(G, K, 32, recipe=RECIPES[name], device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    x, sizes, _ = inputs(0)
    graphed: Any = torch.cuda.make_graphed_callables(layer, (x.clone().requires_grad_(), sizes.clone()))
    for i in range(5):
        x, sizes, _ = inputs(i)
        results = []
        for module in (graphed, twin):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            output = module(leaf, sizes)
            output.float().square().sum().backward()
            results.append([output.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)
        with torch.no_grad():
            for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
                p.mul_(1.25)
                q.mul_(1.25)


def test_quantized_once_in_a_captured_step() -> None:
    """The refresh after the optimizer's step is captured with it."""
    torch.manual_seed(0)
    model = Block(Float8BlockScaling())
    twin = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Linear | LayerNormLinear | GroupedLinear):
            module.quantize_weights()
    optimizer, other = optimizer_of(model), optimizer_of(twin)
    tp.optim.refresh_after(optimizer)
    arguments = inputs(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, optimizer, arguments)
    torch.cuda.current_stream().wait_stream(stream)
    step(twin, other, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer, arguments)
    for i in range(1, 5):
        fresh = inputs(i)
        for old, new in zip(arguments, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        assert_same_bits(loss, step(twin, other, fresh))
