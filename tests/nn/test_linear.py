"""Linear: the constructor, values and state of torch.nn.Linear, and the formats of its recipe."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from tests.nn.common import (
    RECIPES,
    by_recipe,
    check_module_state,
    in_fp64,
    outputs_and_gradients,
    row_unit,
    rows_of,
    width_of,
)
from transformer_plugin.nn import Linear
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

SHAPES = [(48,), (1, 48), (33, 48), (0, 48), (3, 5, 48), (2, 0, 48)]


def ours(module: torch.nn.Linear, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Returns the output and the gradients of input, weight and bias."""
    leaves = {"input": input.requires_grad_()} | dict(module.named_parameters())
    return outputs_and_gradients(lambda _: module(input), leaves, grad)


def fp64(module: torch.nn.Linear, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The same, computed by torch in FP64."""
    leaves = {"input": input} | dict(module.named_parameters())
    return outputs_and_gradients(
        lambda x: torch.nn.functional.linear(x["input"], x["weight"], x["bias"]),
        in_fp64(leaves),
        grad.double(),
    )


def data(shape: tuple[int, ...], features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    input = torch.randn(shape, generator=generator).to(device)
    return input, torch.randn(*shape[:-1], features, generator=generator).to(device)


def test_takes_the_place_of_torch_nn_linear() -> None:
    theirs = inspect.signature(torch.nn.Linear.__init__).parameters
    mine = inspect.signature(Linear.__init__).parameters
    assert [*theirs] == [name for name in mine if mine[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert all(theirs[name].default == mine[name].default for name in theirs)
    assert all(not mine[name].default for name in set(mine) - set(theirs))
    for bias in (True, False):
        torch.manual_seed(1)
        expected = torch.nn.Linear(24, 40, bias, "cpu", torch.float32)
        torch.manual_seed(1)
        got = Linear(24, 40, bias, "cpu", torch.float32)
        assert isinstance(got, torch.nn.Linear)
        assert list(got.state_dict()) == list(expected.state_dict())
        for key, value in expected.state_dict().items():
            assert_same_bits(got.state_dict()[key], value, key)
        expected.load_state_dict(got.state_dict(), strict=True)
        assert got.extra_repr() == expected.extra_repr()
    assert Linear(8, 8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    recipe = Float8BlockScaling()
    assert (
        Linear(8, 8, recipe=recipe).extra_repr()
        == f"in_features=8, out_features=8, bias=True, recipe={recipe}"
    )


@by_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    torch.manual_seed(0)
    k, n = width_of(name, 48), width_of(name, 80)
    module = Linear(k, n, device=device, recipe=recipe)
    if row_unit(name) > 1:  # the backward requires whole blocks of rows
        shape = (*(shape[:-2]), rows_of(name, shape[-2] if len(shape) > 1 else 1), k)
    input, grad = data((*shape[:-1], k), n, device)
    got, expected = ours(module, input, grad), fp64(module, input, grad)
    limits = dict.fromkeys(got, bound.backward) | {"output": bound.forward, "bias": 1e-6}
    for what, limit in limits.items():
        g, e = got[what], expected[what]
        assert g.dtype == torch.float32 and g.shape == e.shape
        # With one row there is no average: its error may be the largest of its few terms.
        assert relative_error(g, e) <= (limit if input.numel() > 100 else 2 * limit), what
        if what != "bias" and input.numel() > 100:
            assert relative_error(g, e) >= bound.least(what), f"{what}: too exact for {name}"


@by_recipe
def test_bfloat16_parameters(name: str, device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    torch.manual_seed(0)
    module = Linear(128, 96, device=device, dtype=torch.bfloat16, recipe=recipe)
    input, grad = (t.bfloat16() for t in data((rows_of(name, 130), 128), 96, device))
    limit = max(bound.forward, bound.backward, 4e-3)
    expected = fp64(module, input, grad)
    for what, got in ours(module, input, grad).items():
        assert got.dtype == torch.bfloat16
        assert relative_error(got, expected[what]) <= limit, what


@by_recipe
def test_state(name: str) -> None:
    k = width_of(name, 16)
    input, _ = data((rows_of(name, 6), k), 32, torch.device("cpu"))
    check_module_state(
        lambda **factory: Linear(k, 32, recipe=RECIPES[name][0], **factory),
        lambda module: module(input).detach(),
    )


def test_no_gradient_where_none_is_wanted(device: torch.device) -> None:
    module = Linear(16, 8, device=device)
    module.bias.requires_grad_(False)
    input = torch.randn(4, 16, device=device)
    with torch.no_grad():
        assert not module(input).requires_grad
    module(input).sum().backward()
    assert input.grad is None and module.bias.grad is None and module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, input.sum(0).expand(8, 16))


def test_trains(device: torch.device) -> None:
    """One step of AdamW gives the same as with torch.nn.Linear."""
    torch.manual_seed(0)
    mine, theirs = Linear(16, 8, device=device), torch.nn.Linear(16, 8, device=device)
    theirs.load_state_dict(mine.state_dict())
    input = torch.randn(32, 16, device=device)
    for module in (mine, theirs):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(input).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-4, atol=1e-5)
