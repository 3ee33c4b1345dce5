"""The parameter class of sharded experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


class ShardedParameter(DTensor):
    """A subclass of ``DTensor`` without new behavior, so that optimizers do not use their ``foreach`` path.

    On a GPU optimizers by default update all parameters in one ``foreach`` call, and torch rejects a list that mixes
    plain tensors and ``DTensor`` s. If a parameter has an unknown class, they update one by one. Moves, casts and loads
    turn it into a ``DTensor``; :func:`as_dtensors` and :func:`restore_sharded_class` restore the class.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = sharded_parameter(self.detach().clone(), self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    @staticmethod
    def __tensor_unflatten__(*arguments: Any) -> Tensor:
        """The same class: compiled code checks that it gets what it was traced with, since torch 2.15."""
        made: Tensor = DTensor.__tensor_unflatten__(*arguments)
        made.__class__ = ShardedParameter
        return made


def sharded_parameter(full: Tensor, requires_grad: bool) -> Parameter:
    """A parameter of this class that shares the memory of a ``DTensor``."""
    parameter = Parameter(full, requires_grad)
    parameter.__class__ = ShardedParameter  # type: ignore[assignment]
    return parameter


def restore_sharded_class(module: torch.nn.Module, *_: Any) -> None:
    """Restores the class of the module's own parameters, except for those that FSDP2 has sharded."""
    for parameter in module._parameters.values():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
            parameter.__class__ = ShardedParameter


@contextmanager
def as_dtensors(module: torch.nn.Module) -> Iterator[None]:
    """Context in which torch replaces parameters: it requires that ``detach()`` returns the parameter's own class."""
    for parameter in module._parameters.values():
        if isinstance(parameter, ShardedParameter):
            parameter.__class__ = DTensor
    try:
        yield
    finally:
        restore_sharded_class(module)
