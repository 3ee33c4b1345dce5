"""torch.compile(fullgraph=True) of chains of functions: eager's bits, and one graph for all sizes after the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_plugin as tp
from tests.functional.values import FAMILIES, draw
from transformer_plugin.formats import Format
from transformer_plugin.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_plugin.testing.numerics import assert_same_bits

G, N, K, H, E = 3, 128, 128, 64, 4
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Function, backend: str = "aot_eager") -> tuple[Function, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def assert_equal(got: Any, expected: Any) -> None:
    """The same types, and the same bytes of every tensor and buffer in them."""
    assert type(got) is type(expected)
    if isinstance(got, tuple | list):
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(got, tp.GroupedTensor | tp.QuantizedTensor):
        assert got.format == expected.format and got.shape == expected.shape and got.dtype == expected.dtype
        assert [n for n, _ in got._buffers.present()] == [n for n, _ in expected._buffers.present()]
        for (name, one), (_, other) in zip(got._buffers.present(), expected._buffers.present(), strict=True):
            assert_same_bits(one, other, name)
    elif isinstance(got, Tensor):
        assert_same_bits(got, expected)


def rows_of(total: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, another one, and the sizes of three groups that leave 16 rows over."""
    sizes = torch.tensor([total - 48, 0, 32], device=device)
    return draw(total, K, seed=total, device=device), draw(total, N, seed=total + 1, device=device), sizes


def step_by_hand(key: str) -> Function:
    """The three products of a layer with quantized operands."""
    has_columns = Format.parse(key).traits.has_group_columns

    def step(x: Any, grad: Any, weight: Any) -> tuple[Any, ...]:
        rows = tp.quantize(x, key, columnwise=has_columns)
        weights = tp.quantize(weight, key, columnwise=has_columns)
        output = tp.grouped_gemm(rows, weights)
        act = tp.activation(output, format=key)
        if not has_columns:
            return rows, output, act
        gradient, sums = tp.bias_backward(grad, format=key)
        grad_x = tp.grouped_gemm(gradient, weights, transpose_b=False)
        return rows, output, act, gradient, sums, grad_x, tp.grouped_gemm_wgrad(gradient, rows)

    return step


@pytest.mark.parametrize("key", FAMILIES)
@pytest.mark.parametrize("where", ("inside", "passed"))
def test_quantized_products(key: str, where: str, device: torch.device) -> None:
    step = step_by_hand(key)

    def from_tensors(x: Tensor, grad: Tensor, sizes: Tensor, weight: Tensor) -> tuple[Any, ...]:
        values = (tp.GroupedTensor(x, sizes), tp.GroupedTensor(grad, sizes))
        return step(*values, tp.GroupedTensor(weight))

    weight = draw(G, N, K, device=device)
    fast, counter = compiled(from_tensors if where == "inside" else step)
    for total in (96, 160, 224, 288):
        x, grad, sizes = rows_of(total, device)
        expected = from_tensors(x, grad, sizes, weight)
        if where == "inside":
            assert_equal(fast(x, grad, sizes, weight), expected)
        else:
            values = (tp.GroupedTensor(x, sizes), tp.GroupedTensor(grad, sizes))
            assert_equal(fast(*values, tp.GroupedTensor(weight)), expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("key", FAMILIES)
def test_values_made_outside(key: str, device: torch.device) -> None:
    """Quantized values are arguments of the graph: of groups, of a stack, one matrix and a list."""

    def step(rows: Any, stack: Any, matrix: Any, each: Any) -> tuple[Any, ...]:
        products = tp.grouped_gemm(rows, stack), tp.grouped_gemm(rows, each)
        return (*products, tp.gemm(matrix, each[0]), rows.dequantize(), tp.dequantize(each[1]))

    weight = draw(G, N, K, device=device)
    stack, each = tp.quantize(weight, key), tp.quantize(list(weight), key)
    fast, counter = compiled(step)
    for total in (96, 160, 224, 288):
        x, _, sizes = rows_of(total, device)
        rows, matrix = tp.quantize(x, key, group_sizes=sizes), tp.quantize(x, key)
        assert_equal(fast(rows, stack, matrix, each), step(rows, stack, matrix, each))
    assert counter.frame_count <= 2


def layer(recipe: Recipe | None) -> Function:
    """Tokens to experts, a norm, two linear layers with SwiGLU, an MLP, and back."""

    def forward(
        tokens: Tensor, indices: Tensor, weights: Tensor, gamma: Tensor, fc1: Any, fc2: Any
    ) -> Tensor:
        rows, where = tp.permute(
            tokens, indices, E, 2 * tokens.shape[0] + E * 15 // 16 * 16 + 16, alignment=16
        )
        normed = tp.rms_norm(rows, gamma, 1e-5)
        h = tp.grouped_linear(normed, fc1, recipe=recipe)
        back = tp.grouped_linear(tp.activation(h), fc2, recipe=recipe)
        mixed = tp.grouped_mlp(back, fc1, fc2, recipe=recipe)
        return tp.unpermute(mixed, where, weights)

    return forward


RECIPES = {
    "none": None,
    "fp8_tensor": Float8CurrentScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(stochastic_rounding=False),
}


@pytest.mark.filterwarnings("error:Dynamo detected a call to a")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.long] if (i + j) % 2 else [])
        for i, name in enumerate(RECIPES)
        for j, kind in enumerate(("tensors", "values"))
    ],
)
def test_layer_and_its_gradients(name: str, kind: str, device: torch.device) -> None:
    forward = layer(RECIPES[name])
    fast, counter = compiled(forward)
    fc1 = draw(E, 2 * H, H, seed=1, device=device)
    fc2, gamma = draw(E, H, H, seed=2, device=device), draw(H, seed=3, device=device).requires_grad_()
    matrices = [tp.GroupedTensor(t) if kind == "values" else t for t in (fc1, fc2)]
    matrices = [t.requires_grad_() for t in matrices]
    for count in (32, 48, 64, 80):
        tokens = draw(count, H, seed=count, device=device).requires_grad_()
        generator = torch.Generator().manual_seed(count)
        indices = torch.rand(count, E, generator=generator).topk(2).indices.to(torch.int32).to(device)
        weights = draw(count, 2, seed=count + 1, device=device).requires_grad_()
        leaves = [tokens, weights, gamma, *matrices]

        def run(call: Function) -> list[Tensor]:
            output = call(tokens, indices, weights, gamma, *matrices)  # noqa: B023 called here
            return [output, *torch.autograd.grad(output.square().sum(), leaves)]  # noqa: B023 called here

        assert_equal(run(fast), run(forward))
    assert counter.frame_count <= 2


