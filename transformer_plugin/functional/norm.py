"""RMSNorm and LayerNorm of values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.functional._values import (
    Value,
    constant,
    detached,
    plain,
    quantized_value,
    rows_of,
    with_groups,
    without_format,
)
from transformer_plugin.functional.activations import quantized_rows
from transformer_plugin.tensor import _checks

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(
    input: Value,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    format: str | Format | None = None,
    columnwise: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """``input / sqrt(mean(input^2) + eps) * gamma`` over the last dimension.

    Args:
        input: ``[..., H]``, plain or an unquantized :class:`~transformer_plugin.tensor.GroupedTensor`; ``[T, H]``
            with a format.
        weight: ``[H]``, or None for a gamma of 1.
        eps: what is added to the mean of the squares.
        zero_centered: whether gamma is 1 + weight.
        format: of the result; None for the dtype of ``input``.
        columnwise, seed: as for :func:`quantize`, with a format.

    Returns:
        The shape and the groups of ``input``; of a stack a plain tensor. With a format the bytes of :func:`quantize` of
        the result, which is not differentiable; rows past the groups may hold anything. Without one differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.rms_norm` and :func:`transformer_plugin.ops.quantize`;
            arguments of the quantization without a format.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467), equation 4.
    """
    rows = rows_of(input, None, "rms_norm", "input")
    if format is None:
        without_format("rms_norm", columnwise=columnwise, seed=seed)
        data = plain(rows.values, "rms_norm", "input")
        return with_groups(ops.rms_norm(data, weight, eps, zero_centered), rows)
    data = constant(rows.values, "rms_norm", "input")
    facts = _checks.facts_of("rms_norm", format)
    if columnwise or not facts.is_in_epilogue:
        output = detached(ops.rms_norm(data, weight, eps, zero_centered))
        return quantized_rows(output, rows, facts.key, columnwise=columnwise, seed=seed)
    outputs = ops.rms_norm_quantize(data, weight, eps, facts.key, zero_centered, seed=seed)
    return quantized_value(outputs[:2], facts.key, data, data.shape, rows.group_sizes)


def layer_norm(
    input: Value,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    format: str | Format | None = None,
    columnwise: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """``(input - mean) / sqrt(variance + eps) * gamma + bias`` over the last dimension.

    Args:
        input, weight, eps, zero_centered, format, columnwise, seed: as for :func:`rms_norm`.
        bias: ``[H]``, or None.

    Returns:
        As :func:`rms_norm`.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.layer_norm` and :func:`transformer_plugin.ops.quantize`.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450), equations 3 and 4.
    """
    rows = rows_of(input, None, "layer_norm", "input")
    if format is None:
        without_format("layer_norm", columnwise=columnwise, seed=seed)
        data = plain(rows.values, "layer_norm", "input")
        return with_groups(ops.layer_norm(data, weight, bias, eps, zero_centered), rows)
    data = constant(rows.values, "layer_norm", "input")
    facts = _checks.facts_of("layer_norm", format)
    if columnwise or not facts.is_in_epilogue:
        output = detached(ops.layer_norm(data, weight, bias, eps, zero_centered))
        return quantized_rows(output, rows, facts.key, columnwise=columnwise, seed=seed)
    outputs = ops.layer_norm_quantize(data, weight, bias, eps, facts.key, zero_centered, seed=seed)
    return quantized_value(outputs[:2], facts.key, data, data.shape, rows.group_sizes)
