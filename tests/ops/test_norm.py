"""rms_norm, layer_norm and their backwards: float64 results, the documented order of sums, and the bits of the
reference on CPU and CUDA."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.norm_cases import norm_cases, without_bias
from transformer_plugin.testing.numerics import assert_same_bits

OPS = torch.ops.transformer_plugin
CASES = list(norm_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
norms = pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])


def arguments_of(case: Case, centered: bool, device: str | torch.device = "cpu") -> tuple[Any, ...]:
    """Returns the arguments of layer_norm if centered, and otherwise of rms_norm."""
    arguments = case.arguments(device)
    return arguments if centered else without_bias(arguments)


def op(centered: bool, name: str, module: Any = ops) -> Any:
    return getattr(module, ("layer_norm" if centered else "rms_norm") + name)


def assert_same_numbers(got: Tensor, expected: Tensor, name: str = "output") -> None:
    """Asserts equal bits, except that any NaN equals any NaN."""
    assert_same_bits(got.isnan(), expected.isnan(), f"{name}, NaN")
    assert_same_bits(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0), name)


def without_nan(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replaces inputs that give NaN (inf, NaN, and an eps of 0): opcheck does not treat NaN as equal."""
    numbers = (a.nan_to_num(0.0, 2.0, 2.0) if isinstance(a, Tensor) else a for a in arguments)
    return tuple(1e-5 if isinstance(a, float) else a for a in numbers)


class Exact:
    """The norm in float64, and an error bound for float32."""

    def __init__(self, arguments: tuple[Any, ...], centered: bool) -> None:
        input, weight, *bias, eps, zero_centered = arguments
        self.leaves = [None if t is None else t.detach().double() for t in (input, weight, *bias)]
        self.leaves = [None if t is None else t.requires_grad_() for t in self.leaves]
        x, w, b = (*self.leaves, None)[:3]
        assert x is not None
        self.gamma = torch.ones(()).double() if w is None else w + int(zero_centered)
        mean = x.mean(-1, keepdim=True) if centered else torch.zeros(()).double()
        self.rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        self.normalised = (x - mean) * self.rstd
        self.output = self.normalised * self.gamma
        self.output = self.output if b is None else self.output + b
        # Relative errors of a sum of positive terms, and of a difference to the mean relative to the spread.
        self.terms = x.shape[-1] / 1024 + 16
        spread = (x.abs() + x.abs().mean(-1, keepdim=True)) * self.rstd if centered else x.new_zeros(())
        self.unit = (self.terms * 2.0**-24 * (1 + spread)).detach()

    def assert_output(self, output: Tensor) -> None:
        parts = self.unit * (1 + self.normalised.abs()) * self.gamma.abs() + 2.0**-24 * self.output.abs()
        assert_within(output, self.output, 4 * parts)

    def assert_gradients(self, got: list[Tensor], grad: Tensor) -> None:
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        exact = torch.autograd.grad(self.output, leaves, grad.double())
        scaled = grad.double() * self.gamma
        products = scaled * self.normalised
        size = (
            scaled.abs()
            + scaled.abs().mean(-1, keepdim=True)
            + (1 + self.normalised.abs()) * products.abs().mean(-1, keepdim=True)
        )
        assert_within(got[0], exact[0], 8 * self.unit * self.rstd * size, "grad_input")
        rows = 256 + self.normalised.numel() / 2**16
        columns = (-1, grad.shape[-1])
        names = [name for name, leaf in zip("xwb", self.leaves, strict=False) if leaf is not None]
        for name, value, e in zip(names[1:], got[1:], exact[1:], strict=True):
            terms = grad.double().abs() * ((1 + self.normalised.abs()) if name == "w" else 1)
            error = (terms * (rows * 2.0**-24 + 4 * self.unit)).reshape(columns).sum(0)
            assert_within(value, e, error, f"grad of {name}")


def assert_within(got: Tensor, exact: Tensor, error: Tensor, name: str = "output") -> None:
    """Asserts that values within ``error`` round to the result, and that NaN is where float64 has NaN."""
    info = torch.finfo(got.dtype)
    bound = exact.abs() * info.eps / 2 + error * (1 + info.eps) + info.smallest_normal * info.eps
    difference = (got.double().cpu() - exact).abs()
    good = (difference <= bound) | (got.isnan().cpu() & exact.isnan())
    assert good.all(), f"{name}: worst {float((difference / bound)[~good].max()):.3g} times the bound"


@norms
@by_case
def test_reference_agrees_with_float64(case: Case, centered: bool) -> None:
    arguments = arguments_of(case, centered)
    Exact(arguments, centered).assert_output(op(centered, "", reference)(*arguments))


@norms
@by_case
def test_forward_has_the_bits_of_the_reference(case: Case, centered: bool, device: torch.device) -> None:
    expected = op(centered, "_forward", reference)(*arguments_of(case, centered))
    arguments = arguments_of(case, centered, device)
    got = op(centered, "_forward")(*arguments)
    for g, e, name in zip(got, expected, ("output", *("mean", "rstd")[not centered :]), strict=True):
        assert_same_numbers(g, e, name)
        assert g.is_contiguous() and g.device.type == device.type
    assert_same_numbers(op(centered, "")(*arguments), expected[0])


