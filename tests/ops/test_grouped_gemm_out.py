"""Grouped products with alpha and beta, also into a buffer: exact bits, tails, nothing outside the buffer is
written, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import (
    poison,
    row_buffers,
    rows_fp64,
    rows_in_units,
    wgrad_fp64,
    wgrad_in_units,
    whole,
)
from tests.ops.test_grouped_gemm import EXACT, WGRAD_EXACT, each, strided_buffers
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import (
    factors,
    grouped_gemm_cases,
    in_fp8_units,
    integers,
    normals,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn

_ops = torch.ops.transformer_plugin
CPU = torch.device("cpu")
by_beta = pytest.mark.parametrize("with_beta", [False, True], ids=["overwrite", "beta"])


def draw_factors(count: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Draws alpha and beta on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return factors(count, CPU, generator), factors(count, CPU, generator)


@each(EXACT)
def test_alpha_gives_exact_sums(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    alpha, _ = draw_factors(sizes.numel())
    exact = rows_fp64(a, b, sizes, bias, scale, transpose_b, alpha)
    got = reference.grouped_gemm(a, b, sizes, bias, scale, transpose_b, alpha=alpha)
    assert_same_bits(got + 0, exact.to(a.dtype), "reference")
    for dtype in (a.dtype, torch.float32):
        poison(tuple(exact.shape), dtype, device)
        got = ops.grouped_gemm(*case.arguments(device), dtype, alpha.to(device))
        assert_same_bits(got + 0, exact.to(dtype).to(device))


def plus_beta_times(product: Tensor, initial: Tensor, sizes: Tensor, beta: Tensor | None) -> Tensor:
    """Returns the expected contents of a buffer after the call, in float64."""
    if beta is None:
        return product
    end = int(sizes.sum())
    mixed = product[:end] + initial[:end] * beta.double().repeat_interleave(sizes, output_size=end)[:, None]
    return torch.cat([mixed, initial[end:]])


@by_beta
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each(EXACT[::2])
def test_out_has_exact_sums(case: Case, dtype: torch.dtype, with_beta: bool, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    alpha, beta = draw_factors(sizes.numel())
    product = rows_fp64(a, b, sizes, bias, scale, transpose_b, alpha)
    shape = (product.shape[0], product.shape[1])
    before = integers(shape, torch.float64, CPU, torch.Generator().manual_seed(3))
    expected = plus_beta_times(product, before, sizes, beta if with_beta else None).to(dtype)
    on_device = case.arguments(device)
    more = {"alpha": alpha.to(device)} | ({"beta": beta.to(device)} if with_beta else {})
    for out in row_buffers(shape, dtype, device):
        out.copy_(before)
        storage, pointer, version = whole(out).clone(), out.data_ptr(), out._version
        ops.grouped_gemm_out(*on_device[:3], out, *on_device[3:], **more)
        assert (out.data_ptr(), out._version) == (pointer, version)
        assert_same_bits(out + 0, expected.to(device))
        out.copy_(before)  # nothing outside the buffer's own elements was written
        assert_same_bits(whole(out), storage)
    out = before.to(dtype)
    more = {name: value.cpu() for name, value in more.items()}
    reference.grouped_gemm_out(a, b, sizes, out, bias, scale, transpose_b, **more)
    assert_same_bits(out + 0, expected, "reference")


@each(EXACT[1::8])
def test_out_without_factors(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    expected = rows_fp64(a, b, sizes, bias, scale, transpose_b).to(a.dtype).to(device)
    on_device = case.arguments(device)
    for out in row_buffers((a.shape[0], expected.shape[1]), a.dtype, device):
        out.fill_(float("nan"))
        ops.grouped_gemm_out(*on_device[:3], out, *on_device[3:])
        assert_same_bits(out + 0, expected)


@each(list(grouped_gemm_cases(normals))[::5])
def test_out_rounded_once(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments(device)
    generator = torch.Generator().manual_seed(2)
    alpha, beta = (normals((sizes.numel(),), torch.float32, device, generator) for _ in range(2))
    product = rows_fp64(a, b, sizes, bias, scale, transpose_b, alpha)
    absolute = [None if t is None else t.abs() for t in (bias, scale)]
    magnitude = rows_fp64(a.abs(), b.abs(), sizes, *absolute, transpose_b, alpha.abs())
    out = normals(tuple(product.shape), a.dtype, device, generator)
    exact = plus_beta_times(product, out.double(), sizes, beta)
    magnitude = plus_beta_times(magnitude, out.double().abs(), sizes, beta.abs())
    ops.grouped_gemm_out(a, b, sizes, out, bias, scale, transpose_b, alpha, beta)
    assert_rounded_sum(out, exact, magnitude, a.shape[1] + 1)


def test_beta_of_zero_does_not_read_the_buffer(device: torch.device) -> None:
    sizes = torch.tensor([2, 1], device=device)
    a, b = torch.ones(4, 8, device=device), torch.ones(2, 16, 8, device=device)
    beta = torch.tensor([0.0, 2.0], device=device)
    out = torch.full((4, 16), float("nan"), device=device)
    out[2:] = 3.0
    ops.grouped_gemm_out(a, b, sizes, out, beta=beta)
    expected = torch.tensor([8.0, 8.0, 14.0, 3.0], device=device)[:, None].expand(4, 16)
    assert_same_bits(out, expected.contiguous())
    weight = torch.full((2, 16, 8), float("nan"), device=device)
    weight[1] = 3.0
    ops.grouped_gemm_wgrad_out(out, a, sizes, weight, False, beta=beta)
    assert_same_bits(weight[:, 0, 0], torch.tensor([16.0, 20.0], device=device))


@each(WGRAD_EXACT)
def test_wgrad_with_alpha_has_exact_sums(case: Case, device: torch.device) -> None:
    grad, input, sizes = case.arguments()
    alpha, _ = draw_factors(sizes.numel())
    exact = wgrad_fp64(grad, input, sizes, alpha)
    got = reference.grouped_gemm_wgrad(grad, input, sizes, None, alpha)
    assert_same_bits(got + 0, exact.to(grad.dtype), "reference")
    for dtype in (grad.dtype, torch.float32):
        got = ops.grouped_gemm_wgrad(*case.arguments(device), dtype, alpha.to(device))
        assert_same_bits(got + 0, exact.to(dtype).to(device))


@pytest.mark.parametrize("mode", ["add", "over", "beta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each(WGRAD_EXACT[::2])
def test_wgrad_out_has_exact_sums(case: Case, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    grad, input, sizes = case.arguments()
    alpha, beta = draw_factors(sizes.numel())
    product = wgrad_fp64(grad, input, sizes, alpha)
    shape = (product.shape[0], product.shape[1], product.shape[2])
    before = integers(shape, torch.float64, CPU, torch.Generator().manual_seed(3))
    initial = {"add": before, "over": 0 * before, "beta": before * beta.double()[:, None, None]}[mode]
    expected = (product + initial + 0.0).to(dtype)
    more = {"accumulate": mode == "add", "alpha": alpha.to(device)}
    more |= {"beta": beta.to(device)} if mode == "beta" else {}
    for out in strided_buffers(shape, dtype, device):
        out.copy_(before)
        storage = whole(out).clone()
        ops.grouped_gemm_wgrad_out(*case.arguments(device), out, **more)
        assert_same_bits(out + 0, expected.to(device))
        out.copy_(before)
        assert_same_bits(whole(out), storage)
    out = before.to(dtype)
    reference.grouped_gemm_wgrad_out(
        grad, input, sizes, out, **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in more.items()}
    )
    assert_same_bits(out + 0, expected, "reference")


@pytest.mark.parametrize("transpose_b", [True, False])
def test_gradient_with_alpha(transpose_b: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes, alpha = torch.tensor([3, 0, 4], device=device), torch.tensor([0.5, 3.0, -2.0], device=device)
    b_shape = (3, 8, 16) if transpose_b else (3, 16, 8)
    leaves = [integers(s, torch.float32, device, generator, 3) for s in ((9, 16), b_shape, (3, 8), (9,))]
    doubles = [leaf.double().requires_grad_() for leaf in leaves]
    grad = integers((9, 8), torch.float32, device, generator)
    output = ops.grouped_gemm(
        *[leaf.requires_grad_() for leaf in leaves[:2]],
        sizes,
        *[leaf.requires_grad_() for leaf in leaves[2:]],
        transpose_b,
        None,
        alpha,
    )
    exact = rows_fp64(*doubles[:2], sizes, *doubles[2:], transpose_b, alpha)
    expected = torch.autograd.grad(exact, doubles, grad.double())
    for got, wanted in zip(torch.autograd.grad(output, leaves, grad), expected, strict=True):
        assert_same_bits(got + 0, wanted.float() + 0)


@by_beta
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("key", ["fp8_tensor", "fp8_block", "mxfp8"])
def test_quantized_operands(
    key: str, transpose_b: bool, dtype: torch.dtype, with_beta: bool, device: torch.device
) -> None:
    generator, sizes = torch.Generator().manual_seed(1), torch.tensor([32, 0, 65], device=device)
    weight_key = {"fp8_block": "fp8_block:square"}.get(key, key)
    a = ops.quantize(normals((100, 128), torch.float32, device, generator), key, sizes)
    b_shape = (3, 24, 128) if transpose_b else (3, 128, 32)
    b = ops.quantize(normals(b_shape, torch.float32, device, generator), weight_key)
    x = reference.dequantize(*a, key, torch.float32, sizes)
    y = reference.dequantize(*b, weight_key, torch.float32)
    n = 24 if transpose_b else 32
    bias, scale = (normals(s, torch.float32, device, generator) for s in ((3, n), (100,)))
    alpha, beta = (normals((3,), torch.float32, device, generator) for _ in range(2))
    product = rows_fp64(x, y, sizes, bias, scale, transpose_b, alpha)
    magnitude = rows_fp64(x.abs(), y.abs(), sizes, bias.abs(), scale.abs(), transpose_b, alpha.abs())
    more = quantized_arguments(a, b, key, weight_key) | {
        "group_sizes": sizes,
        "bias": bias,
        "bias_scale": scale,
    }
    more |= {"transpose_b": transpose_b, "alpha": alpha}
    units = transpose_b and in_fp8_units(key, weight_key, dtype, n, 128, device)
    units_error = rows_in_units(x, y, sizes, transpose_b, alpha) if units else 0.0
    got = ops.grouped_gemm(**more, dtype=dtype)
    assert_rounded_sum(got, product, magnitude, 130, more=units_error)
    for out in row_buffers((100, n), dtype, device):
        out.copy_(normals((100, n), torch.float32, device, generator))
        exact = plus_beta_times(product, out.double(), sizes, beta if with_beta else None)
        bound = plus_beta_times(magnitude, out.double().abs(), sizes, beta.abs() if with_beta else None)
        ops.grouped_gemm_out(**more, out=out, beta=beta if with_beta else None)
        assert_rounded_sum(out, exact, bound, 130, more=units_error)


@pytest.mark.parametrize("key", ["fp8_tensor", "fp8_block", "mxfp8"])
def test_wgrad_of_quantized_operands(key: str, device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(1), torch.tensor([32, 0, 64], device=device)
    matrices = [normals((128, m), torch.float32, device, generator) for m in (32, 64)]
    grad, input = (ops.quantize(m, key, sizes, rowwise=False, columnwise=True) for m in matrices)
    x, y = (reference.dequantize(*q, key, torch.float32, sizes, True) for q in (grad, input))
    alpha, beta = (normals((3,), torch.float32, device, generator) for _ in range(2))
    exact, magnitude = wgrad_fp64(x, y, sizes, alpha), wgrad_fp64(x.abs(), y.abs(), sizes, alpha.abs())
    arguments = wgrad_arguments(grad, input, key, key) | {"group_sizes": sizes, "alpha": alpha}
    units = in_fp8_units(key, key, torch.float32, 64, None, device)
    units_error = wgrad_in_units(x, y, sizes, alpha) if units else 0.0
    got = ops.grouped_gemm_wgrad(**arguments, dtype=torch.float32)
    assert_rounded_sum(got, exact, magnitude, 66, more=units_error)
    for more in ({"accumulate": True}, {"accumulate": False, "beta": beta}):
        out = normals((3, 32, 64), torch.bfloat16, device, generator)
        initial = out.double() * (1 if more["accumulate"] else beta.double()[:, None, None])
        ops.grouped_gemm_wgrad_out(**arguments, out=out, **more)
        more_error = 0.0 if more["accumulate"] else units_error  # accumulating into 16 bits adds in FP32
        assert_rounded_sum(out, exact + initial, magnitude + initial.abs(), 66, more=more_error)


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(device: torch.device) -> None:
    for case in EXACT[::11]:
        a, b, sizes, bias, scale, transpose_b = case.arguments(device)
        alpha, beta = (f.to(device) for f in draw_factors(sizes.numel()))
        out = torch.zeros(a.shape[0], b.shape[1 if transpose_b else 2], dtype=a.dtype, device=device)
        arguments = (a, [b], sizes, out, bias, scale, transpose_b, alpha)
        for more in ((), (beta,)):
            opcheck(_ops.grouped_gemm_out.default, (*arguments, *more))
        leaves = (a.requires_grad_(), [b.requires_grad_()], sizes, bias, scale, transpose_b, None, alpha)
        opcheck(_ops.grouped_gemm.default, leaves)
    for case in WGRAD_EXACT[::11]:
        grad, input, sizes = case.arguments(device)
        alpha, beta = (f.to(device) for f in draw_factors(sizes.numel()))
        out = torch.zeros(sizes.numel(), grad.shape[1], input.shape[1], device=device)
        opcheck(_ops.grouped_gemm_wgrad.default, (grad, input, sizes, None, alpha))
        opcheck(_ops.grouped_gemm_wgrad_out.default, (grad, input, sizes, [out], False, alpha, beta))


def test_compiled(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([2, 0, 3], device=device)
    a, b = (integers(s, torch.float32, device, generator) for s in ((6, 8), (3, 16, 8)))
    alpha, beta = (factors(3, device, generator) for _ in range(2))

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.ones(6, 20, device=device)[:, :16]
        ops.grouped_gemm_out(a, b, sizes, out, alpha=alpha, beta=beta)
        weight = torch.ones_like(b)
        ops.grouped_gemm_wgrad_out(out, a, sizes, weight, False, alpha, beta)
        return ops.grouped_gemm(a, b, sizes, alpha=alpha) + out, weight

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(a, b), step(a, b), strict=True):
        assert_same_bits(got, expected)


A, B, S = torch.zeros(4, 6), torch.zeros(2, 5, 6), torch.tensor([1, 2])
GRAD, INPUT = torch.ones(4, 5), torch.ones(4, 6)
OUT, WEIGHT, ONES = torch.full((4, 5), 7.0), torch.full((2, 5, 6), 7.0), torch.ones(2)


@pytest.mark.parametrize(
    ("op", "arguments", "options", "error", "text"),
    [
        (
            "grouped_gemm",
            (A, B, S),
            {"alpha": torch.ones(3)},
            ValueError,
            "'alpha': expected size 2 in dimension 0 (one factor for each product), got float32[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A.clone().requires_grad_(), B, S),
            {"alpha": torch.ones(2, requires_grad=True)},
            ValueError,
            "'alpha': expected a tensor with requires_grad=False, got float32[2] on cpu with requires_grad=True. "
            "It is a constant: detach it, or multiply the result.",
        ),
        (
            "grouped_gemm_wgrad",
            (GRAD, INPUT, S),
            {"alpha": torch.ones(2, requires_grad=True)},
            ValueError,
            "'alpha': expected a tensor with requires_grad=False, got float32[2] on cpu with requires_grad=True. "
            "It is a constant: detach it, or multiply the result.",
        ),
        (
            "grouped_gemm_out",
            (A, B, S, OUT),
            {"beta": ONES.double()},
            TypeError,
            "'beta': expected one of the dtypes float32, got float64. Convert it with .to() first.",
        ),
        (
            "grouped_gemm_out",
            (A, B, S, torch.full((5, 4), 7.0).T),
            {},
            ValueError,
            "'out': expected a buffer whose last dimension has stride 1 and whose rows do not overlap, "
            "got float32[4, 5] on cpu with strides [1, 4]. It is written in place and never copied: pass a contiguous "
            "buffer, or one with strided rows.",
        ),
        (
            "grouped_gemm_out",
            (A, B, torch.tensor([4, 2**63 - 4]), OUT),
            {},
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 9223372036854775808 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            "grouped_gemm_out",
            (A, B.clone().requires_grad_(), S, OUT),
            {},
            ValueError,
            "'b': expected a tensor with requires_grad=False, got float32[2, 5, 6] on cpu with requires_grad=True. "
            "What is written into a buffer has none: call grouped_gemm, or detach it.",
        ),
        (
            "grouped_gemm_out",
            (OUT, torch.zeros(2, 5, 5), S, OUT),
            {},
            ValueError,
            "'out': expected a buffer apart from 'a', which is read while it is written, got float32[4, 5] on cpu in "
            "the same memory. Pass a separate buffer.",
        ),
        (
            "grouped_gemm_out",
            (A, B, S, OUT),
            {"bias": OUT[:2]},
            ValueError,
            "'out': expected a buffer apart from 'bias', which is read while it is written, got float32[4, 5] on cpu "
            "in the same memory. Pass a separate buffer.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, WEIGHT),
            {"beta": ONES},
            ValueError,
            "'beta': expected none where 'accumulate' adds to what the buffer holds, got float32[2] on cpu and "
            "accumulate=True. Pass one of them, accumulate=False with beta.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (WEIGHT[0, :, :5], WEIGHT[1], S, WEIGHT),
            {},
            ValueError,
            "'out': expected a buffer apart from 'grad', which is read while it is written, got float32[2, 5, 6] on "
            "cpu in the same memory. Pass a separate buffer.",
        ),
    ],
)
def test_errors(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments, **options)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
    if op.endswith("_out"):
        assert (arguments[3] == 7.0).all()
