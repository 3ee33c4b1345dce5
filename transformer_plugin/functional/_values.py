"""How functions read the values that they are given, and make those that they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from transformer_plugin._arguments import check_strided
from transformer_plugin.launch import LaunchOptions
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor, _checks, _layout
from transformer_plugin.tensor._base import UNQUANTIZED, FormatTensor, new_value
from transformer_plugin.tensor.grouped import over

Value = Tensor | QuantizedTensor | GroupedTensor
Values = Value | Sequence[Value]

_ops = torch.ops.transformer_plugin
refuse = _checks.refuse
describe = _layout.describe


def described(value: object) -> str:
    """What an error says it got."""
    return value._described() if isinstance(value, FormatTensor) else describe(value)


def plain(value: Any, op: str, argument: str) -> Any:
    """The numbers of a tensor or of an unquantized value, with its gradient."""
    if not isinstance(value, FormatTensor):
        return value if isinstance(value, Tensor) else _refuse_other(value, op, argument)
    if value._key != UNQUANTIZED:
        advice = "Call dequantize() on it"
        refuse(op, argument, "values that are not quantized", value._described(), advice)
    if value.requires_grad and torch.is_grad_enabled():
        return _differentiable_rows(value)
    return value.rowwise_data


def _refuse_other(value: object, op: str, argument: str) -> NoReturn:
    refuse(op, argument, "a tensor", describe(value), "Pass a tensor", TypeError)


def optional(value: Any, op: str, argument: str) -> Any:
    """:func:`plain` of an argument that may be None."""
    return None if value is None else plain(value, op, argument)


def constant(value: Any, op: str, argument: str) -> Any:
    """The numbers of a tensor or of an unquantized value, of which no gradient is wanted."""
    if not isinstance(value, FormatTensor) or value._key != UNQUANTIZED:
        data = plain(value, op, argument)
    else:
        data = value.rowwise_data
    return data.detach() if data.requires_grad else data


def detached(tensor: Any) -> Any:
    """A tensor without its gradient; what is none is left to the op, which names it."""
    return tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor


def launched(options: LaunchOptions, op: str) -> LaunchOptions:
    """The launch options of a function; the op checks their numbers."""
    if not isinstance(options, LaunchOptions):
        advice = "Make them with transformer_plugin.nn.LaunchOptions"
        refuse(op, "launch_options", "LaunchOptions", describe(options), advice, TypeError)
    return options


def dtype_or(dtype: Any, default: torch.dtype) -> Any:
    """The dtype of a result; what is none is left to the op, which names it."""
    return default if dtype is None else dtype


def one_matrix(value: Any, op: str, argument: str, instead: str = "") -> None:
    """Refuses a ragged value, whose groups an op without groups would ignore."""
    if isinstance(value, GroupedTensor) and value.group_sizes is not None:
        advice = instead or f"Call grouped_{op}, or packed() for all rows"
        refuse(op, argument, "a matrix without groups", value._described(), advice)


def without_format(
    op: str,
    *,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: Tensor | None = None,
    both: bool = False,
) -> None:
    """Refuses what only quantization has a use for; ``both``: whether both directions are the default."""
    given = (("group_sizes", group_sizes, None), ("rowwise", rowwise, True), ("columnwise", columnwise, both))
    for name, value, default in (*given, ("seed", seed, None)):
        if value is not default:
            got = describe(value) if isinstance(value, Tensor) else str(value)
            refuse(op, name, f"{default} without a format", got, "Pass format, or leave it out")


class Rows(NamedTuple):
    """A matrix, and its groups."""

    values: Any
    group_sizes: Tensor | None
    #: Whether the groups came with the matrix, so that they go with the result.
    is_grouped: bool


def rows_of(value: Any, group_sizes: Tensor | None, op: str, argument: str) -> Rows:
    """The matrix, and the groups of its rows: its own, or those that are given."""
    own = value.group_sizes if isinstance(value, GroupedTensor) else None
    if own is None:
        return Rows(value, group_sizes, False)
    if group_sizes is not None:
        refuse(
            op, "group_sizes", f"None, since '{argument}' has its own", describe(group_sizes), "Leave it out"
        )
    return Rows(value, own, True)


def rows_of_either(
    value: Any, other: Any, group_sizes: Tensor | None, op: str, arguments: tuple[str, str]
) -> Rows:
    """The matrix, and the groups of the rows of two: of either one, of both, or those that are given."""
    rows = rows_of(value, group_sizes, op, arguments[0])
    same = other.group_sizes if isinstance(other, GroupedTensor) else None
    own = rows.group_sizes
    if same is None or (rows.is_grouped and own is same):
        return rows
    if not rows.is_grouped:
        return rows_of(other, group_sizes, op, arguments[1])._replace(values=value)
    assert own is not None
    if own is not same and own.shape != same.shape:
        advice = "Both have the same groups"
        refuse(op, arguments[1], f"{own.shape[0]} groups, as '{arguments[0]}'", described(other), advice)
    return rows


def check_matrix(data: Tensor, op: str, argument: str, sizes: str) -> None:
    """Of a plain tensor whose sizes are read before an op checks them."""
    check_strided(op, argument, data)
    if data.dim() != 2:
        refuse(op, argument, sizes, describe(data), "Reshape it first")


def needed(group_sizes: Tensor | None, op: str, argument: str) -> Tensor:
    """The group sizes of a grouped product."""
    if group_sizes is None:
        advice = f"Pass them, or a GroupedTensor with group sizes as '{argument}'"
        refuse(op, "group_sizes", "the rows of each group", "None", advice)
    return group_sizes


class _ToRows(torch.autograd.Function):
    """The node from a value to its rows: what ``packed()`` does, in half its time, because nothing is dispatched."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        rows: Tensor = value.rowwise_data.detach()
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _rows_with_gradient(value: Any) -> Tensor:
    """A call of this function is one node of a graph that torch.compile traces."""
    rows: Tensor = _ToRows.apply(value)
    return rows


