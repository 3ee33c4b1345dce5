"""gemm: exact bits if sums are exact, one rounding for random values, gradients, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import gemm_cases, normals
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn

EXACT = list(gemm_cases())
RANDOM = list(gemm_cases(normals))
exact_cases = pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
random_cases = pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.name)
gemm_op = torch.ops.transformer_plugin.gemm.default


def product_fp64(a: Tensor, b: Tensor, bias: Tensor | None, transpose_b: bool) -> Tensor:
    product = a.double() @ (b.double().T if transpose_b else b.double())
    return product if bias is None else product + bias.double()


@exact_cases
def test_exact_sums(case: Case, device: torch.device) -> None:
    a, b, bias, transpose_b, dtype = case.arguments()
    expected = product_fp64(a, b, bias, transpose_b).to(dtype or a.dtype)
    assert_same_bits(reference.gemm(a, b, bias, transpose_b, dtype), expected, "reference")
    assert_same_bits(ops.gemm(*case.arguments(device)), expected.to(device))


@random_cases
def test_rounded_once(case: Case, device: torch.device) -> None:
    a, b, bias, transpose_b, dtype = case.arguments(device)
    got = ops.gemm(a, b, bias, transpose_b, dtype)
    if a.dtype == torch.float64:
        torch.testing.assert_close(got, product_fp64(a, b, bias, transpose_b))
        return
    magnitude = product_fp64(a.abs(), b.abs(), None if bias is None else bias.abs(), transpose_b)
    assert_rounded_sum(got, product_fp64(a, b, bias, transpose_b), magnitude, a.shape[1])


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)])
def test_gradient(
    wanted: tuple[int, ...], dtype: torch.dtype | None, transpose_b: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(9, 17), (13, 17) if transpose_b else (17, 13), (13,)]
    leaves = [normals(shape, torch.bfloat16, device, generator) for shape in shapes]
    for i in wanted:
        leaves[i].requires_grad_()
    output = ops.gemm(*leaves, transpose_b, dtype)
    grad = normals((9, 13), output.dtype, device, generator)
    got = torch.autograd.grad(output, [leaves[i] for i in wanted], grad)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(
        product_fp64(*doubles, transpose_b), [doubles[i] for i in wanted], grad.double()
    )
    for g, e in zip(got, expected, strict=True):
        assert_rounded_sum(g, e, torch.full_like(e, 40.0), 17)


def test_gradcheck() -> None:
    for transpose_b in (True, False):
        shapes = [(3, 4), (2, 4) if transpose_b else (4, 2), (2,)]
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        assert torch.autograd.gradcheck(lambda a, b, c, t=transpose_b: ops.gemm(a, b, c, t), leaves)


def test_gradient_of_stride_zero(device: torch.device) -> None:
    a = torch.randn(5, 6, device=device, requires_grad=True)
    b = torch.randn(4, 6, device=device, requires_grad=True)
    ops.gemm(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(0).expand(5, 6))
    torch.testing.assert_close(b.grad, a.detach().sum(0).expand(4, 6))


def test_strided_operands(device: torch.device) -> None:
    a = torch.randn(12, 20, device=device)[::2, ::2]
    b = torch.randn(10, 7, device=device).T
    torch.testing.assert_close(ops.gemm(a, b), a @ b.T)


# opcheck reads no values: one case for each kind of shape and dtype is enough.
@pytest.mark.parametrize("case", EXACT[::5], ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(gemm_op, arguments)
    leaves = [a.requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
    opcheck(gemm_op, tuple(leaves))


F32 = torch.zeros(2, 4)
PREFIX = "transformer_plugin::gemm: argument "


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (F32.int(), F32),
            TypeError,
            "'a': expected one of the dtypes float32, bfloat16, float16, float64, got int32. "
            "Convert it with .to() first.",
        ),
        (
            (F32[0], F32),
            ValueError,
            "'a': expected 2 dimensions, got float32[4] on cpu. Reshape it first.",
        ),
        (
            (F32, F32.bfloat16()),
            TypeError,
            "'b': expected float32, like a, got bfloat16. Convert one of them with .to() first.",
        ),
        (
            (F32, torch.zeros(3, 5)),
            ValueError,
            "'b': expected size 4 in dimension 1 (the columns of 'a', summed over), got float32[3, 5] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (F32, torch.zeros(3, 4), torch.zeros(2)),
            ValueError,
            "'bias': expected size 3 in dimension 0 (the columns of the output), got float32[2] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (F32, F32, None, True, torch.float64),
            TypeError,
            "'dtype': expected one of float32, bfloat16, float16 with a in float32, got float64. "
            "Convert the result with .to() instead.",
        ),
        (
            (F32, torch.zeros(3, 4, device="meta")),
            ValueError,
            "'b': expected a tensor on cpu, like a, got float32[3, 4] on meta. "
            'Move it with .to("cpu") first.',
        ),
    ],
)
def test_errors(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.gemm(*arguments)
    assert str(caught.value) == PREFIX + text
