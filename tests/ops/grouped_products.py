"""Every grouped product over several tiles, to be made again under other circumstances."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import apart, normals
from transformer_plugin.testing.numerics import assert_same_bits

SIZES = (300, 1, 0, 513, 128, 385)
END = sum(SIZES)
N, K = 784, 272  # multiples of 16: a Hopper multiplies FP8 as it is
KEY, SQUARE = "fp8_block", "fp8_block:square"

Product = Callable[[], Tensor]


def inputs(capacity: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, gradients, weights and biases in float64; NaN past the groups. Capacity changes nothing before."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.full((capacity, width), float("nan"), device=device).double() for width in (K, N))
    for matrix in (x, grad):
        matrix[:END] = normals((END, matrix.shape[1]), torch.float64, device, generator)
    groups = len(SIZES)
    weight, bias = (normals(s, torch.float64, device, generator) for s in ((groups, N, K), (groups, N)))
    return x, grad, weight, bias


def plain_products(dtype: torch.dtype, capacity: int, device: torch.device) -> dict[str, Product]:
    x, grad, weight, bias = (t.to(dtype) for t in inputs(capacity, device))
    sizes = torch.tensor(SIZES, device=device)
    rows = torch.arange(capacity, device=device).flip(0)  # of the same matrix, turned round
    turned = x.flip(0)
    held = {to: torch.ones(weight.shape, dtype=to, device=device) for to in (torch.float32, torch.bfloat16)}

    def added(to: torch.dtype) -> Tensor:
        out = held[to].clone()
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out)
        return out

    matrices = apart(weight)

    def added_to_a_list() -> Tensor:
        out = apart(held[torch.float32])
        ops.grouped_gemm_wgrad_list_out(grad, x, sizes, out)
        return torch.stack(out)

    return {
        "forward": lambda: ops.grouped_gemm(x, weight, sizes),
        "forward of a list": lambda: ops.grouped_gemm_list(x, matrices, sizes),
        "data gradient of a list": lambda: ops.grouped_gemm_list(grad, matrices, sizes, transpose_b=False),
        "weight gradient added to a list": added_to_a_list,
        "forward with bias": lambda: ops.grouped_gemm(x, weight, sizes, bias),
        "forward of indexed rows": lambda: ops.grouped_gemm(turned, weight, sizes, rows=rows),
        "data gradient": lambda: ops.grouped_gemm(grad, weight, sizes, transpose_b=False),
        "weight gradient": lambda: ops.grouped_gemm_wgrad(grad, x, sizes),
        "weight gradient in float32": lambda: ops.grouped_gemm_wgrad(grad, x, sizes, torch.float32),
        "weight gradient added": lambda: added(torch.float32),
        "weight gradient added in bfloat16": lambda: added(torch.bfloat16),
    }


def fp8_products(capacity: int, device: torch.device) -> dict[str, Product]:
    x, grad, weight, bias = (t.float() for t in inputs(capacity, device))
    sizes = torch.tensor(SIZES, device=device)
    x_rows, grad_rows = (ops.grouped_quantize(t, sizes, KEY) for t in (x, grad))
    x_columns, grad_columns = (ops.grouped_quantize_transposed(t, sizes, KEY) for t in (x, grad))
    w_rows, w_columns = ops.quantize(weight, SQUARE), ops.quantize_transposed(weight, SQUARE)
    bf16, fp32 = torch.bfloat16, torch.float32
    columns = (*grad_columns, *x_columns, sizes, KEY, KEY)
    held = torch.ones(weight.shape, device=device)

    def added() -> Tensor:
        out = held.clone()
        ops.grouped_gemm_wgrad_quantized_out(*columns, out)
        return out

    def product(a: tuple[Tensor, ...], b: tuple[Tensor, ...], bias: Tensor | None = None) -> Product:
        return lambda: ops.grouped_gemm_quantized(*a, *b, sizes, KEY, SQUARE, bf16, bias)

    return {
        "forward": product(x_rows, w_rows),
        "forward with bias": product(x_rows, w_rows, bias),
        "data gradient": product(grad_rows, w_columns),
        "weight gradient": lambda: ops.grouped_gemm_wgrad_quantized(*columns, bf16),
        "weight gradient in float32": lambda: ops.grouped_gemm_wgrad_quantized(*columns, fp32),
        "weight gradient added": added,
    }


FAMILIES: dict[str, Callable[[int, torch.device], dict[str, Product]]] = {
    "bf16": lambda capacity, device: plain_products(torch.bfloat16, capacity, device),
    "fp16": lambda capacity, device: plain_products(torch.float16, capacity, device),
    "fp32": lambda capacity, device: plain_products(torch.float32, capacity, device),
    "fp8": fp8_products,
}


def assert_all_same(results: list[Tensor], first: Tensor, name: str) -> None:
    """The bits of ``first``, before the tail where capacities differ."""
    assert not first.isnan().any(), name
    for i, result in enumerate(results):
        got, expected = result, first
        if got.dim() == 2 and got.shape != expected.shape:
            got, expected = got[:END], expected[:END]
        same = [t.contiguous().view(torch.uint8) for t in (got, expected)]
        if got.dtype != expected.dtype or not torch.equal(*same):
            assert_same_bits(got, expected, f"{name}, time {i}")
