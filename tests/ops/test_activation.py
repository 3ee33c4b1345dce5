"""Activations and their gradients: float64 results, the reference, and equal bits on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.activations import EXPECTED_KEY, KEY_ADVICE
from transformer_plugin.reference.activations import halves_apart
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case, activation_cases
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits

CASES = list(activation_cases())
#: Both parts in turn, 32 columns of each.
BLOCKS = "swiglu:interleave=32"
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def swiglu_fp64(input: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    gate, linear = input.double().chunk(2, dim=-1)
    scale = 1 if probs is None else probs.double()[:, None]
    return gate / (1 + torch.exp(-gate)) * linear * scale


@by_name
def test_reference_agrees_with_fp64(case: Case) -> None:
    input, probs = case.arguments()
    assert_close_in_ulp(
        reference.activation(input, probs),
        swiglu_fp64(input, probs),
        ulp=8 if input.dtype == torch.float32 else 1,
    )


@by_name
def test_forward_agrees_with_reference(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    ulp = 8 if input.dtype == torch.float32 else 1
    assert_close_in_ulp(ops.activation(input, probs), swiglu_fp64(input, probs), ulp=ulp)


@by_name
def test_gradient_agrees_with_fp64(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    input.requires_grad_()
    leaves = [input] if probs is None else [input, probs.requires_grad_()]
    grad = torch.randn(input.shape[0], input.shape[1] // 2, generator=torch.Generator().manual_seed(7))
    grad = grad.to(input.dtype).to(device)
    got = torch.autograd.grad(ops.activation(input, probs), leaves, grad)
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
    assert_same_bits(ops.activation(*device), ops.activation(*host))
    grad = torch.randn(host[0].shape[0], host[0].shape[1] // 2).to(host[0].dtype)
    for got, expected in zip(
        ops.activation_backward(grad.cuda(), *device), ops.activation_backward(grad, *host), strict=True
    ):
        assert_same_bits(got, expected)


def interleaved(input: torch.Tensor) -> torch.Tensor:
    """32 columns of each half in turn, written out by column."""
    features = input.shape[1] // 2
    columns = [j + half * features for j in range(0, features, 32) for half in (0, 1)]
    return torch.cat([input[:, first : first + 32] for first in columns], dim=1)


@pytest.mark.parametrize("rows", [0, 1, 5, 133])
@pytest.mark.parametrize("features", [32, 96, 128, 160, 1056])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_interleaved_columns_have_the_bits_of_halves(
    rows: int, features: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rows + features)
    input = (3 * torch.randn(rows, 2 * features, generator=generator)).to(dtype).to(device)
    grad = torch.randn(rows, features, generator=generator).to(dtype).to(device)
    probs = torch.rand(rows, generator=generator).to(device)
    blocks = interleaved(input)
    assert rows == 0 or features == 32 or not torch.equal(blocks, input)
    assert_same_bits(halves_apart(blocks, BLOCKS), input)
    assert_same_bits(ops.activation(blocks, probs, None, BLOCKS), ops.activation(input, probs))
    grad_input, grad_probs = ops.activation_backward(grad, blocks, probs, None, BLOCKS)
    of_halves = ops.activation_backward(grad, input, probs)
    assert_same_bits(grad_input, interleaved(of_halves[0]))
    assert_same_bits(grad_probs, of_halves[1])
    if rows < 5:
        return
    sizes = torch.tensor([3, 0, 1], device=device)
    output = ops.activation(blocks, probs, sizes, BLOCKS)
    assert_same_bits(output[:4], ops.activation(input, probs)[:4])
    grad_input, grad_probs = ops.activation_backward(grad, blocks, probs, sizes, BLOCKS)
    assert_same_bits(grad_input[:4], interleaved(of_halves[0])[:4])
    assert_same_bits(grad_probs[:4], of_halves[1][:4])
    assert not grad_probs[4:].any()


def test_gradient_of_interleaved_columns(device: torch.device) -> None:
    input = torch.randn(6, 128, device=device)
    probs = torch.rand(6, device=device)
    grad = torch.randn(6, 64, device=device)
    (expected,) = torch.autograd.grad(ops.activation(input.requires_grad_(), probs), input, grad)
    blocks = interleaved(input.detach()).requires_grad_()
    (got,) = torch.autograd.grad(ops.activation(blocks, probs, None, BLOCKS), blocks, grad)
    assert_same_bits(got, interleaved(expected))
    for arguments in ((blocks, probs, None, BLOCKS), (blocks.detach(), None, None, BLOCKS)):
        opcheck(torch.ops.transformer_plugin.activation.default, arguments)
    for function in (reference.activation, ops.activation):
        torch.testing.assert_close(function(blocks, probs, None, BLOCKS), ops.activation(input, probs))
    got, of_probs = reference.activation_backward(grad, blocks.detach(), probs, None, BLOCKS)
    torch.testing.assert_close(got, interleaved(expected))
    assert_same_bits(of_probs, reference.activation_backward(grad, input.detach(), probs)[1])


@pytest.mark.parametrize(
    ("columns", "activation", "text"),
    [
        (64, key, f"'activation': expected {EXPECTED_KEY}, got '{key}'. {KEY_ADVICE}.")
        for key in ("", "silu", "swiglu:", "swiglu:interleave=16", "swiglu:interleave=32,")
    ]
    + [
        (
            96,
            BLOCKS,
            "'input': expected whole blocks of 32 columns of the gate and of the linear part, got float32[2, 96] on "
            "cpu for 48 of each. Take a multiple of 32, or an activation without interleave.",
        ),
    ],
)
def test_errors_of_the_activation(columns: int, activation: str, text: str) -> None:
    input, grad = torch.zeros(2, columns), torch.zeros(2, columns // 2)
    with pytest.raises(ValueError) as caught:
        ops.activation(input, None, None, activation)
    assert str(caught.value) == f"transformer_plugin::activation: argument {text}"
    with pytest.raises(ValueError) as caught:
        ops.activation_backward(grad, input, None, None, activation)
    assert str(caught.value) == f"transformer_plugin::activation_backward: argument {text}"


def test_extreme_values_agree_with_reference(device: torch.device) -> None:
    gate = torch.tensor([-3e38, -200.0, -88.0, -1e-38, 0.0, 88.0, 200.0, float("inf"), float("nan")])
    input = torch.stack([gate, torch.ones_like(gate)], dim=-1).to(device)
    got = ops.activation(input)[:, 0].cpu()
    expected = torch.nn.functional.silu(gate.double()).float()
    # exp underflows below the normal range
    torch.testing.assert_close(got[:-1], expected[:-1], rtol=1e-6, atol=1e-36)
    assert got[-1].isnan()


@by_name
def test_opcheck(case: Case, device: torch.device) -> None:
    input, probs = case.arguments(device)
    opcheck(torch.ops.transformer_plugin.activation.default, (input, probs))
    input.requires_grad_()
    opcheck(torch.ops.transformer_plugin.activation.default, (input, probs))
    grad = torch.randn_like(ops.activation(input.detach(), probs))
    opcheck(torch.ops.transformer_plugin.activation_backward.default, (grad, input.detach(), probs))


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(6, 40, device=device)
    probs = torch.rand(12, device=device)[::2]
    assert_same_bits(
        ops.activation(wide[:, ::2], probs), ops.activation(wide[:, ::2].contiguous(), probs.contiguous())
    )
    input = torch.randn(4, 8, device=device, requires_grad=True)
    ops.activation(input).sum().backward()  # a gradient with stride 0
    (expected,) = torch.autograd.grad(reference.activation(input).sum(), input)
    torch.testing.assert_close(input.grad, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (torch.zeros(2, 4, dtype=torch.int32), None),
            TypeError,
            "transformer_plugin::activation: argument 'input': expected one of the dtypes float32, bfloat16, float16, "
            "got int32. Convert it with .to() first.",
        ),
        (
            (torch.zeros(2, 5), None),
            ValueError,
            "transformer_plugin::activation: argument 'input': expected an even number of columns (gate and linear "
            "halves), got float32[2, 5] on cpu. Concatenate the two halves along the last dimension.",
        ),
        (
            (torch.zeros(2, 4), torch.zeros(3)),
            ValueError,
            "transformer_plugin::activation: argument 'probs': expected size 2 in dimension 0 (the rows of 'input'), "
            "got float32[3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            (torch.zeros(2, 4), torch.zeros(2, dtype=torch.float64)),
            TypeError,
            "transformer_plugin::activation: argument 'probs': expected one of the dtypes float32, got float64. "
            "Convert it with .to() first.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.activation(*arguments)
    assert str(caught.value) == text
