"""Grouped products on a GPU: CUDA graphs of quantized products, no synchronization, and no copies of operands in
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import rows_fp64, rows_in_units, wgrad_fp64, wgrad_in_units
from tests.ops.grouped_draw import Groups, quantize_operand
from tests.ops.test_linear_ops import NONE, RECIPES, keys
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    in_fp8_units,
    normals,
    poison_tail,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

CUDA = torch.device("cuda")
KEY, SQUARE = "fp8_block", "fp8_block:square"
BF16, FP32 = torch.bfloat16, torch.float32

# Quantized products in a CUDA graph.
CAPACITY, N, K = 333, 160, 192
REPLAYED = [(0, 0, 0, 0, 0), (333, 0, 0, 0, 0), (1, 2, 3, 5, 7), (17, 100, 0, 33, 120), (127, 1, 128, 0, 77)]


def quantized_inputs(sizes: tuple[int, ...], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the quantized operands with their scales, and sizes, bias and factors, by name; and the dequantized
    values in float64."""
    generator, count = torch.Generator().manual_seed(seed), len(sizes)
    host = torch.tensor(sizes)
    groups = Groups(host, host.to(CUDA), CAPACITY)
    tensors = {
        "sizes": groups.device,
        "bias": normals((count, N), FP32, CUDA, generator),
        "alpha": normals((count,), FP32, CUDA, generator),
    }
    values = {}
    for name, width in (("x", K), ("grad", N)):
        matrix = poison_tail(normals((CAPACITY, width), FP32, CUDA, generator), sizes)
        for columns in (False, True):
            quantized = quantize_operand(matrix, KEY, groups, columns)
            end = "_t" if columns else ""
            tensors |= {name + end: quantized.data, name + end + "_scale": quantized.scale}
            values[name + end] = quantized.values
    weight = normals((count, N, K), FP32, CUDA, generator)
    for columns in (False, True):
        quantized = quantize_operand(weight, SQUARE, None, columns)
        end = "_t" if columns else ""
        tensors |= {"w" + end: quantized.data, "w" + end + "_scale": quantized.scale}
        values["w" + end] = quantized.values
    return tensors, values


def quantized_products(tensors: dict[str, Tensor], main_grad: Tensor) -> dict[str, Tensor]:
    sizes = tensors["sizes"]

    def rows(a: str, b: str, **more: Any) -> Tensor:
        operands = [(tensors[name], tensors[name + "_scale"]) for name in (a, b)]
        return ops.grouped_gemm(
            **quantized_arguments(operands[0], operands[1], KEY, SQUARE), group_sizes=sizes, **more
        )

    grad, x = ((tensors[name], tensors[name + "_scale"]) for name in ("grad_t", "x_t"))
    columns = wgrad_arguments(grad, x, KEY, KEY) | {"group_sizes": sizes}
    ops.grouped_gemm_wgrad_out(**columns, out=main_grad)
    return {
        "forward": rows("x", "w"),
        "with bias": rows("x", "w", bias=tensors["bias"], alpha=tensors["alpha"]),
        "data gradient": rows("grad", "w_t"),
        "data gradient of row-wise weights": rows("grad", "w", transpose_b=False),
        "weight gradient": ops.grouped_gemm_wgrad(**columns, alpha=tensors["alpha"]),
        "weight gradient in float32": ops.grouped_gemm_wgrad(**columns, dtype=FP32),
        "added": main_grad,
    }