def grad_like(input: Tensor) -> Tensor:
    grad = torch.randn(input.shape, generator=torch.Generator().manual_seed(11))
    return grad.to(input.dtype).to(input.device)


@norms
@by_case
def test_backward_has_the_bits_of_the_reference(case: Case, centered: bool, device: torch.device) -> None:
    """The gradients have the bits of the reference, through autograd and from the op, also in repeated calls."""
    arguments = arguments_of(case, centered)
    input, weight, *bias, _, zero_centered = arguments
    grad = grad_like(input)
    _, *stats = op(centered, "_forward", reference)(*arguments)
    flags = (zero_centered, bias[0] is not None) if centered else (zero_centered,)
    expected = op(centered, "_backward", reference)(grad, input, weight, *stats, *flags)

    there = arguments_of(case, centered, device)
    here = [stat.to(device) for stat in stats]
    for _ in range(2):
        got = op(centered, "_backward")(grad.to(device), *there[:2], *here, *flags)
        for g, e, name in zip(got, expected, ("input", "weight", "bias"), strict=False):
            assert_same_numbers(g, e, f"grad_{name}")

    leaves = [t.requires_grad_() for t in there if isinstance(t, Tensor)]
    of_leaves = torch.autograd.grad(op(centered, "")(*there), leaves, grad.to(device))
    for g, e in zip(of_leaves, [e for e in expected if e.shape != (0,) or e is expected[0]], strict=True):
        assert_same_numbers(g, e)


@norms
@by_case
def test_gradient_agrees_with_float64(case: Case, centered: bool, device: torch.device) -> None:
    arguments = arguments_of(case, centered, device)
    exact = Exact(arguments_of(case, centered), centered)
    leaves = [t.requires_grad_() for t in arguments if isinstance(t, Tensor)]
    grad = grad_like(arguments[0])
    got = torch.autograd.grad(op(centered, "")(*arguments), leaves, grad)
    exact.assert_gradients(list(got), grad.cpu())


def round_to_float32(exact: Fraction) -> np.float32:
    """Rounds to the nearest float32, ties to even."""
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, -np.float32(np.inf))]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.int32)) % 2))


def sum_in_order(row: np.ndarray, squares: bool) -> np.float32:
    """Sums in the documented order, one addition after another; squares are added by fma."""
    partials = [np.float32(0)] * 1024
    for column, value in enumerate(row):
        sum = partials[column % 1024]
        exact = Fraction(float(value)) ** 2 + Fraction(float(sum))
        partials[column % 1024] = round_to_float32(exact) if squares else sum + value
    while len(partials) > 1:
        partials = [partials[i] + partials[i + 1] for i in range(0, len(partials), 2)]
    return partials[0]


@pytest.mark.parametrize("columns", [1, 3, 130, 1024, 1025, 3000])
def test_row_sums_are_in_documented_order(columns: int, device: torch.device) -> None:
    x = (np.random.default_rng(columns).standard_normal((3, columns)) * 5 + 1).astype(np.float32)
    n, eps = np.float32(columns), np.float32(1e-3)
    rstd = [np.float32(1) / np.sqrt(sum_in_order(row, True) / n + eps) for row in x]
    input = torch.from_numpy(x).to(device)
    assert_same_bits(ops.rms_norm_forward(input, None, 1e-3)[1], torch.tensor(np.array(rstd)))
    mean = [sum_in_order(row, False) / n for row in x]
    rstd = [
        np.float32(1) / np.sqrt(sum_in_order(row - m, True) / n + eps) for row, m in zip(x, mean, strict=True)
    ]
    _, got_mean, got_rstd = ops.layer_norm_forward(input, None, None, 1e-3)
    assert_same_bits(got_mean, torch.tensor(np.array(mean)))
    assert_same_bits(got_rstd, torch.tensor(np.array(rstd)))


