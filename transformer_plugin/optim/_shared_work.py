"""Each rank orthogonalizes some of the gathered matrices, and the ranks exchange the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transformer_plugin.optim._full_matrices import Group, gather_list

#: Ranks send equally many elements. If more than this share of all results is padding, every rank computes all of them.
PADDING = 0.5


def by_ranks(
    groups: Sequence[Group], matrices: Sequence[Tensor], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """``[compute(matrix) for matrix in matrices]`` of equal ``matrices`` on all ranks of the groups, of which each
    computes a share. Results are bfloat16, and keep their strides."""
    ranks = math.prod(group.ranks for group in groups)
    owners = _owners([tuple(matrix.shape) for matrix in matrices], ranks)
    sizes = [0] * ranks
    offsets = []
    for matrix, owner in zip(matrices, owners, strict=True):
        offsets.append(sizes[owner])
        sizes[owner] += matrix.numel()
    longest = max(sizes)
    if ranks == 1 or ranks * longest > (1 + PADDING) * sum(sizes):
        return [compute(matrix) for matrix in matrices]
    own = 0
    for group in reversed(groups):
        own = own * group.ranks + group.rank
    results = matrices[0].new_zeros(longest, dtype=torch.bfloat16)
    for matrix, owner, offset in zip(matrices, owners, offsets, strict=True):
        if owner == own:
            result = compute(matrix)
            results[offset : offset + matrix.numel()] = (result.mT if _tall(matrix) else result).flatten()
    for group in groups:
        (results,) = gather_list([results], group)
    every = results.view(ranks, longest)
    places = zip(matrices, owners, offsets, strict=True)
    return [
        _result(every[owner, offset : offset + matrix.numel()], matrix) for matrix, owner, offset in places
    ]


def _tall(matrix: Tensor) -> bool:
    """Whether the iterations are those of the transposed matrix, and the result is a transposed view."""
    return matrix.shape[-2] > matrix.shape[-1]


def _result(flat: Tensor, matrix: Tensor) -> Tensor:
    return flat.view(matrix.mT.shape).mT if _tall(matrix) else flat.view(matrix.shape)


def _owners(shapes: list[tuple[int, ...]], ranks: int) -> list[int]:
    """Which rank computes each result: the next largest goes to the rank with the least work."""
    work = [0] * ranks
    owners = [0] * len(shapes)
    costs = [math.prod(shape) * min(shape[-2:]) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = min(range(ranks), key=work.__getitem__)
        work[owners[i]] += costs[i]
    return owners
