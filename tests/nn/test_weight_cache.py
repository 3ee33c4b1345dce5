"""Quantized weights that layers keep by themselves: made once, the same bits, never those of another weight."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.nn.test_quantized_weights import (
    MAKERS,
    RECIPES,
    assert_all_same,
    by_format,
    by_module,
    changed_in_place,
    layers,
    step,
)
from tests.nn.weight_caches import copied, fresh, made, pair
from transformer_plugin import nn
from transformer_plugin.nn import GroupedLinear, Linear, MoE, weights_changed
from transformer_plugin.recipes import BFloat16, DelayedScaling, Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

__all__ = ["made"]  # the fixture

by_checkpoint = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


@contextmanager
def counted_ops(*names: str) -> Iterator[dict[str, int]]:
    """How often the profiler sees ops of the package, at the end."""
    counts = dict.fromkeys(names, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    for event in profile.events() or ():
        name = event.name.removeprefix("transformer_plugin::")
        if name in counts:
            counts[name] += 1


@by_module
@by_format
def test_micro_batches_and_steps(kind: str, name: str, device: torch.device, made: list[Any]) -> None:
    modules = pair(kind, name, device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    for number in range(3):
        made.clear()
        for micro_batch in range(4):
            results = [step(m, name, seed=10 * number + micro_batch) for m in modules]
            assert_all_same(*results)
        assert len(made) == len(layers(modules[0]))
        for m, optimizer in zip(modules, optimizers, strict=True):
            for parameter, gradient in zip(m.parameters(), results[1][2:], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()


@by_module
@by_format
@by_checkpoint
def test_recomputation(kind: str, name: str, reentrant: bool, made: list[Any]) -> None:
    modules = pair(kind, name)

    def run(module: torch.nn.Module) -> Callable[..., Tensor]:
        return lambda *arguments: checkpoint(module, *arguments, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def results(module: torch.nn.Module) -> list[Tensor]:
        if not reentrant:
            return step(module, name, run(module))
        # autograd.grad is not for reentrant checkpoints
        outputs: list[Tensor] = []

        def kept(*arguments: Tensor) -> Tensor:
            outputs.append(run(module)(*arguments))
            outputs[0].square().sum().backward()
            return module(*arguments)

        found = step(module, name, kept)
        return [*outputs, *found, *[p.grad for p in module.parameters() if p.grad is not None]]

    assert_all_same(results(modules[0]), results(modules[1]))
    assert len(made) == len(layers(modules[0]))


def test_weights_are_quantized_once() -> None:
    """The ops that run: of each micro-batch that for the input, its recomputation and the gradient, and one weight."""
    counts = []
    for layer in pair("Linear"):
        x = torch.randn(8, 48, requires_grad=True)
        with counted_ops("quantize", "linear") as seen:
            for _ in range(4):
                checkpoint(layer, x, use_reentrant=False).sum().backward()
        counts.append(seen["quantize"])
    assert counts[1] - counts[0] == 2 * 4 - 1


@by_module
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
def test_copies_have_no_copy(kind: str, how: str) -> None:
    module, plain = pair(kind)
    expected = step(module)
    if how == "pickle":
        file = io.BytesIO()
        torch.save(module, file)
        smaller = io.BytesIO()
        torch.save(plain, smaller)
        assert file.tell() - smaller.tell() < 2000
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(module) if how == "deepcopy" else copy.copy(module)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(layer.cache_weights for layer in layers(twin))
    assert_all_same(step(twin), expected)
    if how != "copy":  # which has the same parameters
        for layer in layers(twin):
            changed_in_place(layer)
        changed = copy.deepcopy(twin)
        changed_again = MAKERS[kind](48, recipe=Float8BlockScaling())
        changed_again.load_state_dict(changed.state_dict())
        assert_all_same(step(twin), step(changed_again))
        assert_all_same(step(module), expected)


@pytest.mark.parametrize("how", ["off", "recipe", "delete", "replace", "to"])
def test_memory_returns(how: str) -> None:
    layer: Any = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    with torch.no_grad():
        layer(torch.randn(8, 64))
    tensors = copied(layer)
    assert tensors
    memory, weight = weakref.ref(tensors[0]), weakref.ref(layer.weight)
    del tensors
    if how == "off":
        layer.cache_weights = False
    elif how == "recipe":
        layer.recipe = BFloat16()
    elif how == "delete":
        del layer.weight
    elif how == "replace":
        layer.weight = torch.nn.Parameter(torch.randn(64, 64))
    else:
        layer.to(torch.bfloat16)
    gc.collect()
    assert memory() is None
    assert (weight() is None) == (how in ("delete", "replace"))


def test_bytes_that_are_kept() -> None:
    """Those that the manual states, on a CPU."""
    for name, expected in (("fp8_tensor", 1.0), ("fp8_block", 1.0), ("mxfp8", 2.0625), ("nvfp4", 0.5625)):
        recipe = RECIPES[name][0]
        layer = Linear(512, 512, recipe=recipe, cache_weights=True)
        with torch.no_grad():
            layer(torch.randn(16, 512))
        kept = sum(t.numel() * t.element_size() for t in copied(layer) or ())
        assert kept / 512**2 == pytest.approx(expected, rel=2e-3), name


def test_memory_of_parameters_that_move_is_not_kept() -> None:
    """As of parameters that are offloaded, or whose storage is another one in each forward."""
    layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(8, 64)
    for _ in range(3):
        layer.weight.data = layer.weight.detach().clone()
        layer(x)
    assert copied(layer) is None
    layer(x)
    assert copied(layer) is not None


def test_backwards_of_earlier_weights() -> None:
    """A forward keeps what it read, as it does without a cache."""
    results = []
    for module in pair("Linear"):
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = module(x)
        weights_changed()
        module(x)
        results.append(torch.autograd.grad(output.sum(), [x, *module.parameters()]))
    assert_all_same(list(results[0]), list(results[1]))


@by_module
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(kind: str, dtype: torch.dtype, made: list[Any]) -> None:
    """Autocast casts the weight before it is quantized."""
    modules = pair(kind)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            assert_all_same(step(modules[0]), step(modules[1]))
    assert_all_same(step(modules[0]), step(modules[1]))
    assert len(made) == 2 * len(layers(modules[0]))


@by_module
def test_inference_mode(kind: str, made: list[Any]) -> None:
    """What is made in it serves a backward later."""
    modules = pair(kind)
    with torch.inference_mode():
        step_of = [[p.detach().clone() for p in m.parameters()] for m in modules]
    assert step_of
    x, sizes, probs = torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6)
    arguments = {"GroupedLinear": (x, sizes), "GroupedMLP": (x, sizes, probs)}.get(kind, (x,))
    with torch.inference_mode():
        assert_same_bits(modules[0](*arguments), modules[1](*arguments))
    assert_all_same(step(modules[0]), step(modules[1]))
    assert len(made) == len(layers(modules[0]))


def test_layers_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
        x = torch.randn(8, 64)
        before = layer(x)
        layer.weight.mul_(2)  # inference tensors have no count of changes
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("layout", ["packed", "list", "grouped"])
@by_format
def test_layouts(layout: Any, name: str, made: list[Any]) -> None:
    modules = pair("GroupedLinear", name, parameters=layout)
    modules[1].load_state_dict(modules[0].state_dict())
    for number in range(3):
        results = [step(module, name, seed=number) for module in modules]
        assert_all_same(*results)
    assert len(made) == 1
    for module in modules:
        with torch.no_grad():
            list(module.parameters())[-2 if layout == "packed" else 0].mul_(2)
    assert_all_same(step(modules[0], name), step(modules[1], name))
    assert len(made) == 2


def test_main_grad_and_delayed_weight_gradients() -> None:
    gradients = []
    for module in pair("GroupedLinear", delay_wgrad_compute=True, fuse_wgrad_accumulation=True, bias=False):
        weight: Any = module.weight
        weight.main_grad = torch.zeros_like(weight)
        for seed in range(2):
            x = torch.randn(20, 48, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            module(x, torch.tensor([10, 0, 10])).square().sum().backward()
            module.backward_dw()  # type: ignore[operator]
        gradients.append(weight.main_grad)
    assert gradients[0].abs().sum() > 0
    assert_same_bits(gradients[0], gradients[1])


def test_recipes_without(made: list[Any]) -> None:
    """Delayed scaling has scales that change in each forward; weights in bfloat16 are what the format takes."""
    for recipe, dtype in ((None, None), (DelayedScaling(), None), (BFloat16(), torch.bfloat16)):
        layers_of = []
        for caches in (True, False):
            torch.manual_seed(0)
            layers_of.append(Linear(64, 64, dtype=dtype, recipe=recipe, cache_weights=caches))
        x = torch.randn(8, 64, dtype=dtype)
        for _ in range(2):
            assert_same_bits(layers_of[0](x), layers_of[1](x))
    assert not made


def test_quantize_weights_beside_it(made: list[Any]) -> None:
    layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(8, 64)
    layer(x)
    layer.quantize_weights()
    changed_in_place(layer)
    with pytest.raises(ValueError, match="changed in place"):
        layer(x)
    layer.forget_quantized_weights()
    assert_same_bits(layer(x), fresh(layer)(x))
    layer.quantize_weights()
    layer.cache_weights = False
    assert layer.quantized_weight is not None
    layer.forget_quantized_weights()
    made.clear()
    layer(x)
    assert not made


def test_containers() -> None:
    moe = MoE(64, 128, 4, 2, recipe=Float8BlockScaling(), cache_weights=True)
    experts: Any = moe.experts
    assert moe.cache_weights
    assert experts.cache_weights
    assert "cache_weights=True" in repr(experts.fc1)
    experts.fc1.cache_weights = False
    with pytest.raises(ValueError, match="attribute 'cache_weights': expected the same in all layers"):
        moe.cache_weights  # noqa: B018
    moe.cache_weights = False
    assert not experts.fc2.cache_weights
    assert not GroupedLinear(2, 64, 64).cache_weights


@pytest.mark.parametrize("caches", ["fc1", "fc2"])
def test_one_of_two_layers(caches: str) -> None:
    module, plain = pair("GroupedMLP")
    module.cache_weights = False  # type: ignore[assignment]
    getattr(module, caches).cache_weights = True
    for _ in range(2):
        assert_all_same(step(module), step(plain))


def test_errors_are_those_of_the_layer() -> None:
    texts = []
    for module in pair("Linear", "mxfp8"):
        module.weight = torch.nn.Parameter(torch.randn(96, 72))
        with pytest.raises(ValueError) as caught:
            module(torch.randn(4, 72))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert nn.weights_changed is weights_changed
