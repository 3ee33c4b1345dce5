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
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.nn.test_quantized_weights import (
    MAKERS,
    RECIPES,
    assert_all_same,
    by_format,
    by_module,
    layers,
    step,
    width_of,
)
from transformer_plugin import nn, ops
from transformer_plugin.nn import GroupedLinear, Linear, MoE, weights_changed
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.recipes import BFloat16, DelayedScaling, Float8BlockScaling, NVFP4BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

by_checkpoint = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def pair(
    kind: str, name: str = "fp8_block", device: torch.device | str = "cpu", **options: Any
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two equal modules, of which the first keeps its quantized weights."""
    made = []
    for caches in (True, False):
        torch.manual_seed(0)
        recipe = RECIPES[name][0]
        options = {**options, "device": device, "recipe": recipe, "cache_weights": caches}
        made.append(MAKERS[kind](width_of(name, 48), **options))
    return made[0], made[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list that grows with each weight that is quantized to be kept."""
    calls: list[Any] = []
    quantize = ops.quantize_weight

    def counted(weight: Any, *formats: str) -> list[Tensor]:
        calls.append(weight)
        return quantize(weight, *formats)

    monkeypatch.setattr(ops, "quantize_weight", counted)
    yield calls


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


# --- changes of the weight


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
    *(by_data, by_data_of_the_freed_memory, by_data_transposed, by_data_as_another_view, by_resized_storage),
    *(by_another_parameter, by_another_parameter_of_its_memory, by_another_parameter_unseen, by_reset, cast),
    *(by_optimizer, by_fused_optimizer, by_foreach_optimizer, by_uncounted_step),
    *(by_uncounted_step_with_a_closure, by_failing_step, by_a_write_after_a_step_of_others),
    *(by_a_told_write, by_a_told_write_of_numpy, by_another_recipe),
]


def fresh(layer: Any) -> Linear:
    """A layer without a cache that has the present weight."""
    made = Linear(layer.in_features, layer.out_features, recipe=layer.recipe)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(getattr(layer, name))
    return made


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
            in_place(layer)
        changed = copy.deepcopy(twin)
        changed_again = MAKERS[kind](48, recipe=Float8BlockScaling())
        changed_again.load_state_dict(changed.state_dict())
        assert_all_same(step(twin), step(changed_again))
        assert_all_same(step(module), expected)


def copied(layer: RecipeModule) -> list[Tensor] | None:
    """What a layer keeps."""
    kept = layer._weight_source._cache._kept  # type: ignore[attr-defined]
    return None if kept is None else kept.tensors


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
    in_place(layer)
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
