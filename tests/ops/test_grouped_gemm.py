"""grouped_gemm and its weight and bias gradients: exact bits, one rounding, NaN in the tail, and writing into
buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import poison, rows_fp64, wgrad_fp64, whole
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import (
    grouped_gemm_cases,
    grouped_wgrad_cases,
    integers,
    normals,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn

EXACT, RANDOM = list(grouped_gemm_cases()), list(grouped_gemm_cases(normals))
WGRAD_EXACT, WGRAD_RANDOM = list(grouped_wgrad_cases()), list(grouped_wgrad_cases(normals))
_ops = torch.ops.transformer_plugin


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@each(EXACT)
def test_exact_sums(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    expected = rows_fp64(a, b, sizes, bias, scale, transpose_b).to(a.dtype)
    assert_same_bits(reference.grouped_gemm(a, b, sizes, bias, scale, transpose_b) + 0, expected, "reference")
    arguments = case.arguments(device)
    poison(tuple(expected.shape), a.dtype, device)
    assert_same_bits(ops.grouped_gemm(*arguments) + 0, expected.to(device))


@each(RANDOM)
def test_rounded_once(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments(device)
    absolute = [None if t is None else t.abs() for t in (bias, scale)]
    exact = rows_fp64(a, b, sizes, bias, scale, transpose_b)
    magnitude = rows_fp64(a.abs(), b.abs(), sizes, *absolute, transpose_b)
    assert_rounded_sum(ops.grouped_gemm(a, b, sizes, bias, scale, transpose_b), exact, magnitude, a.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_output_dtype(source: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    for case in grouped_gemm_cases(dtypes=(source,)):
        a, b, sizes, bias, scale, transpose_b = case.arguments()
        expected = rows_fp64(a, b, sizes, bias, scale, transpose_b).to(dtype)
        assert_same_bits(ops.grouped_gemm(*case.arguments(device), dtype) + 0, expected.to(device), case.name)


@each(WGRAD_EXACT)
def test_wgrad_exact_sums(case: Case, device: torch.device) -> None:
    grad, input, sizes = case.arguments()
    expected = wgrad_fp64(grad, input, sizes)
    assert_same_bits(
        reference.grouped_gemm_wgrad(grad, input, sizes) + 0, expected.to(grad.dtype), "reference"
    )
    arguments = case.arguments(device)
    for dtype in (None, torch.float32):
        poison(tuple(expected.shape), dtype or grad.dtype, device)
        got = ops.grouped_gemm_wgrad(*arguments, dtype)
        assert_same_bits(got + 0, expected.to(device, dtype or grad.dtype))


@each(WGRAD_RANDOM)
def test_wgrad_rounded_once(case: Case, device: torch.device) -> None:
    grad, input, sizes = case.arguments(device)
    exact, magnitude = wgrad_fp64(grad, input, sizes), wgrad_fp64(grad.abs(), input.abs(), sizes)
    most = int(sizes.max()) if sizes.numel() else 0
    assert_rounded_sum(ops.grouped_gemm_wgrad(grad, input, sizes), exact, magnitude, most)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tail", [0, 5, 200])
@pytest.mark.parametrize("sizes", [[65, 0, 127, 64, 1, 63, 190], [70, 3, 129], [0, 193]], ids=str)
def test_groups_do_not_read_other_rows(sizes: list[int], tail: int, bias: bool, device: torch.device) -> None:
    """A CPU multiplies bfloat16 in multiples of 64 rows. No group may read its neighbor's rows or the tail."""
    rows, groups = sum(sizes) + tail, len(sizes)
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 48), (rows, 56), (groups, 56, 48), (groups, 56)
    a, grad, b, biases = (integers(s, torch.bfloat16, torch.device("cpu"), generator) for s in shapes)
    group_sizes, bias_or_none = torch.tensor(sizes), biases if bias else None
    expected = rows_fp64(a, b, group_sizes, bias_or_none, None, True).to(torch.bfloat16)
    weight_grad = wgrad_fp64(grad, a, group_sizes)
    for matrix in (a, grad):
        matrix[rows - tail :] = float("nan")
    a, b, grad, group_sizes = (tensor.to(device) for tensor in (a, b, grad, group_sizes))
    poison((rows, 56), torch.bfloat16, device)
    got = ops.grouped_gemm(a, b, group_sizes, None if bias_or_none is None else bias_or_none.to(device))
    assert_same_bits(got + 0, expected.to(device))
    for dtype in (torch.bfloat16, torch.float32):
        wanted = weight_grad.to(dtype).to(device)
        assert_same_bits(ops.grouped_gemm_wgrad(grad, a, group_sizes, dtype) + 0, wanted)
        out = torch.ones_like(wanted)
        ops.grouped_gemm_wgrad_out(grad, a, group_sizes, out)
        assert_same_bits(out, (weight_grad + 1).to(dtype).to(device))


