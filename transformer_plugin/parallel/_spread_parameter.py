"""The parameters of experts that are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


class SpreadParameter(DTensor):
    """A ``DTensor`` by another name.

    On a GPU optimizers update all parameters in one call by default, which torch refuses for a list of plain tensors
    and ``DTensor`` s. Where a parameter is of a class that they do not know, they update one by one. Moves, casts and
    loads make a ``DTensor`` of it: :func:`as_dtensors` and :func:`mark_spread` bring the class back.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = spread_parameter(self.detach().clone(), self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied


def spread_parameter(whole: Tensor, requires_grad: bool) -> Parameter:
    """A parameter that shares the memory of a ``DTensor``."""
    parameter = Parameter(whole, requires_grad)
    parameter.__class__ = SpreadParameter  # type: ignore[assignment]
    return parameter


def mark_spread(module: torch.nn.Module, *_: Any) -> None:
    """Makes the module's own parameters of the class that they were made with. Those that FSDP2 shards are its."""
    for parameter in module._parameters.values():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
            parameter.__class__ = SpreadParameter


@contextmanager
def as_dtensors(module: torch.nn.Module) -> Iterator[None]:
    """Around what makes new parameters of the module's own: torch wants a class whose ``detach()`` is of it."""
    for parameter in module._parameters.values():
        if isinstance(parameter, SpreadParameter):
            parameter.__class__ = DTensor
    try:
        yield
    finally:
        mark_spread(module)
