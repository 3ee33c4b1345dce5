"""Delayed scaling on several ranks: scales of their own data, and amaxes that a group of ranks shares."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_plugin as tp
from tests.error_text import text_of
from transformer_plugin import parallel
from transformer_plugin.nn import GroupedLinear, Linear, reduce_amax
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.recipes import BFloat16, DelayedScaling, Float8CurrentScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Model(torch.nn.Module):
    def __init__(self, rank: Rank, recipe: Recipe | None = None, **fields: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        recipe = recipe or DelayedScaling(amax_history_len=3, **fields)  # type: ignore[arg-type]
        self.linear = Linear(16, 24, device=rank.device, recipe=recipe)
        self.grouped = GroupedLinear(2, 24, 8, device=rank.device, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(self.linear(x), torch.tensor([5, 4], device=x.device))


def rows(rank: Rank, step: int, factor: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank.rank)
    return (torch.randn(9, 16, generator=generator) * factor**rank.rank * (step + 1)).to(rank.device)


def same_on_all(rank: Rank, value: Tensor) -> bool:
    everyone = [torch.empty_like(value) for _ in range(rank.size)]
    dist.all_gather(everyone, value.contiguous(), group=rank.group)
    return all(torch.equal(other, value) for other in everyone)


def in_ddp(model: Model, rank: Rank) -> torch.nn.Module:
    return DistributedDataParallel(model, process_group=rank.group)


def in_data_parallel(model: Model, rank: Rank) -> torch.nn.Module:
    return parallel.data_parallel(model, process_group=rank.group)


def in_fsdp2(model: Model, rank: Rank) -> torch.nn.Module:
    return fully_shard(model, mesh=init_device_mesh(rank.device.type, (rank.size,)))


def in_shards(model: Model, rank: Rank) -> torch.nn.Module:
    return parallel.data_parallel(parallel.shard_(model, rank.group), process_group=rank.group)


def own_scales(rank: Rank, wrap: Any) -> None:
    """Rank 1 has inputs 1000 times those of rank 0, and two forwards before a backward. Each rank has the scales of its
    own data, so that its outputs are those of the model alone, and near those without quantization, where the
    scales of rank 0 would be 100 % off."""
    wrapped, alone, exact = wrap(Model(rank), rank), Model(rank), Model(rank, BFloat16())
    for step in range(3):
        for parameter in [*wrapped.parameters(), *alone.parameters()]:
            parameter.grad = None
        outputs, expected = [], []
        for shard in range(2):
            x = rows(rank, 2 * step + shard, 1000.0) / (2 * step + shard + 1)
            outputs.append(wrapped(x))
            expected.append(alone(x))
            assert_same_bits(outputs[-1].detach(), expected[-1].detach())
            if step:
                error = (outputs[-1] - exact(x)).norm() / exact(x).norm()
                assert error < 0.25, (step, shard, error)
        torch.stack(outputs).square().sum().backward()
        torch.stack(expected).square().sum().backward()
        for got, wanted in zip(wrapped.buffers(), alone.buffers(), strict=True):
            assert_same_bits(got, wanted)
        gradients = {name.removeprefix("module."): p for name, p in wrapped.named_parameters()}
        for name, other in alone.named_parameters():
            assert other.grad is not None
            total = other.grad.clone()
            dist.all_reduce(total, group=rank.group)
            got, wanted = gradients[name].grad, total / rank.size
            assert got is not None
            if hasattr(got, "full_tensor"):
                got = got.full_tensor()
            shard = shard_of_parameter(gradients[name])
            wanted = wanted if shard is None else shard.local_shard_of(wanted)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=float(1e-6 * wanted.abs().max()))
    assert not same_on_all(rank, alone.linear.delayed_scale)


def other_buffers(rank: Rank) -> None:
    """Buffers that are not each rank's own are rank 0's, as ever; and when a model is wrapped, all are."""
    model = Model(rank)
    model.register_buffer("counts", torch.full((3,), float(rank.rank), device=rank.device))
    model(rows(rank, 0)).sum().backward()
    model(rows(rank, 1)).sum().backward()
    assert not same_on_all(rank, model.linear.delayed_history)
    ddp = DistributedDataParallel(model, process_group=rank.group)
    assert all(same_on_all(rank, buffer) for buffer in model.buffers())
    model.counts.fill_(rank.rank + 1)  # type: ignore[operator]
    pickled = copy.deepcopy(model)
    for each in (ddp, DistributedDataParallel(pickled, process_group=rank.group, init_sync=False)):
        each.module.linear.delayed_history.fill_(rank.rank)
        each(rows(rank, 2))
        assert (each.module.counts == 1).all()
        assert not same_on_all(rank, each.module.linear.delayed_history)
    model.linear.recipe = model.grouped.recipe = Float8CurrentScaling()
    ddp(rows(rank, 2)).sum().backward()
    model.linear.recipe = DelayedScaling(amax_history_len=2)  # new buffers, after the model was wrapped
    for step in range(2):
        ddp(rows(rank, step)).sum().backward()
    assert not same_on_all(rank, model.linear.delayed_scale)


def common_amaxes(rank: Rank) -> None:
    """With amax_group the scales are those of reduce_amax after every backward, also with DDP's broadcasts."""
    for broadcasts in (False, True):
        by_argument = Model(rank, amax_group=rank.group)
        by_hand = Model(rank)
        ddp = DistributedDataParallel(by_argument, process_group=rank.group, broadcast_buffers=broadcasts)
        for step in range(4):
            x = rows(rank, step)
            outputs = ddp(x), by_hand(x)
            assert_same_bits(outputs[0].detach(), outputs[1].detach())
            assert_same_bits(by_argument.linear.delayed_scale, by_hand.linear.delayed_scale)
            assert_same_bits(by_argument.grouped.delayed_scale, by_hand.grouped.delayed_scale)
            assert same_on_all(rank, by_argument.linear.delayed_scale)
            assert step == 0 or (by_argument.linear.delayed_scale != 1).all()
            for output in outputs:
                output.square().sum().backward()
            reduce_amax(by_hand, rank.group)
        by_argument.eval()
        scale = by_argument.linear.delayed_scale.clone()
        by_argument(rows(rank, 9))  # on one rank only: evaluations do not communicate
        assert_same_bits(by_argument.linear.delayed_scale, scale)


