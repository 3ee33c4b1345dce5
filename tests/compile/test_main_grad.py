"""Compiled layers add weight gradients to buffers, and take separate weights, with the bits of eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.main_grad_runs import BUFFERS, FORMATS, buffers, layer_of, run, separate, stacked
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.numerics import assert_same_bits

LAYERS = tuple(BUFFERS)
by_layer = pytest.mark.parametrize("name", LAYERS)
SOME = {key: FORMATS[key] for key in ("none", "block", "nv", "mx")}
BACKENDS = {
    "aot_eager": ("aot_eager", False),
    "inductor": ("inductor", False),
    "two-forwards-first": ("inductor", True),
}


def equal_cases() -> Iterator[Any]:
    """Every layer, format and backend, with the weight as one tensor and, where it has several matrices, as a list. Of
    the two uses of Inductor, which runs a C++ compiler for each graph, each layer and format has one by default."""
    for (backend, arguments), lists, key, name in itertools.product(
        BACKENDS.items(), (False, True), SOME, LAYERS
    ):
        if lists and name == "linear":
            continue
        turn = (list(SOME).index(key) + LAYERS.index(name) + lists + arguments[1]) % 2
        compiles_long = arguments[0] == "inductor" and bool(turn or (lists and key == "nv"))
        yield pytest.param(
            name,
            SOME[key],
            lists,
            *arguments,
            id="-".join((backend, "list" if lists else "stack", key, name)),
            marks=[pytest.mark.long] if compiles_long else [],
        )


def compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def steps(
    function: Callable[..., Tensor],
    name: str,
    formats: tuple[str, str, str],
    device: torch.device,
    *,
    lists: bool,
    together: bool,
    options: dict[str, Any],
) -> list[Tensor]:
    """Two steps of two micro-batches; returns the buffers, and the gradients of what has one."""
    layer = layer_of(name, formats, torch.bfloat16, device)
    as_list = lists and name != "linear"
    given = buffers(name, layer, torch.float32, 0.25, as_list=as_list)
    leaves: list[Any] = [
        x.nan_to_num().requires_grad_() if x.is_floating_point() else x for x in layer.arguments
    ]
    if as_list:
        for place in layer.weights:
            leaves[place] = [w.detach().requires_grad_() for w in separate(leaves[place].detach())]
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        waiting = []
        for _ in range(2):
            output = function(*leaves, *formats, **given, **options)
            grad = normals(tuple(output.shape), output.dtype, device, generator)
            waiting.append((output, grad))
            if not together:
                waiting.pop()[0].backward(grad)
        for output, grad in waiting:
            output.backward(grad)
    tensors = [b for buffer in given.values() for b in (buffer if as_list else [buffer])]
    every = [x for leaf in leaves for x in (leaf if isinstance(leaf, list) else [leaf])]
    return [*tensors, *(x.grad for x in every if x.grad is not None)]


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, str(i))


@pytest.mark.parametrize(("name", "formats", "lists", "backend", "together"), equal_cases())
def test_equals_eager(
    name: str, formats: tuple[str, str, str], lists: bool, backend: str, together: bool, device: torch.device
) -> None:
    """The backend aot_eager copies into the buffer, which two forwards before their backwards do not allow."""
    function = getattr(ops, name)
    more: dict[str, Any] = {"lists": lists, "together": together, "options": {"weight_grad": "zeros"}}
    expected = steps(function, name, formats, device, **more)
    assert_all_same(steps(compiled(function, backend), name, formats, device, **more), expected)
    assert any((buffer != 0.25).any() for buffer in expected[:1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_layers_whose_buffers_are_views_of_one(backend: str, accumulate: bool, device: torch.device) -> None:
    """As gradient buckets have them: one graph writes several views of one flat buffer."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 8).to(device, torch.bfloat16)

    x, sizes = draw(96, 64), torch.tensor([32, 0, 48], device=device)
    weights = [draw(64, 64), draw(3, 64, 64), *(draw(64, 64) for _ in range(3))]

    def forward(x: Tensor, w: list[Tensor], m: list[Tensor]) -> Tensor:
        hidden = ops.linear(x, w[0], main_grad=m[0], accumulate=accumulate)
        hidden = ops.grouped_linear(hidden, w[1], sizes, main_grad=m[1], accumulate=accumulate)
        return ops.grouped_linear(hidden, w[2:], sizes, main_grad=m[2:], accumulate=accumulate)

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [w.clone().requires_grad_() for w in weights]
        bucket = torch.full((sum(w.numel() for w in weights) + 16,), 0.25, device=device)
        parts = bucket[16:].split([w.numel() for w in weights])
        into = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            output = function(leaf, leaves, into)
            output.backward(torch.ones_like(output))
        assert all(w.grad is None for w in leaves)
        return [bucket, leaf.grad]

    assert_all_same(step(compiled(forward, backend)), step(forward))


@by_layer
def test_frozen_weights(name: str, device: torch.device) -> None:
    formats = FORMATS["none"]
    layer = layer_of(name, formats, torch.float32, device)
    given = buffers(name, layer, torch.float32, 0.25)
    leaf = layer.arguments[0].clone().requires_grad_()
    output = compiled(layer.function, "aot_eager")(leaf, *layer.arguments[1:], *formats, **given)
    output.sum().backward()
    assert leaf.grad is not None and all((buffer == 0.25).all() for buffer in given.values())


class Step(torch.nn.Module):
    """A layer whose parameter has a main_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 16))
        self.register_buffer("main_grad", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, main_grad=self.main_grad)


def test_export() -> None:
    module, x = Step(), torch.randn(4, 16)
    exported = torch.export.export(module, (x,)).module()
    assert_same_bits(exported(x).detach(), module(x).detach())


def scripted_step(x: Tensor, weight: Tensor, sizes: Tensor, main_grad: Tensor) -> Tensor:
    return torch.ops.transformer_plugin.grouped_linear(
        x, [weight], sizes, None, None, "none", "none", "none", None, 0, -1, [main_grad], True, "none"
    )


def test_script() -> None:
    x, weight, sizes = torch.randn(9, 8), torch.randn(2, 4, 8, requires_grad=True), torch.tensor([3, 4])
    buffer, other = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    torch.jit.script(scripted_step)(x, weight, sizes, buffer).sum().backward()
    ops.grouped_linear(x, weight, sizes, main_grad=other).sum().backward()
    assert buffer.any() and weight.grad is None
    assert_same_bits(buffer, other)


@pytest.mark.parametrize("name", LAYERS[1:])
@pytest.mark.parametrize("formats", [FORMATS[key] for key in ("none", "bf16", "block", "mx", "nv")])
def test_separate_weights(name: str, formats: tuple[str, str, str], device: torch.device) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    lists = tuple(layer.weights)
    expected = run(layer, formats, lists=lists)
    got = run(layer, formats, lists=lists, function=compiled(layer.function, "aot_eager"))
    assert_same_bits(got.output, expected.output)
    for place in range(len(layer.arguments)):
        if expected.gradients[place] is not None:
            assert_same_bits(stacked(got.gradients[place]), stacked(expected.gradients[place]), str(place))
