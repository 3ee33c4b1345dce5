"""Routers over the whole range of float32: choices, weights and gradients compared with Python's float arithmetic
and with the references, including zero sizes, on CPU and CUDA."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
#: Name, score_function, pre_softmax.
WAYS = (
    ("softmax", "softmax", False),
    ("pre_softmax", "softmax", True),
    ("sigmoid", "sigmoid", False),
    ("sqrtsoftplus", "sqrtsoftplus", False),
)
by_way = pytest.mark.parametrize(("function", "pre_softmax"), [w[1:] for w in WAYS], ids=[w[0] for w in WAYS])
#: num_groups, group_topk, group_score_topk.
GROUPS = ((1, 1, None), (4, 2, None), (4, 2, 1), (4, 3, 2), (4, 4, 3), (16, 8, 1))
both = pytest.mark.parametrize("route", [ops.topk_router, reference.topk_router], ids=["op", "reference"])


def draw(kind: str, tokens: int, experts: int, seed: int = 0) -> Tensor:
    """Draws finite logits: any exponent and sign; far below zero; around zero; or few whole numbers, so that many
    are equal."""
    g = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, experts, generator=g, dtype=torch.float64)
    if kind == "any":
        signs = torch.randint(0, 2, (tokens, experts), generator=g) * 2 - 1
        drawn = (signs * 2.0 ** (uniform * 277 - 149)).clamp(-LARGEST, LARGEST).float()
        edges = torch.tensor(
            [0.0, -0.0, 2**-149, -(2**-149), LARGEST, -LARGEST, -87.4, -88.0, -104.0, -746.0]
        )
        picked = edges[torch.randint(0, len(edges), (tokens, experts), generator=g)]
        return torch.where(torch.rand(tokens, experts, generator=g) < 0.2, picked, drawn)
    if kind == "low":
        return (-1500 * uniform).float()
    if kind == "normal":
        return 3 * torch.randn(tokens, experts, generator=g)
    return torch.randint(-3, 4, (tokens, experts), generator=g).float()


KINDS = ("any", "low", "normal", "whole")
kinds = pytest.mark.parametrize("kind", KINDS)


def log_score(x: float, function: str) -> float:
    """Returns the logarithm of one score, for any logit."""
    if function == "softmax":
        return x
    small = math.exp(-abs(x))
    if function == "sigmoid":
        return min(x, 0.0) - math.log1p(small)
    return x / 2 if x < -37 else math.log(max(x, 0.0) + math.log1p(small)) / 2


def log_slope(x: float, function: str) -> float:
    """The derivative of :func:`log_score`."""
    if function == "softmax":
        return 1.0
    small = math.exp(-abs(x))
    if function == "sigmoid":
        return (small if x > 0 else 1.0) / (1.0 + small)
    if x < -37:
        return 0.5
    return (1.0 if x > 0 else small) / (1.0 + small) / (2 * (max(x, 0.0) + math.log1p(small)))


def expected_row(
    logits: list[float], chosen: list[int], grad: list[float], function: str, pre_softmax: bool
) -> tuple[list[float], list[float]]:
    """Returns the weights of the chosen experts, and the gradient of every logit."""
    among = list(range(len(logits))) if pre_softmax else chosen
    scores = [log_score(x, function) for x in logits]
    alone = function != "softmax" and len(chosen) == 1
    top = max(scores[e] for e in among) if function == "softmax" else 0.0
    terms = {e: math.exp(scores[e] - top) for e in among}
    floor = 0.0 if function == "softmax" else 1e-20  # as in Megatron-LM and transformers
    total = 1.0 if alone else math.fsum(terms.values()) + floor
    weights = {e: term / total for e, term in terms.items()}
    grads = dict(zip(chosen, grad, strict=True))
    dot = 0.0 if alone else math.fsum(grads[e] * weights[e] for e in chosen)
    slopes = [
        weights.get(e, 0.0) * log_slope(x, function) * (grads.get(e, 0.0) - dot) for e, x in enumerate(logits)
    ]
    return [weights[e] for e in chosen], slopes


@kinds
@by_way
@pytest.mark.parametrize("topk", [1, 3, 8])
def test_choices_weights_and_gradients_agree_with_python(
    kind: str, function: str, pre_softmax: bool, topk: int, device: torch.device
) -> None:
    logits = draw(kind, 60, 12)
    leaf = logits.to(device).requires_grad_()
    grad = torch.randn(60, topk, generator=torch.Generator().manual_seed(5))
    weights, indices = ops.topk_router(leaf, None, topk, function, pre_softmax)
    (got,) = torch.autograd.grad(weights, leaf, grad.to(device))
    for t, row in enumerate(logits.tolist()):
        chosen = sorted(range(12), key=lambda e, row=row: (-row[e], e))[:topk]
        assert indices[t].tolist() == chosen
        expected, slopes = expected_row(row, chosen, grad[t].tolist(), function, pre_softmax)
        for value, right in zip(weights[t].tolist(), expected, strict=True):
            assert abs(value - right) <= 2e-6 * abs(right) + 2**-149
        for value, right in zip(got[t].tolist(), slopes, strict=True):
            assert abs(value - right) <= 2e-6 * max(1.0, abs(right))


@kinds
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_of_all_experts_agree_with_python(kind: str, function: str, device: torch.device) -> None:
    logits = draw(kind, 60, 33)
    leaf = logits.to(device).requires_grad_()
    grad = torch.randn(60, 33, generator=torch.Generator().manual_seed(5))
    scores = ops.router_scores(leaf, function)
    (got,) = torch.autograd.grad(scores, leaf, grad.to(device))
    for t, row in enumerate(logits.tolist()):
        everyone = list(range(33))
        expected, slopes = expected_row(row, everyone, grad[t].tolist(), function, False)
        for value, right in zip(scores[t].tolist(), expected, strict=True):
            assert abs(value - right) <= 2e-6 * abs(right) + 2**-149
        for value, right in zip(got[t].tolist(), slopes, strict=True):
            assert abs(value - right) <= 2e-6 * max(1.0, abs(right))


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@by_way
def test_reference_and_op_agree(
    function: str, pre_softmax: bool, groups: tuple, tokens: int, device: torch.device
) -> None:
    """Every routing option, with and without a bias, with masked experts; gradients are finite."""
    generator = torch.Generator().manual_seed(3)
    biases = (
        (None,) if function == "softmax" else (None, torch.zeros(16), torch.randn(16, generator=generator))
    )
    num_groups, group_topk, score_topk = groups
    for kind in KINDS:
        logits = draw(kind, tokens, 16, seed=4)
        logits = logits.masked_fill(torch.rand(tokens, 16, generator=generator) < 0.3, -INF)
        for bias in biases:
            options = (4, function, pre_softmax, num_groups, group_topk, 2.5, score_topk)
            here = logits.to(device).requires_grad_()
            there = logits.clone().requires_grad_()
            got = ops.topk_router(here, None if bias is None else bias.to(device), *options)
            expected = reference.topk_router(there, bias, *options)
            assert_same_bits(got[1], expected[1], "indices")
            torch.testing.assert_close(got[0].cpu(), expected[0], rtol=2e-6, atol=2**-149)
            grad = torch.randn(got[0].shape, generator=generator)
            (a,) = torch.autograd.grad(got[0], here, grad.to(device))
            (b,) = torch.autograd.grad(expected[0], there, grad)
            assert bool(a.isfinite().all()) and bool(b.isfinite().all())
            torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_reference_and_op_agree_on_scores(function: str, tokens: int, device: torch.device) -> None:
    for kind in KINDS:
        logits = draw(kind, tokens, 9, seed=6)
        logits[:, 4:] = logits[:, 4:].masked_fill(logits[:, 4:] < 0, -INF)
        here, there = logits.to(device).requires_grad_(), logits.clone().requires_grad_()
        got, expected = ops.router_scores(here, function), reference.router_scores(there, function)
        torch.testing.assert_close(got.cpu(), expected, rtol=2e-6, atol=2**-149)
        (a,) = torch.autograd.grad(got.square().sum(), here)
        (b,) = torch.autograd.grad(expected.square().sum(), there)
        assert bool(a.isfinite().all()) and bool(b.isfinite().all())
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=2e-6)


@both
def test_largest_of_very_small_scores_are_chosen(route, device: torch.device) -> None:
    logits = torch.tensor([[0.0, -200.0, -100.0, -90.0]], device=device)
    weights, indices = route(logits, None, 2, "softmax", True)
    assert indices.tolist() == [[0, 3]] and weights[0, 0].item() == 1.0
    assert weights[0, 1].item() == pytest.approx(math.exp(-90.0), abs=2**-149)
    for far in (-LARGEST, -1000.0):  # its score is 0 in float64 too
        assert route(torch.tensor([[0.0, far, far / 2, far]]), None, 2, "softmax", True)[1].tolist() == [
            [0, 2]
        ]
    tied = torch.tensor([[30.0, 20.0, 40.0]], device=device)  # all scores round to 1
    assert route(tied, None, 3, "sigmoid")[1].tolist() == [[2, 0, 1]]


@both
def test_weights_of_very_small_scores(route, device: torch.device) -> None:
    """Scores near the smallest float32 numbers have exact weights, including the 1e-20 that is added to their sum."""
    weights, _ = route(torch.tensor([[-88.0, -95.0]], device=device), None, 2, "sqrtsoftplus")
    a, b = math.exp(-44.0), math.exp(-47.5)
    expected = torch.tensor([[a / (a + b + 1e-20), b / (a + b + 1e-20)]])  # 0.863 and 0.026
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=0)
    weights, _ = route(torch.full((1, 8), -50.0, device=device), None, 2, "sigmoid")
    score = math.exp(-50.0)
    expected = torch.full((1, 2), score / (2 * score + 1e-20))  # 0.019
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=0)
    for function in ("sigmoid", "sqrtsoftplus"):
        weights, indices = route(
            torch.tensor([[-LARGEST, -2000.0, -3000.0]], device=device), None, 2, function
        )
        assert indices.tolist() == [[1, 2]] and weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [(1, 1, None), (4, 2, 1), (4, 2, 2)], ids=str)
def test_bias_of_zeros_equals_no_bias(function: str, groups: tuple, device: torch.device) -> None:
    num_groups, group_topk, score_topk = groups
    for kind in ("any", "normal", "whole"):
        logits = draw(kind, 300, 16).to(device)
        options = (4, function, False, num_groups, group_topk, 1.0, score_topk)
        plain = ops.topk_router(logits, None, *options)
        biased = ops.topk_router(logits, torch.zeros(16, device=device), *options)
        for a, b in zip(plain, biased, strict=True):
            assert_same_bits(a, b)


@both
@by_way
def test_rows_with_nan_and_inf(route, function: str, pre_softmax: bool, device: torch.device) -> None:
    """NaN and +inf rank first, the chosen experts are distinct, and the weights are 0 if all experts are masked."""
    logits = torch.tensor(
        [[-1e30, INF, NAN, -INF], [3.0, -INF, INF, 1e38], [-INF, -INF, -INF, -INF]], device=device
    )
    weights, indices = route(logits, None, 3, function, pre_softmax)
    assert indices.tolist() == [[2, 1, 0], [2, 3, 0], [0, 1, 2]]
    assert bool(weights[0, 0].isnan()) and weights[2].tolist() == [0.0, 0.0, 0.0]
    if function == "softmax":
        assert bool(weights[1].isnan().all())
    elif function == "sigmoid":
        torch.testing.assert_close(weights[1].sum().item(), 1.0)
    else:
        assert bool(weights[1, 0].isnan()) and weights[1, 1:].tolist() == [0.0, 0.0]


@pytest.mark.gpu
@kinds
@by_way
def test_cuda_gives_the_bits_of_the_cpu(kind: str, function: str, pre_softmax: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = draw(kind, 200, 64, seed=9).clamp(-3e38, 3e38).to(dtype)  # finite in bfloat16 too
        grad = torch.randn(200, 4)
        for groups in ((1, 1, None), (8, 4, 2), (8, 4, 1), (8, 2, None)):
            for bias in (None,) if function == "softmax" else (None, torch.randn(64)):
                options = (4, function, pre_softmax, *groups[:2], 2.5, groups[2])
                expected = ops.topk_router(logits, bias, *options)
                got = ops.topk_router(logits.cuda(), None if bias is None else bias.cuda(), *options)
                for a, b in zip(got, expected, strict=True):
                    assert_same_bits(a, b)
                assert_same_bits(
                    ops.topk_router_backward(grad.cuda(), logits.cuda(), got[1], function, pre_softmax, 2.5),
                    ops.topk_router_backward(grad, logits, expected[1], function, pre_softmax, 2.5),
                )
        wide = torch.randn(200, 64)
        assert_same_bits(ops.router_scores(logits.cuda(), function), ops.router_scores(logits, function))
        assert_same_bits(
            ops.router_scores_backward(wide.cuda(), logits.cuda(), function),
            ops.router_scores_backward(wide, logits, function),
        )
