"""Two steps in one pass over memory: an activation that is quantized without being written to memory; and a gradient
that is summed over its rows, for a bias gradient, while it is quantized.

Shapes: T rows (tokens), F features of the hidden layer, N columns of a gradient, G groups. Each op gives bit for bit
the result of its steps: the activation rounded to the dtype of its input, then quantized. Data and
scales are laid out as in :mod:`transformer_plugin.ops.quantize`; with ``group_sizes`` as those of a ragged matrix,
otherwise of a plain one.

``fp8_block`` and ``mxfp8`` find each scale in a block. ``fp8_tensor`` and ``nvfp4`` scale by the largest magnitude of
the whole, which is not known before all of it is computed: those of SwiGLU take it as an argument, for example of
earlier steps, or of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.activations import Activation, key_of_activation
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of

__all__ = [
    "activation_backward_quantize",
    "activation_quantize",
    "bias_backward_quantize",
]

_ops = torch.ops.transformer_plugin


def activation_quantize(
    input: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    zero_tail: bool = True,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, ...]:
    """:func:`~transformer_plugin.ops.activation`, quantized along rows, along columns, or both.

    Args:
        input: ``[T, 2F]`` float32, bfloat16 or float16, any strides; the gate is the first F columns. For ``mxfp8``
            F is a multiple of 32, for ``nvfp4`` of 16; for ``nvfp4`` with ``columnwise`` T, and the size of each group,
            is a multiple of 16.
        format: a key of a format with fused ops (:mod:`transformer_plugin.formats`), or a
            :class:`~transformer_plugin.formats.Format`. Square blocks only without groups.
        probs: float32 ``[T]``, what each row is multiplied by, or None for 1.
        group_sizes: int32 or int64 ``[G]`` on the device of ``input``, or None for one matrix. Rows past the groups are
            not read.
        amax: what ``fp8_tensor`` and, with ``rowwise``, ``nvfp4`` scale by, float32 in the sizes that
            :func:`~transformer_plugin.ops.amax` gives for the activation. It need not be that of this activation:
            larger values saturate. That of ``fp8_tensor`` serves both directions.
        amax_t: of ``nvfp4`` with ``columnwise`` only, the amax of the columns.
        seed: int64 ``[1]`` on the device of ``input``, of ``nvfp4`` with ``sr`` only.
        rowwise, columnwise, zero_tail: as in :func:`~transformer_plugin.ops.quantize`.
        activation: as in :func:`~transformer_plugin.ops.activation`, with all columns of the gate first.

    Returns:
        What :func:`~transformer_plugin.ops.quantize` returns of ``activation(input, probs)``: ``data [T, F]``
        (``[T, F / 2]`` bytes of ``nvfp4``) and ``scale_inv``, then ``data_transposed [F, T]`` and its scale. The same
        bytes on CPU and CUDA. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, another device, a width that the format does not take,
            another format, an amax or a seed that is missing or that the format does not use, no direction.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), equation 6 without biases.
    """
    key, function = (
        key_of(format, "activation_quantize"),
        key_of_activation(activation, "activation_quantize"),
    )
    directions = (rowwise, columnwise)
    return tuple(
        _ops.activation_quantize.default(
            input, key, probs, group_sizes, amax, amax_t, seed, *directions, zero_tail, function
        )
    )


def activation_backward_quantize(
    grad: Tensor,
    input: Tensor,
    format: str | Format,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    zero_tail: bool = True,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`~transformer_plugin.ops.activation_backward`, its gradient of the input quantized in both directions.

    Args:
        grad: ``[T, F]``, the gradient of the activation, in the dtype of ``input``; any strides.
        input: ``[T, 2F]``; F is a multiple of 128.
        format, probs, group_sizes, seed, zero_tail, activation: as in :func:`activation_quantize`.
        amax, amax_t: likewise, but of the gradient of ``input``.

    Returns:
        ``data [T, 2F], scale_inv, data_transposed [2F, T], scale_inv_transposed`` of the gradient of ``input``, and
        ``grad_probs`` float32 ``[T]`` (``[0]`` when ``probs`` is None): the bits of ``activation_backward``'s, and 0 in
        rows past the groups.

    Raises:
        TypeError, ValueError: as :func:`activation_quantize`; ValueError: F that is not a multiple of 128.
    """
    op = "activation_backward_quantize"
    key, function = key_of(format, op), key_of_activation(activation, op)
    data, scale, data_t, scale_t, grad_probs = _ops.activation_backward_quantize.default(
        grad, input, key, probs, group_sizes, amax, amax_t, seed, zero_tail, function
    )
    return data, scale, data_t, scale_t, grad_probs


def bias_backward_quantize(
    grad: Tensor,
    format: str | Format,
    group_sizes: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    seed: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    zero_tail: bool = True,
) -> tuple[Tensor, ...]:
    """:func:`~transformer_plugin.ops.bias_backward`, and the gradient quantized in either or both directions.

    Args:
        grad: ``[T, N]`` float32, bfloat16 or float16, any strides. For ``mxfp8`` N is a multiple of 32, for
            ``nvfp4`` of 16; for ``nvfp4`` with ``columnwise`` T, and the size of each group, is a multiple of 16.
        format: a key of a format with fused ops (:mod:`transformer_plugin.formats`), or a
            :class:`~transformer_plugin.formats.Format`. Square blocks only without groups.
        group_sizes: int32 or int64 ``[G]`` on the device of ``grad``, or None for one matrix. Rows past the groups are
            not read.
        amax, amax_t: as in :func:`~transformer_plugin.ops.quantize`: ``nvfp4`` requires those of the directions;
            ``amax`` of ``fp8_tensor`` may be None for that of ``grad``, which then is read twice.
        seed: int64 ``[1]`` on the device of ``grad``, of ``nvfp4`` with ``sr`` only.
        rowwise, columnwise, zero_tail: as in :func:`~transformer_plugin.ops.quantize`.

    Returns:
        What :func:`~transformer_plugin.ops.quantize` returns of ``grad``: ``data [T, N]`` (``[T, N / 2]`` bytes of
        ``nvfp4``) and ``scale_inv``, then ``data_transposed [N, T]`` and its scale; and last ``grad_bias`` float32,
        ``[N]`` as :func:`~transformer_plugin.ops.bias_backward`, or ``[G, N]`` as
        :func:`~transformer_plugin.ops.grouped_bias_backward`. The same bits on CPU and CUDA. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, a width that the format does not take, another format,
            an amax or a seed that is not the format's, no direction; on a CPU also sizes that are negative or sum to
            more than T.
    """
    key = key_of(format, "bias_backward_quantize")
    directions = (rowwise, columnwise)
    return tuple(
        _ops.bias_backward_quantize.default(
            grad, key, group_sizes, amax, amax_t, seed, *directions, zero_tail
        )
    )
