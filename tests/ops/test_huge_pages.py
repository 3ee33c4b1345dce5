"""Large new allocations on a CPU are requested in huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops

KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(tensor: Tensor) -> list[str]:
    """Returns the kernel's flags of the mapping that contains the middle of a tensor."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("no mapping contains the tensor")


@pytest.mark.skipif(not KERNEL.exists(), reason="this kernel has no transparent huge pages")
def test_large_tensors_are_in_huge_pages() -> None:
    rows = torch.ones(40, 1024)
    sizes = torch.tensor([20, 0, 20, 0, 0, 0], dtype=torch.int32)
    gradient = ops.grouped_gemm_wgrad(rows[:, :1000].contiguous(), rows, sizes)  # 24 MB
    assert "hg" in flags_of(gradient)
