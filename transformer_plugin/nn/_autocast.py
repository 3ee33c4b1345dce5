"""What ``torch.autocast`` means for a module here: its operands are cast as those of ``torch.nn.Linear`` are."""

from __future__ import annotations

import torch
from torch import Tensor


def operands(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of a layer, as autocast casts those of ``aten::linear``; as they are outside of a region."""
    dtype = _dtype(input)
    if dtype is None:
        return input, weight, bias
    input, weight = _cast(input, input, dtype), _cast(weight, input, dtype)
    return input, weight, None if bias is None else _cast(bias, input, dtype)


def operand(input: Tensor) -> Tensor:
    """The input alone."""
    dtype = _dtype(input)
    return input if dtype is None else _cast(input, input, dtype)


def as_float32(factor: Tensor) -> Tensor:
    """A factor of rows, which the ops take in float32: mixed precision hands it over in the parameters' dtype. Its
    gradient comes back in the dtype that it had."""
    return factor.float() if factor.is_floating_point() else factor


def _dtype(input: Tensor) -> torch.dtype | None:
    """That of the region for tensors of this device."""
    if not isinstance(input, Tensor):  # the op says what it expected
        return None
    device = input.device.type
    # Tensors on other devices, "meta" among them, have no regions, and torch refuses the question.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, input: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating tensors on the device of the input, but no float64."""
    if tensor.device.type != input.device.type or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
