"""Rows of tokens to their experts and back, as ragged values."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.functional._values import (
    Rows,
    Value,
    describe,
    one_matrix,
    plain,
    refuse,
    with_groups,
)
from transformer_plugin.ops.routing import topk_router
from transformer_plugin.tensor import GroupedTensor

__all__ = ["Permutation", "permute", "topk_router", "unpermute"]


class Permutation(NamedTuple):
    """Where the rows of a permutation are, for :func:`unpermute`."""

    #: int32 ``[T, K]``: the row of each token and choice, or -1.
    slot: Tensor
    #: int32 ``[capacity]``: the token of each row, or -1 in padding.
    source: Tensor
    #: int64 ``[1]``: the rows that were wanted; more than the capacity means that rows were dropped.
    total: Tensor


def permute(
    tokens: Tensor, indices: Tensor, num_experts: int, capacity: int, *, alignment: int = 1
) -> tuple[GroupedTensor, Permutation]:
    """Copies each token's row to its experts: a ragged value of fixed capacity, one group per expert.

    Args:
        tokens: ``[T, H]``.
        indices: int32 or int64 ``[T, K]``; -1: no expert. Another value that is no expert is an error, on a GPU of a
            later call.
        num_experts, capacity: of the result. ``T * K + num_experts * (alignment - 1)`` rows hold every choice.
        alignment: each expert's rows are padded up to a multiple of it.

    Returns:
        ``[capacity, H]`` with the rows of each expert as group sizes, and where each row is. Differentiable in
        ``tokens``; the host reads no size.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.permute`.
    """
    one_matrix(tokens, "permute", "tokens", "Call packed() on it")
    tokens = plain(tokens, "permute", "tokens")
    rows, sizes, slot, source, total = ops.permute(tokens, indices, num_experts, capacity, alignment)
    return with_groups(rows, Rows(rows, sizes, True)), Permutation(slot, source, total)


def unpermute(rows: Value, permutation: Permutation, weights: Tensor | None = None) -> Any:
    """Brings the rows back: each token gets the weighted sum of its rows.

    Args:
        rows: ``[capacity, H]``, a ragged value or a plain tensor.
        permutation: what :func:`permute` returned.
        weights: float32 ``[T, K]``, or None for 1.

    Returns:
        A plain tensor ``[T, H]``. Differentiable in ``rows`` and ``weights``.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.unpermute`.
    """
    if not isinstance(permutation, Permutation):
        advice = "Pass the second result of permute"
        refuse("unpermute", "permutation", "a Permutation", describe(permutation), advice, TypeError)
    return ops.unpermute(plain(rows, "unpermute", "rows"), permutation.slot, permutation.source, weights)
