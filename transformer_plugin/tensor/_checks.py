"""Checks of the buffers that a value is made of, and quantization into them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from transformer_plugin import ops
from transformer_plugin._arguments import check_strided, is_flag
from transformer_plugin.formats import EXPECTED_KEY, KEY_ADVICE, Format
from transformer_plugin.tensor import _layout
from transformer_plugin.tensor._base import FLOATS, Buffers, FormatTensor
from transformer_plugin.tensor._layout import Facts, Shape, describe, sizes

_CONTIGUOUS = "Make it contiguous first; a value never copies what it is made of"


def refuse(
    op: str, argument: str, expected: str, got: str, advice: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(_layout.message(op, argument, expected, got, advice))


def key_of(op: str, format: object) -> str:
    """The key of a format, as it was given."""
    if isinstance(format, Format):
        return format.key
    if isinstance(format, str):
        return format
    expected = "a format key or a transformer_plugin.formats.Format"
    refuse(op, "format", expected, describe(format), "Pass for example 'fp8_block'", TypeError)


def format_of(op: str, format: str | Format) -> Format:
    """The format that a key names."""
    key = key_of(op, format)
    try:
        return _layout.parsed(key)
    except ValueError:
        refuse(op, "format", EXPECTED_KEY, f"'{key}'", KEY_ADVICE)


def facts_of(op: str, format: str | Format) -> Facts:
    """What functions ask of a format."""
    key = key_of(op, format)
    try:
        return _layout.facts(key)
    except ValueError:
        refuse(op, "format", EXPECTED_KEY, f"'{key}'", KEY_ADVICE)


def check_plain(op: str, name: str, value: object) -> Tensor:
    """A plain tensor."""
    if not isinstance(value, Tensor) or isinstance(value, FormatTensor):
        refuse(
            op, name, "a plain tensor", describe(value), "Pass the tensor that holds the numbers", TypeError
        )
    check_strided(op, name, value)
    return value


def check_tensor(op: str, name: str, value: object, device: torch.device | None = None) -> Tensor:
    """A plain, contiguous tensor, on the device of the others."""
    value = check_plain(op, name, value)
    if not value.is_contiguous():
        refuse(op, name, "a contiguous tensor", describe(value), _CONTIGUOUS)
    if device is not None and value.device != device:
        refuse(op, name, f"a tensor on {device}", describe(value), "Move it to the device of the data")
    return value


def check_group_sizes(op: str, group_sizes: object, device: torch.device) -> Tensor:
    """int32 or int64 ``[G]`` on the device of the data."""
    checked = check_tensor(op, "group_sizes", group_sizes, device)
    if checked.dtype not in (torch.int32, torch.int64) or checked.dim() != 1:
        expected = "int32 or int64 [G], the rows of each group"
        refuse(op, "group_sizes", expected, describe(checked), "Make it with torch.tensor(sizes, device=...)")
    return checked


def check_rows(op: str, rows: object, buffers: Buffers) -> None:
    """The rows of a ragged value that has columnwise data only; other values know theirs."""
    if rows is None:
        return
    if buffers.group_sizes is None or buffers.rowwise_data is not None:
        advice = "Leave it out: the data has the rows of the value"
        refuse(op, "rows", "None, but for a ragged value without rowwise data", str(rows), advice)
    if not isinstance(rows, int):
        refuse(op, "rows", "an int", describe(rows), "Pass the number of rows", TypeError)
    if rows < 0:
        refuse(op, "rows", "a number from 0", str(rows), "Pass the number of rows")


def check_flag(op: str, name: str, value: object) -> None:
    """True or False."""
    if not is_flag(value):
        refuse(op, name, "True or False", describe(value), "Leave it out for False", TypeError)


def check_dtype(op: str, dtype: object) -> None:
    """The nominal dtype of a quantized value."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        refuse(
            op,
            "dtype",
            "float32, bfloat16 or float16",
            str(dtype),
            "It is the dtype that dequantize() returns",
        )


def check_quantized(
    op: str,
    buffers: Buffers,
    format: Format,
    dtype: torch.dtype,
    dim: int,
    rows: int | None = None,
) -> tuple[int, ...]:
    """Checks both directions of a quantized value.

    Args:
        dim: 2 for a matrix, also a ragged one, 3 for a stack.
        rows: of a ragged matrix without rowwise data, whose columnwise data may be longer.

    Returns:
        The shape of the value.
    """
    if not format.is_quantized:
        refuse(op, "format", "a format with scales", f"'{format.key}'", "Keep the values in a plain tensor")
    check_dtype(op, dtype)
    data = buffers.rowwise_data if buffers.rowwise_data is not None else buffers.columnwise_data
    name = (
        "rowwise_data"
        if buffers.columnwise_data is None or buffers.rowwise_data is data
        else "columnwise_data"
    )
    if data is None:
        refuse(op, name, "data along rows, along columns or both", "neither", "Pass one of them")
    device = check_tensor(op, name, data).device
    if data.dim() != dim:
        refuse(op, name, f"{dim} dimensions", describe(data), "Pass what quantize returned")
    sizes_of_groups = buffers.group_sizes
    groups = None if sizes_of_groups is None else check_group_sizes(op, sizes_of_groups, device).shape[0]
    shape = _layout.matrix_of(data, format, columnwise=name == "columnwise_data")
    if rows is not None and name == "columnwise_data":
        shape = (rows, *shape[1:])
    matrix = Shape(shape[-2], shape[-1], shape[0] if dim == 3 else None, groups)
    _check_direction(op, buffers[:3], ("rowwise_data", "scale_inv", "amax"), format, matrix, device, False)
    names = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")
    _check_direction(op, buffers[3:6], names, format, matrix, device, True)
    return shape


