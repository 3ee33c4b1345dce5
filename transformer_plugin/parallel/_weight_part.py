"""What a parameter says of the whole weight that it is a part of."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from transformer_plugin.parallel._row_shard import RowShard
from transformer_plugin.parallel._tensor_slices import TENSOR_SLICES, PartLayout, slices_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The attribute of such a parameter.
WEIGHT_PART = "weight_part"
#: Set on a whole parameter that a part has replaced: its name, and the function that did so.
REPLACED = "replaced_by_part"


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight whose first dimension is sharded over the ranks of a group."""

    #: Of the parameter in the module that was sharded.
    name: str
    rows: RowShard
    #: This rank in the group, and the global ranks of the group.
    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup
    #: Whether gradients are means over the ranks, or sums.
    mean: bool = True
    #: For waits on other ranks; None: the timeout of the group.
    timeout_ms: int | None = None
    #: The layers that were sharded together.
    layers: tuple[weakref.ref[Any], ...] = ()

    @property
    def first_row(self) -> int:
        """The first row of this part."""
        return self.rows.offset(self.rank)

    @property
    def valid_rows(self) -> int:
        """How many rows of this part are rows of the weight; the others are zeros."""
        return self.rows.valid_rows(self.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightPart:
        return self


def mark(layer: Any) -> None:
    """Says again what the parameters of a layer are parts of, where other parameters have taken their place."""
    for attribute, known in ((WEIGHT_PART, layer.weight_parts), (TENSOR_SLICES, layer.tensor_slices)):
        for name, value in known.items():
            parameter = layer._parameters.get(name)
            if parameter is not None and attribute not in parameter.__dict__:
                setattr(parameter, attribute, value)


def without_set(key: str) -> str:
    """The key of a weight that does not exist as long as the others of its set. Compiled code can call this."""
    before, found, after = key.partition(",set=")
    return before + "," + after.partition(",")[2] if found and "group=" not in before else key


def as_copy(layer: Any) -> None:
    """Of a copy of a layer: its weight is a part, too, but exists apart from the weights of the original, so it is
    not gathered ahead with them. Copies of parameters have no attributes."""
    mark(layer)
    for name in ("weight_shard", "named_weight_shard"):
        setattr(layer, name, without_set(getattr(layer, name)))


def part_of(parameter: Tensor) -> WeightPart | None:
    """What a parameter is a part of; None for a whole parameter."""
    return parameter.__dict__.get(WEIGHT_PART) if hasattr(parameter, "__dict__") else None


def layout_of(parameter: Tensor) -> PartLayout | None:
    """Which blocks of a whole tensor a parameter has; None for a whole parameter."""
    part, slices = part_of(parameter), slices_of(parameter)
    if part is None and slices is None:
        return None
    shape = list(parameter.shape)
    if part is not None:
        shape[0] = part.rows.rows
    if slices is not None:
        shape[slices.dim] = slices.size
    if part is None:
        return PartLayout(tuple(shape), slices)
    return PartLayout(tuple(shape), slices, part.rows, part.rank)
