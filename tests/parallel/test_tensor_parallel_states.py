"""Tensor parallelism beside sharded weights, experts and data parallelism: gradients, checkpoints, clipping, copies."""

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
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.sharded_models import RECIPES
from tests.parallel.tensor_parallel_models import (
    ROWS,
    Block,
    F,
    K,
    assert_state,
    close,
    drawn,
    in_float64,
    twins,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def made(rank: Rank, tp: int, key: str = "bf16", seed: int = 1, shards: bool = True) -> tuple[Block, Any]:
    """A block over a mesh of (data, tp) ranks, its weights sharded over the data ranks, and the mesh."""
    mesh = init_device_mesh(rank.device.type, (rank.size // tp, tp), mesh_dim_names=("data", "tp"))
    torch.manual_seed(seed)
    options: dict[str, Any] = {"tp_group": mesh["tp"], "sequence_parallel": True} if tp > 1 else {}
    block = Block(RECIPES[key](), rank.device, **options)
    if shards:
        shard_(block, mesh["data"].get_group())
    return block, mesh


def full_of(parameter: Tensor, value: Tensor | None) -> Tensor:
    """The full tensor of one that is sharded as a parameter, such as its gradient."""
    assert value is not None
    like = torch.nn.Parameter(value.clone())
    like.__dict__.update(parameter.__dict__)
    return full_weight(like)


def check_composition(rank: Rank, tp: int, key: str, wraps: bool) -> None:
    """Gradients are the mean of those of the data ranks, whose rows differ; each has one full block's."""
    block, mesh = made(rank, tp, key)
    torch.manual_seed(1)
    full = Block(RECIPES[key](), rank.device)
    model: Any = parallel.data_parallel(block, process_group=None if wraps else mesh["data"].get_group())
    data, place = mesh.get_local_rank("data"), mesh.get_local_rank("tp")
    rows = slice(ROWS * place // tp, ROWS * (place + 1) // tp)
    columns = slice(K * place // tp, K * (place + 1) // tp)
    exact: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    count = rank.size // tp
    for other in range(count):
        x, weight = (drawn(ROWS, K, seed=seed + other, device=rank.device) for seed in (10, 20))
        for name, grad in in_float64(full, x, weight)[1].items():
            exact[name] = exact.get(name, 0.0) + grad / count
        full.zero_grad()
        (full(x) * weight).sum().backward()
        for name, parameter in full.named_parameters():
            own[name] = own.get(name, 0.0) + parameter.grad.double() / count  # type: ignore[union-attr]
        if other == data:
            (model(x[rows]) * weight[:, columns]).sum().backward()
    for name, parameter in block.named_parameters():
        close(full_of(parameter, parameter.grad), own[name], exact[name], name)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_composition(make_pool: Any, key: str, wraps: bool) -> None:
    """Of tensor parallelism, sharded weights and data parallelism, over the data ranks or over all."""
    make_pool(4).run(check_composition, 2, key, wraps)


def check_checkpoint(rank: Rank, folder: str, tp: int, phase: str) -> None:
    block, mesh = made(rank, tp, seed=1 if phase == "save" else 2)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    rows = ROWS // tp
    for step in range(2):
        first = rows * mesh.get_local_rank("tp")
        x = drawn(ROWS, K, seed=10 * step + mesh.get_local_rank("data"), device=rank.device)
        block(x[first : first + rows]).float().square().mean().backward()
        for parameter in block.parameters():
            if shard_of_parameter(parameter) is None:
                dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(block, optimizer), strict=True))
    if phase == "save":
        dcp.save(states, checkpoint_id=folder)
        weights = {name: full_weight(p) for name, p in block.named_parameters()}
        moments = {n: full_of(p, optimizer.state[p]["exp_avg"]) for n, p in block.named_parameters()}
        if rank.rank == 0:
            torch.save({"weights": weights, "moments": moments}, f"{folder}/expected.pt")
        return
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(block, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    expected = torch.load(f"{folder}/expected.pt", map_location=rank.device)
    for name, parameter in block.named_parameters():
        assert_same_bits(full_weight(parameter), expected["weights"][name], name)
        moment = optimizer.state[parameter]["exp_avg"]
        assert type(moment) is torch.Tensor and moment.shape == parameter.shape
        assert_same_bits(full_of(parameter, moment), expected["moments"][name], name)


def test_checkpoints_on_other_meshes(make_pool: Any, tmp_path: Path) -> None:
    """From (2 data, 2 tp) to itself, (1, 4), (4, 1), (2, 1), (1, 2) and a full block; from (1, 4) to three of them."""
    for save in (2, 4):
        folder = str(tmp_path / str(save))
        make_pool(4).run(check_checkpoint, folder, save, "save")
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert list(metadata["model.up.weight"].size) == [2 * F, K]  # type: ignore[union-attr]
        assert list(metadata["model.down.weight"].size) == [K, F]  # type: ignore[union-attr]
        targets = [(4, 2), (2, 2), (1, 1), (4, 4), (4, 1), (2, 1)]
        for ranks, tp in targets if save == 2 else targets[:3]:
            make_pool(ranks).run(check_checkpoint, folder, tp, "load")


def check_states(rank: Rank) -> None:
    """state_dict has full tensors, which load into whole blocks; saved by torch.save they load on the same ranks."""
    full, block = twins(rank, "bf16", False)
    state = block.state_dict()
    value = state["up.weight"]
    assert isinstance(value, ShardTensor) and value.shape == (2 * F, K) and value.local is not block.up.weight
    assert f"[{rank.rank * F // rank.size}:{(rank.rank + 1) * F // rank.size}, 0:{K}]" in repr(value)
    assert value.local.data_ptr() == block.up.weight.data_ptr()
    for name, tensor in parallel.full_state_dict(block).items():
        assert_same_bits(tensor, full.state_dict()[name], name)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    _, other = twins(rank, "bf16", False)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_state(full, other)
    copied = copy.deepcopy(block)
    assert_state(full, copied)
    assert isinstance(copied.state_dict()["down.weight"], ShardTensor)
    moved = copied.to(torch.float32)
    assert layout_of(moved.up.weight) is not None and isinstance(moved.state_dict()["up.bias"], ShardTensor)
    full_grads = torch.ones(3, K, device=rank.device).bfloat16()
    assert_same_bits(copy.deepcopy(block)(full_grads), block(full_grads))
    with pytest.raises(
        ValueError, match=r"load_state_dict: argument 'down.weight': expected the full weight"
    ):
        block.load_state_dict({**state, "down.weight": torch.ones(K, F // 2)})


def test_states(ranks: RankPool) -> None:
    ranks.run(check_states)


def check_meta(rank: Rank) -> None:
    """Initial values that are made later are the same as those of the full layer, and biases agree."""
    for seed in (5, 6 + rank.rank):
        options: dict[str, Any] = {"parallel_mode": "row", "tp_group": rank.group}
        layer = tnn.Linear(64, 32, device="meta", **options).to_empty(device=rank.device)
        torch.manual_seed(seed)
        layer.reset_parameters()
        every = ops.all_gather(layer.bias.detach()[None], rank.size, rank.group_name)
        assert_same_bits(every, layer.bias.detach().expand_as(every).contiguous())
        if seed == 5:
            torch.manual_seed(seed)
            assert_state(tnn.Linear(64, 32, device=rank.device), layer)


def test_initial_values(pair: RankPool) -> None:
    pair.run(check_meta)


def check_clipping(rank: Rank) -> None:
    full, block = twins(rank, "bf16", False)
    x = drawn(ROWS, K, seed=3, device=rank.device)
    full(x).float().sum().backward()
    block(x).float().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5)
    with pytest.raises(
        ValueError, match="expected full parameters, got a tensor-parallel parameter, of which"
    ):
        torch.nn.utils.clip_grad_norm_(block.parameters(), 0.5)
    norm = parallel.clip_grad_norm_(block, 0.5)
    torch.testing.assert_close(norm, want.float(), rtol=1e-2, atol=0)
    for name, parameter in block.named_parameters():
        grad: Any = full.get_parameter(name).grad
        torch.testing.assert_close(full_of(parameter, parameter.grad), grad, rtol=5e-2, atol=1e-3)


def test_clipping(ranks: RankPool) -> None:
    ranks.run(check_clipping)


def check_wrappers(rank: Rank) -> None:
    """Wrappers over ranks that have different slices are refused by name."""
    block, mesh = made(rank, 2, shards=False)
    with pytest.raises(ValueError, match=r"'up.weight', which tensor parallelism has sharded over the ranks"):
        DistributedDataParallel(block)
    with pytest.raises(ValueError, match=r"a slice of sizes .* which tensor parallelism has over the ranks"):
        torch.distributed.fsdp.fully_shard(block, mesh=mesh["data"])
    with pytest.raises(
        ValueError, match="shard_: argument 'group': expected ranks with the same slices, got the"
    ):
        shard_(made(rank, 2, shards=False)[0], mesh["tp"].get_group())
    DistributedDataParallel(made(rank, 2, shards=False)[0], process_group=mesh["data"].get_group())


def test_wrappers(make_pool: Any) -> None:
    make_pool(4).run(check_wrappers)


class SparseBlock(torch.nn.Module):
    """A tensor-parallel layer, and experts on the rows of each rank."""

    def __init__(self, device: torch.device, group: Any = "local", tp: Any = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device}
        parallel = {"tp_group": tp, "sequence_parallel": True} if tp is not None else {}
        row = {**parallel, "parallel_mode": "row"} if parallel else {}
        self.down = tnn.Linear(32, 16, **options, **row)
        router = tnn.RouterConfig(aux_loss_coeff=0.1)
        options |= {"group": group, "dispatch": tnn.DispatchConfig(max_tokens=8), "dtensor": False}
        self.moe = tnn.MoE(16, 32, 4, 2, router=router, **options, **parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.moe(self.down(x))
        return output.output, output.aux_loss


def check_experts(rank: Rank, wraps: bool) -> None:
    """Experts over all four ranks, two of which have the rows of one loss."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(1)
    full = SparseBlock(rank.device)
    torch.manual_seed(1)
    block = SparseBlock(rank.device, rank.group, mesh["tp"])
    assert_same_bits(block.moe.router.weight.detach(), full.moe.router.weight.detach())
    block.moe.experts.load_state_dict(
        {n: v[rank.rank : rank.rank + 1] for n, v in full.moe.experts.state_dict().items()}
    )
    model: Any = parallel.data_parallel(block) if wraps else block
    data, place = mesh.get_local_rank("data"), mesh.get_local_rank("tp")
    rows, columns = slice(8 * place, 8 * place + 8), slice(16 * place, 16 * place + 16)
    for other in range(2):
        x, weight = (torch.randn(16, n, generator=torch.Generator().manual_seed(n + other)) for n in (32, 17))
        x, weight = x.to(rank.device), weight[:, :16].to(rank.device)
        output, aux = full(x)
        (((output * weight).sum() + 0.0 * aux) / 2).backward()
        if other == data:
            own, own_aux = model(x[:, columns])
            torch.testing.assert_close(own, output[rows], rtol=1e-4, atol=1e-5)
            ((own * weight[rows]).sum() + 0.0 * own_aux).backward()
            every = ops.all_gather(own_aux[None], 2, mesh["tp"].get_group().group_name)
            assert_same_bits(every[0], every[1])
    if not wraps:
        return
    for name, parameter in block.named_parameters():
        want: Any = full.get_parameter(name).grad
        if "experts" in name:
            want = want[rank.rank : rank.rank + 1]
            torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=1e-5)
        else:
            torch.testing.assert_close(full_of(parameter, parameter.grad), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("wraps", [False, True])
def test_experts_of_all_ranks(make_pool: Any, wraps: bool) -> None:
    make_pool(4).run(check_experts, wraps)


def check_group_of_experts(rank: Rank) -> None:
    with pytest.raises(ValueError, match="argument 'tp_group': expected ranks that share the experts, got"):
        tnn.MoE(16, 32, 4, 2, group="local", tp_group=rank.group, sequence_parallel=True)
    dist.barrier()


def test_experts_of_other_ranks(make_pool: Any) -> None:
    make_pool(2).run(check_group_of_experts)
