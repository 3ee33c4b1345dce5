"""RMSNorm and LayerNorm, alone and into quantized rows. Shapes: T rows (tokens), H columns, which are normalised.

Computed in float32, each operation rounded, the output rounded once to the dtype of the input. Sums over a row have a
fixed order (``csrc/norm/norm.h``), so that the bits repeat and are the same on CPU and CUDA, except those of a NaN.
Gamma is the weight, or 1 + weight with ``zero_centered``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_quantize",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_quantize",
]

_ops = torch.ops.transformer_plugin


def rms_norm(input: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm: ``input / sqrt(mean(input^2) + eps) * gamma`` over the last dimension.

    Args:
        input: ``[..., H]`` float32, bfloat16 or float16, H at least 1. Any strides.
        weight: ``[H]`` in the dtype of ``input``, or None for a gamma of 1.
        eps: what is added to the mean of the squares; not negative.
        zero_centered: whether gamma is 1 + weight, as TransformerEngine's ``zero_centered_gamma``.

    Returns:
        ``[..., H]`` in the dtype of ``input``, contiguous. The same bits on CPU and CUDA.

    Differentiable in input and weight, by :func:`rms_norm_backward`.

    Raises:
        TypeError: another dtype, or two. ValueError: no columns, a weight of another size or device, a negative eps.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467), equation 4.
    """
    return _ops.rms_norm.default(input, weight, eps, zero_centered)


def rms_norm_forward(
    input: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm`, and the statistics for its backward.

    Args:
        input, weight, eps, zero_centered: as in :func:`rms_norm`.

    Returns:
        The output, differentiable as that of :func:`rms_norm`, and ``rstd`` float32 ``[...]``: for each row
        ``1 / sqrt(mean(input^2) + eps)``.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`.
    """
    return _ops.rms_norm_forward.default(input, weight, eps, zero_centered)


def rms_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor | None, rstd: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`rms_norm`.

    Args:
        grad: the gradient of the output, in the sizes and the dtype of ``input``. Any strides.
        input, weight, zero_centered: what the forward was given.
        rstd: what :func:`rms_norm_forward` or :func:`rms_norm_quantize` returned.

    Returns:
        ``grad_input`` in the sizes and ``grad_weight [H]`` (``[0]`` without a weight), both in the dtype of ``input``.
        The weight's is a sum over rows in a fixed order: it repeats bit for bit, and is the same on CPU and CUDA.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`; ValueError: a gradient or ``rstd`` of other sizes.
    """
    return _ops.rms_norm_backward.default(grad, input, weight, rstd, zero_centered)


def rms_norm_quantize(
    input: Tensor,
    weight: Tensor | None,
    eps: float,
    format: str | Format,
    zero_centered: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm`, quantized along rows in the same pass: the bytes of the two steps.

    Args:
        input: ``[T, H]`` float32, bfloat16 or float16, any strides. For ``mxfp8`` H is a multiple of 32, for ``nvfp4``
            of 16. A GPU reads it once where it is bfloat16, H a multiple of 8 up to 8192 and the element E4M3, else two
            times or more.
        weight, eps, zero_centered: as in :func:`rms_norm`.
        format: a key of a format with scales, or a :class:`~transformer_plugin.formats.Format`; of ``fp8_block`` and
            ``mxfp8`` without ``square``.
        amax: what ``fp8_tensor`` and ``nvfp4`` scale by, float32 in the sizes that :func:`~transformer_plugin.ops.amax`
            gives for the norm. It need not be that of this norm, for example that of an earlier step: larger values
            saturate.
        seed: int64 ``[1]`` on the device of ``input``, of ``nvfp4`` with ``sr`` only.

    Returns:
        ``data [T, H]`` (``[T, H / 2]`` bytes of ``nvfp4``) and ``scale_inv``, as
        :func:`~transformer_plugin.ops.quantize` of the norm in the dtype of ``input``, and ``rstd`` float32 ``[T]`` for
        :func:`rms_norm_backward`. The same bytes on CPU and CUDA. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`; ValueError: other dimensions, a width that the format does not take,
            square blocks of FP8, an amax or a seed that is missing or that the format does not use.
    """
    return _ops.rms_norm_quantize.default(
        input, weight, eps, key_of(format, "rms_norm_quantize"), zero_centered, amax, seed
    )


def layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """LayerNorm: ``(input - mean) / sqrt(variance + eps) * gamma + bias`` over the last dimension.

    The mean first, then the variance from the differences to it.

    Args:
        input: ``[..., H]`` float32, bfloat16 or float16, H at least 1. Any strides.
        weight: ``[H]`` in the dtype of ``input``, or None for a gamma of 1.
        bias: ``[H]`` in the dtype of ``input``, or None.
        eps: what is added to the variance; not negative.
        zero_centered: whether gamma is 1 + weight, as TransformerEngine's ``zero_centered_gamma``.

    Returns:
        ``[..., H]`` in the dtype of ``input``, contiguous. The same bits on CPU and CUDA.

    Differentiable in input, weight and bias, by :func:`layer_norm_backward`.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450), equations 3 and 4.
    """
    return _ops.layer_norm.default(input, weight, bias, eps, zero_centered)


def layer_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`layer_norm`, and what its backward wants.

    Args:
        input, weight, bias, eps, zero_centered: as in :func:`layer_norm`.

    Returns:
        The output, differentiable as that of :func:`layer_norm`, and float32 ``mean [...]`` and ``rstd [...]`` of the
        rows.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`.
    """
    return _ops.layer_norm_forward.default(input, weight, bias, eps, zero_centered)


def layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool = False,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`layer_norm`.

    Args:
        grad: the gradient of the output, in the sizes and the dtype of ``input``. Any strides.
        input, weight, zero_centered: what the forward was given.
        mean, rstd: what :func:`layer_norm_forward` or :func:`layer_norm_quantize` returned.
        has_bias: whether the gradient of a bias is asked for.

    Returns:
        ``grad_input`` in the sizes, ``grad_weight [H]`` (``[0]`` without a weight) and ``grad_bias [H]`` (``[0]`` when
        not asked for), all in the dtype of ``input``. The same bits on CPU and CUDA.

    Raises:
        TypeError, ValueError: as :func:`rms_norm_backward`.
    """
    return _ops.layer_norm_backward.default(grad, input, weight, mean, rstd, zero_centered, has_bias)


def layer_norm_quantize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    format: str | Format,
    zero_centered: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`layer_norm`, quantized along rows in the same pass: the bytes of the two steps.

    Args:
        input, format, amax, seed: as in :func:`rms_norm_quantize`.
        weight, bias, eps, zero_centered: as in :func:`layer_norm`.

    Returns:
        ``data [T, H]``, ``scale_inv``, and float32 ``mean [T]`` and ``rstd [T]`` for :func:`layer_norm_backward`. The
        same bytes on CPU and CUDA. Not differentiable.

    Raises:
        TypeError, ValueError: as :func:`rms_norm_quantize`.
    """
    key = key_of(format, "layer_norm_quantize")
    return _ops.layer_norm_quantize.default(input, weight, bias, eps, key, zero_centered, amax, seed)
