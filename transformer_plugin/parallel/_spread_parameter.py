"""The parameters of experts that are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


class SpreadParameter(DTensor):
    """A ``DTensor`` by another name.

    On a GPU optimizers update all parameters in one call by default, which torch refuses for a list of plain tensors
    and ``DTensor`` s. Where a parameter is of a class that they do not know, they update one by one.
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
