"""The experts of a mixture as one op: two products over groups of rows with SwiGLU between them.

Letters: T rows of a buffer, of which the first ``sum(group_sizes)`` belong to G groups, in order; H columns of the
input and the output; F columns between the products. What :mod:`transformer_plugin.ops.gemm` says of groups holds here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import layer_keys

__all__ = [
    "grouped_mlp",
]

_ops = torch.ops.transformer_plugin


def grouped_mlp(
    input: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    input_format: str | Format = "none",
    weight_format: str | Format = "none",
    grad_format: str | Format = "none",
    quantized_fc1_weight: Sequence[Tensor] | None = None,
    quantized_fc2_weight: Sequence[Tensor] | None = None,
    interleave: int = 0,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> Tensor:
    """``fc2(swiglu(fc1(input)) * probs)`` for each group of rows with the group's own weights and biases.

    Bit for bit the output and the gradients of three ops, in one node::

        linear = grouped_linear(input, fc1_weight, group_sizes, fc1_bias, None, *formats)
        activation = swiglu(linear, probs)
        grouped_linear(activation, fc2_weight, group_sizes, fc2_bias, probs if fc2_bias is given, *formats)

    Args:
        input: ``[T, H]`` float32, bfloat16 or float16.
        fc1_weight: ``[G, 2F, H]`` in the dtype of ``input``, the gate in the first F rows of a group.
        fc2_weight: ``[G, H, F]``, likewise.
        group_sizes: int32 or int64 ``[G]``. For a backward with ``nvfp4`` multiples of 16, as T.
        probs: float32 ``[T]``: the factor of a row's activation, and of its second bias.
        fc1_bias: ``[G, 2F]``, any float dtype.
        fc2_bias: ``[G, H]``, any float dtype.
        input_format, weight_format, grad_format: as for :func:`~transformer_plugin.ops.grouped_linear`, the same for
            both products. For ``mxfp8`` H and F are multiples of 32, for ``nvfp4`` of 16.
        quantized_fc1_weight, quantized_fc2_weight: what :func:`~transformer_plugin.ops.quantize_weight` made of the
            weights with these formats, both, either or none: the same bits, without quantizing them again. The
            weight is then not read; its gradient is the usual one.
        interleave: 0, or 32: gate and linear part alternate in blocks of 32 rows of ``fc1_weight`` and ``fc1_bias``; F
            is then a multiple of 32. With formats, forward and backward copy ``[T, 2F]`` into the other order.
        max_sms, expected_rows: as for :func:`~transformer_plugin.ops.grouped_linear`, as is ``formats.resolve``.

    Returns:
        ``[T, H]`` in the dtype of ``input``, tail rows zero. Differentiable in ``input``, both weights, ``probs`` and
        both biases. With a second bias the gradient of ``probs`` is the float32 sum of the bias part and the SwiGLU
        part, in this order.

    In ``fp8_block`` and ``mxfp8`` the activation is quantized in the pass that computes it and is never in memory in
    16 bits; so is the gradient of the first product, if F is a multiple of 128 and ``fc1_bias`` needs no gradient,
    which sums the values before quantization.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree, a width that the format does not take,
        formats of different families, a quantized weight that does not fit the weight and the formats.
    """
    formats = layer_keys("grouped_mlp", input_format, weight_format, grad_format)
    options = (quantized_fc1_weight, quantized_fc2_weight, interleave, max_sms, expected_rows)
    return _ops.grouped_mlp.default(
        input, fc1_weight, fc2_weight, group_sizes, probs, fc1_bias, fc2_bias, *formats, *options
    )