def state_dicts(rank: Rank) -> None:
    """A rank's collected amaxes are in its state_dict, and survive copies, moves and another recipe."""
    model = Model(rank, amax_group=rank.group)
    for step in range(2):
        model(rows(rank, step)).square().sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Model(rank, amax_group=rank.group)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    others = [loaded, copy.deepcopy(model), copy.deepcopy(model).bfloat16().float()]
    for other in others[1:]:
        other.load_state_dict(
            {k: v for k, v in model.state_dict().items() if "delayed" not in k}, strict=False
        )
    alone = copy.deepcopy(model)
    alone.linear.recipe = DelayedScaling(amax_history_len=3)
    assert_same_bits(alone.linear.delayed_amax, model.state_dict()["linear.delayed_amax"])
    x = rows(rank, 2)
    expected = model(x)
    for other in others:
        assert_same_bits(other(x).detach(), expected.detach())


def checkpointed(rank: Rank) -> None:
    """A recomputed forward does not communicate, so ranks may recompute in different orders."""
    results = []
    for call in (lambda function, x: function(x), tp.checkpoint):
        model = Model(rank, amax_group=rank.group)
        outputs = [call(model, rows(rank, step)) for step in range(3)]
        for output in outputs[:: 1 if rank.rank else -1]:
            output.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("wrap", [in_ddp, in_data_parallel, in_fsdp2, in_shards])
def test_without_a_group(wrap: object, pair: RankPool) -> None:
    pair.run(own_scales, wrap)


@pytest.mark.parametrize("check", [other_buffers, common_amaxes, state_dicts, checkpointed])
def test_ranks(check: object, pair: RankPool) -> None:
    pair.run(check)  # type: ignore[arg-type]


def test_arguments() -> None:
    assert DelayedScaling(amax_group="7").amax_group == "7"
    with pytest.raises(TypeError, match="expected a process group or its name, got None"):
        DelayedScaling(amax_group=None)  # type: ignore[arg-type]
    layer = Linear(8, 8, recipe=DelayedScaling(amax_group="nobody's"))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        layer(torch.ones(2, 8))
    assert text_of(caught.value) == (
        "transformer_plugin::update_delayed_scale_: argument 'group': expected the name of a c10d process group of "
        "this process, or \"\", got 'nobody's'. Pass group.group_name, and do not use a group after it is destroyed."
    )
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name])
