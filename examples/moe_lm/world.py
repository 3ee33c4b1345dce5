"""The ranks: this process's device and the groups in which it communicates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_lm.limits import UserError


@dataclass(frozen=True)
class World:
    """This process among the ranks. Each rank has its share of the experts.

    Each trains on different data; with tensor parallelism, each group of ranks does.
    """

    rank: int
    size: int
    device: torch.device
    group: ProcessGroup
    #: ("copies", "experts"): ranks with the same experts, by ranks over which experts are sharded.
    mesh: DeviceMesh
    #: ("copies", "shards", "tensor"): ranks with the same parts of dense layers, by ranks that shard these over
    #: different sequences, by ranks that share products. None if every rank has whole dense layers.
    dense_mesh: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Waits for the device, for timings."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Waits for the device and the other ranks, so that the next timing includes no earlier work."""
        self.synchronize()
        if self.size > 1:
            dist.barrier(group=self.group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context in which a :class:`UserError` of one rank is raised on all ranks, so that none continues."""
        error = None
        try:
            yield
        except UserError as caught:
            error = caught
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, None if error is None else str(error), group=self.group)
        found = [text for text in errors if text is not None]
        if found:
            raise UserError.of_line(found[0])


def under_torchrun() -> bool:
    """Whether a launcher has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined_world(
    sharing: int | None = None,
    repeatable: bool = True,
    timeout: timedelta = timedelta(minutes=5),
    *,
    tensor_parallel: int = 1,
    shard: int = 1,
) -> Iterator[World]:
    """Joins the group of all ranks: NCCL if there is a GPU for each rank, otherwise Gloo on the CPU.

    ``sharing`` is the number of ranks over which the experts are sharded, by default all.
    ``tensor_parallel`` and ``shard`` are the numbers of ranks over which dense layers are.
    ``repeatable`` asks torch for deterministic algorithms, so that resumed runs have the same bits.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    torch.use_deterministic_algorithms(repeatable)
    torch.utils.deterministic.fill_uninitialized_memory = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if under_torchrun():
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
        )
    try:
        group = dist.group.WORLD
        assert group is not None
        sharing = sharing or size
        mesh = init_device_mesh(device.type, (size // sharing, sharing), mesh_dim_names=("copies", "experts"))
        yield World(rank, size, device, group, mesh, dense_mesh(device, size, tensor_parallel, shard))
    finally:
        dist.destroy_process_group()


def dense_mesh(device: torch.device, size: int, tensor_parallel: int, shard: int) -> DeviceMesh | None:
    """Makes the mesh of :class:`World`. A collective call. Tensor-parallel ranks follow each other."""
    if tensor_parallel * shard == 1:
        return None
    sizes = (size // (tensor_parallel * shard), shard, tensor_parallel)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards", "tensor"))
