"""Delayed scaling under DistributedDataParallel with defaults, and amaxes that a group of ranks shares."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import transformer_plugin as tp
from transformer_plugin.nn import GroupedLinear, Linear, reduce_amax
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Model(torch.nn.Module):
    def __init__(self, rank: Rank, **fields: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        recipe = DelayedScaling(amax_history_len=3, **fields)  # type: ignore[arg-type]
        self.linear = Linear(16, 24, device=rank.device, recipe=recipe)
        self.grouped = GroupedLinear(2, 24, 8, device=rank.device, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(self.linear(x), torch.tensor([5, 4], device=x.device))


def rows(rank: Rank, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank.rank)
    return (torch.randn(9, 16, generator=generator) * (1 + 3 * rank.rank) * (step + 1)).to(rank.device)


def same_on_all(rank: Rank, value: Tensor) -> bool:
    everyone = [torch.empty_like(value) for _ in range(rank.size)]
    dist.all_gather(everyone, value.contiguous(), group=rank.group)
    return all(torch.equal(other, value) for other in everyone)


def defaults(rank: Rank) -> None:
    """Two forwards before a backward; DDP broadcasts buffers before each. The gradients are those of the scales that
    the forwards used, averaged over the ranks."""
    model = Model(rank)
    ddp = DistributedDataParallel(model, process_group=rank.group)
    plain = Model(rank)
    for step in range(3):
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.grad = None
        outputs, expected = [], []
        for part in range(2):
            x = rows(rank, 2 * step + part)
            state = [b.clone() for b in model.buffers()]
            for buffer in state:
                dist.broadcast(buffer, 0, group=rank.group)
            for mine, buffer in zip(plain.buffers(), state, strict=True):
                mine.data.copy_(buffer)
            expected.append(plain(x))
            outputs.append(ddp(x))
            assert_same_bits(outputs[-1].detach(), expected[-1].detach())
        torch.stack(outputs).square().sum().backward()
        torch.stack(expected).square().sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None
            total = other.grad.clone()
            dist.all_reduce(total, group=rank.group)
            torch.testing.assert_close(parameter.grad, total / rank.size, rtol=1e-6, atol=0)
        for got, wanted in zip(model.buffers(), plain.buffers(), strict=True):
            assert_same_bits(got, wanted)
        assert same_on_all(rank, model.linear.delayed_scale)


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


@pytest.mark.parametrize("check", [defaults, common_amaxes, state_dicts, checkpointed])
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
    assert str(caught.value) == (
        "transformer_plugin::update_delayed_scale_: argument 'group': expected the name of a c10d process group of "
        "this process, or \"\", got 'nobody's'. Pass group.group_name, and do not use a group after it is destroyed."
    )
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name])
