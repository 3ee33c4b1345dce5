"""Models with full weights and with weights that are sharded over ranks, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_plugin import nn as tnn
from transformer_plugin import recipes
from transformer_plugin.parallel import shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank

RECIPES: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "fp8_block": recipes.Float8BlockScaling,
    "fp8_tensor": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
TOKENS = 64


def dense(recipe: Any, device: torch.device, **options: Any) -> torch.nn.Module:
    """Three layers; 192 and 64 rows are no multiples of the 128 rows of a block."""
    options = {"recipe": recipe, "device": device, "dtype": torch.bfloat16, **options}
    return torch.nn.Sequential(
        tnn.Linear(128, 256, **options),
        tnn.LayerNormLinear(256, 192, **options),
        tnn.Linear(192, 64, bias=False, **options),
    )


class Experts(torch.nn.Module):
    """Experts, with sizes of groups that are other ones for each input."""

    def __init__(self, recipe: Any, device: torch.device, experts: int, bias: bool = False) -> None:
        super().__init__()
        options = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
        self.mlp = tnn.GroupedMLP(experts, 128, 96, bias, **options)
        self.last = tnn.GroupedLinear(experts, 128, 64, **options)

    def forward(self, input: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        return self.last(self.mlp(input, sizes, probs), sizes)


class Batch(NamedTuple):
    """What one rank computes on."""

    arguments: tuple[Tensor, ...]
    seed: int


def dense_batch(rank: int, step: int, device: torch.device) -> Batch:
    """Other numbers for each rank and step."""
    seed = 1000 * step + rank
    input = torch.randn(TOKENS, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Batch((input.to(device),), seed)


def expert_batch(rank: int, step: int, device: torch.device, experts: int) -> Batch:
    """Sizes of multiples of 16, some of them zero; the last rows belong to no group."""
    seed = 1000 * step + rank
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(128, 128, generator=generator).bfloat16()
    sizes = torch.bincount(torch.randint(experts, (7,), generator=generator), minlength=experts) * 16
    probs = torch.rand(128, generator=generator)
    return Batch((input.to(device), sizes.to(device), probs.to(device)), seed)


class Results(NamedTuple):
    """Of one forward and backward."""

    output: Tensor
    grad_input: Tensor
    grads: dict[str, Tensor]


def computed(model: torch.nn.Module, batch: Batch) -> Results:
    """Runs a model forward and backward, with fresh gradients and torch's generator at the batch's seed."""
    for parameter in model.parameters():
        parameter.grad = None
    input, *others = batch.arguments
    input = input.clone().requires_grad_()
    torch.manual_seed(batch.seed)
    output = model(input, *others)
    output.float().square().mean().backward()
    assert input.grad is not None
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Results(output.detach(), input.grad, grads)


def expected_grad(full: list[Tensor], parameter: Tensor, mean: bool) -> Tensor:
    """A shard of the sum of the ranks' gradients, made in float32 in ascending order and rounded once."""
    total = torch.zeros_like(full[0], dtype=torch.float32)
    for each in full:
        total = total + each.float()
    shard = shard_of_parameter(parameter)
    assert shard is not None
    if mean:
        total = total * (1 / len(full))
    return shard.local_shard_of(total).to(full[0].dtype)


def twins(
    rank: Rank, make: Callable[[], torch.nn.Module], **options: Any
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model twice: unsharded, and sharded over the ranks."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    shard_(models[1], rank.group, **options)
    return models[0], models[1]


def change_sharded(model: torch.nn.Module, seed: int) -> None:
    """Adds the same numbers to every model that is sharded in the same way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shard = shard_of_parameter(parameter)
            rows = parameter.shape[0] if shard is None else shard.shard.rows
            step = (0.01 * torch.randn(rows, *parameter.shape[1:], generator=generator)).to(parameter)
            parameter.add_(step if shard is None else shard.local_shard_of(step))


def change(full: torch.nn.Module, sharded: torch.nn.Module, seed: int) -> None:
    """Adds the same numbers to both, as an optimizer would."""
    pairs = zip(full.parameters(), sharded.parameters(), strict=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one, other in pairs:
            step = (0.01 * torch.randn(one.shape, generator=generator)).to(one)
            one.add_(step)
            shard = shard_of_parameter(other)
            other.add_(step if shard is None else shard.local_shard_of(step))
