"""Unsharded weights of another runtime that are quantized or in another dtype than its shards, and compiled code."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placed

import transformer_plugin as tp
from tests.parallel.external_layers import (
    KINDS,
    RECIPES,
    Convert,
    Shard,
    batch,
    driven,
    layer_of,
    run,
    unchanged,
)
from transformer_plugin import recipes
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def quantized(key: str) -> Convert:
    """What a runtime that gathers bytes has: one direction at a time."""

    def convert(full: Tensor, backward: bool) -> Any:
        return tp.quantize(full, key, rowwise=not backward, columnwise=backward)

    return convert


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("none", "bf16")])
def test_quantized_weights_are_multiplied_as_they_are(kind: str, name: str, device: torch.device) -> None:
    recipe: Any = RECIPES[name]
    layer, full = (layer_of(kind, recipe, device=device) for _ in range(2))
    driven(layer, quantized(recipe.weight_format))
    results = []
    for each in (layer, full):
        torch.manual_seed(2)
        results.append(run(each, kind))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["none", "bf16", "mxfp8"])
def test_quantized_weights_of_other_formats_are_dequantized(
    kind: str, name: str, device: torch.device
) -> None:
    layer, full = (layer_of(kind, RECIPES[name], device=device) for _ in range(2))
    driven(layer, lambda values, backward: tp.quantize(values, "fp8_tensor"))
    with torch.no_grad():
        for parameter in (p for n, p in full.named_parameters() if "weight" in n and "norm" not in n):
            each = parameter if parameter.dim() == 3 else parameter[None]
            each.copy_(torch.stack([tp.quantize(matrix, "fp8_tensor").dequantize() for matrix in each]))
    for got, wanted in zip(run(layer, kind), run(full, kind), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["none", "bf16", "fp8_block"])
@pytest.mark.parametrize("gathers", [torch.float32, torch.bfloat16], ids=str)
def test_float32_shards(kind: str, name: str, gathers: torch.dtype, device: torch.device) -> None:
    """Of a layer in float32, under autocast, and with inputs in bfloat16; gathered in float32 or bfloat16."""

    def made() -> tuple[Any, Any]:
        layer, full = (layer_of(kind, RECIPES[name], device=device) for _ in range(2))
        driven(layer, lambda values, backward: values.to(gathers))
        with torch.no_grad():
            for parameter in (p for n, p in full.named_parameters() if "weight" in n and "norm" not in n):
                parameter.copy_(parameter.to(gathers))
        return layer, full

    def same(layer: Any, full: Any, dtype: torch.dtype) -> None:
        results = [run(each, kind, dtype) for each in (layer, full)]
        for got, wanted in zip(*results, strict=True):
            assert_same_bits(got, wanted)
        weights = getattr(layer, "_weight_names", ("weight",))
        for weight, of_full in ((layer._parameters[n], full._parameters[n]) for n in weights):
            assert weight.grad.dtype == torch.float32 and weight.grad.shape == weight.shape
            own = of_full.grad[: weight.shape[0]].float()
            torch.testing.assert_close(weight.grad, own, rtol=2.0**-7, atol=1e-6)

    same(*made(), torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        results = made()
        same(*results, torch.float32)
    layer, full = made()
    for parameter in layer.parameters():
        if not isinstance(parameter, Shard):
            parameter.data = parameter.bfloat16()
    same(layer, full.bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocasts", [False, True])
def test_float16(kind: str, autocasts: bool, device: torch.device) -> None:
    """Whose gradients of stacks no op writes into a buffer."""
    dtype = torch.float32 if autocasts else torch.float16
    layer, full = (layer_of(kind, dtype=dtype, device=device) for _ in range(2))
    driven(layer)
    with torch.autocast(device.type, torch.float16, enabled=autocasts):
        results = [run(each, kind, dtype) for each in (layer, full)]
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)
    for name in getattr(layer, "_weight_names", ("weight",)):
        weight, of_full = layer._parameters[name], full._parameters[name]
        assert weight.grad.dtype == dtype
        assert_same_bits(weight.grad, of_full.grad[: weight.shape[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_reads_its_own_weights(kind: str) -> None:
    """As an average of weights does, while the layer that was copied goes on."""
    layer = layer_of(kind)
    leader = driven(layer)
    copied = copy.deepcopy(layer)
    own = getattr(copied, getattr(copied, "_weight_names", ("weight",))[0])
    own.full, own.convert, own.calls, own.keeps = [2 * w for w in leader.full], unchanged, [], False
    x, *sizes, grad = batch(kind)
    bias = layer(torch.zeros_like(x), *sizes) if kind != "LayerNormLinear" else layer.bias
    calls = list(leader.calls)
    output = copied(x, *sizes)
    output.backward(grad)
    assert own.calls == ["forward", "backward", "finalize"] and leader.calls == calls
    assert own.grad is not None and leader.grad is None
    torch.testing.assert_close(output - bias, 2 * (layer(x, *sizes) - bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_refused(kind: str) -> None:
    layer = layer_of(kind)
    driven(layer)
    x, *sizes, _ = batch(kind)
    text = "argument 'weight': expected eager code with a weight that another runtime gathers"
    with pytest.raises(ValueError, match=text):
        torch.jit.trace(layer, (x.detach(), *sizes))


def check_dtensors(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for kind in KINDS:
        layer, full, sharded = (layer_of(kind, device=rank.device) for _ in range(3))
        driven(layer, lambda w, _: DTensor.from_local(w, mesh, [Replicate()]))
        for got, wanted in zip(run(layer, kind), run(full, kind), strict=True):
            assert_same_bits(got, wanted)
        driven(sharded, lambda w, _: DTensor.from_local(w.chunk(rank.size)[rank.rank], mesh, [Placed(0)]))
        with pytest.raises(ValueError, match="or DTensors that are replicated, got a DTensor of layout"):
            run(sharded, kind)


def test_dtensors(pair: RankPool) -> None:
    """Of which each rank has all elements; others would have to be gathered."""
    pair.run(check_dtensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_gradient", [True, False])
def test_compiled_code_is_refused(kind: str, with_gradient: bool) -> None:
    layer = layer_of(kind)
    driven(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, *sizes, _ = batch(kind)
    text = (
        r"argument 'weight(\[0\])?': expected eager code with a weight that another runtime gathers "
        r"\(attach_distributed_weights\), got '.*' in code that is compiled, exported or traced. Leave the layer out "
        r"with torch.compiler.disable\(layer\)"
    )
    with torch.set_grad_enabled(with_gradient), pytest.raises(Exception) as refused:
        compiled(x, *sizes)
    # torch may quote it, in quotes within quotes.
    assert re.search(text, str(refused.value).replace("\\", ""))
    torch._dynamo.reset()
    outside = torch.compile(torch.nn.Sequential(torch.compiler.disable(layer)), backend="aot_eager")
    if not sizes:
        assert_same_bits(outside(x).detach(), layer(x).detach())


RETURNED: dict[str, tuple[str, Any, str]] = {
    "too few": (
        "GroupedLinear list",
        lambda w, b: [w, w],
        "expected 3 tensors, got 2. Return what belongs to each",
    ),
    "too many": ("Linear", lambda w, b: [w, w], "expected 1 tensors, got 2"),
    "padding": (
        "GroupedLinear list",
        lambda w, b: [torch.cat([w, w])] * 3,
        "expected 96 rows, of the layer, got [192, 64]",
    ),
    "integers": (
        "Linear",
        lambda w, b: w.long(),
        "expected unsharded weights [N, 64] of numbers, got [96, 64] torch.int64",
    ),
    "of another device": (
        "GroupedLinear list",
        lambda w, b: [w, w, w.to("meta")],
        "expected plain or quantized tensors on cpu, or DTensors that are replicated, got a Tensor of layout",
    ),
    "sparse": ("Linear", lambda w, b: w.to_sparse(), "got a Tensor of layout torch.sparse_coo on cpu"),
    "columnwise for a forward": (
        "Linear",
        lambda w, b: tp.quantize(
            w, recipes.MXFP8BlockScaling().weight_format, rowwise=False, columnwise=True
        ),
        "expected rowwise data, for a forward, got",
    ),
    "rowwise for a backward": (
        "Linear",
        lambda w, b: tp.quantize(w, recipes.MXFP8BlockScaling().weight_format),
        "expected columnwise data, for a backward, got",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_runtime_must_return(name: str) -> None:
    kind, convert, text = RETURNED[name]
    layer = layer_of(kind, recipes.MXFP8BlockScaling())
    leader = driven(layer)
    leader._all = lambda backward: convert(leader.full[0], backward)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=re.escape(text)):
        run(layer, kind)


def test_a_recipe_that_is_set_later() -> None:
    layer = layer_of("Linear")
    driven(layer)
    layer.recipe = recipes.DelayedScaling()
    with pytest.raises(ValueError, match="expected a key without 'list' and 'handle'"):
        run(layer, "Linear")
