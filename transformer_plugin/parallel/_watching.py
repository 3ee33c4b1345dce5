"""What optimizers do with weights that have quantized copies, and they and torch's clipping with shards of weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.parallel._layer_shards import note_shards, refuse_computed, refuse_replaced
from transformer_plugin.parallel._parameter_shard import PARAMETER_SHARD, ParameterShard, shard_of_parameter
from transformer_plugin.parallel._shard_states import handle_optimizer
from transformer_plugin.parallel._tensor_slices import EXPERTS, slices_of
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message


def watch_shards() -> None:
    """Once per process: state dicts of torch's optimizers, and torch's clipping, take note of shards."""
    watch_steps()
    _watch_state_dicts()
    _watch_clipping()
    watch_parametrizations()


@functools.cache
def watch_steps() -> None:
    """Once per process: steps of torch's optimizers change weights, and those of weights that shards have replaced
    have no effect.

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
        _refuse_shards(parameters, "clip_grad_norm_", "parameters", "parallel.clip_grad_norm_")
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
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    make: Any = ParametrizationList.__init__
    make_norm: Any = _SpectralNorm.__init__

    @functools.wraps(make)
    def checked_make(self: Any, modules: Any, original: Any, *arguments: Any, **options: Any) -> None:
        note_shards()
        refuse_computed(original, "register_parametrization")
        norms = [type(m).__name__ for m in modules if type(m).__module__ == "torch.nn.utils.parametrizations"]
        op = _OPS.get(norms[0], norms[0]) if norms else "register_parametrization"
        _refuse_values(original, op, has_views=not norms)
        if norms:
            _refuse_experts(original, op)
        make(self, modules, original, *arguments, **options)

    @functools.wraps(make_norm)
    def checked_norm(self: Any, weight: Any, *arguments: Any, **options: Any) -> None:
        note_shards()
        refuse_computed(weight, "spectral_norm")
        _refuse_values(weight, "spectral_norm")
        _refuse_experts(weight, "spectral_norm")
        make_norm(self, weight, *arguments, **options)

    ParametrizationList.__init__ = checked_make  # type: ignore[method-assign]
    _SpectralNorm.__init__ = checked_norm  # type: ignore[method-assign]
    for kind, op in ((WeightNorm, "weight_norm"), (SpectralNorm, "spectral_norm")):
        kind.apply = staticmethod(_checked_apply(kind.apply, op))  # type: ignore[method-assign]
    pruning: Any = BasePruningMethod
    pruning.apply = classmethod(_checked_prune(pruning.apply.__func__))
    _watch_global_pruning()


#: Functions of torch by their parametrizations.
_OPS = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}


def _checked_prune(apply: Any) -> Any:
    """Of each pruning method, which raises after it has moved the parameter."""

    @functools.wraps(apply)
    def checked(cls: Any, module: Any, name: str, *arguments: Any, **options: Any) -> Any:
        _refuse_pruning(module, name)
        return apply(cls, module, name, *arguments, **options)

    return checked


def _refuse_pruning(module: Any, name: str) -> None:
    weight = getattr(module, name, None)
    note_shards()
    refuse_computed(weight, "prune", name)
    _refuse_values(weight, "prune", name, has_views=True)


def _watch_global_pruning() -> None:
    """It computes with all weights before it prunes the first."""
    from torch.nn.utils import prune

    original: Any = prune.global_unstructured

    @functools.wraps(original)
    def global_unstructured(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        for module, name in parameters:
            _refuse_pruning(module, name)
        return original(parameters, *arguments, **options)

    prune.global_unstructured = global_unstructured


def _refuse_values(weight: Any, op: str, name: str = "weight", has_views: bool = False) -> None:
    """Raises for a quantized parameter, which has no numbers to compute from, and for an unquantized GroupedTensor
    unless ``op`` needs no other views of it than it has."""
    if not isinstance(weight, FormatTensor) or (has_views and not weight.format.is_quantized):
        return
    is_quantized = weight.format.is_quantized
    advice = "without quantized_init" if is_quantized else "with parameters='packed' or 'list'"
    got = f"a {weight._described()}"
    raise ValueError(message(op, name, "a plain parameter", got, f"Make the layer {advice}"))


def _checked_apply(apply: Any, op: str) -> Any:
    """Of torch's older forms, which raise after they have removed the parameter."""

    @functools.wraps(apply)
    def checked(module: Any, name: str, *arguments: Any, **options: Any) -> Any:
        note_shards()
        weight = getattr(module, name, None)
        if isinstance(weight, Tensor):
            refuse_computed(weight, op, name)
            _refuse_experts(weight, op, name)
        _refuse_values(weight, op, name)
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


def _refuse_shards(parameters: Iterable[Tensor], op: str, argument: str, instead: str) -> None:
    """Raises if one of the parameters is a shard of a tensor that ``op`` would need in full."""
    found: Any = next(filter(None, (shard_of_parameter(p) or slices_of(p) for p in parameters)), None)
    if found is not None:
        name = "experts" if getattr(found, "kind", "") == EXPERTS else "a tensor-parallel parameter"
        name = f"'{found.name}'" if isinstance(found, ParameterShard) else name
        got = f"{name}, of which each of {len(found.ranks)} ranks has a shard"
        raise ValueError(message(op, argument, "full parameters", got, f"Use transformer_plugin.{instead}"))


def _handling(method: Any) -> Any:
    """A method of optimizers that first takes note of shards among the parameters."""

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
        if isinstance(optimizer, torch.optim.Muon) and not getattr(optimizer, "handles_shards", False):
            _refuse_shards(settings["params"], "torch.optim.Muon", "params", "optim.Muon")


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Copies of full weights are outdated; those of shards are made again."""
    from transformer_plugin.parallel._quantized_shard import refresh_together

    if torch.compiler.is_compiling():
        return
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    if any(PARAMETER_SHARD in parameter.__dict__ for parameter in parameters):
        ops.invalidate_prefetched()
    copies: dict[int, Any] = {}
    for parameter in parameters:
        for copy in parameter.__dict__.get("quantized_copies", ()):
            if copy.refreshes_itself:
                copies[id(copy)] = copy
            elif parameter.grad is not None:
                copy.note_changed()
    if copies:
        refresh_together(copies.values(), None)
