"""Large fresh memory on a CPU is asked for in huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops

KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(tensor: Tensor) -> list[str]:
    """What the kernel notes of the mapping in which the middle of a tensor lies."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("a tensor lies in a mapping")


@pytest.mark.skipif(not KERNEL.exists(), reason="this kernel has no huge pages for those who ask")
def test_asked_for() -> None:
    rows = torch.ones(40, 1024)
    sizes = torch.tensor([20, 0, 20, 0, 0, 0], dtype=torch.int32)
    gradient = ops.grouped_gemm_wgrad(rows[:, :1000].contiguous(), rows, sizes)  # 24 MB
    assert "hg" in flags_of(gradient)
