"""Full matrices of which each rank has a shard: gathered for an update, and what this rank applies of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.parallel._parameter_shard import ParameterShard, layout_of, shard_of_parameter
from transformer_plugin.parallel._tensor_slices import EXPERTS, ShardLayout, TensorSlices, slices_of

#: Matrices that are gathered together take at most so much memory, or are one matrix.
BUCKET_BYTES = 2**30


class Group(NamedTuple):
    """Ranks over which a matrix is sharded."""

    name: str
    ranks: int
    #: Of this process.
    rank: int


@dataclass(frozen=True)
class Target:
    """A parameter, and where this rank's shard lies in the full matrices after a gather."""

    parameter: Tensor
    #: None for an unsharded parameter.
    layout: ShardLayout | None
    #: How the matrices are sharded: by rows, and into slices, of which each may be sharded by rows.
    rows: ParameterShard | None = None
    slices: TensorSlices | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those of rows and of slices, in the order in which they gather."""
        found = []
        if self.rows is not None:
            found.append(Group(self.rows.group_name, len(self.rows.ranks), self.rows.rank))
        if self.slices is not None:
            found.append(Group(self.slices.group, len(self.slices.ranks), self.slices.rank))
        return tuple(found)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full matrix, or of a stack of them."""
        return tuple(self.parameter.shape) if self.layout is None else self.layout.shape

    @property
    def name(self) -> str:
        """For errors."""
        shard = shard_of_parameter(self.parameter)
        return f"a parameter of sizes {list(self.shape)}" if shard is None else f"'{shard.name}'"


def target_of(parameter: Tensor) -> Target:
    """What must be gathered for a parameter. Of sharded experts each rank has full matrices."""
    shard, slices, layout = shard_of_parameter(parameter), slices_of(parameter), layout_of(parameter)
    if (
        slices is not None and slices.kind == EXPERTS and parameter.dim() == 3
    ):  # this rank's experts are full matrices
        slices, layout = None, None if shard is None else layout
    if layout is None or parameter.dim() == 2 or shard is None:
        return Target(parameter, layout, shard, slices)
    return Target(parameter, ShardLayout((shard.valid_rows, *layout.shape[1:]), slices), None, slices)


def buckets(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Those of the same groups together, in an order that is the same on all ranks."""
    places: dict[tuple[Group, ...], list[Target]] = {}
    for target in targets:
        places.setdefault(target.groups, []).append(target)
    for groups, together in places.items():
        if not groups:  # nothing to gather together
            yield from ([target] for target in together)
            continue
        ranks = math.prod(group.ranks for group in groups)
        bucket: list[Target] = []
        size = 0
        for target in together:
            own = 2 * target.parameter.numel() * ranks  # with padding, so that ranks agree
            if bucket and size + own > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(target)
            size += own
        yield bucket


def gathered(bucket: Sequence[Target], shards: list[Tensor]) -> list[Tensor]:
    """The full matrices of this rank's shards: one collective for each group."""
    groups = list(bucket[0].groups)
    if bucket[0].rows is not None:
        every = gather_list(shards, groups.pop(0))
        shards = [t.rows.shard.unpadded(each) for t, each in zip(bucket, every, strict=True) if t.rows]
    if bucket[0].slices is not None:
        every = gather_list([shard.unsqueeze(0) for shard in shards], groups.pop(0))
        shards = [t.slices.join(each.unbind(0)) for t, each in zip(bucket, every, strict=True) if t.slices]
    # Experts of padding are not matrices of the weight.
    return [shard[: target.shape[0]] for target, shard in zip(bucket, shards, strict=True)]


def gather_list(shards: list[Tensor], group: Group) -> list[Tensor]:
    """Each shard of all ranks of a group, along the first dimension, in one collective."""
    out = [shard.new_empty(group.ranks * shard.shape[0], *shard.shape[1:]) for shard in shards]
    ops.all_gather_list_out(shards, out, group.ranks, group.name)
    return out


def blocks(target: Target, shard: Tensor, full: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of this rank's shard, without padding, and of the same elements of the full matrices."""
    if target.layout is None:
        return [(shard, full)]
    found = target.layout.chunks()
    return [(_view(shard, c.local, c.sizes), _view(full, c.offsets, c.sizes)) for c in found]


def _view(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def add(target: Target, shard: Tensor, full: Tensor, alpha: Any) -> None:
    """Adds ``alpha`` times this rank's elements of a full update to the shard.

    A CPU rounds 16-bit elements that fill a vector, and those that do not, in different ways. So there each element is
    added at the place that it has in the full matrix.
    """
    if shard.device.type != "cpu":
        for own, other in blocks(target, shard, full):
            own.add_(other, alpha=alpha)
        return
    sum_ = shard if target.layout is None else shard.new_zeros(target.shape)
    if target.layout is not None:
        for own, other in blocks(target, shard, sum_):
            other.copy_(own)
    for matrix, update in zip(*((sum_, full) if full.dim() == 3 else ([sum_], [full])), strict=True):
        matrix.add_(update, alpha=alpha)
    if target.layout is not None:
        for own, other in blocks(target, shard, sum_):
            own.copy_(other)


def flags_of_ranks(target: Target, flags: list[bool]) -> list[list[bool]]:
    """The flags of all ranks over which a matrix is sharded.

    On a CPU they travel as a tensor; on a GPU, where reading one would wait for the stream, through the store.
    """
    every = ["".join("01"[flag] for flag in flags)]
    for group in target.groups:
        if target.parameter.device.type == "cpu":
            own = torch.tensor([[int(flag) for flag in each] for each in every], dtype=torch.uint8)
            gathered = ops.all_gather(own, group.ranks, group.name)
            every = ["".join(map(str, each)) for each in gathered.tolist()]
        else:
            texts = ops.all_gather_text(" ".join(every), group.name)
            every = [each for text in texts for each in text.split(" ")]
    return [[flag == "1" for flag in each] for each in every]
