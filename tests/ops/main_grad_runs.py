"""Runs of the layers whose weight gradients go into buffers, for the tests of main_grad and of separate weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_linear_ops import NONE
from tests.ops.test_quantize_weight import FORMATS as ROUNDED
from tests.ops.test_quantize_weight import Layer, layers
from transformer_plugin.testing.gemm_cases import normals

Formats = tuple[str, str, str]
FORMATS: dict[str, Formats] = {
    "none": NONE,
    **ROUNDED,
    "row-scaled": ("nvfp4:row_scaled",) * 3,
    "nan": ("fp8_block:nan", "fp8_block:nan,square", "fp8_block:nan"),
}
BUFFERS = {
    "linear": {1: "main_grad"},
    "grouped_linear": {1: "main_grad"},
    "grouped_mlp": {1: "fc1_main_grad", 2: "fc2_main_grad"},
}


class AllCalls(TorchDispatchMode):
    """Records the names of all ops that run, with their namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


class Run(NamedTuple):
    """The results of forward and backward: a list of gradients, one for each matrix, for a weight that is a list."""

    output: Tensor
    gradients: list[Any]
    leaves: list[Any]


def layer_of(
    name: str,
    formats: Formats,
    dtype: torch.dtype,
    device: torch.device,
    counts: tuple[int, ...] | None = None,
) -> Layer:
    layer = layers(formats, dtype, device)[name]
    if counts is not None:
        sizes = torch.tensor(counts, device=device)
        places = [i for i, x in enumerate(layer.arguments) if not x.is_floating_point()]
        layer = layer._replace(
            arguments=tuple(sizes if i in places else x for i, x in enumerate(layer.arguments))
        )
    return layer


def separate(weight: Tensor) -> list[Tensor]:
    """The matrices of a stack, each in its own memory, in an order of addresses that is not that of the groups."""
    later = [matrix.clone() for matrix in weight.flip(0)]
    return later[::-1]


def run(
    layer: Layer,
    formats: Formats,
    options: dict[str, Any] | None = None,
    *,
    lists: tuple[int, ...] = (),
    frozen: Callable[[int, int], bool] = lambda place, group: False,
    function: Callable[..., Tensor] | None = None,
) -> Run:
    """One forward and backward with fixed seeds. The weights at the places in ``lists`` are separate matrices."""

    def leaf(x: Tensor, place: int, group: int) -> Tensor:
        wants = x.is_floating_point() and not (place in layer.weights and frozen(place, group))
        return x.detach().clone().requires_grad_(wants) if x.is_floating_point() else x

    leaves: list[Any] = [
        [leaf(matrix, i, g) for g, matrix in enumerate(separate(x))] if i in lists else leaf(x, i, 0)
        for i, x in enumerate(layer.arguments)
    ]
    torch.manual_seed(5)
    output = (function or layer.function)(*leaves, *formats, **(options or {}))
    grad = normals(tuple(output.shape), output.dtype, output.device, torch.Generator().manual_seed(7))
    output.backward(grad)
    gradients = [[w.grad for w in x] if isinstance(x, list) else x.grad for x in leaves]
    return Run(output.detach(), gradients, leaves)


def stacked(gradient: Any) -> Tensor:
    return torch.stack(gradient) if isinstance(gradient, list) else gradient


def buffers(
    name: str, layer: Layer, dtype: torch.dtype, value: float, *, as_list: bool = False
) -> dict[str, Any]:
    """A buffer for each weight of the layer, filled with a value."""
    made = {}
    for place, argument in BUFFERS[name].items():
        buffer = torch.full_like(layer.arguments[place], value, dtype=dtype)
        made[argument] = separate(buffer) if as_list and name != "linear" else buffer
    return made
