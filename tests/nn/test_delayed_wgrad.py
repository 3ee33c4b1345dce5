"""Delayed weight gradients: backward_dw() gives the bits of the backward of a layer that does not delay them."""

from __future__ import annotations

import copy
import gc
import io
import re
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from tests.nn.common import RECIPES, by_recipe
from tests.nn.delayed_layers import (
    GROUPS,
    assert_same_gradients,
    batch,
    both,
    by_layer,
    make,
    plain,
    queues_of,
    run,
    set_main_grads,
    weights_of,
)
from transformer_plugin import nn, ops
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.numerics import assert_same_bits


@by_recipe
@by_layer
@pytest.mark.parametrize("into", [None, torch.float32, torch.bfloat16], ids=str)
def test_same_bits_as_undelayed(kind: str, name: str, into: Any, device: torch.device) -> None:
    """Three micro-batches; two forwards before two backwards."""
    delayed, usual = both(kind, name, device, fuse_wgrad_accumulation=into is not None)
    for layer in (delayed, usual):
        if into is not None:
            set_main_grads(layer, into)
    first, *others = (batch(kind, name, seed, device) for seed in range(3))
    results = []
    for layer in (delayed, usual):
        torch.manual_seed(1)  # stochastic rounding draws in the backward
        results.append(run(layer, first))
        outputs = [layer(*arguments[:-1]) for arguments in others]
        for output, arguments in zip(outputs, others, strict=True):
            output.backward(arguments[-1])
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)
    assert delayed.need_backward_dw() and not usual.need_backward_dw()
    for weight in weights_of(delayed).values():
        assert weight.grad is None
        assert into is None or bool((weight.main_grad == 0.25).all())  # type: ignore[attr-defined]
    delayed.backward_dw()
    assert not delayed.need_backward_dw()
    assert_same_gradients(delayed, usual)


@by_layer
@pytest.mark.parametrize("into", [False, True])
def test_steps(kind: str, into: bool) -> None:
    """Two steps with optimizer-like resets, then one that adds to what is there."""
    delayed, usual = both(kind, fuse_wgrad_accumulation=into)
    for layer in (delayed, usual):
        set_main_grads(layer)
    for step in range(3):
        for layer in (delayed, usual):
            if step == 1:
                layer.zero_grad()
            run(layer, batch(kind, "fp8_block", step))
            layer.backward_dw()
        assert_same_gradients(delayed, usual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "fp8_tensor"])
@by_layer
def test_16_bit_parameters(kind: str, name: str, dtype: torch.dtype) -> None:
    delayed, usual = both(kind, name, dtype=dtype)
    for layer in (delayed, usual):
        for seed in range(2):
            run(layer, batch(kind, name, seed, dtype=dtype))
        layer.backward_dw()
    assert_same_gradients(delayed, usual)


@pytest.mark.parametrize("name", ["none", "fp8_block"])
@by_layer
def test_autocast(kind: str, name: str) -> None:
    """The op has a weight in bfloat16; the gradient is of the float32 parameter."""
    delayed, usual = both(kind, name)
    for layer in (delayed, usual):
        for seed in range(2):
            *inputs, grad = batch(kind, name, seed)
            with torch.autocast("cpu", torch.bfloat16):
                output = layer(*inputs)
            output.backward(grad.bfloat16())
        layer.backward_dw()
    assert_same_gradients(delayed, usual)


@by_layer
def test_attributes_of_megatron(kind: str) -> None:
    """overwrite_main_grad, grad_added_to_main_grad and zero_out_wgrad."""
    delayed, usual = both(kind, fuse_wgrad_accumulation=True)
    for layer in (delayed, usual):
        set_main_grads(layer)
        for weight in weights_of(layer).values():
            weight.overwrite_main_grad = True  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        run(layer, batch(kind, "fp8_block", 0))
        for weight in weights_of(layer).values():
            assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
            assert weight.grad is not None and not bool(plain(weight.grad).any())
        run(layer, batch(kind, "fp8_block", 1))
        layer.backward_dw()
    assert_same_gradients(delayed, usual)


@by_layer
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kind: str, reentrant: bool, into: bool) -> None:
    delayed, usual = both(kind, fuse_wgrad_accumulation=into)
    for layer in (delayed, usual):
        set_main_grads(layer)
        for seed in range(2):
            forward = lambda *x, layer=layer: checkpoint(layer, *x, use_reentrant=reentrant)  # noqa: E731
            run(layer, batch(kind, "fp8_block", seed), forward if layer is delayed else None)
    queues = queues_of(delayed)
    assert [len(queue) for queue in queues] == [2] * len(queues)
    delayed.backward_dw()
    assert_same_gradients(delayed, usual)


