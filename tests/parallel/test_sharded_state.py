"""State of sharded experts: checkpoints, errors, compiled models."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_plugin as tp
from tests.parallel.sharded_model import (
    EXPERTS,
    Block,
    assert_gradients,
    everyone,
    everything,
    full_block,
    loss_of,
    mesh_of,
    one_step,
    rows_of,
    sharded_block,
    wanted_gradients,
)
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def test_one_rank_shards_nothing(pair: RankPool) -> None:
    pair.run(check_one_rank)


def check_one_rank(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 1), mesh_dim_names=("copies", "experts"))
    weight = Block(rank.device, mesh=mesh["experts"]).moe.experts.fc1.weight
    assert type(weight) is torch.nn.Parameter


def stepped(rank: Rank, block: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    one_step(rank, block)
    optimizer.step()
    return optimizer


def saved(block: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, states = get_state_dict(block, optimizer)
    return {"model": model, "optimizer": states}


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flat(value, f"{prefix}{key}/").items()}
    return {prefix: everything(state).clone()} if isinstance(state, torch.Tensor) else {}


def load_into(
    rank: Rank, path: str, block: torch.nn.Module, expected: dict[str, torch.Tensor], alone: bool
) -> None:
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    state = saved(block, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=alone)
    set_state_dict(block, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    got = flat(saved(block, optimizer))
    assert got.keys() == expected.keys() and sum("exp_avg" in key for key in got) == 2 * len(
        list(block.parameters())
    )
    for name, value in got.items():
        assert_same_bits(value, expected[name])


def check_checkpoint(rank: Rank, path: str) -> None:
    full, mesh = full_block(rank.device), mesh_of(rank)
    block = sharded_block(full, rank.device, mesh=mesh["experts"])
    fully_shard(block.moe.experts, mesh=mesh["copies"])
    fully_shard(block, mesh=everyone(mesh))
    state = saved(block, stepped(rank, block))
    dcp.save(state, checkpoint_id=f"{path}/sharded")
    expected = flat(state)
    assert not torch.equal(expected["model/moe.experts.fc1.weight/"], full.moe.experts.fc1.weight)
    load_into(rank, f"{path}/sharded", Block(rank.device, group=rank.group), expected, False)
    again = tp.parallel.fully_shard(Block(rank.device, mesh=mesh["experts"]), mesh)
    load_into(rank, f"{path}/sharded", again, expected, False)
    load_into(rank, f"{path}/sharded", Block(rank.device), expected, True)
    # From one process to several.
    alone = Block(rank.device)
    state = saved(alone, stepped(rank, alone)) if rank.rank == 0 else None
    if state is not None:
        dcp.save(state, checkpoint_id=f"{path}/alone", no_dist=True)
    states = [flat(state)]
    dist.broadcast_object_list(states)
    load_into(rank, f"{path}/alone", Block(rank.device, mesh=mesh["experts"]), states[0], False)


def test_checkpoints_of_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_checkpoint, str(tmp_path))


def check_delayed(rank: Rank, path: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    full = full_block(rank.device, recipe=recipe)
    rows = torch.cat([rows_of(each) for each in range(rank.size)]).to(rank.device)
    loss_of(full, rows).backward()
    loss_of(full, rows).backward()
    options = {"group": rank.group, "recipe": recipe}
    block = sharded_block(full, rank.device, **options)
    layer, other = block.moe.experts.fc1, full.moe.experts.fc1
    mine = slice(rank.rank * EXPERTS // rank.size, (rank.rank + 1) * EXPERTS // rank.size)
    assert other.delayed_scale.unique().numel() > EXPERTS
    assert_same_bits(layer.delayed_scale, other.delayed_scale.view(3, EXPERTS)[:, mine].flatten())
    dcp.save(block.state_dict(), checkpoint_id=path)
    again = Block(rank.device, **options)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=path)
    again.load_state_dict(state)
    for name, buffer in block.named_buffers():
        assert_same_bits(again.get_buffer(name), buffer)
    pair = init_device_mesh(rank.device.type, (rank.size // 2, 2), mesh_dim_names=("copies", "experts"))[
        "experts"
    ]
    fewer = Block(rank.device, mesh=pair, recipe=recipe)
    state = fewer.state_dict()
    dcp.load(state, checkpoint_id=path)
    fewer.load_state_dict(state)
    mine = slice(pair.get_local_rank() * EXPERTS // 2, (pair.get_local_rank() + 1) * EXPERTS // 2)
    history = other.delayed_history.view(4, 3, EXPERTS)[:, :, mine].flatten(1)
    assert_same_bits(fewer.moe.experts.fc1.delayed_history, history)
    layer.recipe = DelayedScaling(amax_history_len=8)
    assert layer.delayed_scale.shape == (3 * EXPERTS // rank.size,)


def test_state_of_delayed_scaling(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_delayed, str(tmp_path / "state"))


def check_quantized_weights(rank: Rank) -> None:
    options = {"recipe": Float8BlockScaling()}
    full = full_block(rank.device, **options)
    block = sharded_block(full, rank.device, group=rank.group, **options)
    expected = block(rows_of(rank.rank).to(rank.device))
    block.moe.experts.quantize_weights()
    assert_same_bits(block(rows_of(rank.rank).to(rank.device)), expected)
    weight = block.moe.experts.fc1.weight
    changes = (lambda: weight.mul_(2), lambda: weight.to_local().mul_(2), lambda: stepped(rank, block))
    for change in changes:
        block.moe.experts.quantize_weights()
        with torch.set_grad_enabled(change is changes[2]):
            change()
        with pytest.raises(ValueError, match="changed in place afterwards"):
            block(rows_of(rank.rank).to(rank.device))
    block.moe.experts.quantize_weights()
    assert not torch.equal(block(rows_of(rank.rank).to(rank.device)), expected)


def test_quantized_weights(pair: RankPool) -> None:
    pair.run(check_quantized_weights)


def check_refusals(rank: Rank) -> None:
    mesh = mesh_of(rank)
    device = rank.device
    named = r"MoE: argument 'mesh' of fully_shard: .* got {}.*transformer_plugin\.parallel\.fully_shard"
    several = rank.size > 2
    for dtensor in (True, False):
        with pytest.raises(
            ValueError, match=named.format(r"the ranks \[0, .*, over which the experts are already sharded")
        ):
            fully_shard(Block(device, group=rank.group, dtensor=dtensor), mesh=everyone(mesh))
        with pytest.raises(ValueError, match=named.format(r"the ranks \[\d, \d\], over which")):
            fully_shard(Block(device, mesh=mesh["experts"], dtensor=dtensor).moe, mesh=mesh["experts"])
        with pytest.raises(ValueError, match=named.format("ranks .* for the router")):
            fully_shard(Block(device, mesh=mesh["experts"], dtensor=dtensor), mesh=mesh["copies"])
    block = Block(device, group=dist.new_group([0, 1]) if not several else mesh["experts"].get_group())
    stranger = init_device_mesh(device.type, (rank.size // 2, 2), mesh_dim_names=("x", "y"))
    if block.moe.dispatcher.context.group_name != stranger["y"].get_group().group_name:
        with pytest.raises(ValueError, match=named.format("DeviceMesh.*not part of the same mesh")):
            fully_shard(block.moe.experts, mesh=stranger["x"])
    both = Block(device, mesh=mesh["experts"])
    both.moe.experts.extra = torch.nn.Linear(2, 2, device=device)
    with pytest.raises(ValueError, match=named.format("sharded experts in one group with other")):
        fully_shard(both.moe.experts, mesh=mesh["copies"])
    if several:
        flat = init_device_mesh(device.type, (rank.size,))
        with pytest.raises(
            ValueError, match="fully_shard: argument 'mesh': expected a mesh of all ranks, with two named"
        ):
            tp.parallel.fully_shard(Block(device, mesh=mesh["experts"]), flat)
        with pytest.raises(
            ValueError, match="MoE: argument 'group': expected a mesh of one dimension, got DeviceMesh"
        ):
            MoE(8, 16, 4, 2, group=mesh)
    with pytest.raises(ValueError, match="argument 'mesh': expected None together with a group"):
        MoE(8, 16, 4, 2, group=rank.group, mesh=mesh["experts"])
    with pytest.raises(
        TypeError, match="argument 'group': expected a process group of which this rank is a member"
    ):
        MoE(8, 16, 4, 2, group=dist.GroupMember.NON_GROUP_MEMBER)
    alone = DeviceMesh(device.type, [0])
    if rank.rank > 0:
        with pytest.raises(
            ValueError,
            match="argument 'mesh': expected a mesh of which this rank is a member, got DeviceMesh",
        ):
            MoE(8, 16, 4, 2, mesh=alone)
    with pytest.raises(
        ValueError, match="argument 'group': expected \"local\" or a process group, got 'world'"
    ):
        MoE(8, 16, 4, 2, group="world")
    block = Block(device, group=rank.group)
    with pytest.raises(TypeError, match=r"MoE: argument 'group': .* pickled .*Save state_dict\(\)"):
        torch.save(block, io.BytesIO())
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    block.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(
        MoE(8, 16, 4, 2, group=None), MoE
    )  # a world group exists, but this layer does not use it


def test_refusals(ranks: RankPool) -> None:
    ranks.run(check_refusals)


def check_ours_over_one_dimension(rank: Rank) -> None:
    full = full_block(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=("ranks",))
    for placement in ({"group": rank.group}, {"mesh": mesh["ranks"]}):
        block = sharded_block(full, rank.device, **placement)
        tp.parallel.fully_shard(block.moe, mesh)
        tp.parallel.fully_shard(block, mesh)
        one_step(rank, block)
        one_step(rank, block, 1)
        assert_gradients(block, wanted_gradients(full, rank.size, 2))


def test_ours_over_one_dimension(ranks: RankPool) -> None:
    ranks.run(check_ours_over_one_dimension)


def check_compiled(rank: Rank) -> None:
    torch._dynamo.reset()
    full = full_block(rank.device)
    block = sharded_block(full, rank.device, group=rank.group, recipe=None)
    model = tp.parallel.data_parallel(torch.compile(block, fullgraph=True, backend="aot_eager"))
    one_step(rank, model)
    wanted = wanted_gradients(full, rank.size)
    assert_gradients(block, wanted)


def test_compiled(pair: RankPool) -> None:
    pair.run(check_compiled)


def test_none_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.warns(UserWarning, match=r'expected a process group, or .* group="local"\.$'):
        MoE(8, 16, 4, 2, group=None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError) as caught:
        MoE(8, 16, 4, 2, group=None)
    assert str(caught.value) == (
        "transformer_plugin::MoE: argument 'group': expected a process group, or no argument for all experts on this "
        "rank, got None in one of 4 launched processes, before torch.distributed.init_process_group(). Call "
        'init_process_group() before the layer is made, or pass group="local".'
    )
    assert MoE(8, 16, 4, 2)(torch.ones(3, 8)).output.shape == (3, 8)
    assert MoE(8, 16, 4, 2, group="local").experts.fc1.weight.shape[0] == 4


@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,), ()], ids=str)
def test_output_is_no_view(shape: tuple[int, ...]) -> None:
    input = torch.randn(*shape, 8, requires_grad=True)
    output = MoE(8, 16, 4, 2)(input).output
    assert output.shape == input.shape and not output._is_view()
    output.sum().backward()
    output.detach_()  # as zero-bubble schedules do
    assert input.grad is not None and input.grad.shape == input.shape


def test_output_of_a_group_is_no_view(pair: RankPool) -> None:
    pair.run(check_output)


def check_output(rank: Rank) -> None:
    moe = MoE(8, 16, 4, 2, group=rank.group, dispatch=DispatchConfig(max_tokens=6), device=rank.device)
    for shape in ((6, 8), (2, 3, 8)):
        output = moe(torch.ones(shape, device=rank.device, requires_grad=True)).output
        assert not output._is_view()
        output.detach_()
