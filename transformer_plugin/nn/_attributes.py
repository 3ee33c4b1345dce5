"""Module attributes that a user may try to set: the assignment takes effect, or it raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_plugin._arguments import class_name


def fixed(name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """A property set by the constructor. Assigning another value later raises, because nothing would follow it.

    With ``read``, the value is computed by ``read(module)`` and not stored.
    """
    key = f"_{name}"

    def get(self: torch.nn.Module) -> Any:
        return getattr(self, key)

    def set(self: torch.nn.Module, value: Any) -> None:
        current = read(self) if read else self.__dict__.setdefault(key, value)
        if current is not value and current != value:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute '{name}': expected {current!r}, as in the "
                f"constructor, got {value!r}. Make a new layer."
            )

    return property(read or get, set, doc=f"``{name}`` of the constructor. Another value cannot be set.")
