"""A backward that torch compiles, of layers whose forward ran eagerly: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd

import transformer_plugin as tp
from transformer_plugin.testing.numerics import assert_same_bits


def mixture() -> torch.nn.Module:
    return tp.nn.MoE(32, 64, num_experts=4, topk=2)


def dense() -> torch.nn.Module:
    return torch.nn.Sequential(tp.nn.LayerNormLinear(32, 64), tp.nn.RMSNorm(64), tp.nn.Linear(64, 32))


def gradients(model: torch.nn.Module, is_compiled: bool) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output: Any = model(x)
    loss = (output if isinstance(output, torch.Tensor) else output[0]).square().sum()
    if is_compiled:
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
    else:
        loss.backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("make", [mixture, dense])
def test_backward_of_an_eager_forward(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    expected = gradients(model, False)
    got = gradients(model, True)
    assert len(got) == len(expected) > 3
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
