"""SwiGLU with limit, alpha and offset, GELU with a gate, and columns that alternate: float64, the ops that contain an
activation, equal bits on CPU and CUDA."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import functional, ops, reference
from transformer_plugin.activations import Activation
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.grouped_mlp_cases import MLP_SHAPES, mlp_arguments
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
ACTIVATIONS = (
    Activation("swiglu", **GPT_OSS),
    Activation("swiglu", limit=0.5),
    Activation("swiglu", alpha=1.702),
    Activation("swiglu", offset=-0.25),
    Activation("swiglu", 1),
    Activation("swiglu", 1, **GPT_OSS),
    Activation("swiglu", 32, limit=1.5, offset=-0.25),
    Activation("geglu_tanh"),
    Activation("geglu_tanh", 1),
)
FORMATS = ("none", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")


def key(activation: Activation) -> str:
    return activation.key


def fp64(input: Tensor, probs: Tensor | None, activation: Activation) -> Tensor:
    """Written as the models write it."""
    if activation.interleave:
        blocks = input.unflatten(1, (-1, 2, activation.interleave))
        gate, linear = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
    else:
        gate, linear = input.chunk(2, dim=1)
    if activation.function == "geglu_tanh":
        value = F.gelu(gate, approximate="tanh") * linear
    else:
        if activation.limit < math.inf:
            gate = gate.clamp(max=activation.limit)
            linear = linear.clamp(-activation.limit, activation.limit)
        value = (linear + activation.offset) * (gate * torch.sigmoid(gate * activation.alpha))
    return value if probs is None else value * probs[:, None]


def drawn(rows: int, features: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """(grad, input, probs), with values inside of the limits, at them and outside."""
    generator = torch.Generator().manual_seed(rows + features)
    grad, input = (
        torch.randn(rows, features, generator=generator),
        torch.randn(rows, 2 * features, generator=generator),
    )
    input = 4 * input
    for column, value in enumerate((7.0, -7.0, 0.5, -0.5, 0.0, 9.0, -9.0, 1.5, -1.5)):
        if rows > 2 and column < input.shape[1]:
            input[column % rows, (column * 5) % input.shape[1]] = value
    probs = torch.rand(rows, generator=generator)
    return grad.to(dtype).to(device), input.to(dtype).to(device), probs.to(device)


def least(dtype: torch.dtype) -> float:
    """Of results about as small as the smallest numbers: where exp of the ops is zero, or a dtype has fewer digits."""
    return 1e-7 if dtype == torch.float16 else 1e-36


def near(got: Tensor, expected: Tensor, terms: Tensor | None = None) -> None:
    """Within roundings of float32 of the terms, and one of the dtype."""
    eps = torch.finfo(got.dtype).eps
    scale = expected.abs() if terms is None else terms
    error = (got.double() - expected).abs()
    assert (error <= expected.abs() * eps + 3e-6 * scale + least(got.dtype)).all(), float(error.max())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("features", [0, 1, 7, 8, 127, 136, 1032])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_values_and_gradients(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> None:
    grad, input, probs = drawn(rows, features, dtype, device)
    for activation, given in itertools.product(ACTIVATIONS, (None, probs)):
        if activation.interleave == 32 and features % 32:
            continue
        exact = [input.double().requires_grad_(), None if given is None else given.double().requires_grad_()]
        expected = fp64(exact[0], exact[1], activation)  # type: ignore[arg-type]
        leaves = [each for each in exact if each is not None]
        wanted = torch.autograd.grad(expected, leaves, grad.double())
        got = ops.activation(input, given, None, activation)
        assert got.shape == grad.shape and got.dtype == dtype
        near(
            got,
            expected.detach(),
            expected.detach().abs() + 1e-6 * input.abs().max() if input.numel() else None,
        )
        of_input, of_probs = ops.activation_backward(grad, input, given, None, activation)
        assert of_input.shape == input.shape
        largest = (1 + input.double().abs()).amax(1, keepdim=True) if features else None
        near(
            of_input,
            wanted[0],
            None if largest is None else grad.double().abs().amax(1, keepdim=True) * largest**2,
        )
        of_reference = reference.activation_backward(grad, input, given, None, activation)
        ulp = 16 if dtype == torch.float32 else 1
        by_reference = reference.activation(input, given, None, activation).double()
        assert_close_in_ulp(got, by_reference, ulp, floor=least(dtype))
        near(
            of_input,
            of_reference[0].double(),
            None if largest is None else (1 + grad.double().abs().amax(1, keepdim=True)) * largest**2,
        )
        nodes = [input.clone().requires_grad_(), None if given is None else given.clone().requires_grad_()]
        output = ops.activation(nodes[0], nodes[1], None, activation)  # type: ignore[arg-type]
        assert_same_bits(output.detach(), got)
        of_node = torch.autograd.grad(output, [each for each in nodes if each is not None], grad)
        assert_same_bits(of_node[0], of_input)
        if given is not None:
            assert_same_bits(of_node[1], of_probs)
            terms = (grad.double() * fp64(input.double(), None, activation)).abs().sum(1)
            assert ((of_probs.double() - wanted[1]).abs() <= 3e-6 * terms + 1e-12).all()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype, activation: Activation) -> None:
    for rows, features in ((133, 1056), (64, 128), (5, 96), (7, 9)):
        if activation.interleave == 32 and features % 32:
            continue
        host, device = drawn(rows, features, dtype, "cpu"), drawn(rows, features, dtype, "cuda")
        for tensor in (host[1], device[1]):
            tensor[1, :8] = torch.tensor([math.nan, 1.0, 1.0, math.nan, math.inf, -math.inf, 2.0, -math.inf])
        got = (
            ops.activation(*device[1:], None, activation),
            *ops.activation_backward(*device, None, activation),
        )
        expected = (
            ops.activation(*host[1:], None, activation),
            *ops.activation_backward(*host, None, activation),
        )
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("numbers", [{"limit": 7.0}, GPT_OSS, {"limit": 0.3, "alpha": 3.0}], ids=str)
@pytest.mark.parametrize("interleave", [0, 1])
def test_limits_are_those_of_torch(interleave: int, numbers: dict[str, float], device: torch.device) -> None:
    """Values and gradients at the limits, next to them, of NaN and infinities: what torch.clamp makes of them."""
    activation = Activation("swiglu", interleave, **numbers)
    limit = torch.tensor(numbers["limit"])
    beside = [float(torch.nextafter(limit, torch.tensor(end))) for end in (0.0, math.inf)]
    values = [math.nan, math.inf, float(limit), *beside, 0.0, -0.0, 0.1, -0.1]
    values += [-value for value in (math.inf, float(limit), *beside)]
    pairs = torch.tensor(list(itertools.product(values, values)))
    gate, linear = pairs.double().to(device).unbind(1)
    parts = [part[None].clone().requires_grad_() for part in (gate, linear)]
    limited = float(limit)
    activated = parts[0].clamp(max=limited)
    activated = activated * torch.sigmoid(activated * activation.alpha)
    expected = (parts[1].clamp(-limited, limited) + activation.offset) * activated
    of_gate, of_linear = torch.autograd.grad(expected, parts, torch.full_like(expected, 2.0))
    rows = torch.stack([gate, linear], 1).flatten()[None] if interleave else torch.cat([gate, linear])[None]
    input = rows.float()
    got = ops.activation(input, activation=activation)
    gradient, _ = ops.activation_backward(torch.full_like(got, 2.0), input, activation=activation)
    halves = gradient.unflatten(1, (-1, 2)).unbind(2) if interleave else gradient.chunk(2, 1)
    for one, other in zip((got, *halves), (expected.detach(), of_gate, of_linear), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert_same_bits(one == 0, other == 0)
    assert float(limit) in values and bool(got.isnan().any()) and bool((of_gate == 0).any())


def test_without_a_limit_a_nan_passes_both_ways(device: torch.device) -> None:
    input = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], device=device)
    activation = Activation("swiglu", alpha=1.702)
    gradient, _ = ops.activation_backward(torch.ones(1, 2, device=device), input, activation=activation)
    expected = torch.tensor([[True, True, True, False]], device=device)
    assert torch.equal(gradient.isnan(), expected)
    assert ops.activation(input, activation=activation).isnan().all()


def test_a_product_with_alpha_does_not_overflow(device: torch.device) -> None:
    """The slope of gates for which alpha * gate is infinite is 1 or 0."""
    input = torch.tensor([[3e38, 1.0], [-3e38, 1.0], [2e38, 0.5]], device=device)
    grad = torch.ones(3, 1, device=device)
    got = ops.activation_backward(grad, input, None, activation="swiglu:alpha=2")[0]
    assert torch.equal(got.cpu(), torch.tensor([[1.0, 3e38], [0.0, 0.0], [0.5, 2e38]]))


def test_gelu_of_special_values(device: torch.device) -> None:
    """torch's, except that large gates have the slope 1 or 0 and not NaN."""
    gates = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 40.0, -40.0, -11.0], device=device
    )
    input = torch.stack([gates, torch.ones_like(gates)], 1).flatten()[None]
    got = ops.activation(input, activation="geglu_tanh:interleave=1")[0]
    expected = F.gelu(gates.double(), approximate="tanh").float()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
    gradient, _ = ops.activation_backward(
        torch.ones(1, len(gates), device=device), input, activation="geglu_tanh:interleave=1"
    )
    of_gates = gradient[0, ::2]
    assert of_gates[:3].isnan().all()
    torch.testing.assert_close(
        of_gates[3:], torch.tensor([0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0], device=device), rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
def test_columns_in_another_order_have_the_same_bits(activation: Activation, device: torch.device) -> None:
    grad, input, probs = drawn(9, 96, torch.bfloat16, device)
    plain = Activation(activation.function, 0, activation.limit, activation.alpha, activation.offset)
    expected = ops.activation(input, probs, None, plain)
    of_input, of_probs = ops.activation_backward(grad, input, probs, None, plain)
    for order in (1, 32):
        moved = Activation(activation.function, order, activation.limit, activation.alpha, activation.offset)

        def together(halves: Tensor, order: int = order) -> Tensor:
            gate, linear = (part.unflatten(1, (-1, order)) for part in halves.chunk(2, 1))
            return torch.stack([gate, linear], 2).flatten(1)

        assert_same_bits(ops.activation(together(input), probs, None, moved), expected)
        got, got_probs = ops.activation_backward(grad, together(input), probs, None, moved)
        assert_same_bits(got, together(of_input))
        assert_same_bits(got_probs, of_probs)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
def test_groups_and_strides(activation: Activation, device: torch.device) -> None:
    grad, input, probs = drawn(9, 64, torch.bfloat16, device)
    sizes = torch.tensor([3, 0, 4], device=device)
    expected = ops.activation(input, probs, None, activation)
    of_input, of_probs = ops.activation_backward(grad, input, probs, None, activation)
    wide = torch.zeros(9, 256, dtype=torch.bfloat16, device=device)
    wide[:, ::2] = input
    for given in (input, wide[:, ::2], input.t().contiguous().t()):
        assert_same_bits(ops.activation(given, probs, sizes, activation)[:7], expected[:7])
        got, got_probs = ops.activation_backward(grad, given, probs, sizes, activation)
        assert_same_bits(got[:7], of_input[:7])
        assert_same_bits(got_probs[:7], of_probs[:7])
        assert not got_probs[7:].any()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("counts", "features", "columns"),
    [((9, 0, 25), 96, 24), ((300, 1, 0, 257), 416, 72)],
    ids=["one", "several"],
)
def test_after_a_product(
    counts: tuple[int, ...],
    features: int,
    columns: int,
    dtype: torch.dtype,
    activation: Activation,
    device: torch.device,
) -> None:
    """The product, then the activation; gradients are those of the two ops; rows by an index; quantized, the bytes of
    three ops."""
    generator, end, groups = torch.Generator().manual_seed(3), sum(counts), len(counts)
    rows = end + 6
    a = torch.randn(rows, columns, generator=generator).to(dtype).to(device)
    b = torch.randn(groups, 2 * features, columns, generator=generator).to(dtype).to(device)
    bias = torch.randn(groups, 2 * features, generator=generator).to(device)
    probs = torch.rand(rows, generator=generator).to(device)
    sizes = torch.tensor(counts, device=device)
    leaves = [leaf.requires_grad_() for leaf in (a, b, probs, bias)]
    h = ops.grouped_gemm(a, b, sizes, bias)
    expected = ops.activation(h, probs, sizes, activation)
    grad = torch.randn(rows, features, generator=generator).to(dtype).to(device)
    grad[end:] = 0
    wanted = torch.autograd.grad(expected, leaves, grad)
    for keep_input in (True, False):
        act, got_h = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation, keep_input)
        assert act.shape == (rows, features) and got_h.shape == (rows if keep_input else 0, 2 * features)
        assert_same_bits(act[:end].detach(), expected[:end].detach())
        assert not act[end:].any()
        for one, other in zip(torch.autograd.grad(act, leaves, grad), wanted, strict=True):
            assert_same_bits(one, other)
    with torch.no_grad():
        index = torch.randint(0, rows, (rows,), generator=generator).to(torch.int32).to(device)
        by_index, _ = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation, rows=index)
        copied, _ = ops.grouped_gemm_activation(a[index.long()], b, sizes, probs, bias, activation)
        assert_same_bits(by_index, copied)
        for format in ("fp8_block", "mxfp8"):
            got = ops.grouped_gemm_activation_quantize(a, b, sizes, format, probs, bias, activation)
            assert_same_bytes(got[:2], ops.quantize(act, format, sizes)[:2])


