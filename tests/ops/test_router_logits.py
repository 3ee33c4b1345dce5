"""router_logits: float64 results, gradients from two bfloat16 parts, special values, strides, compilation, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits

tp = torch.ops.transformer_plugin
Products = tuple[Tensor, Tensor, Tensor]
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
dtypes = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32, FLOAT64], ids=str)
#: T tokens, H columns, E experts: none, one, odd, multiples of what kernels load at once, more than a warp loads.
SHAPES = [
    *((0, 64, 8), (5, 0, 4), (5, 16, 0), (1, 1, 1), (5, 16, 1), (7, 9, 2), (33, 65, 7), (300, 257, 12)),
    *((64, 128, 8), (130, 96, 128), (40, 2048, 130), (9, 64, 133)),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def drawn(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Products:
    """A gradient, an input and a weight with magnitudes from 2**-6 to 2**6."""
    T, H, E = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        exponents = torch.randint(-6, 7, sizes, generator=generator)
        return torch.randn(*sizes, generator=generator, dtype=FLOAT64) * 2.0**exponents

    wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
    grad, input, weight = draw(T, E).to(wide), draw(T, H).to(dtype), draw(E, H).to(dtype)
    return grad.to(device), input.to(device), weight.to(device)


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of a rounding to the dtype."""
    return torch.finfo(dtype).eps / 2


@pytest.fixture(autouse=True)
def float32_sums() -> Iterator[None]:
    """torch's default lets cuBLAS add parts of a bfloat16 product in bfloat16, as it does for odd widths."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


def check_product(
    got: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, of_a: float = 0.0, more: float | Tensor = 0.0
) -> None:
    """Checks ``a @ b``. Sums in the dtype of `a`, with operands that have a relative error of `of_a`, are rounded to
    `dtype`; an error of `more` is allowed too."""
    assert got.dtype == dtype and got.shape == (a.shape[0], b.shape[1])
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    sums = max(1, a.shape[1]) * unit(a.dtype) + of_a
    rounding = unit(dtype) if dtype != a.dtype else 0.0
    bound = magnitude * sums + (exact.abs() + magnitude * sums + more) * rounding + more
    if dtype == FLOAT16:
        bound = bound + 2.0**-25  # subnormal results
        bound = bound.masked_fill(exact.abs() > 65000, torch.inf)  # results that overflow
    assert bool(((got.double() - exact).abs() <= bound).all())


def check_gradients(got: tuple[Tensor, Tensor], grad: Tensor, input: Tensor, weight: Tensor) -> None:
    """With bfloat16 operands there are two terms for each value of the gradient, whose relative error is 2**-17."""
    if input.dtype == BFLOAT16:
        twice = [torch.cat([x, torch.zeros_like(x)], 1) for x in (grad, grad.T)]
        check_product(got[0], twice[0], torch.cat([weight, weight]), BFLOAT16, 2.0**-17)
        check_product(got[1], twice[1], torch.cat([input, input]), BFLOAT16, 2.0**-17)
    else:
        check_product(got[0], grad, weight, input.dtype)
        check_product(got[1], grad.T, input, weight.dtype)


@dtypes
@shapes
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    grad, input, weight = drawn(shape, dtype, device)
    leaves = [input.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = ops.router_logits(*leaves)
    check_product(logits.detach(), input.to(grad.dtype), weight.to(grad.dtype).T, grad.dtype)
    gradients = torch.autograd.grad(logits, leaves, grad)
    check_gradients(gradients, grad, input, weight)
    backward = ops.router_logits_backward(grad, input, weight)
    for got, expected in zip(gradients, backward, strict=True):
        assert_same_bits(got, expected)


@dtypes
@shapes
def test_reference_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    grad, input, weight = drawn(shape, dtype, "cpu")
    logits = reference.router_logits(input, weight)
    check_product(logits, input.to(grad.dtype), weight.to(grad.dtype).T, grad.dtype)
    check_gradients(reference.router_logits_backward(grad, input, weight), grad, input, weight)


def test_float32_has_the_bits_of_linear(device: torch.device) -> None:
    grad, input, weight = drawn((70, 96, 12), FLOAT32, device)
    results = []
    for function in (ops.router_logits, ops.linear):
        leaves = [input.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = function(*leaves)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def test_logits_are_not_rounded_to_the_dtype_of_the_operands(device: torch.device) -> None:
    """Two experts whose logits differ by less than bfloat16 resolves."""
    input = torch.tensor([[256.0, 1.0]], device=device, dtype=BFLOAT16)
    weight = torch.tensor([[1.0, 0.25], [1.0, 0.5]], device=device, dtype=BFLOAT16)
    assert ops.router_logits(input, weight).tolist() == [[256.25, 256.5]]


def test_the_second_part_of_the_gradient_is_multiplied(device: torch.device) -> None:
    """The gradients of a softmax cancel: a product of the gradient rounded to bfloat16 is far outside of the bound."""
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(device)
    grad = grad - grad.mean(1, keepdim=True)
    input = torch.ones(64, 24, device=device, dtype=BFLOAT16)
    weight = torch.ones(32, 24, device=device, dtype=BFLOAT16)
    check_gradients(ops.router_logits_backward(grad, input, weight), grad, input, weight)
    columns = grad - grad.mean(0, keepdim=True)
    check_gradients(ops.router_logits_backward(columns, input, weight), columns, input, weight)
    with pytest.raises(AssertionError):
        rounded = ops.router_logits_backward(grad.bfloat16().float(), input, weight)
        check_gradients(rounded, grad, input, weight)


#: Values with exact and inexact roundings, of every magnitude of float32. bfloat16 rounds the last ones to infinity.
VALUES = [
    *(0.0, -0.0, 1.0, 1.00390625, 1.0 + 2.0**-23, -3.14159274, 1e-30, 2.0**-109, -1.9e-33, 65504.0, 1e38),
    *(3.38953139e38, 3.4e38, -3.4e38),
]
LARGEST = torch.finfo(FLOAT32).max


def test_parts_of_a_value() -> None:
    values = torch.tensor([*VALUES, LARGEST, -LARGEST])
    high, low = reference.routing.bfloat16_parts(values)
    assert high.isfinite().all() and low.isfinite().all()
    error = (values.double() - high.double() - low.double()).abs()
    assert bool((error <= values.double().abs() * 2.0**-17).all())


def test_finite_gradients_have_finite_parts(device: torch.device) -> None:
    """One expert subtracts the first part of another one's gradient, so that the second part is left."""
    values = torch.tensor(VALUES, device=device)
    high = reference.routing.bfloat16_parts(values)[0].float()
    grad = torch.stack([values, high], 1)
    input = torch.ones(len(VALUES), 1, device=device, dtype=BFLOAT16)
    weight = torch.tensor([[1.0], [-1.0]], device=device, dtype=BFLOAT16)
    got, _ = ops.router_logits_backward(grad, input, weight, for_weight=False)
    error = (got[:, 0].double() - (values.double() - high.double())).abs()
    assert bool((error <= values.double().abs() * 2.0**-16).all())


