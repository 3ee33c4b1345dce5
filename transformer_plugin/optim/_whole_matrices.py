"""Whole matrices of which each rank has a part: gathered for an update, and what this rank applies of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.parallel._tensor_slices import EXPERTS, PartLayout, TensorSlices, slices_of
from transformer_plugin.parallel._weight_part import WeightPart, layout_of, part_of

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
    """A parameter, and where this rank's part lies in the matrices that are whole after a gather."""

    parameter: Tensor
    #: None for a whole parameter.
    layout: PartLayout | None
    #: How the matrices are sharded: by rows, and into slices, of which each may be sharded by rows.
    rows: WeightPart | None = None
    slices: TensorSlices | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those of rows and of slices, in the order in which they gather."""
        found = []
        if self.rows is not None:
            found.append(Group(self.rows.group_name, self.rows.rows.ranks, self.rows.rank))
        if self.slices is not None:
            found.append(Group(self.slices.group, len(self.slices.ranks), self.slices.rank))
        return tuple(found)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole matrix, or of a stack of whole ones."""
        return tuple(self.parameter.shape) if self.layout is None else self.layout.shape

    @property
    def name(self) -> str:
        """For errors."""
        part = part_of(self.parameter)
        return f"a parameter of sizes {list(self.shape)}" if part is None else f"'{part.name}'"


def target_of(parameter: Tensor) -> Target:
    """What must be gathered for a parameter. Of sharded experts each rank has whole matrices."""
    part, slices, layout = part_of(parameter), slices_of(parameter), layout_of(parameter)
    if (
        slices is not None and slices.kind == EXPERTS and parameter.dim() == 3
    ):  # this rank's experts are whole matrices
        slices, layout = None, None if part is None else layout
    if layout is None or parameter.dim() == 2 or part is None:
        return Target(parameter, layout, part, slices)
    return Target(parameter, PartLayout((part.valid_rows, *layout.shape[1:]), slices), None, slices)


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


def gathered(bucket: Sequence[Target], parts: list[Tensor]) -> list[Tensor]:
    """The whole matrices of this rank's parts: one collective for each group."""
    groups = list(bucket[0].groups)
    if bucket[0].rows is not None:
        every = gather_list(parts, groups.pop(0))
        parts = [t.rows.rows.strip(each) for t, each in zip(bucket, every, strict=True) if t.rows]
    if bucket[0].slices is not None:
        every = gather_list([part.unsqueeze(0) for part in parts], groups.pop(0))
        parts = [t.slices.join(each.unbind(0)) for t, each in zip(bucket, every, strict=True) if t.slices]
    # Experts of padding are not matrices of the weight.
    return [part[: target.shape[0]] for target, part in zip(bucket, parts, strict=True)]


def gather_list(parts: list[Tensor], group: Group) -> list[Tensor]:
    """Each part from all ranks of a group, along the first dimension, in one collective."""
    out = [part.new_empty(group.ranks * part.shape[0], *part.shape[1:]) for part in parts]
    ops.all_gather_list_out(parts, out, group.ranks, group.name)
    return out


def blocks(target: Target, part: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of this rank's part, without padding, and of the same elements of the whole."""
    if target.layout is None:
        return [(part, whole)]
    found = target.layout.chunks()
    return [(_view(part, c.local, c.sizes), _view(whole, c.offsets, c.sizes)) for c in found]


def _view(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def add(target: Target, part: Tensor, whole: Tensor, alpha: Any) -> None:
    """Adds ``alpha`` times this rank's elements of the whole to the part.

    A CPU rounds 16-bit elements that fill a vector, and those that do not, in different ways. So there each element is
    added at the place that it has in the whole matrix.
    """
    if part.device.type != "cpu":
        for own, other in blocks(target, part, whole):
            own.add_(other, alpha=alpha)
        return
    sum_ = part if target.layout is None else part.new_zeros(target.shape)
    if target.layout is not None:
        for own, other in blocks(target, part, sum_):
            other.copy_(own)
    for matrix, update in zip(*((sum_, whole) if whole.dim() == 3 else ([sum_], [whole])), strict=True):
        matrix.add_(update, alpha=alpha)
    if target.layout is not None:
        for own, other in blocks(target, part, sum_):
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
