"""topk_router: cases worked out by hand, float64 results, the reference, ties, masks and NaN, on CPU and CUDA."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits
from transformer_plugin.testing.routing_cases import topk_router_cases

tp = torch.ops.transformer_plugin
CASES = list(topk_router_cases())
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both = pytest.mark.parametrize("route", [ops.topk_router, reference.topk_router], ids=["op", "reference"])
INF, NAN = math.inf, math.nan


def weights_fp64(logits: Tensor, indices: Tensor, function: str, pre_softmax: bool, scaling: float) -> Tensor:
    """The formulas in float64 for experts that are already chosen; differentiable."""
    x = logits.double()
    chosen = x.gather(1, indices.long())
    if function == "softmax":
        terms = torch.exp(x - x.detach().amax(1, keepdim=True)) if pre_softmax else torch.exp(chosen)
        weights = (terms / terms.sum(1, keepdim=True)).nan_to_num(0.0)
        return (weights.gather(1, indices.long()) if pre_softmax else weights) * scaling
    scores = 1 / (1 + torch.exp(-chosen)) if function == "sigmoid" else torch.log1p(torch.exp(chosen)).sqrt()
    if indices.shape[1] > 1:
        scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
    return scores * scaling


@by_name
def test_choice_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    weights, indices = ops.topk_router(*case.arguments(device))
    expected_weights, expected = reference.topk_router(*case.arguments())
    assert indices.dtype == torch.int32 and weights.dtype == torch.float32
    assert_same_bits(indices, expected, "indices")
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=3e-6, atol=1e-30)


@by_name
def test_weights_agree_with_fp64(case: Case, device: torch.device) -> None:
    logits, _, topk, function, pre_softmax, _, _, scaling = arguments = case.arguments(device)
    weights, indices = ops.topk_router(*arguments)
    expected = weights_fp64(logits, indices, function, pre_softmax, scaling)
    assert_close_in_ulp(weights, expected, ulp=16)
    assert bool((indices.long().sort(1).values.diff(dim=1) > 0).all())  # all different
    assert indices.numel() == 0 or (int(indices.min()) >= 0 and int(indices.max()) < logits.shape[1])
    assert weights.shape == (logits.shape[0], topk)


@by_name
def test_gradient_agrees_with_fp64(case: Case, device: torch.device) -> None:
    logits, _, topk, function, pre_softmax, *_, scaling = arguments = case.arguments(device)
    weights, indices = ops.topk_router(logits.requires_grad_(), *arguments[1:])
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4)).to(device)
    (got,) = torch.autograd.grad(weights, logits, grad)
    assert got.dtype == logits.dtype
    x = (
        logits.detach().double().masked_fill(logits == -INF, -1e3).requires_grad_()
    )  # exp(-1e3) is 0 in float64
    wide = weights_fp64(x, indices, function, pre_softmax, scaling)
    (expected,) = torch.autograd.grad(wide, x, grad.double())
    dead = (logits.detach() == -INF).all(1)
    expected = expected.nan_to_num(0.0).masked_fill(dead[:, None], 0.0)
    expected = expected.masked_fill(logits.detach() == -INF, 0.0)
    floor = 2e-6 * scaling * float(grad.abs().max() if grad.numel() else 0)
    narrow = 0.0 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps / 2
    bound = expected.abs() * (narrow + 2e-6) + floor
    if logits.dtype == torch.float16:
        bound = bound + 2.0**-25  # half a unit in the last place of subnormals
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert float(got.abs().sum()) > 0 or topk in (1, 0) or logits.shape[0] == 0


@pytest.mark.gpu
@by_name
def test_cuda_gives_the_bits_of_the_cpu(case: Case) -> None:
    host, device = case.arguments("cpu"), case.arguments("cuda")
    expected, got = ops.topk_router(*host), ops.topk_router(*device)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
    grad = torch.randn(expected[0].shape)
    options = (host[3], host[4], host[7])
    assert_same_bits(
        ops.topk_router_backward(grad.cuda(), device[0], got[1], *options),
        ops.topk_router_backward(grad, host[0], expected[1], *options),
    )


@both
def test_weights_by_hand(route, device: torch.device) -> None:
    logits = torch.log(torch.tensor([[1.0, 4.0, 2.0, 3.0]], device=device))
    weights, indices = route(logits, None, 2)
    assert indices.tolist() == [[1, 3]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[4 / 7, 3 / 7]]))
    weights, _ = route(logits, None, 2, pre_softmax=True)
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.4, 0.3]]))
    weights, _ = route(
        logits, None, 2, "sigmoid", scaling_factor=2.0
    )  # sigmoid(log a) = a / (1 + a): 0.8, 0.75
    torch.testing.assert_close(weights.cpu(), torch.tensor([[1.6, 1.5]]) / 1.55)
    weights, _ = route(logits, None, 1, "sigmoid")
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.8]]))
    weights, _ = route(logits, None, 2, "sqrtsoftplus")  # sqrt(log(1 + a))
    roots = torch.tensor([[math.sqrt(math.log(5)), math.sqrt(math.log(4))]])
    torch.testing.assert_close(weights.cpu(), roots / roots.sum())


@both
def test_bias_affects_the_choice_but_not_the_weights(route, device: torch.device) -> None:
    logits = torch.log(torch.tensor([[1.0, 4.0, 2.0, 3.0]], device=device))
    bias = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device)  # 1.5, 0.8, 0.667, 0.75
    weights, indices = route(logits, bias, 2, "sigmoid")
    assert indices.tolist() == [[0, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.5, 0.8]]) / 1.3)


@both
def test_groups_are_ranked_by_the_sum_of_their_best_experts(route, device: torch.device) -> None:
    """Group 0 holds the best single expert, group 1 the best pair, group 2 the best three."""
    scores = torch.tensor([[0.90, 0.10, 0.10, 0.7, 0.8, 0.1, 0.6, 0.65, 0.6, 0.2, 0.2, 0.2]], device=device)
    logits = torch.log(scores / (1 - scores))
    assert route(logits, None, 4, "sigmoid", num_groups=4, group_topk=2)[1].tolist() == [[4, 3, 7, 6]]
    assert route(logits, None, 2, "sigmoid", num_groups=4, group_topk=2)[1].tolist() == [[0, 4]]
    assert route(logits, None, 3, "sigmoid", num_groups=4, group_topk=1)[1].tolist() == [[7, 6, 8]]
    bias = torch.zeros(12, device=device)
    bias[10:] = 0.6  # the bias also affects groups
    assert route(logits, bias, 4, "sigmoid", num_groups=4, group_topk=2)[1].tolist() == [[4, 10, 11, 3]]


@both
@pytest.mark.parametrize("function", ["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus"])
def test_ties_go_to_the_lowest_index(route, function: str, device: torch.device) -> None:
    pre, function = function == "pre_softmax", function.replace("pre_", "")
    equal = torch.zeros(3, 32, device=device)
    equal[1, ::2] = -0.0
    equal[2, 20:] = 1.0
    weights, indices = route(equal, None, 4, function, pre)
    assert indices.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [20, 21, 22, 23]]
    assert bool((weights == weights[:, :1]).all())
    assert route(equal, None, 4, function, pre, 8, 2)[1].tolist()[0] == [0, 1, 2, 3]
    assert route(equal, None, 4, function, pre, 8, 2)[1].tolist()[2] == [20, 21, 22, 23]


@both
@pytest.mark.parametrize("function", ["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus"])
def test_masked_experts_come_last_with_weight_zero(route, function: str, device: torch.device) -> None:
    pre, function = function == "pre_softmax", function.replace("pre_", "")
    logits = torch.full((3, 8), -INF, device=device)
    logits[0, [2, 5, 7]] = torch.tensor([1.0, 3.0, 2.0], device=device)
    logits[1, 6] = -300.0  # far below every other possible score, but above a masked expert
    bias = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0], device=device) if function in ("sigmoid",) else None
    weights, indices = route(logits, bias, 3, function, pre)
    assert indices.tolist() == [[5, 7, 2], [6, 0, 1], [0, 1, 2]]
    assert bool((weights[0] > 0).all())
    assert weights[1, 1:].tolist() == [0.0, 0.0] and weights[2].tolist() == [0.0, 0.0, 0.0]
    if function == "softmax":
        assert weights[1, 0].item() == 1.0
    # groups (0 1 2 3) and (4 5 6 7): the group with an unmasked expert is chosen
    assert route(logits, bias, 2, function, pre, 2, 1)[1].tolist() == [[5, 7], [6, 4], [0, 1]]


@both
def test_nan_and_inf_propagate_and_experts_stay_distinct(route, device: torch.device) -> None:
    logits = torch.tensor([[0.0, NAN, 1.0, -INF, 2.0], [0.0, INF, 1.0, -INF, 2.0]], device=device)
    weights, indices = route(logits, None, 3)
    assert indices.tolist() == [[1, 4, 2], [1, 4, 2]]
    assert bool(weights.isnan().all())
    weights, indices = route(logits, None, 5, pre_softmax=True)
    assert bool(weights.isnan().all()) and indices.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 2
    weights, indices = route(logits, None, 2, "sigmoid")
    assert indices.tolist() == [[1, 4], [1, 4]]
    assert bool(weights[0].isnan().all())
    torch.testing.assert_close(weights[1].sum().item(), 1.0)


def test_gradient_of_masked_experts_and_of_none(device: torch.device) -> None:
    """Masked experts give no NaN, and -1 has no effect."""
    logits = torch.full((2, 4), -INF, device=device)
    logits[0, 1] = 0.5
    indices = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
    grad = torch.ones(2, 2, device=device)
    for function, pre in (("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)):
        got = ops.topk_router_backward(grad, logits, indices, function, pre, 1.0)
        assert bool((got == 0).all()), function  # with one unmasked expert its share is always 1
    none = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int32, device=device)
    got = ops.topk_router_backward(grad, torch.zeros(2, 4, device=device), none, "sigmoid", False, 1.0)
    assert got[1].tolist() == [0.0] * 4 and got[0, [0, 2, 3]].tolist() == [0.0] * 3


def test_repeated_calls_give_the_same_bits(device: torch.device) -> None:
    logits, *options = next(case for case in CASES if case.name == "deepseek_v3").arguments(device)
    logits = logits.repeat(50, 1).requires_grad_()
    first = None
    for _ in range(3):
        weights, indices = ops.topk_router(logits, *options)
        (grad,) = torch.autograd.grad(weights.square().sum(), logits)
        first = first or (weights, indices, grad)
        for a, b in zip((weights, indices, grad), first, strict=True):
            assert_same_bits(a, b)


@by_name
def test_opcheck(case: Case, device: torch.device) -> None:
    logits, *options = case.arguments(device)
    weights, indices = ops.topk_router(logits, *options)
    checks = {"logits": logits}
    if not case.name.startswith("masked"):  # the gradient check does not support -inf
        checks["leaf"] = logits.clone().requires_grad_()
    for argument in checks.values():
        opcheck(tp.topk_router.default, (argument, *options))
    opcheck(
        tp.topk_router_backward.default,
        (torch.randn_like(weights), logits, indices, options[2], options[3], options[6]),
    )


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    logits = torch.randn(12, 10, device=device).t()
    bias = torch.randn(24, device=device)[::2]
    for a, b in zip(
        ops.topk_router(logits, bias, 3, "sigmoid"),
        ops.topk_router(logits.contiguous(), bias.contiguous(), 3, "sigmoid"),
        strict=True,
    ):
        assert_same_bits(a, b)
    leaf = logits.detach().requires_grad_()
    ops.topk_router(leaf, None, 3, pre_softmax=True)[0].sum().backward()  # a gradient with stride 0
    (expected,) = torch.autograd.grad(reference.topk_router(leaf, None, 3, pre_softmax=True)[0].sum(), leaf)
    torch.testing.assert_close(leaf.grad, expected)


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ops.topk_router(X.double(), None, 2),
            TypeError,
            "'logits': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it "
            "with .to() first.",
        ),
        (
            lambda: ops.topk_router(torch.zeros(2, 1025), None, 2),
            ValueError,
            "'logits': expected at most 1024 columns, one for each expert, got float32[2, 1025] on cpu. Use "
            "fewer experts.",
        ),
        (
            lambda: ops.topk_router(X, None, 2, "relu"),  # type: ignore[arg-type]
            ValueError,
            "'score_function': expected softmax, sigmoid or sqrtsoftplus, got relu. Pass one of the three names.",
        ),
        (
            lambda: ops.topk_router(X, None, 2, "sigmoid", True),
            ValueError,
            "'pre_softmax': expected False with this score function, got True. Only the softmax can come before "
            "or after the choice.",
        ),
        (
            lambda: ops.topk_router(X, None, 9),
            ValueError,
            "'topk': expected from 1 to the 8 experts, got 9. Choose that many experts for each token.",
        ),
        (
            lambda: ops.topk_router(X, None, 2, num_groups=3),
            ValueError,
            "'num_groups': expected a number that divides the 8 experts, got 3. Pass 1 for no groups.",
        ),
        (
            lambda: ops.topk_router(X, None, 2, num_groups=2, group_topk=3),
            ValueError,
            "'group_topk': expected from 1 to the 2 groups, got 3. Choose that many groups for each token.",
        ),
        (
            lambda: ops.topk_router(X, None, 5, num_groups=2, group_topk=1),
            ValueError,
            "'topk': expected from 1, one for each chosen group, to the 4 experts of the chosen groups, got 5. Change "
            "topk, num_groups or group_topk.",
        ),
        (
            lambda: ops.topk_router(X, torch.zeros(8), 2),
            ValueError,
            "'expert_bias': expected None with the softmax, got float32[8] on cpu. A bias of the choice goes with "
            "scores that do not compete: sigmoid or sqrtsoftplus.",
        ),
        (
            lambda: ops.topk_router(X, torch.zeros(7), 2, "sigmoid"),
            ValueError,
            "'expert_bias': expected size 8 in dimension 0 (the columns of 'logits'), got float32[7] on cpu. Pass "
            "tensors whose sizes agree.",
        ),
    ],
)
def test_errors_have_four_parts(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == "transformer_plugin::topk_router: argument " + text
