"""gemm and gemm_wgrad: the direction that lies along the sum, and the bits of the op with that direction by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.values import buffers, draw, scales
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.numerics import assert_same_bits

M, N, K = 48, 32, 64

#: Formats of a and b that a product takes together.
PAIRS = (
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_tensor:e5m2", "fp8_tensor"),
    ("fp8_row", "fp8_row"),
    ("fp8_block", "fp8_block:square"),
    ("fp8_block", "fp8_block"),
    ("mxfp8", "mxfp8:square"),
    ("mxfp8:tiled", "mxfp8"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:row_scaled", "nvfp4"),
    ("nvfp4:4over6", "nvfp4:4over6"),
)
by_pair = pytest.mark.parametrize("keys", PAIRS, ids=" with ".join)
#: Those that are multiplied along columns too.
COLUMNS = tuple(pair for pair in PAIRS if "fp8_row" not in pair)
by_column_pair = pytest.mark.parametrize("keys", COLUMNS, ids=" with ".join)


def by_hand(
    a: dict[str, Tensor], b: dict[str, Tensor], keys: tuple[str, str], columnwise: tuple[bool, bool]
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Data of the two operands in the directions that are named, and the arguments for their scales."""
    names = ["columnwise_data" if c else "rowwise_data" for c in columnwise]
    both = (scales(a, columnwise[0]), scales(b, columnwise[1]))
    options = {"a_scale": both[0], "b_scale": both[1], "a_format": keys[0], "b_format": keys[1]}
    return (a[names[0]], b[names[1]]), options