@dtypes
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_gradients_that_are_not_finite(value: float, dtype: torch.dtype, device: torch.device) -> None:
    """Infinities and NaNs are where the plain products have them."""
    grad, input, weight = drawn((20, 24, 8), dtype, device)
    grad[3, 5], grad[11, 0] = value, value
    input[11, 4], weight[5, 7] = 0.0, 0.0
    plain = (grad @ weight.to(grad.dtype), grad.T @ input.to(grad.dtype))
    for got, expected in zip(ops.router_logits_backward(grad, input, weight), plain, strict=True):
        assert bool((got.isnan() == expected.isnan()).all())
        finite = expected.isfinite()
        assert finite.any() and not finite.all()
        assert torch.equal(got[expected.isinf()].double(), expected[expected.isinf()].double())
        assert bool(got[finite].isfinite().all())


@dtypes
def test_strides(dtype: torch.dtype, device: torch.device) -> None:
    """Transposed, sliced and expanded operands, and addresses and widths without 16-byte loads."""
    for shape in ((40, 64, 12), (40, 63, 11)):
        grad, input, weight = drawn(shape, dtype, device)
        views: dict[str, Callable[[Tensor], Tensor]] = {
            "transposed": lambda x: x.T.contiguous().T,
            "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
            "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        }
        for view in views.values():
            given = [view(x) for x in (grad, input, weight)]
            assert all(torch.equal(x, y) for x, y in zip(given, (grad, input, weight), strict=True))
            logits = ops.router_logits(*given[1:])
            check_product(logits, input.to(grad.dtype), weight.to(grad.dtype).T, grad.dtype)
            check_gradients(ops.router_logits_backward(*given), grad, input, weight)
        ones = torch.ones((), device=device, dtype=grad.dtype).expand(grad.shape)
        check_gradients(ops.router_logits_backward(ones, input, weight), ones, input, weight)


@pytest.mark.parametrize("experts", [8, 7])
def test_parts_have_the_same_bits_at_any_address(experts: int, device: torch.device) -> None:
    grad, input, weight = drawn((50, 64, experts), BFLOAT16, device)
    expected = ops.router_logits_backward(grad, input, weight)
    moved = torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape)
    for got, wanted in zip(ops.router_logits_backward(moved, input, weight), expected, strict=True):
        assert_same_bits(got, wanted)


