"""How wrappers take tensors that may be one or several, and formats that may be keys."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from transformer_plugin.formats import Format

Tensors = Tensor | Iterable[Tensor]


def listed(tensors: Tensors) -> list[Tensor]:
    """One tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def listed_or_none(tensors: Tensors | None) -> list[Tensor] | None:
    """The same, or none."""
    return None if tensors is None else listed(tensors)


def key_of(format: str | Format) -> str:
    """The key of a format."""
    return format if isinstance(format, str) else format.key
