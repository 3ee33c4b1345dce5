"""Experts with other activations than SwiGLU over ranks: expert parallelism and tensor parallelism equal one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_moe import EXPERTS, FFN, HIDDEN, TOPK, tokens_of
from transformer_plugin.activations import FUNCTIONS
from transformer_plugin.nn import DispatchConfig, GroupedMLP, MoE
from transformer_plugin.recipes import recipe_from_name
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import relative_error

#: With numbers and alternating columns, each function, and with that the one without a gate.
ACTIVATIONS = ("swiglu:interleave=1,limit=0.2,alpha=1.702,offset=1", *FUNCTIONS[1:])
TOKENS = 24
LIMITS = {"none": 2e-6, "fp8_block": 1e-2}


def as_local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def check_expert_parallel(rank: Rank, activation: str, recipe: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "activation": activation,
        "device": rank.device,
        "recipe": recipe_from_name(recipe),
    }
    full = MoE(HIDDEN, FFN, EXPERTS, TOPK, **options)
    part = MoE(
        HIDDEN, FFN, EXPERTS, TOPK, group=rank.group, dispatch=DispatchConfig(max_tokens=TOKENS), **options
    )
    assert part.experts.activation == full.activation and part.experts.num_groups == EXPERTS // rank.size
    here = slice(rank.rank * EXPERTS // rank.size, (rank.rank + 1) * EXPERTS // rank.size)
    state = full.state_dict()
    part.load_state_dict({k: v[here] if k.startswith("experts.") else v for k, v in state.items()})
    everything = torch.cat([tokens_of(r, TOKENS) for r in range(rank.size)]).to(rank.device).requires_grad_()
    mine = slice(rank.rank * TOKENS, (rank.rank + 1) * TOKENS)
    input = everything.detach()[mine].requires_grad_()
    output, own = full(everything).output, part(input).output
    wanted = torch.autograd.grad(output.square().sum(), [everything, *full.experts.parameters()])
    got = torch.autograd.grad(own.square().sum(), [input, *part.experts.parameters()])
    pairs = [(own.detach(), output.detach()[mine]), (got[0], wanted[0][mine])]
    pairs += [(as_local(one), other[here]) for one, other in zip(got[1:], wanted[1:], strict=True)]
    for one, other in pairs:
        assert other.any() and relative_error(one, other) <= LIMITS[recipe]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", list(LIMITS))
def test_expert_parallel(pool: RankPool, activation: str, recipe: str) -> None:
    pool.run(check_expert_parallel, activation, recipe)


def check_tensor_parallel(rank: Rank, activation: str) -> None:
    groups, sizes = 3, torch.tensor([5, 0, 9], device=rank.device)
    layers = []
    for options in ({}, {"tp_group": rank.group}):
        torch.manual_seed(0)
        layer = GroupedMLP(groups, HIDDEN, FFN, activation=activation, device=rank.device, **options)  # type: ignore[arg-type]
        layers.append(layer)
    full, part = layers
    assert part.ffn_hidden * rank.size == full.ffn_hidden == FFN
    x, probs = tokens_of(0, 14).to(rank.device), torch.linspace(0.1, 1, 14, device=rank.device)
    found = []
    for layer in layers:
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        output = layer(leaves[0], sizes, leaves[1])
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        assert other.any() and relative_error(one, other) <= 1e-5


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swiglu:limit=0.2"])
def test_tensor_parallel(pool: RankPool, activation: str) -> None:
    pool.run(check_tensor_parallel, activation)