def check_values(
    got: dict[str, Tensor], tensors: dict[str, Tensor], values: dict[str, Tensor], sizes: tuple[int, ...]
) -> None:
    """Compares with float64. ``added`` starts from 1."""
    host, bias, alpha = torch.tensor(sizes), tensors["bias"], tensors["alpha"]
    units = in_fp8_units(KEY, SQUARE, BF16, N, K, CUDA)
    for name, a, b, more in (
        ("forward", "x", "w", (None, None)),
        ("with bias", "x", "w", (bias, alpha)),
        ("data gradient", "grad", "w_t", (None, None)),
        ("data gradient of row-wise weights", "grad", "w", (None, None)),
    ):
        x, y, transpose_b = values[a], values[b], b == "w" and a == "x"
        exact = rows_fp64(x, y, host, more[0], None, transpose_b, more[1])
        above = [None if t is None else t.abs() for t in more]
        magnitude = rows_fp64(x.abs(), y.abs(), host, above[0], None, transpose_b, above[1])
        away = rows_in_units(x, y, host, transpose_b, more[1]) if units and (b != "w" or transpose_b) else 0.0
        assert_rounded_sum(got[name], exact, magnitude, x.shape[1] + 3, name, away)
    x, y = values["grad_t"], values["x_t"]
    for name, factor, start in (
        ("weight gradient", alpha, 0),
        ("weight gradient in float32", None, 0),
        ("added", None, 1),
    ):
        exact = wgrad_fp64(x, y, host, factor) + start
        magnitude = wgrad_fp64(x.abs(), y.abs(), host, None if factor is None else factor.abs()) + start
        away = wgrad_in_units(x, y, host, factor) if units else 0.0
        assert_rounded_sum(got[name], exact, magnitude, max(sizes) + 3, name, away)


@pytest.mark.gpu
def test_graph_of_quantized_products_replays_with_new_sizes_and_data() -> None:
    """The capacity is not a multiple of 16; groups begin anywhere; one group has all rows, or no group has any."""
    tensors, _ = quantized_inputs((60, 70, 80, 0, 90), 0)
    main_grad = torch.ones(5, N, K, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        quantized_products(tensors, main_grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized_products(tensors, main_grad)
    for seed, sizes in enumerate(REPLAYED):
        new, values = quantized_inputs(sizes, seed + 1)
        for name, tensor in tensors.items():
            bytes_of = [t.view(torch.uint8) for t in (tensor, new[name])]
            bytes_of[0].copy_(bytes_of[1])
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        main_grad.fill_(1.0)
        graph.replay()
        check_values(captured, new, values, sizes)
        expected = quantized_products(new, torch.ones_like(main_grad))
        for name, got in captured.items():
            assert_same_bits(got, expected[name], name)


# No synchronization with the host.
PAIRS = [
    (KEY, SQUARE),
    ("fp8_block:fp32", "fp8_block:fp32,square"),
    ("fp8_tensor", "fp8_tensor"),
    ("mxfp8", "mxfp8"),
    ("mxfp8:e5m2,tiled", "mxfp8:e5m2,tiled"),
    ("nvfp4", "nvfp4"),
]
SIZES, ROWS = (32, 0, 48), 96


def plain_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, K), (ROWS, N), (3, N, K), (3, N)
    x, grad, w, bias = (normals(s, dtype, CUDA, generator) for s in shapes)
    scale, alpha, beta = (normals((s,), FP32, CUDA, generator) for s in (ROWS, 3, 3))
    sizes, rows = torch.tensor(SIZES, device=CUDA), torch.arange(ROWS, device=CUDA)
    out, main_grad = torch.zeros(ROWS, N + 5, device=CUDA)[:, :N], torch.zeros(3, N, K, device=CUDA)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias, scale)]
    transposed = torch.zeros(3, K, N, dtype=dtype, device=CUDA).mT

    def step() -> None:
        a, b, c, s = leaves
        for index in (None, rows):
            output = ops.grouped_gemm(a, b, sizes, c, s, alpha=alpha, rows=index)
            torch.autograd.grad(output, leaves, grad)

    yield step
    yield lambda: ops.grouped_gemm(x, transposed, sizes)
    yield lambda: ops.grouped_gemm(grad, w, sizes, transpose_b=False, dtype=FP32)
    yield lambda: ops.grouped_gemm_out(x, w, sizes, out, bias, scale, alpha=alpha, beta=beta, rows=rows)
    yield lambda: ops.grouped_gemm_wgrad(grad, x, sizes, FP32, alpha, rows)
    yield lambda: ops.grouped_gemm_wgrad_out(grad, x, sizes, main_grad)
    yield lambda: ops.grouped_gemm_wgrad_out(grad, x, sizes, main_grad, False, alpha, beta, rows)
    yield lambda: ops.grouped_bias_backward(grad, sizes, bias, scale)
    yield ops.check_group_sizes


