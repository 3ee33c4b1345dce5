"""The order in which sharded weights will be used, set before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from transformer_plugin import ops
from transformer_plugin._arguments import typed
from transformer_plugin.formats import Format
from transformer_plugin.nn.embedding import Embedding
from transformer_plugin.tensor._layout import message


@typed
@torch.no_grad()
def set_gather_order(layers: Iterable[torch.nn.Module]) -> None:
    """Sets the order in which the groups of sharded weights expect their weights to be used.

    A group learns the order from the first step, in which no weight is gathered early. After this call the first step
    is as fast as the others, and its allocations are theirs. Each weight is gathered once in the order of the forward
    and once in the reverse order, for the backward. Another order in a step costs time, and is never wrong. Call it on
    all ranks, after :func:`shard_` and before the model is captured or compiled.

    Args:
        layers: the layers in the order of a forward, for example ``model.modules()`` where that is the order of
            registration. Those whose weights :func:`shard_` has not sharded are skipped, and one may come several
            times.

    Raises:
        ValueError: none of them has a sharded weight.
        PeerTimeoutError: a rank does not call this.
    """
    found = [layer for layer in layers if getattr(layer, "parameter_shards", None)]
    if not found:
        advice = "Call shard_ first, and pass the layers of the model"
        text = message("set_gather_order", "layers", "layers with sharded weights", "none", advice)
        raise ValueError(text)
    for layer in found:
        _gather(layer, backward=False)
    for layer in reversed(found):
        if not isinstance(layer, Embedding):  # whose gradient needs no table
            _gather(layer, backward=True)


def _gather(layer: Any, backward: bool) -> None:
    """What the op of the layer gathers in a forward or a backward."""
    shard = layer.named_weight_shard
    if "weight" not in layer.parameter_shards:  # of experts in a list
        ops.gather_weight_list([weight.detach() for weight in layer._source_weight()], backward, shard)
    elif not layer._weight_source.exchanges_quantized:
        ops.gather_weight(layer.weight.detach(), None, None, "none", False, backward, shard)
    else:
        key = layer._formats[1]
        each = 3 if Format.parse(key).needs_amax else 2
        tensors = layer._weight_source.quantized_shard(layer).op_tensors()
        columns = backward and len(tensors) > each
        own: list[Any] = [*(tensors[each:] if columns else tensors[:each]), None][:3]
        ops.gather_weight(own[0], own[1], own[2], key, columns, backward, shard)
