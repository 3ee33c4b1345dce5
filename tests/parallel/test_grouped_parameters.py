"""GroupedTensor parameters under torch's data-parallel frameworks, with different rows on each rank.

The reference is one process with plain parameters and the rows of all ranks, whose gradient is averaged as the ranks'
gradients are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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


class Trained(NamedTuple):
    """What a training leaves: parameters, and the moments of AdamW of each of them."""

    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """Full plain tensors on the CPU. A collective call if parameters are sharded."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    moments = {
        name: {key: numbers(value) for key, value in optimizer.state[p].items()}
        for name, p in named.items()
        if p in optimizer.state
    }
    return Trained({name: numbers(p) for name, p in named.items()}, moments)


def reference(size: int, steps: int, micro_batches: int = 1, lr: float = 0.05) -> Trained:
    """AdamW steps of one process over the batches of all ranks."""
    model = Experts(grouped=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        for rank in range(size):
            for i in range(micro_batches):
                loss = model(*batch(rank, step * micro_batches + i, torch.device("cpu"))).square().sum()
                (loss / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(model, optimizer)


def numbers(p: Any) -> Tensor:
    """A parameter or its state as a full plain tensor on the CPU."""
    p = p.full_tensor() if hasattr(p, "full_tensor") else p
    p = p.packed() if isinstance(p, tp.GroupedTensor) else p
    result: Tensor = p.detach().cpu()
    return result


def assert_trained(got: Trained, expected: Trained, exact: bool = False) -> None:
    """Ranks add the same float32 terms as one process in another order, which moves the gradients by some 2**-20 of
    their size; AdamW keeps that relative error, except where terms cancel."""
    bounds = {"atol": 0, "rtol": 0} if exact else {"atol": 2e-5, "rtol": 2e-5}
    assert got.parameters.keys() == expected.parameters.keys()
    for name, p in expected.parameters.items():
        torch.testing.assert_close(got.parameters[name], p, **bounds)
    assert got.moments.keys() == expected.moments.keys() and got.moments
    for name, state in expected.moments.items():
        assert got.moments[name].keys() == state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            # Moments have the size of gradients, and of their squares.
            scale = 1.0 if exact else max(float(value.abs().max()), 1e-30)
            torch.testing.assert_close(got.moments[name][key] / scale, value / scale, **bounds)


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
    if zero:
        optimizer.consolidate_state_dict(to=0)
        if rank.rank == 0:
            full = torch.optim.AdamW(ddp.parameters())
            full.load_state_dict(optimizer.state_dict())
            assert_trained(trained(ddp, full), reference(rank.size, 3, micro_batches=2))
    else:
        assert_trained(trained(ddp, optimizer), reference(rank.size, 3, micro_batches=2))


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
    assert_trained(trained(model, optimizer), reference(rank.size, 3))


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


def stepped(rank: Rank, model: Any, wrapped: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made one step, in which every parameter has a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    wrapped(*batch(rank.rank, 0, rank.device)).square().sum().backward()
    model.unused.grad = torch.ones_like(model.unused.detach())
    optimizer.step()
    return optimizer


def other_values(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Parameters that no training leaves, and a fresh optimizer."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def save(rank: Rank, path: str, shard: bool) -> Trained:
    """Returns what was saved."""
    model: torch.nn.Module = sharded(rank) if shard else Experts(grouped=True).to(rank.device)
    options: dict[str, Any] = {"process_group": rank.group, "find_unused_parameters": True}
    optimizer = stepped(rank, model, model if shard else DistributedDataParallel(model, **options))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path, process_group=rank.group)
    return trained(model, optimizer)


def load(rank: Rank, path: str) -> list[Trained]:
    """Returns what was loaded into sharded parameters, into GroupedTensors and into plain tensors."""
    results = []
    for model in (
        sharded(rank),
        Experts(grouped=True).to(rank.device),
        Experts(grouped=False).to(rank.device),
    ):
        optimizer = other_values(model)
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path, process_group=rank.group)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        results.append(trained(model, optimizer))
    return results


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_distributed_checkpoint(pair: RankPool, tmp_path: Path, shard: bool) -> None:
    """Sharded and full parameters, on two ranks and on one, read the checkpoint of either."""
    path = str(tmp_path / "checkpoint")
    saved, same = pair.run(save, path, shard)
    assert_trained(saved, same, exact=True)
    for results in pair.run(load, path):
        for result in results:
            assert_trained(result, saved, exact=True)
    for grouped in (False, True):  # one process, without a group
        model = Experts(grouped)
        optimizer = other_values(model)
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        assert_trained(trained(model, optimizer), saved, exact=True)


def collectives(rank: Rank) -> None:
    def value() -> tp.GroupedTensor:
        """Different on each rank, and in each member."""
        numbers = torch.arange(8.0, device=rank.device).view(2, 2, 2)
        return tp.GroupedTensor(numbers + 100 * (rank.rank + 1))

    every = [torch.arange(8.0, device=rank.device).view(2, 2, 2) + 100 * (r + 1) for r in range(rank.size)]
    gathered = [torch.empty(2, 2, 2, device=rank.device) for _ in range(rank.size)]
    dist.all_gather(gathered, value())
    assert all(torch.equal(got, expected) for got, expected in zip(gathered, every, strict=True))
    full = torch.empty(2 * rank.size, 2, 2, device=rank.device)
    dist.all_gather_into_tensor(full, value())
    assert torch.equal(full, torch.cat(every))
    summed = value()
    dist.all_reduce(summed)
    assert torch.equal(summed.packed(), torch.stack(every).sum(0))
    received = value()
    dist.broadcast(received, src=1)
    assert torch.equal(received.packed(), every[1])


def test_collectives(pair: RankPool) -> None:
    pair.run(collectives)
