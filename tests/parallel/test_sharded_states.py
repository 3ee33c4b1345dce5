"""Sharded weights in frameworks: state dicts and checkpoints on other numbers of ranks, optimizers, clipping, wrappers,
and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.sharded_models import RECIPES, computed, dense, dense_batch, twins
from transformer_plugin import nn as tnn
from transformer_plugin import optim as tp_optim
from transformer_plugin import parallel
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def small(rank: Rank, seed: int = 0, key: str = "bf16") -> torch.nn.Module:
    torch.manual_seed(seed)
    return dense(RECIPES[key](), rank.device)


def trained(rank: Rank, model: torch.nn.Module, steps: int, first: int = 0) -> torch.optim.Optimizer:
    """A model after steps of AdamW on the mean of all ranks' losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(first, first + steps):
        computed(model, dense_batch(rank.rank, step, rank.device))
        average_others(rank, model)
        optimizer.step()
    return optimizer


def average_others(rank: Rank, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if shard_of_parameter(parameter) is None and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.size


def check_checkpoint(rank: Rank, folder: str, key: str, phase: str) -> None:
    """Saved by a pool of one size, loaded by others."""
    model = shard_(small(rank, 0 if phase == "save" else 1, key), rank.group)
    optimizer = trained(rank, model, 2)
    if phase == "save":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=folder)
        full = {name: full_weight(p) for name, p in model.named_parameters()}
        moments = {}
        for name, parameter in model.named_parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            shard = shard_of_parameter(parameter)
            if shard is not None:
                every = [torch.empty_like(moment) for _ in range(rank.size)]
                dist.all_gather(every, moment)
                moment = shard.shard.unpadded(torch.cat(every))
            moments[name] = moment
        if rank.rank == 0:
            torch.save({"weights": full, "moments": moments}, f"{folder}/expected.pt")
        return
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    expected = torch.load(f"{folder}/expected.pt", map_location=rank.device)
    for name, parameter in model.named_parameters():
        assert_same_bits(full_weight(parameter), expected["weights"][name], name)
        shard = shard_of_parameter(parameter)
        moment, want = optimizer.state[parameter]["exp_avg"], expected["moments"][name]
        assert type(moment) is torch.Tensor
        assert_same_bits(moment, want if shard is None else shard.local_shard_of(want), name)
    computed(model, dense_batch(rank.rank, 9, rank.device))
    optimizer.step()


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_checkpoints_on_other_numbers_of_ranks(make_pool: Any, tmp_path: Path, key: str) -> None:
    """From 2 and 3 ranks to 1, 2, 3 and 4; with blocks of 128 rows some ranks have no rows."""
    for save in (2, 3):
        folder = str(tmp_path / f"{key}{save}")
        make_pool(save).run(check_checkpoint, folder, key, "save")
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert list(metadata["model.1.weight"].size) == [192, 256]  # type: ignore[union-attr]
        for load in (2, 3, 4):
            make_pool(load).run(check_checkpoint, folder, key, "load")


def check_full_checkpoint(rank: Rank, folder: str) -> None:
    """A model that is not sharded loads what ranks have saved, and the other way round."""
    full = small(rank, 5)
    states = {"model": full.state_dict()}
    dcp.load(states, checkpoint_id=folder)
    expected = torch.load(f"{folder}/expected.pt", map_location=rank.device)["weights"]
    for name, parameter in full.named_parameters():
        assert_same_bits(parameter.detach(), expected[name], name)
    sharded = shard_(small(rank, 6), rank.group)
    sharded.load_state_dict(full.state_dict())
    for name, parameter in sharded.named_parameters():
        assert_same_bits(full_weight(parameter), expected[name], name)


def test_full_models_load_shards(make_pool: Any, tmp_path: Path) -> None:
    make_pool(2).run(check_checkpoint, str(tmp_path / "of2"), "bf16", "save")
    make_pool(3).run(check_full_checkpoint, str(tmp_path / "of2"))


