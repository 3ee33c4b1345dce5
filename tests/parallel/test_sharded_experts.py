"""Experts sharded over ranks in torch's wrappers, compared with one process that has the rows of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import transformer_plugin as tp
from tests.parallel.sharded_model import (
    EXPERTS,
    FFN,
    HIDDEN,
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
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits, relative_error


def check_parameters(rank: Rank) -> None:
    full, mesh = full_block(rank.device), mesh_of(rank)
    for placement in ({"group": rank.group}, {"mesh": mesh["experts"]}, {"group": mesh["experts"]}):
        block = sharded_block(full, rank.device, **placement)
        for name, parameter in block.named_parameters():
            assert isinstance(parameter, DTensor) == (".experts." in name)
        weight = block.moe.experts.fc1.weight
        assert weight.placements == (Shard(0),) and weight.shape == (EXPERTS, 2 * FFN, HIDDEN)
        assert_same_bits(weight.full_tensor(), full.moe.experts.fc1.weight)
        # Another state dict of this rank's experts, as each rank may have saved it separately.
        local = {
            name: p.to_local() + 1 if isinstance(p, DTensor) else p for name, p in block.state_dict().items()
        }
        block.load_state_dict(local)
        assert_same_bits(weight.full_tensor(), full.moe.experts.fc1.weight + 1)
        twin = copy.deepcopy(block)
        rows = rows_of(rank.rank).to(rank.device)
        assert_same_bits(twin(rows), block(rows))
        twin.load_state_dict(block.state_dict())
        twin.load_state_dict(local)
        assert_same_bits(twin(rows), block(rows))
        loss_of(twin, rows).backward()
        assert block.moe.experts.fc1.weight.grad is None
        torch.optim.AdamW(twin.parameters()).step()
        assert not torch.equal(twin.moe.experts.fc1.weight.to_local(), weight.to_local())
        block.moe.experts.reset_parameters()
        assert float(weight.to_local().detach().abs().max()) <= HIDDEN**-0.5
    if rank.device.type == "cpu":
        for placement in ({"group": rank.group}, {"mesh": mesh["experts"]}):
            torch.manual_seed(0)
            block = Block(**placement)
            for name, parameter in full.named_parameters():
                assert_same_bits(everything(block.get_parameter(name)), parameter)
    sharded = tp.parallel.fully_shard(Block(rank.device, mesh=mesh["experts"]), mesh)
    torch.manual_seed(0)
    sharded.moe.experts.reset_parameters()
    drawn = sharded.moe.experts.fc2.weight.full_tensor().flatten(1)
    assert drawn.unique(dim=0).shape[0] == EXPERTS
    torch.manual_seed(0)
    block.moe.experts.reset_parameters()
    assert_same_bits(drawn, everything(block.moe.experts.fc2.weight).flatten(1))
    plain = Block(rank.device, group=rank.group, dtensor=False).moe.experts.fc1.weight
    assert type(plain) is torch.nn.Parameter and plain.shape[0] == EXPERTS // rank.size


def test_parameters_are_sharded(ranks: RankPool) -> None:
    ranks.run(check_parameters)


def check_optimizers(rank: Rank) -> None:
    """One list of all parameters with default settings; separate groups of plain and DTensor parameters otherwise."""
    full = full_block(rank.device)
    results = []
    for options in ({}, {"foreach": True}, {"fused": True}):
        block = sharded_block(full, rank.device, group=rank.group)
        one_step(rank, block)
        experts = list(block.moe.experts.parameters())
        others = [p for name, p in block.named_parameters() if ".experts." not in name]
        groups = [{"params": others}, {"params": experts}] if options else [*experts, *others]
        torch.optim.AdamW(groups, lr=0.1, **options).step()
        results.append(block.moe.experts.fc2.weight.full_tensor())
    for result in results:
        assert not torch.equal(result, full.moe.experts.fc2.weight)
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_optimizers(ranks: RankPool) -> None:
    ranks.run(check_optimizers)


def check_moved_and_recast(rank: Rank) -> None:
    """Moves, casts and loads keep the parameters' class, which optimizers accept together with plain parameters."""
    full = full_block(rank.device)
    kind = type(sharded_block(full, rank.device, group=rank.group).moe.experts.fc1.weight)
    assert issubclass(kind, DTensor) and kind is not DTensor

    def loaded(block: torch.nn.Module) -> torch.nn.Module:
        state = {name: value.bfloat16() for name, value in block.state_dict().items()}
        block.load_state_dict(state, assign=True)
        return block

    for change in (
        lambda block: block.to(rank.device),
        lambda block: block.float(),
        lambda block: block.bfloat16(),
        lambda block: loaded(block),
        lambda block: block.to_empty(device=rank.device),
    ):
        block = change(sharded_block(full, rank.device, group=rank.group))
        weights = [layer.weight for layer in (block.moe.experts.fc1, block.moe.experts.fc2)]
        assert all(type(w) is kind and isinstance(w, torch.nn.Parameter) for w in weights)
        assert weights[0].placements == (Shard(0),) and weights[0].shape == (EXPERTS, 2 * FFN, HIDDEN)
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.AdamW(block.parameters()).step()
    block = sharded_block(full, rank.device, group=rank.group).to(rank.device)
    rows = rows_of(rank.rank).to(rank.device)
    assert_same_bits(block(rows), sharded_block(full, rank.device, group=rank.group)(rows))


