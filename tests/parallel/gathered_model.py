"""A model of every kind of layer that quantizes its weight, and steps of it with other rows on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from transformer_plugin.nn import GroupedMLP, LayerNormLinear, Linear
from transformer_plugin.parallel._quantized_gather import QuantizedGatherTensor
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

HIDDEN, GROUPS, ROWS = 256, 4, 64


class Model(torch.nn.Module):
    """Every kind of layer that quantizes a weight, and layers that do not."""

    def __init__(self, recipe: Any, layout: Any = "packed", hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first = Linear(hidden, hidden, recipe=recipe)
        self.norm = LayerNormLinear(hidden, hidden, recipe=recipe)
        self.experts = GroupedMLP(GROUPS, hidden, hidden // 2, True, recipe=recipe, parameters=layout)
        self.last = torch.nn.Linear(hidden, 32)

    def forward(self, x: Tensor, group_sizes: Tensor, probs: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        result: Tensor = self.last(x + self.experts(x, group_sizes, probs))
        return result


#: The weights that are gathered in their format.
QUANTIZED = ("first.weight", "norm.weight", "experts.fc1.weight", "experts.fc2.weight")


def made(rank: Rank, recipe: Any, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(recipe, **options).to(rank.device)


def shard(rank: Rank, model: Any, **options: Any) -> Any:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for module in (model.first, model.norm, model.experts, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def batch(rank: int, step: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Other rows on each rank; rank 1 has a group without rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    probs = torch.rand(ROWS, generator=generator)
    sizes = torch.tensor([16, 0, 16, 16] if rank else [0, 32, 16, 0])
    return [x.to(device), sizes.to(device), probs.to(device)]


def step_of(model: Any, rank: Rank, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Two forwards, then both backwards: the second all-gather of a weight comes before the first backward."""
    outputs = []
    for i in range(2):
        torch.manual_seed(9 + i)  # of stochastic rounding
        outputs.append(model(*batch(rank.rank, 2 * step + i, rank.device, dtype)))
    for i, output in enumerate(outputs):
        torch.manual_seed(19 + i)
        output.float().square().sum().backward()
    return [output.detach() for output in outputs]


def local(tensor: Any) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    result: Tensor = local.high_precision if isinstance(local, QuantizedGatherTensor) else local
    return result


def assert_alike(model: Any, other: Any, what: str = "values") -> None:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        if what == "gradients":
            assert (p.grad is None) == (q.grad is None), name
            p, q = p.grad, q.grad
        if p is not None:
            assert_same_bits(local(p), local(q))
