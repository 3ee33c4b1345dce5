"""Group-limited routing: the rules of DeepSeek-V2, DeepSeek-V3 and Megatron-LM, by hand, with loops over lists, and
with transformers if it is installed."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.nn import RouterConfig, TopKRouter
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.routing_cases import MASKED_GROUP_RULES, group_rule_cases

both = pytest.mark.parametrize("route", [ops.topk_router, reference.topk_router], ids=["op", "reference"])
MASKED = list(group_rule_cases(MASKED_GROUP_RULES))
by_case = pytest.mark.parametrize("case", list(group_rule_cases()), ids=lambda case: case.name)


def choose(values: list[float], topk: int, groups: int, group_topk: int, best: int) -> list[int]:
    """The rule in Python: the score of a group is the sum of its ``best`` largest values."""
    size = len(values) // groups
    worth = [math.fsum(sorted(values[g * size : g * size + size])[-best:]) for g in range(groups)]
    chosen = sorted(range(groups), key=lambda g: (-worth[g], g))[:group_topk]
    experts = [e for g in chosen for e in range(g * size, g * size + size)]
    return sorted(experts, key=lambda e: (-values[e], e))[:topk]


@both
def test_group_score_rules_by_hand(route, device: torch.device) -> None:
    """Group 0 has the best expert, group 1 the best two, group 3 the best three."""
    scores = torch.tensor([0.9, 0.1, 0.1, 0.6, 0.55, 0.2, 0.7, 0.2, 0.1, 0.5, 0.5, 0.5], device=device)[None]
    logits = torch.log(scores / (1 - scores))

    def indices(topk: int, group_topk: int, best: int | None) -> list[int]:
        return route(logits, None, topk, "sigmoid", False, 4, group_topk, 1.0, best)[1][0].tolist()

    assert indices(3, 1, 1) == [0, 1, 2]
    assert indices(3, 1, 2) == [3, 4, 5]
    assert indices(3, 1, 3) == [9, 10, 11]
    assert indices(3, 1, None) == [9, 10, 11]  # 3 // 1
    assert indices(2, 2, 2) == [0, 3]  # sums 1.0, 1.15, 0.9, 1.0: a tie goes to the lowest index
    assert indices(2, 2, None) == indices(2, 2, 1) == [0, 6]
    assert indices(1, 3, 2) == [0]  # fewer experts than groups


@both
def test_experts_of_other_groups_are_not_chosen(route, device: torch.device) -> None:
    """Also with negative choice values: all experts of the chosen group 1 come before the best experts of other
    groups."""
    logits = torch.tensor([[2.0, -9.0, 1.0, 1.0, 0.5, 0.5]], device=device)
    bias = torch.full((6,), -5.0, device=device)
    assert route(logits, bias, 2, "sigmoid", False, 3, 1, 1.0, 2)[1].tolist() == [[2, 3]]
    masked = torch.tensor([[-math.inf, 1.0, 0.0, 0.0, -math.inf, -math.inf]], device=device)
    assert route(masked, bias, 2, "sigmoid", False, 3, 1, 1.0, 1)[1].tolist() == [[1, 0]]


@by_case
def test_choice_agrees_with_loops_and_the_reference(case: Case, device: torch.device) -> None:
    logits, bias, topk, function, pre_softmax, groups, group_topk, _, best = arguments = case.arguments(
        device
    )
    weights, indices = ops.topk_router(*arguments)
    expected = reference.topk_router(*case.arguments())
    assert indices.tolist() == expected[1].tolist()
    torch.testing.assert_close(weights.cpu(), expected[0], rtol=2e-6, atol=0)
    x = logits.double().cpu()
    values = x.softmax(1) if pre_softmax else x if function == "softmax" else x.sigmoid()
    values = values if bias is None else values + bias.double().cpu()
    for row, chosen in zip(values.tolist(), indices.tolist(), strict=True):
        count = topk // group_topk if best is None else best
        assert chosen == choose(row, topk, groups, group_topk, count)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_choice_with_masked_experts_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    weights, indices = ops.topk_router(*case.arguments(device))
    expected = reference.topk_router(*case.arguments())
    assert indices.tolist() == expected[1].tolist()
    torch.testing.assert_close(weights.cpu(), expected[0], rtol=3e-6, atol=1e-30)
    for a, b in zip((weights, indices), ops.topk_router(*case.arguments()), strict=True):
        assert torch.equal(a.cpu(), b)


@by_case
def test_opcheck(case: Case, device: torch.device) -> None:
    logits, *options = case.arguments(device)
    opcheck(torch.ops.transformer_plugin.topk_router.default, (logits, *options))
    opcheck(torch.ops.transformer_plugin.topk_router.default, (logits.clone().requires_grad_(), *options))


@pytest.mark.gpu
@by_case
def test_cuda_gives_the_bits_of_the_cpu(case: Case) -> None:
    for a, b in zip(
        ops.topk_router(*case.arguments("cuda")), ops.topk_router(*case.arguments("cpu")), strict=True
    ):
        assert torch.equal(a.cpu(), b)


def tiny(version: int, topk: int) -> tuple[SimpleNamespace, RouterConfig]:
    """Returns the sizes of a small model in transformers' names, and the corresponding router configuration."""
    sizes = SimpleNamespace(
        num_experts_per_tok=topk, num_local_experts=16, num_experts=16, n_routed_experts=16, hidden_size=24
    )
    sizes.n_group, sizes.topk_group, sizes.norm_topk_prob, sizes.routed_scaling_factor = 4, 2, True, 2.5
    sizes.topk_method = "group_limited_greedy"
    make = RouterConfig.deepseek_v3 if version == 3 else RouterConfig.deepseek_v2
    return sizes, make(num_groups=4, group_topk=2, scaling_factor=2.5)


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("version", [2, 3])
def test_router_agrees_with_transformers(version: int, topk: int) -> None:
    """Compares with loops that repeat the rule of transformers, and also with transformers itself if it is
    installed."""
    torch.manual_seed(version)
    sizes, config = tiny(version, topk)
    router = TopKRouter(24, 16, topk, config)
    if version == 3:
        torch.nn.init.normal_(router.expert_bias, std=0.1)
    tokens = torch.randn(40, 24)
    routing = router(tokens)
    logits = (tokens @ router.weight.T).double().detach()
    for t, row in enumerate(logits.tolist()):
        total = math.fsum(math.exp(x) for x in row)
        scores = [1 / (1 + math.exp(-x)) if version == 3 else math.exp(x) / total for x in row]
        shifts = router.expert_bias.tolist() if version == 3 else [0.0] * 16
        values = [s + b for s, b in zip(scores, shifts, strict=True)]
        chosen = choose(values, topk, 4, 2, best=version - 1)
        among = math.fsum(scores[e] for e in chosen) if version == 3 and topk > 1 else 1.0
        assert routing.indices[t].tolist() == chosen
        right = torch.tensor([2.5 * scores[e] / among for e in chosen])
        torch.testing.assert_close(routing.weights[t].detach(), right, rtol=2e-6, atol=0)
    try:
        module = importlib.import_module(
            f"transformers.models.deepseek_v{version}.modeling_deepseek_v{version}"
        )
    except ImportError:
        return
    check_against(getattr(module, f"DeepseekV{version}TopkRouter")(sizes), router, tokens)


def check_against(theirs: torch.nn.Module, ours: TopKRouter, tokens: Tensor) -> None:
    """Asserts the same experts and weights, in any order. A single expert's weight differs: transformers divides it
    by itself."""
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if ours.expert_bias is not None:
            theirs.e_score_correction_bias.copy_(ours.expert_bias)
        _, weights, indices = theirs(tokens)
        routing = ours(tokens)
    rows = torch.zeros(tokens.shape[0], ours.num_experts)
    expected = rows.scatter(1, indices, weights)
    got = rows.scatter(1, routing.indices.long(), routing.weights)
    assert torch.equal(got != 0, expected != 0)
    if ours.topk > 1 or ours.expert_bias is None:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)
