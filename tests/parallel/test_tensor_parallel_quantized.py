"""quantized_init with tensor parallelism: slices are quantized parameters, and checkpoints are of values."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import transformer_plugin as tp
from tests.parallel.sharded_models import RECIPES
from tests.parallel.tensor_parallel_models import ROWS, Block, K, drawn
from transformer_plugin import nn as tnn
from transformer_plugin.parallel import clip_grad_norm_, full_state_dict, full_weight, shard_
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.parallel._tensor_slices import slices_of
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

KEYS = [key for key in RECIPES if key != "bf16"]


class Model(torch.nn.Module):
    """A block, and slices of experts."""

    def __init__(self, recipe: Any, device: torch.device, **parallel: Any) -> None:
        super().__init__()
        self.block = Block(recipe, device, **parallel)
        self.block.out = torch.nn.Linear(K, K, device=device, dtype=torch.bfloat16)  # type: ignore[assignment]
        group = {"tp_group": parallel["tp_group"]} if parallel else {}
        self.mlp = tnn.GroupedMLP(2, K, 512, recipe=recipe, device=device, dtype=torch.bfloat16, **group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.block(x)
        sizes = torch.tensor([16, 32], device=x.device)
        output: torch.Tensor = self.mlp(hidden, sizes, torch.ones(len(hidden), device=x.device))
        return output


def made(rank: Rank, key: str, quantized: bool, parallel: bool = True, seed: int = 1) -> Any:
    options = {"tp_group": rank.group} if parallel else {}
    torch.manual_seed(seed)
    with tp.quantized_init(RECIPES[key]()) if quantized else nullcontext():
        return Model(RECIPES[key](), rank.device, **options)


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    output = model(x)
    output.float().square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    assert x.grad is not None
    return [output.detach(), x.grad, *grads]


def check_bits(rank: Rank, key: str) -> None:
    """Of the layers that quantize the same slices in each forward; also after new initial values and a load."""
    plain, quantized = made(rank, key, False), made(rank, key, True)
    x = drawn(ROWS, K, seed=2, device=rank.device)
    for step in range(3):
        for got, want in zip(results(quantized, x), results(plain, x), strict=True):
            assert_same_bits(got, want, f"{key} in step {step}")
        for name, parameter in quantized.named_parameters():
            assert slices_of(parameter) == slices_of(plain.get_parameter(name)), name
        if step == 0:
            for model in (plain, quantized):
                torch.manual_seed(9)
                model.block.up.reset_parameters()
                model.mlp.reset_parameters()
        if step == 1:
            full = made(rank, key, False, parallel=False, seed=4)  # of high precision, on one rank
            plain.load_state_dict(full.state_dict())
            quantized.load_state_dict(full.state_dict())


@pytest.mark.parametrize("key", KEYS)
def test_bits(ranks: RankPool, key: str) -> None:
    ranks.run(check_bits, key)


def check_values(rank: Rank, key: str) -> None:
    """In formats with blocks that no rank divides, slices have the values of the full quantized parameter."""
    full, quantized = made(rank, key, True, parallel=False), made(rank, key, True)
    for name, parameter in quantized.named_parameters():
        want: Any = full.get_parameter(name)
        want = want.detach().dequantize() if hasattr(want, "_buffers") else want.detach()
        assert_same_bits(full_weight(parameter), want, name)
    other = made(rank, key, True, seed=3)
    other.load_state_dict(full.state_dict())  # quantized values of one rank
    for (name, one), two in zip(other.named_parameters(), quantized.parameters(), strict=True):
        assert_same_bits(full_weight(one), full_weight(two), name)


@pytest.mark.parametrize("key", ["fp8_block", "mxfp8"])
def test_values(pair: RankPool, key: str) -> None:
    pair.run(check_values, key)


def check_states(rank: Rank, folder: str, key: str, save: bool) -> None:
    model = made(rank, key, True, seed=1 if save else 2)
    state = model.state_dict()
    value = state["mlp.fc1.weight"]
    assert isinstance(value, ShardTensor)
    assert type(value.local) is torch.Tensor
    assert list(value.shape) == [2, 1024, K]
    copied = copy.deepcopy(model)
    assert slices_of(copied.block.down.weight) == slices_of(model.block.down.weight)
    if save:
        dcp.save({"model": state}, checkpoint_id=folder)
        values = full_state_dict(model)
        if rank.rank == 0:
            torch.save(values, f"{folder}/expected.pt")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer, weights_only=True))
    else:
        dcp.load({"model": state}, checkpoint_id=folder)
        model.load_state_dict(state)
    expected = torch.load(f"{folder}/expected.pt", map_location=rank.device) if not save else values
    error = {"fp8_block": 0.0, "mxfp8": 0.0}.get(
        key, 2**-7
    )  # scales that are no powers of two are rounded with values
    for name, got in full_state_dict(model).items():
        want = expected[name].float()
        assert (got.float() - want).norm() <= error * want.norm(), name


@pytest.mark.parametrize("key", KEYS)
def test_states(make_pool: Any, tmp_path: Any, key: str) -> None:
    make_pool(2).run(check_states, str(tmp_path), key, True)
    for size in (2, 4):
        make_pool(size).run(check_states, str(tmp_path), key, False)


def check_training(rank: Rank, folder: str) -> None:
    """Steps of master weights are those of the layer in high precision; their state is of full weights."""
    model = made(rank, "fp8_block", True)
    x = drawn(ROWS, K, seed=2, device=rank.device)
    optimizer = tp.optim.MasterWeights(model.parameters(), lambda w: torch.optim.AdamW(w, lr=1e-2))
    before = results(model, x)[0]
    for _ in range(3):
        model(x).float().square().mean().backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = results(model, x)[0]
    assert after.float().square().mean() < before.float().square().mean()
    state = optimizer.state_dict()
    shards = [value for value in state["master_weights"] if isinstance(value, ShardTensor)]
    assert len(shards) == sum(slices_of(p) is not None for p in model.parameters())
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    resumed = made(rank, "fp8_block", True, seed=7)
    again = tp.optim.MasterWeights(resumed.parameters(), lambda w: torch.optim.AdamW(w, lr=1e-2))
    results(resumed, x)
    for parameter in resumed.parameters():
        parameter.grad = torch.zeros_like(parameter)
    again.step()  # makes the moments
    own = again.state_dict()
    dcp.load({"optimizer": own}, checkpoint_id=folder)
    again.load_state_dict(own)
    assert_same_bits(results(resumed, x)[0], after)
    for one, two in zip(again.master_weights, optimizer.master_weights, strict=True):
        assert_same_bits(one.detach(), two.detach())
        moments = [o.optimizer.state[w]["exp_avg"] for o, w in ((again, one), (optimizer, two))]
        assert_same_bits(*moments)


def test_training(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(check_training, str(tmp_path))


def check_refused(rank: Rank) -> None:
    model = made(rank, "fp8_block", True)
    with pytest.raises(ValueError, match="quantized_init makes parameters that cannot be sharded"):
        shard_(model, rank.group)
    text = "expected one that supports in_features=48"
    with pytest.raises(ValueError, match=text), tp.quantized_init(RECIPES["mxfp8"]()):
        tnn.Linear(48 * rank.size, 64, device=rank.device, parallel_mode="row", tp_group=rank.group)


def test_refused(pair: RankPool) -> None:
    pair.run(check_refused)
