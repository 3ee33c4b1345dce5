"""Rows of a matrix that an index names, as the ops with an argument `rows` read them."""

from __future__ import annotations

import torch
from torch import Tensor


def before_tail(rows: Tensor, group_sizes: Tensor | None) -> Tensor:
    """The rows with zeros past the last group, also where an op leaves their content unspecified."""
    if group_sizes is None:
        return rows
    index = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((index < group_sizes.sum()).view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)


def indexed_rows(matrix: Tensor, rows: Tensor | None, group_sizes: Tensor) -> Tensor:
    """Returns matrix[rows[i]] for the rows of groups, zeros where rows[i] is -1, and zeros for the tail."""
    if rows is None:
        return matrix
    taken = matrix.new_zeros(rows.shape[0], matrix.shape[1])
    places = (rows[: int(group_sizes.sum())] != -1).nonzero()[:, 0]
    taken[places] = matrix[rows[places].long()]
    return taken
