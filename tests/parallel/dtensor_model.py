"""A model of every layer that takes DTensor parameters, and its plans; what tests compare of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from transformer_plugin.nn import Embedding, LayerNorm, LayerNormLinear, Linear, RMSNorm
from transformer_plugin.parallel.styles import NormColwiseParallel
from transformer_plugin.recipes import (
    BFloat16,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

RECIPES: list[Recipe | None] = [
    None,
    BFloat16(),
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
ROWS, WIDTH, INNER = 256, 128, 512


class Mlp(torch.nn.Module):
    """Two products."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, INNER, **options), Linear(INNER, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Model(torch.nn.Module):
    """Indices ``[B, S]`` to ``[B, S, INNER]``."""

    def __init__(self, recipe: Recipe | None, dtype: torch.dtype = torch.float32, device: Any = None) -> None:
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed = Embedding(ROWS, WIDTH, **place)
        self.norm = RMSNorm(WIDTH, **place)
        self.mlp = Mlp(recipe=recipe, **place)
        self.last_norm = LayerNorm(WIDTH, **place)
        self.head = LayerNormLinear(WIDTH, INNER, recipe=recipe, **place)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embed(indices)
        x = x + self.mlp(self.norm(x))
        return self.head(self.last_norm(x))


def plan(sequence: bool, dim: int = 1) -> dict[str, Any]:
    """The layouts of a model; with ``sequence``, activations between the products are sharded along ``dim``."""
    if not sequence:
        return {
            "embed": ColwiseParallel(output_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
            "head": NormColwiseParallel(output_layouts=Replicate()),
        }
    rows = Shard(dim)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False),
        "norm": SequenceParallel(sequence_dim=dim),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(use_local_output=False),
        "mlp.down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        "last_norm": SequenceParallel(sequence_dim=dim),
        "head": NormColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }


def full(tensor: Any) -> Tensor:
    """All of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model: torch.nn.Module, run: Callable[..., Any], *inputs: Tensor) -> dict[str, Tensor]:
    """The output and all gradients, of random gradients of the output. Checks the layouts of gradients."""
    output = run(*inputs)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    output.backward(grad.to(output.device, output.dtype))
    found = {"output": full(output.detach())}
    for i, tensor in enumerate(inputs):
        if tensor.grad is not None:
            found[f"input {i}"] = full(tensor.grad)
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        assert type(gradient) is type(parameter.detach()), name
        if isinstance(parameter, DTensor):
            assert gradient.placements == parameter.placements, name
            assert gradient.to_local().shape == parameter.to_local().shape
        found[name] = full(gradient)
    return found


def distance(got: Tensor, expected: Tensor) -> float:
    """The relative distance."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def no_worse(
    got: dict[str, Tensor], single: dict[str, Tensor], exact: dict[str, Tensor], factor: float = 1.2
) -> None:
    """Whether results are about as far from exact ones as those of one process, which have the same formats."""
    assert got.keys() == single.keys() == exact.keys()
    for name, tensor in got.items():
        assert tensor.dtype == single[name].dtype and tensor.shape == single[name].shape, name
        bound = factor * distance(single[name], exact[name]) + 1e-5
        assert distance(tensor, exact[name]) <= bound, (name, distance(tensor, exact[name]), bound)
