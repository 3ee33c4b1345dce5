"""What optimizers and torch's clipping do with parts of weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.parallel._layer_shards import note_shards, refuse_computed, refuse_replaced
from transformer_plugin.parallel._part_states import handle_optimizer
from transformer_plugin.parallel._tensor_slices import EXPERTS, slices_of
from transformer_plugin.parallel._weight_part import WEIGHT_PART, WeightPart, part_of
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message


def watch_parts() -> None:
    """Once per process: state dicts of torch's optimizers, and torch's clipping, take note of parts."""
    _watch_optimizers()
    _watch_clipping()
    watch_parametrizations()


@functools.cache
def _watch_optimizers() -> None:
    """Once per process: steps of torch's optimizers change weights, and one of whole weights has no effect."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    optimizer: Any = torch.optim.Optimizer
    for name in ("state_dict", "load_state_dict"):
        setattr(optimizer, name, _handling(getattr(optimizer, name)))
    register_optimizer_step_pre_hook(_check_parameters)
    register_optimizer_step_post_hook(_after_step)


@functools.cache
def _watch_clipping() -> None:
    """Once per process: torch's clipping would count this rank's rows alone."""
    from torch.nn.utils import clip_grad

    original: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(original)
    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        note_shards()
        _refuse_parts(parameters, "clip_grad_norm_", "parameters", "parallel.clip_grad_norm_")
        return original(parameters, *arguments, **options)

    for module in (clip_grad, torch.nn.utils):
        for name in ("_clip_grads_with_norm_", "clip_grads_with_norm_"):
            if hasattr(module, name):
                setattr(module, name, clip)


@functools.cache
def watch_parametrizations() -> None:
    """Once per process: torch changes a parameter, or its layer, before the layer could refuse a parametrization."""
    from torch.nn.utils.parametrize import ParametrizationList
    from torch.nn.utils.weight_norm import WeightNorm

    make: Any = ParametrizationList.__init__
    apply: Any = WeightNorm.apply

    @functools.wraps(make)
    def checked_make(self: Any, modules: Any, original: Any, *arguments: Any, **options: Any) -> None:
        note_shards()
        refuse_computed(original, "register_parametrization")
        make(self, modules, original, *arguments, **options)

    @functools.wraps(apply)
    def checked_apply(module: Any, name: str, *arguments: Any, **options: Any) -> Any:
        note_shards()
        weight = getattr(module, name)
        refuse_computed(weight, "weight_norm", name)
        if isinstance(weight, FormatTensor):  # whose norm raises after the parameter was removed
            got, advice = f"a {weight._described()}", "Make the layer without quantized_init"
            raise ValueError(message("weight_norm", name, "a plain parameter", got, advice))
        return apply(module, name, *arguments, **options)

    ParametrizationList.__init__ = checked_make  # type: ignore[method-assign]
    WeightNorm.apply = staticmethod(checked_apply)  # type: ignore[method-assign]


def _refuse_parts(parameters: Iterable[Tensor], op: str, argument: str, instead: str) -> None:
    """Raises if one of the parameters is a part of a whole that ``op`` would need."""
    found: Any = next(filter(None, (part_of(p) or slices_of(p) for p in parameters)), None)
    if found is not None:
        name = "experts" if getattr(found, "kind", "") == EXPERTS else "a tensor-parallel parameter"
        name = f"'{found.name}'" if isinstance(found, WeightPart) else name
        got = f"{name}, of which each of {len(found.ranks)} ranks has a part"
        raise ValueError(message(op, argument, "whole parameters", got, f"Use transformer_plugin.{instead}"))


def _handling(method: Any) -> Any:
    """A method of optimizers that first takes note of parts among the parameters."""

    @functools.wraps(method)
    def call(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        note_shards()
        handle_optimizer(optimizer)
        return method(optimizer, *arguments, **options)

    return call


def _check_parameters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    note_shards()
    for settings in optimizer.param_groups:
        refuse_replaced(settings["params"])
        if isinstance(optimizer, torch.optim.Muon) and not getattr(optimizer, "handles_parts", False):
            _refuse_parts(settings["params"], "torch.optim.Muon", "params", "optim.Muon")


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    from transformer_plugin.parallel._quantized_part import refresh_together

    if torch.compiler.is_compiling():
        return
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    parts = [parameter for parameter in parameters if WEIGHT_PART in parameter.__dict__]
    if not parts:
        return
    ops.note_weights_changed()
    copies = {id(c): c for part in parts for c in part.__dict__.get("quantized_copies", ())}
    refresh_together([copy for copy in copies.values() if copy.refreshes_itself], None)
