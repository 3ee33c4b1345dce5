"""Copies and files of values: deepcopy, pickle, torch.save with weights_only, state dicts of modules."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.tensor.values import CASES, quantized, same_bytes, stack
from transformer_plugin.tensor import GroupedTensor


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def alike(a: Any, b: Any) -> bool:
    kinds = [
        (type(v), v.shape, v.dtype, v.device, v.requires_grad, isinstance(v, Parameter), v.format)
        for v in (a, b)
    ]
    return kinds[0] == kinds[1] and same_bytes(a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_and_files(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    originals: list[Any] = [value, Parameter(value), Parameter(value, requires_grad=False)]
    for original in originals:
        for other in (copy.deepcopy(original), saved(original), pickle.loads(pickle.dumps(original))):
            assert alike(original, other)
            addresses = [
                {t.data_ptr() for _, t in v._buffers.present() if t.numel()} for v in (original, other)
            ]
            assert not addresses[0] & addresses[1]


def test_attributes_and_gradients(device: torch.device) -> None:
    p: Any = Parameter(stack(device))
    p.main_grad = torch.ones(p.shape, device=device)
    p.grad = torch.full(p.shape, 2.0, device=device)
    other: Any
    for other in (copy.deepcopy(p), saved(p)):
        assert torch.equal(other.main_grad, p.main_grad) and other.main_grad is not p.main_grad
    assert torch.equal(copy.deepcopy(p).grad, p.grad)


def test_shared_storage_stays_shared(device: torch.device) -> None:
    flat = torch.randn(2 * 4 * 8, device=device)
    a, b = (GroupedTensor(part.view(2, 2, 8)) for part in flat.chunk(2))
    first, second, again = copy.deepcopy([a, b, a])
    assert first is again and second.data_ptr() == first.data_ptr() + 2 * 2 * 8 * 4
    loaded = saved({"a": a, "b": b})
    assert loaded["b"].data_ptr() == loaded["a"].data_ptr() + 2 * 2 * 8 * 4


def test_state_dict_of_a_module(device: torch.device, tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.weight = Parameter(stack(device))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu", mmap=True)
    assert type(state["weight"]) is GroupedTensor
    other: Any = torch.nn.Module()
    other.weight = Parameter(stack(device))
    address = other.weight.data_ptr()
    other.load_state_dict(state)
    assert torch.equal(other.weight, module.weight) and other.weight.data_ptr() == address
    other.load_state_dict({"weight": torch.zeros(4, 8, 16)})  # a plain tensor
    assert not bool(other.weight.detach().packed().any())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({"weight": torch.zeros(3, 8, 16)})
    twin = copy.deepcopy(module)
    assert alike(twin.weight, module.weight)


def test_modules_move_and_cast(device: torch.device) -> None:
    weight: Any = Parameter(stack(torch.device("cpu")))
    module = torch.nn.Module()
    module.weight = weight
    numbers = weight.detach().packed().clone()
    module.to(device)
    assert id(module.weight) == id(weight) and weight.device.type == device.type
    assert torch.equal(weight.detach().packed().cpu(), numbers)
    module.bfloat16()
    assert weight.dtype == torch.bfloat16 and torch.equal(weight.detach().packed().cpu(), numbers.bfloat16())
    module.to_empty(device="meta")
    assert module.weight.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.bool], ids=str)
def test_files_of_unquantized_values_of_any_dtype(dtype: torch.dtype, device: torch.device) -> None:
    value = GroupedTensor((torch.randn(2, 3, 4, device=device) * 4).to(dtype))
    for other in (copy.deepcopy(value), saved(value), pickle.loads(pickle.dumps(value)), copy.copy(value)):
        assert other.dtype == other.rowwise_data.dtype == dtype
        assert torch.equal(other.rowwise_data.view(torch.uint8), value.rowwise_data.view(torch.uint8))
