"""Weights that change, of layers that keep their quantized weights: the next forward has the present one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.nn.test_quantized_weights import GROUPS
from tests.nn.weight_caches import fresh, made, pair
from transformer_plugin.nn import Linear, weights_changed
from transformer_plugin.recipes import Float8BlockScaling, NVFP4BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

__all__ = ["made"]  # the fixture


class Counted(torch.nn.Module):
    """A parametrization that draws at random."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * torch.rand(())


@pytest.mark.parametrize(
    ("kind", "name"), [("Linear", "weight"), ("LayerNormLinear", "weight"), ("GroupedLinear", "weight")]
)
def test_what_computes_a_weight_does_so_once(kind: str, name: str) -> None:
    modules = pair(kind)
    counts = [Counted(), Counted()]
    for module, counted in zip(modules, counts, strict=True):
        torch.nn.utils.parametrize.register_parametrization(module, name, counted, unsafe=True)
        counted.calls = 0
    outputs = []
    for module in modules:
        torch.manual_seed(3)
        given = (torch.randn(8, module.in_features), torch.tensor([3, 5] + [0] * (GROUPS - 2)))  # type: ignore[arg-type]
        outputs.append(module(*given[: 2 if kind == "GroupedLinear" else 1]))
    assert counts[0].calls == counts[1].calls > 0
    assert_same_bits(*outputs)


