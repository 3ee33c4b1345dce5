"""relu2, an activation without a gate: float64, the ops that contain it, equal bits on CPU and CUDA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import functional, ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.grouped_mlp_cases import MLP_SHAPES, mlp_arguments
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits

KEY = "relu2"
FORMATS = ("none", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")


def drawn(rows: int, features: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """(grad, input, probs), with values of both signs, and zeros of both signs in the first row."""
    generator = torch.Generator().manual_seed(rows + features)
    grad, input = (torch.randn(rows, features, generator=generator) for _ in range(2))
    if rows and features > 1:
        input[0, 0], input[0, 1] = 0.0, -0.0
    probs = torch.rand(rows, generator=generator)
    return grad.to(dtype).to(device), input.to(dtype).to(device), probs.to(device)


def relu2_fp64(input: Tensor, probs: Tensor | None) -> Tensor:
    positive = torch.where(input.double() > 0, input.double(), 0.0)
    return positive**2 * (1 if probs is None else probs.double()[:, None])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("features", [0, 1, 7, 8, 127, 128, 136, 1032])
@pytest.mark.parametrize("rows", [0, 1, 5, 133])
def test_values_and_gradients(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> None:
    grad, input, probs = drawn(rows, features, dtype, device)
    ulp = 2 if dtype == torch.float32 else 1
    for given in (None, probs):
        got = ops.activation(input, given, activation=KEY)
        assert got.shape == input.shape and got.dtype == dtype
        assert_close_in_ulp(got, relu2_fp64(input, given), ulp=ulp)
        assert_same_bits(got, reference.activation(input, given, None, KEY))
        leaves = [input.clone().requires_grad_()]
        if given is not None:
            leaves.append(given.clone().requires_grad_())
        of_node = torch.autograd.grad(ops.activation(*leaves, activation=KEY), leaves, grad)
        factor = 1 if given is None else given.double()[:, None]
        slope = 2 * torch.where(input.double() > 0, input.double(), 0.0)
        assert_close_in_ulp(of_node[0], grad.double() * slope * factor, ulp=ulp)
        of_op = ops.activation_backward(grad, input, given, None, KEY)
        expected = reference.activation_backward(grad, input, given, None, KEY)
        for one, other in zip(of_op, expected, strict=True):
            assert_same_bits(one, other)
        for one, other in zip(of_node, of_op, strict=False):
            assert_same_bits(one, other)
        if given is not None:
            terms = grad.double() * relu2_fp64(input, None)
            error = (of_node[1].double() - terms.sum(-1)).abs()
            assert (error <= 1e-6 * terms.abs().sum(-1) + 1e-12).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    for rows, features in ((133, 1032), (5, 7), (64, 128)):
        host, device = drawn(rows, features, dtype, "cpu"), drawn(rows, features, dtype, "cuda")
        assert_same_bits(
            ops.activation(*device[1:], activation=KEY), ops.activation(*host[1:], activation=KEY)
        )
        for one, other in zip(
            ops.activation_backward(*device, None, KEY),
            ops.activation_backward(*host, None, KEY),
            strict=True,
        ):
            assert_same_bits(one, other)


def test_special_values(device: torch.device) -> None:
    """A NaN stays one, infinities become infinite and zero, and every zero is positive."""
    input = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, -0.0, -2.0, 3.0]], device=device)
    got = ops.activation(input, activation=KEY)
    assert got[0, 0].isnan()
    assert_same_bits(got[:, 1:], torch.tensor([[math.inf, 0.0, 0.0, 0.0, 0.0, 9.0]], device=device))
    gradient, _ = ops.activation_backward(torch.ones_like(input), input, activation=KEY)
    assert gradient[0, 0].isnan() and gradient[0, 1:].tolist() == [math.inf, 0, 0, 0, 0, 6]


def test_groups_and_strides(device: torch.device) -> None:
    grad, input, probs = drawn(9, 64, torch.bfloat16, device)
    sizes = torch.tensor([3, 0, 4], device=device)
    whole, (of_input, of_probs) = (
        ops.activation(input, probs, None, KEY),
        ops.activation_backward(grad, input, probs, None, KEY),
    )
    wide = torch.zeros(9, 128, dtype=torch.bfloat16, device=device)
    wide[:, ::2] = input
    for given in (input, wide[:, ::2], input.t().contiguous().t()):
        assert_same_bits(ops.activation(given, probs, sizes, KEY)[:7], whole[:7])
        got, got_probs = ops.activation_backward(grad, given, probs, sizes, KEY)
        assert_same_bits(got[:7], of_input[:7])
        assert_same_bits(got_probs[:7], of_probs[:7])
        assert not got_probs[7:].any()
    leaf = input.clone().requires_grad_()
    (of_leaf,) = torch.autograd.grad(ops.activation(leaf, probs, sizes, KEY), leaf, grad)
    assert_same_bits(of_leaf[:7], of_input[:7])
    assert not of_leaf[7:].any()


def test_what_has_no_gate_has_no_interleave_and_no_fused_quantization() -> None:
    for op, arguments in (
        (ops.activation, (torch.ones(2, 64),)),
        (
            ops.grouped_gemm_activation,
            (torch.ones(2, 32), torch.ones(1, 64, 32), torch.tensor([2])),
        ),
    ):
        with pytest.raises(ValueError, match="argument 'activation': expected an activation key"):
            op(*arguments, activation="relu2:interleave=32")
    advice = (
        "expected an activation that is quantized in one pass, swiglu, got 'relu2'. Take {}, and quantize"
    )
    with pytest.raises(ValueError, match=advice.format("activation")):
        ops.activation_quantize(torch.ones(2, 256), "mxfp8", activation=KEY)
    with pytest.raises(ValueError, match=advice.format("activation_backward")):
        ops.activation_backward_quantize(torch.ones(32, 256), torch.ones(32, 256), "mxfp8", activation=KEY)
    with pytest.raises(
        ValueError,
        match=r"'fc2_weight': expected size 64 in dimension 2 \(the rows of 'fc1_weight' in a group\)",
    ):
        ops.grouped_mlp(
            torch.ones(2, 16),
            torch.ones(1, 64, 16),
            torch.ones(1, 16, 32),
            torch.tensor([2]),
            torch.ones(2),
            activation=KEY,
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("features", [17, 96, 256])
def test_after_a_product(features: int, dtype: torch.dtype, device: torch.device) -> None:
    """The product, then the activation; rows past the groups are zero; gradients are those of the two ops."""
    generator = torch.Generator().manual_seed(features)
    a = torch.randn(40, 24, generator=generator).to(dtype).to(device)
    b = (torch.randn(3, features, 24, generator=generator) / 5).to(dtype).to(device)
    bias = torch.randn(3, features, generator=generator).to(device)
    probs = torch.rand(40, generator=generator).to(device)
    sizes = torch.tensor([9, 0, 25], device=device)
    leaves = [leaf.requires_grad_() for leaf in (a, b, probs, bias)]
    h = ops.grouped_gemm(a, b, sizes, bias)
    expected = ops.activation(h, probs, sizes, KEY)
    grad = torch.randn(40, features, generator=generator).to(dtype).to(device)
    grad[34:] = 0
    wanted = torch.autograd.grad(expected, leaves, grad)
    for keep_input in (True, False):
        act, got_h = ops.grouped_gemm_activation(a, b, sizes, probs, bias, KEY, keep_input)
        assert act.shape == (40, features) and got_h.shape == (40 if keep_input else 0, features)
        assert_same_bits(act[:34].detach(), expected[:34].detach())
        assert not act[34:].any()
        if keep_input:
            assert_same_bits(got_h.detach(), h.detach())
        for one, other in zip(torch.autograd.grad(act, leaves, grad), wanted, strict=True):
            assert_same_bits(one, other)
    for key in ("fp8_block", "mxfp8") if features % 32 == 0 else ("fp8_block",):
        with torch.no_grad():
            data, scale, _ = ops.grouped_gemm_activation_quantize(a, b, sizes, key, probs, bias, KEY)
            steps = ops.quantize(ops.grouped_gemm_activation(a, b, sizes, probs, bias, KEY)[0], key, sizes)
        assert torch.equal(data.view(torch.uint8), steps[0].view(torch.uint8))
        assert torch.equal(scale.view(torch.uint8), steps[1].view(torch.uint8))


def without_gate(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments of grouped_mlp with the rows of the gate alone in the first product."""
    input, fc1, fc2, sizes, probs, fc1_bias, fc2_bias = arguments
    features = fc2.shape[2]
    fc1_bias = None if fc1_bias is None else fc1_bias[:, :features].contiguous()
    return [input, fc1[:, :features].contiguous(), fc2, sizes, probs, fc1_bias, fc2_bias]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", MLP_SHAPES[:5], ids=lambda shape: shape.name)