def test_ragged_value_with_a_gradient_goes_in(device: torch.device) -> None:
    """What leaves the graph is packed(): torch expects the gradient of a returned value to be a value."""

    def function(rows: Any) -> Any:
        return tp.rms_norm(tp.activation(rows), None, 1e-5).packed()

    fast, counter = compiled(function)
    for total in (96, 160, 224, 288):
        x, _, sizes = rows_of(total, device)
        grads = []
        for call in (fast, function):
            value = tp.GroupedTensor(x, sizes, requires_grad=True)
            packed = call(value)
            grads.append([packed, *torch.autograd.grad(packed.square().sum(), value)])
        assert_equal(*grads)
        with torch.no_grad():
            got = compiled(tp.activation)[0](value)
        assert_equal(got, tp.activation(value.detach()))
    assert counter.frame_count <= 2


def test_norms_and_epilogues_with_formats(device: torch.device) -> None:
    def function(x: Tensor, sizes: Tensor, weight: Tensor, columns: Any) -> tuple[Any, ...]:
        rows = tp.GroupedTensor(x, sizes)
        normed = tp.rms_norm(rows, None, 1e-5, format="fp8_block")
        both = tp.layer_norm(rows, None, None, 1e-5, format="mxfp8", columnwise=True)
        act, h = tp.grouped_gemm_activation(rows, weight, format="fp8_block")
        grad, of_probs = tp.activation_backward(rows, h, format="fp8_block")
        return normed, both, act, h, grad, of_probs, tp.with_columnwise(columns), tp.with_columnwise(act)

    weight = draw(G, 2 * K, K, device=device)
    fast, _ = compiled(function)
    for total in (96, 160):
        x, _, sizes = rows_of(total, device)
        columns = tp.quantize(x, Format("fp8_block"))
        assert_equal(fast(x, sizes, weight, columns), function(x, sizes, weight, columns))


def test_formats_are_constants_of_the_graph(device: torch.device) -> None:
    def function(x: Tensor, format: Any) -> Any:
        return tp.quantize(x, format, columnwise=True)

    fast, _ = compiled(function)
    x = draw(64, K, device=device)
    for format in ("fp8_block", "mxfp8", Format("fp8_tensor")):
        assert_equal(fast(x, format), function(x, format))


def test_wgrad_into_a_buffer(device: torch.device) -> None:
    def function(grad: Any, rows: Any, out: Tensor, dense: Tensor) -> None:
        tp.grouped_gemm_wgrad(grad, rows, out=out)
        tp.gemm_wgrad(grad.rowwise_data, rows.rowwise_data, out=dense, accumulate=False)

    fast, _ = compiled(function)
    x, grad, sizes = rows_of(96, device)
    results = []
    for call in (fast, function):
        out = draw(G, N, K, seed=5, device=device)
        dense = torch.full((N, K), float("nan"), device=device)
        call(tp.GroupedTensor(grad, sizes), tp.GroupedTensor(x, sizes), out, dense)
        results.append([out, dense])
    assert_equal(*results)


def test_inductor(device: torch.device) -> None:
    """It compiles the code around the ops; what it does not touch has the same bits."""

    def function(x: Tensor, sizes: Tensor, weight: Tensor) -> tuple[Any, Any]:
        rows = tp.quantize(tp.GroupedTensor(x * 2, sizes), "fp8_block")
        output = tp.grouped_gemm(rows, tp.quantize(weight, "fp8_block"))
        return output, tp.activation(output, format="fp8_block")

    weight = draw(G, N, K, device=device)
    fast, counter = compiled(function, "inductor")
    for total in (96, 160, 224):
        x, _, sizes = rows_of(total, device)
        assert_equal(fast(x, sizes, weight), function(x, sizes, weight))
    assert counter.frame_count <= 2
