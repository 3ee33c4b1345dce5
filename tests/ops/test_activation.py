"""swiglu and its gradient: float64 results, the reference, and equal bits on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case, swiglu_cases
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits

CASES = list(swiglu_cases())
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def swiglu_fp64(input: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    gate, linear = input.double().chunk(2, dim=-1)
    scale = 1 if probs is None else probs.double()[:, None]
    return gate / (1 + torch.exp(-gate)) * linear * scale


@by_name
def test_reference_agrees_with_fp64(case: Case) -> None:
    input, probs = case.arguments()
    assert_close_in_ulp(
        reference.swiglu(input, probs),
        swiglu_fp64(input, probs),
        ulp=8 if input.dtype == torch.float32 else 1,
    )


@by_name
def test_forward_agrees_with_reference(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    ulp = 8 if input.dtype == torch.float32 else 1
    assert_close_in_ulp(ops.swiglu(input, probs), swiglu_fp64(input, probs), ulp=ulp)


@by_name
def test_gradient_agrees_with_fp64(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    input.requires_grad_()
    leaves = [input] if probs is None else [input, probs.requires_grad_()]
    grad = torch.randn(input.shape[0], input.shape[1] // 2, generator=torch.Generator().manual_seed(7))
    grad = grad.to(input.dtype).to(device)
    got = torch.autograd.grad(ops.swiglu(input, probs), leaves, grad)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(
        swiglu_fp64(doubles[0], doubles[1] if probs is not None else None), doubles, grad.double()
    )
    ulp = 32 if input.dtype == torch.float32 else 1
    floor = 1e-5 if input.dtype == torch.float32 else 1e-2 * torch.finfo(input.dtype).eps
    assert_close_in_ulp(got[0], expected[0], ulp=ulp, floor=floor, name="grad_input")
    if probs is not None:
        terms = (grad.double() * swiglu_fp64(input.detach(), None)).abs().sum(-1)
        error = (got[1].double() - expected[1]).abs()
        assert (error <= 1e-6 * terms + 1e-12).all()


@pytest.mark.gpu
@by_name
def test_cuda_gives_the_bits_of_the_cpu(case: Case) -> None:
    host, device = case.arguments("cpu"), case.arguments("cuda")
    assert_same_bits(ops.swiglu(*device), ops.swiglu(*host))
    grad = torch.randn(host[0].shape[0], host[0].shape[1] // 2).to(host[0].dtype)
    for got, expected in zip(
        ops.swiglu_backward(grad.cuda(), *device), ops.swiglu_backward(grad, *host), strict=True
    ):
        assert_same_bits(got, expected)


def test_extreme_values_agree_with_reference(device: torch.device) -> None:
    gate = torch.tensor([-3e38, -200.0, -88.0, -1e-38, 0.0, 88.0, 200.0, float("inf"), float("nan")])
    input = torch.stack([gate, torch.ones_like(gate)], dim=-1).to(device)
    got = ops.swiglu(input)[:, 0].cpu()
    expected = torch.nn.functional.silu(gate.double()).float()
    # exp underflows below the normal range
    torch.testing.assert_close(got[:-1], expected[:-1], rtol=1e-6, atol=1e-36)
    assert got[-1].isnan()


@by_name
def test_opcheck(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    opcheck(torch.ops.transformer_plugin.swiglu.default, (input, probs))
    input.requires_grad_()
    opcheck(torch.ops.transformer_plugin.swiglu.default, (input, probs))
    grad = torch.randn_like(ops.swiglu(input.detach(), probs))
    opcheck(torch.ops.transformer_plugin.swiglu_backward.default, (grad, input.detach(), probs))


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(6, 40, device=device)
    probs = torch.rand(12, device=device)[::2]
    assert_same_bits(
        ops.swiglu(wide[:, ::2], probs), ops.swiglu(wide[:, ::2].contiguous(), probs.contiguous())
    )
    input = torch.randn(4, 8, device=device, requires_grad=True)
    ops.swiglu(input).sum().backward()  # a gradient with stride 0
    (expected,) = torch.autograd.grad(reference.swiglu(input).sum(), input)
    torch.testing.assert_close(input.grad, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (torch.zeros(2, 4, dtype=torch.int32), None),
            TypeError,
            "transformer_plugin::swiglu: argument 'input': expected one of the dtypes float32, bfloat16, float16, "
            "got int32. Convert it with .to() first.",
        ),
        (
            (torch.zeros(2, 5), None),
            ValueError,
            "transformer_plugin::swiglu: argument 'input': expected an even number of columns (gate and linear "
            "halves), got float32[2, 5] on cpu. Concatenate the two halves along the last dimension.",
        ),
        (
            (torch.zeros(2, 4), torch.zeros(3)),
            ValueError,
            "transformer_plugin::swiglu: argument 'probs': expected size 2 in dimension 0 (the rows of 'input'), "
            "got float32[3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            (torch.zeros(2, 4), torch.zeros(2, dtype=torch.float64)),
            TypeError,
            "transformer_plugin::swiglu: argument 'probs': expected one of the dtypes float32, got float64. "
            "Convert it with .to() first.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.swiglu(*arguments)
    assert str(caught.value) == text
