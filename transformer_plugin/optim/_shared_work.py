"""Each rank orthogonalizes some of the gathered matrices, and the ranks exchange the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transformer_plugin.optim._whole_matrices import Group, gather_list

#: Ranks send equally many elements. If more than this part of all results is padding, every rank computes all of them.
PADDING = 0.5


def by_ranks(
    groups: Sequence[Group], wholes: Sequence[Tensor], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """``[compute(whole) for whole in wholes]`` of equal ``wholes`` on all ranks of the groups, of which each computes
    a share. Results are bfloat16, and keep their strides."""
    ranks = math.prod(group.ranks for group in groups)
    owners = _owners([tuple(whole.shape) for whole in wholes], ranks)
    sizes = [0] * ranks
    offsets = []
    for whole, owner in zip(wholes, owners, strict=True):
        offsets.append(sizes[owner])
        sizes[owner] += whole.numel()
    longest = max(sizes)
    if ranks == 1 or ranks * longest > (1 + PADDING) * sum(sizes):
        return [compute(whole) for whole in wholes]
    own = 0
    for group in reversed(groups):
        own = own * group.ranks + group.rank
    results = wholes[0].new_zeros(longest, dtype=torch.bfloat16)
    for whole, owner, offset in zip(wholes, owners, offsets, strict=True):
        if owner == own:
            result = compute(whole)
            results[offset : offset + whole.numel()] = (result.mT if _tall(whole) else result).flatten()
    for group in groups:
        (results,) = gather_list([results], group)
    every = results.view(ranks, longest)
    places = zip(wholes, owners, offsets, strict=True)
    return [_result(every[owner, offset : offset + whole.numel()], whole) for whole, owner, offset in places]


def _tall(whole: Tensor) -> bool:
    """Whether the iterations are those of the transposed matrix, and the result is a transposed view."""
    return whole.shape[-2] > whole.shape[-1]


def _result(flat: Tensor, whole: Tensor) -> Tensor:
    return flat.view(whole.mT.shape).mT if _tall(whole) else flat.view(whole.shape)


def _owners(shapes: list[tuple[int, ...]], ranks: int) -> list[int]:
    """Which rank computes each result: the next largest goes to the rank with the least work."""
    work = [0] * ranks
    owners = [0] * len(shapes)
    costs = [math.prod(shape) * min(shape[-2:]) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = min(range(ranks), key=work.__getitem__)
        work[owners[i]] += costs[i]
    return owners
