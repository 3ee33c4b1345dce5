"""A layer that ranks share: how a rank makes it, and which part it has of what the whole layer reads and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.parallel.plain_layers import Tensors

Cut = Callable[[Tensor, int, int], Tensor]


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


def everything(whole: Tensor, index: int, size: int) -> Tensor:
    """What all ranks have."""
    return whole


def even(dim: int, sections: Sequence[int] = ()) -> Cut:
    """An equal part of each section of a dimension."""

    def cut(whole: Tensor, index: int, size: int) -> Tensor:
        parts = whole.split(list(sections) or whole.shape[dim], dim)
        return torch.cat([part.chunk(size, dim)[index] for part in parts], dim)

    return cut


def padded(dim: int) -> Cut:
    """An equal part of a dimension that has zeros after its end."""

    def cut(whole: Tensor, index: int, size: int) -> Tensor:
        each = -(-whole.shape[dim] // size)
        missing = list(whole.shape)
        missing[dim] = each * size - whole.shape[dim]
        return torch.cat([whole, whole.new_zeros(missing)], dim).narrow(dim, index * each, each)

    return cut


@dataclass(frozen=True)
class Case:
    """A layer: how a rank makes it, and the whole of what it reads, has and returns."""

    #: The class, and how its ranks share it.
    layer: str
    way: str
    make: Callable[[Place, dict[str, Any]], Any]
    #: Sizes of the whole parameters and of the differentiable arguments of forward, and which part a rank has.
    parameters: dict[str, tuple[tuple[int, ...], Cut]]
    inputs: dict[str, tuple[tuple[int, ...], Cut]]
    #: Which part of each differentiable output a rank has.
    outputs: list[Cut]
    #: The whole outputs of whole parameters and inputs.
    plain: Callable[[Tensors, Tensors], Sequence[Tensor]]
    #: Other arguments of forward, and what a rank gets of them.
    given: dict[str, tuple[Tensor, Cut]] = field(default_factory=dict)
    #: Which results of forward are differentiable.
    results: Callable[[Any], Sequence[Tensor]] = lambda result: result if type(result) is tuple else (result,)
    #: Whether products have the formats of a recipe.
    has_recipe: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer} {self.way} {self.note}".strip()
