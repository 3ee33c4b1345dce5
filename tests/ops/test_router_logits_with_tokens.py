"""router_logits_with_tokens: one sum of the router's and the experts' gradients, in memory that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.test_router_logits import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    check_product,
    drawn,
    dtypes,
    float32_sums,  # noqa: F401 a fixture
    shapes,
)
from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits

tp = torch.ops.transformer_plugin


def with_addend(grad: Tensor, weight: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of one product that is ``grad @ weight + addend``. With a bfloat16 weight the gradient has two parts."""
    rows = addend.shape[0]
    parts = [grad, torch.zeros_like(grad)] if weight.dtype == BFLOAT16 else [grad]
    identity = torch.eye(rows, device=grad.device, dtype=grad.dtype)
    return torch.cat([*parts, identity], 1), torch.cat([*[weight] * len(parts), addend])


def check_sum(got: Tensor, grad: Tensor, weight: Tensor, addend: Tensor) -> None:
    """A product with float32 sums, to which the addend is added before one rounding. cuBLAS rounds a bfloat16 product
    before it adds."""
    of_parts = 2.0**-17 if weight.dtype == BFLOAT16 else 0.0
    a, b = with_addend(grad, weight, addend)
    twice = got.is_cuda and weight.dtype == BFLOAT16
    of_product = (grad.double() @ weight.double()).abs() * 2.0**-8 if twice else 0.0
    check_product(got, a, b, weight.dtype, of_parts, of_product)


