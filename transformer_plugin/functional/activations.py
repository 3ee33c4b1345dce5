"""Activations of values, and gradients of a bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.activations import TRAITS, Activation, key_of_activation
from transformer_plugin.formats import Format
from transformer_plugin.functional._values import (
    Rows,
    Value,
    constant,
    detached,
    plain,
    quantized_value,
    rows_of,
    rows_of_either,
    with_groups,
    without_format,
)
from transformer_plugin.functional.quantize import quantize
from transformer_plugin.tensor import _checks

__all__ = ["activation", "activation_backward", "bias_backward"]

#: The functions that quantize in one pass, and the columns of their input for one of the result. Others take two.
_IN_ONE_PASS = {
    str(function): Activation(function).input_columns(1)
    for function, traits in TRAITS.items()
    if traits.has_fused_quantize
}


def _columns_in_one_pass(key: str) -> int | None:
    """The columns of the input for one of the result if one pass quantizes it, for which all of the gate is first, and
    no offset is negative."""
    function, _, options = key.partition(":")
    in_two = "interleave=" in options or "offset=-" in options
    return None if in_two else _IN_ONE_PASS.get(function)


def quantized_rows(data: Tensor, rows: Rows, key: str, **directions: Any) -> Any:
    """Quantizes the result of a step in a second pass."""
    return quantize(data, key, group_sizes=rows.group_sizes, **directions)


def activation(
    input: Value,
    probs: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
    format: str | Format | None = None,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """An activation times ``probs``: ``silu(gate) * linear * probs`` for SwiGLU.

    Args:
        input: ``[T, 2F]``, without a gate ``[T, F]``; plain or an unquantized ragged
            :class:`~transformer_plugin.tensor.GroupedTensor`.
        probs: float32 ``[T]``, or None for 1.
        activation: the function and the order of the columns of ``input``, as for
            :func:`transformer_plugin.ops.activation`.
        format: of the result; None for the dtype of ``input``.
        group_sizes: int32 or int64 ``[G]``, of a plain input whose result is quantized by groups.
        rowwise, columnwise, seed: as for :func:`quantize`, with a format.

    Returns:
        ``[T, F]`` with the groups of ``input``. With a format the bytes of :func:`quantize` of the result, which is not
        differentiable; ``fp8_block`` and ``mxfp8`` are computed in one pass
        if all columns of the gate are first. Without one differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.activation` and :func:`transformer_plugin.ops.quantize`;
            arguments of the quantization without a format.

    Source: of the functions :class:`~transformer_plugin.activations.Activation`.
    """
    op = "activation"
    rows, key = rows_of(input, group_sizes, op, "input"), key_of_activation(activation, op)
    if format is None:
        without_format(op, group_sizes=group_sizes, rowwise=rowwise, columnwise=columnwise, seed=seed)
        return with_groups(ops.activation(plain(rows.values, op, "input"), probs, None, key), rows)
    data, probs = constant(rows.values, op, "input"), detached(probs)
    facts, columns = _checks.facts_of(op, format), _columns_in_one_pass(key)
    directions: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "seed": seed}
    if columns is None or not facts.is_one_pass:
        return quantized_rows(ops.activation(data, probs, None, key), rows, facts.key, **directions)
    outputs = ops.activation_quantize(data, facts.key, probs, rows.group_sizes, **directions, activation=key)
    shape = (data.shape[0], data.shape[1] // columns)
    return quantized_value(outputs, facts.key, data, shape, rows.group_sizes, rowwise)


def activation_backward(
    grad: Value,
    input: Value,
    probs: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
    format: str | Format | None = None,
    group_sizes: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """The gradients of :func:`activation`.

    Args:
        grad: ``[T, F]``, the gradient of the result, plain or an unquantized ragged value.
        input, probs, activation: what the forward was given. Groups may come with ``input``, with ``grad`` or with
            both, which are then the same.
        format: of the gradient of ``input``, then quantized in both directions; None for its dtype.
        group_sizes: as for :func:`activation`.
        seed: int64 ``[1]``, of formats with stochastic rounding.

    Returns:
        The gradient of ``input`` with the groups, and that of ``probs`` float32 ``[T]``, ``[0]`` without
        ``probs``. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.activation_backward` and
            :func:`transformer_plugin.ops.quantize`; arguments of the quantization without a format.
    """
    op = "activation_backward"
    rows = rows_of_either(input, grad, group_sizes, op, ("input", "grad"))
    data, given, probs = constant(input, op, "input"), constant(grad, op, "grad"), detached(probs)
    if format is None:
        without_format(op, group_sizes=group_sizes, seed=seed)
    facts = None if format is None else _checks.facts_of(op, format)
    key = key_of_activation(activation, op)
    columns = _columns_in_one_pass(key)
    if facts is not None and facts.is_one_pass and columns and data.shape[1] % (128 * columns) == 0:
        *outputs, grad_probs = ops.activation_backward_quantize(
            given, data, facts.key, probs, rows.group_sizes, seed=seed, activation=key
        )
        return quantized_value(outputs, facts.key, data, data.shape, rows.group_sizes), grad_probs
    grad_input, grad_probs = ops.activation_backward(given, data, probs, None, key)
    if facts is None:
        return with_groups(grad_input, rows), grad_probs
    return quantized_rows(grad_input, rows, facts.key, columnwise=True, seed=seed), grad_probs


def bias_backward(
    grad: Value,
    *,
    format: str | Format | None = None,
    group_sizes: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    seed: Tensor | None = None,
) -> Any:
    """The gradient of a bias, the sums over the rows; with a format also ``grad`` quantized, in one pass.

    Args:
        grad: ``[T, N]``, plain or an unquantized ragged :class:`~transformer_plugin.tensor.GroupedTensor`.
        format: what ``grad`` is quantized to, for the two products that follow.
        group_sizes: int32 or int64 ``[G]``, of a plain ``grad``.
        rowwise, columnwise, seed: as for :func:`quantize`, with a format.

    Returns:
        float32 ``[N]``, ``[G, N]`` with groups. With a format a pair: the quantized gradient and the sums.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.bias_backward_quantize`.
    """
    op = "bias_backward"
    rows = rows_of(grad, group_sizes, op, "grad")
    data, sizes = constant(rows.values, op, "grad"), rows.group_sizes
    if format is not None:
        facts = _checks.facts_of(op, format)
        if facts.is_fused:
            amaxes = _checks.amaxes_of(data, facts, sizes, rowwise, columnwise)
            *outputs, sums = ops.bias_backward_quantize(
                data, facts.key, sizes, *amaxes, seed, rowwise=rowwise, columnwise=columnwise
            )
            return quantized_value(outputs, facts.key, data, data.shape, sizes, rowwise, amaxes), sums
        directions = {"rowwise": rowwise, "columnwise": columnwise, "seed": seed}
        return quantized_rows(data, rows, facts.key, **directions), bias_backward(
            grad, group_sizes=group_sizes
        )
    without_format(op, rowwise=rowwise, columnwise=columnwise, seed=seed, both=True)
    return ops.bias_backward(data) if sizes is None else ops.grouped_bias_backward(data, sizes)[0]
