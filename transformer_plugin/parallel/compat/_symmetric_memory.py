"""TransformerEngine's functions for symmetric memory, and the pool of ``ep_bootstrap`` with ``zero_copy``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from transformer_plugin.ops.peer_memory import is_symmetric
from transformer_plugin.parallel._ep_checks import check_type, refuse
from transformer_plugin.parallel.symmetric import UNIT, SymmetricPool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from transformer_plugin.parallel.expert import EpContext

_pool: SymmetricPool | None = None


def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: ProcessGroup,
    device: torch.device | str | None = None,
    use_pool: bool = False,
    backend: str = "CUDA",
) -> Tensor:
    """Return an uninitialized tensor in memory that the other ranks of the group can write.

    Without ``use_pool`` each call makes an allocation of its own, which stays until the group is destroyed; a group has
    at most 64.

    Args:
        shape, dtype: of the tensor.
        ep_group: the ranks. Without ``use_pool`` the call is collective, and the sizes are equal on all ranks.
        device: None for this process's GPU.
        use_pool: whether to take it from the pool of :func:`ep_bootstrap` with ``zero_copy``: not collective.
        backend: "CUDA", torch's own.

    Raises:
        ValueError: another backend, ranks that cannot write each other's memory, or a pool without room.
        RuntimeError: there is no pool. PeerTimeoutError: a rank did not take part in time.
    """
    check_type("symm_mem_alloc", "ep_group", ep_group, dist.ProcessGroup, "a process group")
    if backend != "CUDA":
        refuse("backend", '"CUDA"', repr(backend), "symm_mem_alloc", "Leave it out")
    if not use_pool:
        size = max(1, math.prod(shape) * dtype.itemsize)
        return SymmetricPool(ep_group, size, device=device).empty(shape, dtype)
    if _pool is None or _pool.group is not ep_group:
        raise RuntimeError(
            "transformer_plugin::symm_mem_alloc: argument 'use_pool': expected a call of ep_bootstrap(zero_copy=True) "
            "for this group first, got none. Call it on each rank, or pass use_pool=False."
        )
    return _pool.empty(shape, dtype)


def release_symm_mem_pool() -> None:
    """Take no more tensors from the pool. Its memory stays until the group is destroyed, as that of each pool."""
    global _pool
    _pool = None


def is_symm_backed(tensor: Tensor) -> bool:
    """Return whether other ranks can write the tensor's memory. It asks no other rank."""
    check_type("is_symm_backed", "tensor", tensor, Tensor, "a tensor")
    return is_symmetric(tensor)


def check_zero_copy(zero_copy: bool, capacity: int | None, pool_bytes: int | None) -> None:
    """Refuses wrong arguments of ``ep_bootstrap``."""
    check_type("ep_bootstrap", "zero_copy", zero_copy, bool, "True or False")
    if zero_copy and capacity is None:
        advice = "Pass the rows of the receive layout, which the tensors have"
        refuse("recv_capacity_per_rank", "a number with zero_copy", None, "ep_bootstrap", advice)
    if pool_bytes is None:
        return
    check_type("ep_bootstrap", "symm_mem_pool_bytes", pool_bytes, int, "an integer or None")
    if not zero_copy or isinstance(pool_bytes, bool) or pool_bytes < 1:
        expected = "1 or more, and zero_copy=True"
        refuse("symm_mem_pool_bytes", expected, pool_bytes, "ep_bootstrap", "Pass None")


def open_pool(context: EpContext, num_bytes: int | None) -> None:
    """Take tensors for the calls of this context from a new pool; None: with room for four results."""
    global _pool
    if context.group is None:
        return
    config = context.config
    result = context.capacity * config.hidden_dim * config.max_token_dtype.itemsize
    size = num_bytes or 4 * max(UNIT, -(-result // UNIT) * UNIT)
    _pool = SymmetricPool(context.group, size, timeout=context.timeout_ms / 1000, device=context.device)


def has_pool(group: ProcessGroup | None) -> bool:
    """Whether results of calls of this group may come from the pool."""
    return _pool is not None and _pool.group is group


def pooled(group: ProcessGroup | None, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """A tensor of the pool, where there is one with room and tensors can be taken from it."""
    if _pool is None or not has_pool(group) or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None
    if like.device != _pool.device or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return _pool.try_empty(shape, like.dtype)
