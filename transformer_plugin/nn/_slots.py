"""Slots: which rows of the experts hold which tokens."""

from __future__ import annotations

from typing import NamedTuple

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
