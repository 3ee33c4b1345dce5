"""One op runs the two layers of a GroupedMLP while no hook needs a tensor between them: the bits of separate calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.test_grouped_mlp import GROUPS, assert_all_same, make, step
from transformer_plugin.nn import GroupedLinear, GroupedMLP
from transformer_plugin.nn._hooks import uses_input
from transformer_plugin.recipes import BFloat16

ONE, LAYERS = ["grouped_mlp"], ["grouped_linear", "activation", "grouped_linear"]
NAME = "fp8_block"


class Dispatched(TorchDispatchMode):
    """The ops of this package that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "transformer_plugin":
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def dispatched(module: Any) -> list[str]:
    """The ops of an inference; where gradients are wanted, their steps are dispatched."""
    gc.collect()  # layers of other tests, whose queues are released with an op
    with Dispatched() as found, torch.no_grad():
        module(torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6))
    return found.names


def split(module: GroupedMLP) -> GroupedMLP:
    """The same module whose layers are called one after the other."""
    module.fc1.register_forward_hook(lambda *_: None)
    return module


def check(module: GroupedMLP, expected: GroupedMLP, ops: list[str]) -> None:
    """The ops that run, and the bits of output and gradients."""
    assert dispatched(module) == ops
    assert dispatched(expected) == LAYERS
    for _ in range(2):
        assert_all_same(step(module, NAME), step(expected, NAME))


def both(register: Callable[[GroupedMLP], Any]) -> tuple[GroupedMLP, GroupedMLP]:
    modules = make(NAME), split(make(NAME))
    for module in modules:
        register(module)
    return modules


def double_the_input(layer: Any, args: tuple[Any, ...]) -> Any:
    return 2 * args[0], *args[1:]


