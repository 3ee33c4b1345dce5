"""Layers with tensor parallelism, compared with the full layer on one rank: outputs, gradients, initial values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES
from tests.parallel.tensor_parallel_models import (
    ROWS,
    Block,
    F,
    K,
    close,
    drawn,
    full_grad,
    in_float64,
    relative,
    twins,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import full_weight
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.bits


def check_block(rank: Rank, key: str, sequence_parallel: bool) -> None:
    full, parallel = twins(rank, key, sequence_parallel)
    for shape in ((ROWS, K), (ROWS, 2, K)):
        x = drawn(*shape, seed=2, device=rank.device).requires_grad_()
        weight = drawn(*shape, seed=3, device=rank.device)
        output = full(x)
        (output * weight).sum().backward()
        part = slice(None)
        if sequence_parallel:
            part = slice(rank.rank * ROWS // rank.size, (rank.rank + 1) * ROWS // rank.size)
        mine = x.detach()[part].clone().requires_grad_()
        own = parallel(mine)  # all rows, this rank's columns
        columns = slice(rank.rank * K // rank.size, (rank.rank + 1) * K // rank.size)
        exact, exact_grads = in_float64(full, x, weight)
        close(own, output[..., columns], exact[..., columns], "output")
        (own * weight[..., columns]).sum().backward()
        assert mine.grad is not None and x.grad is not None
        close(mine.grad, x.grad[part], exact_grads[""][part], "input")
        for name, parameter in parallel.named_parameters():
            grad = full.get_parameter(name).grad
            assert grad is not None
            close(full_grad(parameter), grad, exact_grads[name], name)
            if getattr(parameter, "tensor_slices", None) is None:  # the copies do not drift apart
                own_grad: Any = parameter.grad
                every = ops.all_gather(own_grad.unsqueeze(0), rank.size, rank.group_name)
                assert_same_bits(every, own_grad.expand_as(every).contiguous(), name)
            parameter.grad = full.get_parameter(name).grad = None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("key", RECIPES)
def test_block(ranks: RankPool, key: str, sequence_parallel: bool) -> None:
    ranks.run(check_block, key, sequence_parallel)


def check_same_bits(rank: Rank, key: str) -> None:
    """Where a product is not a sum over ranks it has the bits of the full one: slices are whole blocks."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"recipe": RECIPES[key](), "device": rank.device, "dtype": torch.bfloat16}
    full = tnn.Linear(K, F, **options)
    torch.manual_seed(1)
    group = {"tp_group": rank.group, "sequence_parallel": True}
    column = tnn.Linear(K, F, **options, parallel_mode="column", **group)
    x, weight = (drawn(ROWS, n, seed=n, device=rank.device) for n in (K, F))
    rows = slice(rank.rank * ROWS // rank.size, (rank.rank + 1) * ROWS // rank.size)
    columns = slice(rank.rank * F // rank.size, (rank.rank + 1) * F // rank.size)
    output, own = full(x), column(x[rows])
    assert_same_bits(own, output[:, columns].contiguous(), "output")
    (output * weight).sum().backward()
    (own * weight[:, columns]).sum().backward()
    for name, parameter in column.named_parameters():
        assert_same_bits(full_grad(parameter), full.get_parameter(name).grad, name)


@pytest.mark.parametrize("key", ["bf16", "fp8_block", "mxfp8"])
def test_same_bits(ranks: RankPool, key: str) -> None:
    ranks.run(check_same_bits, key)


def check_bias(rank: Rank) -> None:
    """Added once, or returned; its gradient is the same on all ranks, also where each has other rows."""
    for sequence_parallel in (False, True):
        options: dict[str, Any] = {"device": rank.device, "tp_group": rank.group, "parallel_mode": "row"}
        options["sequence_parallel"] = sequence_parallel
        layer, returns = tnn.Linear(8, 4, **options), tnn.Linear(8, 4, return_bias=True, **options)
        returns.load_state_dict(layer.state_dict())
        x = torch.ones(4 * rank.size, 8 // rank.size, device=rank.device)
        output = layer(x)
        without, bias = returns(x)
        torch.testing.assert_close(without + bias, output)
        factors = (torch.arange(output.numel(), device=rank.device) + rank.rank).view(output.shape).float()
        if not sequence_parallel:
            factors -= rank.rank
        want = ops.all_reduce(factors.sum(0), *(rank.size, rank.group_name) if sequence_parallel else ())
        for each, result in ((layer, output), (returns, without + bias)):
            (result * factors).sum().backward()
            torch.testing.assert_close(each.bias.grad, want)
            exact = (torch.ones(4 * rank.size, 8) @ full_weight(each.weight).t().cpu()) + each.bias.cpu()
            exact = exact.tensor_split(rank.size)[rank.rank] if sequence_parallel else exact
            torch.testing.assert_close(result.cpu(), exact)


def test_bias(ranks: RankPool) -> None:
    ranks.run(check_bias)


def check_main_grad(rank: Rank, key: str) -> None:
    """Gradients in main_grad, over two micro-batches, are the sums of those in grad."""
    torch.manual_seed(3)
    parallel = {"tp_group": rank.group, "sequence_parallel": True}
    plain = Block(RECIPES[key](), rank.device, **parallel)
    fused = Block(RECIPES[key](), rank.device, **parallel)
    fused.load_state_dict(plain.state_dict())
    weights = ["up.weight", "down.weight", "out.weight"]
    for name in weights:
        fused.get_submodule(name.rsplit(".", 1)[0]).fuse_wgrad_accumulation = True
        parameter: Any = fused.get_parameter(name)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=rank.device)
    sums = dict.fromkeys(weights, 0.0)
    for seed in (4, 5):
        x = drawn(ROWS // rank.size, K, seed=10 * seed + rank.rank, device=rank.device)
        for block in (plain, fused):
            block.zero_grad()
            block(x).float().square().mean().backward()
        for name in weights:
            sums[name] = sums[name] + plain.get_parameter(name).grad.float()  # type: ignore[union-attr, assignment]
    for name in weights:
        added: Any = fused.get_parameter(name).main_grad
        assert relative(added, sums[name]) < 2**-8  # the others were rounded to bfloat16 first
        assert fused.get_parameter(name).grad is None


@pytest.mark.parametrize("key", ["bf16", "fp8_block"])
def test_main_grad(pair: RankPool, key: str) -> None:
    pair.run(check_main_grad, key)


def check_compiled(rank: Rank, backend: str, sequence_parallel: bool) -> None:
    _, block = twins(rank, "fp8_block" if backend == "aot_eager" else "bf16", sequence_parallel)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    rows = ROWS // rank.size if sequence_parallel else ROWS
    for step in range(2):
        x = drawn(rows, K, seed=step * 10 + (rank.rank if sequence_parallel else 0), device=rank.device)
        results = []
        for model in (block, compiled):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            output = model(leaf)
            output.float().square().mean().backward()
            grads = [p.grad for p in block.parameters()]
            results.append([output.detach(), leaf.grad, *grads])
        for got, want in zip(*results, strict=True):
            if backend == "aot_eager":
                assert_same_bits(got, want)
            else:
                assert relative(got, want) < 2e-2  # what is fused is not rounded between


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(pair: RankPool, backend: str, sequence_parallel: bool) -> None:
    pair.run(check_compiled, backend, sequence_parallel)


def check_graph(rank: Rank, sequence_parallel: bool) -> None:
    """A captured forward and backward, replayed with other values."""
    from tests.ops.on_gpu import captured

    _, block = twins(rank, "fp8_block", sequence_parallel)
    rows = ROWS // rank.size if sequence_parallel else ROWS
    x = torch.zeros(rows, K, dtype=torch.bfloat16, device=rank.device, requires_grad=True)

    results: list[Tensor] = []

    def step() -> list[Tensor]:
        for tensor in (x, *block.parameters()):
            tensor.grad = None
        output = block(x)
        output.float().square().mean().backward()
        results[:] = [output.detach(), *(t.grad for t in (x, *block.parameters()) if t.grad is not None)]
        return results

    graph = captured(step, "thread_local")
    captured_results = list(results)
    for seed in (1, 2, 3):
        with torch.no_grad():
            x.copy_(
                drawn(rows, K, seed=10 * seed + (rank.rank if sequence_parallel else 0), device=rank.device)
            )
        graph.replay()
        got = [each.clone() for each in captured_results]
        for one, want in zip(got, step(), strict=True):
            assert_same_bits(one, want)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_graph(pair_of_gpus: RankPool, sequence_parallel: bool) -> None:
    pair_of_gpus.run(check_graph, sequence_parallel)
