"""Quantize and dequantize values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import check_strided
from transformer_plugin.formats import Format
from transformer_plugin.functional._values import (
    Value,
    constant,
    describe,
    described,
    dtype_or,
    is_quantized,
    one_matrix,
    quantized_value,
    refuse,
    rows_of,
)
from transformer_plugin.ops._operands import matrices
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor, _checks
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import Facts

__all__ = ["dequantize", "quantize", "with_columnwise"]


def quantize(
    input: Value | Sequence[Tensor],
    format: str | Format,
    *,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """Quantizes a matrix, a stack, a ragged matrix, or a list of matrices.

    Args:
        input: ``[M, K]``; ``[G, M, K]``; ``[T, K]`` with ``group_sizes``; an unquantized
            :class:`~transformer_plugin.tensor.GroupedTensor`; or a list of matrices ``[M, K]`` of any sizes. float32,
            bfloat16 or float16.
        format: a format with scales or its key.
        group_sizes: int32 or int64 ``[G]`` on the device of ``input``; not of a list.
        rowwise, columnwise: the directions. A product sums along rows of both of its operands, a weight gradient along
            columns.
        seed: int64 ``[1]``, of formats with stochastic rounding; not of a list.

    Returns:
        A :class:`~transformer_plugin.tensor.QuantizedTensor` of a matrix, a
        :class:`~transformer_plugin.tensor.GroupedTensor` of a stack or a ragged matrix, a list of the first of a list.
        Their nominal dtype is that of ``input``; the bytes are those of :func:`transformer_plugin.ops.quantize`, with
        the amax of ``nvfp4`` computed first. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.quantize`; an input that is quantized, or a stack of
            biases.
    """
    facts = _checks.facts_of("quantize", format)
    if not isinstance(input, Tensor):
        if group_sizes is not None or seed is not None:
            _refuse_with_list(group_sizes, seed)
        return _quantize_list(matrices(input, "quantize", "input"), facts, rowwise, columnwise)
    if isinstance(input, GroupedTensor) and input.group_sizes is None and input.dim() == 2:
        advice = "Call packed() on it to quantize the members as the rows of one matrix"
        refuse("quantize", "input", "members that are matrices", input._described(), advice)
    values, sizes, _ = rows_of(input, group_sizes, "quantize", "input")
    data = constant(values, "quantize", "input")
    amaxes = _checks.amaxes_of(data, facts, sizes, rowwise, columnwise)
    outputs = ops.quantize(data, facts.key, sizes, *amaxes, seed, rowwise, columnwise)
    return quantized_value(outputs, facts.key, data, data.shape, sizes, rowwise, amaxes)


def _refuse_with_list(group_sizes: Tensor | None, seed: Tensor | None) -> NoReturn:
    """A list has no rows for groups, and matrices with one seed would have the same random numbers."""
    name, got = ("group_sizes", group_sizes) if group_sizes is not None else ("seed", seed)
    refuse("quantize", name, "None with a list", describe(got), "Quantize each matrix on its own")


def _quantize_list(
    inputs: list[Tensor], facts: Facts, rowwise: bool, columnwise: bool
) -> list[QuantizedTensor]:
    """All matrices in one launch where the format has a kernel for that."""
    for matrix in inputs:
        one_matrix(matrix, "quantize", "input", "Quantize it on its own")
    plain = [constant(matrix, "quantize", "input") for matrix in inputs]
    if not facts.needs_amax or not plain:
        each = ops.quantize_list(plain, facts.key, None, rowwise, columnwise)
        pairs = zip(each, plain, strict=True)
        return [quantized_value(outputs, facts.key, x, x.shape, None, rowwise) for outputs, x in pairs]
    return [quantize(x, facts.key, rowwise=rowwise, columnwise=columnwise) for x in plain]


def dequantize(value: Value, dtype: Any = None) -> Tensor:
    """The numbers of a value as a plain tensor: its method ``dequantize``. A plain tensor is returned as it is.

    Args:
        value: a :class:`~transformer_plugin.tensor.QuantizedTensor`, a
            :class:`~transformer_plugin.tensor.GroupedTensor` or a plain tensor.
        dtype: float32, bfloat16 or float16; that of the value by default.

    Raises:
        TypeError: no tensor, a nested or a sparse one. ValueError: another dtype, of a quantized value.
    """
    if not isinstance(value, FormatTensor):
        if not isinstance(value, Tensor):
            refuse(
                "dequantize", "value", "a value or a tensor", describe(value), "Pass one of a list", TypeError
            )
        check_strided("dequantize", "value", value)
        return value if dtype is None else value.to(dtype)
    wants_gradient = value.requires_grad and torch.is_grad_enabled()
    if is_quantized(value) and value.rowwise_data is not None and not wants_gradient:
        return _dequantized_rows(
            value, dtype_or(dtype, value.dtype)
        )  # the method would be dispatched by torch
    return value.dequantize(dtype)


def _dequantized_rows(value: Any, dtype: torch.dtype) -> Tensor:
    sizes = value.group_sizes if isinstance(value, GroupedTensor) else None
    rows = (value.rowwise_data, value.scale_inv)
    return ops.dequantize(*rows, value._key, dtype, sizes, False, value.amax)


def with_columnwise(value: QuantizedTensor | GroupedTensor, *, seed: Tensor | None = None) -> Any:
    """The value with columnwise data too, from its rowwise data: for data that came from another rank, for example.

    Args:
        value: quantized along rows, in a format with fused ops (:mod:`transformer_plugin.formats`) other than
            ``nvfp4``, whose columns are scaled by an amax of the original values.
        seed: int64 ``[1]``, of formats with stochastic rounding.

    Returns:
        A value that shares the rowwise data. Its columnwise data is new: what :func:`quantize` gives of
        ``dequantize(value)`` in float32 (:func:`transformer_plugin.ops.requantize_transposed`).

    Raises:
        ValueError: no rowwise data, another format.
    """
    op = "with_columnwise"
    if not is_quantized(value) or value.rowwise_data is None:
        refuse(
            op,
            "value",
            "a value with rowwise data",
            described(value),
            "Call transformer_plugin.quantize first",
        )
    if _checks.facts_of(op, value._key).needs_amax:
        advice = "Quantize the original values with columnwise=True"
        refuse(op, "value", "a format whose scales lie in blocks or are one", value._described(), advice)
    assert value.scale_inv is not None
    sizes = value.group_sizes if isinstance(value, GroupedTensor) else None
    rows = (value.rowwise_data, value.scale_inv)
    columns = ops.requantize_transposed(*rows, value._key, group_sizes=sizes, seed=seed)
    return quantized_value((*rows, *columns), value._key, value, value.shape, sizes)
