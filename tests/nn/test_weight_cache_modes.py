"""Kept quantized weights where forwards are compiled, traced, captured, recomputed in part, or on other streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import transformer_plugin as tp
from tests.clients.hf_experts import make as make_experts
from tests.clients.hf_experts import results, routed
from tests.clients.imported import peft
from tests.nn.test_quantized_weights import assert_all_same, by_module, layers, step
from tests.nn.weight_caches import copied, fresh, made, pair
from transformer_plugin.integrations import hf
from transformer_plugin.nn import Linear, weights_changed
from transformer_plugin.recipes import Float8BlockScaling, MXFP8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

__all__ = ["made"]  # the fixture


def caching(device: str = "cpu", **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True, device=device, **options)


@pytest.fixture(params=[False, True], ids=["new", "used"])
def layer(request: pytest.FixtureRequest) -> Iterator[Linear]:
    """A layer without a copy, or with one."""
    layer = caching()
    if request.param:
        layer(torch.randn(8, 64))
    yield layer


@by_module
def test_compiled_forwards_quantize(kind: str, fresh_compiler: None, made: list[Any]) -> None:
    """They read no copy, so that none can be another weight's, and compile once."""
    modules = pair(kind)
    step(modules[0])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(modules[0], fullgraph=True, backend=counter)
    for number in range(3):
        assert_all_same(step(modules[0], run=compiled, seed=number), step(modules[1], seed=number))
        assert_all_same(step(modules[0], seed=number), step(modules[1], seed=number))
        for module in modules:
            for own in layers(module):
                own.weight.data.mul_(2)  # not counted
        if number < 2:
            step(modules[0], run=compiled, seed=number)
        weights_changed()
    assert counter.frame_count == 1
    assert len(made) == 3 * len(layers(modules[0]))


def traced_by_make_fx(layer: Linear, x: Tensor) -> Any:
    return make_fx(layer)(x)


def traced_before_dispatch(layer: Linear, x: Tensor) -> Any:
    return make_fx(layer, pre_dispatch=True)(x)


def traced_with_fake_tensors(layer: Linear, x: Tensor) -> Any:
    return make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(x)


def traced_by_jit(layer: Linear, x: Tensor) -> Any:
    return torch.jit.trace(layer, x, check_trace=False)


def exported(layer: Linear, x: Tensor) -> Any:
    return torch.export.export(layer, (x,)).module()


TRACES = [traced_by_make_fx, traced_before_dispatch, traced_with_fake_tensors, traced_by_jit, exported]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", TRACES)
def test_traces_hold_no_copy(layer: Linear, trace: Callable[..., Any], made: list[Any]) -> None:
    x, before = torch.randn(8, 64), len(made)
    with torch.no_grad():
        function = trace(layer, x)
        assert len(made) == before
        layer.weight.data.mul_(2)  # not counted
        assert_same_bits(function(x), fresh(layer)(x))
    weights_changed()
    assert_same_bits(layer(x), fresh(layer)(x))


def test_fake_tensors_are_not_kept(layer: Linear) -> None:
    x = torch.randn(8, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(x))
    assert_same_bits(layer(x), fresh(layer)(x))


@pytest.mark.parametrize("transform", ["grad", "functionalize"])
def test_transforms(layer: Linear, transform: str) -> None:
    """torch.func.grad does not take ops with gradients in C++; what it has begun is not kept."""
    x = torch.randn(8, 64)
    if transform == "grad":
        with pytest.raises(RuntimeError, match="functorch"):
            torch.func.grad(lambda x: layer(x).sum())(x)
    else:
        with torch.no_grad():
            assert_same_bits(torch.func.functionalize(layer)(x), fresh(layer)(x))
    weights_changed()
    if transform == "grad":
        with pytest.raises(RuntimeError, match="functorch"):
            torch.func.grad(lambda x: layer(x).sum())(x)
    layer(x).sum().backward()
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, copied(layer) or ()))
    assert_same_bits(layer(x), fresh(layer)(x))


def test_counting_modes_keep_copies(made: list[Any]) -> None:
    layer = caching()
    for _ in range(3):
        with FlopCounterMode(display=False) as flops:
            layer(torch.randn(8, 64))
        assert flops.get_total_flops() == 2 * 8 * 64 * 64
    assert len(made) == 1


