"""Linear under torch's tensor parallelism: parallelize_module on two ranks, compared with one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from transformer_plugin import ops
from transformer_plugin.nn import Linear
from transformer_plugin.testing.distributed import Rank, RankPool

PLANS = {
    "colwise": {"up": ColwiseParallel(output_layouts=Replicate())},
    "rowwise": {"down": RowwiseParallel(input_layouts=Replicate())},
    "both": {"up": ColwiseParallel(), "down": RowwiseParallel()},
}


class Mlp(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Linear(32, 64, bias), Linear(64, 16, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(rank: Rank, plan: str, bias: bool, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (rank.size,))
    x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for parallel in (False, True):
        model, leaf = Mlp(bias), x.clone().requires_grad_()
        if parallel:
            parallelize_module(model, mesh, PLANS[plan])
        with torch.no_grad():
            inferred = model(leaf)
        output = model(leaf)
        torch.testing.assert_close(full(inferred), full(output.detach()))
        output.square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        results.append([full(t) for t in (output.detach(), leaf.grad, *grads)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def sharded_rows(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.size,))
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, 32), torch.randn(16, 32)
    got = ops.linear(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()]))
    assert got.placements == (Shard(1),)
    torch.testing.assert_close(got.full_tensor(), ops.linear(x, weight))


def test_two_ranks() -> None:
    with RankPool(2) as pool:
        for plan in PLANS:
            for bias in (False, True):
                for shape in ((6,), (2, 4)):
                    pool.run(compare, plan, bias, shape)
        pool.run(sharded_rows)


@pytest.mark.parametrize("first", ["transformer_plugin", "torch.distributed.tensor"])
def test_either_import_may_come_first(first: str) -> None:
    """A registration with a part of torch does not import that part when the package is imported."""
    other = ({"transformer_plugin", "torch.distributed.tensor"} - {first}).pop()
    program = f"""
import importlib, sys
importlib.import_module({first!r})
if {first!r} == "transformer_plugin":
    assert not {{"torch.distributed.tensor", "torch.utils.flop_counter"}} & set(sys.modules)
importlib.import_module({other!r})
import torch
from torch.utils.flop_counter import flop_registry
from torch.distributed.tensor import DTensor
assert torch.ops.transformer_plugin.linear in flop_registry
assert torch.ops.transformer_plugin.linear.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
"""
    subprocess.run([sys.executable, "-c", program], check=True)
