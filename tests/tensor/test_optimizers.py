"""Optimizers of torch over values as parameters: the same bits as over plain parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import transformer_plugin as tp
from tests.tensor.values import bytes_of, numbers
from transformer_plugin.tensor import GroupedTensor

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"foreach": False, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"foreach": False, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.RMSprop, {"foreach": True, "weight_decay": 0.1, "centered": True}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.Adamax, {"foreach": True}),
    (torch.optim.NAdam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"foreach": True, "weight_decay": 0.1}),
]


def step(parameters: list[Any], x: Tensor, group_sizes: Tensor) -> Tensor:
    """The gradients of a product and of a plain parameter beside it."""
    weight, scale = parameters
    loss: Tensor = (tp.grouped_gemm(x, weight, group_sizes) * scale).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("i", range(len(OPTIMIZERS)))
def test_same_bits_as_plain_parameters(i: int, device: torch.device) -> None:
    make, options = OPTIMIZERS[i]
    data, x = torch.randn(4, 8, 16, device=device), torch.randn(10, 16, device=device)
    scale = torch.randn(8, device=device)
    group_sizes = torch.tensor([3, 0, 5, 1], device=device)
    ours: list[Any] = [Parameter(GroupedTensor(data.clone())), Parameter(scale.clone())]
    plain: list[Any] = [Parameter(data.clone()), Parameter(scale.clone())]
    address = ours[0].data_ptr()
    optimizers = [make(parameters, lr=0.05, **options) for parameters in (ours, plain)]
    for _ in range(3):
        losses = [step(parameters, x, group_sizes) for parameters in (ours, plain)]
        assert torch.equal(*losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(ours[0].packed(), plain[0]) and torch.equal(ours[1], plain[1])
    assert not torch.equal(plain[0], data) and ours[0].data_ptr() == address
    states = [state for state in optimizers[0].state_dict()["state"][0].values() if isinstance(state, Tensor)]
    assert all(type(state) is Tensor for state in states)
    optimizers[0].load_state_dict(optimizers[0].state_dict())


def test_clipping_and_averages(device: torch.device) -> None:
    data = torch.randn(4, 8, 16, device=device)
    ours: Any = Parameter(GroupedTensor(data.clone()))
    plain: Any = Parameter(data.clone())
    for p in (ours, plain):
        (p.packed() if isinstance(p, GroupedTensor) else p).pow(3).sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_([p], 1.0) for p in (ours, plain)]
    assert torch.equal(*norms) and ours.grad is not None and plain.grad is not None
    assert torch.equal(ours.grad, plain.grad)
    modules: list[Any] = []
    for p in (ours, plain):
        module = torch.nn.Module()
        module.weight = p
        average = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        average.update_parameters(module)
        with torch.no_grad():
            p.mul_(3)
        average.update_parameters(module)
        modules.append(average.module)
    assert type(modules[0].weight) is GroupedTensor
    assert torch.equal(modules[0].weight.packed(), modules[1].weight)
    assert modules[0].weight.data_ptr() != ours.data_ptr()


def test_scaled_gradients(device: torch.device) -> None:
    p: Any = Parameter(GroupedTensor(torch.randn(2, 4, 8, device=device)))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = torch.GradScaler(device.type, init_scale=8.0)
    before = p.detach().packed().clone()
    scaler.scale(p.packed().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p.detach().packed(), before - 1)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_quantized_parameters_are_refused(options: dict[str, Any], device: torch.device) -> None:
    p = Parameter(tp.quantize(numbers("stack", device), "fp8_block"))
    p.grad = torch.ones(p.shape, dtype=p.dtype, device=device)
    before = bytes_of(p)
    optimizer = torch.optim.AdamW([p], **options)
    with pytest.raises(ValueError, match="values in high precision"):
        optimizer.step()
    assert all(torch.equal(old, bytes_of(p)[name]) for name, old in before.items())
