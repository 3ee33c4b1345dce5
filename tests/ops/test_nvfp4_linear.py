"""linear and grouped_linear in nvfp4: which roundings are stochastic, and which are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.recipes import NVFP4BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits, relative_error


def keys(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.input_format, recipe.weight_format, recipe.grad_format


DEFAULT, NEAREST = keys(NVFP4BlockScaling()), keys(NVFP4BlockScaling(stochastic_rounding=False))
Step = Callable[[Tensor, Tensor, Tensor, tuple[str, str, str]], tuple[Tensor, ...]]


def dense(x: Tensor, w: Tensor, grad: Tensor, formats: tuple[str, str, str]) -> tuple[Tensor, ...]:
    """Returns the output, and the gradients of the input and the weight."""
    leaves = [x.detach().requires_grad_(), w.detach()[0].requires_grad_()]
    output = ops.linear(*leaves, None, *formats)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def grouped(x: Tensor, w: Tensor, grad: Tensor, formats: tuple[str, str, str]) -> tuple[Tensor, ...]:
    """Returns the same for two groups and an empty one; 16 rows are past the groups."""
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    sizes = torch.tensor([x.shape[0] // 2, 0, x.shape[0] // 2 - 16], device=x.device)
    output = ops.grouped_linear(leaves[0], leaves[1], sizes, None, None, *formats)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((96, 64), (3, 48, 64), (96, 48))
    x, w, grad = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return x, w, grad


by_step = pytest.mark.parametrize("step", [dense, grouped])


@by_step
def test_torch_seed_determines_stochastic_rounding(step: Step, device: torch.device) -> None:
    data = operands(device)

    def seeded(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return step(*data, DEFAULT)

    first = seeded(5)
    for got, expected in zip(seeded(5), first, strict=True):
        assert_same_bits(got, expected)
    other = seeded(6)
    assert_same_bits(other[0], first[0], "the forward is deterministic")
    assert not torch.equal(other[1], first[1]) and not torch.equal(other[2], first[2])
    torch.manual_seed(5)
    step(*data, DEFAULT)
    again = step(*data, DEFAULT)
    assert not torch.equal(again[1], first[1]), "each call draws a new seed"


@by_step
def test_rounding_to_nearest_draws_no_random_numbers(step: Step, device: torch.device) -> None:
    data = operands(device)
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    first = step(*data, NEAREST)
    for got, expected in zip(step(*data, NEAREST), first, strict=True):
        assert_same_bits(got, expected)
    now = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    assert torch.equal(state, now)


@by_step
def test_mean_gradient_has_a_smaller_error(step: Step, device: torch.device) -> None:
    """Most of the error of one step's gradients is noise of stochastic rounding, which averages out. The rounding
    error of the other operand remains."""
    x, w, grad = operands(device)
    exact = [t.double() for t in step(x, w, grad, ("none", "none", "none"))]
    torch.manual_seed(0)
    steps = [step(x, w, grad, DEFAULT) for _ in range(64)]
    # The exact mean would be the product of the other operand, rounded to nearest, and the unquantized
    # gradient.
    for i in (1, 2):
        single = relative_error(steps[0][i], exact[i])
        mean = torch.stack([s[i] for s in steps]).double().mean(0)
        spread = relative_error(steps[0][i], mean)
        left = relative_error(mean, exact[i])
        assert 0.09 < spread < 0.17, "about 13.4 % noise"
        assert left < 0.14 and left < 0.85 * single, "about 9.4 or 11.1 % remain, from the other operand"


@by_step
def test_compiled_steps_draw_the_same_random_numbers(step: Step, device: torch.device) -> None:
    x, w, grad = operands(device)

    def loss(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        output = (
            ops.linear(x, w[0], None, *DEFAULT)
            if step is dense
            else ops.grouped_linear(x, w, torch.tensor([48, 0, 32], device=x.device), None, None, *DEFAULT)
        )
        return output, (output * grad).sum()

    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        torch.manual_seed(3)
        output, total = function(*leaves, grad)
        results.append((output.detach(), *torch.autograd.grad(total, leaves)))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)
