"""Ops on DTensors: norms and activations, sharded along rows or not, eager and compiled, against plain tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool

Op = Callable[..., Tensor]
#: The operands, and their layouts.
Case = tuple[list[Tensor | None], list[Any]]


@functools.cache
def mesh_of(device: str, ranks: int) -> DeviceMesh:
    """One in each process: torch 2.15 fails to compile a function of DTensors, of its own ops too, on a second mesh of
    the same ranks ("Node tangents_2 was invalid, but is output")."""
    return init_device_mesh(device, (ranks,))


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return ops.rms_norm(x, weight, 1e-5)


def rms_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    output, rstd = ops.rms_norm_forward(x, weight, 1e-5, True)
    return output + rstd.unsqueeze(-1)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return ops.layer_norm(x, weight, bias, 1e-5)


def layer_norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    output, mean, rstd = ops.layer_norm_forward(x, weight, bias, 1e-5, True)
    return output + mean.unsqueeze(-1) * rstd.unsqueeze(-1)


def activation(x: Tensor, probs: Tensor | None) -> Tensor:
    return ops.activation(x, probs)


def compare(rank: Rank, op: Op, cases: list[Case], compiled: bool) -> list[Any]:
    """The outputs and the gradients are those of plain tensors. Returns the layouts of the outputs.

    One graph has the calls of all cases, as compiling a graph takes far longer than one call more in it.
    """
    torch._dynamo.reset()
    mesh = mesh_of(rank.device.type, rank.size)
    distributed = [
        [
            t if t is None else distribute_tensor(t, mesh, [layout]).requires_grad_()
            for t, layout in zip(operands, layouts, strict=True)
        ]
        for operands, layouts in cases
    ]

    def all_calls(cases: list[list[Any]]) -> list[Any]:
        return [op(*operands) for operands in cases]

    run = torch.compile(all_calls, fullgraph=True, backend="aot_eager") if compiled else all_calls
    outputs = run(distributed)
    grads = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(rank.device) for t in outputs
    ]
    torch.autograd.backward(outputs, [distribute_tensor(grad, mesh, [Shard(0)]) for grad in grads])
    for (operands, layouts), parts, got, grad in zip(cases, distributed, outputs, grads, strict=True):
        full = [t if t is None else t.to(rank.device).detach().clone().requires_grad_() for t in operands]
        expected = op(*full)
        torch.testing.assert_close(got.full_tensor(), expected, msg=str(layouts))
        expected.backward(grad)
        for a, b in zip(full, parts, strict=True):
            assert a is None or (a.grad is None) == (b.grad is None)
            if a is not None and a.grad is not None:
                torch.testing.assert_close(
                    b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-5, msg=str(layouts)
                )
    return [got.placements for got in outputs]


def norms(rank: Rank, op: Op, has_bias: bool) -> None:
    """Every layout with each operand there or not. Compiled, where each call takes a second, each layout and each
    set of operands."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 32), torch.randn(32), torch.randn(32)
    pairs = [(weight, bias), (None, bias), (weight, None), (None, None)]
    pairs = pairs if has_bias else pairs[2:]
    layouts: list[Any] = [Shard(0), Replicate(), Shard(1), Shard(2)]
    every: list[Case] = [
        ([x, *pair], [layout, Replicate(), Replicate()]) for layout in layouts for pair in pairs
    ]
    some = [case for i, case in enumerate(every) if i < len(pairs) or i % len(pairs) == 0]
    for compiled, cases in (False, every), (True, some):
        for output, (_, given) in zip(compare(rank, op, cases, compiled), cases, strict=True):
            assert output == (given[0],) or given[0] == Shard(2), "no rows move"


def activations(rank: Rank) -> None:
    torch.manual_seed(0)
    x, probs = torch.randn(6, 32), torch.rand(6)
    cases: list[Case] = [
        ([x, given], [layout, of_probs])
        for layout in (Replicate(), Shard(0), Shard(1))
        for of_probs in (Replicate(), Shard(0))
        for given in (probs, None)
    ]
    for compiled in (False, True):
        for output, (_, (of_x, of_probs)) in zip(
            compare(rank, activation, cases, compiled), cases, strict=True
        ):
            assert output == (of_x,) or of_x != of_probs


def gradient_of_no_bias(rank: Rank) -> None:
    """Calls that differ in a flag alone do not share a choice of layouts."""
    mesh = mesh_of(rank.device.type, rank.size)
    torch.manual_seed(0)
    grad, x = torch.randn(2, 4, 32).to(rank.device)
    _, mean, rstd = ops.layer_norm_forward(x, None, None, 1e-5)
    parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (grad, x, mean, rstd)]
    for has_bias in (True, False, True):
        expected = ops.layer_norm_backward(grad, x, None, mean, rstd, False, has_bias)
        got: Any = ops.layer_norm_backward(*parts[:2], None, *parts[2:], False, has_bias)
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a.full_tensor(), b)


def linear_of_formats(rank: Rank) -> None:
    """A product of sharded operands; in formats, of full ones."""
    mesh = mesh_of(rank.device.type, rank.size)
    torch.manual_seed(0)
    x, weight = torch.randn(128, 256).to(rank.device), torch.randn(256, 256).to(rank.device)
    parts = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])
    for format, layout in (("none", Shard(1)), ("fp8_tensor:e4m3", Replicate()), ("none", Shard(1))):
        got: Any = ops.linear(*parts, None, *[format] * 3)
        assert got.placements == (layout,)
        expected = ops.linear(x, weight, None, *[format] * 3)
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-4, atol=1e-4)  # sums in another order


def products(rank: Rank) -> None:
    """gemm in every layout of its operands, with and without a bias, and of replicated quantized operands."""
    mesh = mesh_of(rank.device.type, rank.size)
    torch.manual_seed(0)
    a, b, bias = torch.randn(32, 64), torch.randn(64, 64), torch.randn(64)
    layouts = (Replicate(), Shard(0), Shard(1))
    for of_a, of_b in itertools.product(layouts, layouts):
        parts = distribute_tensor(a, mesh, [of_a]), distribute_tensor(b, mesh, [of_b])
        for transpose_b, row in itertools.product((True, False), (None, bias)):
            full = None if row is None else distribute_tensor(row, mesh, [Replicate()])
            got: Any = ops.gemm(*parts, full, transpose_b)
            expected = a.double() @ (b.double().t() if transpose_b else b.double())
            expected = expected if row is None else expected + row
            torch.testing.assert_close(got.full_tensor().cpu().double(), expected, rtol=1e-4, atol=1e-4)
    for key in ("fp8_tensor", "fp8_block", "mxfp8"):
        options = {"a_format": key, "b_format": key}
        (left, of_left), (right, of_right) = (ops.quantize(x.to(rank.device), key) for x in (a, b))
        expected = ops.gemm(left, right, a_scale=[of_left], b_scale=[of_right], **options)
        tensors = [DTensor.from_local(t, mesh, [Replicate()]) for t in (left, right, of_left, of_right)]
        got = ops.gemm(*tensors[:2], a_scale=tensors[2:3], b_scale=tensors[3:], **options)
        assert got.placements == (Replicate(),) and torch.equal(got.to_local(), expected)


def test_two_ranks(pair: RankPool) -> None:
    for op in (rms_norm, rms_norm_forward):
        pair.run(norms, op, False)
    for op in (layer_norm, layer_norm_forward):
        pair.run(norms, op, True)
    pair.run(activations)
    pair.run(gradient_of_no_bias)
    pair.run(linear_of_formats)
    pair.run(products)
