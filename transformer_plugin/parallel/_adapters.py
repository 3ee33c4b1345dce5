"""Layers of which each rank has a shard or slices, in the adapters of PEFT.

An adapter reads the sizes and the weight of the layer that it wraps, its ``base_layer``. On sharded weights LoRA and
IA3 of modules call the layer alone, and merge into its full weight, which is gathered for that. What would take this
rank's elements for all of them is an error. PEFT need not be installed: its classes are recognized when they get a
layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch

from transformer_plugin._arguments import class_name
from transformer_plugin.parallel._layer_shards import described, note_layer
from transformer_plugin.parallel._shard_experts import EXPERT_RANKS
from transformer_plugin.tensor._layout import message

#: Adapters that read no weight in their forward, by module and class.
_BESIDE_LAYERS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.layer.Embedding",
    "peft.tuners.ia3.layer.Linear",
)
#: Initial values of LoRA that do not depend on the weight, beside True and False.
_OWN_VALUES = ("gaussian", "orthogonal", "eva")


def check_adapter(adapter: Any, name: str, layer: Any) -> None:
    """A hook for modules that get a submodule: raises if it is a layer that the adapter would take for a full one."""
    if name == "base_layer" and layer is not None and _is_adapter(adapter):
        _check(adapter, _innermost(layer), ())


def check_adapters(module: torch.nn.Module, targets: Iterable[Any]) -> None:
    """Raises if adapters in a module are around layers that cannot be sharded with them.

    Args:
        module: what is going to be sharded.
        targets: the weights that are: ``module``, and its name in it, ``key``.
    """
    coming: dict[int, tuple[str, ...]] = {}
    for target in targets:
        coming[id(target.module)] = (*coming.get(id(target.module), ()), target.key)
    for adapter in module.modules():
        if _is_adapter(adapter) and hasattr(adapter, "base_layer"):
            layer = _innermost(adapter)
            _check(adapter, layer, coming.get(id(layer), ()))


def _check(adapter: Any, layer: Any, coming: tuple[str, ...]) -> None:
    """``coming``: the weights that will be shards."""
    parameter = getattr(adapter, "parameter_name", None)  # of an adapter of one parameter
    experts = getattr(layer, EXPERT_RANKS, None)
    if parameter is not None and experts is not None and len(experts.ranks) > 1:
        got = f"experts that are sharded over the ranks {list(experts.ranks)}"
        _refuse(adapter, layer, parameter, got, "Leave the experts out of target_parameters")
    slices, shards = getattr(layer, "tensor_slices", {}), (*getattr(layer, "parameter_shards", ()), *coming)
    name = "weight" if parameter is None else parameter
    if name in slices:
        _refuse(
            adapter, layer, name, _described(layer, name), "Leave tensor-parallel layers out of the adapters"
        )
    kind: Any = type(adapter)
    if parameter is None and shards:
        if f"{kind.__module__}.{kind.__qualname__}" not in _BESIDE_LAYERS:
            _refuse(adapter, layer, shards[0], _described(layer, shards[0]), _ADVICE)
        for variant in getattr(adapter, "lora_variant", {}).values():
            _refuse_variant(adapter, layer, type(variant).__name__)
        _gather_to_merge(kind)
    elif name in shards:
        _refuse(adapter, layer, name, _described(layer, name), _ADVICE)


_ADVICE = "Use LoRA or IA3 of modules, without variants such as DoRA, or leave the layer out of shard_"


@functools.cache
def _gather_to_merge(kind: Any) -> None:
    """Once for each class: it merges into full weights, and makes no adapter that would read a shard."""
    for name in ("merge", "unmerge"):
        setattr(kind, name, _with_full_weights(getattr(kind, name)))
    kind.update_layer = _without_weights(kind.update_layer)


def _with_full_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        layer = self.get_base_layer()
        if not getattr(layer, "parameter_shards", None):
            return method(self, *arguments, **options)
        with _full_weights(layer):
            return method(self, *arguments, **options)

    return call


@contextmanager
def _full_weights(layer: Any) -> Iterator[None]:
    """Context in which a layer has its full weights, of which it keeps this rank's shards. All ranks call it."""
    from transformer_plugin.nn._tensor_parallel import initialize_full_params
    from transformer_plugin.parallel.full_state import full_weight

    note_layer(layer)
    values = {name: full_weight(layer._parameters[name]) for name in layer.parameter_shards}
    with initialize_full_params(layer):
        for name, value in values.items():
            layer._parameters[name].data = value
        yield


def _without_weights(update_layer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update_layer)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        layer, config = self.get_base_layer(), cast(Any, options.get("config"))
        if getattr(layer, "parameter_shards", None) and hasattr(self, "resolve_lora_variant"):
            variant = self.resolve_lora_variant(config=config)
            if variant is not None:
                _refuse_variant(self, layer, type(variant).__name__)
            init = config.init_lora_weights
            if isinstance(init, str) and init not in _OWN_VALUES:
                advice = "Make the adapters before shard_, or use another init_lora_weights"
                got = f"{_described(layer, 'weight')}, with init_lora_weights={init!r}"
                _refuse(self, layer, "weight", got, advice)
        return update_layer(self, *arguments, **options)

    return call


def _is_adapter(module: Any) -> bool:
    return any(
        c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in type(module).__mro__
    )


def _innermost(layer: Any) -> Any:
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


def _described(layer: Any, name: str) -> str:
    note_layer(layer)
    parameter = layer._parameters[name]
    is_noted = name in getattr(layer, "parameter_shards", ()) or name in getattr(layer, "tensor_slices", ())
    return (
        described(parameter) if is_noted else f"one of sizes {list(parameter.shape)} that shard_ would divide"
    )


def _refuse_variant(adapter: Any, layer: Any, variant: str) -> NoReturn:
    _refuse(adapter, layer, "weight", f"{_described(layer, 'weight')}, with {variant}", _ADVICE)


def _refuse(adapter: Any, layer: Any, name: str, got: str, advice: str) -> NoReturn:
    expected = f"a parameter of which this rank has all elements, as the adapter {type(adapter).__qualname__} reads it"
    raise ValueError(message(class_name(layer), name, expected, got, advice))
