"""A model whose experts are sharded over ranks, and the results of one process with the rows of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.recipes import Recipe
from transformer_plugin.testing.distributed import Rank

HIDDEN, FFN, EXPERTS, TOPK, ROWS = 16, 32, 8, 2, 12


class Block(torch.nn.Module):
    """A mixture between two layers that are replicated on every rank."""

    def __init__(
        self, device: torch.device | str = "cpu", recipe: Recipe | None = None, **placement: Any
    ) -> None:
        super().__init__()
        dispatch = DispatchConfig(max_tokens=ROWS, alignment=1) if placement else DispatchConfig(alignment=1)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
        self.moe = MoE(
            HIDDEN,
            FFN,
            EXPERTS,
            TOPK,
            dispatch=dispatch,
            bias=True,
            device=device,
            recipe=recipe,
            **placement,
        )
        self.last = torch.nn.Linear(HIDDEN, HIDDEN, device=device)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe(self.first(x)).output
        return self.last(x)


def full_block(device: torch.device | str = "cpu", **options: Any) -> Block:
    """The model with all experts, the same on every rank."""
    torch.manual_seed(0)
    return Block(device, **options)


def sharded_block(full: Block, device: torch.device | str = "cpu", **placement: Any) -> Block:
    """The same model with its experts sharded over ranks."""
    torch.manual_seed(1 + dist.get_rank())  # random values that differ between ranks must not matter
    block = Block(device, **placement)
    block.load_state_dict(full.state_dict())
    return block


def rows_of(rank: int, step: int = 0) -> Tensor:
    """The rows of a rank, which every rank can compute."""
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """A mean over the rows, so that the mean of the ranks' losses is that of all rows."""
    return model(rows).square().sum(dim=1).mean()


def wanted_gradients(full: Block, ranks: int, steps: int = 1) -> dict[str, Tensor]:
    """Returns the gradients of one process with the rows of all ranks, summed over the steps."""
    model = copy.deepcopy(full)
    device = model.first.weight.device
    for step in range(steps):
        loss_of(model, torch.cat([rows_of(rank, step) for rank in range(ranks)]).to(device)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def everything(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor; other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(model: torch.nn.Module, wanted: dict[str, Tensor]) -> None:
    got = dict(model.named_parameters())
    assert len(got) == len(wanted)
    for name, parameter in got.items():
        key = name.removeprefix("module.")
        assert parameter.grad is not None, name
        gradient = everything(parameter.grad)
        assert wanted[key].abs().max() > 1e-3
        torch.testing.assert_close(
            gradient, wanted[key], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def mesh_of(rank: Rank) -> Any:
    """(copies, experts): 1 x 2 for two ranks, 2 x 2 for four."""
    return init_device_mesh(rank.device.type, (rank.size // 2, 2), mesh_dim_names=("copies", "experts"))


def everyone(mesh: Any) -> Any:
    """The default mesh of fully_shard, but on this device."""
    return init_device_mesh(mesh.device_type, (mesh.size(),))


def one_step(rank: Rank, model: torch.nn.Module, step: int = 0) -> None:
    loss_of(model, rows_of(rank.rank, step).to(rank.device)).backward()
