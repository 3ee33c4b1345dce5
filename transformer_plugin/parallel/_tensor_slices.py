"""Which slices of a parameter a rank has under tensor parallelism, or which of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_plugin.parallel._group_names import name_with_rank
from transformer_plugin.parallel._weight_shard import WeightShard

#: The attribute of a parameter that is one rank's slices.
TENSOR_SLICES = "tensor_slices"
#: What gives ranks their slices.
TENSOR_PARALLELISM, EXPERTS = "tensor parallelism", "expert parallelism"
#: Offset and size of each slice of one rank, in the order in which the rank's tensor has them.
Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorSlices:
    """One rank's slices of one dimension of a tensor; zeros may follow them in the rank's tensor."""

    dim: int
    #: Of that dimension: of the full tensor, and of each rank's.
    size: int
    local_size: int
    #: Of each rank.
    pieces: tuple[Pieces, ...]
    rank: int
    #: The global ranks of the group, and its name.
    ranks: tuple[int, ...]
    group_name: str
    kind: str = TENSOR_PARALLELISM

    @property
    def group(self) -> str:
        """The argument ``group_name`` of ops."""
        return name_with_rank(self.group_name, self.rank)

    @property
    def own(self) -> Pieces:
        """The slices of this rank."""
        return self.pieces[self.rank]

    def local_shard_of(self, full: Tensor) -> Tensor:
        """This rank's slices of a full tensor: a contiguous copy."""
        slices = [full.narrow(self.dim, offset, size) for offset, size in self.own]
        missing = self.local_size - sum(size for _, size in self.own)
        if missing:
            sizes = list(full.shape)
            sizes[self.dim] = missing
            slices.append(full.new_zeros(sizes))
        return torch.cat(slices, self.dim).contiguous()

    def join(self, of_ranks: Sequence[Tensor]) -> Tensor:
        """The full tensor of those of all ranks."""
        sizes = list(of_ranks[0].shape)
        sizes[self.dim] = self.size
        full = of_ranks[0].new_empty(sizes)
        for tensor, pieces in zip(of_ranks, self.pieces, strict=True):
            place = 0
            for offset, size in pieces:
                full.narrow(self.dim, offset, size).copy_(tensor.narrow(self.dim, place, size))
                place += size
        return full


def even_slices(size: int, ranks: int, sections: Sequence[int]) -> tuple[Pieces, ...]:
    """The slices of each rank: of each section of the dimension, or of all of it, an equal one."""
    made = []
    for rank in range(ranks):
        pieces, first = [], 0
        for section in sections or (size,):
            pieces.append((first + rank * (section // ranks), section // ranks))
            first += section
        made.append(tuple(pieces))
    return tuple(made)


def padded_slices(size: int, ranks: int) -> tuple[Pieces, ...]:
    """Equally many for each rank, of which the last ranks have fewer or none."""
    rows = WeightShard(size, ranks, group_name="")
    return tuple(((rows.offset(r), rows.valid_rows(r)),) if rows.valid_rows(r) else () for r in range(ranks))


def slices_of(parameter: Tensor) -> TensorSlices | None:
    """The slices that a parameter is; None for a parameter without tensor parallelism."""
    return parameter.__dict__.get(TENSOR_SLICES) if hasattr(parameter, "__dict__") else None


@dataclass(frozen=True)
class Chunk:
    """A block of the full tensor: where it is there, where in this rank's tensor, and its sizes."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """Which blocks of a full tensor are in this rank's: its slices, and of their first dimension its rows."""

    shape: tuple[int, ...]
    slices: TensorSlices | None = None
    #: How the rows are sharded, and this rank in their group.
    shard: WeightShard | None = None
    rank: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's tensor, with padding."""
        shape = list(self.shape)
        if self.slices is not None:
            shape[self.slices.dim] = self.slices.local_size
        if self.shard is not None:
            shape[0] = self.shard.shard_rows
        return tuple(shape)

    def local_shard_of(self, full: Tensor) -> Tensor:
        """This rank's tensor of a full one: a contiguous copy without a gradient."""
        full = full.detach()
        own = full if self.slices is None else self.slices.local_shard_of(full)
        if self.shard is not None:
            return self.shard.shard_of(own, self.rank)
        return own.clone(memory_format=torch.contiguous_format) if self.slices is None else own

    def chunks(self) -> list[Chunk]:
        """The blocks of this rank, without padding."""
        dim = 0 if self.slices is None else self.slices.dim
        pieces = ((0, self.shape[dim]),) if self.slices is None else self.slices.own
        first, last = 0, self.local_shape[0]
        if self.shard is not None:
            first = self.shard.offset(self.rank)
            last = first + self.shard.valid_rows(self.rank)
        elif dim != 0:
            last = self.shape[0]
        chunks, place = [], 0
        for offset, size in pieces:
            offsets, local, sizes = [0] * len(self.shape), [0] * len(self.shape), list(self.shape)
            if dim == 0:  # of the piece, what is in this rank's rows
                low, high = max(place, first), min(place + size, last)
                offsets[0], local[0], sizes[0] = offset + low - place, low - first, high - low
            else:
                offsets[0], sizes[0] = first, last - first
                offsets[dim], local[dim], sizes[dim] = offset, place, size
            if sizes[0] > 0:
                chunks.append(Chunk(tuple(offsets), tuple(local), tuple(sizes)))
            place += size
        return chunks
