"""The cases of :mod:`benchmarks.functional`: a call of a function, and of the op beneath with its tensors by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin import ops
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.tensor._base import FormatTensor

BLOCKS, TENSOR, NVFP4 = "fp8_block:e4m3,pow2", "fp8_tensor:e4m3,fp32", "nvfp4:e2m1"
T, K, N, G, EPS = 32, 32, 32, 2, 1e-5
Call = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """A function and the op that it calls, with the same numbers."""

    name: str
    function: Call
    op: Call

    def values(self) -> int:
        """How many values the function returns."""
        result = self.function()
        return sum(isinstance(one, FormatTensor) for one in (result if type(result) is tuple else [result]))


class Data:
    """Plain tensors, and values of the same memory."""

    def __init__(self, device: torch.device) -> None:
        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=device)

        self.x, self.grad, self.matrix, self.stack = draw(T, K), draw(T, N), draw(N, K), draw(G, N, K)
        self.wide, self.probs, self.gamma = draw(T, 256), torch.rand(T, device=device), draw(K)
        self.down, self.act_grad = draw(G, K, N // 2), draw(T, 128)
        self.sizes = torch.tensor([16, 16], device=device, dtype=torch.int32)
        self.rows, self.grads = tp.GroupedTensor(self.x, self.sizes), tp.GroupedTensor(self.grad, self.sizes)
        self.wide_rows, self.weights = tp.GroupedTensor(self.wide, self.sizes), tp.GroupedTensor(self.stack)
        self.indices = torch.arange(2 * T, device=device, dtype=torch.int32).reshape(T, 2) % G
        self.out, self.dense_out = torch.zeros(G, N, K, device=device), torch.zeros(N, K, device=device)


def _quantize(d: Data) -> Iterator[Pair]:
    for key in (BLOCKS, TENSOR):
        yield Pair(
            f"quantize {key}", lambda key=key: tp.quantize(d.x, key), lambda key=key: ops.quantize(d.x, key)
        )

    def nvfp4() -> Any:
        return ops.quantize(d.x, NVFP4, amax=ops.amax(d.x, NVFP4))

    yield Pair(f"quantize {NVFP4}", lambda: tp.quantize(d.x, NVFP4), nvfp4)
    yield Pair(
        "quantize ragged, both directions",
        lambda: tp.quantize(d.rows, BLOCKS, columnwise=True),
        lambda: ops.quantize(d.x, BLOCKS, d.sizes, columnwise=True),
    )
    yield Pair(
        "quantize a stack", lambda: tp.quantize(d.stack, BLOCKS), lambda: ops.quantize(d.stack, BLOCKS)
    )
    value = tp.quantize(d.x, BLOCKS)
    data, scale = value.rowwise_data, value.scale_inv
    yield Pair(
        "dequantize", lambda: tp.dequantize(value), lambda: ops.dequantize(data, scale, BLOCKS, torch.float32)
    )
    yield Pair(
        "with_columnwise",
        lambda: tp.with_columnwise(value),
        lambda: ops.requantize_transposed(data, scale, BLOCKS),
    )


def _operands(prefix: tuple[str, str], *scales: Tensor) -> dict[str, Any]:
    """The arguments of two quantized operands."""
    first, second = prefix
    named = {f"{first}_scale": [scales[0]], f"{second}_scale": [scales[1]]}
    return {**named, f"{first}_format": BLOCKS, f"{second}_format": BLOCKS}


def _gemm(d: Data) -> Iterator[Pair]:
    a, b = tp.quantize(d.x, BLOCKS), tp.quantize(d.matrix, BLOCKS)
    data, scaled = (a.rowwise_data, b.rowwise_data), _operands(("a", "b"), a.scale_inv, b.scale_inv)
    yield Pair("gemm", lambda: tp.gemm(d.x, d.matrix), lambda: ops.gemm(d.x, d.matrix))
    yield Pair(
        "gemm, quantized", lambda: tp.gemm(a, b), lambda: ops.gemm(*data, dtype=torch.float32, **scaled)
    )
    c, e = (tp.quantize(t, BLOCKS, rowwise=False, columnwise=True) for t in (d.grad, d.x))
    columns = (c.columnwise_data, e.columnwise_data)
    of_columns = _operands(("a", "b"), c.columnwise_scale_inv, e.columnwise_scale_inv)
    yield Pair(
        "gemm_wgrad, quantized",
        lambda: tp.gemm_wgrad(c, e),
        lambda: ops.gemm(*columns, dtype=torch.float32, **of_columns),
    )
    one = torch.ones(1, device=d.x.device)
    yield Pair(
        "gemm_wgrad into a buffer",
        lambda: tp.gemm_wgrad(d.grad, d.x, out=d.dense_out),
        lambda: ops.gemm_out(d.grad.t(), d.x, d.dense_out, transpose_b=False, beta=one),
    )


def _grouped_gemm(d: Data) -> Iterator[Pair]:
    yield Pair(
        "grouped_gemm",
        lambda: tp.grouped_gemm(d.rows, d.weights),
        lambda: ops.grouped_gemm(d.x, d.stack, d.sizes),
    )
    a, b = tp.quantize(d.rows, BLOCKS), tp.quantize(d.stack, BLOCKS)
    data, scaled = (a.rowwise_data, b.rowwise_data), _operands(("a", "b"), a.scale_inv, b.scale_inv)
    yield Pair(
        "grouped_gemm, quantized",
        lambda: tp.grouped_gemm(a, b),
        lambda: ops.grouped_gemm(*data, d.sizes, dtype=torch.float32, **scaled),
    )
    c, e = (tp.quantize(t, BLOCKS, rowwise=False, columnwise=True) for t in (d.grads, d.rows))
    columns = (c.columnwise_data, e.columnwise_data)
    of_columns = _operands(("grad", "input"), c.columnwise_scale_inv, e.columnwise_scale_inv)
    yield Pair(
        "grouped_gemm_wgrad, quantized",
        lambda: tp.grouped_gemm_wgrad(c, e),
        lambda: ops.grouped_gemm_wgrad(*columns, d.sizes, torch.float32, **of_columns),
    )
    yield Pair(
        "grouped_gemm_wgrad into a buffer",
        lambda: tp.grouped_gemm_wgrad(d.grads, d.rows, out=d.out),
        lambda: ops.grouped_gemm_wgrad_out(d.grad, d.x, d.sizes, d.out),
    )


def _activation(d: Data) -> Iterator[Pair]:
    yield Pair("swiglu", lambda: tp.activation(d.rows, d.probs), lambda: ops.activation(d.x, d.probs))
    yield Pair(
        "swiglu, quantized",
        lambda: tp.activation(d.wide_rows, d.probs, format=BLOCKS),
        lambda: ops.activation_quantize(d.wide, BLOCKS, d.probs, d.sizes),
    )
    yield Pair(
        "swiglu_backward",
        lambda: tp.activation_backward(d.act_grad, d.wide_rows, d.probs),
        lambda: ops.activation_backward(d.act_grad, d.wide, d.probs),
    )
    yield Pair(
        "swiglu_backward, quantized",
        lambda: tp.activation_backward(d.act_grad, d.wide_rows, d.probs, format=BLOCKS),
        lambda: ops.activation_backward_quantize(d.act_grad, d.wide, BLOCKS, d.probs, d.sizes),
    )
    yield Pair(
        "bias_backward", lambda: tp.bias_backward(d.grads), lambda: ops.grouped_bias_backward(d.grad, d.sizes)
    )
    yield Pair(
        "bias_backward, quantized",
        lambda: tp.bias_backward(d.grads, format=BLOCKS),
        lambda: ops.bias_backward_quantize(d.grad, BLOCKS, d.sizes, columnwise=True),
    )


def _norm(d: Data) -> Iterator[Pair]:
    bias = d.gamma
    for name, more in (("rms_norm", (d.gamma, EPS)), ("layer_norm", (d.gamma, bias, EPS))):
        function, op = getattr(tp, name), getattr(ops, name)
        fused = getattr(ops, f"{name}_quantize")
        yield Pair(name, lambda f=function, m=more: f(d.rows, *m), lambda f=op, m=more: f(d.x, *m))
        yield Pair(
            f"{name}, quantized",
            lambda f=function, m=more: f(d.rows, *m, format=BLOCKS),
            lambda f=fused, m=more: f(d.x, *m, BLOCKS),
        )


def _layers(d: Data) -> Iterator[Pair]:
    recipe = Float8BlockScaling()
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    yield Pair(
        "linear",
        lambda: tp.linear(d.x, d.matrix, recipe=recipe),
        lambda: ops.linear(d.x, d.matrix, None, *keys),
    )
    yield Pair(
        "grouped_linear",
        lambda: tp.grouped_linear(d.rows, d.weights),
        lambda: ops.grouped_linear(d.x, d.stack, d.sizes),
    )
    yield Pair(
        "grouped_mlp",
        lambda: tp.grouped_mlp(d.rows, d.weights, d.down, probs=d.probs),
        lambda: ops.grouped_mlp(d.x, d.stack, d.down, d.sizes, d.probs),
    )
    yield Pair(
        "grouped_gemm_swiglu",
        lambda: tp.grouped_gemm_activation(d.rows, d.weights, probs=d.probs),
        lambda: ops.grouped_gemm_activation(d.x, d.stack, d.sizes, d.probs),
    )
    yield Pair(
        "grouped_gemm_swiglu, quantized",
        lambda: tp.grouped_gemm_activation(d.rows, d.weights, probs=d.probs, format=BLOCKS),
        lambda: ops.grouped_gemm_activation_quantize(d.x, d.stack, d.sizes, BLOCKS, d.probs),
    )


def _routing(d: Data) -> Iterator[Pair]:
    rows, where = tp.permute(d.x, d.indices, G, 2 * T)
    data = rows.packed()
    yield Pair(
        "permute", lambda: tp.permute(d.x, d.indices, G, 2 * T), lambda: ops.permute(d.x, d.indices, G, 2 * T)
    )
    yield Pair(
        "unpermute",
        lambda: tp.unpermute(rows, where),
        lambda: ops.unpermute(data, where.slot, where.source),
    )


def _with_gradients(d: Data) -> Iterator[Pair]:
    """Forwards that record a graph through a ragged value."""
    leaf, weight = d.x.clone().requires_grad_(), d.stack.clone().requires_grad_()
    rows = tp.GroupedTensor(d.x.clone(), d.sizes, requires_grad=True)
    yield Pair("swiglu, gradient", lambda: tp.activation(rows), lambda: ops.activation(leaf))
    yield Pair(
        "grouped_linear, gradient",
        lambda: tp.grouped_linear(rows, weight),
        lambda: ops.grouped_linear(leaf, weight, d.sizes),
    )
    yield Pair(
        "permute, gradient",
        lambda: tp.permute(leaf, d.indices, G, 2 * T),
        lambda: ops.permute(leaf, d.indices, G, 2 * T),
    )


def pairs(device: torch.device) -> Iterator[Pair]:
    """Every function beside its op."""
    data = Data(device)
    for family in (_quantize, _gemm, _grouped_gemm, _activation, _norm, _layers, _routing, _with_gradients):
        yield from family(data)


def constructions(device: torch.device) -> dict[str, Call]:
    """Values of buffers that exist."""
    d = Data(device)
    matrix, rows = tp.quantize(d.x, BLOCKS, columnwise=True), tp.quantize(d.rows, BLOCKS, columnwise=True)
    buffers, grouped = dict(matrix._buffers.present()), dict(rows._buffers.present())
    return {
        "GroupedTensor(data)": lambda: tp.GroupedTensor(d.stack),
        "GroupedTensor(data, group_sizes)": lambda: tp.GroupedTensor(d.x, d.sizes),
        "QuantizedTensor of four buffers": lambda: tp.QuantizedTensor(format=BLOCKS, **buffers),
        "GroupedTensor of four buffers": lambda: tp.GroupedTensor(format=BLOCKS, **grouped),
        "unchecked, as functions do": lambda: tp.GroupedTensor._make(
            rows._buffers, BLOCKS, rows.shape, rows.dtype
        ),
    }