def double_with_keywords(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (2 * args[0], *args[1:]), kwargs


def as_keyword(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[:1], {"group_sizes": args[1]}


def other_sizes(layer: Any, args: tuple[Any, ...]) -> Any:
    return args[0], args[1].flip(0)


def triple_the_output(layer: Any, unused: Any, output: Tensor) -> Tensor:
    return 3 * output


def add_a_hook(layer: Any, args: tuple[Any, ...]) -> None:
    if not hasattr(layer, "added"):
        layer.added = layer.register_forward_hook(triple_the_output)


def add_the_input(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + args[0].sum()


def replace_the_input(layer: Any, unused: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    rows = 98 if torch.is_grad_enabled() else 6
    sizes = torch.tensor([40, 0, 50] if torch.is_grad_enabled() else [1, 2, 2])
    return torch.randn(rows, 128, generator=generator), sizes, torch.rand(rows, generator=generator)


CASES: dict[str, tuple[Callable[[GroupedMLP], Any], list[str]]] = {
    "nothing": (lambda m: m.fc2.register_forward_pre_hook(lambda *_: None), ONE),
    "changed input": (lambda m: m.fc1.register_forward_pre_hook(double_the_input), ONE),
    "changed input, keywords": (
        lambda m: m.fc1.register_forward_pre_hook(double_with_keywords, with_kwargs=True),
        ONE,
    ),
    "input as keyword": (lambda m: m.fc1.register_forward_pre_hook(as_keyword, with_kwargs=True), LAYERS),
    "other groups": (lambda m: m.fc1.register_forward_pre_hook(other_sizes), LAYERS),
    "two": (lambda m: [m.fc1.register_forward_pre_hook(double_the_input) for _ in range(2)], ONE),
    "changed output": (lambda m: m.fc2.register_forward_hook(triple_the_output), ONE),
    "changed output, keywords": (
        lambda m: m.fc2.register_forward_hook(lambda layer, args, kw, output: 3 * output, with_kwargs=True),
        ONE,
    ),
    "activation read": (lambda m: m.fc2.register_forward_pre_hook(double_the_input), LAYERS),
    "activation read afterwards": (lambda m: m.fc2.register_forward_hook(add_the_input), LAYERS),
    "activation replaced": (lambda m: m.fc2.register_forward_pre_hook(replace_the_input), LAYERS),
    "output of the first": (lambda m: m.fc1.register_forward_hook(triple_the_output), LAYERS),
    "called if it raises": (
        lambda m: m.fc2.register_forward_hook(triple_the_output, always_call=True),
        LAYERS,
    ),
    "a hook between the products is added": (lambda m: m.fc1.register_forward_pre_hook(add_a_hook), LAYERS),
    "other recipe": (
        lambda m: m.fc1.register_forward_pre_hook(lambda layer, args: setattr(layer, "recipe", BFloat16())),
        LAYERS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hooks(case: str) -> None:
    register, ops = CASES[case]
    if case == "activation replaced":  # the first layer and its input get no gradient then
        modules = both(register)
        assert [dispatched(m) for m in modules] == [LAYERS, LAYERS]
        x, probs = torch.randn(98, 48), torch.rand(98)
        outputs = [m(x, torch.tensor([40, 0, 50]), probs) for m in modules]
        gradients = [
            torch.autograd.grad(o.sum(), m.fc2.weight) for m, o in zip(modules, outputs, strict=True)
        ]
        assert_all_same([outputs[0].detach(), *gradients[0]], [outputs[1].detach(), *gradients[1]])
        return
    module, expected = both(register)
    if case == "called if it raises":
        expected = both(lambda m: m.fc2.register_forward_hook(triple_the_output))[1]
    check(module, expected, ops)


def test_the_first_input_is_seen() -> None:
    seen: list[Tensor] = []
    module, expected = both(
        lambda m: m.fc1.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    )
    x = torch.randn(6, 48)
    output = module(x, torch.tensor([1, 2, 2]), torch.ones(6))
    assert len(seen) == 1 and seen[0] is x
    assert torch.equal(output, expected(x, torch.tensor([1, 2, 2]), torch.ones(6)))
    check(module, expected, ONE)


def test_order_of_calls() -> None:
    """That of torch: pre-hooks before the op, those of all modules first; the output goes through the hooks in turn."""
    orders = []
    for module in (make(NAME), split(make(NAME))):
        seen: list[str] = []

        def note(name: str, *unused: Any, seen: list[str] = seen) -> None:
            seen.append(name)

        def of_all(layer: torch.nn.Module, *unused: Any, seen: list[str] = seen) -> None:
            seen.append(f"all {type(layer).__name__}")

        handles = [torch.nn.modules.module.register_module_forward_pre_hook(of_all)]
        for name in ("fc1", "fc2"):
            layer = getattr(module, name)
            layer.register_forward_pre_hook(functools.partial(note, f"{name} a"))
            layer.register_forward_pre_hook(functools.partial(note, f"{name} b"), with_kwargs=True)
            layer.register_forward_pre_hook(functools.partial(note, f"{name} first"), prepend=True)
        module.fc2.register_forward_hook(functools.partial(note, "after"))
        module.fc2.register_forward_hook(functools.partial(note, "before after"), prepend=True)
        try:
            names = dispatched(module)
        finally:
            for handle in handles:
                handle.remove()
        orders.append(seen)
    assert names == LAYERS
    assert orders[0] == orders[1] and len(orders[0]) == 3 + 6 + 2
    assert dispatched(make(NAME)) == ONE


def test_which_code_uses_the_input() -> None:
    def indirectly(layer: Any, *unused: Any) -> Any:
        return locals()

    def inside(layer: Any, args: Any) -> Any:
        return lambda: args

    class Watcher:
        def after(self, layer: Any, unused: Any, output: Any) -> Any:
            return output

        def before(self, layer: Any, args: Any) -> Any:
            self.args = args

        def __call__(self, layer: Any, *unused: Any) -> None:
            return None

    def bound(here: Any, layer: Any, args: Any) -> Any:
        return here

    for hook in (lambda *_: None, triple_the_output, Watcher().after, functools.partial(bound, 3)):
        assert not uses_input(hook), hook
    # What is not known to leave it alone: code that cannot be read, or that sees its own variables.
    for hook in (
        *(indirectly, inside, add_the_input, Watcher().before, Watcher(), print, lambda *all_: all_),
        *(functools.partial(add_the_input, None), lambda layer: layer),
    ):
        assert uses_input(hook), hook


class Gather:
    """Holds a weight in shards, and makes it a parameter of the layer for the time of a call, as FSDP does."""

    def __init__(self, layer: GroupedLinear, releases: bool) -> None:
        self.shards = [torch.nn.Parameter(part.clone()) for part in layer.weight.detach().chunk(2, dim=1)]
        del layer.weight
        layer.register_forward_pre_hook(self.gather)
        if releases:
            layer.register_forward_hook(self.release)

    def gather(self, layer: Any, *unused: Any) -> None:
        layer.__dict__["weight"] = torch.cat(list(self.shards), dim=1)

    def release(self, layer: Any, *unused: Any) -> None:
        del layer.__dict__["weight"]


@pytest.mark.parametrize("fuses", [True, False])
def test_gathered_weights(fuses: bool) -> None:
    """Weights exist only while they are used; their gradients reach the shards."""
    results = []
    for gathers in (True, False):
        module = make(NAME, bias=False)
        if not gathers:
            split(module)
            results.append(step(module, NAME))
            continue
        shards = [p for name in ("fc1", "fc2") for p in Gather(getattr(module, name), name == "fc2").shards]
        if not fuses:
            split(module)
        module.fc1.__dict__["weight"] = torch.zeros(GROUPS, 256, 48)  # of an earlier call
        module.fc2.__dict__["weight"] = torch.zeros(GROUPS, 48, 128)
        assert dispatched(module) == (ONE if fuses else LAYERS)
        module.parameters = lambda shards=shards: iter(shards)  # type: ignore[method-assign]
        module.fc2.__dict__["weight"] = torch.zeros(GROUPS, 48, 128)
        output, x, probs, *grads = step(module, NAME)
        results.append([output, x, probs, torch.cat(grads[:2], 1), torch.cat(grads[2:], 1)])
    assert_all_same(*results)
