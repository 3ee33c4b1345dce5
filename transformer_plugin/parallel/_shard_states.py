"""State dicts of modules and optimizers with weights that are sharded over ranks: they hold and load full weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.parallel._layer_shards import note_layer
from transformer_plugin.parallel._parameter_shard import layout_of
from transformer_plugin.parallel._shard_experts import delayed_buffers
from transformer_plugin.parallel._shard_tensor import ShardTensor, shard_for, values_of
from transformer_plugin.parallel._tensor_slices import EXPERTS, ShardLayout, even_slices
from transformer_plugin.tensor._layout import message

#: Set on layers and optimizers whose state dicts are handled.
_HANDLED = "_has_states_of_shards"


def handle_module(layer: torch.nn.Module) -> None:
    """For each layer with shards of parameters; nothing a second time."""
    if getattr(layer, _HANDLED, False):
        return
    setattr(layer, _HANDLED, True)
    layer.register_state_dict_post_hook(_save_module)
    layer.register_load_state_dict_pre_hook(_load_module)


def _save_module(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, layout in _layouts(layer).items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):  # not with keep_vars
            state[prefix + name] = ShardTensor(values_of(value), layout)


def _layouts(layer: torch.nn.Module) -> dict[str, ShardLayout]:
    note_layer(layer)
    found = {name: layout_of(p) for name, p in layer._parameters.items() if p is not None}
    layouts = {name: layout for name, layout in found.items() if layout is not None}
    return {**layouts, **_layouts_of_delayed_scaling(layer)}


def _layouts_of_delayed_scaling(layer: Any) -> dict[str, ShardLayout]:
    """Of the buffers ``[..., 3 * G]``: the values of input, weight and gradient of this rank's experts."""
    of_weight = getattr(layer, "tensor_slices", {}).get("weight")
    if of_weight is None or of_weight.kind != EXPERTS:
        return {}
    size = 3 * of_weight.size
    pieces = even_slices(size, len(of_weight.ranks), 3 * (of_weight.size,))
    found = {}
    for name, buffer in delayed_buffers(layer).items():
        sizes = {"size": size, "local_size": buffer.shape[-1], "pieces": pieces}
        slices = dataclasses.replace(of_weight, dim=buffer.dim() - 1, **sizes)
        found[name] = ShardLayout((*buffer.shape[:-1], size), slices)
    return found


def _load_module(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, layout in _layouts(layer).items():
        key = prefix + name
        if isinstance(state.get(key), Tensor):
            state[key] = shard_for(state[key], layout, key)


def handle_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of a shard a :class:`ShardTensor` in ``state_dict()``; nothing without shards, or again."""
    if getattr(optimizer, _HANDLED, False):
        return
    if not any(layout_of(p) for settings in optimizer.param_groups for p in settings["params"]):
        return
    optimizer.register_state_dict_post_hook(_save_optimizer)
    optimizer.register_load_state_dict_pre_hook(_load_optimizer)
    setattr(optimizer, _HANDLED, True)


def _shards_by_key(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[Any, tuple[Tensor, ShardLayout]]:
    """By what a state dict calls the parameters, in their order."""
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    keys = [key for settings in state["param_groups"] for key in settings["params"]]
    found = ((key, p, layout_of(p)) for key, p in zip(keys, parameters, strict=False))
    return {key: (p, layout) for key, p, layout in found if layout is not None}


def _save_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    states = dict(state["state"])
    for i, (parameter, layout) in _shards_by_key(optimizer, state).items():
        if i in states:
            states[i] = {name: _saved(name, value, parameter, layout) for name, value in states[i].items()}
    return {**state, "state": states}


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    states = dict(state["state"])
    for i, (_, layout) in _shards_by_key(optimizer, state).items():
        if i not in states:
            continue
        states[i] = {
            name: shard_for(value, layout, f"{i}.{name}")
            if isinstance(value, Tensor) and tuple(value.shape) == layout.shape
            else value
            for name, value in states[i].items()
        }
    return {**state, "state": states}


def _saved(name: str, value: Any, parameter: Tensor, layout: ShardLayout) -> Any:
    """A value of an optimizer's state: that of each element, or one number."""
    if not isinstance(value, Tensor) or value.numel() <= 1 < parameter.numel():
        return value
    if value.shape == parameter.shape:
        return ShardTensor(value, layout)
    expected = f"one value for each element, or one for all, of a parameter of sizes {list(parameter.shape)}"
    got = f"sizes {list(value.shape)}, which are other values on each rank"
    advice = "Use an optimizer that treats elements one by one, such as AdamW"
    raise ValueError(message("state_dict", name, expected, got, advice))
