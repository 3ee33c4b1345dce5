"""Experts of which each rank has some in plain tensors: what they are of all experts, for state dicts and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from transformer_plugin.parallel._layer_shards import note_layer
from transformer_plugin.parallel._shard_experts import EXPERT_RANKS, Ranks
from transformer_plugin.parallel._shard_states import handle_module
from transformer_plugin.parallel._tensor_slices import EXPERTS, TensorSlices, even_slices


def mark_experts(layer: Any) -> bool:
    """Says which of all experts a layer's parameters have; nothing for ``DTensor`` s, lists and other layers."""
    ranks = getattr(layer, EXPERT_RANKS, None)
    if not isinstance(ranks, Ranks) or ranks.mesh is not None or layer.tensor_slices:
        return False
    own = {name: layer._parameters.get(name) for name in ("weight", "bias")}
    found = {name: parameter for name, parameter in own.items() if type(parameter) is Parameter}
    if "weight" not in found:
        return False
    layer.tensor_slices = {name: _slices(parameter.shape[0], ranks) for name, parameter in found.items()}
    note_layer(layer)
    handle_module(layer)
    return True


def _slices(experts: int, ranks: Ranks) -> TensorSlices:
    count = len(ranks.ranks)
    return TensorSlices(
        dim=0,
        size=experts * count,
        local_size=experts,
        pieces=even_slices(experts * count, count, ()),
        rank=ranks.ranks.index(torch.distributed.get_rank()),
        ranks=ranks.ranks,
        group_name=ranks.group_name,
        kind=EXPERTS,
    )