@by_pair
def test_forward_reads_the_rows_of_both(keys: tuple[str, str], device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = draw(M, K, device=device, dtype=dtype), draw(N, K, seed=1, device=device, dtype=dtype)
        operands, options = by_hand(buffers(a, keys[0]), buffers(b, keys[1]), keys, (False, False))
        expected = ops.gemm(*operands, dtype=dtype, **options)
        for columnwise in (False, True):
            left = tp.quantize(a, keys[0], columnwise=columnwise)
            right = tp.quantize(b, keys[1], columnwise=columnwise)
            got = tp.gemm(left, right)
            assert got.dtype == dtype and type(got) is Tensor
            assert_same_bits(got, expected)


@by_column_pair
def test_data_gradient_reads_the_columns_of_the_weight(keys: tuple[str, str], device: torch.device) -> None:
    grad, weight = draw(M, N, device=device), draw(N, K, seed=1, device=device)
    rows, both = buffers(grad, keys[0]), buffers(weight, keys[1], columnwise=True)
    operands, options = by_hand(rows, both, keys, (False, True))
    expected = ops.gemm(*operands, dtype=torch.float32, **options)
    left = tp.quantize(grad, keys[0])
    assert_same_bits(
        tp.gemm(left, tp.quantize(weight, keys[1], columnwise=True), transpose_b=False), expected
    )
    alone = tp.quantize(weight, keys[1], rowwise=False, columnwise=True)
    assert_same_bits(tp.gemm(left, alone, transpose_b=False), expected)


@by_column_pair
def test_other_direction_serves_where_it_is_the_only_one(keys: tuple[str, str], device: torch.device) -> None:
    grad, weight = draw(M, N, device=device), draw(N, K, seed=1, device=device)
    operands, options = by_hand(buffers(grad, keys[0]), buffers(weight, keys[1]), keys, (False, False))
    got = tp.gemm(tp.quantize(grad, keys[0]), tp.quantize(weight, keys[1]), transpose_b=False)
    assert_same_bits(got, ops.gemm(*operands, transpose_b=False, dtype=torch.float32, **options))
    x = draw(M, K, seed=2, device=device)
    columns = buffers(weight, keys[1], rowwise=False, columnwise=True)
    operands, options = by_hand(buffers(x, keys[0]), columns, keys, (False, True))
    alone = tp.quantize(weight, keys[1], rowwise=False, columnwise=True)
    got = tp.gemm(tp.quantize(x, keys[0]), alone)
    assert_same_bits(got, ops.gemm(*operands, transpose_b=False, dtype=torch.float32, **options))


def test_options(device: torch.device) -> None:
    a, b = draw(M, K, device=device), draw(N, K, seed=1, device=device)
    bias, alpha = draw(N, seed=2, device=device), draw(1, seed=3, device=device)
    keys = ("fp8_block", "fp8_block:square")
    operands, scaled = by_hand(buffers(a, keys[0]), buffers(b, keys[1]), keys, (False, False))
    given: dict[str, Any] = {"dtype": torch.bfloat16, "alpha": alpha}
    got = tp.gemm(tp.quantize(a, keys[0]), tp.quantize(b, keys[1]), bias, **given)
    assert_same_bits(got, ops.gemm(*operands, bias, **given, **scaled))
    assert_same_bits(tp.gemm(a, b, bias, **given), ops.gemm(a, b, bias, **given))
    assert_same_bits(tp.gemm(a, b.t(), transpose_b=False), ops.gemm(a, b.t(), transpose_b=False))


def test_members_of_a_stack_are_operands(device: torch.device) -> None:
    a, stack = draw(M, K, device=device), draw(3, N, K, seed=1, device=device)
    quantized = tp.quantize(stack, "fp8_block:square", columnwise=True)
    left = tp.quantize(a, "fp8_block")
    for member, matrix in zip(quantized.members(), stack, strict=True):
        assert_same_bits(tp.gemm(left, member), tp.gemm(left, tp.quantize(matrix, "fp8_block:square")))


def test_gradient_of_a_plain_product(device: torch.device) -> None:
    leaves = [draw(M, K, device=device), draw(N, K, seed=1, device=device), draw(N, seed=2, device=device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grad = draw(M, N, seed=3, device=device)
    got = torch.autograd.grad(tp.gemm(*leaves), leaves, grad)
    for one, other in zip(got, torch.autograd.grad(ops.gemm(*leaves), leaves, grad), strict=True):
        assert_same_bits(one, other)


@by_column_pair
def test_wgrad_reads_the_columns_of_both(keys: tuple[str, str], device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad, x = draw(M, N, device=device, dtype=dtype), draw(M, K, seed=1, device=device, dtype=dtype)
        both = [
            buffers(t, key, rowwise=False, columnwise=True) for t, key in zip((grad, x), keys, strict=True)
        ]
        operands, options = by_hand(both[0], both[1], keys, (True, True))
        expected = ops.gemm(*operands, dtype=dtype, **options)
        for rowwise in (False, True):
            left, right = (
                tp.quantize(t, key, rowwise=rowwise, columnwise=True)
                for t, key in zip((grad, x), keys, strict=True)
            )
            assert_same_bits(tp.gemm_wgrad(left, right), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("key", ("", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"))
def test_wgrad_into_a_buffer(key: str, dtype: torch.dtype, device: torch.device) -> None:
    grad, x = draw(M, N, device=device, dtype=dtype), draw(M, K, seed=1, device=device, dtype=dtype)
    options: dict[str, Any] = {}
    first, second, transpose = grad.t(), x, False
    left, right = grad, x
    if key:
        left, right = (tp.quantize(t, key, columnwise=True) for t in (grad, x))
        found = [buffers(t, key, rowwise=False, columnwise=True) for t in (grad, x)]
        (first, second), options = by_hand(found[0], found[1], (key, key), (True, True))
        transpose = True
    start = draw(N, K, seed=2, device=device)
    expected = start.clone()
    one = torch.ones(1, device=device)
    ops.gemm_out(first, second, expected, transpose_b=transpose, beta=one, **options)
    out = start.clone()
    assert tp.gemm_wgrad(left, right, out=out) is out
    assert_same_bits(out, expected)
    assert not torch.equal(out, start)
    fresh, filled = torch.empty_like(start), torch.full_like(start, float("nan"))
    ops.gemm_out(first, second, fresh, transpose_b=transpose, **options)
    tp.gemm_wgrad(left, right, out=filled, accumulate=False)
    assert_same_bits(filled, fresh)
    fresh = ops.gemm(first, second, transpose_b=transpose, dtype=torch.float32, **options)
    assert_same_bits(tp.gemm_wgrad(left, right, dtype=torch.float32), fresh)


def test_nominal_dtype_is_that_of_the_result(device: torch.device) -> None:
    a = tp.quantize(draw(M, K, device=device), "fp8_block", columnwise=True)
    b = tp.quantize(draw(N, K, seed=1, device=device), "fp8_block", columnwise=True)
    assert tp.gemm(a, b).dtype == torch.float32
    half = a.to(torch.float16)
    assert tp.gemm(half, b).dtype == torch.float16 and tp.gemm_wgrad(half, a).dtype == torch.float16
    assert Format.parse("fp8_block") == half.format
