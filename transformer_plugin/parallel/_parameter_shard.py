"""What a parameter says of the full weight of which it is a shard."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from transformer_plugin.parallel._tensor_slices import ShardLayout, slices_of
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The attribute of such a parameter.
PARAMETER_SHARD = "parameter_shard"


@dataclass(frozen=True)
class ParameterShard:
    """A parameter that is one rank's shard of a weight, whose first dimension is sharded over the ranks of a group."""

    #: Of the parameter in the module that was sharded.
    name: str
    #: How the weight is sharded; ops get it as the key ``weight_shard``.
    shard: WeightShard
    #: This rank in the group, and the global ranks of the group.
    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup
    #: The layers that were sharded together.
    layers: tuple[weakref.ref[Any], ...] = ()

    #: The dimension that is divided.
    dim = 0

    @property
    def local_size(self) -> int:
        """Of that dimension, on each rank."""
        return self.shard.shard_rows

    @property
    def group_name(self) -> str:
        """The argument of ops."""
        return self.shard.group_name

    @property
    def first_row(self) -> int:
        """The first row of this shard."""
        return self.shard.offset(self.rank)

    @property
    def valid_rows(self) -> int:
        """How many rows of this shard are rows of the weight; the others are zeros."""
        return self.shard.valid_rows(self.rank)

    def local_shard_of(self, full: Tensor) -> Tensor:
        """This rank's shard of a tensor like the full weight: a contiguous copy without a gradient."""
        return self.shard.shard_of(full, self.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterShard:
        return self

    def __reduce__(self) -> NoReturn:
        expected = "a model without sharded weights to pickle"
        got, advice = f"'{self.name}', sharded over the ranks {list(self.ranks)}", "Save its state_dict()"
        raise TypeError(message("shard_", "module", expected, got, advice))


def shard_of_parameter(parameter: Tensor) -> ParameterShard | None:
    """What a parameter is a shard of; None for an unsharded parameter."""
    return parameter.__dict__.get(PARAMETER_SHARD) if hasattr(parameter, "__dict__") else None


def layout_of(parameter: Tensor) -> ShardLayout | None:
    """Which blocks of a full tensor a parameter has; None for an unsharded parameter."""
    known, slices = shard_of_parameter(parameter), slices_of(parameter)
    if known is None and slices is None:
        return None
    shape = list(parameter.shape)
    if known is not None:
        shape[0] = known.shard.rows
    if slices is not None:
        shape[slices.dim] = slices.size
    if known is None:
        layout = ShardLayout(tuple(shape), slices)
    else:
        layout = ShardLayout(tuple(shape), slices, known.shard, known.rank)
    if layout.local_shape != tuple(
        parameter.shape
    ):  # written into a layer in another way than by an assignment
        expected = f"this rank's shard, of sizes {list(layout.local_shape)}"
        name, got = "parameter" if known is None else known.name, f"a tensor of sizes {list(parameter.shape)}"
        advice = "Assign this rank's shard, or load the full tensor with load_state_dict"
        raise ValueError(message("ShardedWeight", name, expected, got, advice))
    return layout