@by_layer
def test_frozen_weights_keep_nothing(kind: str) -> None:
    layer = make(kind, delay_wgrad_compute=True)
    for weight in weights_of(layer).values():
        weight.requires_grad_(False)
    run(layer, batch(kind, "fp8_block", 0))
    assert not layer.need_backward_dw()
    with torch.no_grad():
        layer(*batch(kind, "fp8_block", 0)[:-1])
    layer.backward_dw()
    assert all(weight.grad is None for weight in weights_of(layer).values())


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", ["none", "mxfp8"])
@pytest.mark.parametrize("kind", ["GroupedLinear list", "GroupedMLP list"])
def test_one_frozen_matrix(kind: str, name: str, into: bool) -> None:
    delayed, usual = both(kind, name, fuse_wgrad_accumulation=into)
    for layer in (delayed, usual):
        set_main_grads(layer)
        next(iter(weights_of(layer).values())).requires_grad_(False)
        for seed in range(2):
            run(layer, batch(kind, name, seed))
        layer.backward_dw()
    assert next(iter(weights_of(delayed).values())).grad is None
    assert_same_gradients(delayed, usual)


@by_layer
@pytest.mark.parametrize("into", [False, True])
def test_no_rows(kind: str, into: bool) -> None:
    delayed, usual = both(kind, fuse_wgrad_accumulation=into)
    for layer in (delayed, usual):
        set_main_grads(layer)
        arguments = [t.detach()[:0] for t in batch(kind, "fp8_block", 0)]
        arguments[0].requires_grad_()
        if kind.startswith("Grouped"):
            arguments[1] = torch.zeros(GROUPS, dtype=torch.int64)
        run(layer, tuple(arguments))
        layer.backward_dw()
    assert_same_gradients(delayed, usual)
    assert into or all(weight.grad is not None for weight in weights_of(delayed).values())


def test_only_the_gradient_of_the_input() -> None:
    layer = make("Linear", delay_wgrad_compute=True)
    x, grad = batch("Linear", "fp8_block", 0)
    torch.autograd.grad(layer(x), x, grad)
    assert not layer.need_backward_dw()


@by_layer
def test_hooks_run_once(kind: str) -> None:
    layer, seen = make(kind, delay_wgrad_compute=True), []
    weight = next(iter(weights_of(layer).values()))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(weight.grad is not None))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append("second"))
    layer.backward_dw()
    assert seen == []
    for seed in range(2):
        run(layer, batch(kind, "fp8_block", seed))
    layer.backward_dw()
    assert seen == [True, "second"]
    layer.backward_dw()
    assert len(seen) == 2
    with pytest.raises(TypeError, match="argument 'hook': expected a function without arguments, got int"):
        layer.register_wgrad_accumulation_and_reduce_hooks(3)


def test_hooks_of_the_layers_inside() -> None:
    moe = nn.MoE(64, 32, 4, 2, recipe=RECIPES["fp8_block"][0], delay_wgrad_compute=True)
    assert moe.delay_wgrad_compute and moe.experts.fc2.delay_wgrad_compute
    seen: list[str] = []
    for name, module in (("moe", moe), ("experts", moe.experts), ("fc1", moe.experts.fc1)):
        module.register_wgrad_accumulation_and_reduce_hooks(lambda name=name: seen.append(name))  # type: ignore[misc]
    other = copy.deepcopy(moe)
    other.delay_wgrad_compute = False
    x = torch.randn(24, 64)
    for each in (moe, other):
        each(x).output.square().mean().backward()
    assert moe.need_backward_dw() and not other.need_backward_dw()
    moe.backward_dw()
    assert seen == ["fc1", "experts", "moe"]
    assert_same_gradients(moe, other)


def test_groups_that_share_a_weight() -> None:
    """The parameter gets the sum of their gradients, in a new ``.grad`` and in one that exists."""
    gradients = []
    for delay in (False, True):
        torch.manual_seed(0)
        layer: Any = nn.GroupedLinear(3, 8, 4, parameters="list", delay_wgrad_compute=delay)
        layer.weight1 = layer.weight0
        x, sizes = torch.randn(9, 8), torch.tensor([4, 2, 3])
        for _ in range(2):
            layer(x, sizes).square().sum().backward()
            layer.backward_dw()
        gradients.append([layer.weight0.grad, layer.weight2.grad])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_switched_off_and_on() -> None:
    """What waits is computed later also after the attribute changed."""
    delayed, usual = both("Linear")
    for layer in (delayed, usual):
        run(layer, batch("Linear", "fp8_block", 0))
    delayed.delay_wgrad_compute = False
    assert delayed.need_backward_dw() and "delay" not in repr(delayed)
    delayed.backward_dw()
    assert_same_gradients(delayed, usual)
    run(delayed, batch("Linear", "fp8_block", 1))
    assert not delayed.need_backward_dw()
    delayed.delay_wgrad_compute = True
    assert "delay_wgrad_compute=True" in repr(delayed)


@by_layer
def test_copies_have_queues_of_their_own(kind: str) -> None:
    layer = make(kind.replace(" hooked", ""), delay_wgrad_compute=True)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    run(layer, batch(kind, "fp8_block", 0))
    for other in copies:
        assert other.delay_wgrad_compute and not other.need_backward_dw()
        run(other, batch(kind, "fp8_block", 0))
        assert other.need_backward_dw()
        other.backward_dw()
        assert layer.need_backward_dw()
    with pytest.raises(
        RuntimeError, match=r"expected no weight gradients that wait .*, got 1. Call backward_dw"
    ):
        copy.deepcopy(layer)
    layer.backward_dw()
    for other in copies:
        assert_same_gradients(other, layer)
    assert not any("deferred" in key for key in layer.state_dict())


