"""What a parameter says of the whole weight that it is a part of."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from transformer_plugin.parallel._row_shard import RowShard
from transformer_plugin.parallel._tensor_slices import PartLayout, slices_of
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The attribute of such a parameter.
WEIGHT_PART = "weight_part"


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight whose first dimension is sharded over the ranks of a group."""

    #: Of the parameter in the module that was sharded.
    name: str
    #: The layout that ops get as the key ``weight_shard``.
    shard: WeightShard
    #: Each rank's rows are a multiple of this number.
    align: int
    #: This rank in the group, and the global ranks of the group.
    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup
    #: The layers that were sharded together.
    layers: tuple[weakref.ref[Any], ...] = ()

    #: The dimension that is divided.
    dim = 0

    @functools.cached_property
    def rows(self) -> RowShard:
        """The rows of each rank."""
        return RowShard(self.shard.rows, self.shard.ranks, self.align)

    @property
    def local_size(self) -> int:
        """Of that dimension, on each rank."""
        return self.rows.shard_rows

    @property
    def group_name(self) -> str:
        """The argument of ops."""
        return self.shard.group_name

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

    def __reduce__(self) -> NoReturn:
        expected = "a model without sharded weights to pickle"
        got, advice = f"'{self.name}', sharded over the ranks {list(self.ranks)}", "Save its state_dict()"
        raise TypeError(message("shard_", "module", expected, got, advice))


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
        shape[0] = part.shard.rows
    if slices is not None:
        shape[slices.dim] = slices.size
    if part is None:
        layout = PartLayout(tuple(shape), slices)
    else:
        layout = PartLayout(tuple(shape), slices, part.rows, part.rank)
    if layout.part_shape != tuple(
        parameter.shape
    ):  # written into a layer in another way than by an assignment
        expected = f"this rank's shard, of sizes {list(layout.part_shape)}"
        name, got = "parameter" if part is None else part.name, f"a tensor of sizes {list(parameter.shape)}"
        advice = "Assign this rank's shard, or load the full tensor with load_state_dict"
        raise ValueError(message("ShardedWeight", name, expected, got, advice))
    return layout