def addend_like(input: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(input.shape, generator=generator).to(input)


def gradients(grad: Tensor, input: Tensor, weight: Tensor, addend: Tensor) -> tuple[Tensor, ...]:
    leaves = (input.clone().requires_grad_(), weight.clone().requires_grad_())
    logits, tokens = ops.router_logits_with_tokens(*leaves)
    return torch.autograd.grad([logits, tokens], leaves, [grad, addend])


@dtypes
@shapes
def test_gradients_against_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    grad, input, weight = drawn(shape, dtype, device)
    addend = addend_like(input)
    before = addend.clone()
    got = gradients(grad, input, weight, addend)
    check_sum(got[0], grad, weight, addend)
    assert_same_bits(addend, before)
    backward = ops.router_logits_backward(grad, input, weight, grad_tokens=addend)
    expected = reference.router_logits_backward(grad, input, weight, grad_tokens=addend)
    check_sum(expected[0], grad, weight, addend)
    assert_same_bits(addend, before)
    for own, other in zip(got, backward, strict=True):
        assert_same_bits(own, other)
    assert_same_bits(got[1], ops.router_logits_backward(grad, input, weight)[1])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_the_sum_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """A sum of two rounded gradients, as autograd computes it, is outside of the bound."""
    grad, input, weight = drawn((64, 64, 16), dtype, device)
    product = ops.router_logits_backward(grad, input, weight, for_weight=False)[0]
    addend = -product + addend_like(input) * product.abs() * 2.0**-6
    check_sum(gradients(grad, input, weight, addend)[0], grad, weight, addend)
    if device.type == "cuda" and dtype == BFLOAT16:
        return  # cuBLAS rounds twice too
    with pytest.raises(AssertionError):
        check_sum(product + addend, grad, weight, addend)


@dtypes
def test_logits_and_tokens(dtype: torch.dtype, device: torch.device) -> None:
    _, input, weight = drawn((12, 16, 4), dtype, device)
    expected = ops.router_logits(input, weight)
    for wants in ((False, False), (True, False), (False, True), (True, True)):
        leaves = [x.clone().requires_grad_(wanted) for x, wanted in zip((input, weight), wants, strict=True)]
        logits, tokens = ops.router_logits_with_tokens(*leaves)
        assert_same_bits(logits.detach(), expected)
        assert_same_bits(tokens.detach(), input)
        assert tokens.data_ptr() == leaves[0].data_ptr() and tokens._version == leaves[0]._version
        assert (logits.requires_grad, tokens.requires_grad) == (any(wants), wants[0])
        with torch.no_grad():
            assert ops.router_logits_with_tokens(*leaves)[1] is leaves[0]
        with torch.inference_mode():
            assert ops.router_logits_with_tokens(*leaves)[1] is leaves[0]


def test_gradients_of_one_result(device: torch.device) -> None:
    grad, input, weight = drawn((12, 16, 4), BFLOAT16, device)
    leaves = [input.requires_grad_(), weight.requires_grad_()]
    logits, tokens = ops.router_logits_with_tokens(*leaves)
    only = torch.autograd.grad(logits, leaves, grad, retain_graph=True)
    for got, expected in zip(only, ops.router_logits_backward(grad, input, weight), strict=True):
        assert_same_bits(got, expected)
    addend = addend_like(input.detach())
    of_tokens, of_weight = torch.autograd.grad(tokens, leaves, addend, allow_unused=True)
    assert of_weight is None
    assert_same_bits(of_tokens, addend)


def test_a_frozen_weight(device: torch.device) -> None:
    grad, input, weight = drawn((12, 16, 4), FLOAT32, device)
    addend = addend_like(input)
    expected = gradients(grad, input, weight, addend)[0]
    results = ops.router_logits_with_tokens(input.requires_grad_(), weight)
    assert_same_bits(torch.autograd.grad(results, input, [grad, addend])[0], expected)


def halves(tokens: Tensor) -> Tensor:
    """A function whose gradient is made in C++, so that Python has no reference to it."""
    return (tokens * 0.5).sum()


def profiled(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], set[str]]:
    """The gradients, and the names of the ops that the backward calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = torch.autograd.grad(loss, leaves)
    return results, {event.key for event in profile.key_averages()}


@dtypes
def test_the_sum_takes_the_memory_of_the_gradient(dtype: torch.dtype, device: torch.device) -> None:
    """Only where nothing else refers to it. Products of multiples of 16 rows and columns need no copies on any CPU."""
    grad, input, weight = drawn((16, 32, 16), dtype, device)
    leaves = (input.requires_grad_(), weight.requires_grad_())
    addend = torch.full_like(input, 0.5)
    expected = ops.router_logits_backward(grad, input, weight, grad_tokens=addend)
    kept: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        kept.append(gradient)

    for hook, is_shared in ((None, False), (keep, True)):
        logits, tokens = ops.router_logits_with_tokens(*leaves)
        if hook is not None:
            tokens.register_hook(hook)
        loss = (logits * grad).sum() + halves(tokens)
        results, called = profiled(loss, leaves)
        assert ("transformer_plugin::router_logits_backward" in called) == is_shared
        assert ("aten::clone" in called) == is_shared
        for got, wanted in zip(results, expected, strict=True):
            assert_same_bits(got, wanted)
    assert_same_bits(kept[0], addend)


def test_gradients_that_others_hold_keep_their_values(device: torch.device) -> None:
    grad, input, weight = drawn((12, 16, 4), FLOAT32, device)
    leaves = (input.requires_grad_(), weight.requires_grad_())
    addend = torch.full_like(input, 0.5)
    expected = ops.router_logits_backward(grad, input, weight, grad_tokens=addend)[0]

    logits, tokens = ops.router_logits_with_tokens(*leaves)
    tokens.retain_grad()
    ((logits * grad).sum() + halves(tokens)).backward(retain_graph=True)
    assert_same_bits(tokens.grad, addend)
    for _ in range(2):  # of a graph that is kept
        (got,) = torch.autograd.grad((logits * grad).sum() + halves(tokens), input, retain_graph=True)
        assert_same_bits(got, expected)

    other = torch.zeros_like(input).requires_grad_()  # gets the same gradient, which is its .grad
    logits, tokens = ops.router_logits_with_tokens(*leaves)
    ((logits * grad).sum() + halves(tokens + other)).backward()
    assert_same_bits(other.grad, addend)

    created = torch.autograd.grad(
        (ops.router_logits_with_tokens(*leaves)[0] * grad).sum(), input, create_graph=True
    )
    assert created[0].requires_grad


def test_gradients_without_strides(device: torch.device) -> None:
    """Expanded and transposed gradients of the tokens are copied."""
    grad, input, weight = drawn((12, 16, 4), BFLOAT16, device)
    for addend in (input.new_ones(()).expand(12, 16), addend_like(input).T.contiguous().T):
        got = gradients(grad, input, weight, addend)
        check_sum(got[0], grad, weight, addend)
        assert got[0].is_contiguous()


def test_tokens_may_not_be_modified(device: torch.device) -> None:
    _, input, weight = drawn((12, 16, 4), FLOAT32, device)
    _, tokens = ops.router_logits_with_tokens(input.requires_grad_(), weight)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        tokens.add_(1)


@dtypes
@pytest.mark.parametrize("shape", [(6, 16, 8), (0, 16, 8), (4, 8, 1)], ids=str)
def test_opcheck(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    grad, input, weight = drawn(shape, dtype, device)
    opcheck(tp.router_logits_backward.default, (grad, input, weight, True, True, addend_like(input)))
    opcheck(tp.router_logits_with_tokens.default, (input, weight))
    opcheck(
        tp.router_logits_with_tokens.default,
        (input.clone().requires_grad_(), weight.clone().requires_grad_()),
    )


def step(input: Tensor, weight: Tensor) -> Tensor:
    logits, tokens = ops.router_logits_with_tokens(input, weight)
    return logits.square().sum() + tokens.float().square().sum()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seed, tokens in enumerate([12, 12, 20]):
        _, input, weight = drawn((tokens, 32, 8), dtype, device, seed)
        results = []
        for function in (compiled, step):
            leaves = [input.clone().requires_grad_(), weight.clone().requires_grad_()]
            results.append(torch.autograd.grad(function(*leaves), leaves))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6 if dtype == FLOAT32 else 2.0**-7, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(compiled(input, weight), step(input, weight), rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_makes_no_copy_of_the_gradient() -> None:
    T, H, E = 16384, 4096, 16
    leaves = [torch.randn(n, H, device="cuda", dtype=BFLOAT16).requires_grad_() for n in (T, E)]
    peaks = []
    for _ in range(2):  # the first allocates the workspace of cuBLAS
        logits, tokens = ops.router_logits_with_tokens(*leaves)
        loss = logits.sum() + (tokens * 0.5).sum()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(loss, leaves)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    gradient = T * H * 2
    assert peaks[1] < 1.5 * gradient


X, W = torch.zeros(4, 6), torch.zeros(3, 6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ops.router_logits_with_tokens(X.bfloat16(), W),
            TypeError,
            "router_logits_with_tokens: argument 'weight': expected bfloat16, like input, got float32. Convert one of "
            "them with .to() first.",
        ),
        (
            lambda: ops.router_logits_backward(X[:, :3], X, W, grad_tokens=X.bfloat16()),
            TypeError,
            "router_logits_backward: argument 'grad_tokens': expected one of the dtypes float32, got bfloat16. Convert "
            "it with .to() first.",
        ),
        (
            lambda: ops.router_logits_backward(X[:, :3], X, W, grad_tokens=X[:, :5]),
            ValueError,
            "router_logits_backward: argument 'grad_tokens': expected size 6 in dimension 1 (the columns of 'input'), "
            "got float32[4, 5] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.router_logits_backward(X[:, :3], X, W, for_input=False, grad_tokens=X),
            ValueError,
            "router_logits_backward: argument 'grad_tokens': expected None without the gradient of 'input', got "
            "float32[4, 6] on cpu. Pass for_input=True.",
        ),
    ],
)
def test_errors_have_four_parts(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == "transformer_plugin::" + text
