"""Grouped products with an activation in the epilogue: the first products in an expert's MLP.

Letters as in :mod:`transformer_plugin.ops.gemm`; F is the number of features after the activation. With weights ``W1
[G, 2F, K]`` the ops compute ``h = x @ W1[g].T`` and, for SwiGLU, ``act = silu(gate(h)) * linear(h) * probs``.

On Hopper each op is one kernel for bfloat16 and float16 with 16-byte aligned rows (F and the reduction dimension
multiples of 8): the activation is computed while the sums are in registers. Elsewhere the steps run one after the
other. What a step would write is rounded as if it were written, so on one device the results are those of the steps bit
for bit.

``activation`` is that of :func:`~transformer_plugin.ops.activation`, and the order of the columns of ``h`` is that of
the rows of ``W1``. ``"swiglu"``: F gate columns, then F linear columns. ``"swiglu:interleave=32"``: blocks of 32 gate
columns and their 32 linear columns, alternating; F is a multiple of 32. In these two orders SwiGLU is in the epilogue,
also with limit, alpha and offset; other activations are steps.

Tail rows are zero in every result and are not read in the inputs. ``max_sms`` and ``expected_rows`` are those of
:mod:`transformer_plugin.ops.gemm_plan`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.activations import Activation, key_of_activation
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of

__all__ = [
    "grouped_gemm_activation",
    "grouped_gemm_activation_quantize",
]

_ops = torch.ops.transformer_plugin


def grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation = "swiglu",
    keep_input: bool = True,
    max_sms: int = 0,
    expected_rows: int = -1,
    rows: Tensor | None = None,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """``activation(h, probs)`` of ``h = a_g @ b[g].T + bias[g]``, which is rounded first.

    Args:
        a: ``[T, K]`` float32, bfloat16 or float16; with ``rows`` any number of rows.
        b: ``[G, 2F, K]``, without a gate ``[G, F, K]``; the dtype of ``a``.
        group_sizes: int32 or int64 ``[G]``.
        probs: float32 ``[T]``, or None for 1.
        bias: as many columns as ``b`` has rows, ``[G, 2F]``, any float dtype, added to the FP32 sum.
        activation: the function and the order of the columns of ``h``.
        keep_input: whether to return ``h``. Without it a gradient recomputes the product.
        rows: int32 or int64 ``[T]``: ``a[rows[i]]`` replaces ``a[i]``, as in
            :func:`~transformer_plugin.ops.grouped_gemm`.
        zero_tail: whether rows of both results past the groups are 0. Otherwise their content is unspecified.

    Returns:
        ``act [T, F]`` and ``h [T, 2F]`` (``[0, 2F]`` without ``keep_input``), in the dtype of ``a``. Differentiable in
        ``a``, ``b``, ``probs`` and ``bias``.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree, an odd number of columns of ``h``,
        another ``activation``, F that is not a multiple of 32 where it interleaves, and group sizes as in
        :func:`~transformer_plugin.ops.grouped_gemm`.
    """
    function = key_of_activation(activation, "grouped_gemm_activation")
    return _ops.grouped_gemm_activation.default(
        a, b, group_sizes, probs, bias, function, keep_input, max_sms, expected_rows, rows, zero_tail
    )


def grouped_gemm_activation_quantize(
    a: Tensor,
    b: Tensor,
    group_sizes: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation = "swiglu",
    keep_input: bool = True,
    max_sms: int = 0,
    expected_rows: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`grouped_gemm_activation`, its result quantized along rows: an expert's first product, for the second.

    Bit for bit ``activation_quantize(h, format, probs, group_sizes)`` of the same ``h``, the columns of the gate first.
    On Hopper ``act`` is never in memory: the epilogue computes its scales and writes quantized data.

    Args:
        a, b, group_sizes: as :func:`grouped_gemm_activation`. For ``mxfp8`` F is a multiple of 32.
        format: ``fp8_block`` or ``mxfp8`` with blocks along a row, as a key with options or a
            :class:`~transformer_plugin.formats.Format`: formats that find each scale in a block.
        probs, bias, activation, keep_input, max_sms, expected_rows: as :func:`grouped_gemm_activation`.

    Returns:
        ``data [T, F]`` and ``scale_inv``, as :func:`~transformer_plugin.ops.quantize` of ``act``, and
        ``h [T, 2F]`` (``[0, 2F]`` without ``keep_input``) in the dtype of ``a``. Neither is differentiable.

    Raises:
        TypeError, ValueError: as :func:`grouped_gemm_activation`. ValueError: another format, or an F it does not take.
    """
    op = "grouped_gemm_activation_quantize"
    key, function = key_of(format, op), key_of_activation(activation, op)
    return _ops.grouped_gemm_activation_quantize.default(
        a, b, group_sizes, key, probs, bias, function, keep_input, max_sms, expected_rows
    )
