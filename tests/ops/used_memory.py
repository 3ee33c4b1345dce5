"""Memory that is handed out with garbage in it, so that a test sees what reads memory that nobody has written."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

#: glibc's mallopt parameter: with a value v other than 0, new memory has the bytes v ^ 0xff.
M_PERTURB = -6
#: NaN in E4M3 and E5M2, 3.4e38 in float32 and bfloat16, an odd number in integers.
BYTE = 0x7F


@contextlib.contextmanager
def _of_the_host() -> Iterator[None]:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        yield
        return
    mallopt(M_PERTURB, BYTE ^ 0xFF)
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)


def _fill_cache(device: torch.device) -> None:
    """Small and large blocks in the cache of torch's allocator, all of NaN in every float dtype and in the scales."""
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 20,), 255, dtype=torch.uint8, device=device) for _ in range(64)]
    blocks += [torch.full((1 << 28,), 255, dtype=torch.uint8, device=device)]
    del blocks


@contextlib.contextmanager
def garbage_in_new_memory(device: torch.device) -> Iterator[None]:
    """New tensors on the device, until the first that are freed, begin with garbage."""
    if device.type == "cuda":
        _fill_cache(device)
        yield
        return
    with _of_the_host():
        yield
