"""The gradient of the tokens of a MoE: the router's backward adds its own to that of the experts, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.nn import MoE, RouterConfig, Routing
from transformer_plugin.testing.numerics import assert_same_bits

T, H, F, E, K = 40, 32, 16, 8, 2
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def mixture(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> MoE:
    torch.manual_seed(3)
    return MoE(H, F, E, K, device=device, dtype=dtype, **options)


def drawn(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(T, H, generator=generator).to(dtype).to(device) for _ in range(2))
    return x.requires_grad_(), grad


def run(moe: MoE, x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    output = moe(x).output
    return output.detach(), list(torch.autograd.grad(output, [x, *moe.parameters()], grad))


@dtypes
def test_the_sum_is_that_of_the_op(dtype: torch.dtype, device: torch.device) -> None:
    moe, (x, grad) = mixture(device, dtype), drawn(device, dtype)
    output, gradients = run(moe, x, grad)
    tokens, weight = x.detach().requires_grad_(), moe.router.weight
    logits = ops.router_logits(x.detach(), weight)
    weights, indices = ops.topk_router(logits, None, K)
    expected, _ = moe.dispatcher.run(moe.experts, tokens, indices, weights)
    of_logits, of_experts = torch.autograd.grad(expected, [logits, tokens], grad)
    of_both = ops.router_logits_backward(of_logits, x.detach(), weight.detach(), grad_tokens=of_experts)
    assert_same_bits(output, expected.detach())
    for got, wanted in zip(gradients, of_both, strict=False):
        assert_same_bits(got, wanted)


@dtypes
def test_hooks_of_the_router_change_only_the_order_of_the_sum(
    dtype: torch.dtype, device: torch.device
) -> None:
    """With a hook that sees the routing autograd adds the gradients, and rounds twice."""
    moe, (x, grad) = mixture(device, dtype), drawn(device, dtype)
    output, gradients = run(moe, x, grad)
    seen = []
    moe.router.register_forward_hook(lambda module, args, routing: seen.append(type(routing)))
    hooked, expected = run(moe, x, grad)
    assert seen == [Routing]
    assert_same_bits(hooked, output)
    for got, wanted in zip(gradients[1:], expected[1:], strict=True):
        assert_same_bits(got, wanted)
    unit = torch.finfo(dtype).eps
    difference = (gradients[0].double() - expected[0].double()).abs()
    magnitude = torch.cat([gradients[0], expected[0]]).double().abs().max()
    assert bool((difference <= 2 * unit * magnitude).all())


def test_experts_get_the_tokens_that_the_router_did_not_change(device: torch.device) -> None:
    """A pre-hook of the router, such as one that adds noise, replaces the input of the router only."""
    moe, (x, grad) = mixture(device), drawn(device)
    moe.router.register_forward_pre_hook(lambda module, args: (-args[0],))
    output, gradients = run(moe, x, grad)
    routing = moe.router(x)
    expected, _ = moe.dispatcher.run(moe.experts, x, routing.indices, routing.weights)
    assert_same_bits(output, expected.detach())
    (of_input,) = torch.autograd.grad(expected, x, grad)
    assert_same_bits(gradients[0], of_input)


def test_a_router_with_another_forward_is_called(device: torch.device) -> None:
    moe, (x, grad) = mixture(device), drawn(device)
    expected = run(moe, x, grad)[0]
    forward = moe.router.forward
    called = []

    def recording(tokens: Tensor) -> Routing:
        called.append(tokens)
        return forward(tokens)

    moe.router.forward = recording
    assert_same_bits(run(moe, x, grad)[0], expected)
    assert len(called) == 1


def test_tokens_that_the_router_converts(device: torch.device) -> None:
    """Their gradient has another dtype, so autograd adds it."""
    dtype = torch.bfloat16
    moe = mixture(device, dtype, router=RouterConfig(router_dtype=torch.float32))
    x, grad = drawn(device, dtype)
    output, gradients = run(moe, x, grad)
    moe.router.register_forward_hook(lambda module, args, routing: None)
    hooked, expected = run(moe, x, grad)
    for got, wanted in zip([output, *gradients], [hooked, *expected], strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("frozen", ["router", "tokens"])
def test_frozen_parts(frozen: str, device: torch.device) -> None:
    moe, (x, grad) = mixture(device), drawn(device)
    expected = run(moe, x, grad)
    if frozen == "router":
        moe.router.weight.requires_grad_(False)
        output = moe(x).output
        assert_same_bits(torch.autograd.grad(output, x, grad)[0], expected[1][0])
    else:
        output = moe(x.detach()).output
        for got, wanted in zip(
            torch.autograd.grad(output, list(moe.parameters()), grad), expected[1][1:], strict=True
        ):
            assert_same_bits(got, wanted)
