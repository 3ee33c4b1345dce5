"""topk_router_with_load: the bits of topk_router and of count_tokens_per_expert, and a zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.nn import RouterConfig, TopKRouter
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.launches import launched
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.routing_cases import (
    MASKED_GROUP_RULES,
    Router,
    group_rule_cases,
    topk_router_cases,
)

_op = torch.ops.transformer_plugin.topk_router_with_load.default
CASES = [*topk_router_cases(), *group_rule_cases(), *group_rule_cases(MASKED_GROUP_RULES)]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
#: Around the number of tokens from which larger blocks count, and with the kernel that takes all sizes.
MANY = (
    Router("2047", 2047, 64, 8),
    Router("2048", 2048, 128, 8, dtype=torch.bfloat16),
    Router("20000", 20000, 256, 8, "sigmoid", groups=(8, 4), bias=True),
    Router("1024-experts", 3000, 1024, 4, pre_softmax=True),
    Router("1024-experts-all", 3, 1024, 1024, "sigmoid", groups=(1024, 1024), bias=True),
)


def check(got: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    weights, indices, load, aux_loss = got
    expected_weights, expected = ops.topk_router(*arguments)
    assert_same_bits(weights, expected_weights, "weights")
    assert_same_bits(indices, expected, "indices")
    assert_same_bits(load, ops.count_tokens_per_expert(expected, arguments[0].shape[1]), "load")
    assert_same_bits(aux_loss, torch.zeros((), device=arguments[0].device), "aux_loss")


@by_case
def test_bits_of_the_separate_ops(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    check(ops.topk_router_with_load(*arguments), arguments)


@by_case
def test_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    weights, *rest = ops.topk_router_with_load(*case.arguments(device))
    expected_weights, *expected = reference.topk_router_with_load(*case.arguments())
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=3e-6, atol=1e-30)
    for got, wanted in zip(rest, expected, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("router", MANY, ids=lambda router: router.name)
def test_many_tokens_and_many_experts(router: Router, device: torch.device) -> None:
    arguments = router.make(device, torch.Generator().manual_seed(0))
    got = ops.topk_router_with_load(*arguments)
    check(got, arguments)
    assert int(got[2].sum()) == router.tokens * router.topk
    for again in (ops.topk_router_with_load(*arguments) for _ in range(3)):
        for a, b in zip(again, got, strict=True):
            assert_same_bits(a, b)


def test_the_zero_is_float32_with_any_default_dtype(device: torch.device) -> None:
    logits = torch.zeros(2, 4, device=device)
    torch.set_default_dtype(torch.float64)
    try:
        losses = [
            op(logits, None, 2)[3] for op in (ops.topk_router_with_load, reference.topk_router_with_load)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [loss.dtype for loss in losses] == [torch.float32] * 2


def test_loads_by_hand(device: torch.device) -> None:
    """Ties go to the first experts, NaN and inf are chosen, a mask is not; all tokens may choose one expert."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [0.0, nan, 1.0, 2.0], [-inf, 0.0, -inf, 1.0], [0.0, 1.0, inf, 2.0]],
        device=device,
    )
    assert ops.topk_router_with_load(logits, None, 2)[2].tolist() == [1, 3, 1, 3]
    for experts in (7, 256, 1024):
        same = torch.zeros(5000, experts, device=device)
        same[:, 5] = 1.0
        load = ops.topk_router_with_load(same, None, 1)[2]
        assert load.tolist() == [5000 if expert == 5 else 0 for expert in range(experts)]
    masked = torch.full((3, 8), -inf, device=device)
    assert ops.topk_router_with_load(masked, None, 3)[2].tolist() == [3, 3, 3, 0, 0, 0, 0, 0]


def test_a_bias_and_groups_move_the_load(device: torch.device) -> None:
    logits = torch.zeros(6, 8, device=device)
    bias = torch.zeros(8, device=device)
    bias[6] = 1.0
    assert ops.topk_router_with_load(logits, bias, 2, "sigmoid")[2].tolist() == [6, 0, 0, 0, 0, 0, 6, 0]
    grouped = ops.topk_router_with_load(logits, bias, 2, "sigmoid", False, 4, 1)
    assert grouped[2].tolist() == [0, 0, 0, 0, 0, 0, 6, 6]


@by_case
def test_gradient_is_that_of_topk_router(case: Case, device: torch.device) -> None:
    logits, *options = case.arguments(device)
    leaf = logits.requires_grad_()
    weights, indices, load, aux_loss = ops.topk_router_with_load(leaf, *options)
    assert weights.requires_grad
    assert not (indices.requires_grad or load.requires_grad or aux_loss.requires_grad)
    expected_weights, _ = ops.topk_router(leaf, *options)
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4)).to(device)
    for a, b in zip(
        torch.autograd.grad(weights, leaf, grad),
        torch.autograd.grad(expected_weights, leaf, grad),
        strict=True,
    ):
        assert_same_bits(a, b)