def _check_direction(
    op: str,
    buffers: tuple[Tensor | None, ...],
    names: tuple[str, str, str],
    format: Format,
    shape: Shape,
    device: torch.device,
    columnwise: bool,
) -> None:
    """Data, scales and amax of one direction: all that the format has, or nothing."""
    if buffers[0] is None and buffers[1] is None and buffers[2] is None:
        return
    layout = (
        (format.dtype, _layout.data_sizes(format, shape, columnwise)),
        (format.scale_dtype, _layout.scale_sizes(format, shape, columnwise)),
        (torch.float32, _layout.amax_sizes(format, shape, columnwise)) if format.needs_amax else (None, ()),
    )
    for tensor, name, (dtype, expected) in zip(buffers, names, layout, strict=True):
        wanted = dtype is not None and buffers[0] is not None
        if tensor is None and not wanted:
            continue
        if tensor is not None and wanted:
            check_tensor(op, name, tensor, device)
            if tensor.dtype == dtype and tensor.shape == expected:
                continue
        # Texts are written only here: they take longer than all checks.
        text = f"{str(dtype).removeprefix('torch.')} {list(expected)}" if wanted else "None"
        advice = f"Pass what quantize returned in '{format.key}'" if wanted else "Leave it out"
        got = "None" if tensor is None else describe(tensor)
        is_other_dtype = tensor is not None and wanted and tensor.dtype != dtype
        refuse(op, name, text, got, advice, TypeError if is_other_dtype else ValueError)


def bump_versions(tensors: Iterable[Tensor]) -> None:
    """Counts a change of tensors that a kernel wrote, so that a backward that saved their old numbers raises."""
    if not torch.compiler.is_compiling():
        increment_version([t for t in tensors if not t.is_inference()])


def check_inference(value: Any) -> None:
    """Refuses to write an inference tensor outside of the mode, as torch does."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        expected = "a value that was made outside of inference_mode, to be changed outside of it"
        got = f"an inference tensor, {value._described()}"
        value._refuse("self", expected, got, "Change its clone()", RuntimeError)


def write(value: Any, source: Tensor, seed: Tensor | None = None, noop: Tensor | None = None) -> None:
    """Quantizes ``source`` into the buffers of a value; the buffers' versions change."""
    op = type(value).__name__
    check_inference(value)
    if isinstance(source, Tensor):
        check_strided(op, "source", source)
    if not isinstance(source, Tensor) or source.shape != value.shape:
        refuse(op, "source", f"a tensor {sizes(value)}", describe(source), "Pass values of the same shape")
    if isinstance(source, FormatTensor):
        if source.format.is_quantized:
            advice = "Use copy_() for the bytes of a value of the same format, or call dequantize() on it"
            refuse(op, "source", "values that are not quantized", source._described(), advice)
        source = source._buffers.rowwise_data  # type: ignore[assignment]  # an unquantized value has it
    buffers, facts = value._buffers, _layout.facts(value._key)
    rowwise, columnwise = buffers.rowwise_data is not None, buffers.columnwise_data is not None
    amaxes = amaxes_of(source, facts, buffers.group_sizes, rowwise, columnwise)
    out = [t for t in (*buffers[:2], *buffers[3:5]) if t is not None]
    ops.quantize_out(
        source,
        facts.key,
        out,
        buffers.group_sizes,
        *amaxes,
        seed,
        noop,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    for old, new in zip((buffers.amax, buffers.columnwise_amax), amaxes, strict=True):
        if old is not None and new is not None:
            old.copy_(new if noop is None else torch.where(noop == 1, old, new))
    bump_versions(t for name, t in buffers.of_values())


def amaxes_of(
    source: Tensor, facts: Facts, group_sizes: Tensor | None, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What ``nvfp4`` scales the rows and the columns by; nothing for other formats."""
    if not facts.needs_amax:
        return None, None
    amaxes = iter(
        torch.ops.transformer_plugin.amax.default(source, facts.key, group_sizes, rowwise, columnwise)
    )
    return next(amaxes) if rowwise else None, next(amaxes) if columnwise else None