def strided_buffers(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns buffers: contiguous, with padded rows, with padded groups, with the rows of the groups interleaved,
    and a slice of a flat buffer."""
    g, n, k = shape
    flat = torch.zeros(g * n * k + 3, dtype=dtype, device=device)
    return [
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(g, n, k + 5, dtype=dtype, device=device)[:, :, :k],
        torch.zeros(g, n + 2, k, dtype=dtype, device=device)[:, 1 : n + 1],
        torch.zeros(n, g, k, dtype=dtype, device=device).transpose(0, 1),
        flat[3:].view(shape),
    ]


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@each(WGRAD_EXACT)
def test_wgrad_out(case: Case, out_dtype: torch.dtype, accumulate: bool, device: torch.device) -> None:
    grad, input, sizes = case.arguments()
    product = wgrad_fp64(grad, input, sizes)
    before = integers(
        tuple(product.shape), torch.float64, torch.device("cpu"), torch.Generator().manual_seed(3)
    )
    expected = (before + product if accumulate else product).to(out_dtype)
    arguments = case.arguments(device)
    for out in strided_buffers(tuple(product.shape), out_dtype, device):
        out.copy_(before)
        storage = whole(out).clone()
        pointer, version = out.data_ptr(), out._version
        ops.grouped_gemm_wgrad_out(*arguments, out, accumulate)
        assert (out.data_ptr(), out._version) == (pointer, version)
        assert_same_bits(out + 0, expected.to(device))
        out.copy_(before)  # nothing outside the buffer's own elements was written
        assert_same_bits(whole(out), storage)


def test_wgrad_of_empty_groups_leaves_the_buffer_unchanged(device: torch.device) -> None:
    out = torch.full((2, 3, 8), -0.0, device=device)
    out[0, 0, 0] = float("nan")
    before = out.clone()
    arguments = (torch.zeros(4, 3, device=device), torch.zeros(4, 8, device=device))
    ops.grouped_gemm_wgrad_out(*arguments, torch.tensor([0, 0], device=device), out)
    assert_same_bits(out, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_of_two_microbatches(dtype: torch.dtype, device: torch.device) -> None:
    """Runs two forwards before two backwards, each of which adds its weight gradient to the same buffer."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.tensor([3, 0, 4], device=device)
    weight = integers((3, 8, 16), dtype, device, generator).requires_grad_()
    weight_grad = integers((3, 8, 16), torch.float32, device, generator)
    before = weight_grad.clone()
    inputs = [integers((9, 16), dtype, device, generator).requires_grad_() for _ in range(2)]
    grads = [integers((9, 8), dtype, device, generator) for _ in range(2)]
    # The product with an element of the buffer saves a view of it for the backward.
    outputs = [ops.grouped_gemm(x, weight, sizes) * weight_grad[0, 0, 0] for x in inputs]
    for output, x, grad in zip(outputs, inputs, grads, strict=True):
        ops.grouped_gemm_wgrad_out(grad, x.detach(), sizes, weight_grad)
        output.backward(grad)
    expected = before + sum(wgrad_fp64(g, x, sizes) for g, x in zip(grads, inputs, strict=True)).float()
    assert_same_bits(weight_grad, expected)
    assert weight.grad is not None


@each(RANDOM)
def test_gradient(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments(device)
    leaves = [t for t in (a, b, bias, scale) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    output = ops.grouped_gemm(a, b, sizes, bias, scale, transpose_b)
    grad = normals(tuple(output.shape), a.dtype, device, torch.Generator().manual_seed(2))
    got = torch.autograd.grad(output, leaves, grad)

    def expected_of(absolute: bool) -> tuple[Tensor, ...]:
        doubles = [leaf.detach().double() for leaf in leaves]
        doubles = [(d.abs() if absolute else d).requires_grad_() for d in doubles]
        rest = iter(doubles[2:])
        extra = [next(rest) if t is not None else None for t in (bias, scale)]
        exact = rows_fp64(doubles[0], doubles[1], sizes, *extra, transpose_b)
        seed = grad.double().abs() if absolute else grad.double()
        return torch.autograd.grad(exact, doubles, seed, materialize_grads=True)

    terms = max([a.shape[1], output.shape[1], *sizes.tolist()], default=1)
    for g, exact, magnitude in zip(got, expected_of(False), expected_of(True), strict=True):
        assert_rounded_sum(g, exact, magnitude, terms)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2)])
