"""Clipping of a mixture whose experts are spread over ranks: the norm and gradients of one rank, in every recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import transformer_plugin as tp
from tests.parallel.test_moe import EXPERTS, FFN, HIDDEN, LIMITS, TOPK, recipe_of, tokens_of
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

TOKENS = 40
RECIPES = {**LIMITS, "fp8_row": 1e-2, "fp8_delayed": 1e-2}


def mixture(rank: Rank, recipe: str, **placement: Any) -> MoE:
    dispatch = DispatchConfig(max_tokens=TOKENS, alignment=16) if placement else DispatchConfig(alignment=16)
    options: dict[str, Any] = {"bias": True, "device": rank.device, "recipe": recipe_of(recipe)}
    return MoE(HIDDEN, FFN, EXPERTS, TOPK, dispatch=dispatch, **options, **placement)


def one_backward(module: MoE, tokens: Tensor, grad: Tensor) -> None:
    module.zero_grad()
    (module(tokens).output * grad).sum().backward()


def check_clipping_of_experts(rank: Rank, recipe: str, mesh_of_one_dimension: bool) -> None:
    torch.manual_seed(0)
    full = mixture(rank, recipe)
    mesh = init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=("experts",))
    part = mixture(rank, recipe, **({"mesh": mesh} if mesh_of_one_dimension else {"group": rank.group}))
    part.load_state_dict(full.state_dict())
    tokens = torch.cat([tokens_of(r, TOKENS) for r in range(rank.size)]).to(rank.device)
    grad = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(7)).to(rank.device)
    mine = slice(rank.rank * TOKENS, (rank.rank + 1) * TOKENS)
    for norm_type in (2.0, 1.0, math.inf):
        one_backward(full, tokens, grad)
        one_backward(part, tokens[mine], grad[mine])
        dist.all_reduce(part.router.weight.grad)  # replicated, as any parameter outside the experts
        assert all(isinstance(p.grad, DTensor) for p in part.experts.parameters())
        before = {name: p.grad.double() for name, p in full.named_parameters() if p.grad is not None}
        parts = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in before.values()])
        expected = torch.linalg.vector_norm(parts, norm_type)
        got = tp.clip_grad_norm_(part, 0.25 * float(expected), norm_type)
        assert relative_error(got, expected) <= RECIPES[recipe]
        everyone = [torch.empty_like(got) for _ in range(rank.size)]
        dist.all_gather(everyone, got)
        for other in everyone:
            assert_same_bits(got, other)
        assert len(before) == len(list(part.parameters()))
        for name, parameter in part.named_parameters():
            clipped: Any = parameter.grad
            clipped = clipped.full_tensor() if isinstance(clipped, DTensor) else clipped
            assert relative_error(clipped, 0.25 * before[name]) <= 2 * RECIPES[recipe], name


@pytest.mark.parametrize("recipe", RECIPES)
def test_clipping_of_experts(ranks: RankPool, recipe: str) -> None:
    ranks.run(check_clipping_of_experts, recipe, True)


def test_clipping_of_experts_of_a_group(pair: RankPool) -> None:
    pair.run(check_clipping_of_experts, "fp8_block", False)