def test_experts(shape: Any, format: str, device: torch.device) -> None:
    """grouped_mlp has the bits of its three steps, forward and backward."""
    formats = {f"{role}_format": format for role in ("input", "weight", "grad")}
    fitted = shape.fitted((format,) * 3)
    for biases in ((False, False), (True, True)):
        generator = torch.Generator().manual_seed(3)
        arguments = without_gate(
            mlp_arguments(fitted, torch.bfloat16, biases, device, generator, torch.int64)
        )
        end = sum(fitted.sizes)
        arguments[0][end:], arguments[4][end:] = 0, 0
        input, fc1, fc2, sizes, probs, fc1_bias, fc2_bias = arguments
        grad = torch.randn(input.shape, generator=generator).to(torch.bfloat16).to(device)
        grad[end:] = 0

        def gradients(output: Tensor, arguments: list[Any] = arguments, grad: Tensor = grad) -> list[Tensor]:
            leaves = [leaf for leaf in arguments if leaf is not None and leaf.is_floating_point()]
            return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

        for leaf in arguments:
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_()
        hidden = ops.grouped_linear(input, fc1, sizes, fc1_bias, **formats)
        hidden = ops.activation(hidden, probs, sizes, KEY)
        scale = None if fc2_bias is None else probs
        expected = gradients(ops.grouped_linear(hidden, fc2, sizes, fc2_bias, scale, **formats))
        got = gradients(ops.grouped_mlp(*arguments, activation=KEY, **formats))
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(
                one[:end] if one.shape[0] == input.shape[0] else one,
                other[:end] if other.shape[0] == input.shape[0] else other,
            )


def test_tracing(device: torch.device) -> None:
    _, input, probs = drawn(6, 32, torch.float32, device)
    opcheck(torch.ops.transformer_plugin.activation.default, (input.requires_grad_(), probs, None, KEY))
    compiled = torch.compile(
        lambda x: ops.activation(x, probs, activation=KEY), fullgraph=True, backend="aot_eager"
    )
    assert_same_bits(compiled(input).detach(), ops.activation(input, probs, activation=KEY).detach())
    assert_same_bits(
        functional.activation(input, probs, activation=KEY).detach(),
        ops.activation(input, probs, activation=KEY).detach(),
    )
