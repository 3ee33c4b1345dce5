"""Training with sharded weights beside other copies of them and beside experts: gradients, their norm, losses and
checkpoints of a model with full weights that sees the data of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.parallel.sharded_model import Block, full_block, one_step, wanted_gradients
from tests.parallel.sharded_models import RECIPES, dense, dense_batch
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits


def integers(*sizes: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, sizes, generator=torch.Generator().manual_seed(seed)).float()


def small() -> torch.nn.Module:
    """Of small integers, and rows that no number of ranks divides."""
    model = torch.nn.Sequential(tnn.Embedding(11, 6), tnn.Linear(6, 7), tnn.Linear(7, 5, bias=False))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=i))
    return model


def backward_of(model: torch.nn.Module, rank: int, step: int = 0) -> None:
    tokens = torch.randint(11, (9,), generator=torch.Generator().manual_seed(100 * step + rank))
    model(tokens).backward(integers(9, 5, seed=200 * step + rank))


def gradients_of(ranks: Any, steps: int = 1) -> dict[str, Tensor]:
    """The sum over the ranks, with full weights."""
    full = small()
    for step in range(steps):
        for other in ranks:
            backward_of(full, other, step)
    return {name: parameter.grad for name, parameter in full.named_parameters() if parameter.grad is not None}


def own(parameter: Tensor, value: Tensor) -> Tensor:
    shard = shard_of_parameter(parameter)
    return value if shard is None else shard.local_shard_of(value)


def check_copies(rank: Rank, gradient: Any, by_mesh: bool) -> None:
    """Two shards of each weight, two copies of each shard: gradients and their norm are those of data parallelism."""
    if by_mesh:  # whose ranks are not in order
        mesh = DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("copies", "data"))
        group, members = mesh["data"], [[0, 2], [1, 3]][rank.rank % 2]
    else:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group, members = groups[rank.rank // 2], [2 * (rank.rank // 2), 2 * (rank.rank // 2) + 1]
    model = shard_(small(), group, gradient=gradient)
    assert model[0].parameter_shards["weight"].ranks == tuple(members)
    backward_of(model, rank.rank)
    alone = gradients_of(members)
    for name, parameter in model.named_parameters():
        if shard_of_parameter(parameter) is not None:
            want = alone[name] / (2 if gradient == "mean" else 1)
            assert_same_bits(parameter.grad, own(parameter, want), name)
            assert_same_bits(full_weight(parameter), small().get_parameter(name).detach(), name)
    model.zero_grad()
    wrapped = parallel.data_parallel(model)
    for step in range(2):
        backward_of(wrapped, rank.rank, step)
    wanted = {name: grad / 4 for name, grad in gradients_of(range(4), 2).items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_same_bits(parameter.grad, own(parameter, wanted[name]), name)
    for order in (1.0, 2.0, torch.inf):
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]), order)
        torch.testing.assert_close(parallel.clip_grad_norm_(model, 1e9, order), norm, rtol=1e-6, atol=0)
    norm = parallel.clip_grad_norm_(model, 1.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own(parameter, wanted[name] / norm), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("by_mesh", [False, True], ids=["groups", "mesh"])
@pytest.mark.parametrize("gradient", ["mean", "sum"])
def test_copies_of_shards(make_pool: Any, gradient: str, by_mesh: bool) -> None:
    make_pool(4).run(check_copies, gradient, by_mesh)


def check_losses(rank: Rank, key: str) -> None:
    """Ten steps of AdamW give the losses of the model with full weights on the data of all ranks."""
    torch.manual_seed(0)
    full = dense(RECIPES[key](), rank.device)
    torch.manual_seed(0)
    sharded = shard_(dense(RECIPES[key](), rank.device), rank.group)
    model: Any = parallel.data_parallel(sharded)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (full, sharded)]
    losses = []
    for step in range(10):
        totals = [torch.zeros_like(p, dtype=torch.float32) for p in full.parameters()]
        for other in range(rank.size):
            full.zero_grad()
            torch.manual_seed(other)  # of stochastic rounding
            loss = loss_of(full, dense_batch(other, step, rank.device).arguments[0])
            loss.backward()
            for total, parameter in zip(totals, full.parameters(), strict=True):
                total += parameter.grad.float()  # type: ignore[union-attr]
            if other == rank.rank:
                sharded.zero_grad()
                torch.manual_seed(other)
                mine = loss_of(model, dense_batch(other, step, rank.device).arguments[0])
                mine.backward()
                assert_same_bits(mine.detach(), loss.detach(), f"{key} step {step}")
                losses.append(loss.item())
        for total, parameter in zip(totals, full.parameters(), strict=True):
            parameter.grad = (total / rank.size).to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < 0.9 * losses[0], losses
    for name, parameter in sharded.named_parameters():
        assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), name)


def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x[:, :64].float()).square().mean()


@pytest.mark.parametrize("key", RECIPES)
def test_losses_of_ten_steps(make_pool: Any, key: str) -> None:
    make_pool(2).run(check_losses, key)


def check_saved(rank: Rank, folder: str, copies: int, seed: int) -> None:
    mesh = init_device_mesh("cpu", (copies, rank.size // copies), mesh_dim_names=("copies", "data"))
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += seed
    shard_(model, mesh["data"])
    if seed == 0:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    for name, parameter in model.named_parameters():
        assert_same_bits(full_weight(parameter), small().get_parameter(name).detach(), name)


def test_checkpoints_of_copies(make_pool: Any, tmp_path: Path) -> None:
    """Rows that several ranks have are saved once; padding never is."""
    for copies in (1, 2):
        folder = str(tmp_path / str(copies))
        make_pool(4).run(check_saved, folder, copies, 0)
        metadata: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, parameter in small().state_dict().items():
            value = metadata[f"model.{name}"]
            assert value.size == parameter.shape
            if name.endswith("weight"):
                rows = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in value.chunks)
                ends = [first + count for first, count in rows]
                assert [first for first, _ in rows] == [0, *ends[:-1]] and ends[-1] == parameter.shape[0], (
                    rows
                )
        for ranks, others in ((2, 1), (3, 1), (4, 2)):
            make_pool(ranks).run(check_saved, folder, others, 1)


def check_other_model(rank: Rank, folder: str) -> None:
    """A checkpoint of another model is refused, and changes nothing."""
    if rank.rank == 0:
        dcp.save({"weight": torch.ones(7, 6)}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    model = shard_(tnn.Linear(6, 8), rank.group)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointException, match=r"Size mismatch between saved torch.Size\(\[7, 6\]\)"):
        dcp.load({"weight": model.state_dict()["weight"]}, checkpoint_id=folder)
    assert_same_bits(model.weight.detach(), before)
    with pytest.raises(
        ValueError, match=r"expected the full weight, of sizes \[8, 6\], got a tensor of sizes \[9, 6\]"
    ):
        model.load_state_dict(tnn.Linear(6, 9).state_dict())
    assert_same_bits(model.weight.detach(), before)


def test_checkpoints_of_other_models(make_pool: Any, tmp_path: Path) -> None:
    make_pool(2).run(check_other_model, str(tmp_path / "other"))


def check_experts(rank: Rank) -> None:
    """Experts over one dimension of a mesh, and the weights of each expert over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    full = full_block()
    block = Block("cpu", group=mesh["experts"].get_group(), dtensor=False)
    place = mesh.get_local_rank("experts")
    state = full.state_dict()
    for name, value in block.state_dict().items():
        here = state[name]
        block.get_parameter(name).data.copy_(here if here.shape == value.shape else here.chunk(2)[place])
    shard_(block.moe.experts, mesh["data"])
    assert block.moe.experts.fc1.weight.shape[0] == 2
    model = parallel.data_parallel(block)
    one_step(rank, model)
    wanted = wanted_gradients(full, rank.size)
    for name, parameter in block.named_parameters():
        want = wanted[name]
        if "experts" in name:
            want = own(parameter, want.chunk(2)[place])
        torch.testing.assert_close(
            parameter.grad, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert ops.count_gathers(mesh["data"].get_group().group_name).gathers >= 4


def test_experts_and_shards_of_experts(make_pool: Any) -> None:
    make_pool(4).run(check_experts)


def check_fsdp2(rank: Rank) -> None:
    """FSDP2 around a model ignores sharded weights (``ignored_params``); the norm counts them and its own."""
    mesh = init_device_mesh("cpu", (rank.size,))

    def made() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), tnn.Linear(6, 7, bias=False))
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(integers(*parameter.shape, seed=i))
        return model

    full, model = made(), shard_(made(), rank.group)
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
    for other in range(rank.size):
        (full(integers(5, 6, seed=other)) / rank.size).backward(integers(5, 7, seed=50 + other))
    model(integers(5, 6, seed=rank.rank)).backward(integers(5, 7, seed=50 + rank.rank))
    assert_same_bits(model[1].weight.grad, own(model[1].weight, full[1].weight.grad))
    for name in ("weight", "bias"):
        got = getattr(model[0], name).grad.full_tensor()
        torch.testing.assert_close(got, getattr(full[0], name).grad, rtol=1e-6, atol=0)
    want = torch.nn.utils.clip_grad_norm_(full.parameters(), 1.0)
    torch.testing.assert_close(parallel.clip_grad_norm_(model, 1.0), want, rtol=1e-6, atol=0)
    assert_same_bits(full_weight(model[1].weight), made()[1].weight.detach())


def test_fsdp2_beside_shards(make_pool: Any) -> None:
    make_pool(2).run(check_fsdp2)
