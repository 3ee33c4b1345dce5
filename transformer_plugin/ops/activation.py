"""Activations. Shapes: T rows (tokens), F features of the hidden layer."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "swiglu",
    "swiglu_backward",
]

_ops = torch.ops.transformer_plugin


def swiglu(
    input: Tensor, probs: Tensor | None = None, group_sizes: Tensor | None = None, interleave: int = 0
) -> Tensor:
    """SwiGLU times a probability per row: ``silu(gate) * linear * probs``.

    Args:
        input: ``[T, 2F]`` float32, bfloat16 or float16; the gate is the first F columns, the linear part the
            last F. Any strides.
        probs: ``[T]`` float32, or None for 1.
        group_sizes: ``[G]`` int32 or int64: only the first ``group_sizes.sum()`` rows are read and written, the content
            of the others is unspecified. None for all T rows.
        interleave: 0, or 32: 32 columns of the gate and 32 of the linear part follow each other in turn, and F is a
            multiple of 32 (TransformerEngine's ``glu_interleave_size``).

    Returns:
        ``[T, F]`` in the dtype of ``input``, computed in float32 and rounded once. The same bits on CPU and CUDA.

    Differentiable in ``input`` and ``probs``, with gradients of 0 past the groups; the probability's gradient is a row
    sum in a fixed order.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, an odd number of columns, another device, another
            ``interleave`` or F not a multiple of it; on a CPU also group sizes that are negative or sum to more than T.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), equation 6 without biases.
    """
    return _ops.swiglu.default(input, probs, group_sizes, interleave)


def swiglu_backward(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    interleave: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`swiglu`.

    Args:
        grad: ``[T, F]``, the gradient of the output, in the dtype of ``input``.
        input, probs, group_sizes, interleave: what the forward was given. Rows of ``grad`` past the groups are not
            read.

    Returns:
        ``grad_input [T, 2F]`` in the dtype and the order of columns of ``input``, and ``grad_probs [T]`` float32
        (``[0]`` when ``probs`` is None), ``grad_probs[i] = sum_j grad[i, j] * silu(gate[i, j]) * linear[i, j]``. Past
        the groups ``grad_probs`` is 0, and the content of ``grad_input`` is unspecified.
    """
    return _ops.swiglu_backward.default(grad, input, probs, group_sizes, interleave)
