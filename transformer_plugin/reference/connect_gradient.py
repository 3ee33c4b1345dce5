"""Reference of what connects the gradients of two tensors."""

from __future__ import annotations

from torch import Tensor

__all__ = [
    "connect_gradient",
]


def connect_gradient(value: Tensor, source: Tensor) -> None:
    """A copy of the numbers, which are the same, gives ``value`` the history that it needs."""
    value.copy_(source)
