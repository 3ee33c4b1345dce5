"""Every way by which the memory of a tensor leaves it: a ValueError, or the memory of the data, but never address 0."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

import transformer_plugin as tp
from tests.tensor.values import numbers, quantized, sizes, stack
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._base import FormatTensor

KINDS = ("plain stack", "plain ragged", "parameter", "matrix", "stack", "ragged")


def make(kind: str, device: torch.device) -> Any:
    if kind == "plain stack":
        return stack(device)
    if kind == "parameter":
        return torch.nn.Parameter(stack(device))
    if kind == "plain ragged":
        return GroupedTensor(numbers("ragged", device), sizes(device))
    return quantized(("fp8_block", kind, (True, True)), device)


#: Each would give the address of a value, which has none, or its bytes.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "to_dlpack": lambda v: torch.utils.dlpack.to_dlpack(v),
    "torch.to_dlpack": lambda v: torch.to_dlpack(v),  # type: ignore[attr-defined]
    "__dlpack__": lambda v: v.__dlpack__(),
    "torch.from_dlpack": lambda v: torch.from_dlpack(v),
    "torch.utils.dlpack.from_dlpack": lambda v: torch.utils.dlpack.from_dlpack(v),
    "np.from_dlpack": lambda v: np.from_dlpack(v),
    "numpy": lambda v: v.numpy(),
    "numpy(force)": lambda v: v.numpy(force=True),
    "detach().cpu().numpy()": lambda v: v.detach().cpu().numpy(),
    "np.asarray": lambda v: np.asarray(v),
    "np.array": lambda v: np.array(v),
    "__array__": lambda v: v.__array__(),
    "tolist": lambda v: v.tolist(),
    "item": lambda v: v.item(),
    "storage": lambda v: v.storage(),
    "apply_": lambda v: v.apply_(float),
    "set_": lambda v: torch.empty(0, dtype=v.dtype, device=v.device).set_(v),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED)
def test_memory_is_refused(name: str, kind: str, device: torch.device) -> None:
    value = make(kind, device)
    with pytest.raises(
        ValueError, match=r"transformer_plugin::\w+: argument '\w+': expected .*, got .*\. Call "
    ):
        REFUSED[name](value)


@pytest.mark.parametrize("kind", KINDS)
def test_interfaces_of_arrays_do_not_exist(kind: str, device: torch.device) -> None:
    value = make(kind, device)
    assert not hasattr(value, "__array_interface__") and not hasattr(value, "__cuda_array_interface__")
    with pytest.raises(TypeError):
        memoryview(value)


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_cpp_gets_no_address(kind: str, device: torch.device) -> None:
    """What asks torch for the address of the wrapper, as extensions do, gets an error. Views and copies, too."""
    value = make(kind, device)
    for each in (value, value.detach(), value.clone(), value.to(torch.float16)):
        for read in (torch._C._to_dlpack, torch._C._to_dlpack_versioned, torch.Tensor.data_ptr):  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                read(each.detach())
        for read in (lambda s: s.data_ptr(), lambda s: s[0], lambda s: s.clone(), lambda s: s.fill_(0)):
            with pytest.raises(RuntimeError):
                read(each.untyped_storage())


@pytest.mark.parametrize("kind", KINDS)
def test_address_of_the_data(kind: str, device: torch.device) -> None:
    value = make(kind, device)
    assert value.data_ptr() == value.rowwise_data.data_ptr() != 0
    assert value.flat_bytes().data_ptr() == value.data_ptr()
    assert value.detach().data_ptr() == value.data_ptr() != value.clone().data_ptr()


def test_plain_tensors_still_have_dlpack(device: torch.device) -> None:
    x = torch.arange(6.0, device=device).view(2, 3)
    for capsule in (torch.utils.dlpack.to_dlpack(x), torch.to_dlpack(x)):  # type: ignore[attr-defined]
        assert torch.utils.dlpack.from_dlpack(capsule).data_ptr() == x.data_ptr()
    packed = stack(device).packed()
    assert torch.from_dlpack(packed).data_ptr() == packed.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_other_processes_share_the_buffers(kind: str) -> None:
    """share_memory_() and the pickles of queues of torch.multiprocessing carry each buffer, not the wrapper."""
    value = make(kind, torch.device("cpu")).share_memory_()
    assert value.is_shared()
    received = ForkingPickler.loads(ForkingPickler.dumps(value))
    assert type(received) is type(value) and received.format == value.format
    assert torch.equal(received.detach(), value.detach())
    received.rowwise_data.detach().view(torch.uint8).zero_()
    assert not value.rowwise_data.detach().view(torch.uint8).any(), "the same memory"


@pytest.mark.parametrize("kind", KINDS)
def test_files(kind: str, device: torch.device) -> None:
    value, file = make(kind, device), io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, FormatTensor) and torch.equal(loaded.detach(), value.detach())
    assert loaded.data_ptr() != value.data_ptr()
    assert tp.dequantize(loaded.detach()).shape == value.shape