def quantized_calls(formats: tuple[str, str]) -> Iterator[Callable[[], Any]]:
    generator, host = torch.Generator().manual_seed(0), torch.tensor(SIZES)
    groups = Groups(host, host.to(CUDA), ROWS)
    x, grad, w = (normals(s, FP32, CUDA, generator) for s in ((ROWS, K), (ROWS, N), (3, N, K)))
    alpha, beta, bias = (normals(s, FP32, CUDA, generator) for s in ((3,), (3,), (3, N)))
    a, b = quantize_operand(x, formats[0], groups), quantize_operand(w, formats[1])
    x_t, grad_t = (quantize_operand(t, formats[0], groups, columns=True) for t in (x, grad))
    out, main_grad = torch.zeros(ROWS, N, device=CUDA), torch.zeros(3, N, K, device=CUDA)
    rows = quantized_arguments(a[:3], b[:3], *formats)
    rows |= {"group_sizes": groups.device, "bias": bias, "alpha": alpha}
    columns = wgrad_arguments(grad_t[:3], x_t[:3], formats[0], formats[0]) | {"group_sizes": groups.device}
    for dtype in (BF16, FP32):
        yield lambda dtype=dtype: ops.grouped_gemm(**rows, dtype=dtype)
        yield lambda dtype=dtype: ops.grouped_gemm_wgrad(**columns, dtype=dtype, alpha=alpha)
    yield lambda: ops.grouped_gemm_out(**rows, out=out, beta=beta)
    yield lambda: ops.grouped_gemm_wgrad_out(**columns, out=main_grad)
    yield lambda: ops.grouped_gemm_wgrad_out(**columns, out=main_grad, accumulate=False, beta=beta)
    yield lambda: ops.grouped_gemm_wgrad_out(**columns, out=list(main_grad.clone().unbind()))


def linear_calls(formats: tuple[str, str, str]) -> Iterator[Callable[[], Any]]:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor(SIZES, device=CUDA)
    shapes = (ROWS, K), (3, N, K), (3, N), (ROWS,), (ROWS, N)
    *leaves, grad = (normals(s, FP32 if len(s) == 1 else BF16, CUDA, generator) for s in shapes)
    for leaf in leaves:
        leaf.requires_grad_()
    factors = torch.ones(9, device=CUDA)

    def step() -> None:
        output = ops.grouped_linear(leaves[0], leaves[1], sizes, leaves[2], leaves[3], *formats)
        torch.autograd.grad(output, leaves, grad)

    def scaled() -> None:
        output = ops.grouped_linear(leaves[0], leaves[1], sizes, leaves[2], leaves[3], scale=factors)
        torch.autograd.grad(output, leaves, grad)

    yield step
    yield scaled


CALLS = {
    **{str(dtype)[6:]: (plain_calls, dtype) for dtype in (FP32, BF16, torch.float16)},
    **{"-".join(pair): (quantized_calls, pair) for pair in PAIRS},
    "linear-none": (linear_calls, NONE),
    **{f"linear-{name}": (linear_calls, keys(recipe)) for name, recipe in RECIPES.items()},
}


@pytest.mark.gpu
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
def test_calls_do_not_synchronize(calls: tuple[Callable[[Any], Iterator[Callable[[], Any]]], Any]) -> None:
    make, tensors = calls
    quantized = list(make(tensors))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in quantized:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
