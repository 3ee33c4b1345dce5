"""GroupedTensor parameters under torch's data-parallel frameworks, with different rows on each rank.

The reference is one process with plain parameters and the rows of all ranks, whose gradient is averaged as the ranks'
gradients are.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import transformer_plugin as tp
from transformer_plugin.testing.distributed import Rank, RankPool

GROUPS, HIDDEN, FEATURES, ROWS = 4, 16, 8, 24


class Experts(torch.nn.Module):
    """Experts whose weights are plain packed tensors or GroupedTensors, and a parameter that only some calls use."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "fc1": (GROUPS, 2 * FEATURES, HIDDEN),
            "fc2": (GROUPS, HIDDEN, FEATURES),
            "bias": (GROUPS, HIDDEN),
        }
        for name, shape in shapes.items():
            data = torch.randn(shape, generator=generator) / 4
            self.register_parameter(name, torch.nn.Parameter(tp.GroupedTensor(data) if grouped else data))
        self.unused = torch.nn.Parameter(
            tp.GroupedTensor(torch.ones(2, 2, 3)) if grouped else torch.ones(2, 2, 3)
        )
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, rows: Tensor, group_sizes: Tensor, recompute: bool = False) -> Tensor:
        def experts(rows: Tensor) -> Any:
            return tp.grouped_mlp(rows, self.fc1, self.fc2, group_sizes, fc2_bias=self.bias)

        output = checkpoint(experts, rows, use_reentrant=False) if recompute else experts(rows)
        result: Tensor = output * self.scale
        return result


def batch(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and group sizes, other ones on each rank; rank 1 has a group without rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(ROWS, HIDDEN, generator=generator)
    sizes = torch.tensor([5 + rank, 0 if rank else 3, 7, 2 + step])
    return rows.to(device), sizes.to(device)


def reference(size: int, steps: int, micro_batches: int = 1, lr: float = 0.05) -> dict[str, Tensor]:
    """Parameters after AdamW steps of one process over the batches of all ranks."""
    model = Experts(grouped=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        for rank in range(size):
            for i in range(micro_batches):
                loss = model(*batch(rank, step * micro_batches + i, torch.device("cpu"))).square().sum()
                (loss / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def numbers(p: Any) -> Tensor:
    """A parameter as a plain tensor on the CPU, whole."""
    p = p.full_tensor() if hasattr(p, "full_tensor") else p
    p = p.packed() if isinstance(p, tp.GroupedTensor) else p
    result: Tensor = p.detach().cpu()
    return result


def assert_parameters(model: torch.nn.Module, expected: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(numbers(p), expected[name.removeprefix("module.")], atol=2e-5, rtol=2e-5)


DDP_OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def train_ddp(rank: Rank, options: dict[str, Any], recompute: bool, zero: bool) -> None:
    model = Experts(grouped=True).to(rank.device)
    if rank.rank:  # DDP copies rank 0's parameters to the others
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    ddp = DistributedDataParallel(model, process_group=rank.group, **options)
    optimizer: Any
    if zero:
        arguments: dict[str, Any] = {
            "lr": 0.05,
            "parameters_as_bucket_view": True,
            "process_group": rank.group,
        }
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **arguments)
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05, foreach=True)
    for step in range(3):
        for i in range(2):
            inputs = (*batch(rank.rank, 2 * step + i, rank.device), recompute)
            if i == 0 and "static_graph" not in options:
                with ddp.no_sync():
                    ddp(*inputs).square().sum().backward()
            else:
                ddp(*inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(model.fc1) is tp.GroupedTensor
    assert_parameters(model, reference(rank.size, 3, micro_batches=2))


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_ddp(pair: RankPool, options: dict[str, Any], recompute: bool) -> None:
    pair.run(train_ddp, options, recompute, False)


def test_zero_redundancy_optimizer(pair: RankPool) -> None:
    pair.run(train_ddp, DDP_OPTIONS[1], False, True)


def sharded(rank: Rank, policy: Any = None) -> torch.nn.Module:
    model = Experts(grouped=True).to(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    fully_shard(model, mesh=mesh, **({} if policy is None else {"mp_policy": policy}))
    return model


def train_fsdp(rank: Rank, recompute: bool) -> None:
    model = sharded(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for step in range(3):
        model(*batch(rank.rank, step, rank.device), recompute).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_parameters(model, reference(rank.size, 3))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_fully_shard(pair: RankPool, recompute: bool) -> None:
    pair.run(train_fsdp, recompute)


def train_mixed(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(rank, policy)
    rows, sizes = batch(rank.rank, 0, rank.device)
    model(rows.bfloat16(), sizes).float().square().sum().backward()
    plain = Experts(grouped=False)
    for other in range(rank.size):
        rows, sizes = batch(other, 0, torch.device("cpu"))
        (plain(rows, sizes).square().sum() / rank.size).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None and p.grad.dtype == torch.float32
            got = numbers(p.grad)
            assert float((got - q.grad).norm() / q.grad.norm()) < 0.02, name


def test_fully_shard_in_mixed_precision(pair: RankPool) -> None:
    pair.run(train_mixed)


def save_and_load(rank: Rank, path: str) -> None:
    model = Experts(grouped=True).to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(*batch(0, 0, rank.device)).square().sum().backward()
    model.unused.grad = torch.ones(model.unused.shape, device=rank.device)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    dist.barrier()
    other = sharded(rank)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    again = torch.optim.AdamW(other.parameters(), lr=0.05)
    weights, states = get_state_dict(other, again)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=states)
    assert_parameters(other, {name: numbers(p) for name, p in model.named_parameters()})


def test_distributed_checkpoint(pair: RankPool, tmp_path: Path) -> None:
    pair.run(save_and_load, str(tmp_path / "checkpoint"))
    # One process, without a group.
    model = Experts(grouped=True)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    model.load_state_dict(state["model"])
    assert not torch.equal(numbers(model.fc1), numbers(expected.fc1)) and bool(numbers(model.fc1).any())


def collectives(rank: Rank) -> None:
    value = tp.GroupedTensor(torch.full((2, 2, 2), float(rank.rank + 1), device=rank.device))
    dist.all_reduce(value)
    assert bool((value.packed() == rank.size * (rank.size + 1) / 2).all())
    value.fill_(float(rank.rank))
    dist.broadcast(value, src=1)
    assert bool((value.packed() == 1).all())
    gathered = [torch.empty(2, 2, 2, device=rank.device) for _ in range(rank.size)]
    dist.all_gather(gathered, value)
    assert all(bool((part == 1).all()) for part in gathered)


def test_collectives(pair: RankPool) -> None:
    pair.run(collectives)