def test_weight_gradients_are_summed_in_documented_order(device: torch.device) -> None:
    """The gradients of weight and bias are binary trees that add neighboring rows first."""
    x, grad = (torch.randn(300, 5, generator=torch.Generator().manual_seed(i)) for i in range(2))
    _, mean, rstd = ops.layer_norm_forward(x.to(device), None, None, 1e-5)
    arguments = (grad.to(device), x.to(device), torch.ones(5, device=device), mean, rstd)
    _, grad_weight, grad_bias = ops.layer_norm_backward(*arguments)
    normalised = (x.numpy() - mean.cpu().numpy()[:, None]) * rstd.cpu().numpy()[:, None]
    for got, terms in ((grad_weight, grad.numpy() * normalised), (grad_bias, grad.numpy())):
        rows = list(terms)
        while len(rows) > 1:
            rows = [rows[i] + rows[i + 1] if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
        assert_same_bits(got, torch.from_numpy(rows[0]))
    assert_same_bits(grad_bias, ops.bias_backward(arguments[0]))


@norms
@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_opcheck(case: Case, centered: bool, device: torch.device) -> None:
    arguments = without_nan(arguments_of(case, centered, device))
    kind = "layer_norm" if centered else "rms_norm"
    _, *stats = op(centered, "_forward")(*arguments)
    backward = (grad_like(arguments[0]), *arguments[:2], *stats, arguments[-1])
    opcheck(getattr(OPS, kind + "_backward").default, backward)
    for name in ("", "_forward"):  # layer_norm, layer_norm_forward, rms_norm, rms_norm_forward
        opcheck(getattr(OPS, kind + name).default, arguments)
    leaves = tuple(t.requires_grad_() if isinstance(t, Tensor) else t for t in arguments)
    for name in ("", "_forward"):
        opcheck(getattr(OPS, kind + name).default, leaves)


@norms
def test_strided_inputs_give_the_same_bits(centered: bool, device: torch.device) -> None:
    wide = torch.randn(40, 512, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 256, device=device).bfloat16()
    parameters = [torch.randn(512, device=device).bfloat16()[::2] for _ in range(1 + centered)]
    for input in (wide[:, ::2], flat[1:].view(24, 256), wide[3:17, 5:261], wide[:, :256].expand(2, 40, 256)):
        plain = [t.clone(memory_format=torch.contiguous_format) for t in (input, *parameters)]
        one = torch.ones((), device=device, dtype=input.dtype).expand_as(input)  # a gradient with stride 0
        for got, expected in zip(
            op(centered, "_forward")(input, *parameters, 1e-5),
            op(centered, "_forward")(*plain, 1e-5),
            strict=True,
        ):
            assert_same_bits(got, expected)
        _, *stats = op(centered, "_forward")(*plain, 1e-5)
        for got, expected in zip(
            op(centered, "_backward")(one, input, parameters[0], *stats),
            op(centered, "_backward")(one.contiguous(), *plain[:2], *stats),
            strict=True,
        ):
            assert_same_bits(got, expected)


@norms
def test_compiles_without_graph_breaks(centered: bool, device: torch.device) -> None:
    def train(input: Tensor, *parameters: Tensor) -> Tensor:
        return (op(centered, "")(input, *parameters, 1e-6, True) * 3).square().mean()

    compiled = torch.compile(train, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 40):
        results = []
        for function in (compiled, train):
            generator = torch.Generator().manual_seed(rows)
            leaves = [
                torch.randn(shape, generator=generator).to(device).requires_grad_()
                for shape in ((rows, 64), *((64,),) * (1 + centered))
            ]
            function(*leaves).backward()
            results.append([leaf.grad for leaf in leaves])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@norms
def test_graph_replays_with_new_data(centered: bool) -> None:
    leaves = [
        torch.randn(shape, device="cuda", requires_grad=True)
        for shape in ((70, 520), *((520,),) * (1 + centered))
    ]

    def step() -> tuple[Tensor, ...]:
        output = op(centered, "")(*leaves, 1e-5)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

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
            for leaf in leaves:
                leaf.copy_(torch.randn(leaf.shape, generator=generator))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)


X, W = torch.zeros(4, 8), torch.ones(8)
BF16 = W.bfloat16()


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        (
            "rms_norm",
            (X.int(), None, 1e-5),
            TypeError,
            "argument 'input': expected one of the dtypes float32, bfloat16, float16, got int32. "
            "Convert it with .to() first.",
        ),
        (
            "layer_norm",
            (X[:, :0], None, None, 1e-5),
            ValueError,
            "argument 'input': expected a last dimension of at least 1, got float32[4, 0] on cpu. There is nothing to "
            "normalise in an empty row.",
        ),
        (
            "rms_norm",
            (X, BF16, 1e-5),
            TypeError,
            "argument 'weight': expected float32, like input, got bfloat16. Convert one of them with .to() first.",
        ),
        (
            "layer_norm_forward",
            (X, W, W[:7], 1e-5),
            ValueError,
            "argument 'bias': expected size 8 in dimension 0 (the last dimension of 'input'), got float32[7] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "rms_norm_forward",
            (X, W, -1.0),
            ValueError,
            "argument 'eps': expected a number that is not negative, got -1. Pass a small one, for example 1e-5.",
        ),
        (
            "rms_norm_backward",
            (X[:3], X, W, torch.ones(4)),
            ValueError,
            "argument 'grad': expected the sizes of 'input', float32[4, 8] on cpu, got float32[3, 8] on cpu. Pass the "
            "gradient of the output.",
        ),
        (
            "layer_norm_backward",
            (X, X, W, torch.ones(5), torch.ones(4)),
            ValueError,
            "argument 'mean': expected a number for each row of 'input', float32[4, 8] on cpu, got float32[5] on cpu. "
            "Pass what the forward op returned.",
        ),
    ],
)
def test_errors_have_four_parts(name: str, arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, name)(*arguments)
    assert str(caught.value) == f"transformer_plugin::{name}: {text}"
