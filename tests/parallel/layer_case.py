"""A layer that ranks share: how a rank makes it, and which shard it has of what the full layer reads and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.parallel.plain_layers import Tensors

ShardOf = Callable[[Tensor, int, int], Tensor]


class Axis(NamedTuple):
    """Ranks that share a layer, or that have other rows: this rank's place, their number, and their group."""

    index: int
    size: int
    group: Any


class Place(NamedTuple):
    """One rank."""

    tensor: Axis
    data: Axis
    device: torch.device

    def parallel(self, **options: Any) -> dict[str, Any]:
        """The arguments of a layer; none where one rank has all of it."""
        return {**options, "tp_group": self.tensor.group} if self.tensor.size > 1 else {}


def everything(full: Tensor, index: int, size: int) -> Tensor:
    """What all ranks have."""
    return full


def even(dim: int, sections: Sequence[int] = ()) -> ShardOf:
    """An equal shard of each section of a dimension."""

    def shard_of(full: Tensor, index: int, size: int) -> Tensor:
        shards = full.split(list(sections) or full.shape[dim], dim)
        return torch.cat([shard.chunk(size, dim)[index] for shard in shards], dim)

    return shard_of


def padded(dim: int) -> ShardOf:
    """An equal shard of a dimension that has zeros after its end."""

    def shard_of(full: Tensor, index: int, size: int) -> Tensor:
        each = -(-full.shape[dim] // size)
        missing = list(full.shape)
        missing[dim] = each * size - full.shape[dim]
        return torch.cat([full, full.new_zeros(missing)], dim).narrow(dim, index * each, each)

    return shard_of


@dataclass(frozen=True)
class Case:
    """A layer: how a rank makes it, and all that it reads, has and returns."""

    #: The class, and how its ranks share it.
    layer: str
    way: str
    make: Callable[[Place, dict[str, Any]], Any]
    #: Sizes of the full parameters and of the differentiable arguments of forward, and which shard a rank has.
    parameters: dict[str, tuple[tuple[int, ...], ShardOf]]
    inputs: dict[str, tuple[tuple[int, ...], ShardOf]]
    #: Which shard of each differentiable output a rank has.
    outputs: list[ShardOf]
    #: The full outputs of full parameters and inputs.
    plain: Callable[[Tensors, Tensors], Sequence[Tensor]]
    #: Other arguments of forward, and what a rank gets of them.
    given: dict[str, tuple[Tensor, ShardOf]] = field(default_factory=dict)
    #: Which results of forward are differentiable.
    results: Callable[[Any], Sequence[Tensor]] = lambda result: result if type(result) is tuple else (result,)
    #: Whether products have the formats of a recipe.
    has_recipe: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer} {self.way} {self.note}".strip()