def test_only_requested_gradients_are_computed(wanted: tuple[int, ...], device: torch.device) -> None:
    leaves = [torch.randn(s, device=device) for s in ((6, 5), (2, 4, 5), (2, 4), (6,))]
    for i in wanted:
        leaves[i].requires_grad_()
    sizes = torch.tensor([2, 3], device=device)
    ops.grouped_gemm(leaves[0], leaves[1], sizes, leaves[2], leaves[3]).sum().backward()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rows_fp64(doubles[0], doubles[1], sizes, doubles[2], doubles[3], True).sum().backward()
    for i, (leaf, double) in enumerate(zip(leaves, doubles, strict=True)):
        if i in wanted:
            torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=1e-5, atol=1e-5)
        else:
            assert leaf.grad is None


def test_gradcheck() -> None:
    sizes = torch.tensor([2, 0, 1])
    for transpose_b in (True, False):
        shapes = [(4, 3), (3, 2, 3) if transpose_b else (3, 3, 2), (3, 2)]
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        function = lambda a, b, c, t=transpose_b: ops.grouped_gemm(a, b, sizes, c, None, t)  # noqa: E731
        assert torch.autograd.gradcheck(function, leaves)


@each(RANDOM)
def test_bias_backward(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    grad = normals(
        (a.shape[0], b.shape[1 if transpose_b else 2]), a.dtype, a.device, torch.Generator().manual_seed(4)
    )
    host = ops.grouped_bias_backward(grad, sizes, bias, scale)
    expected = reference.grouped_bias_backward(grad, sizes, bias, scale)
    double = reference.grouped_bias_backward(grad.double(), sizes, bias, scale)
    for got, wanted, exact in zip(host, expected, double, strict=True):
        torch.testing.assert_close(wanted.double(), exact.double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    on_device = [None if t is None else t.to(device) for t in (grad, sizes, bias, scale)]
    for got, wanted in zip(ops.grouped_bias_backward(*on_device), host, strict=True):
        assert_same_bits(got, wanted.to(device))


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    sizes = torch.tensor([3, 2], device=device)
    a = torch.randn(12, 16, device=device)[::2, ::2]
    b = torch.randn(2, 8, 6, device=device).transpose(1, 2)
    torch.testing.assert_close(ops.grouped_gemm(a, b, sizes), reference.grouped_gemm(a, b, sizes))
    grad = torch.ones(1, 1, device=device).expand(6, 4)
    torch.testing.assert_close(
        ops.grouped_gemm_wgrad(grad, a, sizes), reference.grouped_gemm_wgrad(grad, a, sizes)
    )


def one_of_each_kind(cases: list[Case]) -> list[Case]:
    """opcheck reads no values: every shape in float32, and a few in each other dtype, are enough."""
    return [case for i, case in enumerate(cases) if case.name.startswith("float32") or i % 11 == 0]


@each(one_of_each_kind(EXACT))
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(_ops.grouped_gemm.default, (arguments[0], [arguments[1]], *arguments[2:]))
    for i in (0, 1, 3, 4):
        if arguments[i] is not None:
            arguments[i].requires_grad_()
    opcheck(_ops.grouped_gemm.default, (arguments[0], [arguments[1]], *arguments[2:]))


@each(one_of_each_kind(WGRAD_EXACT))
def test_wgrad_opcheck(case: Case, device: torch.device) -> None:
    grad, input, sizes = case.arguments(device)
    opcheck(_ops.grouped_gemm_wgrad.default, (grad, input, sizes))
    out = torch.zeros(sizes.numel(), grad.shape[1], input.shape[1], device=device)
    opcheck(_ops.grouped_gemm_wgrad_out.default, (grad, input, sizes, [out]))
    bias = torch.ones(sizes.numel(), grad.shape[1], dtype=grad.dtype, device=device)
    scale = torch.ones(grad.shape[0], device=device)
    for extra in ((None, None), (None, scale), (bias, scale)):
        opcheck(_ops.grouped_bias_backward.default, (grad, sizes, *extra))
