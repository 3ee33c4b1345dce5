"""Layers whose weights another runtime has, which is this process alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import nn as tnn
from transformer_plugin import recipes
from transformer_plugin.parallel import attach_distributed_weights
from transformer_plugin.recipes import Recipe

T, K, N, G = 32, 64, 96, 3
Convert = Callable[[Tensor, bool], Any]


class Shard(Parameter):
    """A shard. The first of a layer has all unsharded weights, which it returns as if it had gathered them."""

    is_distributed_weight = True
    full: list[Tensor]
    convert: Convert
    calls: list[str]
    buffers: list[Tensor]
    keeps: bool
    #: what it adds to gradients.
    shift = 0

    def _all(self, backward: bool) -> list[Any]:
        return [self.convert(full, backward) for full in self.full]

    def materialize_group_for_forward(self) -> list[Any]:
        self.calls.append("forward")
        return self._all(False)

    def materialize_group_for_backward(self) -> list[Any]:
        self.calls.append("backward")
        return self._all(True)

    def grad_buffer(self) -> Any:
        return self.buffers.pop()

    def finalize_group_grads(self, wgrads: list[Tensor]) -> list[Tensor | None]:
        self.calls.append("finalize")
        self.wgrads = wgrads
        rows = self.shape[0]
        return [None if self.keeps else wgrad[:rows] + self.shift for wgrad in wgrads]


def unchanged(full: Tensor, backward: bool) -> Tensor:
    return full


def driven(layer: Any, convert: Convert = unchanged, dtype: torch.dtype | None = None) -> Shard:
    """Puts half of the rows (of a stack, of the matrices) in place of each weight. Returns the first of them."""
    names = getattr(layer, "_weight_names", ("weight",))
    shards = []
    for name in names:
        full = layer._parameters[name].detach()
        shard = Shard(full[: -(-full.shape[0] // 2)].to(dtype or full.dtype, copy=True))
        shard.full, shard.convert, shard.calls, shard.keeps = [], convert, [], False
        shards.append((name, shard, full))
    shards[0][1].full = [full for _, _, full in shards]
    for name, shard, _ in shards:
        layer.register_parameter(name, shard)
    assert attach_distributed_weights(layer) == list(names)
    return shards[0][1]


def layer_of(
    kind: str, recipe: Recipe | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    torch.manual_seed(0)
    options = {"recipe": recipe, "dtype": dtype, **options}
    name, *layout = kind.split()
    if name == "GroupedLinear":
        return tnn.GroupedLinear(G, K, N, parameters=(*layout, "packed")[0], **options)
    return getattr(tnn, name)(K, N, **options)


def batch(
    kind: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """The arguments of a forward, and the gradient of its output."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(T, width, generator=generator).to(device, dtype) for width in (K, N))
    sizes = (torch.tensor([16, 0, 16], device=device),) if kind.startswith("Grouped") else ()
    return (x.requires_grad_(), *sizes, grad)


def run(layer: Any, kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output, gradient of the input and gradients of the parameters but the weights."""
    x, *sizes, grad = batch(kind, dtype, next(layer.parameters()).device)
    output = layer(x, *sizes)
    output.backward(grad.to(output.dtype))
    assert x.grad is not None
    others = [p.grad for n, p in layer.named_parameters() if "weight" not in n or "norm" in n]
    return [output.detach(), x.grad, *others]


KINDS = ("Linear", "LayerNormLinear", "GroupedLinear", "GroupedLinear list")
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "bf16": recipes.BFloat16(),
    "fp8_block": recipes.Float8BlockScaling(),
    "fp8_tensor": recipes.Float8CurrentScaling(),
    "fp8_row": recipes.Float8RowwiseScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
