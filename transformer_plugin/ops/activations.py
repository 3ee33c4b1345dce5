"""Activations. Shapes: T rows (tokens), F features of the hidden layer; [T, 2F] inputs of functions with a gate, [T, F]
of those without.

``activation`` is a key with options or a :class:`~transformer_plugin.activations.Activation`: the function, and the
order of the columns of its input. ``"swiglu"``: ``silu(gate) * linear``, the gate in the first F columns and the linear
part in the last F. ``"swiglu:limit=7,alpha=1.702,offset=1"``: ``g * sigmoid(alpha * g) * (u + offset)`` of ``g =
min(gate, limit)`` and ``u = clamp(linear, -limit, limit)``. ``"geglu_tanh"``: ``gelu(gate) * linear``. Others, also
without a gate, are those of the class. With ``interleave=32`` 32 columns of the gate and 32 of the linear part follow
each other in turn, and F is a multiple of 32 (TransformerEngine's ``glu_interleave_size``); with ``interleave=1`` one
column of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.activations import Activation, key_of_activation

__all__ = [
    "activation",
    "activation_backward",
]

_ops = torch.ops.transformer_plugin


def activation(
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    activation: str | Activation = "swiglu",
) -> Tensor:
    """An activation times a probability per row: ``silu(gate) * linear * probs`` for SwiGLU.

    Args:
        input: ``[T, 2F]``, for a function without a gate ``[T, F]``; float32, bfloat16 or float16. Any strides.
        probs: ``[T]`` float32, or None for 1.
        group_sizes: ``[G]`` int32 or int64: only the first ``group_sizes.sum()`` rows are read and written, the content
            of the others is unspecified. None for all T rows.
        activation: the function and the order of the columns of ``input``, as above.

    Returns:
        ``[T, F]`` in the dtype of ``input``, computed in float32 and rounded once. The same bits on CPU and CUDA.

    Differentiable in ``input`` and ``probs``, with gradients of 0 past the groups; the probability's gradient is a row
    sum in a fixed order.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, an odd number of columns with a gate, another device,
            another ``activation``, F that is not a multiple of 32 where it interleaves; on a CPU also group sizes
            that are negative or sum to more than T.

    Source: of the functions :class:`~transformer_plugin.activations.Activation`.
    """
    key = key_of_activation(activation, "activation")
    return _ops.activation.default(input, probs, group_sizes, key)


def activation_backward(
    grad: Tensor,
    input: Tensor,
    probs: Tensor | None = None,
    group_sizes: Tensor | None = None,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`activation`.

    Args:
        grad: ``[T, F]``, the gradient of the output, in the dtype of ``input``.
        input, probs, group_sizes, activation: what the forward was given. Rows of ``grad`` past the groups are not
            read.

    Returns:
        ``grad_input`` in the sizes, the dtype and the order of columns of ``input``, and ``grad_probs [T]`` float32
        (``[0]`` when ``probs`` is None): ``grad_probs[i]`` is the sum over j of ``grad[i, j]`` times the activation
        without ``probs``, for SwiGLU ``grad[i, j] * silu(gate[i, j]) * linear[i, j]``. Past the groups ``grad_probs``
        is 0, and the content of ``grad_input`` is unspecified.
    """
    key = key_of_activation(activation, "activation_backward")
    return _ops.activation_backward.default(grad, input, probs, group_sizes, key)