@pytest.mark.parametrize("saved", ["all", "quantize", "products", "none"])
@pytest.mark.parametrize("kind", ["Linear", "GroupedMLP"])
def test_selective_checkpointing(saved: str, kind: str) -> None:
    """It takes the results of ops in their order: a recomputation that quantizes no weight has the same sequence."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        is_saved = "transformer_plugin" in name and (
            saved == "all" or ("quantize" in name) == (saved == "quantize")
        )
        is_saved = is_saved and saved != "none"
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(module: torch.nn.Module) -> Callable[..., Tensor]:
        def call(*arguments: Tensor) -> Tensor:
            contexts = create_selective_checkpoint_contexts
            return checkpoint(  # type: ignore[no-any-return]
                module, *arguments, use_reentrant=False, context_fn=lambda: contexts(policy)
            )

        return call

    modules = pair(kind)
    for number in range(3):
        results = [step(module, run=run(module), seed=number) for module in modules]
        assert_all_same(*results)
        weights_changed()


def test_other_memory_between_a_forward_and_its_recomputation() -> None:
    """What is not kept is still quantized apart, so that both have the same ops and save the same tensors."""
    results = []
    for layer in pair("Linear", "bf16"):
        layer(torch.randn(8, 48))
        layer.weight.data = layer.weight.detach().clone()  # type: ignore[union-attr,operator]
        x = torch.ones(8, 48, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        results.append(x.grad)
    assert_same_bits(results[0], results[1])


def test_memory_that_processes_share() -> None:
    """Another process may write it."""
    layer = caching()
    layer.share_memory()
    x = torch.randn(8, 64)
    layer(x)
    layer.weight.data.mul_(2)
    assert_same_bits(layer(x), fresh(layer)(x))
    assert copied(layer) is None
    used = caching()
    used(x)
    used.share_memory()
    used.weight.data.mul_(2)
    assert_same_bits(used(x), fresh(used)(x))


# --- experts of transformers

FORMS = ("MixtralExperts", "NemotronHExperts", "GptOssExperts", "MuseSparkExperts")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", ["converted", "registered"])
def test_experts_of_transformers(name: str, how: str, made: list[Any]) -> None:
    found = [make_experts(name) for _ in range(2)]
    recipe = MXFP8BlockScaling()
    for experts, caches in zip(found, (True, None), strict=True):
        if how == "converted":
            tp.convert(experts, recipe, cache_weights=caches)
        else:
            experts.config._experts_implementation = "transformer_plugin"
            hf.set_recipe(experts, recipe, cache_weights=caches)
    optimizers = [torch.optim.AdamW(experts.parameters(), lr=0.1, fused=True) for experts in found]
    for _ in range(2):
        made.clear()
        for _ in range(3):
            assert_all_same(*[results(experts, routed()) for experts in found])
        assert len(made) == 2
        for optimizer in optimizers:
            optimizer.step()
    twin = copy.deepcopy(found[0])
    assert_all_same(results(twin, routed()), results(found[1], routed()))
    with torch.no_grad():
        for experts in (twin, found[1]):
            experts.down_proj.mul_(2)
    assert_all_same(results(twin, routed()), results(found[1], routed()))
    if how == "converted":
        tp.convert(found[0], recipe, cache_weights=False)
        assert not found[0].cache_weights
    else:
        hf.set_recipe(found[0], recipe, cache_weights=False)
    made.clear()
    results(found[0], routed())
    assert not made


def test_converted_linear_layers(made: list[Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    x = torch.randn(8, 64)
    tp.convert(model, Float8BlockScaling(), cache_weights=True)
    for _ in range(3):
        model(x).sum().backward()
    assert len(made) == 2
    tp.convert(model, Float8BlockScaling())
    model(x)
    assert len(made) == 4


def test_a_merge_that_fails_halfway() -> None:
    """The first of two adapters is in the weight when the second raises."""
    peft = pytest.importorskip("peft")
    base = Linear(64, 64, recipe=Float8BlockScaling(), cache_weights=True)
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, r=4)
    model = peft.get_peft_model(torch.nn.Sequential(base), config, adapter_name="a")
    model.add_adapter("b", config)
    adapted = model.base_model.model[0]
    delta = adapted.get_delta_weight

    def fails(name: str) -> Tensor:
        if name == "b":
            raise RuntimeError("no b")
        return delta(name)

    adapted.get_delta_weight = fails
    x = torch.randn(8, 64)
    before = base(x)
    with pytest.raises(RuntimeError, match="no b"):
        adapted.merge(adapter_names=["a", "b"])
    assert_same_bits(base(x), fresh(base)(x))
    assert not torch.equal(base(x), before)


def test_merged_adapters() -> None:
    """PEFT adds to ``weight.data``, which torch does not count."""
    base = caching()
    wrapped = peft().get_peft_model(torch.nn.Sequential(base), peft().LoraConfig(r=2, target_modules=["0"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(8, 64)
    for act in ("merge_adapter", "unmerge_adapter", "merge_adapter", "merge_and_unload"):
        before = base(x)
        getattr(wrapped, act)()
        assert_same_bits(base(x), fresh(base)(x))
        assert act == "merge_and_unload" or not torch.equal(base(x), before)


# --- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("used", [False, True])
def test_captured_forwards_quantize(used: bool) -> None:
    """A graph reads the weight that is there when it is replayed."""
    layer = caching("cuda")
    x = torch.randn(32, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    if used:
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(x)
    for _ in range(2):
        layer.weight.data.mul_(2)  # not counted
        graph.replay()
        assert_same_bits(output.detach(), fresh(layer).cuda()(x).detach())


@pytest.mark.gpu
def test_captured_steps() -> None:
    """Their replays call no hook and change no version."""
    layer = caching("cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=True)
    x = torch.randn(32, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).sum().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        before = layer(x)
        graph.replay()
        assert not torch.equal(layer(x), before)
        assert_same_bits(layer(x), fresh(layer).cuda()(x))


@pytest.mark.gpu
def test_other_streams(made: list[Any]) -> None:
    """A stream that did not make the copy would not wait for it."""
    layer = caching("cuda")
    x = torch.randn(32, 64, device="cuda")
    stream = torch.cuda.Stream()
    layer(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert len(made) == 2
    assert_same_bits(output, fresh(layer).cuda()(x))


@pytest.mark.gpu
def test_memory_of_a_step() -> None:
    """It is that of the copy, and returns with the cache."""
    layer = Linear(4096, 4096, False, recipe=Float8BlockScaling(), cache_weights=True, device="cuda")
    x = torch.randn(128, 4096, device="cuda")
    for _ in range(2):
        layer(x).sum().backward()
    before = torch.cuda.memory_allocated()
    layer.cache_weights = False
    returned = before - torch.cuda.memory_allocated()
    expected = tp.ops.quantize_weight(layer.weight.detach(), *layer._formats)
    assert returned == pytest.approx(sum(t.numel() * t.element_size() for t in expected), rel=0.01)
