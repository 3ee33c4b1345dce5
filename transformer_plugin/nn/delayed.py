"""Delayed scaling across ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from transformer_plugin._arguments import typed
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.parallel._collectives import all_reduce_max
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@typed
def reduce_amax(model: torch.nn.Module, group: ProcessGroup | None = None) -> None:
    """Reduces the amaxes of all ranks to their maximum, so that the ranks use the same scales.

    It makes one collective call for the whole model.

    Call it on every rank of the group after the backward and before the next forward, which uses the amaxes.

    Args:
        model: contains modules with :class:`~transformer_plugin.recipes.DelayedScaling`, the same on every rank of
            the group: replicas, as in data-parallel training. For experts that differ between ranks use a separate
            group, or pass only the rest of the model.
        group: the ranks; None for all ranks.

    If there is no such module, nothing happens. Layers whose recipe has an ``amax_group`` reduce their amaxes
    themselves.

    Raises:
        ValueError: there is no such group on this rank.
        PeerTimeoutError: a rank does not call this.
    """
    layers = [module for module in model.modules() if isinstance(module, RecipeModule)]
    amaxes = [layer.delayed_amax for layer in layers if isinstance(layer.recipe, DelayedScaling)]
    if not amaxes:
        return
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        expected = "a process group of which this rank is a member, or None for all ranks of a running group"
        advice = "Call init_process_group() first, and this on the ranks of the group only"
        raise ValueError(message("reduce_amax", "group", expected, repr(group), advice))
    together = all_reduce_max("reduce_amax", "amaxes", torch.cat(amaxes), group)
    torch._foreach_copy_(amaxes, together.split([amax.numel() for amax in amaxes]))