@pytest.mark.parametrize("name", ["none", "fp8_block"])
@by_layer
def test_memory_is_freed(kind: str, name: str) -> None:
    """The queue holds the operands, also when it is released with the layer."""
    gc.freeze()  # the collections below then look only at what this test makes, not at all that other tests left
    layer = make(kind, name, delay_wgrad_compute=True)
    x, *others = batch(kind, name, 0)
    storage = x.untyped_storage()._weak_ref()
    alive = lambda: not torch.UntypedStorage._expired(storage)  # type: ignore[attr-defined] # noqa: E731
    run(layer, (x, *others))
    del x
    gc.collect()
    assert alive() == (name == "none" and kind != "LayerNormLinear")
    layer.backward_dw()
    assert not alive()
    numbers = [queue.id for queue in queues_of(layer)]
    run(layer, batch(kind, name, 1))
    assert [ops.count_deferred_wgrads(number) for number in numbers] == [1] * len(numbers)
    del layer
    gc.collect()
    for number in numbers:
        with pytest.raises(
            ValueError, match=r"argument 'queue': expected the id of a queue .*, got \d+\. Make"
        ):
            ops.count_deferred_wgrads(number)


def test_changed_operands_are_noticed() -> None:
    layer = make("Linear", "none", delay_wgrad_compute=True)
    x, grad = batch("Linear", "none", 0)
    layer(x).backward(grad)
    grad.zero_()
    with pytest.raises(ValueError, match="argument 'queue': expected operands as they were in the backward"):
        layer.backward_dw()
    assert layer.need_backward_dw() and layer.weight.grad is None


def test_refusals() -> None:
    layer = make("Linear", "none", delay_wgrad_compute=True)
    layer.recipe = DelayedScaling()
    with pytest.raises(
        ValueError, match="argument 'recipe': expected delay_wgrad_compute=False with DelayedScaling"
    ):
        layer(torch.randn(4, 64))
    layer.recipe = None
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(
        ValueError, match="argument 'weight': expected a parameter with delay_wgrad_compute=True"
    ):
        layer(torch.randn(4, 64))


def test_missing_main_grad_loses_nothing() -> None:
    delayed, usual = both("GroupedLinear list", fuse_wgrad_accumulation=True)
    for layer in (delayed, usual):
        set_main_grads(layer)
        run(layer, batch("GroupedLinear list", "fp8_block", 0))
    kept = delayed.weight1.main_grad
    delayed.weight1.main_grad = torch.zeros(3)
    with pytest.raises(ValueError, match=r"argument 'out(\[1\])?': expected"):
        delayed.backward_dw()
    assert delayed.need_backward_dw() and bool((delayed.weight0.main_grad == 0.25).all())
    delayed.weight1.main_grad = kept
    delayed.backward_dw()
    assert_same_gradients(delayed, usual)


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
@pytest.mark.parametrize("layout", ["packed", "list", "grouped"])
@pytest.mark.parametrize("name", ["GroupedLinear", "GroupedMLP", "MoE"])
def test_schedules_that_ask_for_gradients_of_weights(name: str, layout: str, option: str) -> None:
    """A zero bubble without dw_builder: one error for all layouts, before anything is added or kept."""
    sizes = {"GroupedLinear": (4, 32, 32), "GroupedMLP": (4, 32, 32), "MoE": (32, 32, 4, 2)}[name]
    layer = getattr(nn, name)(*sizes, **{option: True, "parameters": layout})
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(tuple(parameter.shape))
    counts = () if name == "MoE" else (torch.tensor([5, 0, 9, 2]),)
    probs = (torch.rand(16),) if name == "GroupedMLP" else ()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        input = torch.randn(16, 32, requires_grad=True)
        output = layer(input, *counts, *probs)
        return input, output.output if name == "MoE" else output

    input, output = step()
    _, groups = stage_backward_input([output], [torch.randn(16, 32)], [input], iter(layer.parameters()))
    with pytest.raises(ValueError) as caught:
        stage_backward_weight(iter(layer.parameters()), groups)
    assert re.match(
        r"transformer_plugin::grouped_(linear|mlp): argument '(fc[12]_)?main_grad(_queue)?': expected a backward that "
        rf"accumulates, as the layer has {option}=True, got torch.autograd.grad for the gradient of its weight, as "
        r"pipeline schedules with a zero bubble call it. Pass dw_builder=transformer_plugin.nn.dw_builder\(module\) to "
        r"PipelineStage, or leave the option out.",
        str(caught.value),
    )
    assert not any(parameter.main_grad.any() for parameter in layer.parameters())
    assert not layer.need_backward_dw()
    input, output = step()  # other backwards go on
    output.sum().backward()
    assert input.grad is not None and layer.need_backward_dw() == (option == "delay_wgrad_compute")
    layer.backward_dw()
    input, output = step()
    assert torch.autograd.grad(output.sum(), [input])[0].any()
