"""Values as what is read by ops that write: sources of quantization, and ragged values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import transformer_plugin as tp
from tests.tensor.values import KEYS, bytes_of, numbers, quantized, same_bytes, sizes, stack
from transformer_plugin.tensor import GroupedTensor


@pytest.mark.parametrize("key", KEYS)
def test_quantize_from_a_value(key: str, device: torch.device) -> None:
    x = numbers("stack", device, 1)
    expected = tp.quantize(x, key, columnwise=True)
    for source in (GroupedTensor(x), Parameter(GroupedTensor(x.clone())), x.clone().requires_grad_()):
        value = quantized((key, "stack", (True, True)), device)
        assert value.quantize_(source) is value and same_bytes(value, expected)
        assert not value.requires_grad
    before = bytes_of(value)
    with pytest.raises(
        ValueError, match="argument 'source': expected values that are not quantized, got Grouped"
    ):
        value.quantize_(quantized((key, "stack", (True, True)), device))
    assert all(torch.equal(old, bytes_of(value)[name]) for name, old in before.items())


@pytest.mark.parametrize("key", KEYS)
def test_copy_of_one_number(key: str, device: torch.device) -> None:
    """As a plain tensor takes it."""
    value: Any = quantized((key, "stack", (True, True)), device)
    for number in (2.0, torch.tensor(2.0), torch.tensor(2.0, device=device)):
        value.copy_(numbers("stack", device))
        value.copy_(number)
        assert bool((value.dequantize() == 2).all())
    plain: Any = stack(device)
    assert bool((plain.copy_(2.0).packed() == 2).all())


WRITES: tuple[Callable[[Any, Any], Any], ...] = (
    lambda t, v: t.add_(v),
    lambda t, v: t.addcmul_(t, v),
    lambda t, v: t.lerp_(v, 0.5),
    lambda t, v: t.mul_(other=v),
    lambda t, v: torch._foreach_add_([t], [v]),
    lambda t, v: torch._foreach_addcdiv_([t.clone(), t], [t, t], [t, v]),
)


@pytest.mark.parametrize("i", range(len(WRITES)))
def test_a_ragged_value_is_not_read_into_a_tensor_without_groups(i: int, device: torch.device) -> None:
    """Its rows past the groups may hold anything; the sum of the two is refused, too."""
    data = torch.ones(80, 16, device=device)
    ragged = GroupedTensor(torch.full((80, 16), torch.nan, device=device), sizes(device))
    with pytest.raises(ValueError, match="argument 'self': expected members whose sizes the host knows"):
        WRITES[i](data, ragged)
    assert bool((data == 1).all())
    assert WRITES[i](GroupedTensor(data, sizes(device)), ragged) is not None or i > 3
    assert bool((data[64:] == 1).all())


def test_copies_of_ragged_values_have_all_rows(device: torch.device) -> None:
    ragged = GroupedTensor(torch.randn(80, 16, device=device), sizes(device))
    for copied in (
        torch.zeros(80, 16, device=device).copy_(ragged),
        torch._foreach_copy_([torch.zeros(80, 16, device=device)], [ragged])[0],
    ):
        assert type(copied) is Tensor and torch.equal(copied, ragged.packed())


def test_ops_of_this_library_name_their_argument(device: torch.device) -> None:
    x, value = torch.randn(8, 16, device=device), stack(device)
    calls: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("activation", "probs", lambda: tp.ops.activation(x, value)),
        ("permute", "tokens", lambda: tp.ops.permute(value, torch.zeros(8, 1, device=device).int(), 1, 8)),
        (
            "grouped_gemm",
            "b",
            lambda: tp.ops.grouped_gemm(x, value, torch.tensor([8, 0, 0, 0], device=device)),
        ),
    )
    for op, argument, call in calls:
        text = rf"^transformer_plugin::{op}: argument '{argument}': expected a plain tensor, got GroupedTensor \["
        with pytest.raises(ValueError, match=text + r".*\. Call packed\(\)"):
            call()
