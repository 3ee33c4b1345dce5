"""Styles for torch's parallelize_module, and random numbers of tensor-parallel ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.parallel.sharded_models import RECIPES
from tests.parallel.tensor_parallel_models import ROWS, Block, F, K, drawn
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel.styles import (
    ColumnParallel,
    ExpertTensorParallel,
    RowParallel,
    SequenceParallel,
)
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def check_styles(rank: Rank, sequence_parallel: bool) -> None:
    """A full block becomes what its constructor makes with the same values, bit for bit."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    torch.manual_seed(1)
    made = Block(RECIPES["fp8_block"](), rank.device, tp_group=mesh, sequence_parallel=sequence_parallel)
    torch.manual_seed(1)
    block = Block(RECIPES["fp8_block"](), rank.device)
    options = {"sequence_parallel": sequence_parallel}
    plan: dict[str, Any] = {
        "up": ColumnParallel(sections=(F, F), **options),
        "down": RowParallel(**options),
        "out": ColumnParallel(**options),
    }
    parallelize_module(block, mesh, plan | ({"norm": SequenceParallel()} if sequence_parallel else {}))
    assert repr(block) == repr(made)
    rows = ROWS // rank.size if sequence_parallel else ROWS
    x = drawn(rows, K, seed=rank.rank if sequence_parallel else 0, device=rank.device)
    results = [model(x) for model in (block, made)]
    assert_same_bits(results[0].detach(), results[1].detach())
    for result in results:
        result.float().square().mean().backward()
    for one, other in zip(block.parameters(), made.parameters(), strict=True):
        assert one.shape == other.shape
        assert_same_bits(one.grad, other.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_styles(pair: RankPool, sequence_parallel: bool) -> None:
    pair.run(check_styles, sequence_parallel)


def check_experts(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    torch.manual_seed(1)
    made = tnn.GroupedMLP(2, 16, 32, True, device=rank.device, tp_group=mesh)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        tnn.GroupedMLP(2, 16, 32, True, device=rank.device), tnn.Embedding(10, 4, device=rank.device)
    )
    parallelize_module(model, mesh, {"0": ExpertTensorParallel(), "1": RowParallel()})
    assert repr(model[0]) == repr(made) and model[1].weight.shape == (5, 4)
    for one, other in zip(model[0].parameters(), made.parameters(), strict=True):
        assert_same_bits(one.detach(), other.detach())


def check_errors(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    cases: list[tuple[Any, Any, str]] = [
        (
            ColumnParallel(),
            torch.nn.Linear(4, 4),
            "expected Linear or LayerNormLinear or GroupedLinear, got Linear",
        ),
        (SequenceParallel(), tnn.Linear(4, 4), "'module': expected RMSNorm or LayerNorm, got Linear"),
        (RowParallel(), tnn.Linear(5, 4), "'in_features': expected a multiple of 2"),
        (
            ColumnParallel(pad_outputs=True),
            tnn.GroupedLinear(2, 4, 4),
            "expected neither for a GroupedLinear, got pad_outputs=True",
        ),
    ]
    for style, module, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            parallelize_module(module, mesh, style)
    layer = tnn.Linear(4, 4)
    stale = torch.optim.SGD(layer.parameters(), lr=0.1)
    parallelize_module(layer, mesh, ColumnParallel())
    text = "'optimizer': expected parameters of the model, got the full 'Linear.weight', which parallelize_module"
    with pytest.raises(ValueError, match=text):
        stale.step()
    with pytest.raises(ValueError, match="expected an unsharded layer, got one that is tensor parallel"):
        parallelize_module(layer, mesh, ColumnParallel())


def test_experts_and_errors(make_pool: Any) -> None:
    make_pool(2).run(check_experts)
    make_pool(2).run(check_errors)


def check_random(rank: Rank) -> None:
    """Other numbers on each rank inside, the same outside, and the same again from the same state."""
    random = parallel.TensorParallelRNG(rank.group, rank.device)
    torch.manual_seed(3)
    draws = []
    for _ in range(2):
        with random:
            draws.append(torch.rand(64, device=rank.device))
        draws.append(torch.rand(64, device=rank.device))
    inside, outside = draws[0::2], draws[1::2]
    assert not torch.equal(*inside) and not torch.equal(*outside)
    for each, is_same in ((inside, False), (outside, True)):
        for mine in each:
            every = ops.all_gather(mine[None], rank.size, rank.group_name)
            assert all(torch.equal(every[0], other) == is_same for other in every[1:])
    torch.manual_seed(3)
    with random:
        assert_same_bits(torch.rand(64, device=rank.device), inside[0])
    with pytest.raises(RuntimeError, match="stop"), random:
        raise RuntimeError("stop")
    torch.rand(1, device=rank.device)


def test_random_numbers(ranks: RankPool) -> None:
    ranks.run(check_random)


def check_recomputed(rank: Rank) -> None:
    """A checkpointed activation is recomputed with the same dropout."""
    random = parallel.TensorParallelRNG(rank.group, rank.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        with random:
            return torch.nn.functional.dropout(x, 0.5) * x

    results = []
    for checkpoints in (False, True):
        torch.manual_seed(4)
        x = torch.ones(256, device=rank.device, requires_grad=True)
        output = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpoints else run(x)
        output.sum().backward()
        results.append(x.grad)
    assert_same_bits(*results)


def test_recomputed_dropout(pair: RankPool) -> None:
    pair.run(check_recomputed)
