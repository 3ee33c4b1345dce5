"""``torch.autocast`` support: modules cast their operands under the same rules as ``torch.nn.Linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin._arguments import check_strided, is_strided
from transformer_plugin.functional._values import is_quantized, with_dtype
from transformer_plugin.tensor._layout import describe

#: The dtypes that :func:`as_float32` converts. Codes of 8 bits are no factors without their scale.
_FACTORS = (torch.bfloat16, torch.float16, torch.float64)


def operands(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts a layer's operands as autocast does for ``aten::linear``. Outside of autocast, returns them unchanged."""
    dtype = _dtype(input)
    if dtype is None:
        return input, weight, bias
    input, weight = _cast(input, input, dtype), _cast(weight, input, dtype)
    return input, weight, None if bias is None else _cast(bias, input, dtype)


def like_input(weight: Any, input: Tensor) -> Any:
    """Shards of another runtime, one or a list, in the dtype of the input, in which the layer computes."""
    if isinstance(weight, list):
        return [like_input(matrix, input) for matrix in weight]
    return weight.to(input.dtype) if isinstance(input, Tensor) and input.is_floating_point() else weight


def operand(input: Tensor) -> Tensor:
    """Casts the input alone."""
    dtype = _dtype(input)
    return input if dtype is None else _cast(input, input, dtype)


def is_autocast(input: Tensor) -> bool:
    """Whether autocast is enabled on the device of an input."""
    return _dtype(input) is not None


def is_cast(weight: Tensor) -> bool:
    """Whether :func:`operands` makes another tensor of a weight, for an input on its device."""
    dtype = _dtype(weight)
    return dtype is not None and weight.dtype not in (dtype, torch.float64) and weight.is_floating_point()


def as_weight(input: Tensor, weight: Tensor | None) -> Tensor:
    """Casts the input of a norm to the dtype of its weight. Outside of autocast, returns it unchanged.

    On a GPU autocast computes ``aten::layer_norm`` in float32, which is what float32 parameters give here.
    """
    return input if weight is None or _dtype(input) is None else _cast(input, weight, weight.dtype)


def as_float32(factor: Tensor) -> Tensor:
    """Converts a per-row factor to float32, as the ops require.

    Mixed-precision wrappers may pass it in the parameters' dtype. Its gradient has the original dtype.
    """
    if not isinstance(factor, Tensor):  # the op raises the error
        return factor
    return factor.float() if factor.dtype in _FACTORS else factor  # the op refuses others


def fits_rows(factor: Any, input: Tensor) -> bool:
    """Whether an op takes a factor for each row of a matrix."""
    fits = is_strided(factor) and factor.shape == input.shape[:1]
    return fits and factor.dtype == torch.float32 and factor.device == input.device


def check_rows_factor(owner: str, name: str, factor: Any, input: Tensor) -> None:
    """Raises the error of an op that takes a factor for each row of ``input``, before anything is computed."""
    if fits_rows(factor, input):
        return
    if isinstance(factor, Tensor):
        check_strided(owner, name, factor)
    error = ValueError if isinstance(factor, Tensor) and factor.dtype == torch.float32 else TypeError
    raise error(
        f"transformer_plugin::{owner}: argument '{name}': expected a floating-point tensor [{input.shape[0]}] on "
        f"{input.device}, a value for each row of 'input', got {describe(factor)}. Pass one value for each row."
    )


def _dtype(input: Tensor) -> torch.dtype | None:
    """Returns the autocast dtype for the input's device, or None outside of autocast."""
    if not isinstance(input, Tensor):  # the op raises the error
        return None
    # Other devices, such as "meta", have no autocast; torch raises an error if asked.
    device = "cuda" if input.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device) or not (input.is_cuda or input.is_cpu):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, input: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts floating-point tensors on the input's device, except float64. Of a quantized one only the nominal dtype."""
    if is_quantized(tensor):
        cast: Tensor = tensor if tensor.dtype == dtype else with_dtype(tensor, dtype)
        return cast
    other = tensor.layout is not torch.strided  # the op refuses it; torch cannot cast every layout
    if other or tensor.device.type != input.device.type or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
