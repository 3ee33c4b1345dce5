"""tp.checkpoint: outputs, gradients and the state of delayed scaling have the bits of a run without checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.error_text import text_of
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.numerics import assert_same_bits

RECIPE = DelayedScaling(amax_history_len=4)
Call = Callable[..., Any]


class Block(torch.nn.Module):
    """One layer that is used twice, and experts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = tp.nn.Linear(32, 32, recipe=RECIPE, device=device)
        self.experts = tp.nn.GroupedMLP(2, 32, 32, recipe=RECIPE, device=device)
        self.last = tp.nn.Linear(32, 32, recipe=RECIPE, device=device)

    def first_part(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x).tanh() * 3)

    def second_part(self, x: Tensor) -> Tensor:
        sizes = torch.tensor([10, 14], device=x.device)
        return self.last(self.experts(x, sizes, torch.ones(24, device=x.device)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second_part(self.first_part(x))


def directly(function: Call, *args: Any) -> Any:
    return function(*args)


def reentrant(function: Call, *args: Any) -> Any:
    return tp.checkpoint(function, *args, use_reentrant=True)


def whole(block: Block, x: Tensor, call: Call) -> Tensor:
    return call(block, x)


def halves(block: Block, x: Tensor, call: Call) -> Tensor:
    return call(block.second_part, call(block.first_part, x))


def nested(block: Block, x: Tensor, call: Call) -> Tensor:
    return call(lambda t: call(block.second_part, call(block.first_part, t)), x)


def run(device: torch.device, how: Any, call: Call, in_flight: int, order: int = 1) -> list[Tensor]:
    """Steps with growing values and several forwards before the first backward."""
    block = Block(device)
    results = []
    for step in range(3):
        inputs, outputs = [], []
        for i in range(in_flight):
            generator = torch.Generator().manual_seed(10 * step + i)
            x = (torch.randn(24, 32, generator=generator) * 4.0**i).to(device).requires_grad_()
            inputs.append(x)
            outputs.append(how(block, x, call))
        for output in outputs[::order]:
            output.square().mean().backward()
        results += [o.detach() for o in outputs] + [x.grad for x in inputs]
        results += [buffer.clone() for buffer in block.buffers()]
    return results + [p.grad for p in block.parameters()]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("how", [whole, halves, nested])
@pytest.mark.parametrize("call", [tp.checkpoint, reentrant])
def test_bits_without_checkpointing(
    how: Any, call: Call, in_flight: int, order: int, device: torch.device
) -> None:
    expected = run(device, how, directly, in_flight, order)
    for i, (got, wanted) in enumerate(zip(run(device, how, call, in_flight, order), expected, strict=True)):
        assert_same_bits(got, wanted, str(i))


def test_evaluations_between(device: torch.device) -> None:
    """Evaluations without gradients, and in eval mode with gradients, between a forward and its backward."""
    results = []
    for call in (directly, tp.checkpoint):
        block, x = Block(device), torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(device)
        block(x).sum().backward()
        output = call(block, x * 8)
        with torch.no_grad():
            results.append([call(block, x * 64)])
        block.eval()
        evaluated = call(block, x * 2)
        block.train()
        call(block, x * 128)
        output.sum().backward()
        block.eval()  # the mode of its forward
        evaluated.sum().backward()
        results[-1] += [output.detach(), evaluated.detach(), *(p.grad for p in block.parameters())]
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def test_backward_twice(device: torch.device) -> None:
    results = []
    for call in (directly, tp.checkpoint):
        block, x = Block(device), torch.ones(24, 32, device=device)
        outputs = [call(block, x * 5.0**i) for i in range(3)]
        for _ in range(2):
            outputs[0].sum().backward(retain_graph=True)
        results.append([p.grad for p in block.parameters()])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def test_arguments_and_errors() -> None:
    block = Block(torch.device("cpu"))

    def fails(x: Tensor) -> Tensor:
        block.shared(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tp.checkpoint(fails, torch.ones(24, 32))
    x = torch.ones(24, 32, requires_grad=True)
    tp.checkpoint(block, x, preserve_rng_state=False, determinism_check="none").sum().backward()
    assert x.grad is not None
    tp.checkpoint(lambda t, *, by: t * by, x, by=3.0).sum().backward()

    calls = []

    def more_each_time(x: Tensor) -> Tensor:
        calls.append(x)
        for _ in calls:
            x = block.shared(x)
        return x

    output = tp.checkpoint(more_each_time, x, use_reentrant=True)
    with pytest.raises(RuntimeError) as caught:
        output.sum().backward()
    assert text_of(caught.value) == (
        "transformer_plugin.checkpoint: argument 'function': expected to call Linear 1 times, as in its first "
        "forward, got one more call when it was recomputed. Make the function deterministic."
    )


def test_other_recipes_and_modules() -> None:
    """Without delayed scaling it is torch's function."""
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    tp.checkpoint(layer, x).sum().backward()
    assert_same_bits(x.grad, torch.ones(4, 8) @ layer.weight.detach())


def test_deep_copies_share_nothing() -> None:
    block = Block(torch.device("cpu"))
    x = torch.ones(24, 32)
    output = tp.checkpoint(block, x)
    copy.deepcopy(block)(x * 100).sum().backward()
    output.sum().backward()
