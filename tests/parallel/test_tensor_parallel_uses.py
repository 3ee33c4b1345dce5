"""Uses of tensor-parallel layers: tied weights, own initial values, second derivatives, other optimizers, seeds."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel.styles import ColumnParallel, RowParallel, SequenceParallel
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

VOCABULARY, K = 13, 16


class Tied(torch.nn.Module):
    """A language model whose head has the table's weight."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = tnn.Embedding(VOCABULARY, K, device=device)
        self.head = tnn.Linear(K, VOCABULARY, bias=False, device=device)
        self.head.weight = self.table.weight
        self.norm = tnn.RMSNorm(K, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens)))


def losses_of(rank: Rank, model: Tied, logits_of: Any, tp: tuple[int, str]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(4):
        tokens = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(step)).to(
            rank.device
        )
        loss = ops.vocab_parallel_cross_entropy(logits_of(tokens), tokens.roll(1), VOCABULARY, *tp).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_tied(rank: Rank) -> None:
    """They stay tied, train as on one rank, and data_parallel takes them."""
    mesh = init_device_mesh(rank.device.type, (2, rank.size // 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(1)
    full = Tied(rank.device)
    torch.manual_seed(1)
    model, tp = Tied(rank.device), mesh["tp"]
    plan = {"table": RowParallel(), "head": ColumnParallel(pad_outputs=True)}
    parallelize_module(model, tp, plan)
    assert model.head.weight is model.table.weight
    wrapped = parallel.data_parallel(model)
    want = losses_of(rank, full, full, (1, ""))
    got = losses_of(rank, model, wrapped, (tp.size(), tp.get_group().group_name))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    other = Tied(rank.device)
    with pytest.raises(ValueError, match="expected the same slices of a weight that layers share"):
        parallelize_module(other, tp, {"table": RowParallel(), "head": RowParallel()})


def test_tied_weights(make_pool: Any) -> None:
    make_pool(4).run(check_tied)


def check_own_values(rank: Rank) -> None:
    """Values that the user draws are those of one model, also with other seeds for what all ranks have."""
    options: dict[str, Any] = {"tp_group": rank.group, "device": rank.device}
    column = {**options, "parallel_mode": "column", "sections": (16, 16)}

    def initialize(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, 0.0, 0.02)

    full = torch.nn.Sequential(tnn.Linear(16, 32), tnn.Linear(32, 16)).to(rank.device)
    model = torch.nn.Sequential(
        tnn.Linear(16, 32, **column), tnn.Linear(32, 16, **options, parallel_mode="row")
    )
    torch.manual_seed(4)
    full.apply(initialize)
    torch.manual_seed(4)
    with parallel.initialize_full_params(model):
        model.apply(initialize)
    for name, parameter in model.named_parameters():
        assert_same_bits(parallel.full_weight(parameter), full.get_parameter(name).detach(), name)
    torch.manual_seed(rank.rank)
    dispatch = tnn.DispatchConfig(max_tokens=8)
    moe = tnn.MoE(
        16, 32, 4, 2, group=rank.group, dispatch=dispatch, dtensor=False, sequence_parallel=True, **options
    )
    norm = tnn.RMSNorm(16, device=rank.device)
    torch.nn.init.normal_(norm.weight)
    parallelize_module(norm, init_device_mesh(rank.device.type, (rank.size,)), SequenceParallel())
    for parameter in (moe.router.weight, norm.weight):
        every = ops.all_gather(parameter.detach()[None], rank.size, rank.group_name)
        assert_same_bits(every, parameter.detach().expand_as(every).contiguous())


def test_own_values(ranks: RankPool) -> None:
    ranks.run(check_own_values)


def check_second_derivatives(rank: Rank) -> None:
    """A penalty on the gradient of the input, through a column and a row layer."""
    torch.manual_seed(2)
    full = torch.nn.Sequential(tnn.Linear(8, 16), torch.nn.Tanh(), tnn.Linear(16, 8)).to(rank.device)
    model = copy.deepcopy(full)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).to(rank.device)
    for each in (full, model):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(each(leaf).square().sum(), leaf, create_graph=True)
        grad.square().sum().backward()
    for name, parameter in model.named_parameters():
        slices, want = parameter.__dict__.get("tensor_slices"), full.get_parameter(name).grad
        want = want if slices is None else slices.local_shard_of(want)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-4, msg=name)


def test_second_derivatives(ranks: RankPool) -> None:
    ranks.run(check_second_derivatives)


def check_states(rank: Rank) -> None:
    """keep_vars returns parameters; states that are no values of elements are refused when they are saved."""
    layer = tnn.Linear(8, 8, parallel_mode="column", tp_group=rank.group, device=rank.device)
    layer.weight.requires_grad_(False)
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    layer.weight.requires_grad_(True)
    optimizer = torch.optim.Adafactor(layer.parameters())
    layer(torch.ones(2, 8, device=rank.device)).sum().backward()
    optimizer.step()
    with pytest.raises(
        ValueError, match=re.escape("expected one value for each element, or one for all, of a")
    ):
        optimizer.state_dict()
    for sections, text in (((14, -6), "sizes of at least 1"), (8, "a sequence of sizes, got 8")):
        with pytest.raises(ValueError, match=f"argument 'sections': expected {text}"):
            tnn.Linear(8, 8, parallel_mode="column", tp_group=rank.group, sections=sections)  # type: ignore[arg-type]


def test_states(pair: RankPool) -> None:
    pair.run(check_states)
