"""Tensors in memory that the other ranks of a group can write, so that rows which they send need no copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from transformer_plugin.config import settings
from transformer_plugin.ops.peer_memory import symmetric_allocate, symmetric_empty
from transformer_plugin.parallel._ep_checks import check_type, device_named, device_of, refuse
from transformer_plugin.parallel._group_names import name_with_rank

#: Tensors begin at multiples of so many bytes.
UNIT = 256


class SymmetricPool:
    """Memory of one size on every rank of a group, from which each rank takes tensors by itself.

    The constructor is collective. The memory stays until the group is destroyed, because CUDA graphs may hold its
    addresses; that of a tensor is free again when the last view of it is gone, for work on the same stream.

    Args:
        group: the ranks, on GPUs of one host that NVLink connects; or one rank, on any device.
        num_bytes: the size on each rank, the same on all. Tensors begin at multiples of 256 bytes.
        timeout: the longest wait for other ranks in seconds; None for ``config.settings.peer_timeout``.
        device: by default this process's GPU if the group has NCCL, else the CPU.

    Raises:
        ValueError: a size below 1, or ranks that cannot write each other's memory; the error says why.
        PeerTimeoutError: a rank did not take part in time.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int,
        *,
        timeout: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_type("SymmetricPool", "group", group, dist.ProcessGroup, "a process group")
        check_type("SymmetricPool", "num_bytes", num_bytes, int, "an integer")
        timeout = settings.peer_timeout if timeout is None else timeout
        check_type("SymmetricPool", "timeout", timeout, int | float, "a number of seconds")
        if not 0 < timeout < 1e9:
            refuse("timeout", "a positive number of seconds below 1e9", timeout, "SymmetricPool", "Pass 60.0")
        #: the ranks that can write the tensors.
        self.group = group
        #: where the tensors are.
        self.device = device_of(group) if device is None else device_named(device, "SymmetricPool")
        self._name = name_with_rank(group.group_name, group.rank())
        milliseconds = max(1, int(timeout * 1000))
        self._allocation, reason = symmetric_allocate(self._name, num_bytes, milliseconds, self.device)
        if reason:
            expected = "ranks that reach each other's memory"
            refuse("group", expected, reason, "SymmetricPool", "Use ordinary tensors")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor. Not collective, and not while a CUDA graph is captured.

        Raises:
            ValueError: no free piece of its size.
        """
        taken = symmetric_empty(self._name, self._allocation, math.prod(shape) * dtype.itemsize)
        return taken.view(dtype).view(tuple(shape))

    def try_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return the same, or None where there is no room."""
        try:
            return self.empty(shape, dtype)
        except ValueError as error:
            if "that are free in one piece" not in str(error):
                raise
            return None
