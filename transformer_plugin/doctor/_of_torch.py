"""What torch says. A file that a child runs; it imports nothing of this package."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any


def versions() -> dict[str, Any]:
    """What torch is, what it was built with, and whether it can use a GPU."""
    import torch
    import torch.distributed as dist

    cuda = torch.version.cuda
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": cuda, "hip": torch.version.hip}
    facts["isa"] = torch.backends.cpu.get_cpu_capability()
    facts["threads"] = torch.get_num_threads()
    facts["distributed"] = dist.is_available()
    facts["nccl"] = _nccl() if dist.is_available() and cuda else None
    facts["runtime"] = _runtime(cuda) if cuda else None
    facts["architectures"] = torch.cuda.get_arch_list()  # empty without a GPU
    facts |= {"devices": 0, "error": ""}
    if cuda:
        facts |= _usable_devices()
    return facts


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist

    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def _runtime(cuda: str) -> str | None:
    """The version of the runtime that torch has loaded."""
    try:
        library, number = ctypes.CDLL(f"libcudart.so.{cuda.split('.')[0]}"), ctypes.c_int()
    except OSError:
        return None
    library.cudaRuntimeGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _usable_devices() -> dict[str, Any]:
    """How many GPUs torch can use. Where it cannot, it says so in a warning or in an error."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return {"devices": torch.cuda.device_count()}
    try:
        torch.cuda.init()
        error = ""
    except (RuntimeError, AssertionError) as raised:
        error = str(raised)
    texts = [str(each.message) for each in said] or [error]
    return {"error": " ".join(texts[0].split())}


def peer_access() -> list[list[bool]]:
    """Which GPU (row) can access the memory of which (column)."""
    import torch

    devices = range(torch.cuda.device_count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in devices] for i in devices]
