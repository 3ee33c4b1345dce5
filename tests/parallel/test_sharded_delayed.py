"""Delayed scaling of sharded weights: the full layer over several steps, bit for bit, with its scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.sharded_models import (
    Batch,
    change,
    computed,
    dense_batch,
    expected_grad,
    expert_batch,
    twins,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.recipes import DelayedScaling, Float8CurrentScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

EXPERTS = 3


def dense(device: torch.device, group: Any = "") -> torch.nn.Module:
    recipe = DelayedScaling(amax_history_len=2, amax_group=group)
    options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
    return torch.nn.Sequential(
        tnn.Linear(128, 250, **options),
        tnn.LayerNormLinear(250, 192, **options),
        tnn.Linear(192, 64, bias=False, **options),
    )


class Experts(torch.nn.Module):
    def __init__(self, device: torch.device, group: Any = "") -> None:
        super().__init__()
        recipe = DelayedScaling(amax_history_len=2, amax_group=group)
        options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
        self.mlp = tnn.GroupedMLP(EXPERTS, 128, 96, True, **options)
        self.last = tnn.GroupedLinear(EXPERTS, 128, 64, **options)

    def forward(self, input: torch.Tensor, sizes: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.mlp(input, sizes, probs), sizes)
        return output


def batch_of(kind: Any, rank: int, step: int, device: torch.device) -> Batch:
    batch = dense_batch(rank, step, device) if kind is dense else expert_batch(rank, step, device, EXPERTS)
    input = batch.arguments[0] * (1 + rank) * (1 + step)
    return Batch((input, *batch.arguments[1:]), batch.seed)


def states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def check_alone(rank: Rank, kind: Any) -> None:
    """Without a group: this rank's state is that of the full layer with this rank's tokens."""
    full, sharded = twins(rank, lambda: kind(rank.device))
    others = [states(full) for _ in range(rank.size)]
    for step in range(4):
        each = []
        for other in range(rank.size):  # one model in the place of all ranks, each with its state
            for name, value in others[other].items():
                full.get_buffer(name).copy_(value)
            each.append(computed(full, batch_of(kind, other, step, rank.device)))
            others[other] = states(full)
        own = computed(sharded, batch_of(kind, rank.rank, step, rank.device))
        for name, value in states(sharded).items():
            assert_same_bits(value, others[rank.rank][name], f"{name} in step {step}")
        assert_same_bits(own.output, each[rank.rank].output)
        assert_same_bits(own.grad_input, each[rank.rank].grad_input)
        for name, parameter in sharded.named_parameters():
            if shard_of_parameter(parameter) is None:
                assert_same_bits(own.grads[name], each[rank.rank].grads[name], name)
                continue
            assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), name)
            want = expected_grad([results.grads[name] for results in each], parameter, True)
            assert_same_bits(own.grads[name], want, name)
        change(full, sharded, step)


@pytest.mark.parametrize("kind", [dense, Experts])
def test_without_a_group(ranks: RankPool, kind: Any) -> None:
    ranks.run(check_alone, kind)


def check_group(rank: Rank, kind: Any, compiled: bool) -> None:
    """With a group all ranks have the same scales; those of inputs are of all tokens."""
    torch._dynamo.reset()
    _, eager = twins(rank, lambda: kind(rank.device, rank.group))
    _, sharded = twins(rank, lambda: kind(rank.device, rank.group))
    model: Any = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, sharded)]
    for step in range(4):
        batch = batch_of(kind, rank.rank, step, rank.device)
        want, got = computed(eager, batch), computed(model, batch)
        assert_same_bits(got.output, want.output)
        for one, other in zip(eager.parameters(), sharded.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert_same_bits(other.grad, one.grad)
        for name, value in sharded.named_buffers():
            if name.endswith("delayed_scale"):
                everyone = [torch.empty_like(value) for _ in range(rank.size)]
                dist.all_gather(everyone, value, group=rank.group)
                assert all(torch.equal(value, each) for each in everyone), (name, everyone)
                assert step == 0 or (value != 1).all()
        for optimizer in optimizers:
            optimizer.step()
    counts = ops.count_gathers(rank.group_name)
    assert counts.hits > 0


@pytest.mark.parametrize("kind", [dense, Experts])
@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_group(pair: RankPool, kind: Any, compiled: bool) -> None:
    pair.run(check_group, kind, compiled)


def check_recipes(rank: Rank) -> None:
    """Recipes that are set later: the state is of the full weight; and back to scales of the data."""
    for make in (lambda: dense(rank.device), lambda: Experts(rank.device)):
        kind = dense if make().__class__ is torch.nn.Sequential else Experts
        full, sharded = twins(rank, make)
        for recipe in (Float8CurrentScaling(), DelayedScaling(amax_history_len=3)):
            for model in (full, sharded):
                for layer in model.modules():
                    if isinstance(getattr(layer, "recipe", None), DelayedScaling | Float8CurrentScaling):
                        layer.recipe = recipe
            for step in range(2):
                batch = batch_of(kind, rank.rank, step, rank.device)
                assert_same_bits(computed(sharded, batch).output, computed(full, batch).output)
        for name, value in sharded.named_buffers():
            assert_same_bits(value, full.get_buffer(name), name)


def test_recipes_that_are_set_later(pair: RankPool) -> None:
    pair.run(check_recipes)


def check_refused(rank: Rank) -> None:
    layer = tnn.Linear(32, 32, recipe=DelayedScaling(), device=rank.device)
    text = "argument 'format': expected None or 'none' for parameters in lists and with delayed scaling"
    with pytest.raises(ValueError, match=text):
        shard_(layer, rank.group, format="fp8_tensor")
    recipe = DelayedScaling()
    grouped = tnn.GroupedLinear(2, 32, 32, parameters="list", recipe=recipe, device=rank.device)
    with pytest.raises(ValueError, match="expected packed experts with delayed scaling"):
        shard_(grouped, rank.group)


def test_refused(pair: RankPool) -> None:
    pair.run(check_refused)


def test_op_errors() -> None:
    input, weight, scale = torch.zeros(2, 8), torch.zeros(4, 8), torch.ones(3)
    with pytest.raises(ValueError, match="linear: argument 'weight_shard': expected a key without 'list'"):
        ops.linear(input, weight, scale=scale, weight_shard="rows=4,ranks=1,list,group=")
    with pytest.raises(
        ValueError, match="argument 'weight': expected a shard of the 9 rows on each of 2 ranks"
    ):
        ops.linear(input, weight, scale=scale, weight_shard="rows=9,ranks=2,group=")


def check_slices(rank: Rank) -> None:
    """Slices of tensor-parallel layers that are sharded further; all ranks have the scales of the full layers."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        recipe = DelayedScaling(amax_history_len=2, amax_group=rank.group)
        options: dict[str, Any] = {"recipe": recipe, "device": rank.device, "dtype": torch.bfloat16}
        options |= {"tp_group": mesh["tp"], "sequence_parallel": True}
        models.append(
            torch.nn.Sequential(
                tnn.LayerNormLinear(128, 100, parallel_mode="column", **options),
                tnn.Linear(100, 64, parallel_mode="row", **options),
            )
        )
    plain, sharded = models
    shard_(sharded, mesh["data"])
    for step in range(3):
        batch = batch_of(dense, rank.rank, step, rank.device)
        want, got = computed(plain, batch), computed(sharded, batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for one, other in zip(plain, sharded, strict=True):
            assert_same_bits(other.delayed_scale, one.delayed_scale)  # type: ignore[arg-type]
            assert_same_bits(full_weight(other.weight), full_weight(one.weight))  # type: ignore[arg-type]
        change(plain, sharded, step)


def test_slices(make_pool: Any) -> None:
    make_pool(4).run(check_slices)
