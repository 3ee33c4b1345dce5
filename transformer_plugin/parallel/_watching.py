"""What optimizers do with weights that have quantized copies, and they and torch's clipping with parts of weights."""

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
    watch_steps()
    _watch_state_dicts()
    _watch_clipping()
    watch_parametrizations()


@functools.cache
def watch_steps() -> None:
    """Once per process: steps of torch's optimizers change weights, and one of whole weights has no effect.

    torch does not count what a step with ``fused=True`` changes.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)


@functools.cache
def _watch_state_dicts() -> None:
    optimizer: Any = torch.optim.Optimizer
    for name in ("state_dict", "load_state_dict"):
        setattr(optimizer, name, _handling(getattr(optimizer, name)))


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
    from torch.nn.utils.parametrizations import _SpectralNorm
    from torch.nn.utils.parametrize import ParametrizationList
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    make: Any = ParametrizationList.__init__
    make_norm: Any = _SpectralNorm.__init__

    @functools.wraps(make)
    def checked_make(self: Any, modules: Any, original: Any, *arguments: Any, **options: Any) -> None:
        note_shards()
        refuse_computed(original, "register_parametrization")
        if any(type(module).__module__ == "torch.nn.utils.parametrizations" for module in modules):
            _refuse_experts(original, type(modules[0]).__name__.strip("_"))
        make(self, modules, original, *arguments, **options)

    @functools.wraps(make_norm)
    def checked_norm(self: Any, weight: Any, *arguments: Any, **options: Any) -> None:
        note_shards()
        refuse_computed(weight, "spectral_norm")
        _refuse_experts(weight, "spectral_norm")
        make_norm(self, weight, *arguments, **options)

    ParametrizationList.__init__ = checked_make  # type: ignore[method-assign]
    _SpectralNorm.__init__ = checked_norm  # type: ignore[method-assign]
    for kind, op in ((WeightNorm, "weight_norm"), (SpectralNorm, "spectral_norm")):
        kind.apply = staticmethod(_checked_apply(kind.apply, op))  # type: ignore[method-assign]


def _checked_apply(apply: Any, op: str) -> Any:
    """Of torch's older forms, which raise after they have removed the parameter."""

    @functools.wraps(apply)
    def checked(module: Any, name: str, *arguments: Any, **options: Any) -> Any:
        note_shards()
        weight = getattr(module, name, None)
        if isinstance(weight, Tensor):
            refuse_computed(weight, op, name)
            _refuse_experts(weight, op, name)
        if isinstance(weight, FormatTensor):
            got, advice = f"a {weight._described()}", "Make the layer without quantized_init"
            raise ValueError(message(op, name, "a plain parameter", got, advice))
        return apply(module, name, *arguments, **options)

    return checked


def _refuse_experts(weight: Any, op: str, name: str = "weight") -> None:
    """Raises for experts that are ``DTensor`` s: torch has no rules for the ops of its own parametrizations."""
    if not hasattr(weight, "placements"):
        return
    from transformer_plugin.parallel._sharded_parameter import ShardedParameter

    if isinstance(weight, ShardedParameter):
        got = f"a DTensor of sizes {list(weight.shape)} in {weight.placements[-1]}, experts that are sharded over ranks"
        advice = "Leave the experts as they are"
        raise ValueError(message(op, name, "a parameter of which this rank has all elements", got, advice))


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


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    note_shards()
    _check_parameters(optimizer)
    hooks: Any = optimizer._optimizer_step_post_hooks
    if _after_step not in hooks.values():
        # The first hook of this optimizer: what others quantize after the step is up to date.
        handle = optimizer.register_step_post_hook(_after_step)
        hooks.move_to_end(handle.id, last=False)


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    for settings in optimizer.param_groups:
        refuse_replaced(settings["params"])
        if isinstance(optimizer, torch.optim.Muon) and not getattr(optimizer, "handles_parts", False):
            _refuse_parts(settings["params"], "torch.optim.Muon", "params", "optim.Muon")


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Copies of whole weights are outdated; those of parts are made again."""
    from transformer_plugin.parallel._quantized_part import refresh_together

    if torch.compiler.is_compiling():
        return
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    if any(WEIGHT_PART in parameter.__dict__ for parameter in parameters):
        ops.note_weights_changed()
    copies: dict[int, Any] = {}
    for parameter in parameters:
        for copy in parameter.__dict__.get("quantized_copies", ()):
            if copy.refreshes_itself:
                copies[id(copy)] = copy
            elif parameter.grad is not None:
                copy.note_changed()
    if copies:
        refresh_together(copies.values(), None)
