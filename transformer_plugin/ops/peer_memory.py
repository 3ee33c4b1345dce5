"""Memory that the GPUs of a group read and write by pointers: the channels of one-sided exchanges, and tensors.

``group_name`` and ``timeout_ms`` are those of :mod:`transformer_plugin.ops.expert_parallel`. Functions with a timeout
are collective. None can be captured in a CUDA graph or compiled; what they return can be used in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.errors import peer_errors

__all__ = ["is_symmetric", "open_channel", "peer_memory_support", "symmetric_allocate", "symmetric_empty"]

_ops = torch.ops.transformer_plugin


def peer_memory_support(
    group_name: str, timeout_ms: int = -1, device: torch.device | None = None
) -> tuple[bool, str]:
    """Return whether the GPUs of all ranks can access each other's memory, and why not. The first call tries it."""
    with peer_errors():
        return tuple(_ops.peer_memory_support.default(group_name, timeout_ms, device))


def open_channel(
    group_name: str,
    *,
    received_rows: int,
    returned_rows: int,
    record_bytes: int,
    num_experts: int,
    planned_rows: int,
    topk: int,
    timeout_ms: int = -1,
    device: torch.device | None = None,
) -> str:
    """Open the memory of a group's one-sided exchanges, collectively. Returns "", or why its ranks cannot have it.

    Contexts call it (:class:`transformer_plugin.parallel.EpContext`). A channel that is open and large enough stays.

    Args:
        group_name: with ``#channel=`` and a number at its end.
        received_rows, returned_rows: the most rows that a rank gets from others in a dispatch, and in a combine.
        record_bytes: of a row and its weights, each rounded up to 16.
        num_experts, planned_rows, topk: E, N and K of the largest plan.

    Raises:
        ValueError: a negative size. PeerTimeoutError: a rank did not take part in time.
    """
    sizes = (received_rows, returned_rows, record_bytes, num_experts, planned_rows, topk)
    with peer_errors():
        return str(_ops.open_channel.default(group_name, *sizes, timeout_ms, device))


def symmetric_allocate(
    group_name: str, num_bytes: int, timeout_ms: int = -1, device: torch.device | None = None
) -> tuple[int, str]:
    """Allocate memory on ``device`` of every rank that all ranks can write. Returns ``(number, reason)``.

    The number is that for :func:`symmetric_empty`, the same on every rank; or 0, and why the ranks cannot share memory.
    The memory stays until the group is destroyed, because CUDA graphs may hold its addresses. A group has at most 64.

    Raises:
        ValueError: a size that is not from 1 to 2^40, or one allocation too many. PeerTimeoutError: a rank did not take
            part in time.
    """
    with peer_errors():
        return tuple(_ops.symmetric_allocate.default(group_name, num_bytes, timeout_ms, device))


def symmetric_empty(group_name: str, allocation: int, num_bytes: int) -> Tensor:
    """Take a uint8 tensor ``[num_bytes]`` from a group's allocation of that number, at a multiple of 256 bytes.

    It is not collective, and ranks may take other sizes. Its memory is free again when the last view of it is gone;
    calls that still use it have to be on the stream of what uses the memory next.

    Raises:
        ValueError: no such allocation, no free piece of that size, or a stream that is captured.
    """
    taken: Tensor = _ops.symmetric_empty.default(group_name, allocation, num_bytes)
    return taken


def is_symmetric(tensor: Tensor) -> bool:
    """Return whether the tensor is in memory of :func:`symmetric_empty`."""
    return bool(_ops.is_symmetric.default(tensor))
