"""Grouped products on a CPU: short groups on many threads, and weights dequantized one group at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.test_gemm_quantized import Operand, operand
from tests.ops.test_grouped_gemm import rows_fp64, wgrad_fp64
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.gemm_cases import (
    integers,
    normals,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

CPU = torch.device("cpu")
N, K = 72, 48
# No rows, fewer rows than oneDNN's kernels are compiled for, multiples of 64 and other sizes, in turn.
SIZES = [(7 * g * g + 13 * g) % 150 for g in range(60)] + [64, 65, 128, 0, 1, 63]
LONG = [*SIZES, 3000]  # all threads share the last group
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
by_sizes = pytest.mark.parametrize(
    "sizes", [SIZES, LONG, LONG[::-1]], ids=["short", "long last", "long first"]
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(sizes: list[int], dtype: torch.dtype, tail: int = 70) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows, gradients, weights and biases of whole numbers; the tail is NaN."""
    generator, rows, groups = torch.Generator().manual_seed(0), sum(sizes), len(sizes)
    shapes = (rows + tail, K), (rows + tail, N), (groups, N, K), (groups, N)
    x, grad, weight, bias = (integers(shape, dtype, CPU, generator, most=3) for shape in shapes)
    x[rows:] = grad[rows:] = float("nan")
    return x, grad, weight, bias


@by_dtype
@by_sizes
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_exact_sums_with_any_number_of_threads(sizes: list[int], dtype: torch.dtype, threads: int) -> None:
    x, grad, weight, bias = inputs(sizes, dtype)
    group_sizes = torch.tensor(sizes)
    forward = rows_fp64(x, weight, group_sizes, None, None, True).to(dtype)
    biased = rows_fp64(x, weight, group_sizes, bias, None, True).to(dtype)
    backward = rows_fp64(grad, weight, group_sizes, None, None, False).to(dtype)
    weight_grad = wgrad_fp64(grad, x, group_sizes)
    torch.set_num_threads(threads)
    for _ in range(3):
        assert_same_bits(ops.grouped_gemm(x, weight, group_sizes) + 0, forward)
        assert_same_bits(ops.grouped_gemm(x, weight, group_sizes, bias) + 0, biased)
        assert_same_bits(ops.grouped_gemm(grad, weight, group_sizes, transpose_b=False) + 0, backward)
        assert_same_bits(ops.grouped_gemm_wgrad(grad, x, group_sizes) + 0, weight_grad.to(dtype))
        out = torch.ones(weight.shape)
        ops.grouped_gemm_wgrad_out(grad, x, group_sizes, out)
        assert_same_bits(out, (weight_grad + 1).float())


# Numbers of rows around which large matrices are split differently.
SPLIT = [1, 2, 3, 31, 32, 33, 40, 41, 0, 48, 49, 128, 129, 150]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n, k", [(840, 712), (3, 180000), (180000, 3)], ids=["wide", "long", "tall"])
def test_large_float32_matrices_have_exact_sums(n: int, k: int, threads: int) -> None:
    """Matrices larger than a core's cache are split into parts, whose size does not divide these; sums are exact."""
    sizes = SPLIT if min(n, k) > 3 else SPLIT[:5]
    generator, rows = torch.Generator().manual_seed(5), sum(sizes)
    shapes = (rows, k), (rows, n), (len(sizes), n, k), (len(sizes), n), (len(sizes), n, k)
    x, grad, weight, bias, main_grad = (
        integers(shape, torch.float32, CPU, generator, most=3) for shape in shapes
    )
    group_sizes = torch.tensor(sizes)
    torch.set_num_threads(threads)
    for own_bias in (None, bias):
        expected = rows_fp64(x, weight, group_sizes, own_bias, None, True).float()
        assert_same_bits(ops.grouped_gemm(x, weight, group_sizes, own_bias) + 0, expected)
    expected = rows_fp64(grad, weight, group_sizes, None, None, False).float()
    assert_same_bits(ops.grouped_gemm(grad, weight, group_sizes, transpose_b=False) + 0, expected)
    weight_grad = wgrad_fp64(grad, x, group_sizes)
    assert_same_bits(ops.grouped_gemm_wgrad(grad, x, group_sizes) + 0, weight_grad.float())
    added = (main_grad.double() + weight_grad).float()
    ops.grouped_gemm_wgrad_out(grad, x, group_sizes, main_grad)
    assert_same_bits(main_grad, added)


