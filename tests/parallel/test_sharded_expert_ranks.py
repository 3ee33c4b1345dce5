"""Plain experts over one dimension of a mesh, and parts of them over the other: checkpoints, norms, optimizers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.sharded_model import EXPERTS, Block, full_block, one_step, wanted_gradients
from transformer_plugin import nn as tnn
from transformer_plugin import optim, parallel, recipes
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits


def made(rank: Rank, experts: int, seed: int = 0, recipe: Any = None) -> tuple[Block, Any]:
    """A block with its experts over some ranks, and the weights of those over the others."""
    names = ("data", "experts")
    mesh = init_device_mesh("cpu", (rank.size // experts, experts), mesh_dim_names=names)
    torch.manual_seed(seed)
    group = mesh["experts"].get_group()
    block = Block(recipe=recipe, group=group, dtensor=False)
    shard_(block.moe.experts, mesh["data"])
    return block, mesh


def own(parameter: Tensor, full: Tensor) -> Tensor:
    layout = layout_of(parameter)
    return full if layout is None else layout.local_shard_of(full)


def joined(parameter: Any, value: Tensor) -> Tensor:
    """The full tensor of a value that each rank has for its shard of a parameter."""
    twin = torch.nn.Parameter(value.clone())
    twin.__dict__.update(parameter.__dict__)
    return full_weight(twin)


def check_states(rank: Rank, experts: int) -> None:
    """State dicts are those of a block that has all experts, unsharded and sharded."""
    full, (block, _) = full_block(), made(rank, experts)
    state = block.state_dict()
    for name, value in full.state_dict().items():
        assert state[name].shape == value.shape, name
        has_shard = "experts" in name and (experts > 1 or "weight" in name)
        assert isinstance(state[name], ShardTensor) == has_shard, name
        assert_same_bits(full_weight(block.get_parameter(name)), value, name)
    for name, value in parallel.full_state_dict(block).items():
        assert_same_bits(value, full.state_dict()[name], name)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other, _ = made(rank, experts, seed=5)
    for source in (torch.load(buffer), full.state_dict()):
        other.moe.experts.reset_parameters()
        other.load_state_dict(source)
        for name, value in full.state_dict().items():
            assert_same_bits(full_weight(other.get_parameter(name)), value, name)
    copied = copy.deepcopy(block).to(torch.float64)
    for name, value in full.state_dict().items():
        assert_same_bits(full_weight(copied.get_parameter(name)), value.double(), name)
    torch.manual_seed(3)
    full.moe.experts.reset_parameters()
    torch.manual_seed(3)
    block.moe.experts.reset_parameters()
    for name, value in full.state_dict().items():
        assert_same_bits(full_weight(block.get_parameter(name)), value, name)
    if experts < rank.size or experts == 1:
        return
    with pytest.raises(ValueError, match="expected full parameters, got experts, of which each of 4 ranks"):
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)


@pytest.mark.parametrize("experts", [1, 2, 4])
def test_states(make_pool: Any, experts: int) -> None:
    make_pool(4).run(check_states, experts)


def trained(rank: Rank, block: Block, full: Block, steps: int) -> torch.optim.Optimizer:
    """Some steps with clipped gradients, which are those of a block with all experts."""
    model = parallel.data_parallel(block)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (block, full)]
    for step in range(steps):
        one_step(rank, model, step)
        for (name, parameter), grad in zip(
            full.named_parameters(), wanted_gradients(full, rank.size).values(), strict=True
        ):
            if step == 0:
                got = block.get_parameter(name)
                torch.testing.assert_close(got.grad, own(got, grad), rtol=1e-4, atol=1e-5, msg=name)
                parameter.grad = grad
        if step == 0:
            for order in (1.0, 2.0, torch.inf):
                norms = [
                    clip(m.parameters(), 1e9, order)
                    for clip, m in (
                        (torch.nn.utils.clip_grad_norm_, full),
                        (parallel.clip_grad_norm_, block),
                    )
                ]
                torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
            every: list[Any] = [None] * rank.size
            dist.all_gather_object(every, float(norms[1]))
            assert len(set(every)) == 1, every
        parallel.clip_grad_norm_(block, 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
    return optimizers[0]


def check_checkpoint(rank: Rank, folder: str, experts: int, save: bool) -> None:
    block, _ = made(rank, experts, seed=0 if save else 7)
    optimizer = trained(rank, block, full_block() if save else copy_of(block), 2 if save else 1)
    states = dict(zip(("model", "optimizer"), get_state_dict(block, optimizer), strict=True))
    if save:
        dcp.save(states, checkpoint_id=folder)
    else:
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            block, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
    found = {}
    for name, parameter in block.named_parameters():
        found[name] = full_weight(parameter)
        found[f"{name} moment"] = joined(parameter, optimizer.state[parameter]["exp_avg"])
    if save and rank.rank == 0:
        torch.save(found, f"{folder}/expected.pt")
    if not save:
        for name, want in torch.load(f"{folder}/expected.pt").items():
            assert_same_bits(found[name], want, name)


def copy_of(block: Block) -> Block:
    full = full_block()
    full.load_state_dict(parallel.full_state_dict(block))
    return full


def test_checkpoints_on_other_meshes(make_pool: Any, tmp_path: Path) -> None:
    """(experts, shards) = (2, 2) and (4, 1) are loaded as each other, (1, 1), (2, 1), (1, 2) and (1, 4)."""
    for save in (2, 4):
        folder = str(tmp_path / str(save))
        make_pool(4).run(check_checkpoint, folder, save, True)
        metadata: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, value in full_block().state_dict().items():
            stored = metadata[f"model.{name}"]
            assert stored.size == value.shape, name
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == value.numel(), name
        for ranks, experts in ((1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1)):
            make_pool(ranks).run(check_checkpoint, folder, experts, False)


def check_delayed_scaling(rank: Rank, folder: str, experts: int, save: bool) -> None:
    """The state of delayed scaling has the values of all experts, as that of a block that has them."""
    block, _ = made(rank, experts, recipe=recipes.DelayedScaling(amax_history_len=4))
    fc1 = block.moe.experts.fc1
    names = ("delayed_history", "delayed_scale", "delayed_amax")
    wanted = {}
    for i, name in enumerate(names):
        buffer = getattr(fc1, name)
        here = buffer.unflatten(-1, (3, -1))
        count = here.shape[-1]
        assert count == EXPERTS // experts
        every = torch.arange(here[..., 0].numel() * EXPERTS).reshape(*here.shape[:-1], EXPERTS).float() + i
        first = rank.rank % experts * count
        wanted[name] = every.flatten(-2)
        buffer.copy_((every if save else every * 0 - 1)[..., first : first + count].flatten(-2))
    state = {"fc1": fc1.state_dict()}
    if save:
        assert all(state["fc1"][name].shape == wanted[name].shape for name in names)
        for name in names:
            assert_same_bits(parallel.full_state_dict(fc1)[name], wanted[name], name)
        dcp.save(state, checkpoint_id=folder)
        return
    dcp.load(state, checkpoint_id=folder)
    fc1.load_state_dict(state["fc1"])
    for name in names:
        assert_same_bits(parallel.full_state_dict(fc1)[name], wanted[name], name)


def test_delayed_scaling(make_pool: Any, tmp_path: Path) -> None:
    make_pool(4).run(check_delayed_scaling, str(tmp_path), 2, True)
    for ranks, experts in ((1, 1), (2, 2), (4, 4)):
        make_pool(ranks).run(check_delayed_scaling, str(tmp_path), experts, False)


def check_muon(rank: Rank, experts: int) -> None:
    """Experts are matrices of their own: the steps are those of a block that has all of them."""
    full, (block, _) = full_block(), made(rank, experts)
    optimizers = []
    for model in (full, block):
        layers = [model.moe.experts.fc1.weight, model.moe.experts.fc2.weight]
        optimizers.append(optim.Muon(layers, lr=0.1))
    for (name, grad), parameter in zip(wanted_gradients(full, 2).items(), full.parameters(), strict=True):
        parameter.grad, got = grad, block.get_parameter(name)
        got.grad = own(got, grad)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in full.named_parameters():
        assert_same_bits(full_weight(block.get_parameter(name)), parameter.detach(), name)


@pytest.mark.parametrize("experts", [2, 4])
def test_muon(make_pool: Any, experts: int) -> None:
    make_pool(4).run(check_muon, experts)


def check_refusals(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    options: Any = {
        "dispatch": tnn.DispatchConfig(max_tokens=8),
        "group": mesh["experts"].get_group(),
        "dtensor": False,
    }
    lists = tnn.MoE(16, 32, EXPERTS, 2, parameters="list", **options)
    with pytest.raises(
        ValueError, match="expected packed experts where ranks have some of them, got a list in"
    ):
        shard_(lists, mesh["data"])
    assert not any(shard_of_parameter(p) for p in lists.parameters())
    block, _ = made(rank, 2)
    with pytest.raises(ValueError, match="which shard_ has sharded over the ranks"):
        torch.nn.parallel.DistributedDataParallel(block)
    alone, _ = made(rank, 4)
    with pytest.raises(ValueError, match="which expert parallelism has sharded over the ranks"):
        torch.nn.parallel.DistributedDataParallel(alone)


def test_refusals(make_pool: Any) -> None:
    make_pool(4).run(check_refusals)
