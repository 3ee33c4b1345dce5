"""Slots: which rows of the experts hold which tokens; and the sizes of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from transformer_plugin.nn._module import serializable


@serializable
class Slots(NamedTuple):
    """Which rows of the experts hold which tokens, for experts that read tokens where they lie.

    :func:`transformer_plugin.ops.assign_weighted_slots` makes all three. :class:`GroupedMLP` takes it in place of
    the group sizes.
    """

    #: int32 ``[tokens, K]``, the rows of each token, or -1.
    slot: Tensor
    #: int32 ``[capacity]``, the token of each row, or -1.
    source: Tensor
    #: int64 ``[G]``, the rows of each group, with padding.
    group_sizes: Tensor


@serializable
class SlotsOfRanks(NamedTuple):
    """Which rows of this rank's experts hold which tokens of all ranks, for experts that also exchange the tokens.

    The maps are those of a plan (:func:`transformer_plugin.ops.expert_parallel.plan`). :class:`GroupedMLP` takes it in
    place of the group sizes, on every rank of the group: its input is this rank's tokens ``[T, H]``, its factors their
    routing weights ``[T, K]``, and its output the sum of each token's rows on all ranks, ``[T, H]``.
    """

    #: int32 ``[N, K]``, the rows of each received token, or -1.
    slot: Tensor
    #: int32 ``[capacity]``, the received token of each row, or -1.
    source: Tensor
    #: int64 ``[G]``, the rows of each of this rank's experts, with padding.
    group_sizes: Tensor
    #: those of the plan, or None where it has none.
    received: Tensor | None
    position: Tensor | None
    #: the name of the process group, and the longest wait for a rank.
    group_name: str
    timeout_ms: int


def sizes_tensor(group_sizes: Tensor | Sequence[int], input: Any) -> Tensor:
    """Sizes in a list as a tensor on the device of the input. What is no list of integers is refused by the op."""
    if isinstance(group_sizes, Tensor) or not isinstance(group_sizes, list | tuple | range):
        return cast(Tensor, group_sizes)
    try:
        dtype = None if group_sizes else torch.int64
        return torch.tensor(group_sizes, dtype=dtype, device=getattr(input, "device", None))
    except (TypeError, ValueError, RuntimeError):
        return cast(Tensor, group_sizes)
