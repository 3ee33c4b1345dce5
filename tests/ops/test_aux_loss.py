"""router_scores and aux_loss: float64 results, the documented order of the sum, gradients, compilation, CUDA
graphs, and equal bits on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_same_bits
from transformer_plugin.testing.routing_cases import aux_loss_cases, topk_router_cases

tp = torch.ops.transformer_plugin
ROUTED = list(topk_router_cases())
LOSSES = list(aux_loss_cases())
FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
by_router = pytest.mark.parametrize("case", ROUTED, ids=lambda case: case.name)
by_loss = pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
functions = pytest.mark.parametrize("function", FUNCTIONS)


def scores_fp64(logits: Tensor, function: str) -> Tensor:
    if function == "softmax":
        terms = torch.exp(logits)
        return terms / terms.sum(1, keepdim=True)
    scores = 1 / (1 + torch.exp(-logits)) if function == "sigmoid" else torch.log1p(torch.exp(logits)).sqrt()
    return scores / scores.sum(1, keepdim=True)


@by_router
@functions
def test_scores_and_their_gradient_against_fp64(case: Case, function: str, device: torch.device) -> None:
    logits = case.arguments(device)[0]
    masked = logits == -torch.inf
    dead = masked.all(1, keepdim=True)
    scores = ops.router_scores(logits.requires_grad_(), function)
    x = logits.detach().double().masked_fill(masked, -1e3).requires_grad_()
    expected = scores_fp64(x, function)
    live = expected.detach().masked_fill(masked, 0.0).nan_to_num(0.0)
    assert scores.dtype == torch.float32
    assert_close_in_ulp(scores.detach(), live, ulp=32)
    torch.testing.assert_close(
        scores, reference.router_scores(logits.detach(), function), rtol=3e-6, atol=1e-30
    )
    assert_close_in_ulp(scores.sum(1), (~dead[:, 0]).double(), ulp=16)
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(8)).to(device)
    (got,) = torch.autograd.grad(scores, logits, grad)
    (wide,) = torch.autograd.grad(expected, x, grad.double())
    wide = wide.nan_to_num(0.0).masked_fill(masked | dead, 0.0)
    narrow = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    bound = (
        wide.abs() * (narrow + 4e-6) + 4e-6 * live * float(grad.abs().max() if grad.numel() else 0) + 2.0**-25
    )
    assert bool(((got.double() - wide).abs() <= bound).all())


def loss_in_documented_order(scores: Tensor, counts: Tensor, total: int, topk: int, coeff: float) -> Tensor:
    """Repeats csrc/routing/aux_loss.h step by step in float32, so that the bits must agree."""
    columns = torch.zeros(scores.shape[1])
    for chunk in scores.split(128):
        part = torch.zeros(scores.shape[1])
        for row in chunk:
            part = part + row
        columns = columns + part
    products = columns * counts.float()
    lanes = torch.zeros(32)
    for start in range(0, products.numel(), 32):
        piece = products[start : start + 32]
        lanes = lanes + torch.nn.functional.pad(piece, (0, 32 - piece.numel()))
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    factor = coeff * scores.shape[1] / (topk * float(total) * float(total)) if total else 0.0
    return lanes[0] * torch.tensor(factor, dtype=torch.float32)


@by_loss
def test_loss(case: Case, device: torch.device) -> None:
    scores, counts, total, topk, coeff = arguments = case.arguments(device)
    got = ops.aux_loss(*arguments)
    assert got.shape == () and got.dtype == torch.float32
    written = loss_in_documented_order(scores.cpu(), counts.cpu(), int(total), topk, coeff)
    assert_same_bits(got, written)
    assert_same_bits(ops.aux_loss(scores, counts, int(total), topk, coeff), got)
    wide = (scores.double().sum(0) * counts).sum().item()
    wide = wide * coeff * scores.shape[1] / (topk * int(total) ** 2) if int(total) else 0.0
    assert abs(got.item() - wide) <= 2e-6 * abs(wide)
    torch.testing.assert_close(got, reference.aux_loss(scores, counts, total, topk, coeff), rtol=1e-5, atol=0)


@by_loss
def test_gradient_of_the_loss(case: Case, device: torch.device) -> None:
    scores, counts, total, topk, coeff = case.arguments(device)
    (got,) = torch.autograd.grad(
        ops.aux_loss(scores.requires_grad_(), counts, total, topk, coeff) * 3, scores
    )
    factor = 3 * coeff * scores.shape[1] / (topk * int(total) ** 2) if int(total) else 0.0
    expected = (counts.double() * factor).expand(scores.shape)
    assert_close_in_ulp(got, expected, ulp=2)


def test_loss_of_balanced_routing_is_the_coefficient(device: torch.device) -> None:
    counts = torch.full((8,), 16, device=device)
    even = torch.full((64, 8), 1 / 8, device=device)
    assert ops.aux_loss(even, counts, 64, 2, 0.01).item() == pytest.approx(0.01)
    one = torch.zeros(64, 8, device=device)
    one[:, 3] = 1.0
    all_on_one = torch.tensor([0, 0, 0, 128, 0, 0, 0, 0], device=device)
    assert ops.aux_loss(one, all_on_one, 64, 2, 0.01).item() == pytest.approx(0.08)


@by_router
@functions
def test_opcheck_scores(case: Case, function: str, device: torch.device) -> None:
    logits = case.arguments(device)[0]
    opcheck(tp.router_scores.default, (logits, function))
    if not case.name.startswith("masked"):
        opcheck(tp.router_scores.default, (logits.clone().requires_grad_(), function))
    grad = torch.randn(logits.shape, device=device)
    opcheck(tp.router_scores_backward.default, (grad, logits, function))


@by_loss
def test_opcheck_loss(case: Case, device: torch.device) -> None:
    scores, *rest = case.arguments(device)
    opcheck(tp.aux_loss.default, (scores, *rest))
    opcheck(tp.aux_loss.default, (scores.clone().requires_grad_(), *rest))
    backward = (torch.tensor(0.5, device=device), *rest[:2], scores.shape[0], *rest[2:])
    opcheck(tp.aux_loss_backward.default, backward)


def route(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, indices = ops.topk_router(
        logits, bias, 2, "sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5
    )
    counts = ops.count_tokens_per_expert(indices, 16)
    loss = ops.aux_loss(ops.router_scores(logits, "sigmoid"), counts, logits.shape[0], 2, 0.01)
    return weights.square().sum() + loss, indices


def test_compiles_without_graph_breaks_or_recompiling(device: torch.device) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(route, fullgraph=True, backend=graphs)
    bias = torch.zeros(16, device=device)
    for step, tokens in enumerate([12, 12, 20, 40]):
        logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(step)).to(device)
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        for function, leaf in zip((compiled, route), leaves, strict=True):
            function(leaf, bias)[0].backward()
        assert_same_bits(leaves[0].grad, leaves[1].grad)
        assert_same_bits(compiled(logits, bias)[1], route(logits, bias)[1])
    # with and without gradients, each compiled again for a changed number of tokens
    assert graphs.frame_count <= 4


@pytest.mark.gpu
def test_graph_replays_with_new_logits() -> None:
    logits = torch.randn(64, 16, device="cuda", requires_grad=True)
    bias = torch.zeros(16, device="cuda")

    def step() -> tuple[Tensor, ...]:
        loss, indices = route(logits, bias)
        return loss, indices, *torch.autograd.grad(loss, logits)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            logits.copy_(torch.randn(64, 16, generator=generator))
        bias.copy_(torch.randn(16, generator=generator))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@functions
def test_cuda_gives_the_bits_of_the_cpu(function: str) -> None:
    for case in ROUTED:
        host, device = case.arguments("cpu")[0], case.arguments("cuda")[0]
        assert_same_bits(ops.router_scores(device, function), ops.router_scores(host, function))
        grad = torch.randn(host.shape)
        assert_same_bits(
            ops.router_scores_backward(grad.cuda(), device, function),
            ops.router_scores_backward(grad, host, function),
        )


@pytest.mark.gpu
def test_does_not_synchronize_with_the_host() -> None:
    logits = torch.randn(64, 16, device="cuda", requires_grad=True)
    bias = torch.zeros(16, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        route(logits, bias)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


S, C, N = torch.zeros(4, 8), torch.zeros(8, dtype=torch.int64), torch.tensor(4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ops.router_scores(S.double()),
            TypeError,
            "router_scores: argument 'logits': expected one of the dtypes float32, bfloat16, float16, got float64. "
            "Convert it with .to() first.",
        ),
        (
            lambda: ops.router_scores(S, "relu"),  # type: ignore[arg-type]
            ValueError,
            "router_scores: argument 'score_function': expected softmax, sigmoid or sqrtsoftplus, got relu. Pass one "
            "of the three names.",
        ),
        (
            lambda: ops.aux_loss(S.bfloat16(), C, N, 2, 0.1),
            TypeError,
            "aux_loss: argument 'scores': expected one of the dtypes float32, got bfloat16. Convert it with "
            ".to() first.",
        ),
        (
            lambda: ops.aux_loss(S, C[:7], N, 2, 0.1),
            ValueError,
            "aux_loss: argument 'tokens_per_expert': expected size 8 in dimension 0 (the columns of 'scores'), got "
            "int64[7] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.aux_loss(S, C, torch.tensor([4, 4]), 2, 0.1),
            ValueError,
            "aux_loss: argument 'total_tokens': expected one element, got int64[2] on cpu. Pass the number of tokens "
            "that were routed.",
        ),
        (
            lambda: ops.aux_loss(S, C, N, 0, 0.1),
            ValueError,
            "aux_loss: argument 'topk': expected 1 or more, got 0. Pass the experts of each token.",
        ),
    ],
)
def test_errors_have_four_parts(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == "transformer_plugin::" + text
