"""Delayed scaling of a layer: its buffers, and the scales of each call.

They hold the values of the input, then of the weight, then of the gradient; each of the three has one entry per matrix
of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import is_strided
from transformer_plugin.nn import _tracing
from transformer_plugin.nn._formats import DTYPES
from transformer_plugin.nn.checkpoint import scales_of
from transformer_plugin.parallel._wrapping import keep_rank_buffers
from transformer_plugin.recipes import DelayedScaling

if TYPE_CHECKING:
    from transformer_plugin.nn._recipe import RecipeModule

#: The state's buffers, in the order of the ops' arguments.
STATE = ("delayed_history", "delayed_scale", "delayed_amax")


@contextmanager
def keep_float32(module: torch.nn.Module, *names: str) -> Iterator[None]:
    """Context for a module's move or cast: the named buffers change their device, but stay float32, bit for bit."""
    before = {name: module._buffers.get(name) for name in names}
    yield
    for name, old in before.items():
        now = module._buffers.get(name)
        if old is not None and now is not None and now.dtype != old.dtype:
            module._buffers[name] = old.to(now.device)


def keep_state(layer: RecipeModule) -> None:
    """After a recipe was set: the layer has the buffers that it needs, with the values of before if they fit."""
    recipe, history = layer.recipe, layer._buffers.get(STATE[0])
    if isinstance(recipe, DelayedScaling):
        if history is None or history.shape[0] != recipe.amax_history_len:
            _register_state(layer, recipe)
    elif history is not None:
        for name in STATE:
            delattr(layer, name)


def _register_state(layer: RecipeModule, recipe: DelayedScaling) -> None:
    weight = layer._local(layer._any_weight().detach())
    shard = layer.parameter_shards.get("weight")
    tensors = 3 * ((weight.shape[0] if shard is None else shard.shard.rows) if weight.dim() == 3 else 1)
    sizes = ((recipe.amax_history_len, tensors), (tensors,), (tensors,))
    for name, size in zip(STATE, sizes, strict=True):
        layer.register_buffer(name, torch.empty(size, dtype=torch.float32, device=weight.device))
    keep_rank_buffers()
    reset_state(layer)


def reset_state(layer: RecipeModule) -> None:
    """As at the beginning: no history, scales of 1. Nothing for layers with other recipes."""
    if STATE[0] in layer._buffers:
        torch.nn.init.zeros_(layer.delayed_history)
        torch.nn.init.ones_(layer.delayed_scale)
        torch.nn.init.zeros_(layer.delayed_amax)


def op_accepts(layer: RecipeModule, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the op will accept the input and the parameters. If not, the op raises the error."""
    if not is_strided(input) or not is_strided(weight):
        return False
    shard = layer.parameter_shards.get("weight")
    rows = weight.shape[:-1] if shard is None else (shard.shard.rows, *weight.shape[1:-1])
    if bias is not None and (
        bias.shape != rows or bias.device != weight.device or bias.dtype not in (*DTYPES, torch.float64)
    ):
        return False
    fits = input.dim() > 0 and input.shape[-1] == weight.shape[-1] and weight.dtype in DTYPES
    return fits and input.dtype == weight.dtype and input.device == weight.device


def scales_of_call(
    layer: RecipeModule, recipe: DelayedScaling, accepted: bool
) -> tuple[Tensor, Tensor | None]:
    """The scales for this call, from the amaxes of earlier calls, and where the op writes the amaxes of this one.

    In training this updates the state. The state must not change if the op is going to reject the call.
    """
    amax = layer.delayed_amax if layer.training else None
    if not accepted:
        return layer.delayed_scale, amax
    if torch.compiler.is_compiling():
        return _next_scales(layer, recipe), amax
    return scales_of(layer, lambda: _next_scales(layer, recipe)), amax


def _next_scales(layer: RecipeModule, recipe: DelayedScaling) -> Tensor:
    state = (layer.delayed_history, layer.delayed_scale, layer.delayed_amax)
    rule = (list(layer._formats), recipe.margin, recipe.amax_compute_algo)
    if _tracing.is_tracing():
        update = _tracing.update_delayed_scale_ if layer.training else _tracing.delayed_scale
        return update(state, rule)
    if layer.training:
        return ops.update_delayed_scale_(*state, *rule, str(recipe.amax_group))
    return layer.delayed_scale.clone() if recipe.amax_group else ops.delayed_scale(*state, *rule)
