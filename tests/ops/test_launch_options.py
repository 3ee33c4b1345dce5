"""``max_sms`` and ``expected_rows``: every op over groups accepts them, and its bits do not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    normals,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin
BF16, FP32 = torch.bfloat16, torch.float32

OPTIONS: list[dict[str, int]] = [
    {"max_sms": 1},
    {"max_sms": 7, "expected_rows": 0},
    {"expected_rows": 1},
    {"expected_rows": 10**9, "max_sms": 10**9},
]


def operands(device: torch.device, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a [T, K], b [G, N, K], sizes and grad [T, N], with several tiles in all dimensions, and a tail."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((700, 264), (5, 520, 264), (700, 520))
    a, b, grad = (normals(shape, dtype, device, generator) for shape in shapes)
    return a, b, torch.tensor([130, 0, 1, 300, 200], device=device), grad


def quantized_calls(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Returns each op of quantized operands as a function of the options."""
    a, b, sizes, grad = operands(device, FP32)
    keys = ("fp8_block", "fp8_block:square")
    rows, weight = ops.quantize(a, keys[0], sizes), ops.quantize(b, keys[1])
    columns = [ops.quantize(x, keys[0], sizes, rowwise=False, columnwise=True) for x in (grad, a)]
    forward = quantized_arguments(rows, weight, *keys) | {"group_sizes": sizes}
    wgrad = wgrad_arguments(columns[0], columns[1], keys[0], keys[0]) | {"group_sizes": sizes}

    def forward_out(**options: int) -> Tensor:
        out = torch.zeros(700, 520, dtype=BF16, device=device)
        ops.grouped_gemm_out(**forward, out=out, **options)
        return out

    def wgrad_out(**options: int) -> Tensor:
        out = torch.ones(5, 520, 264, device=device)
        ops.grouped_gemm_wgrad_out(**wgrad, out=out, **options)
        return out

    return {
        "forward": lambda **options: ops.grouped_gemm(**forward, **options),
        "forward_out": forward_out,
        "wgrad": lambda **options: ops.grouped_gemm_wgrad(**wgrad, dtype=FP32, **options),
        "wgrad_out": wgrad_out,
    }


