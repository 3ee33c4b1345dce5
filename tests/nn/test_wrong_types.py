"""Any value for a size or input of a layer, and for arguments of expert parallelism: it is valid, or an error of four
parts, never one of torch or Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.ops.test_wrong_types import OTHERS, WITHOUT_STRIDES
from transformer_plugin.parallel import (
    EpBuffer,
    EpContext,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
)

FOUR_PARTS = (
    r"transformer_plugin(::|\.|\.nn\.)[\w.]+: (argument|attribute) '[\w\[\]]+': expected .*, got .*\. \S"
)
RECIPES = (
    *(
        "Recipe",
        "BFloat16",
        "Float8CurrentScaling",
        "Float8RowwiseScaling",
        "DelayedScaling",
        "Float8BlockScaling",
    ),
    *("MXFP8BlockScaling", "NVFP4BlockScaling"),
)
SIZES: dict[str, tuple[str, ...]] = {
    "Linear": ("in_features", "out_features"),
    "GroupedLinear": ("num_groups", "in_features", "out_features"),
    "GroupedMLP": ("num_groups", "hidden", "ffn_hidden"),
    "LayerNormLinear": ("in_features", "out_features"),
    "LayerNorm": ("normalized_shape",),
    "MoE": ("hidden", "ffn_hidden", "num_experts", "topk"),
    "RMSNorm": ("normalized_shape",),
    "TopKRouter": ("hidden", "num_experts", "topk"),
}


def sizes_of(name: str) -> dict[str, Any]:
    return {size: {"topk": 2, "num_experts": 4}.get(size, 8) for size in SIZES[name]}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(tp.nn.Linear(32, 32))


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(32, 32))


def quantized() -> dict[str, Any]:
    value = tp.quantize(torch.ones(32, 32), "fp8_block")
    return {"rowwise_data": value.rowwise_data, "scale_inv": value.scale_inv, "format": "fp8_block"}


#: Functions and classes with their valid arguments.
OWNERS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    **{name: (getattr(tp.recipes, name), dict) for name in RECIPES},
    "Format": (tp.formats.Format, lambda: {"family": "fp8_block"}),
    "recipe_from_name": (tp.recipes.recipe_from_name, lambda: {"name": "mxfp8"}),
    "DispatchConfig": (tp.nn.DispatchConfig, dict),
    "RouterConfig": (tp.nn.RouterConfig, dict),
    "QuantizedWeight": (tp.nn.QuantizedWeight, lambda: {"weight": weight(), "formats": ("mxfp8",) * 3}),
    "MasterWeights": (tp.optim.MasterWeights, lambda: {"parameters": [weight()], "make": torch.optim.SGD}),
    "refresh_after": (tp.optim.refresh_after, lambda: {"optimizer": torch.optim.SGD([weight()])}),
    "clip_grad_norm_": (tp.clip_grad_norm_, lambda: {"parameters": model(), "max_norm": 1.0}),
    "convert": (tp.convert, lambda: {"model": torch.nn.Sequential(torch.nn.Linear(32, 32))}),
    "quantized_init": (tp.quantized_init, lambda: {"recipe": tp.recipes.MXFP8BlockScaling()}),
    "explain_support": (tp.explain_support, lambda: {"recipe": None, "device": "cpu"}),
    "reduce_amax": (tp.nn.reduce_amax, lambda: {"model": model()}),
    "shard_": (tp.parallel.shard_, lambda: {"module": model(), "group": None}),
    "set_gather_order": (tp.parallel.set_gather_order, lambda: {"layers": list(model().children())}),
    "initialize_full_params": (tp.parallel.initialize_full_params, lambda: {"module": model()}),
    "full_state_dict": (tp.parallel.full_state_dict, lambda: {"module": model()}),
    "full_weight": (tp.parallel.full_weight, lambda: {"parameter": weight()}),
    "data_parallel": (tp.parallel.data_parallel, lambda: {"model": model()}),
    "fully_shard": (tp.parallel.fully_shard, lambda: {"module": model(), "mesh": None}),
    "quantize_all_gather": (tp.parallel.quantize_all_gather, lambda: {"model": model()}),
    "attach_distributed_weights": (tp.parallel.attach_distributed_weights, lambda: {"module": model()}),
    "GroupedTensor": (tp.GroupedTensor, lambda: {"rowwise_data": torch.ones(2, 32, 32)}),
    "QuantizedTensor": (tp.QuantizedTensor, quantized),
}


def others_are_named(
    function: Callable[..., Any],
    arguments: Callable[[], dict[str, Any]],
    names: Any,
    others: tuple[Any, ...] = (object(), *OTHERS),
) -> None:
    for name in names:
        for value in others:
            try:
                function(**{**arguments(), name: value})
            except (ValueError, TypeError) as error:
                assert re.match(FOUR_PARTS, str(error), re.DOTALL), f"{name}={value!r}: {error}"


@pytest.mark.parametrize("name", SIZES)
def test_constructors(name: str) -> None:
    """Every argument; options are True or False, not what Python takes for one of them."""
    layer = getattr(tp.nn, name)
    names = inspect.signature(layer).parameters
    others_are_named(layer, lambda: sizes_of(name), (*SIZES[name], "dtype"))
    others = (object(), np.ones((2, 2)), torch.nn.Parameter(torch.ones(2, 2)), "", "text", -1, 1.5)
    others_are_named(layer, lambda: sizes_of(name), names, others)
    for option in (o for o, p in names.items() if isinstance(p.default, bool)):
        for wrong in ("yes", 1, torch.tensor(True)):
            with pytest.raises(
                TypeError, match=rf"{name}: argument '{option}': expected True or False, got "
            ):
                layer(**{**sizes_of(name), option: wrong})


@pytest.mark.parametrize("name", OWNERS)
def test_functions_and_configurations(name: str) -> None:
    """Others than layers: helpers of models, recipes, formats, optimizers, quantized copies."""
    function, make = OWNERS[name]
    arguments = inspect.signature(function).parameters
    names = [n for n, p in arguments.items() if p.kind != p.VAR_KEYWORD]
    assert all(n in make() for n in names if arguments[n].default is inspect.Parameter.empty)

    def call(**arguments: Any) -> None:
        result = function(**arguments)
        if hasattr(result, "__enter__"):
            with result:
                pass

    others = (object(), np.ones((2, 2)), torch.nn.Parameter(torch.ones(2, 2)), *OTHERS[:10])
    others_are_named(call, make, names, others)


@pytest.mark.parametrize("wrong", [-1, -8, -(2**62)])
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_negative_sizes(name: str, size: str, wrong: int) -> None:
    with pytest.raises(ValueError) as caught:
        getattr(tp.nn, name)(**{**sizes_of(name), size: wrong})
    assert str(caught.value).startswith(
        f"transformer_plugin::{name}: argument '{size}': expected from 0 to 2^31 - 1, got {wrong}. "
    )


@pytest.mark.parametrize("name", SIZES)
def test_inputs(name: str) -> None:
    layer, arguments = called(name)
    others_are_named(layer, lambda: arguments, inspect.signature(layer.forward).parameters)


def called(name: str, **options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A layer and the arguments of a valid call, with the factors of rows."""
    if name == "Embedding":
        return tp.nn.Embedding(8, 8), {"input": torch.tensor([3])}
    scaled = {"scale_bias": True} if name == "GroupedLinear" else {}
    layer = getattr(tp.nn, name)(**sizes_of(name), **scaled, **options)
    grouped = {"group_sizes": torch.tensor([1] * 8)} if name.startswith("Grouped") else {}
    factor = {"GroupedMLP": "probs", "GroupedLinear": "bias_scale"}.get(name)
    first, *_ = inspect.signature(layer.forward).parameters
    arguments = {first: torch.ones(8, 8), **grouped, **({factor: torch.ones(8)} if factor else {})}
    layer(**arguments)
    return layer, arguments


