"""Every grouped product over several tiles, for tests that repeat it under other conditions and expect the same
bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    apart,
    normals,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

SIZES = (300, 1, 0, 513, 128, 385)
END = sum(SIZES)
N, K = 800, 288  # multiples of 32, so that Hopper multiplies FP8 data without dequantizing it
#: Formats of the rows and of the weight.
FORMATS = {
    "fp8": ("fp8_block", "fp8_block:square"),
    "fp8_tensor": ("fp8_tensor", "fp8_tensor"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8 with E5M2 and tiled scales": ("mxfp8:e5m2,tiled", "mxfp8:e5m2,tiled"),
    "nvfp4": ("nvfp4", "nvfp4:square"),
}

#: A function of launch options, for example ``max_sms``, that returns the product.
Product = Callable[..., Tensor]


def inputs(capacity: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows, gradients, weights and biases in float64. Rows past the groups are NaN; the rows before them do
    not depend on the capacity."""
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
    # The index selects the rows of the original from the reversed matrix.
    rows = torch.arange(capacity, device=device).flip(0)
    reversed_rows = x.flip(0)
    initial = {
        to: torch.ones(weight.shape, dtype=to, device=device) for to in (torch.float32, torch.bfloat16)
    }

    def added(to: torch.dtype, **plan: int) -> Tensor:
        out = initial[to].clone()
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out, **plan)
        return out

    matrices = apart(weight)

    def added_to_a_list(**plan: int) -> Tensor:
        out = apart(initial[torch.float32])
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out, **plan)
        return torch.stack(out)

    return {
        "forward": lambda **plan: ops.grouped_gemm(x, weight, sizes, **plan),
        "forward with a list": lambda **plan: ops.grouped_gemm(x, matrices, sizes, **plan),
        "data gradient with a list": lambda **plan: ops.grouped_gemm(
            grad, matrices, sizes, transpose_b=False, **plan
        ),
        "weight gradient added to a list": added_to_a_list,
        "forward with bias": lambda **plan: ops.grouped_gemm(x, weight, sizes, bias, **plan),
        "forward with indexed rows": lambda **plan: ops.grouped_gemm(
            reversed_rows, weight, sizes, rows=rows, **plan
        ),
        "data gradient": lambda **plan: ops.grouped_gemm(grad, weight, sizes, transpose_b=False, **plan),
        "weight gradient": lambda **plan: ops.grouped_gemm_wgrad(grad, x, sizes, **plan),
        "weight gradient in float32": lambda **plan: ops.grouped_gemm_wgrad(
            grad, x, sizes, torch.float32, **plan
        ),
        "weight gradient added": lambda **plan: added(torch.float32, **plan),
        "weight gradient added in bfloat16": lambda **plan: added(torch.bfloat16, **plan),
    }


def quantized_rows(capacity: int, device: torch.device, formats: tuple[str, str]) -> dict[str, Product]:
    x, grad, weight, bias = (t.float() for t in inputs(capacity, device))
    sizes, (key, weight_key) = torch.tensor(SIZES, device=device), formats
    nv = key == "nvfp4"  # nvfp4 needs its amax as an argument

    def rows(matrix: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        amax = ops.amax(matrix, key, sizes) if nv else None
        return ops.quantize(matrix, key, sizes, amax=amax), amax

    weight_amax = ops.amax(weight, weight_key) if nv else None
    w_rows = ops.quantize(weight, weight_key, amax=weight_amax)
    w_columns = ops.quantize(weight, weight_key, amax_t=weight_amax, rowwise=False, columnwise=True)

    def product(
        a: tuple[tuple[Tensor, ...], Tensor | None], b: tuple[Tensor, ...], bias: Tensor | None = None
    ) -> Product:
        operands = quantized_arguments((*a[0], a[1]), (*b, weight_amax), *formats)
        return lambda **plan: ops.grouped_gemm(**operands, group_sizes=sizes, bias=bias, **plan)

    x_rows, grad_rows = rows(x), rows(grad)
    matrices = [list(t) for t in zip(*ops.quantize_list(list(weight), weight_key, weight_amax), strict=True)]
    own_amaxes = None if weight_amax is None else list(weight_amax.split(1))

    def forward_of_a_list(**plan: int) -> Tensor:
        operands = quantized_arguments((*x_rows[0], x_rows[1]), (*matrices, own_amaxes), *formats)
        return ops.grouped_gemm(**operands, group_sizes=sizes, **plan)

    return {
        "forward": product(x_rows, w_rows),
        "forward with a list": forward_of_a_list,
        "forward with bias": product(x_rows, w_rows, bias),
        "data gradient": product(grad_rows, w_columns),
    }


def of_rows(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], sizes: Tensor) -> dict[str, Any]:
    element = "e5m2" if a[0].dtype == torch.float8_e5m2 else "e4m3"
    return quantized_arguments(a, b, f"fp8_row:{element}", "fp8_row") | {"group_sizes": sizes}


