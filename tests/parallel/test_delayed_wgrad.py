"""Delayed weight gradients of experts over ranks: the bits of a layer that does not delay them, in DTensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def check_gradients(rank: Rank, dtensor: bool) -> None:
    torch.manual_seed(0)
    delayed = MoE(
        32,
        64,
        4,
        2,
        group=rank.group,
        dispatch=DispatchConfig(max_tokens=24),
        dtensor=dtensor,
        device=rank.device,
        recipe=Float8BlockScaling(),
        delay_wgrad_compute=True,
    )
    usual = copy.deepcopy(delayed)
    usual.delay_wgrad_compute = False
    for layer in (delayed, usual):
        for seed in range(2):
            generator = torch.Generator().manual_seed(10 * rank.rank + seed)
            x = torch.randn(24, 32, generator=generator).to(rank.device)
            layer(x).output.square().mean().backward()
    before = delayed.experts.fc1.weight.grad
    # Some versions of DTensor.to_local() turn a missing gradient into zeros.
    if dtensor and before is not None:
        assert not bool(before.to_local().any())
    else:
        assert before is None
    delayed.backward_dw()
    for (name, got), wanted in zip(delayed.named_parameters(), usual.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None, name
        assert isinstance(got.grad, DTensor) == isinstance(wanted.grad, DTensor), name
        if isinstance(got.grad, DTensor) and isinstance(wanted.grad, DTensor):
            assert got.grad.placements == wanted.grad.placements, name
            assert got.grad.shape == wanted.grad.shape, name
            assert_same_bits(got.grad.to_local(), wanted.grad.to_local(), name)
        else:
            assert_same_bits(got.grad, wanted.grad, name)


@pytest.mark.parametrize("dtensor", [True, False])
def test_experts_over_ranks(pair: RankPool, dtensor: bool) -> None:
    pair.run(check_gradients, dtensor)
