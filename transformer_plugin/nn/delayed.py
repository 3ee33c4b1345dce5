"""Delayed scaling across ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.recipes import DelayedScaling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def reduce_amax(model: torch.nn.Module, group: ProcessGroup | None = None) -> None:
    """Reduces the amaxes of all ranks with a maximum, so that they use the same scales: one collective for the whole
    model.

    Call it on every rank of the group after the backward and before the next forward, which uses the amaxes.

    Args:
        model: holds modules with :class:`~transformer_plugin.recipes.DelayedScaling`, the same on every rank of the
            group: replicas, as in data-parallel training. For experts that differ from rank to rank use a separate
            group, or exclude them by passing the rest of the model.
        group: None for all ranks.

    Without such a module nothing happens. With the ``amax_group`` of
    :class:`~transformer_plugin.recipes.DelayedScaling` the layers do it themselves.
    """
    layers = [module for module in model.modules() if isinstance(module, RecipeModule)]
    amaxes = [layer._current_amax for layer in layers if isinstance(layer.recipe, DelayedScaling)]
    if not amaxes:
        return
    together = torch.cat(amaxes)
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group)
    torch._foreach_copy_(amaxes, together.split([amax.numel() for amax in amaxes]))
