"""MasterWeights of sharded weights and of experts over ranks follow checkpoints that are loaded later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import transformer_plugin as tp
from tests.parallel.sharded_models import RECIPES, dense
from transformer_plugin import nn as tnn
from transformer_plugin.optim import MasterWeights
from transformer_plugin.parallel import shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool


def make(kind: str, rank: Rank, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "shards":
        return shard_(dense(RECIPES["fp8_block"](), rank.device), rank.group)
    if kind == "DTensors":
        options: dict[str, Any] = {"dispatch": tnn.DispatchConfig(max_tokens=8), "dtype": torch.bfloat16}
        return tnn.MoE(64, 32, 4, 2, group=rank.group, device=rank.device, **options)
    with tp.quantized_init(tp.recipes.Float8BlockScaling()):
        options = {"tp_group": rank.group, "parallel_mode": "column", "device": rank.device}
        return torch.nn.Sequential(tnn.Linear(128, 256, dtype=torch.bfloat16, **options))


def sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=2e-4, foreach=False)  # which takes DTensors and plain tensors together


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(rank: Rank, model: torch.nn.Module, masters: MasterWeights) -> None:
    generator = torch.Generator().manual_seed(rank.rank)
    for name, parameter in model.named_parameters():
        if "norm_weight" in name:  # 1 in every model, so that a master weight near it stays as it is
            continue
        gradient = torch.randn(local(parameter).shape, generator=generator).to(rank.device, parameter.dtype)
        shard = shard_of_parameter(parameter)
        if shard is not None:
            gradient[shard.valid_rows :] = 0
        if hasattr(parameter, "to_local"):
            gradient = type(parameter.detach()).from_local(
                gradient, parameter.device_mesh, parameter.placements
            )  # type: ignore[attr-defined]
        parameter.grad = gradient
    masters.step()
    masters.zero_grad()


def check(rank: Rank, kind: str, folder: str, by_dcp: bool) -> None:
    model, other = make(kind, rank, 0), make(kind, rank, 1)
    masters = MasterWeights(model.parameters(), sgd)
    for _ in range(2):
        train(rank, model, masters)
    state = other.state_dict()
    if by_dcp:
        dcp.save({"model": state}, checkpoint_id=folder)
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
    if kind == "DTensors" and by_dcp:
        masters.follow_parameters()  # torch does not count what is written into their shards
    elif not by_dcp:
        model.load_state_dict(state)
    expected = MasterWeights(other.parameters(), sgd)
    for _ in range(2):
        train(rank, model, masters)
        train(rank, other, expected)
        for one, two in zip(masters.master_weights, expected.master_weights, strict=True):
            assert torch.equal(local(one), local(two))
    assert any(not torch.equal(local(m).bfloat16().float(), local(m)) for m in masters.master_weights)
    with torch.no_grad():  # on one rank alone, without a collective
        if rank.rank == 0:
            parameter = next(model.parameters())
            parameter.copy_(parameter.detach().clone())
    dist.barrier()
    train(rank, model, masters)


@pytest.mark.parametrize("kind", ["shards", "DTensors", "slices"])
def test_masters_follow(kind: str, pair: RankPool, tmp_path: Path) -> None:
    pair.run(check, kind, str(tmp_path), False)
    if kind != "slices":  # whose state_dict has values in high precision
        pair.run(check, kind, str(tmp_path), True)
