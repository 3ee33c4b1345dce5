"""Ops that give a value, its storage or its members over the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin.tensor import _layout
from transformer_plugin.tensor._base import Buffers, FormatTensor
from transformer_plugin.tensor._table import handles, name_of, unsupported
from transformer_plugin.tensor.grouped import GroupedTensor
from transformer_plugin.tensor.quantized import QuantizedTensor


@handles("detach", "alias", "lift_fresh")
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._with(args[0]._buffers)


@handles("detach_")
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch has changed the history of the value already."""
    return args[0]


@handles("expand")
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value, shape = args[0], list(args[1])
    if len(shape) == value.dim():
        shape = [old if new == -1 else new for old, new in zip(value.shape, shape, strict=True)]
    if shape != list(value.shape):
        advice = "Expand what packed() or dequantize() gives"
        value._refuse("size", f"{_layout.sizes(value)}, the shape of the value", str(list(args[1])), advice)
    return value._with(value._buffers)


@handles("as_strided")
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of its own sizes and strides: FSDP2 makes its parameter so."""
    value, size, stride, offset = [*args, None, None][:4]
    if (list(size), list(stride), offset or 0) != (list(value.shape), list(value.stride()), 0):
        raise unsupported(func, value)
    return value._with(value._buffers)


@handles("view", "_unsafe_view")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = args[0]
    if isinstance(args[1], torch.dtype):
        raise unsupported(func, value)
    shape = list(args[1])
    data = value._buffers.rowwise_data
    # view_as(), with which torch finds the node of a parameter, and DTensor's to_local().
    if shape == list(value.shape):
        same: Tensor = value._with(value._buffers)
        return same
    if value.format.is_quantized:
        advice = "Call flat_bytes() for the bytes of the data, dequantize() for its numbers"
        value._refuse("size", "an unquantized value", f"{shape} of a {value._described()}", advice)
    if shape not in ([-1], [value.numel()]):
        advice = "Call packed() for a plain tensor, which has every view"
        value._refuse("size", f"[-1] or [{value.numel()}], the flat storage", str(shape), advice)
    flat: Tensor = data.view(-1)
    return flat


# Members of a stack along dimension 0, over the same memory.


def _stack(value: FormatTensor, func: Any, dim: int) -> GroupedTensor:
    """The value, if it is a stack of members and ``dim`` its first dimension."""
    if not isinstance(value, GroupedTensor) or dim not in (0, -value.dim()):
        advice = "Call packed() or dequantize() first"
        got = f"{dim} in {name_of(func)} of a {value._described()}"
        value._refuse("dim", "0, the members of a GroupedTensor", got, advice)
    if value.is_ragged:
        advice = "members() reads the sizes on the host; packed() gives all rows"
        got = f"a ragged {value._described()} in {name_of(func)}"
        value._refuse("self", "members whose sizes the host knows", got, advice)
    return value


def _member(value: GroupedTensor, i: int) -> Any:
    """A view of one member: a plain tensor, or a QuantizedTensor."""
    if not value.format.is_quantized:
        data = value._buffers.rowwise_data
        assert data is not None
        return data[i]
    buffers = {name: t[i] if t.dim() > 1 else t[i : i + 1] for name, t in value._buffers.of_values()}
    return QuantizedTensor._make(Buffers(**buffers), value._key, value.shape[1:], value.dtype)


def _members_from(value: GroupedTensor, begin: int, end: int) -> GroupedTensor:
    """A view of consecutive members."""
    buffers = {name: t[begin:end] for name, t in value._buffers.of_values()}
    shape = (end - begin, *value.shape[1:])
    result: GroupedTensor = value._with(Buffers(**buffers), shape)
    return result


@handles("select")
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value, i = _stack(args[0], func, args[1]), args[2]
    if not -value.num_groups <= i < value.num_groups:
        expected = f"an index of {value.num_groups} members"
        value._refuse("index", expected, str(i), "Negative indices count from the end", IndexError)
    return _member(value, i % value.num_groups)


@handles("unbind")
def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = _stack(args[0], func, args[1] if len(args) > 1 else 0)
    return [_member(value, i) for i in range(value.num_groups)]


@handles("slice")
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rest: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    dim, start, end, step = rest
    value = _stack(args[0], func, dim)
    if step != 1:
        value._refuse("step", "1, members that follow each other", str(step), "Take single members")
    begin, stop, _ = slice(start, end).indices(value.num_groups)
    return _members_from(value, begin, max(begin, stop))


@handles("split", "split_with_sizes")
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = _stack(args[0], func, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    sizes, groups = args[1], value.num_groups
    if isinstance(sizes, int):
        if sizes < 0 or (sizes == 0 and groups > 0):
            value._refuse(
                "split_size", "at least 1 member in a part", str(sizes), "Use unbind() for single members"
            )
        sizes = [min(sizes, groups - i) for i in range(0, groups, sizes)] if groups > 0 else [0]
    elif any(size < 0 for size in sizes) or sum(sizes) != groups:
        advice = "Use slices for some of the members"
        value._refuse("split_sizes", f"sizes from 0 whose sum is {groups}", str(list(sizes)), advice)
    result, begin = [], 0
    for size in sizes:
        result.append(_members_from(value, begin, begin + size))
        begin += size
    return result