@pytest.mark.parametrize(
    "activation", [each for each in ACTIVATIONS if each.traits.has_fused_quantize], ids=key
)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_quantized_in_one_pass(
    dtype: torch.dtype, format: str, activation: Activation, device: torch.device
) -> None:
    """The bytes of the activation, then quantized; by groups and as one matrix; with values that are no numbers."""
    grad, input, probs = drawn(160, 256, dtype, device)
    input[3, :4] = torch.tensor([300.0, -300.0, 90.0, -90.0], dtype=dtype)
    sizes = torch.tensor([32, 0, 96], device=device)
    for given, groups in itertools.product((None, probs), (None, sizes)):
        if activation.interleave or activation.offset < 0:
            with pytest.raises(
                ValueError, match=r"whose columns of the gate lie first|without a negative offset"
            ):
                ops.activation_quantize(input, format, given, groups, activation=activation)
            continue
        act = ops.activation(input, given, None, activation)
        more = amaxes(act, format, groups)
        got: Any = ops.activation_quantize(
            input, format, given, groups, **more, columnwise=True, activation=activation
        )
        assert_same_bytes(got, ops.quantize(act, format, groups, **more, columnwise=True))
        of_input, expected = ops.activation_backward(grad, input, given, groups, activation)
        if groups is not None:
            of_input[128:] = 0
        more = amaxes(of_input, format, groups)
        *got, of_probs = ops.activation_backward_quantize(
            grad, input, format, given, groups, **more, activation=activation
        )
        assert_same_bytes(got, ops.quantize(of_input, format, groups, **more, columnwise=True))
        assert_same_bits(of_probs, expected)