def rowwise_products(capacity: int, device: torch.device) -> dict[str, Product]:
    x, grad, weight, bias = (t.float() for t in inputs(capacity, device))
    sizes = torch.tensor(SIZES, device=device)
    forward = of_rows(ops.quantize(x, "fp8_row"), ops.quantize(weight, "fp8_row"), sizes)
    backward = of_rows(ops.quantize(grad, "fp8_row:e5m2"), ops.quantize(weight.mT, "fp8_row"), sizes)
    return {
        "forward": lambda **plan: ops.grouped_gemm(**forward, **plan),
        "forward with bias": lambda **plan: ops.grouped_gemm(**forward, bias=bias, **plan),
        "forward in float32": lambda **plan: ops.grouped_gemm(**forward, dtype=torch.float32, **plan),
        "data gradient": lambda **plan: ops.grouped_gemm(**backward, **plan),
    }


def fp8_products(capacity: int, device: torch.device, formats: tuple[str, str]) -> dict[str, Product]:
    x, grad, weight, _ = (t.float() for t in inputs(capacity, device))
    sizes, key = torch.tensor(SIZES, device=device), formats[0]
    x_columns, grad_columns = (ops.quantize(t, key, sizes, rowwise=False, columnwise=True) for t in (x, grad))
    columns = wgrad_arguments(grad_columns, x_columns, key, key) | {"group_sizes": sizes}
    initial = torch.ones(weight.shape, device=device)

    def added(**plan: int) -> Tensor:
        out = initial.clone()
        ops.grouped_gemm_wgrad_out(**columns, out=out, **plan)
        return out

    return quantized_rows(capacity, device, formats) | {
        "weight gradient": lambda **plan: ops.grouped_gemm_wgrad(**columns, **plan),
        "weight gradient in float32": lambda **plan: ops.grouped_gemm_wgrad(
            **columns, dtype=torch.float32, **plan
        ),
        "weight gradient added": added,
    }


FAMILIES: dict[str, Callable[[int, torch.device], dict[str, Product]]] = {
    "bf16": lambda capacity, device: plain_products(torch.bfloat16, capacity, device),
    "fp16": lambda capacity, device: plain_products(torch.float16, capacity, device),
    "fp8_row": rowwise_products,
    "fp32": lambda capacity, device: plain_products(torch.float32, capacity, device),
    **{name: partial(fp8_products, formats=FORMATS[name]) for name in ("fp8", "fp8_tensor")},
    **{
        name: partial(quantized_rows, formats=formats)
        for name, formats in FORMATS.items()
        if formats[0].startswith(("mxfp8", "nvfp4"))
    },
}


def assert_all_same(results: list[Tensor], first: Tensor, name: str) -> None:
    """Asserts that every result has the bits of ``first``; if capacities differ, only the rows of the groups are
    compared."""
    assert not first.isnan().any(), name
    for i, result in enumerate(results):
        got, expected = result, first
        if got.dim() == 2 and got.shape != expected.shape:
            got, expected = got[:END], expected[:END]
        same = [t.contiguous().view(torch.uint8) for t in (got, expected)]
        if got.dtype != expected.dtype or not torch.equal(*same):
            assert_same_bits(got, expected, f"{name}, time {i}")