@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("name", [*SIZES, "Embedding"])
def test_dtypes_of_inputs(name: str, dtype: torch.dtype) -> None:
    """Codes, flags and complex numbers are no numbers of a layer: none is converted without a word."""
    layer, arguments = called(name)
    owner = rf"transformer_plugin::{name}: " if name in ("MoE", "TopKRouter") else ""
    for argument, value in arguments.items():
        with pytest.raises(TypeError, match=owner or FOUR_PARTS) as caught:
            layer(**{**arguments, argument: value.to(dtype)})
        assert re.match(FOUR_PARTS, str(caught.value), re.DOTALL)
        assert "Convert it with .to() first." in str(caught.value), argument


@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.parametrize("recipe", [None, tp.recipes.DelayedScaling()], ids=["plain", "delayed"])
@pytest.mark.parametrize("name", [*SIZES, "Embedding"])
def test_inputs_without_strides(name: str, recipe: Any, kind: str) -> None:
    """Nested and sparse tensors are named in the same words by all layers, also where a layer reads sizes itself."""
    if recipe is not None and "recipe" not in inspect.signature(getattr(tp.nn, name)).parameters:
        return
    layer, arguments = called(name, **({} if recipe is None else {"recipe": recipe}))
    for argument in arguments:
        for autocast in (False, True):
            with pytest.raises(TypeError) as caught, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                layer(**{**arguments, argument: WITHOUT_STRIDES[kind]})
            assert re.match(FOUR_PARTS, str(caught.value), re.DOTALL), argument
            if kind != "qint8":  # its dtype is named first
                assert "expected a tensor whose numbers lie in memory by strides" in str(caught.value)