@by_dtype
@by_sizes
def test_groups_write_only_their_own_rows(sizes: list[int], dtype: torch.dtype) -> None:
    """Every second group has NaN in its weight: a write into the rows of a neighbor would show."""
    x, grad, weight, _ = inputs(sizes, dtype)
    clean, group_sizes = torch.arange(len(sizes)) % 2 == 0, torch.tensor(sizes)
    rows = torch.cat([clean.repeat_interleave(group_sizes), torch.ones(70, dtype=torch.bool)])
    forward = rows_fp64(x, weight, group_sizes, None, None, True).to(dtype)[rows]
    weight[~clean] = float("nan")
    torch.set_num_threads(4)
    for _ in range(20):
        got = ops.grouped_gemm(x, weight, group_sizes)
        assert_same_bits(got[rows] + 0, forward)
        assert got[~rows].isnan().all()
    weight_grad = wgrad_fp64(grad, x, group_sizes).to(dtype)[clean]
    x[: sum(sizes)][~rows[: sum(sizes)]] = float("nan")
    assert_same_bits(ops.grouped_gemm_wgrad(grad, x, group_sizes)[clean] + 0, weight_grad)


# One long group alone and among others; K that is not a multiple of the step of a processor's matrix unit.
WIDE = {
    "long alone": ([577], 100, 64),
    "among others": ([577, 603, 3, 130], 72, 520),
    "whole steps": ([577, 603, 3, 130], 96, 520),
    "deep": ([733, 93], 2048, 256),
    "deep, long last": ([93, 3, 733], 2048, 256),
}


# Without float32: the order of MKL's float32 sums depends on addresses.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", list(WIDE))
def test_bits_do_not_depend_on_other_rows(name: str, threads: int, dtype: torch.dtype) -> None:
    """The bits do not depend on the values or the number of the rows in the tail and in the other groups."""
    sizes, k, n = WIDE[name]
    end, group_sizes = sum(sizes), torch.tensor(sizes)
    generator = torch.Generator().manual_seed(4)
    x = normals((end + 64, k), dtype, CPU, generator)
    weight = normals((len(sizes), n, k), dtype, CPU, generator)
    bias = normals((len(sizes), n), dtype, CPU, generator)
    torch.set_num_threads(threads)
    products = {
        "forward": lambda x: ops.grouped_gemm(x, weight, group_sizes),
        "with bias": lambda x: ops.grouped_gemm(x, weight, group_sizes, bias),
        "data gradient": lambda x: ops.grouped_gemm(x, weight.mT, group_sizes, transpose_b=False),
    }
    for what, product in products.items():
        expected = product(x[:end].clone())
        for tail in (10, 64):
            assert_same_bits(product(x[: end + tail].clone())[:end], expected, f"{what}, {tail} more rows")
        for bad in (float("nan"), float("inf")):
            for first in (end, *group_sizes.cumsum(0)[:-1].tolist()):
                poisoned = x.clone()
                poisoned[first:] = bad
                got = product(poisoned)
                assert_same_bits(got[:first], expected[:first], f"{what}, {bad} from row {first} on")
                assert not got[end:].any()
                before = x[:end].clone()
                before[:first] = bad
                got = product(before)
                assert_same_bits(got[first:], expected[first:], f"{what}, {bad} up to row {first}")
                assert got[:first].isnan().all()


@by_dtype
def test_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    generator, sizes = torch.Generator().manual_seed(1), torch.tensor(SIZES)
    shapes = (int(sizes.sum()), K), (int(sizes.sum()), N), (len(SIZES), N, K)
    x, grad, weight = (normals(shape, dtype, CPU, generator) for shape in shapes)

    def products() -> tuple[Tensor, Tensor]:
        return ops.grouped_gemm(x, weight, sizes), ops.grouped_gemm_wgrad(grad, x, sizes, torch.float32)

    torch.set_num_threads(1)
    expected = products()
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for got, wanted in zip(products(), expected, strict=True):
            assert_same_bits(got, wanted, f"{threads} threads")


