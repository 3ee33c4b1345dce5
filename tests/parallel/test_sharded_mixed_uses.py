"""Sharded weights where something else happens, too: other gradients of the same weight, errors, loads, copies."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.parallel.sharded_models import RECIPES, change_sharded, computed, dense, dense_batch, twins
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankError, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def same(rank: Rank) -> torch.Tensor:
    """The same input on all ranks, so that the mean of gradients is the gradient."""
    return dense_batch(0, 0, rank.device).arguments[0]


def check_two_paths(rank: Rank) -> None:
    """A penalty on the weights adds to their gradients, in the same backward and in a second one."""
    full, sharded = twins(rank, lambda: dense(None, rank.device))
    for model in (full, sharded):
        for _ in range(2):
            penalty = sum(0.1 * p.float().square().sum() for p in model.parameters())
            (model(same(rank)).float().square().mean() + penalty).backward()
    for name, parameter in sharded.named_parameters():
        shard, want = shard_of_parameter(parameter), full.get_parameter(name).grad
        want = want if shard is None else shard.local_shard_of(want)
        error = (parameter.grad.float() - want.float()).norm() / want.float().norm()
        assert error < 2**-7, (name, error)


def test_other_gradients_of_a_weight(ranks: RankPool) -> None:
    ranks.run(check_two_paths)


def check_error_in_a_backward(rank: Rank) -> None:
    """What a backward has begun that an error ends does not reach the gradients of the next."""
    _, sharded = twins(rank, lambda: dense(None, rank.device))
    batch = dense_batch(rank.rank, 0, rank.device)
    want = computed(sharded, batch).grads
    for parameter in sharded.parameters():
        parameter.grad = None

    def fail(_: Any) -> None:
        raise RuntimeError("stop")

    output = sharded[0](batch.arguments[0])  # type: ignore[index]
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        (1000 * sharded[2](sharded[1](output))).float().square().mean().backward()  # type: ignore[index]
    for parameter in sharded.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    torch.manual_seed(batch.seed)
    sharded(batch.arguments[0]).float().square().mean().backward()
    for name, parameter in sharded.named_parameters():
        assert_same_bits(parameter.grad + 0, want[name] + 0, name)


def test_an_error_in_a_backward(ranks: RankPool) -> None:
    ranks.run(check_error_in_a_backward)


def check_changed_values(rank: Rank, key: str) -> None:
    """Quantized shards follow every change that torch counts; a change between forward and backward is an error."""
    full, sharded = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    for seed in range(2):
        assert_same_bits(sharded(same(rank)).detach(), full(same(rank)).detach())
        assert_same_bits(sharded(same(rank)).detach(), full(same(rank)).detach())
        torch.manual_seed(seed)
        other = dense(RECIPES[key](), rank.device)
        full.load_state_dict(other.state_dict())
        sharded.load_state_dict(other.state_dict())
    averaged, average = AveragedModel(sharded), AveragedModel(full)
    for step in range(3):
        averaged.update_parameters(sharded)
        average.update_parameters(full)
        assert_same_bits(averaged(same(rank)).detach(), average(same(rank)).detach(), str(step))
    if key == "bf16":
        return
    output = sharded(same(rank).clone().requires_grad_()).float().sum()
    change_sharded(sharded, 1)
    sharded(same(rank))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("key", ["bf16", "fp8_block", "fp8_tensor"])
def test_changed_values(ranks: RankPool, key: str) -> None:
    ranks.run(check_changed_values, key)


def check_new_parameters(rank: Rank) -> None:
    """Parameters that take the place of others are shards as well."""
    _, sharded = twins(rank, lambda: dense(None, rank.device))
    sharded.load_state_dict(sharded.state_dict(), assign=True)
    for name in ("0.weight", "1.weight", "2.weight"):
        assert shard_of_parameter(sharded.get_parameter(name)) is not None, name
    full = full_weight(sharded.get_parameter("1.weight"))
    assert list(full.shape) == [192, 256]
    late = torch.nn.Sequential(tnn.Linear(8, 9, device="meta"), tnn.Embedding(7, 8, device="meta"))
    shard_(late, rank.group)
    late.to_empty(device=rank.device)
    assert all(shard_of_parameter(layer.weight) is not None for layer in late)


def test_new_parameters(ranks: RankPool) -> None:
    ranks.run(check_new_parameters)


def check_resume(rank: Rank) -> None:
    """The state of an optimizer is loaded before its first step."""
    models = [shard_(dense(None, rank.device), rank.group) for _ in range(2)]
    first = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    computed(models[0], dense_batch(rank.rank, 0, rank.device))
    first.step()
    buffer = io.BytesIO()
    torch.save([models[0].state_dict(), first.state_dict()], buffer)
    buffer.seek(0)
    model, optimizer = torch.load(buffer, weights_only=True)
    models[1].load_state_dict(model)
    second = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    second.load_state_dict(optimizer)
    for model, optimizer in zip(models, (first, second), strict=True):
        computed(model, dense_batch(rank.rank, 1, rank.device))
        optimizer.step()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits(one.detach(), two.detach())


def test_resume(ranks: RankPool) -> None:
    ranks.run(check_resume)


def check_garbage(rank: Rank) -> None:
    """Copies of a model that one rank still holds, as it has not collected its garbage."""
    _, sharded = twins(rank, lambda: dense(None, rank.device))
    if rank.rank == 0:
        gc.disable()
    for _ in range(6):
        sharded(same(rank))
        other: Any = copy.deepcopy(sharded)
        other.itself = [other]
        assert_same_bits(other(same(rank)).detach(), sharded(same(rank)).detach())
        other(same(rank))
        del other
        if rank.rank != 0:
            gc.collect()
    gc.enable()
    gc.collect()


def test_garbage(ranks: RankPool) -> None:
    ranks.run(check_garbage)


def check_other_order(rank: Rank) -> None:
    _, sharded = twins(rank, lambda: torch.nn.Sequential(*[tnn.Linear(8, 8) for _ in range(3)]))
    layers = [sharded[0], sharded[1 + rank.rank % 2]]  # type: ignore[index]
    output = torch.ones(2, 8)
    for layer in layers:
        output = layer(output)


def test_ranks_that_gather_different_weights_are_told() -> None:
    with RankPool(2) as pool, pytest.raises(RankError, match="checksum of the weight's name and direction"):
        pool.run(check_other_order)


def check_compiled_step(rank: Rank) -> None:
    shard_(dense(None, rank.device), rank.group)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()


def test_compiled_steps_of_other_optimizers(make_pool: Any) -> None:
    make_pool(2).run(check_compiled_step)


def check_dtypes_of_sums(rank: Rank) -> None:
    """Sums of bfloat16 gradients for a float32 weight are float32, late or not."""
    grads = []
    for observed in (False, True):
        torch.manual_seed(0)
        layer = tnn.Linear(16, 12, False, rank.device)
        shard_(layer, rank.group, gradient_dtype=torch.bfloat16)
        if observed:
            layer.weight.register_hook(lambda _: None)
        layer(dense_batch(rank.rank, 0, rank.device).arguments[0][:, :16].float()).square().sum().backward()
        grads.append(layer.weight.grad)
    assert_same_bits(grads[0], grads[1])
    assert ops.count_gathers(rank.group_name).gathers > 0
    assert parallel.clip_grad_norm_(layer, 1.0).isfinite()


def test_dtypes_of_sums(ranks: RankPool) -> None:
    ranks.run(check_dtypes_of_sums)


def check_wrappers(rank: Rank, folder: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader, async_save, load
    from torch.distributed.fsdp import fully_shard

    sharded = shard_(dense(None, rank.device), rank.group)
    with pytest.raises(
        ValueError, match="fully_shard: argument 'module': expected weights that nothing else has sharded"
    ):
        fully_shard(sharded)
    async_save({"model": sharded.state_dict()}, checkpoint_id=folder).result()
    assert list(FileSystemReader(folder).read_metadata().state_dict_metadata["model.1.weight"].size) == [
        192,
        256,
    ]
    torch.manual_seed(5)
    other = shard_(dense(None, rank.device), rank.group)
    load({"model": other.state_dict()}, checkpoint_id=folder)
    for one, two in zip(sharded.parameters(), other.parameters(), strict=True):
        assert_same_bits(one.detach(), two.detach())


def test_fsdp2_and_asynchronous_saves(make_pool: Any, tmp_path: Any) -> None:
    make_pool(2).run(check_wrappers, str(tmp_path / "saved"))