@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.parametrize(
    "name", ["Linear", "LayerNormLinear", "GroupedLinear", "Embedding", "TopKRouter", "RMSNorm"]
)
def test_weights_without_strides(name: str, kind: str) -> None:
    """Assigned, or written into the parameters of a layer: the op of the layer names its own argument."""
    layer, arguments = called(name)
    same = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "mkldnn": Tensor.to_mkldnn}
    fits = kind in same and layer.weight.dim() > 1
    value = same[kind](layer.weight.detach()) if fits else WITHOUT_STRIDES[kind]
    weight = torch.nn.Parameter(value, requires_grad=False)
    if name not in ("TopKRouter", "RMSNorm"):
        with pytest.raises(TypeError, match=f"transformer_plugin::{name}: argument 'weight'") as caught:
            layer.weight = weight
        assert re.match(FOUR_PARTS, str(caught.value), re.DOTALL)
    layer._parameters["weight"] = weight
    with pytest.raises(TypeError) as caught:
        layer(**arguments)
    assert re.match(FOUR_PARTS, str(caught.value), re.DOTALL)
    assert "argument 'weight" in str(caught.value) and "gemm" not in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_STRIDES if kind != "qint8"])
def test_optimizers_refuse_tensors_without_strides(kind: str) -> None:
    """Of qint8 there is no parameter with a gradient."""
    other = torch.nn.Parameter(WITHOUT_STRIDES[kind])
    calls: list[Callable[[], Any]] = [
        lambda: tp.optim.MasterWeights([other], lambda weights: torch.optim.SGD(weights, lr=0.1)),
        lambda: tp.optim.Muon([other]),
    ]
    if kind == "coo":  # the only one that torch takes as the gradient of a plain parameter
        parameter = weight()
        parameter.grad = WITHOUT_STRIDES[kind]
        calls.append(lambda: tp.clip_grad_norm_([parameter], 1.0))
    for call in calls:
        with pytest.raises(TypeError, match="by strides") as caught:
            call()
        assert re.match(FOUR_PARTS, str(caught.value), re.DOTALL)


CONTEXT = {"num_experts": 4, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_topk": 2}
TOKENS, INDICES, WEIGHTS = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)


def test_contexts() -> None:
    others_are_named(EpContext, lambda: {"group": None, **CONTEXT}, inspect.signature(EpContext).parameters)
    context = EpContext(None, **CONTEXT)  # type: ignore[arg-type]
    plan = context.plan(INDICES)
    rows, _ = context.dispatch(plan, TOKENS, WEIGHTS)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (context.plan, {"topk_idx": INDICES}),
        (context.dispatch, {"plan": plan, "tokens": TOKENS, "topk_weights": WEIGHTS}),
        (context.combine, {"plan": plan, "rows": rows}),
    ]
    for call, arguments in calls:
        others_are_named(call, lambda a=arguments: a, inspect.signature(call).parameters)


def test_functions_with_the_names_of_transformer_engine() -> None:
    def bootstrap(**arguments: Any) -> None:
        ep_finalize()
        ep_bootstrap(**arguments)

    try:
        arguments = {"ep_group": None, **CONTEXT}
        others_are_named(bootstrap, lambda: arguments, inspect.signature(ep_bootstrap).parameters)
        bootstrap(**arguments)
        buffer = EpBuffer(2, 8, 3, 4)
        ep_dispatch(buffer, TOKENS, INDICES, WEIGHTS)
        routed = {"tokens": TOKENS, "topk_idx": INDICES, "topk_weights": WEIGHTS}
        made = {"top_k": 2, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_local_experts": 4}
        calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (EpBuffer, made),
            (ep_prepare, {"buffer": buffer, "topk_idx": INDICES}),
            (ep_dispatch, {"buffer": buffer, **routed}),
            (ep_combine, {"buffer": buffer, "expert_out": torch.ones(buffer.recv_capacity_per_rank, 3)}),
        ]
        for call, given in calls:
            others_are_named(call, lambda g=given: g, inspect.signature(call).parameters)
    finally:
        ep_finalize()