def _differentiable_rows(value: Any) -> Tensor:
    """The same in half of the host time where nothing is traced."""
    data = value.rowwise_data
    if torch.compiler.is_compiling() or type(data) is not Tensor:
        return _rows_with_gradient(value)
    rows = data.detach()
    _ops.connect_gradient.default(rows, value)
    return rows


class _WithDtype(torch.autograd.Function):
    """The node from a quantized value to one of another nominal dtype; gradients change back."""

    @staticmethod
    def forward(ctx: Any, value: Any, dtype: torch.dtype) -> Any:
        ctx.dtype = value.dtype
        return value._with(value._buffers, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None


def with_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A quantized value over the same memory with another nominal dtype: what ``to()`` gives, without its copy.

    A call of this function is one node of a graph that torch.compile traces.
    """
    return _WithDtype.apply(value, dtype)


def _ragged(data: Tensor, group_sizes: Tensor) -> GroupedTensor:
    nothing = (None,) * 5
    value: GroupedTensor = new_value(
        "GroupedTensor", UNQUANTIZED, data.shape, data.dtype, False, data, *nothing, group_sizes
    )
    return value


def with_groups(data: Tensor, rows: Rows) -> Any:
    """A result whose rows are those of an argument: a ragged value if the argument was one."""
    if not rows.is_grouped:
        return data
    assert rows.group_sizes is not None
    if data.requires_grad and torch.is_grad_enabled():
        return over(data, rows.group_sizes)
    return _ragged(data, rows.group_sizes)


class Operand(NamedTuple):
    """An operand as the ops of products take it: data, scales and key."""

    data: Any
    scales: list[Tensor] | None
    key: str


def _direction(value: FormatTensor, columnwise: bool) -> Operand:
    if columnwise:
        data, scale, amax = value.columnwise_data, value.columnwise_scale_inv, value.columnwise_amax
    else:
        data, scale, amax = value.rowwise_data, value.scale_inv, value.amax
    assert scale is not None
    return Operand(data, [scale] if amax is None else [scale, amax], value._key)


def has(value: Any, columnwise: bool) -> bool:
    """Whether a quantized value has data in a direction."""
    return (value.columnwise_data if columnwise else value.rowwise_data) is not None


def is_quantized(value: object) -> bool:
    """Whether it is a value with scales."""
    return isinstance(value, FormatTensor) and value._key != UNQUANTIZED


def operand(value: Any, op: str, argument: str, columnwise: bool, ragged: bool = False) -> Operand:
    """One direction of a quantized value, or an unquantized one as it is; ``ragged``: whether it may have groups."""
    if not isinstance(value, FormatTensor):
        return Operand(plain(value, op, argument), None, UNQUANTIZED)
    if not ragged:
        one_matrix(value, op, argument)
    if value._key == UNQUANTIZED:
        return Operand(plain(value, op, argument), None, UNQUANTIZED)
    if not has(value, columnwise):
        name = "columnwise" if columnwise else "rowwise"
        refuse(op, argument, f"{name} data", value._described(), f"Quantize it with {name}=True")
    return _direction(value, columnwise)


def second_operand(value: Any, op: str, argument: str, transpose_b: bool) -> tuple[Operand, bool]:
    """The operand b of ``a @ b`` or ``a @ b.T``, and whether the op transposes its data.

    The data that is quantized along the dimension of the sum, or where there is none the other direction.
    """
    if not isinstance(value, FormatTensor):
        return Operand(plain(value, op, argument), None, UNQUANTIZED), transpose_b
    one_matrix(value, op, argument, "" if op == "gemm" else "Pass a stack of matrices, or a list")
    if value._key == UNQUANTIZED:
        return Operand(plain(value, op, argument), None, UNQUANTIZED), transpose_b
    columnwise = not transpose_b if has(value, not transpose_b) else transpose_b
    return _direction(value, columnwise), transpose_b != columnwise


_NEITHER = (None, None)


def quantized_value(
    outputs: Sequence[Tensor],
    key: str,
    like: Any,
    shape: Any,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    amaxes: tuple[Tensor | None, Tensor | None] = _NEITHER,
) -> Any:
    """A value over what a quantize op returned."""
    rows: Sequence[Tensor | None] = outputs[:2] if rowwise else _NEITHER
    columns: Sequence[Tensor | None] = (outputs[2:] if rowwise else outputs) or _NEITHER
    kind = "GroupedTensor" if len(shape) == 3 or group_sizes is not None else "QuantizedTensor"
    return new_value(kind, key, shape, like.dtype, False, *rows, amaxes[0], *columns, amaxes[1], group_sizes)