@dtypes
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
def test_only_the_wanted_gradients(
    wanted: tuple[bool, bool], dtype: torch.dtype, device: torch.device
) -> None:
    grad, input, weight = drawn((20, 32, 6), dtype, device)
    both = ops.router_logits_backward(grad, input, weight)
    got = ops.router_logits_backward(grad, input, weight, *wanted)
    for one, whole, is_wanted in zip(got, both, wanted, strict=True):
        assert_same_bits(one, whole if is_wanted else whole.new_empty(0))
    if not any(wanted):
        return
    leaves = [input.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1])]
    ops.router_logits(*leaves).backward(grad)
    for leaf, whole, is_wanted in zip(leaves, both, wanted, strict=True):
        assert (leaf.grad is not None) == is_wanted
        if leaf.grad is not None:
            assert_same_bits(leaf.grad, whole)


@dtypes
@pytest.mark.parametrize("shape", [(6, 16, 8), (0, 16, 8), (5, 9, 3), (4, 8, 1)], ids=str)
def test_opcheck(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    grad, input, weight = drawn(shape, dtype, device)
    opcheck(tp.router_logits.default, (input, weight))
    opcheck(tp.router_logits.default, (input.clone().requires_grad_(), weight.clone().requires_grad_()))
    for wanted in ((True, True), (True, False), (False, True)):
        opcheck(tp.router_logits_backward.default, (grad, input, weight, *wanted))


def step(input: Tensor, weight: Tensor) -> Tensor:
    return ops.topk_router(ops.router_logits(input, weight), None, 2)[0].square().sum()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_compiles_without_graph_breaks_or_recompiling(dtype: torch.dtype, device: torch.device) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for seed, tokens in enumerate([12, 12, 20, 40]):
        _, input, weight = drawn((tokens, 32, 8), dtype, device, seed)
        results = []
        for function in (compiled, step):
            leaves = [input.clone().requires_grad_(), weight.clone().requires_grad_()]
            loss = function(*leaves)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)
    assert graphs.frame_count <= 2  # compiled again for a changed number of tokens


def test_the_compiled_backward_calls_the_op() -> None:
    called: dict[str, list[str]] = {"forward": [], "backward": []}

    def recorder(name: str) -> Callable[..., object]:
        def compiler(graph: torch.fx.GraphModule, _: object) -> object:
            called[name] += [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"))
    _, input, weight = drawn((12, 32, 8), BFLOAT16, "cpu")
    torch.compile(step, fullgraph=True, backend=backend)(input.requires_grad_(), weight).backward()
    assert "transformer_plugin.router_logits.default" in called["forward"]
    assert "transformer_plugin.router_logits_backward.default" in called["backward"]


@contextmanager
def without_synchronization() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
def test_makes_no_float32_copy_of_the_tokens_and_does_not_synchronize() -> None:
    T, H, E = 16384, 4096, 16
    grad = torch.randn(T, E, device="cuda")
    leaves = [torch.randn(n, H, device="cuda", dtype=BFLOAT16).requires_grad_() for n in (T, E)]
    ops.router_logits(*leaves).backward(grad)  # allocates the workspace of cuBLAS
    for leaf in leaves:
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with without_synchronization():
        ops.router_logits(*leaves).backward(grad)
    copy = T * H * 4
    assert (
        torch.cuda.max_memory_allocated() - before < 0.75 * copy
    )  # the gradient of the tokens is half of a copy


X, W = torch.zeros(4, 6), torch.zeros(3, 6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ops.router_logits(X.int(), W.int()),
            TypeError,
            "router_logits: argument 'input': expected one of the dtypes float32, bfloat16, float16, float64, got "
            "int32. Convert it with .to() first.",
        ),
        (
            lambda: ops.router_logits(X.bfloat16(), W),
            TypeError,
            "router_logits: argument 'weight': expected bfloat16, like input, got float32. Convert one of them with "
            ".to() first.",
        ),
        (
            lambda: ops.router_logits(X[0], W),
            ValueError,
            "router_logits: argument 'input': expected 2 dimensions, got float32[6] on cpu. Reshape it first.",
        ),
        (
            lambda: ops.router_logits(X, W[:, :5]),
            ValueError,
            "router_logits: argument 'weight': expected size 6 in dimension 1 (the columns of 'input'), got "
            "float32[3, 5] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.router_logits_backward(X[:, :3].bfloat16(), X.bfloat16(), W.bfloat16()),
            TypeError,
            "router_logits_backward: argument 'grad': expected one of the dtypes float32, got bfloat16. Convert it "
            "with .to() first.",
        ),
        (
            lambda: ops.router_logits_backward(X[:2, :3], X, W),
            ValueError,
            "router_logits_backward: argument 'grad': expected size 4 in dimension 0 (the rows of 'input'), got "
            "float32[2, 3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.router_logits_backward(X, X, W),
            ValueError,
            "router_logits_backward: argument 'grad': expected size 3 in dimension 1 (the rows of 'weight'), got "
            "float32[4, 6] on cpu. Pass tensors whose sizes agree.",
        ),
    ],
)
def test_errors_have_four_parts(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == "transformer_plugin::" + text
