"""The norm of gradients over ranks, compared with torch's on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import transformer_plugin as tp
from tests.parallel.sharded_model import (
    assert_gradients,
    everything,
    full_block,
    one_step,
    sharded_block,
    wanted_gradients,
)
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def check_clipping(rank: Rank) -> None:
    full = full_block(rank.device)
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        block = sharded_block(full, rank.device, group=rank.group)
        model = tp.parallel.data_parallel(block)
        one_step(rank, model)
        wanted = wanted_gradients(full, rank.size)
        leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in wanted.values()]
        for leaf, gradient in zip(leaves, wanted.values(), strict=True):
            leaf.grad = gradient
        max_norm = 0.5 * float(torch.nn.utils.clip_grad_norm_(leaves, math.inf, norm_type))
        expected = torch.nn.utils.clip_grad_norm_(leaves, max_norm, norm_type)
        got = tp.clip_grad_norm_(block.parameters(), max_norm, norm_type)
        assert type(got) is torch.Tensor and got.dim() == 0
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        assert_gradients(block, wanted)
        everyone = [torch.empty_like(got) for _ in range(rank.size)]
        dist.all_gather(everyone, got)
        for other in everyone:
            assert_same_bits(got, other)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        for value, of_norm in ((math.nan, math.isnan), (math.inf, math.isinf)):
            if rank.rank == rank.size - 1:
                block.moe.experts.fc1.weight.grad.to_local()[0, 0, 0] = value
            assert of_norm(float(tp.clip_grad_norm_(block, math.inf, norm_type)))
            with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected a finite norm of order"):
                tp.clip_grad_norm_(block, 1.0, norm_type, error_if_nonfinite=True)
            one_step(rank, model)
            model.zero_grad()
            one_step(rank, model)


def test_clipping(ranks: RankPool) -> None:
    ranks.run(check_clipping)


def check_clipping_of_placements(rank: Rank) -> None:
    """Each element and each copy counts once, on meshes of one and two dimensions."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("a", "b"))
    full = torch.arange(1.0, 33.0, device=rank.device).view(8, 4)
    total = 0.0
    parameters = []
    cases: list[tuple[DeviceMesh, list[Any]]] = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(1), Replicate()]),
        (mesh, [Replicate(), Replicate()]),
        (mesh["a"], [Shard(0)]),
        (mesh["b"], [Shard(1)]),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for place, placements in [*cases, (None, [])]:
            value = full.to(dtype)
            if place is not None:
                value = torch.distributed.tensor.distribute_tensor(value, place, placements)
            parameter = torch.nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
            parameters.append(parameter)
            total += float(full.double().square().sum())
    norm = tp.clip_grad_norm_(
        iter(parameters + parameters), 1.0
    )  # a parameter that is passed twice counts once
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(math.sqrt(total), rel=1e-6)
    for parameter in parameters:
        # On CUDA torch rounds the factor to the gradient's dtype too, as in its own clip_grad_norm_: two roundings.
        rounding = 2**-8 * (2 if rank.device.type == "cuda" else 1)
        limit = rounding if parameter.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(
            everything(parameter.grad).float(), full / norm.float(), rtol=limit, atol=0
        )
    parameters[0].grad = DTensor.from_local(full, mesh["a"], [torch.distributed.tensor.Partial()])
    with pytest.raises(ValueError, match="expected gradients without Partial placements"):
        tp.clip_grad_norm_(parameters, 1.0)
    with pytest.raises(
        ValueError, match=r"argument 'norm_type': expected a number above 0, or inf, got 0\.0"
    ):
        tp.clip_grad_norm_(parameters, 1.0, 0)
    assert float(tp.clip_grad_norm_([], 1.0)) == 0.0


def test_clipping_of_placements(four: RankPool) -> None:
    four.run(check_clipping_of_placements)