def test_the_zero_is_added_to_a_loss(device: torch.device) -> None:
    logits = torch.randn(9, 8, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(ops.topk_router(logits, None, 2, "sigmoid")[0].square().sum(), logits)

    def routed() -> tuple[Tensor, Tensor]:
        weights, _, _, aux_loss = ops.topk_router_with_load(logits, None, 2, "sigmoid")
        return weights.square().sum(), aux_loss

    loss, aux_loss = routed()
    assert_same_bits(torch.autograd.grad(loss + aux_loss, logits)[0], expected)
    loss, aux_loss = routed()
    aux_loss += loss
    assert_same_bits(torch.autograd.grad(aux_loss, logits)[0], expected)
    loss, aux_loss = routed()
    loss += aux_loss.requires_grad_()
    assert_same_bits(torch.autograd.grad(loss, logits)[0], expected)
    with torch.no_grad():
        assert not ops.topk_router_with_load(logits, None, 2)[0].requires_grad


@by_case
def test_opcheck(case: Case, device: torch.device) -> None:
    logits, *options = case.arguments(device)
    opcheck(_op, (logits, *options))
    if not case.name.startswith("masked") and not bool((logits == -math.inf).any()):
        opcheck(_op, (logits.clone().requires_grad_(), *options))


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    logits = torch.randn(12, 10, device=device).t()
    bias = torch.randn(24, device=device)[::2]
    got = ops.topk_router_with_load(logits, bias, 3, "sigmoid")
    check(got, (logits.contiguous(), bias.contiguous(), 3, "sigmoid"))


def test_errors_name_the_op() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(TypeError) as caught:
        ops.topk_router_with_load(x.double(), None, 2)
    assert str(caught.value).startswith(
        "transformer_plugin::topk_router_with_load: argument 'logits': expected"
    )
    with pytest.raises(ValueError) as refused:
        ops.topk_router_with_load(x, None, 9)
    assert str(refused.value) == (
        "transformer_plugin::topk_router_with_load: argument 'topk': expected from 1 to the 8 experts, got 9. "
        "Choose that many experts for each token."
    )
    with pytest.raises(ValueError, match="argument 'expert_bias': expected None with the softmax"):
        ops.topk_router_with_load(x, torch.zeros(8), 2)


@pytest.mark.gpu
@by_case
def test_cuda_gives_the_bits_of_the_cpu(case: Case) -> None:
    got, expected = (ops.topk_router_with_load(*case.arguments(name)) for name in ("cuda", "cpu"))
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("router", MANY, ids=lambda router: router.name)
def test_a_memset_and_a_kernel(router: Router) -> None:
    arguments = router.make(torch.device("cuda"), torch.Generator().manual_seed(0))
    ops.topk_router_with_load(*arguments)
    names = launched(lambda: ops.topk_router_with_load(*arguments))
    assert len(names) == 2 and names[0].startswith("Memset") and "topk_router" in names[1]


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [64, 300])
@pytest.mark.parametrize("tokens", [0, 50, 4000])
def test_a_replayed_graph_counts_anew(tokens: int, experts: int) -> None:
    logits = torch.randn(tokens, experts, device="cuda")
    ops.topk_router_with_load(logits, None, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.topk_router_with_load(logits, None, 4)
    for seed in range(3):
        logits.copy_(torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)))
        captured[3].fill_(7.0)
        graph.replay()
        check(captured, (logits, None, 4))


class OpsOf(TorchDispatchMode):
    """The names of the ops of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("coeff", [0.0, 0.1])
def test_a_router_is_two_ops_without_an_auxiliary_loss(coeff: float, device: torch.device) -> None:
    router = TopKRouter(16, 8, 2, RouterConfig(aux_loss_coeff=coeff), device=device)
    tokens = torch.randn(5, 16, device=device)
    with OpsOf() as called:
        routing = router(tokens)
    of_loss = ["router_scores", "aux_loss"] if coeff else []
    assert [name for name in called.names if name in dir(ops)] == [
        "router_logits",
        "topk_router_with_load",
        *of_loss,
    ]
    assert coeff or called.names == ["router_logits", "topk_router_with_load"]
    assert_same_bits(routing.expert_load, ops.count_tokens_per_expert(routing.indices, 8))
    assert routing.aux_loss.requires_grad == bool(coeff) and routing.aux_loss.shape == ()
