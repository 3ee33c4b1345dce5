"""Memory that the GPUs of a group read and write by pointers, and the channels of one-sided exchanges in it.

``group_name`` and ``timeout_ms`` are those of :mod:`transformer_plugin.ops.expert_parallel`. Both functions are
collective.
"""

from __future__ import annotations

import torch

from transformer_plugin.errors import peer_errors

__all__ = ["open_channel", "peer_memory_support"]

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