def check_state_dict(rank: Rank) -> None:
    sharded = shard_(small(rank), rank.group)
    state = sharded.state_dict()
    value = state["1.weight"]
    assert isinstance(value, ShardTensor)
    for name, full in small(rank).state_dict().items():
        assert_same_bits(parallel.full_state_dict(sharded)[name], full, name)
    assert list(value.shape) == [192, 256]
    assert value.local.data_ptr() == sharded[1].weight.data_ptr()  # type: ignore[index]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other = shard_(small(rank, 3), rank.group)
    other.load_state_dict(loaded)
    for one, two in zip(sharded.parameters(), other.parameters(), strict=True):
        assert_same_bits(one.detach(), two.detach())
    moved = copy.deepcopy(state)["1.weight"].to(torch.float32).clone().detach()
    assert_same_bits(moved.local, value.local.float())
    moved.copy_(loaded["1.weight"])  # the same blocks, whatever the group is called now
    assert_same_bits(moved.local, value.local.float())
    with pytest.raises(
        NotImplementedError, match=r"ShardTensor: argument 'self': expected an op that copies or moves"
    ):
        value + 1
    loaded["1.weight"] = ShardTensor(
        value.local, dataclasses.replace(value.shard_layout, rank=(rank.rank + 1) % rank.size)
    )
    with pytest.raises(
        ValueError,
        match=r"load_state_dict: argument '1.weight': expected what this rank has, \[\d+:\d+, 0:256\] of",
    ):
        other.load_state_dict(loaded)
    loaded["1.weight"] = torch.ones(3, 256)
    with pytest.raises(
        ValueError, match=r"expected the full weight, of sizes \[192, 256\], got a tensor of sizes"
    ):
        other.load_state_dict(loaded)


def test_state_dicts(ranks: RankPool) -> None:
    ranks.run(check_state_dict)


def check_training(rank: Rank, fused: bool) -> None:
    """Steps of a full model on the mean of all gradients, and of a sharded one; quantized shards follow the steps."""
    for key in ("bf16", "fp8_tensor", "mxfp8"):
        full, sharded = twins(rank, lambda key=key: dense(RECIPES[key](), rank.device))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, fused=fused) for m in (full, sharded)]
        for step in range(3):
            grads = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in full.named_parameters()}
            for other in range(rank.size):
                for name, grad in computed(full, dense_batch(other, step, rank.device)).grads.items():
                    grads[name] += grad
            own = computed(sharded, dense_batch(rank.rank, step, rank.device))
            for name, parameter in full.named_parameters():
                parameter.grad = (grads[name] * (1 / rank.size)).to(parameter.dtype)
                other = sharded.get_parameter(name)
                if shard_of_parameter(other) is None:
                    other.grad = parameter.grad.clone()
            del own
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in sharded.named_parameters():
            assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), f"{key} {name}")


@pytest.mark.parametrize("fused", [False, True])
def test_training(ranks: RankPool, fused: bool) -> None:
    ranks.run(check_training, fused)


def check_clipping(rank: Rank) -> None:
    full, sharded = twins(rank, lambda: dense(None, rank.device))
    batch = dense_batch(0, 0, rank.device)  # the same on all ranks, so that the mean is the gradient
    computed(full, batch)
    computed(sharded, batch)
    wants = torch.nn.utils.clip_grad_norm_(full.parameters(), 0.01)
    with pytest.raises(
        ValueError, match=r"clip_grad_norm_: argument 'parameters': expected full parameters, got '0"
    ):
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
    norm = parallel.clip_grad_norm_(sharded, 0.01)
    torch.testing.assert_close(norm, wants.float(), rtol=1e-2, atol=0)
    for name, parameter in sharded.named_parameters():
        shard, want = shard_of_parameter(parameter), full.get_parameter(name).grad
        want = want if shard is None else shard.local_shard_of(want)
        torch.testing.assert_close(parameter.grad, want, rtol=2e-2, atol=1e-6)


def test_clipping(ranks: RankPool) -> None:
    ranks.run(check_clipping)