def amaxes(matrix: Tensor, format: str, groups: Tensor | None) -> dict[str, Any]:
    """The arguments of formats that scale by them."""
    if format != "nvfp4":
        return {}
    return dict(zip(("amax", "amax_t"), ops.amax(matrix, format, groups, columnwise=True), strict=True))


def assert_same_bytes(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=False):
        assert one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
def test_experts(activation: Activation, format: str, device: torch.device) -> None:
    """grouped_mlp has the bits of its three steps, forward and backward."""
    formats = {f"{role}_format": format for role in ("input", "weight", "grad")}
    for shape, biases in itertools.product(MLP_SHAPES[:4], ((False, False), (True, True))):
        fitted = shape.fitted((format,) * 3)
        if activation.interleave == 32 and fitted.features % 32:
            continue
        generator = torch.Generator().manual_seed(3)
        arguments = list(mlp_arguments(fitted, torch.bfloat16, biases, device, generator, torch.int64))
        end = sum(fitted.sizes)
        arguments[0][end:], arguments[4][end:] = 0, 0
        input, fc1, fc2, sizes, probs, fc1_bias, fc2_bias = arguments
        fc1.mul_(8)  # values beyond the limits
        grad = torch.randn(input.shape, generator=generator).to(torch.bfloat16).to(device)
        grad[end:] = 0
        leaves = [leaf for leaf in arguments if leaf is not None and leaf.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        hidden = ops.grouped_linear(input, fc1, sizes, fc1_bias, **formats)
        hidden = ops.activation(hidden, probs, sizes, activation)
        scale = None if fc2_bias is None else probs
        output = ops.grouped_linear(hidden, fc2, sizes, fc2_bias, scale, **formats)
        expected = [output.detach(), *torch.autograd.grad(output, leaves, grad)]
        output = ops.grouped_mlp(*arguments, activation=activation, **formats)
        got = [output.detach(), *torch.autograd.grad(output, leaves, grad)]
        for one, other in zip(got, expected, strict=True):
            rows = end if one.shape[0] == input.shape[0] else one.shape[0]
            assert_same_bits(one[:rows], other[:rows])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=key)
def test_tracing(activation: Activation, device: torch.device) -> None:
    _, input, probs = drawn(6, 32, torch.float32, device)
    opcheck(
        torch.ops.transformer_plugin.activation.default, (input.requires_grad_(), probs, None, activation.key)
    )
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: ops.activation(x, probs, activation=activation), fullgraph=True, backend="aot_eager"
    )
    expected = ops.activation(input, probs, activation=activation).detach()
    assert_same_bits(compiled(input).detach(), expected)
    assert_same_bits(functional.activation(input, probs, activation=activation).detach(), expected)
    quantized = functional.activation(input.detach(), probs, activation=activation, format="mxfp8")
    assert_same_bits(quantized.dequantize(), functional.quantize(expected, "mxfp8").dequantize())
