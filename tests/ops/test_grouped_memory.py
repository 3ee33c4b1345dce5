"""On Hopper, grouped products of bfloat16 and of quantized operands make no 16-bit copies of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_linear_ops import RECIPES, keys
from transformer_plugin import ops
from transformer_plugin.formats import resolve
from transformer_plugin.testing.gemm_cases import apart, quantized_arguments, wgrad_arguments

CUDA = torch.device("cuda")
KEY, SQUARE = "fp8_block", "fp8_block:square"
MICROSCALED = [
    ("mxfp8", "mxfp8"),
    ("mxfp8:e5m2", "mxfp8:square,tiled"),
    ("mxfp8:tiled", "mxfp8:e5m2"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:tiled", "nvfp4:square,tiled"),
]
# Sizes with large weights and few rows, and with many rows and small weights.
WEIGHTS, ROWS = (8, 512, 2048), (4, 2**16, 512)


@pytest.fixture(autouse=True)
def _skip_unless_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("other GPUs dequantize FP8 operands first")


def peak(call: Callable[[], Any]) -> int:
    """Returns the peak of additional bytes that a call allocates, including its result."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def inputs(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows, gradients and weights of one width in bfloat16, and sizes that are not multiples of 16."""
    groups, rows, width = shape
    sizes = torch.full((groups,), rows // groups - 1, device=CUDA)
    x, grad = (torch.randn(rows, width, device=CUDA).bfloat16() for _ in range(2))
    return x, grad, torch.randn(groups, width, width, device=CUDA).bfloat16(), sizes


@pytest.mark.gpu
def test_grouped_linear_keeps_quantized_operands_only() -> None:
    """Quantized data takes one byte per element, row-wise and column-wise; a 16-bit copy would take two more bytes."""
    formats = tuple(resolve(key, CUDA) for key in keys(RECIPES["block"]))
    x, grad, weight, sizes = inputs(WEIGHTS)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def forward() -> Tensor:
        return ops.grouped_linear(*leaves, sizes, None, None, *formats)

    with torch.no_grad():
        assert 1.0 <= peak(forward) / weight.numel() < 1.5
    assert peak(forward) / weight.numel() < 2.5
    output = forward()
    data_grad = peak(lambda: torch.autograd.grad(output, x, grad, retain_graph=True))
    assert data_grad / weight.numel() < 0.5

    x, grad, weight, sizes = inputs(ROWS)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    assert peak(forward) / x.numel() < 4.5  # quantized data in both directions, and the 16-bit output
    output = forward()
    weight_grad = peak(lambda: torch.autograd.grad(output, weight, grad, retain_graph=True))
    assert weight_grad / x.numel() < 3.5  # the quantized gradient, and both operands in aligned groups


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("key", "weight_key"),
    [(KEY, SQUARE), ("fp8_tensor:e5m2", "fp8_tensor"), *MICROSCALED],
)
@pytest.mark.parametrize("columns", [False, True], ids=["forward", "data gradient"])
def test_quantized_weights_are_not_dequantized_to_memory(columns: bool, key: str, weight_key: str) -> None:
    x, _, weight, sizes = inputs(WEIGHTS)
    a_amax, b_amax = (
        (ops.amax(x, key, sizes), ops.amax(weight, weight_key)) if "nvfp4" in key else (None, None)
    )
    a = ops.quantize(x, key, sizes, amax=a_amax)
    amaxes = {"amax_t" if columns else "amax": b_amax}
    b = ops.quantize(weight, weight_key, **amaxes, rowwise=not columns, columnwise=columns)
    out = torch.empty_like(x)
    most = weight.numel() // 2
    arguments = quantized_arguments((*a, a_amax), (*b, b_amax), key, weight_key) | {"group_sizes": sizes}
    assert peak(lambda: ops.grouped_gemm(**arguments)) < most
    assert peak(lambda: ops.grouped_gemm_out(**arguments, out=out)) < most

    def with_dequantized_operands() -> Tensor:
        values = ops.dequantize(*b, weight_key, torch.bfloat16, amax=b_amax)
        return ops.grouped_gemm(x, values, sizes)

    assert peak(with_dequantized_operands) > 2 * most, "the measure sees no copy"


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "weight_key"), MICROSCALED)
def test_dense_product_dequantizes_only_the_rows(key: str, weight_key: str) -> None:
    """In addition to the result, only the rows, which are few, are stored in 16 bits."""
    x, _, weights, _ = inputs(WEIGHTS)
    weight = weights[0]
    a_amax, b_amax = (ops.amax(x, key), ops.amax(weight, weight_key)) if "nvfp4" in key else (None, None)
    a, b = ops.quantize(x, key, None, a_amax), ops.quantize(weight, weight_key, None, b_amax)
    arguments = quantized_arguments((*a, a_amax), (*b, b_amax), key, weight_key)
    most = 2 * (x.numel() + x.shape[0] * weight.shape[0]) + weight.numel() // 2
    assert peak(lambda: ops.gemm(**arguments)) < most

    def with_dequantized_operands() -> Tensor:
        values = ops.dequantize(*b, weight_key, torch.bfloat16, amax=b_amax)
        return ops.gemm(ops.dequantize(*a, key, torch.bfloat16, amax=a_amax), values)

    assert peak(with_dequantized_operands) > most, "the measure sees no copy"


@pytest.mark.gpu
def test_quantized_wgrad_operands_are_not_dequantized_to_memory() -> None:
    x, grad, weight, sizes = inputs(ROWS)
    grad_t, x_t = (ops.quantize(t, KEY, sizes, rowwise=False, columnwise=True) for t in (grad, x))
    out = torch.zeros_like(weight, dtype=torch.float32)
    most = 5 * x.numel() // 2  # both operands in aligned groups, one byte per element
    arguments = wgrad_arguments(grad_t, x_t, KEY, KEY) | {"group_sizes": sizes}
    for dtype in (torch.bfloat16, torch.float32):
        assert peak(lambda dtype=dtype: ops.grouped_gemm_wgrad(**arguments, dtype=dtype)) < most
    for buffers in (out, apart(out)):
        assert peak(lambda buffers=buffers: ops.grouped_gemm_wgrad_out(**arguments, out=buffers)) < most

    def with_dequantized_operands() -> Tensor:
        values = [ops.dequantize(*q, KEY, torch.bfloat16, sizes, True) for q in (grad_t, x_t)]
        return ops.grouped_gemm_wgrad(*values, sizes)

    assert peak(with_dequantized_operands) > most, "the measure sees no copy"


@pytest.mark.gpu
def test_bfloat16_operands_are_not_copied() -> None:
    x, grad, weight, sizes = inputs(WEIGHTS)
    most = weight.numel() // 2
    assert peak(lambda: ops.grouped_gemm(x, weight, sizes)) < most
    assert peak(lambda: ops.grouped_gemm(grad, weight, sizes, transpose_b=False)) < most
    assert peak(lambda: ops.grouped_gemm(x, weight.clone(), sizes)) > most, "the measure sees no copy"
    x, grad, weight, sizes = inputs(ROWS)
    out = torch.zeros_like(weight, dtype=torch.float32)
    most = x.numel() // 2
    for dtype in (torch.bfloat16, torch.float32):
        assert peak(lambda dtype=dtype: ops.grouped_gemm_wgrad(grad, x, sizes, dtype)) < most
    assert peak(lambda: ops.grouped_gemm_wgrad_out(grad, x, sizes, out)) < most
    assert peak(lambda: ops.grouped_gemm(x, weight, sizes)) < 2 * x.numel() + most