def test_moved_and_recast(ranks: RankPool) -> None:
    ranks.run(check_moved_and_recast)


def check_recipes_set_later(rank: Rank) -> None:
    """The same as if the layer had been made with the recipe; rows are padded as it requires."""
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
    options = {"group": rank.group, "device": rank.device, "dispatch": tp.nn.DispatchConfig(max_tokens=64)}
    for recipe in (tp.recipes.MXFP8BlockScaling(), tp.recipes.Float8BlockScaling(), None):
        torch.manual_seed(3)
        made = tp.nn.MoE(64, 64, EXPERTS, 2, recipe=recipe, **options)
        torch.manual_seed(3)
        later = tp.nn.MoE(64, 64, EXPERTS, 2, recipe=tp.recipes.BFloat16(), **options)
        later.recipe = recipe
        assert_same_bits(later(rows).output, made(rows).output)


def test_recipes_set_later(ranks: RankPool) -> None:
    ranks.run(check_recipes_set_later)


def check_data_parallel(rank: Rank) -> None:
    full, mesh = full_block(rank.device), mesh_of(rank)
    for placement in (
        {"group": rank.group},
        {"mesh": mesh["experts"]},
        {"group": rank.group, "dtensor": False},
    ):
        plain = not placement.get("dtensor", True)
        block = Block(rank.device, **placement) if plain else sharded_block(full, rank.device, **placement)
        before = copy.deepcopy(block.state_dict())
        for wrapped in (block, block.moe):
            named = r"got '(moe\.)?experts\.fc1\.weight' of experts .*data_parallel\(model\)"
            with pytest.raises(ValueError, match=named):
                DistributedDataParallel(wrapped)
        if rank.size > 2 and "mesh" in placement:
            with pytest.raises(ValueError, match=r"for 'moe\.router\.weight' of a layer .* would diverge"):
                DistributedDataParallel(Block(rank.device, **placement), device_mesh=mesh["copies"])
        for name, value in block.state_dict().items():
            assert torch.equal(
                *(v.to_local() if isinstance(v, DTensor) else v for v in (value, before[name]))
            ), name
        if plain:
            continue
        with torch.no_grad():  # copies that differ are overwritten by the first copy
            for parameter in block.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.add_(0.0 if rank.rank < (rank.size if "group" in placement else 2) else 1.0)
        model = tp.parallel.data_parallel(block)
        one_step(rank, model, 0)
        assert_gradients(model, wanted_gradients(full, rank.size))
        one_step(rank, model, 1)  # accumulates, as in DistributedDataParallel
        assert_gradients(model, wanted_gradients(full, rank.size, 2))
        model.zero_grad()
        with model.no_sync():
            one_step(rank, model, 0)
        one_step(rank, model, 1)
        assert_gradients(model, wanted_gradients(full, rank.size, 2))