def test_threads_follow_the_callers_autograd_and_autocast_state() -> None:
    """Worker threads record no gradients, ignore autocast, and accept tensors made in inference mode."""
    x, _, weight, bias = inputs(SIZES, torch.float32)
    sizes = torch.tensor(SIZES)
    torch.set_num_threads(4)
    expected = ops.grouped_gemm(x, weight, sizes, bias)
    with torch.inference_mode():
        assert_same_bits(ops.grouped_gemm(x.clone(), weight.clone(), sizes, bias.clone()), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(ops.grouped_gemm(x, weight, sizes, bias), expected)
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    with torch.no_grad():
        assert not ops.grouped_gemm(x, weight, sizes, bias, dtype=torch.bfloat16).requires_grad
    out = torch.zeros(weight.shape)
    ops.grouped_gemm_wgrad_out(expected, x, sizes, out)
    assert not out.requires_grad


PAIRS = [
    ("fp8_tensor:e4m3", "fp8_tensor:e4m3"),
    ("fp8_tensor:pow2", "fp8_tensor:e5m2,pow2"),
    ("fp8_block", "fp8_block:square"),
    ("fp8_block:fp32", "fp8_block:fp32"),
    ("mxfp8", "mxfp8:square"),
    ("mxfp8:tiled", "mxfp8:tiled"),
    ("mxfp8:e5m2", "mxfp8:e5m2,tiled"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:row_scaled", "nvfp4:row_scaled,4over6,tiled"),
    ("mxfp8", "nvfp4"),
]


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_quantized_product_has_the_bits_of_dequantized_operands(
    formats: tuple[str, str], threads: int, transpose_b: bool
) -> None:
    """Equal bits, also if the matrices of the stack are not adjacent in memory."""
    generator, sizes = torch.Generator().manual_seed(2), torch.tensor(LONG)
    rows, groups, n, k = sum(LONG) + 10, len(LONG), 96, 160
    a = operand(normals((rows, k), torch.float32, CPU, generator), formats[0], sizes)
    shape = (2 * groups, n, k) if transpose_b else (2 * groups, k, n)
    stack = operand(normals(shape, torch.float32, CPU, generator), formats[1])
    b = Operand(*(None if part is None else part[::2] for part in stack))
    exact = all(Format.parse(key).power_of_two_scales for key in formats)
    dtype = torch.bfloat16 if exact else torch.float32
    torch.set_num_threads(threads)
    x = ops.dequantize(*a.pair, formats[0], dtype, sizes, amax=a.amax)
    weight = ops.dequantize(*b.pair, formats[1], dtype, amax=b.amax)
    for to in (torch.float32, torch.bfloat16):
        arguments = quantized_arguments(a, b, *formats)
        got = ops.grouped_gemm(**arguments, group_sizes=sizes, transpose_b=transpose_b, dtype=to)
        assert_same_bits(got, ops.grouped_gemm(x, weight, sizes, transpose_b=transpose_b, dtype=to))


# The memory of a product, as a multiple of the dequantized values of all weights.
PEAK = """
import resource, sys
import torch
from transformer_plugin import ops

key, groups, n, k = sys.argv[1], 64, 512, 1024
data, scale = ops.quantize(torch.randn(1, n, k), key, amax=torch.ones(1) if key == "nvfp4" else None)
data, scale = (t.view(torch.uint8).repeat(groups, *[1] * (t.dim() - 1)).view(t.dtype) for t in (data, scale))

def multiply(groups):
    sizes = torch.full((groups,), 2)
    amax = torch.ones(groups) if key == "nvfp4" else None
    x, x_scale = ops.quantize(torch.randn(2 * groups, k), key, sizes, amax=amax)
    more = [] if amax is None else [amax]
    ops.grouped_gemm(x, data[:groups], sizes, dtype=torch.float32, a_scale=[x_scale, *more],
                     b_scale=[scale[:groups], *more], a_format=key, b_format=key)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(2)
before = multiply(8)
print((multiply(groups) - before) / (4 * groups * n * k))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems count memory in other units")
@pytest.mark.parametrize("key", ["fp8_tensor:e4m3", "fp8_block:fp32", "mxfp8", "nvfp4"])
def test_weights_are_not_dequantized_all_at_once(key: str) -> None:
    run = subprocess.run([sys.executable, "-c", PEAK, key], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.25, run.stdout
