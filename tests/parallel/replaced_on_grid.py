"""Layers of the table of replaced parameters that are sharded and tensor parallel, over four ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.parallel.replaced_layers import (
    COLUMN,
    Case,
    G,
    K,
    N,
    Place,
    of_grouped,
    of_linear,
    of_norm_linear,
    own,
    plain,
)
from transformer_plugin import nn as tnn
from transformer_plugin import parallel
from transformer_plugin.testing.distributed import Rank


class OnGrid(Case):
    """A layer that is sharded over two ranks with other inputs, and tensor parallel over two ranks."""

    def shard_of(self, full: Tensor, rank: Rank) -> Tensor:
        data, slices = self.places(rank)
        return own(own(full, self.dim, slices), 0, data)

    def full_sizes(self, sizes: Sequence[int], ranks: int) -> list[int]:
        return [size * (2 if i == 0 else 1) for i, size in enumerate(super().full_sizes(sizes, 2))]

    def places(self, rank: Rank) -> tuple[Place, Place]:
        return Place(rank.rank // 2, 2), Place(rank.rank % 2, 2)

    def data_group(self, rank: Rank) -> Any:
        return _GRIDS[rank.group_name][1]


#: Of the world of a pool, the groups of this rank: those with slices, and those with the same slices.
_GRIDS: dict[str, tuple[Any, Any]] = {}


def on_grid(layer: Callable[..., Any], *sizes: int, **options: Any) -> Any:
    """Of four ranks: two neighbors have slices of a layer, of which two ranks have the same ones and shard them."""

    def make(rank: Rank) -> torch.nn.Module:
        if rank.group_name not in _GRIDS:
            pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
            _GRIDS[rank.group_name] = pairs[rank.rank // 2], pairs[2 + rank.rank % 2]
        slices, shards = _GRIDS[rank.group_name]
        model = plain(layer, *sizes, tp_group=slices, **options)(rank)
        return parallel.shard_(model, shards, gradient="sum")

    return make


#: Layers that are sharded and tensor parallel, over four ranks.
ON_GRID: dict[str, Case] = {
    "grid_column": OnGrid(
        "sharded",
        tnn.Linear,
        on_grid(tnn.Linear, K, N, bias=False, parallel_mode="column"),
        of_linear,
        dim=0,
        input_dim=None,
        output_dim=-1,
        adds=False,
    ),
    "grid_norm_column": OnGrid(
        "sharded",
        tnn.LayerNormLinear,
        on_grid(tnn.LayerNormLinear, K, N, **COLUMN),
        of_norm_linear,
        dim=0,
        output_dim=-1,
        adds=False,
    ),
    "grid_grouped_row": OnGrid(
        "sharded",
        tnn.GroupedLinear,
        on_grid(tnn.GroupedLinear, G, K, N, bias=False, parallel_mode="row"),
        of_grouped,
        dim=2,
        input_dim=-1,
        output_dim=None,
        adds=False,
    ),
}
