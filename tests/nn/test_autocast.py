"""torch.autocast does not reach into modules and ops: what they compute has the same bits under it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.nn.common import by_recipe
from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear
from transformer_plugin.recipes import NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.numerics import assert_same_bits

SIZES = (32, 0, 16)
ROWS = 64


def recipe_of(name: str) -> Recipe | None:
    """Without what is drawn at random in each call."""
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe_from_name(name)


def module_of(
    kind: str, name: str, device: torch.device
) -> tuple[torch.nn.Module, Callable[[Tensor], Tensor]]:
    """A module, and its call for an input [ROWS, 64]."""
    recipe = recipe_of(name)
    sizes = torch.tensor(SIZES, device=device)
    if kind == "Linear":
        linear = Linear(64, 96, device=device, recipe=recipe)
        return linear, linear
    if kind == "GroupedLinear":
        grouped = GroupedLinear(len(SIZES), 64, 96, device=device, recipe=recipe)
        return grouped, lambda x: grouped(x, sizes)
    mlp = GroupedMLP(len(SIZES), 64, 32, bias=True, device=device, recipe=recipe)
    probs = torch.rand(ROWS, device=device)
    return mlp, lambda x: mlp(x, sizes, probs)


@by_recipe
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "GroupedMLP"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_modules(kind: str, name: str, narrow: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    module, call = module_of(kind, name, device)
    x = torch.randn(ROWS, 64, device=device) * 1e5  # past what float16 holds
    x.requires_grad_()

    def step() -> list[Tensor]:
        output = call(x)
        return [
            output.detach(),
            *torch.autograd.grad(output, [x, *module.parameters()], torch.ones_like(output)),
        ]

    expected = step()
    with torch.autocast(device.type, narrow):
        got = step()
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_products(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64, device=device, dtype=dtype) for _ in range(2))
    bias, alpha = torch.randn(64, device=device), torch.full((1,), 3.0, device=device)
    out = torch.empty(64, 64, device=device)

    def results() -> list[Tensor]:
        ops.gemm_out(a, b, out)
        ops.gemm_out(a, b, out, bias, alpha=alpha, beta=torch.ones_like(alpha))
        return [
            ops.gemm(a, b, dtype=torch.float32),
            ops.gemm(a, b, bias, alpha=alpha),
            ops.gemm_quantized(
                *ops.quantize(a, "mxfp8"), *ops.quantize(b, "mxfp8"), "mxfp8", "mxfp8", torch.float32
            ),
            out.clone(),
        ]

    expected = results()
    with torch.autocast(device.type, torch.bfloat16):
        got = results()
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)
