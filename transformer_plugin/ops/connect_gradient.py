"""What connects the gradients of a value and of the tensor in it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "connect_gradient",
]

_ops = torch.ops.transformer_plugin


def connect_gradient(value: Tensor, source: Tensor) -> None:
    """Autograd passes the gradient of ``value`` on to ``source``, which stands for the same numbers.

    What a ``torch.autograd.Function`` that returns its argument does, in half of its host time. Nothing is read or
    written. Under ``torch.no_grad()``, and for a ``source`` without a gradient, it does nothing. Not for compiled code.

    Args:
        value: a tensor of any type without a gradient, which is no view: new, or detached.
        source: of the same sizes, dtype and device. float32, bfloat16, float16 or float64.

    Raises:
        TypeError, ValueError: tensors that do not agree, a ``value`` that has a gradient or is a view.
    """
    _ops.connect_gradient.default(value, source)