@pytest.mark.parametrize("marked", [False, True], ids=["no-grad", "grad-to-discard"])
def test_clipping_of_main_grads(marked: bool) -> None:
    """Gradients that a backward added to ``main_grad`` count, and what autograd got in their place does not."""
    torch.manual_seed(0)
    plain, fused = tp.nn.GroupedMLP(2, 8, 16, bias=True), tp.nn.GroupedMLP(2, 8, 16, bias=True)
    fused.load_state_dict(plain.state_dict())
    for layer in (fused.fc1, fused.fc2):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        if marked:
            layer.weight.grad_added_to_main_grad = False
    x, sizes = 10 * torch.randn(5, 8), torch.tensor([2, 3])
    for experts in (plain, fused):
        experts(x, sizes, torch.ones(5)).square().sum().backward()
    if marked:
        fused.fc1.weight.grad.fill_(math.nan)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert expected > 1
    torch.testing.assert_close(tp.clip_grad_norm_(fused, 1.0), expected)
    for layer, other in ((fused.fc1, plain.fc1), (fused.fc2, plain.fc2)):
        torch.testing.assert_close(layer.weight.main_grad, other.weight.grad)
        torch.testing.assert_close(layer.bias.grad, other.bias.grad)


def check_clipping_of_sharded_main_grads(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    full = torch.arange(1.0, 17.0, device=rank.device).view(4, 4)
    weight: Any = torch.nn.Parameter(torch.distributed.tensor.distribute_tensor(full, mesh, [Shard(0)]))
    weight.main_grad = weight.detach().to_local().clone()
    norm = tp.clip_grad_norm_(weight, 1.0)
    torch.testing.assert_close(norm, full.norm())
    everyone = DTensor.from_local(weight.main_grad, mesh, [Shard(0)]).full_tensor()
    torch.testing.assert_close(everyone, full / full.norm())
    before = weight.main_grad.clone()
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(ValueError, match="expected 'grad_added_to_main_grad' on a DTensor"):
        tp.clip_grad_norm_(weight, 0.1)
    assert_same_bits(weight.main_grad, before)
    weight.grad_added_to_main_grad = True
    tp.clip_grad_norm_(weight, 0.1)
    torch.testing.assert_close(weight.main_grad, before / 10)


def check_clipping_of_main_grads_of_experts(rank: Rank) -> None:
    """With the flag of Megatron, experts over ranks have the norm of a layer without main_grad."""
    norms = []
    for fused in (False, True):
        torch.manual_seed(0)
        dispatch = tp.nn.DispatchConfig(max_tokens=8)
        moe = tp.nn.MoE(16, 8, 4, 2, group=rank.group, dispatch=dispatch, device=rank.device)
        for layer in (moe.experts.fc1, moe.experts.fc2):
            layer.fuse_wgrad_accumulation = fused
            if fused:
                layer.weight.main_grad = torch.zeros_like(layer.weight.to_local()).detach()
                layer.weight.grad_added_to_main_grad = False
        generator = torch.Generator().manual_seed(rank.rank)
        moe(torch.randn(8, 16, generator=generator).to(rank.device)).output.square().sum().backward()
        norms.append(tp.clip_grad_norm_(moe.experts, 1.0))
    torch.testing.assert_close(*norms)


def test_clipping_of_main_grads_of_experts(pair: RankPool) -> None:
    pair.run(check_clipping_of_main_grads_of_experts)


def test_clipping_of_sharded_main_grads(ranks: RankPool) -> None:
    ranks.run(check_clipping_of_sharded_main_grads)


def test_norm_of_nothing_is_float32() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tp.clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("max_norm", [1.0, 1, torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("norm_type", [2, "inf", math.inf, torch.tensor(2.0)], ids=repr)
def test_arguments_that_torch_takes(max_norm: Any, norm_type: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 8)) for _ in range(2)]
    results = []
    for clip in (tp.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.arange(32.0).view(4, 8) - 10 * i
        results.append([clip(parameters, max_norm, norm_type), *(p.grad for p in parameters)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected)


def test_clipping_reads_nothing() -> None:
    with FakeTensorMode():  # its tensors have no values to read
        parameters = [torch.nn.Parameter(torch.empty(3, dtype=d)) for d in (torch.float32, torch.bfloat16)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        for norm_type in (2.0, math.inf):
            assert tp.clip_grad_norm_(parameters, 1.0, norm_type).shape == ()
        with pytest.raises(DataDependentOutputException):
            tp.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


@pytest.mark.gpu
def test_clipping_waits_for_nothing() -> None:
    parameters = [
        torch.nn.Parameter(torch.ones(3, dtype=d, device="cuda")) for d in (torch.float32, torch.bfloat16)
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    tp.clip_grad_norm_(parameters, 1.0)  # the first call loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = [tp.clip_grad_norm_(parameters, 1.0, p) for p in (2.0, math.inf)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(norm) for norm in norms] == pytest.approx([1.0, 6**-0.5], rel=1e-2)