def check_data_parallel(rank: Rank) -> None:
    """Two groups of two: shards are averaged over the ranks that have the same, everything else over all."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    full, sharded = (small(rank), small(rank))
    shard_(sharded, groups[rank.rank // 2])
    with pytest.raises(
        ValueError, match=r"argument 'module' of DistributedDataParallel: expected parameters that are"
    ):
        DistributedDataParallel(sharded)
    wrapped = parallel.data_parallel(sharded)
    grads = [computed(full, dense_batch(r, 0, rank.device)).grads for r in range(rank.size)]
    own = computed(wrapped, dense_batch(rank.rank, 0, rank.device)).grads
    for name, parameter in sharded.named_parameters():
        mean = sum(each[name].float() for each in grads) / rank.size  # type: ignore[operator]
        shard = shard_of_parameter(parameter)
        want = mean if shard is None else shard.local_shard_of(mean)
        torch.testing.assert_close(own[f"module.{name}"].float(), want, rtol=2e-2, atol=1e-4)


def test_data_parallel(make_pool: Any) -> None:
    make_pool(4).run(check_data_parallel)


def check_uses(rank: Rank) -> None:
    """A weight used twice, frozen weights, no gradients, checkpointed activations, exceptions, a copy, deletion."""
    full, sharded = twins(rank, lambda: tnn.Linear(64, 64, device=rank.device, dtype=torch.bfloat16))
    batches = [torch.randn(8, 64).bfloat16().to(rank.device) for _ in range(2)]
    full_grads = []
    for other in range(rank.size):
        torch.manual_seed(other)
        batches = [torch.randn(8, 64).bfloat16().to(rank.device) for _ in range(2)]
        full.zero_grad()
        (full(full(batches[0])) + full(batches[1])).float().square().sum().backward()
        full_grads.append(full.weight.grad.float())
    torch.manual_seed(rank.rank)
    batches = [torch.randn(8, 64).bfloat16().to(rank.device) for _ in range(2)]
    (sharded(sharded(batches[0])) + sharded(batches[1])).float().square().sum().backward()
    mean = sum(full_grads) / rank.size  # type: ignore[operator]
    want = sharded.parameter_shards["weight"].local_shard_of(mean)
    error = (sharded.weight.grad.float() - want).norm() / want.norm()
    assert error < 2**-6, error  # each use is rounded to bfloat16 before they are added
    with torch.no_grad():
        assert_same_bits(sharded(batches[0]), full(batches[0]))
    (grad,) = torch.autograd.grad(sharded(batches[0]).float().sum(), sharded.weight)
    before = sharded.weight.grad.clone()
    assert grad.shape == sharded.weight.shape
    assert_same_bits(sharded.weight.grad, before)
    sharded.weight.requires_grad_(False)
    input = batches[0].clone().requires_grad_()
    sharded(input).float().sum().backward()
    assert input.grad is not None
    assert_same_bits(sharded.weight.grad, before)
    sharded.weight.requires_grad_(True)
    sharded.zero_grad()
    recomputed = torch.utils.checkpoint.checkpoint(sharded, batches[0].requires_grad_(), use_reentrant=False)
    recomputed.float().sum().backward()
    assert_same_bits(sharded.weight.grad, grad)
    copied = copy.deepcopy(sharded)
    assert shard_of_parameter(copied.weight) is not None
    assert_same_bits(copied(batches[0]).detach(), sharded(batches[0]).detach())


def test_uses(ranks: RankPool) -> None:
    ranks.run(check_uses)


def check_main_grad(rank: Rank) -> None:
    """float32 buffers get float32 sums; with gradient_dtype sums of bfloat16 gradients."""
    for dtype in (None, torch.bfloat16):
        full, sharded = twins(
            rank,
            lambda: tnn.Linear(64, 48, False, rank.device, torch.bfloat16, fuse_wgrad_accumulation=True),
            gradient_dtype=dtype,
        )
        total = torch.zeros(48, 64, device=rank.device)
        sharded.weight.main_grad = torch.ones_like(sharded.weight, dtype=torch.float32)
        full.weight.main_grad = torch.zeros_like(full.weight, dtype=torch.float32)
        for other in range(rank.size):
            torch.manual_seed(other)
            input = torch.randn(16, 64).bfloat16().to(rank.device)
            full.weight.main_grad.zero_()
            full(input).float().square().sum().backward()
            grad = full.weight.main_grad
            total = total + (grad if dtype is None else grad.to(dtype).float())
            if other == rank.rank:
                sharded(input).float().square().sum().backward()
        shard = sharded.parameter_shards["weight"]
        want = shard.local_shard_of(total * (1 / rank.size)) + 1
        assert sharded.weight.grad is None
        torch.testing.assert_close(sharded.weight.main_grad, want, rtol=1e-6, atol=0)


def test_main_grad(ranks: RankPool) -> None:
    ranks.run(check_main_grad)


def check_refusals(rank: Rank) -> None:
    def refused(text: str, model: torch.nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match="transformer_plugin::shard_: argument") as caught:
            shard_(model, rank.group, **options)
        assert text in str(caught.value), caught.value

    sharded = shard_(small(rank), rank.group)
    refused("which is sharded over the ranks", sharded)
    tied = torch.nn.Sequential(tnn.Linear(8, 8), tnn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    refused("share", tied)
    assert shard_of_parameter(tied[0].weight) is None
    refused("parameters='grouped'", tnn.GroupedLinear(2, 8, 8, parameters="grouped"))
    refused("delay_wgrad_compute", tnn.Linear(8, 8, delay_wgrad_compute=True))
    refused("expected 'mean' or 'sum'", tnn.Linear(8, 8), gradient="max")
    refused("argument 'format'", tnn.Linear(32, 32, recipe=RECIPES["mxfp8"]()), format="nvfp4")
    refused("on rank 0 and", tnn.Linear(8, 8 + 8 * rank.rank))
    optimizer = torch.optim.SGD((model := small(rank)).parameters(), lr=1.0)
    shard_(model, rank.group)
    with pytest.raises(
        ValueError, match=r"argument 'optimizer': expected parameters of the model, got the full '0."
    ):
        optimizer.step()
    alone = small(rank)
    weight = alone[0].weight  # type: ignore[index]
    assert shard_(alone, None)[0].weight is weight  # type: ignore[index]
    layer: Any = sharded[0]  # type: ignore[index]
    output = torch.empty(4, 256, dtype=torch.bfloat16, device=rank.device)
    with pytest.raises(
        ValueError, match="argument 'out': expected None with a weight that is sharded over ranks"
    ):
        layer(torch.ones(4, 128, dtype=torch.bfloat16, device=rank.device), out=output)


def test_refusals(pair: RankPool) -> None:
    pair.run(check_refusals)


def check_mesh(rank: Rank) -> None:
    model: Any = small(rank)
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("copies", "data"))
    for group, text in (
        (mesh, "a mesh of 2 dimensions"),
        (3, "a process group of which this process is a member"),
    ):
        with pytest.raises(ValueError, match=f"shard_: argument 'group': expected .*{text}"):
            shard_(model, group)  # type: ignore[arg-type]
    assert shard_of_parameter(shard_(model, mesh["data"])[0].weight) is not None


def test_mesh(pair: RankPool) -> None:
    pair.run(check_mesh)


def check_master_weights(rank: Rank, folder: str, save: bool) -> None:
    """float32 copies of shards are saved and loaded as shards, with their moments."""
    model = shard_(small(rank, 0 if save else 1), rank.group)
    optimizer = tp_optim.MasterWeights(model.parameters(), lambda w: torch.optim.AdamW(w, lr=1e-2))
    for step in range(2):
        computed(model, dense_batch(rank.rank, step, rank.device))
        average_others(rank, model)
        optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        optimizer.load_state_dict(state["optimizer"])
    values = {}
    for (name, parameter), master in zip(model.named_parameters(), optimizer.master_weights, strict=True):
        assert_same_bits(parameter.detach(), master.detach().bfloat16(), name)
        shard, moment = shard_of_parameter(parameter), optimizer.optimizer.state[master]["exp_avg"]
        for key, value in ((name, master.detach()), (f"{name} moment", moment)):
            if shard is not None:
                every = [torch.empty_like(value) for _ in range(rank.size)]
                dist.all_gather(every, value)
                value = shard.shard.unpadded(torch.cat(every))
            values[key] = value.cpu()
    if save and rank.rank == 0:
        torch.save(values, f"{folder}/expected.pt")
    if not save:
        for key, want in torch.load(f"{folder}/expected.pt").items():
            assert_same_bits(values[key], want, key)


def test_master_weights(make_pool: Any, tmp_path: Path) -> None:
    make_pool(2).run(check_master_weights, str(tmp_path), True)
    for size in (2, 3):
        make_pool(size).run(check_master_weights, str(tmp_path), False)
