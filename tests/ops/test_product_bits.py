"""Products on a CPU: their bits depend on values and sizes and on whether operands lie by rows or by columns, and
neither on addresses and distances of rows nor on the op."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: MKL computes the last with other instructions if the output does not begin at a cache line, on a CPU with AVX2.
SIZES = [(16, 33, 7), (64, 96, 80), (130, 61, 47), (48, 128, 256), (3, 100, 50)]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shifted(tensor: Tensor, elements: int, more: int = 0) -> Tensor:
    """A copy that begins this many elements after a cache line, with more elements between two rows."""
    rows, columns = tensor.shape
    memory = torch.empty(rows * (columns + more) + 64, dtype=tensor.dtype)
    begin = (-memory.data_ptr() % 64) // memory.element_size() + elements
    copy = memory.as_strided(tensor.shape, (columns + more, 1), begin).copy_(tensor)
    assert copy.data_ptr() % 64 == elements * memory.element_size() % 64
    return copy


def gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    ops.gemm_out(a, b, out)
    return torch.cat([out, ops.gemm(a, b)])


def linear(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, 2 * b.shape[0], dtype=a.dtype)[::2]
    ops.linear_out(a, b, out.detach(), bias)
    results = [ops.linear(a, b, bias), ops.linear(a, b, bias.contiguous())]
    for result in results:
        assert_same_bits(result, out.contiguous(), "in the caller's buffer")
    return torch.cat([ops.linear(a, b), *results])


def grouped(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    for bias in (None, torch.linspace(-1, 1, b.shape[0], dtype=a.dtype)):
        one = ops.grouped_gemm(a, [b], torch.tensor([len(a)]), None if bias is None else bias[None])
        assert_same_bits(one, ops.gemm(a, b, bias), "one group")
    sizes = torch.tensor([a.shape[0] - 1, 1])
    ops.grouped_gemm_out(a, [b, b], sizes, out)
    return torch.cat([out, ops.grouped_gemm(a, torch.stack([b, b]), sizes)])


def wgrad(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """With the terms of the product as rows: [K, M] and [K, N]. What is added to a buffer is the gradient."""
    sizes, (grad, input) = torch.tensor([a.shape[1]]), (each.t().contiguous() for each in (a, b))
    more = out.stride(0) - out.shape[1]
    start = torch.linspace(-1, 1, out.numel()).view(out.shape)
    gradient = ops.gemm(grad.t(), input.t(), dtype=torch.float32)
    for op in (ops.grouped_gemm_wgrad_out, None):
        sums = shifted(start, out.data_ptr() % 64 // 4, more)
        for _ in range(2):
            if op is None:
                ops.gemm_out(grad.t(), input.t(), sums, accumulate=True)
            else:
                op(grad, input, sizes, [sums], accumulate=True)
        assert_same_bits(sums.contiguous(), start + gradient + gradient, "two gradients")
    return sums


@pytest.mark.parametrize("op", [gemm, linear, grouped, wgrad])
@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_do_not_change_bits(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for rows, terms, columns in SIZES:
        a = drawn(rows, terms, dtype=dtype, seed=1)
        b = drawn(columns, terms, dtype=dtype, seed=2)
        operands = (a, b, torch.empty(rows, columns, dtype=dtype))
        expected = op(*(shifted(each, 0) for each in operands))
        for begins in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (4, 8, 4), (7, 5, 8)):
            for more in ((0, 0, 0), (1, 3, 5), (16, 0, 0), (0, 16, 16)):
                more = more if op in (gemm, wgrad) else (*more[:2], 0)  # others want a contiguous buffer
                places = zip(operands, begins, more, strict=True)
                got = op(*(shifted(each, begin, gap) for each, begin, gap in places))
                assert_same_bits(got, expected, f"{(rows, terms, columns)} {begins} {more}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_products_of_gemm(dtype: torch.dtype) -> None:
    """Those of linear and norm_linear, which sharded and tensor-parallel weights have, too."""
    draw = random.Random(1)
    for case in range(60):
        rows, terms, columns = (draw.choice([1, 8, 33, 47, 48, 64, 96, 130]) for _ in range(3))
        input, grad = (drawn(rows, n, dtype=dtype, seed=case + n) for n in (terms, columns))
        weight = drawn(columns, terms, dtype=dtype, seed=case)
        if case % 3 == 1:
            weight = weight.t().contiguous().t()
        if case % 3 == 2:
            weight = torch.cat([weight, weight], 1)[:, :terms]
        data, gradient = ops.gemm(grad, weight, transpose_b=False), ops.gemm(grad.t(), input.t())
        buffer = torch.zeros(columns, terms)
        for main_grad in (None, buffer):
            leaves = [each.detach().requires_grad_() for each in (input, weight)]
            ops.linear(*leaves, main_grad=main_grad).backward(grad)
            assert_same_bits(leaves[0].grad, data, f"input, case {case}")
            if main_grad is None:
                assert_same_bits(leaves[1].grad, gradient, f"weight, case {case}")
        exact = ops.gemm(grad.t(), input.t(), dtype=torch.float32)
        assert_same_bits(buffer, exact, f"main_grad, case {case}")
        normalized = ops.rms_norm(input, None, 1e-5)
        leaf = weight.detach().requires_grad_()
        ops.norm_linear(input, None, None, leaf, None, 1e-5)[0].backward(grad)
        assert_same_bits(leaf.grad, ops.gemm(grad.t(), normalized.t()), f"norm_linear, case {case}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slices_have_the_bits_of_the_product(dtype: torch.dtype) -> None:
    """Of 16-bit values: rows of the input, and rows of the weight."""
    sizes = (
        (96, 64, 96),
        (64, 128, 192),
        (48, 40, 80),
        (16, 160, 144),
        (4, 96, 192),
        (160, 512, 16),
        (512, 128, 20),
    )
    for rows, terms, columns in sizes:
        a, b = drawn(rows, terms, dtype=dtype, seed=1), drawn(columns, terms, dtype=dtype, seed=2)
        for weight in (b, b.t().contiguous().t()):
            whole = ops.gemm(a, weight)
            for parts in (2, 4):
                for i in range(parts):
                    some = slice(i * rows // parts, (i + 1) * rows // parts)
                    assert_same_bits(ops.gemm(a[some], weight), whole[some], f"rows {some}")
                    some = slice(i * columns // parts, (i + 1) * columns // parts)
                    own = ops.gemm(a, weight[some])
                    assert_same_bits(own, whole[:, some].contiguous(), f"columns {some}")
