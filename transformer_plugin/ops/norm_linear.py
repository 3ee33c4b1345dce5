"""A linear layer of a norm, as at the beginning of attention and of an MLP.

Letters are those of :mod:`transformer_plugin.ops.gemm`: T rows (tokens), K columns, which are normalized,
and N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.errors import with_peers
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import layer_keys

__all__ = [
    "norm_linear",
]

_ops = torch.ops.transformer_plugin


def norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normalization: str = "rms_norm",
    zero_centered: bool = False,
    return_normalized: bool = False,
    input_format: str | Format = "none",
    weight_format: str | Format = "none",
    grad_format: str | Format = "none",
    quantized_weight: Sequence[Tensor] | None = None,
    main_grad: Tensor | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    wgrad_queue: Tensor | None = None,
    weight_shard: str = "",
) -> tuple[Tensor, Tensor]:
    """:func:`~transformer_plugin.ops.linear` of a norm of the input, bit for bit those two ops.

    In ``fp8_block`` and ``mxfp8`` with blocks along a row the norm is quantized in the pass that computes it
    (:func:`~transformer_plugin.ops.rms_norm_quantize`), and its 16-bit values are not written to memory, except with
    ``return_normalized`` and in keys with ``nan``. In other formats the forward writes them and frees them after they
    are quantized. For the backward the op keeps the input, the statistics of its rows, and the weight as the data
    gradient reads it, but no normalized values: the weight gradient computes the norm again. Only an input format with
    stochastic rounding keeps the columnwise quantized input. What no gradient needs is not computed or kept. With
    ``return_normalized`` the two ops are recorded in its place, and keep the norm that is returned.

    Args:
        input: ``[..., K]`` float32, bfloat16 or float16, K at least 1.
        norm_weight: ``[K]`` in the dtype of ``input``, or None for a gamma of 1.
        norm_bias: ``[K]`` in the dtype of ``input``, or None; always None with ``"rms_norm"``.
        weight: ``[N, K]`` in the dtype of ``input``.
        bias: ``[N]``, any float dtype, or None.
        eps: what is added to the mean of the squares or to the variance; not negative.
        normalization: ``"rms_norm"`` (:func:`~transformer_plugin.ops.rms_norm`) or ``"layer_norm"``
            (:func:`~transformer_plugin.ops.layer_norm`).
        zero_centered: whether gamma is 1 + ``norm_weight``.
        return_normalized: whether to return the norm too, for example for a residual connection after it.
        input_format, weight_format, grad_format, quantized_weight: as for :func:`~transformer_plugin.ops.linear`; the
            input's format is that of the norm.
        main_grad, accumulate, weight_grad, wgrad_queue, weight_shard: where ``weight`` is and its gradient goes, as for
            :func:`~transformer_plugin.ops.linear`.

    Returns:
        ``output [..., N]`` and ``normalized [..., K]`` (``[0]`` without ``return_normalized``), in the dtype of
        ``input``. Both are differentiable in ``input`` and the parameters.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.rms_norm` and :func:`~transformer_plugin.ops.linear`;
        ValueError: another ``normalization``, a ``norm_bias`` with ``"rms_norm"``.
    """
    formats = layer_keys("norm_linear", input_format, weight_format, grad_format)
    parameters = (norm_weight, norm_bias, weight, bias)
    options = (eps, normalization, zero_centered, return_normalized, *formats)
    gradient = (main_grad, accumulate, weight_grad, wgrad_queue, weight_shard)
    return with_peers(_ops.norm_linear.default, input, *parameters, *options, quantized_weight, *gradient)