def calls(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Returns each other op as a function of the options."""
    a, b, sizes, grad = operands(device)

    def forward_out(**options: int) -> Tensor:
        out = torch.zeros(700, 520, dtype=BF16, device=device)
        ops.grouped_gemm_out(a, b, sizes, out, **options)
        return out

    def wgrad_out(**options: int) -> Tensor:
        out = normals((5, 520, 264), FP32, device, torch.Generator().manual_seed(2))
        ops.grouped_gemm_wgrad_out(grad, a, sizes, out, **options)
        return out

    return {
        "forward": lambda **options: ops.grouped_gemm(a, b, sizes, **options),
        "data_grad": lambda **options: ops.grouped_gemm(grad, b, sizes, transpose_b=False, **options),
        "forward_out": forward_out,
        "wgrad": lambda **options: ops.grouped_gemm_wgrad(grad, a, sizes, dtype=FP32, **options),
        "wgrad_out": wgrad_out,
    }


@pytest.mark.parametrize("make_calls", [calls, quantized_calls])
def test_bits_do_not_depend_on_launch_options(make_calls: Callable[..., Any], device: torch.device) -> None:
    for name, call in make_calls(device).items():
        expected = call()
        for options in OPTIONS:
            assert_same_bits(call(**options), expected, f"{name} {options}")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_tiny_sums_do_not_depend_on_launch_options(dtype: torch.dtype, device: torch.device) -> None:
    """Values around the smallest normal number, where TMA reductions of a GPU flush subnormal numbers to zero."""
    generator, sizes = torch.Generator().manual_seed(3), torch.tensor([200, 0, 1800], device=device)
    grad, input = (normals((2048, width), dtype, device, generator) for width in (136, 520))
    tiny = torch.full((3,), torch.finfo(FP32).tiny / 16, device=device)
    initial = normals((3, 136, 520), FP32, device, generator) * torch.finfo(FP32).tiny
    results = []
    for expected_rows in (-1, 0, 2048, 2304):
        out = initial.clone()
        ops.grouped_gemm_wgrad_out(grad, input, sizes, out, alpha=tiny, expected_rows=expected_rows)
        results.append(out)
    for out in results[1:]:
        assert_same_bits(out, results[0])


@pytest.mark.parametrize("transpose_b", [True, False])
def test_gradients_use_the_launch_options(transpose_b: bool, device: torch.device) -> None:
    a, b, sizes, grad = operands(device)
    if not transpose_b:
        b = b.transpose(1, 2).contiguous()
    leaves = [a.requires_grad_(), b.requires_grad_()]
    seen = []

    class OptionRecorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = [argument.name for argument in func._schema.arguments]
            if "max_sms" in names:
                by_name = dict(zip(names, args, strict=False))
                seen.append(
                    (func._schema.name[20:], by_name.get("max_sms", 0), by_name.get("expected_rows", -1))
                )
            return func(*args, **(kwargs or {}))

    results = []
    for options in ({}, {"max_sms": 8}, {"expected_rows": 640}, {"max_sms": 6, "expected_rows": 0}):
        seen.clear()
        with OptionRecorder():
            output = ops.grouped_gemm(*leaves, sizes, transpose_b=transpose_b, **options)
            results.append([output, *torch.autograd.grad(output, leaves, grad)])
        wanted = (options.get("max_sms", 0), options.get("expected_rows", -1))
        names = ["grouped_gemm", "grouped_gemm", "grouped_gemm_wgrad"]
        assert sorted(seen) == [(name, *wanted) for name in names]
        for got, expected in zip(results[-1], results[0], strict=True):
            assert_same_bits(got, expected)


def test_compiled(device: torch.device) -> None:
    a, b, sizes, grad = operands(device, FP32)

    def step(a: Tensor, b: Tensor, most: int) -> Tensor:
        output = ops.grouped_gemm(a, b, sizes, max_sms=most, expected_rows=a.shape[0] // 2)
        (output * grad).sum().backward()
        return output

    compiled = torch.compile(step, fullgraph=False, backend="aot_eager")
    got, expected = [], []
    for results, run in ((got, compiled), (expected, step)):
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        results.extend([run(*leaves, 16), *(leaf.grad for leaf in leaves)])
    for x, y in zip(got, expected, strict=True):
        assert_same_bits(x, y)


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(device: torch.device) -> None:
    generator, options = torch.Generator().manual_seed(0), {"max_sms": 4, "expected_rows": 3}
    sizes = torch.tensor([2, 1], device=device)
    a, b, grad = (normals(s, FP32, device, generator) for s in ((4, 128), (2, 16, 128), (4, 16)))
    out, weight = torch.zeros(4, 16, device=device), torch.zeros(2, 16, 128, device=device)
    opcheck(_ops.grouped_gemm_out.default, (a, [b], sizes, out), options)
    opcheck(_ops.grouped_gemm_wgrad.default, (grad, a, sizes), options)
    opcheck(_ops.grouped_gemm_wgrad_out.default, (grad, a, sizes, [weight]), options)
    leaves = (a.clone().requires_grad_(), [b.clone().requires_grad_()])
    opcheck(_ops.grouped_gemm.default, (*leaves, sizes), options)
    key = "fp8_block"
    rows, matrices = ops.quantize(a, key, sizes), ops.quantize(b, key)
    forward = quantized_arguments(rows, matrices, key, key) | {"b": [matrices[0]], "group_sizes": sizes}
    opcheck(_ops.grouped_gemm.default, (), forward | options)
    opcheck(_ops.grouped_gemm_out.default, (), forward | options | {"out": out})
    columns = [ops.quantize(x, key, sizes, rowwise=False, columnwise=True) for x in (grad, a)]
    wgrad = wgrad_arguments(columns[0], columns[1], key, key) | {"group_sizes": sizes}
    opcheck(_ops.grouped_gemm_wgrad.default, (), wgrad | options | {"dtype": FP32})
    opcheck(_ops.grouped_gemm_wgrad_out.default, (), wgrad | options | {"out": [weight]})


@pytest.mark.parametrize("make_calls", [calls, quantized_calls])
def test_errors(make_calls: Callable[..., Any], device: torch.device) -> None:
    for name, call in make_calls(device).items():
        op = "grouped_gemm" + ("_wgrad" if "wgrad" in name else "")
        op += "_out" if "out" in name else ""
        with pytest.raises(ValueError) as caught:
            call(max_sms=-2)
        assert str(caught.value) == (
            f"transformer_plugin::{op}: argument 'max_sms': expected a number of multiprocessors, or 0 for all, "
            "got -2. Pass how many the product may take."
        )
        with pytest.raises(ValueError) as caught:
            call(expected_rows=-2)
        assert str(caught.value) == (
            f"transformer_plugin::{op}: argument 'expected_rows': expected the rows of all groups together, or -1 "
            "for the rows of the buffer, got -2. Leave it out where it is not known."
        )
