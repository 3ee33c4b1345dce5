"""Products of values. Each picks the direction of a quantized operand that lies along the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin._arguments import check_strided
from transformer_plugin.functional._values import (
    Operand,
    Value,
    Values,
    check_matrix,
    constant,
    describe,
    described,
    dtype_or,
    launched,
    needed,
    operand,
    optional,
    refuse,
    rows_of,
    rows_of_either,
    second_operand,
    with_groups,
)
from transformer_plugin.launch import LaunchOptions
from transformer_plugin.ops._operands import listed
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._base import UNQUANTIZED

__all__ = ["gemm", "gemm_wgrad", "grouped_gemm", "grouped_gemm_wgrad"]

_ops = torch.ops.transformer_plugin


def _check_alike(
    op: str,
    values: tuple[Any, Any],
    left: Operand,
    right: Operand,
    names: tuple[str, str],
    is_differentiable: bool = True,
) -> None:
    """Refuses a quantized operand beside one that is not, and a parameter whose gradient would be missing."""
    if left.scales is None and right.scales is None:
        return
    if left.scales is None or right.scales is None:
        is_left = left.scales is None
        name, other = names if is_left else names[::-1]
        expected = f"values quantized as '{other}', in {right.key if is_left else left.key}"
        advice = f"Quantize them, or call dequantize() on '{other}'"
        refuse(op, name, expected, described(values[0 if is_left else 1]), advice)
    if not is_differentiable or not torch.is_grad_enabled():
        return
    first, second = values
    if first.requires_grad or not isinstance(second, Tensor) or second.requires_grad:
        _check_no_parameter(op, values, names)


def _check_no_parameter(op: str, values: tuple[Any, Any], names: tuple[str, str]) -> None:
    if torch.compiler.is_compiling():  # which does not know what is a leaf
        return
    for value, name in zip(values, names, strict=True):
        for each in [value] if isinstance(value, Tensor) else value:
            if each.requires_grad and each.is_leaf:
                advice = (
                    "A product of quantized operands has no gradient: call dequantize() or detach() on it"
                )
                got = f"{described(each)} with requires_grad=True"
                refuse(op, name, "a value with requires_grad=False", got, advice)


def gemm(
    a: Value,
    b: Value,
    bias: Tensor | None = None,
    *,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
) -> Tensor:
    """``alpha * (a @ b.T) + bias``, or ``a @ b`` when not ``transpose_b``.

    Args:
        a: ``[M, K]``, plain or quantized along rows.
        b: ``[N, K]``, or ``[K, N]`` when not ``transpose_b`` (a weight ``[N, K]`` in a data gradient:
            ``gemm(grad, weight, transpose_b=False)``), plain or quantized. Of a value with both directions the data
            that is quantized along the sum is multiplied; of a value with one, that one.
        bias: ``[N]``.
        dtype: of the result; by default that of ``a``, of a quantized value its nominal one.
        alpha: float32 ``[1]``.

    Returns:
        ``[M, N]``. Differentiable if neither is quantized.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.gemm`; an ``a`` without rowwise data; a ragged operand;
            one operand that is quantized and one that is not; a quantized parameter that requires a gradient.
    """
    left = operand(a, "gemm", "a", columnwise=False)
    right, transpose = second_operand(b, "gemm", "b", transpose_b)
    _check_alike("gemm", (a, b), left, right, ("a", "b"))
    if left.scales is None and right.scales is None:
        return _ops.gemm.default(left.data, right.data, bias, transpose, dtype, alpha)
    quantized = (left.scales, right.scales, left.key, right.key)
    return _ops.gemm.default(
        left.data, right.data, bias, transpose, dtype_or(dtype, a.dtype), alpha, *quantized
    )


def gemm_wgrad(
    grad: Value,
    input: Value,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = True,
) -> Tensor:
    """The gradient of a weight: ``grad.T @ input``.

    Args:
        grad: ``[M, N]``, plain or quantized along columns.
        input: ``[M, K]``, plain or quantized along columns.
        dtype: of the result; by default that of ``grad``.
        out: ``[N, K]`` float32 or bfloat16, a ``main_grad`` for example: it is added to, or written over when not
            ``accumulate``, through its pointer.

    Returns:
        ``[N, K]``, or ``out``. Not differentiable with quantized operands or ``out``.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.gemm` and :func:`transformer_plugin.ops.gemm_out`; an
            operand without columnwise data; a ragged operand; a ``dtype`` that is not that of ``out``;
            ``accumulate=False`` without ``out``.
    """
    op = "gemm_wgrad"
    left = operand(grad, op, "grad", columnwise=True)
    right = operand(input, op, "input", columnwise=True)
    _check_alike(op, (grad, input), left, right, ("grad", "input"), is_differentiable=False)
    if left.scales is None:
        check_matrix(left.data, op, "grad", "[M, N]")
        check_strided(op, "input", right.data)
    first = left.data if left.scales is not None else left.data.t()
    arguments = (left.scales, right.scales, left.key, right.key) if (left.scales or right.scales) else ()
    transpose = right.scales is not None  # columnwise data is [K, M]
    if out is None:
        _check_adds(accumulate, op)
        result = dtype_or(dtype, grad.dtype)
        return _ops.gemm.default(first, right.data, None, transpose, result, None, *arguments)
    written = _check_out(out, dtype, op)
    options = arguments or (None, None, UNQUANTIZED, UNQUANTIZED)
    _ops.gemm_out.default(first, right.data, written, None, transpose, None, None, *options, accumulate)
    return out


def _check_adds(accumulate: bool, op: str) -> None:
    """Refuses ``accumulate=False`` without ``out``, where nothing reads it."""
    if accumulate is not True:
        got, error = ("False", ValueError) if accumulate is False else (describe(accumulate), TypeError)
        advice = "Pass the tensor to write, or leave it out"
        refuse(op, "accumulate", "True without 'out'", got, advice, error)


def _check_out(target: Any, dtype: torch.dtype | None, op: str) -> Tensor:
    """The tensor that a product is written to."""
    written: Tensor = constant(target, op, "out")
    if dtype is not None and dtype != target.dtype:
        refuse(op, "dtype", f"None with 'out', whose dtype is {target.dtype}", str(dtype), "Leave it out")
    if isinstance(target, GroupedTensor) and target.group_sizes is not None:
        refuse(op, "out", "a stack of matrices", described(target), "Pass a main_grad")
    return written


def _matrices(b: Values, op: str, transpose_b: bool) -> tuple[Operand, bool]:
    """The matrices of a grouped product: one tensor or value ``[G, N, K]``, or G of them."""
    if isinstance(b, Tensor):
        one, transpose = second_operand(b, op, "b", transpose_b)
        return Operand([one.data], one.scales, one.key), transpose
    matrices = listed(b, op, "b")
    pairs = [second_operand(matrix, op, "b", transpose_b) for matrix in matrices]
    kinds = {(one.key, transpose) for one, transpose in pairs}
    if len(kinds) > 1:
        got = ", ".join(sorted({described(matrix) for matrix in matrices}))
        refuse(op, "b", "matrices of one format, quantized in the same direction", got, "Quantize them alike")
    data = [one.data for one, _ in pairs]
    if not pairs or pairs[0][0].scales is None:
        return Operand(data, None, UNQUANTIZED), transpose_b
    scales = [one.scales[i] for i in range(len(pairs[0][0].scales)) for one, _ in pairs if one.scales]
    return Operand(data, scales, pairs[0][0].key), pairs[0][1]


def grouped_gemm(
    a: Value,
    b: Values,
    group_sizes: Tensor | None = None,
    bias: Value | None = None,
    *,
    bias_scale: Tensor | None = None,
    transpose_b: bool = True,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    rows: Tensor | None = None,
    launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
) -> Any:
    """Each group's rows times the group's matrix: ``alpha[g] * (a_g @ b[g].T) + bias_scale_g * bias[g]``.

    Args:
        a: ``[T, K]``, plain, or a ragged :class:`~transformer_plugin.tensor.GroupedTensor`, plain or quantized along
            rows.
        b: ``[G, N, K]``, or ``[G, K, N]`` when not ``transpose_b``, as a tensor or a
            :class:`~transformer_plugin.tensor.GroupedTensor`; or G matrices, all plain or all
            :class:`~transformer_plugin.tensor.QuantizedTensor`. The direction of quantized ones is chosen as in
            :func:`gemm`.
        group_sizes: int32 or int64 ``[G]``; None if ``a`` has its own.
        bias: ``[G, N]``, plain or an unquantized :class:`~transformer_plugin.tensor.GroupedTensor`.
        bias_scale, alpha, rows: as for :func:`transformer_plugin.ops.grouped_gemm`.
        dtype: of the result; by default that of ``a``, of a quantized value its nominal one.
        launch_options: of the kernel; results do not depend on them.

    Returns:
        ``[T, N]`` with the groups of ``a``: a ragged value if ``a`` is one, else a plain tensor. Differentiable if
        neither operand is quantized.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.grouped_gemm` and :func:`gemm`; group sizes twice or
        never; operands without the direction that is needed.
    """
    op = "grouped_gemm"
    values = rows_of(a, group_sizes, op, "a")
    left = operand(values.values, op, "a", columnwise=False, ragged=True)
    right, transpose = _matrices(b, op, transpose_b)
    _check_alike(op, (a, b), left, right, ("a", "b"))
    bias = optional(bias, op, "bias")
    sizes = needed(values.group_sizes, op, "a")
    quantized: tuple[Any, ...] = ()
    if left.scales is not None or right.scales is not None:
        quantized = (left.scales, right.scales, left.key, right.key)
        dtype = dtype_or(dtype, a.dtype)
    arguments = (bias, bias_scale, transpose, dtype, alpha, rows, *launched(launch_options, op), *quantized)
    return with_groups(_ops.grouped_gemm.default(left.data, right.data, sizes, *arguments), values)


def grouped_gemm_wgrad(
    grad: Value,
    input: Value,
    group_sizes: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
    out: Any = None,
    accumulate: bool = True,
    launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
) -> Any:
    """The weight gradient of each group: ``alpha[g] * (grad_g.T @ input_g)``, zero for an empty group.

    Args:
        grad: ``[T, N]``, plain, or a ragged :class:`~transformer_plugin.tensor.GroupedTensor`, plain or quantized along
            columns.
        input: ``[T, K]``, likewise.
        group_sizes: int32 or int64 ``[G]``; None if ``grad`` or ``input`` has its own; if both have, they are the same.
        dtype: of the result; by default that of ``grad``; not with ``out``.
        alpha: float32 ``[G]``.
        out: float32 or bfloat16 ``[G, N, K]`` as a tensor or an unquantized
            :class:`~transformer_plugin.tensor.GroupedTensor`, or G matrices: added to, or written over when not
            ``accumulate``, as :func:`transformer_plugin.ops.grouped_gemm_wgrad_out` does.
        launch_options: of the kernel.

    Returns:
        ``[G, N, K]``, or ``out``. Not differentiable.

    Raises:
        TypeError, ValueError: as the ops; group sizes twice or never; operands without columnwise data; a ``dtype``
            that is not that of ``out``; ``accumulate=False`` without ``out``.
    """
    op = "grouped_gemm_wgrad"
    rows = rows_of_either(grad, input, group_sizes, op, ("grad", "input"))
    sizes = needed(rows.group_sizes, op, "grad")
    left = operand(grad, op, "grad", columnwise=True, ragged=True)
    right = operand(input, op, "input", columnwise=True, ragged=True)
    _check_alike(op, (grad, input), left, right, ("grad", "input"), is_differentiable=False)
    quantized: tuple[Any, ...] = ()
    if left.scales is not None or right.scales is not None:
        quantized = (left.scales, right.scales, left.key, right.key)
    options = launched(launch_options, op)
    if out is None:
        _check_adds(accumulate, op)
        arguments = (dtype_or(dtype, grad.dtype), alpha, None, None, *options, *quantized)
        return _ops.grouped_gemm_wgrad.default(left.data, right.data, sizes, *arguments)
    targets = [out] if isinstance(out, Tensor) else listed(out, op, "out")
    written = [_check_out(target, dtype, op) for target in targets]
    arguments = (accumulate, alpha, None, None, None, *options, *quantized)
    _ops.grouped_gemm_wgrad_out.default(left.data, right.data, sizes, written, *arguments)
    return out