def check_replicate(rank: Rank) -> None:
    model = replicate(Block(rank.device, group=rank.group))
    with pytest.raises(ValueError, match=r"GroupedLinear: .* expected DTensor parameters.*data_parallel\(\)"):
        one_step(rank, model)


def test_replicate_is_refused(pair: RankPool) -> None:
    pair.run(check_replicate)


def test_data_parallel(ranks: RankPool) -> None:
    ranks.run(check_data_parallel)


def check_other_groups(rank: Rank) -> None:
    torch.distributed.new_group([0])  # of which the ranks that hold the same experts as rank 0 are no members
    full, mesh = full_block(rank.device), mesh_of(rank)
    model = tp.parallel.data_parallel(sharded_block(full, rank.device, mesh=mesh["experts"]))
    one_step(rank, model, 0)
    assert_gradients(model, wanted_gradients(full, rank.size))


def test_data_parallel_of_ranks_with_other_groups(four: RankPool) -> None:
    """Ranks may be members of different numbers of groups."""
    four.run(check_other_groups)


def shard_by_hand(block: Block, mesh: Any) -> None:
    fully_shard(block.moe.experts, mesh=mesh["copies"])
    fully_shard(block, mesh=everyone(mesh))


def shard_hybrid(block: Block, mesh: Any) -> None:
    fully_shard(block.moe.experts, mesh=mesh["copies"])
    block.moe.experts.set_gradient_divide_factor(mesh.size())  # the value that it has already
    fully_shard(block, mesh=mesh)


def shard_layer_by_layer(block: Block, mesh: Any) -> None:
    for layer in (block.moe.experts.fc1, block.moe.experts.fc2):
        fully_shard(layer, mesh=mesh["copies"])
    fully_shard(block, mesh=mesh._flatten())


def shard_with_ours(block: Block, mesh: Any) -> None:
    tp.parallel.fully_shard(block.moe, mesh)
    tp.parallel.fully_shard(block, mesh)


def check_fully_shard(rank: Rank, shard: Any, with_group: bool) -> None:
    full, mesh = full_block(rank.device), mesh_of(rank)
    placement = {"group": mesh["experts"].get_group()} if with_group else {"mesh": mesh["experts"]}
    block = sharded_block(full, rank.device, **placement)
    shard(block, mesh)
    one_step(rank, block)
    wanted = wanted_gradients(full, rank.size)
    assert_gradients(block, wanted)
    expected = torch.stack([g.norm() for g in wanted.values()]).norm()
    norm = tp.clip_grad_norm_(block, float(expected) / 2)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients(block, {name: g / 2 for name, g in wanted.items()})


@pytest.mark.parametrize("with_group", [False, True], ids=["mesh", "group"])
@pytest.mark.parametrize("shard", [shard_by_hand, shard_hybrid, shard_layer_by_layer, shard_with_ours])
def test_fully_shard(ranks: RankPool, shard: Any, with_group: bool) -> None:
    ranks.run(check_fully_shard, shard, with_group)


def check_float16(rank: Rank) -> None:
    """In float16, FSDP2 divides before and after the sum."""
    full, mesh = full_block(rank.device), mesh_of(rank)
    block = sharded_block(full, rank.device, mesh=mesh["experts"])
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    fully_shard(block.moe.experts, mesh=mesh["copies"], mp_policy=half)
    fully_shard(block, mesh=everyone(mesh))
    one_step(rank, block)
    wanted = wanted_gradients(full, rank.size)
    for name, parameter in block.moe.experts.named_parameters():
        got = everything(parameter.grad)
        assert relative_error(got, wanted[f"moe.experts.{name}"]) <= 1e-3, name


def test_fully_shard_with_sums_in_float16(ranks: RankPool) -> None:
    ranks.run(check_float16)
