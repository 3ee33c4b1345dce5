"""Layers with buffers of the caller, and layers that keep their original input: the bits of those without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.main_grad_runs import BUFFERS, FORMATS, Formats, Run, buffers, layer_of, run
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

LAYERS = tuple(BUFFERS)
by_layer = pytest.mark.parametrize("name", LAYERS)
by_formats = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
SOME = {key: FORMATS[key] for key in ("none", "bf16", "block", "mx", "nv")}
by_some_formats = pytest.mark.parametrize("formats", SOME.values(), ids=SOME.keys())
#: The required arguments of an op, which come before `out`.
REQUIRED = {"linear": 2, "grouped_linear": 3, "grouped_mlp": 5}
SENTINEL = 7.0


def rounds_randomly(formats: Formats) -> bool:
    return "sr" in formats[0].partition(":")[2].split(",")


def into(name: str, out: Tensor) -> Any:
    """The op that writes into a buffer, called as the op that does not."""

    def call(*arguments: Any, **options: Any) -> Tensor:
        first, rest = arguments[: REQUIRED[name]], arguments[REQUIRED[name] :]
        output = out.detach()
        # Arguments of these ops come in the order of the other ones.
        assert getattr(ops, f"{name}_out")(*first, output, *rest, **options) is None
        return output

    return call


def assert_same(got: Run, expected: Run) -> None:
    assert_same_bits(got.output, expected.output, "output")
    for i, (a, b) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a, b, str(i))


@by_layer
@by_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_buffers_hold_output_and_gradient(
    name: str, formats: Formats, dtype: torch.dtype, device: torch.device
) -> None:
    """Twice with the same buffers, the second time with another input."""
    layer = layer_of(name, formats, dtype, device)
    plain = run(layer, formats)
    out = torch.full_like(plain.output, SENTINEL)
    dgrad_out = torch.full_like(layer.arguments[0], SENTINEL)
    for factor in (1.0, 2.0):
        layer = layer._replace(arguments=(layer.arguments[0] * factor, *layer.arguments[1:]))
        plain = run(layer, formats)
        versions = out._version, dgrad_out._version
        got = run(layer, formats, {"dgrad_out": dgrad_out}, function=into(name, out))
        assert_same(got, plain)
        assert got.output.data_ptr() == out.data_ptr() and out.grad_fn is None
        assert_same_bits(dgrad_out, plain.gradients[0])
        assert out._version > versions[0] and dgrad_out._version > versions[1]


@by_layer
@by_some_formats
def test_with_a_main_grad(name: str, formats: Formats, device: torch.device) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    given, expected = (buffers(name, layer, torch.float32, 0.25) for _ in range(2))
    plain = run(layer, formats, expected)
    out = torch.empty_like(plain.output)
    got = run(
        layer, formats, {**given, "dgrad_out": torch.empty_like(layer.arguments[0])}, function=into(name, out)
    )
    assert_same(got, plain)
    for key, buffer in given.items():
        assert_same_bits(buffer, expected[key], key)


@by_layer
@by_some_formats
def test_nothing_is_written_for_an_input_without_gradient(
    name: str, formats: Formats, device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    dgrad_out = torch.full_like(layer.arguments[0], SENTINEL)
    arguments = [x.detach().requires_grad_(i == 1) for i, x in enumerate(layer.arguments)]
    layer.function(*arguments, *formats, dgrad_out=dgrad_out).sum().backward()
    assert bool((dgrad_out == SENTINEL).all())
    with torch.no_grad():  # the same bytes without a node
        expected = layer.function(*arguments, *formats)
        out = torch.zeros_like(expected)
        assert not into(name, out)(*arguments, *formats).requires_grad
    assert_same_bits(out, expected)


@pytest.mark.parametrize("name", LAYERS[:2])
@by_formats
def test_original_input_gives_the_same_bits(name: str, formats: Formats, device: torch.device) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    if rounds_randomly(formats):
        with pytest.raises(
            ValueError, match="argument 'save_original_input': expected False with stochastic"
        ):
            run(layer, formats, {"save_original_input": True})
        return
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    plain = run(layer, formats)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        got = run(layer, formats, {"save_original_input": True})
    assert_same(got, plain)
    input = got.leaves[0]
    assert any(x.data_ptr() == input.data_ptr() and x.numel() == input.numel() for x in saved)
    # Nothing else of its rows and columns is kept: the columnwise input would be.
    size = input.numel()
    assert not any(x.numel() == size and x.data_ptr() != input.data_ptr() for x in saved if x.dim() == 2)


def wrong_buffers(good: Tensor, input: Tensor) -> Iterator[tuple[str, Any, type[Exception]]]:
    yield "of the sizes", good.new_empty(*good.shape[:-1], good.shape[-1] + 1), ValueError
    yield "of the sizes", good.new_empty(good.numel()), ValueError
    yield "bfloat16", good.float(), TypeError
    yield "contiguous", good.new_empty(*good.shape[:-1], 2 * good.shape[-1])[..., ::2], ValueError
    yield "requires_grad=False", good.clone().requires_grad_(), ValueError
    if good.numel() <= input.numel():
        yield "apart from 'input'", input.view(-1)[: good.numel()].view_as(good).detach(), ValueError


@by_layer
@pytest.mark.parametrize("argument", ["out", "dgrad_out"])
def test_wrong_buffers_are_refused(name: str, argument: str, device: torch.device) -> None:
    formats = FORMATS["block"]
    layer = layer_of(name, formats, torch.bfloat16, device)
    first = layer.arguments[: REQUIRED[name]]
    good = {"out": run(layer, formats).output.zero_(), "dgrad_out": torch.zeros_like(first[0])}
    arguments = [x.detach().requires_grad_(i == 0) for i, x in enumerate(first)]
    op, biases = getattr(ops, f"{name}_out"), [None] * (1 if name == "linear" else 2)
    tried = 0
    for text, wrong, error in wrong_buffers(good[argument], arguments[0].detach()):
        given = {**good, argument: wrong}
        message = f"transformer_plugin::{name}_out: argument '{argument}': expected .*{text}"
        with pytest.raises(error, match=message):
            op(*arguments, given["out"], *biases, *formats, dgrad_out=given["dgrad_out"])
        assert not any(bool(buffer.any()) for buffer in good.values())
        tried += 1
    assert tried >= 5
    with pytest.raises(ValueError, match=r"apart from '(out|dgrad_out)'"):
        both = good["dgrad_out"].new_zeros(max(x.numel() for x in good.values()))
        shared = {key: both[: x.numel()].view_as(x).detach() for key, x in good.items()}
        op(*arguments, shared["out"], *biases, *formats, dgrad_out=shared["dgrad_out"])


@by_layer
def test_views_are_refused(name: str, device: torch.device) -> None:
    """Their history would be that of the tensor they are a view of."""
    layer = layer_of(name, FORMATS["none"], torch.bfloat16, device)
    whole = torch.zeros((2, *run(layer, FORMATS["none"]).output.shape), device=device, dtype=torch.bfloat16)
    first = layer.arguments[: REQUIRED[name]]
    arguments = [x.detach().requires_grad_(i == 0) for i, x in enumerate(first)]
    with pytest.raises(
        ValueError, match="argument 'out': expected a tensor that autograd does not know as a view"
    ):
        getattr(ops, f"{name}_out")(*arguments, whole[1])
    getattr(ops, f"{name}_out")(*arguments, whole[1].detach())
    assert bool(whole[1].any()) and not bool(whole[0].any())


@by_layer
@by_some_formats
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(name: str, formats: Formats, backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    layer = layer_of(name, formats, torch.bfloat16, device)
    plain = run(layer, formats)
    out, dgrad_out = torch.full_like(plain.output, SENTINEL), torch.full_like(layer.arguments[0], SENTINEL)
    function = torch.compile(into(name, out), backend=backend, fullgraph=True)
    got = run(layer, formats, {"dgrad_out": dgrad_out}, function=function)
    assert_same(got, plain)
    assert_same_bits(out, plain.output)
    assert_same_bits(dgrad_out, plain.gradients[0])


@by_layer
@by_some_formats
def test_second_backward_adds_to_the_gradient(name: str, formats: Formats, device: torch.device) -> None:
    """The gradient of a leaf is not the buffer, which the second backward writes."""
    layer = layer_of(name, formats, torch.bfloat16, device)
    results = []
    for dgrad_out in (None, torch.zeros_like(layer.arguments[0])):
        leaves = [x.detach().clone().requires_grad_(i == 0) for i, x in enumerate(layer.arguments)]
        for factor in (1, 3):
            torch.manual_seed(factor)
            (layer.function(*leaves, *formats, dgrad_out=dgrad_out) * factor).sum().backward()
        results.append(leaves[0].grad)
    assert_same_bits(*results)


@by_layer
@by_some_formats
def test_gradient_that_arrives_in_the_buffer_is_refused(
    name: str, formats: Formats, device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    width = layer.arguments[0].shape[-1]
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in layer.arguments]
    if name != "grouped_mlp":  # as wide as the input, and the gradient fits the buffer
        leaves[1] = leaves[1].detach()[..., :width, :].contiguous().requires_grad_()
        leaves[2 if name == "linear" else 3] = None
    if name == "grouped_linear":
        leaves[4] = None
    if leaves[1].shape[-2] < width:
        return
    buffer = torch.ones_like(leaves[0])
    output = layer.function(*leaves, *formats, dgrad_out=buffer)
    text = "argument 'dgrad_out': expected a buffer apart from 'the gradient of the output'"
    with pytest.raises(ValueError, match=text):
        output.backward(buffer)
    assert bool((buffer == 1).all()) and leaves[0].grad is None