def test_a_weight_that_becomes_one_of_inference_mode() -> None:
    layer, x = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True), torch.randn(8, 64)
    layer(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.inference_mode():
            state = {name: (2 * value).clone() for name, value in layer.state_dict().items()}
            layer.load_state_dict(state, assign=True)
            assert_same_bits(layer(x), fresh(layer)(x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.add_(1)


def in_place_in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.weight.add_(1)


def by_average(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.lerp_(torch.ones_like(layer.weight), 0.5)


def by_foreach(layer: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([layer.weight], 2.0)


def through_detached(layer: Any) -> None:
    layer.weight.detach().mul_(2)


def through_a_view(layer: Any) -> None:
    layer.weight.detach()[:1].mul_(2)


def by_state_dict(layer: Any) -> None:
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def by_assigned_state_dict(layer: Any) -> None:
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}, assign=True)


def by_swapped_state_dict(layer: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        by_state_dict(layer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def by_swapped_tensors(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(layer.weight.detach() * 2))


def by_data(layer: Any) -> None:
    layer.weight.data = layer.weight.detach() * 2


def by_data_of_the_freed_memory(layer: Any) -> None:
    """The allocator may return the address of before."""
    sizes = layer.weight.shape
    layer.weight.data = layer.weight.new_empty(0)
    layer.weight.data = torch.ones(sizes)


def by_data_of_the_same_address(layer: Any) -> None:
    """Another storage, at the address of the one of before, and the same version."""
    values = layer.weight.detach().numpy().copy()
    layer.weight.data = torch.from_numpy(values)
    for _ in range(2):
        layer(torch.randn(4, layer.in_features))
    values *= 2
    address = layer.weight.data_ptr()
    layer.weight.data = torch.from_numpy(values)
    assert layer.weight.data_ptr() == address


def by_data_transposed(layer: Any) -> None:
    """The same memory, and the same version."""
    layer.weight.data = layer.weight.data.t()


def by_data_as_another_view(layer: Any) -> None:
    memory = torch.randn(2, *layer.weight.shape)
    layer.weight.data = memory[0]
    layer(torch.randn(4, 48))
    layer.weight.data = memory[1]


def by_resized_storage(layer: Any) -> None:
    values, storage = 2 * layer.weight.detach(), layer.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        layer.weight.copy_(values)


def by_another_parameter(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())


def by_another_parameter_of_its_memory(layer: Any) -> None:
    """A parameter with another count of changes over the same memory."""
    layer._parameters["weight"] = torch.nn.Parameter(layer.weight.data)
    with torch.no_grad():
        layer.weight.mul_(2)


def by_another_parameter_unseen(layer: Any) -> None:
    layer._parameters["weight"] = torch.nn.Parameter(2 * layer.weight.detach())


def by_reset(layer: Any) -> None:
    layer.reset_parameters()


def cast(layer: Any) -> None:
    layer.bfloat16().float()


def by_optimizer(layer: Any, **options: Any) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=0.5, **options).step()


def by_fused_optimizer(layer: Any) -> None:
    by_optimizer(layer, fused=True)


def by_foreach_optimizer(layer: Any) -> None:
    by_optimizer(layer, foreach=True)


class UncountedOptimizer(torch.optim.Optimizer):
    """A kernel that torch does not count, of which it raises an error at the end."""

    def __init__(self, parameters: Any, fails: bool = False) -> None:
        super().__init__(parameters, {})
        self.fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for settings in self.param_groups:
            for parameter in settings["params"]:
                parameter.data.mul_(2)
        if self.fails:
            raise RuntimeError("half way")


def by_uncounted_step(layer: Any) -> None:
    UncountedOptimizer([layer.weight]).step()


def by_uncounted_step_with_a_closure(layer: Any) -> None:
    UncountedOptimizer([layer.weight]).step(lambda: layer(torch.randn(4, 48)))


def by_failing_step(layer: Any) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        UncountedOptimizer([layer.weight], fails=True).step()


def by_a_write_after_a_step_of_others(layer: Any) -> None:
    """As an average of weights is written after the step of the trained ones."""
    UncountedOptimizer([torch.nn.Parameter(torch.ones(1))]).step()
    layer.weight.data.mul_(2)


def by_a_told_write(layer: Any) -> None:
    layer.weight.data.mul_(2)
    weights_changed()


def by_a_told_write_of_numpy(layer: Any) -> None:
    layer.weight.detach().numpy()[:] *= 2
    weights_changed()


def by_another_recipe(layer: Any) -> None:
    layer.recipe = NVFP4BlockScaling()


CHANGES = [
    *(in_place, in_place_in_inference_mode, by_average, by_foreach, through_detached, through_a_view),
    *(by_state_dict, by_assigned_state_dict, by_swapped_state_dict, by_swapped_tensors),
    *(by_data, by_data_of_the_freed_memory, by_data_of_the_same_address, by_data_transposed),
    *(by_data_as_another_view, by_resized_storage),
    *(by_another_parameter, by_another_parameter_of_its_memory, by_another_parameter_unseen, by_reset, cast),
    *(by_optimizer, by_fused_optimizer, by_foreach_optimizer, by_uncounted_step),
    *(by_uncounted_step_with_a_closure, by_failing_step, by_a_write_after_a_step_of_others),
    *(by_a_told_write, by_a_told_write_of_numpy, by_another_recipe),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    if change is by_data_as_another_view or change is by_uncounted_step_with_a_closure:
        layer = Linear(48, 48, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(32, layer.in_features)
    for _ in range(2):
        layer(x)
    before = layer(x)
    change(layer)
    expected = fresh(layer)(x)
    assert not torch.equal(before, expected) or change is cast
    for _ in range(3):
        assert_same_bits(layer(x), expected)


@pytest.mark.parametrize(("fused", "early"), [(False, False), (True, False), (True, True)])
def test_compiled_steps_are_seen(fused: bool, early: bool, fresh_compiler: None) -> None:
    """torch calls no hook in them, and does not count what fused kernels write."""
    torch.manual_seed(0)
    layer = Linear(64, 64, recipe=Float8BlockScaling())
    x = torch.randn(32, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=fused)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(optimizer.step, backend=counter)
    if early:
        layer(x).sum().backward()
        compiled()
    layer.cache_weights = True
    frames = []
    for _ in range(4):
        before = layer(x)
        before.sum().backward()
        compiled()
        frames.append(counter.frame_count)
        assert not torch.equal(layer(x), before)
        assert_same_bits(layer(x), fresh(layer)(x))
    assert frames[1:] == frames[1:2] * 3


def test_what_is_given_from_outside(made: list[Any]) -> None:
    """Neither read from a copy nor kept in place of one."""
    layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(8, 64)
    expected = layer(x)
    given = {name: (2 * value).detach() for name, value in layer.named_parameters()}
    other = Linear(64, 64, recipe=Float8BlockScaling())
    other.load_state_dict(given)
    assert_same_bits(torch.func.functional_call(layer, given, (x,)), other(x))
    assert_same_bits(layer(x), expected)
    assert len(made) == 1


def test_parametrizations() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(8, 64)
    layer(x)
    expected = fresh(layer)
    with torch.no_grad():
        expected.weight.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    for _ in range(2):
        assert_same_bits(layer(x), expected(x))
        layer.parametrizations.weight.original.data.mul_(2)  # type: ignore[union-attr]
        expected.weight.data.mul_(2)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert_same_bits(layer(x), expected(x))


@pytest.mark.parametrize("how", ["weight_norm", "pruning"])
def test_weights_that_hooks_compute(how: str) -> None:
    layer: Any = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    x = torch.randn(8, 64)
    layer(x)
    if how == "weight_norm":
        torch.nn.utils.weight_norm(layer)
        layer.weight_g.data.mul_(2)
    else:
        torch.nn.utils.prune.random_unstructured(layer, "weight", 0.5)
        layer.weight_orig.data.mul_(2)
    assert_same_bits(layer(x), fresh(layer)(x))
