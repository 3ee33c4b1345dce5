"""Ops that copy a value, to other memory or another device, or write one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import check_strided
from transformer_plugin.tensor import _checks
from transformer_plugin.tensor._base import FLOATS, Buffers, FormatTensor
from transformer_plugin.tensor._elementwise import in_place, unwrapped
from transformer_plugin.tensor._table import handles, unsupported


@handles("clone")
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._with(Buffers(*(t if t is None else t.clone() for t in args[0]._buffers)))


@handles("_to_copy")
def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To another device, or with another dtype, which for a quantized value is the nominal one."""
    value, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    moved = {
        name: kwargs[name]
        for name in ("device", "non_blocking", "pin_memory")
        if kwargs.get(name) is not None
    }
    buffers = Buffers(
        *(t if t is None else torch.ops.aten._to_copy.default(t, **moved) for t in value._buffers)
    )
    if not value.format.is_quantized:
        assert buffers.rowwise_data is not None
        return value._with(buffers._replace(rowwise_data=buffers.rowwise_data.to(dtype)), dtype=dtype)
    if dtype not in FLOATS:
        advice = "Call dequantize(), then to()"
        value._refuse("dtype", "float32, bfloat16 or float16, a nominal dtype", str(dtype), advice)
    return value._with(buffers, dtype=dtype)


@handles("_pin_memory")
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._with(Buffers(*(t if t is None else t.pin_memory() for t in args[0]._buffers)))


@handles("is_pinned")
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(t.is_pinned() for _, t in args[0]._buffers.present())


@handles("record_stream")
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for _, tensor in args[0]._buffers.present():
        tensor.record_stream(args[1])


@handles("view_copy")
def _dequantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The numbers of a value in its shape. dequantize() calls this op, because torch has its gradient: the identity."""
    value = args[0]
    if isinstance(args[1], torch.dtype) or list(args[1]) != list(value.shape):
        raise unsupported(func, value)
    buffers, key = value._buffers, value._key
    if not value.format.is_quantized:
        clone: Tensor = buffers.rowwise_data.clone()
        return clone
    if buffers.rowwise_data is not None:
        direction = (buffers.rowwise_data, buffers.scale_inv)
        amax, transposed = buffers.amax, False
    else:
        direction = (buffers.columnwise_data, buffers.columnwise_scale_inv)
        amax, transposed = buffers.columnwise_amax, True
    numbers = ops.dequantize(*direction, key, value.dtype, buffers.group_sizes, transposed, amax)
    if numbers.shape == value.shape:
        return numbers
    return numbers[: value.shape[0]].clone()  # aligned columnwise data has rows up to a multiple of 32


@handles("copy_")
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    destination, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if not isinstance(destination, FormatTensor):
        if source.format.is_quantized:
            advice = "Call dequantize() on it"
            source._refuse("src", "values that are not quantized", source._described(), advice)
        return destination.copy_(source._buffers.rowwise_data, non_blocking)
    if not destination.format.is_quantized:
        return in_place(func, args, kwargs)
    if not isinstance(source, FormatTensor):
        source = source if isinstance(source, Tensor) else torch.tensor(source, dtype=torch.float32)
        check_strided(type(destination).__name__, "src", source)
        _write(destination, source.expand(destination.shape), non_blocking)
        return destination
    if destination._takes_bytes(source):
        for (_, old), (_, new) in zip(destination._buffers.present(), source._buffers.present(), strict=True):
            old.copy_(new, non_blocking)
        _checks.bump_versions(old for _, old in destination._buffers.present())
        return destination
    if source.format.is_quantized:
        advice = "Call dequantize() on it to quantize its numbers again"
        destination._refuse("src", f"a {destination._described_fully()}", source._described_fully(), advice)
    numbers = source._buffers.rowwise_data
    assert numbers is not None
    _write(destination, numbers, non_blocking)
    return destination


def _write(destination: FormatTensor, numbers: Tensor, non_blocking: bool) -> None:
    """Quantizes numbers of any real dtype from any device; dtypes that the ops do not read become float32 first."""
    numbers = numbers.to(destination.device, non_blocking=non_blocking)
    if numbers.dtype not in FLOATS and not numbers.is_complex():
        numbers = numbers.float()
    _checks.write(destination, numbers)


@handles("equal")
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of unquantized values, whether the numbers are equal; of quantized ones, whether all bytes are."""
    values = [a for a in args if isinstance(a, FormatTensor)]
    if not any(value.format.is_quantized for value in values):
        return bool(func(*unwrapped(args, func)))
    if len(values) != 2 or not values[0]._takes(values[1]):
        return False
    pairs = zip(values[0]._buffers.present(), values[1]._buffers.present(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in pairs)
