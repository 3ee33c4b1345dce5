"""Layers, batches and comparisons for the tests of delayed weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.common import RECIPES, rows_of, width_of
from transformer_plugin import nn
from transformer_plugin.testing.numerics import assert_same_bits

LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "GroupedLinear list", "GroupedLinear grouped")
LAYERS += ("GroupedMLP", "GroupedMLP list", "GroupedMLP hooked")
GROUPS = 3
Layer = Any
by_layer = pytest.mark.parametrize("kind", LAYERS)


def make(kind: str, name: str = "fp8_block", **options: Any) -> Layer:
    """A layer with the same initial values in every call."""
    torch.manual_seed(0)
    options = {"recipe": RECIPES[name][0], "bias": True, **options}
    wide, narrow = width_of(name, 64), width_of(name, 32)
    layer, *layout = kind.split()
    if not layer.startswith("Grouped"):
        return getattr(nn, layer)(wide, narrow, **options)
    if layout and layout[0] != "hooked":
        options["parameters"] = layout[0]
    made = getattr(nn, layer)(GROUPS, wide, narrow, **options)
    if layout == ["hooked"]:  # the layers are called one by one
        made.fc1.register_forward_hook(lambda *_: None)
    return made


def both(kind: str, name: str = "fp8_block", device: Any = "cpu", **options: Any) -> tuple[Layer, Layer]:
    """A layer that delays, and one that does not."""
    return make(kind, name, delay_wgrad_compute=True, device=device, **options), make(
        kind, name, device=device, **options
    )


def queues_of(module: Layer) -> list[Any]:
    """The queues of the layers of a module."""
    destinations = [getattr(each, "_wgrad_destination", None) for each in module.modules()]
    return [each.queue for each in destinations if each is not None and each.queue is not None]


def batch(
    kind: str, name: str, seed: int, device: Any = "cpu", dtype: Any = torch.float32
) -> tuple[Tensor, ...]:
    """The arguments of a forward; the last is the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    unit = rows_of(name, 1)
    sizes = torch.tensor([unit * (2 + seed), 0, unit * 3])
    rows = int(sizes.sum()) + unit
    wide, narrow = width_of(name, 64), width_of(name, 32)
    x = torch.randn(rows, wide, generator=generator).to(device, dtype).requires_grad_()
    out = torch.randn(rows, wide if kind.startswith("GroupedMLP") else narrow, generator=generator)
    more: tuple[Tensor, ...] = ()
    if kind.startswith("Grouped"):
        more = (sizes.to(device),)
    if kind.startswith("GroupedMLP"):
        more += (torch.rand(rows, generator=generator).to(device).requires_grad_(),)
    return (x, *more, out.to(device, dtype))


def weights_of(layer: Layer) -> dict[str, Tensor]:
    return {name: p for name, p in layer.named_parameters() if "weight" in name and "norm" not in name}


def set_main_grads(layer: Layer, dtype: torch.dtype = torch.float32) -> None:
    for weight in weights_of(layer).values():
        weight.main_grad = torch.full(tuple(weight.shape), 0.25, dtype=dtype, device=weight.device)  # type: ignore[attr-defined]


def run(
    layer: Layer, arguments: tuple[Tensor, ...], forward: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Forward and backward. Returns the output, and the gradients of the arguments."""
    *inputs, grad = arguments
    output = (forward or layer)(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def plain(tensor: Any) -> Tensor:
    return tensor.packed() if hasattr(tensor, "packed") else tensor


def assert_same_gradients(delayed: Layer, usual: Layer) -> None:
    """The gradients of all parameters, and their buffers."""
    for (name, got), wanted in zip(delayed.named_parameters(), usual.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        if got.grad is not None:
            assert type(got.grad) is type(wanted.grad), name
            assert_same_bits(plain(got.grad), plain(wanted.grad), name)
        if hasattr(wanted, "main_grad"):
            assert_same_bits(got.main_grad, wanted.main_grad, name)
