"""Dense products with alpha and beta, also into a buffer: exact bits, nothing outside the buffer is written, and
errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import row_buffers, whole
from tests.ops.test_gemm import EXACT, exact_cases, product_fp64
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import (
    in_fp8_units,
    integers,
    normals,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums

pytestmark = pytest.mark.dtypes_in_turn

_ops = torch.ops.transformer_plugin
HALF, QUARTERS = torch.tensor([-0.5]), torch.tensor([0.75])
FACTORS = [(None, None), (HALF, None), (None, QUARTERS), (HALF, QUARTERS)]
by_factors = pytest.mark.parametrize("factors", FACTORS, ids=["plain", "alpha", "beta", "both"])


def on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


def scaled_fp64(case: Case, alpha: Tensor | None) -> Tensor:
    a, b, bias, transpose_b, _ = case.arguments()
    product = product_fp64(a, b, None, transpose_b) * (1 if alpha is None else alpha.double())
    return (product if bias is None else product + bias.double()) + 0.0


@exact_cases
def test_alpha_gives_exact_sums(case: Case, device: torch.device) -> None:
    a, _, _, _, dtype = case.arguments()
    expected = scaled_fp64(case, HALF).to(dtype or a.dtype)
    assert_same_bits(reference.gemm(*case.arguments(), HALF) + 0, expected, "reference")
    assert_same_bits(ops.gemm(*case.arguments(device), HALF.to(device)) + 0, expected.to(device))


@by_factors
@exact_cases
def test_exact_sums(case: Case, factors: tuple[Tensor | None, Tensor | None], device: torch.device) -> None:
    a, b, bias, transpose_b, dtype = case.arguments(device)
    dtype = dtype or a.dtype
    alpha, beta = on(device, *factors)
    product = scaled_fp64(case, factors[0])
    shape = (product.shape[0], product.shape[1])
    before = integers(shape, torch.float64, torch.device("cpu"), torch.Generator().manual_seed(3))
    expected = product + (before * factors[1].double() if factors[1] is not None else 0)
    for out in row_buffers(shape, dtype, device):
        out.copy_(before)
        storage, version = whole(out).clone(), out._version
        plain = out.clone()
        reference.gemm_out(a, b, plain, bias, transpose_b, alpha, beta)
        ops.gemm_out(a, b, out, bias, transpose_b, alpha, beta)
        assert out._version == version
        assert_same_bits(out + 0, expected.to(dtype).to(device))
        assert_same_bits(plain + 0, expected.to(dtype).to(device), "reference")
        out.copy_(before)
        assert_same_bits(whole(out), storage)


def test_beta_of_zero_does_not_read_the_buffer(device: torch.device) -> None:
    a, b = torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)
    out = torch.full((3, 5), float("nan"), device=device)
    ops.gemm_out(a, b, out, beta=torch.zeros(1, device=device))
    assert_same_bits(out, torch.full_like(out, 4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (normals((m, 72), torch.bfloat16, device, generator) for m in (130, 129))
    alpha, beta = (normals((1,), torch.float32, device, generator) for _ in range(2))
    out = normals((130, 129), dtype, device, generator)
    added = out.double() * beta.double()
    product, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    ops.gemm_out(a, b, out, alpha=alpha, beta=beta)
    bound = magnitude * alpha.double().abs() + added.abs()
    assert_rounded_sum(out, product * alpha.double() + added, bound, 72)


def test_gradient_with_alpha(device: torch.device) -> None:
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((5, 7), (3, 7), (3,))]
    alpha = torch.tensor([0.375], device=device)
    for transpose_b in (True, False):
        a, b, bias = leaves[0], leaves[1] if transpose_b else leaves[1].T, leaves[2]
        got = torch.autograd.grad(ops.gemm(a, b, bias, transpose_b, None, alpha).square().sum(), leaves)
        expected = torch.autograd.grad((alpha * (a @ leaves[1].T) + bias).square().sum(), leaves)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@by_factors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", ["fp8_tensor", "fp8_block", "mxfp8", "fp8_tensor:pow2"])
def test_quantized_operands(
    key: str, dtype: torch.dtype, factors: tuple[Tensor | None, Tensor | None], device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (ops.quantize(normals((m, 96), torch.float32, device, generator), key) for m in (33, 24))
    bias = normals((24,), torch.float32, device, generator)
    x, y = (reference.dequantize(*q, key, torch.float32).double() for q in (a, b))
    alpha, beta = on(device, *factors)
    factor = 1 if alpha is None else alpha.double()
    product = x @ y.T * factor + bias.double()
    magnitude = (x.abs() @ y.abs().T * factor).abs() + bias.double().abs()
    arguments = quantized_arguments(a, b, key, key) | {"bias": bias, "alpha": alpha}
    units = in_fp8_units(key, key, dtype, 24, 96, device)
    units_error = fp8_sums(x, y.T) * abs(factor) if units else 0.0
    if beta is None:
        got = ops.gemm(**arguments, dtype=dtype)
        assert_rounded_sum(got, product, magnitude, 97, more=units_error)
    for out in row_buffers((33, 24), dtype, device):
        out.copy_(normals((33, 24), torch.float32, device, generator))
        added = 0 * product if beta is None else out.double() * beta.double()
        ops.gemm_out(**arguments, out=out, beta=beta)
        assert_rounded_sum(out, product + added, magnitude + added.abs(), 97, more=units_error)


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(device: torch.device) -> None:
    for case in EXACT[::9]:
        a, b, bias, transpose_b, dtype = case.arguments(device)
        alpha, beta = on(device, HALF, QUARTERS)
        out = torch.zeros(a.shape[0], b.shape[0 if transpose_b else 1], dtype=dtype or a.dtype, device=device)
        opcheck(_ops.gemm_out.default, (a, b, out, bias, transpose_b, alpha, beta))
        leaves = [a.requires_grad_(), b.requires_grad_()]
        opcheck(_ops.gemm.default, (*leaves, bias, transpose_b, dtype, alpha))
    q = ops.quantize(torch.randn(4, 130, device=device), "fp8_block")
    out = torch.zeros(4, 9, device=device)[:, :4]
    arguments = quantized_arguments(q, q, "fp8_block", "fp8_block")
    opcheck(_ops.gemm_out.default, (), arguments | {"out": out, "alpha": alpha, "beta": beta})


def test_compiled(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (integers((m, 8), torch.float32, device, generator) for m in (4, 6))
    alpha, beta = on(device, HALF, QUARTERS)

    def step(a: Tensor, b: Tensor) -> Tensor:
        out = torch.ones(4, 9, device=device)[:, :6]
        ops.gemm_out(a, b, out, alpha=alpha, beta=beta)
        return ops.gemm(a, b, alpha=alpha) + out

    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(a, b), step(a, b))


A, B = torch.zeros(2, 4), torch.zeros(3, 4)
ROWS = (
    "'out': expected a buffer whose last dimension has stride 1 and whose rows do not overlap, got {} on cpu with "
    "strides {}. It is written in place and never copied: pass a contiguous buffer, or one with strided rows."
)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            "gemm",
            (A, B, None, True, None, torch.ones(2)),
            ValueError,
            "'alpha': expected size 1 in dimension 0 (one factor for each product), got float32[2] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "gemm",
            (A, B, None, True, None, torch.ones(1).double()),
            TypeError,
            "'alpha': expected one of the dtypes float32, got float64. Convert it with .to() first.",
        ),
        (
            "gemm",
            (A, B, None, True, None, torch.ones(1, requires_grad=True)),
            ValueError,
            "'alpha': expected a tensor with requires_grad=False, got float32[1] on cpu with requires_grad=True. "
            "It is a constant: detach it, or multiply the result.",
        ),
        (
            "gemm_out",
            (A.clone().requires_grad_(), B, torch.full((2, 3), 7.0)),
            ValueError,
            "'a': expected a tensor with requires_grad=False, got float32[2, 4] on cpu with requires_grad=True. "
            "What is written into a buffer has none: call gemm, or detach it.",
        ),
        (
            "gemm_out",
            (A, B, torch.full((3, 2), 7.0).T),
            ValueError,
            ROWS.format("float32[2, 3]", "[1, 2]"),
        ),
        (
            "gemm_out",
            (A, B, torch.full((1, 3), 7.0).expand(2, 3)),
            ValueError,
            ROWS.format("float32[2, 3]", "[0, 1]"),
        ),
        (
            "gemm_out",
            (A, B, torch.full((2, 3), 7.0).double()),
            TypeError,
            "'out': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() first.",
        ),
        (
            "gemm_out",
            (A, B, torch.full((2, 4), 7.0)),
            ValueError,
            "'out': expected size 3 in dimension 1 (the columns of the product), got float32[2, 4] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
    ],
)
def test_errors(op: str, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
    assert op == "gemm" or (arguments[2] == 7.0).all()


def test_buffer_that_overlaps_an_operand_is_refused() -> None:
    """A buffer in other columns of the same storage is allowed."""
    memory = torch.full((4, 8), 7.0)
    ops.gemm_out(memory[:, :4], torch.ones(3, 4), memory[:, 4:7])
    assert (memory[:, 4:7] == 28).all()
    assert (memory[:, 7] == 7).all()
    for a, b, out, name in (
        (memory[:, :4], torch.ones(3, 4), memory[:, 3:6], "a"),
        (torch.ones(3, 8), memory[:3], memory[1:, :3], "b"),
    ):
        before = memory.clone()
        with pytest.raises(ValueError) as caught:
            ops.gemm_out(a, b, out)
        assert str(caught.value) == (
            f"transformer_plugin::gemm_out: argument 'out': expected a buffer apart from '{name}', which is read while "
            f"it is written, got float32[{', '.join(map(str, out.shape))}] on cpu in the same memory. "
            "Pass a separate buffer."
        )
        assert torch.equal(memory, before)
