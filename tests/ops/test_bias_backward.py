"""The gradient of a bias: the documented order of its sum, computed alone and fused with quantizing the gradient."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compile.model import of_any_rows
from tests.opcheck import opcheck
from tests.ops import quantize_oracle as oracle
from tests.ops.op_names import name_of
from tests.ops.quantize_oracle import SPECS, assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.recipes import (
    BFloat16,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.fused_cases import bias_backward_quantize_cases
from transformer_plugin.testing.fused_cases import given as given_for
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS, columns_of, rows_of

OPS = torch.ops.transformer_plugin
CASES = list(bias_backward_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def sum_of(rows: np.ndarray) -> np.ndarray:
    """Adds rows in the documented order: a binary tree whose left half is the largest power of two below the count."""
    count = len(rows)
    if count < 2:
        return rows[0] if count else np.zeros(rows.shape[1], np.float32)
    half = 1 << (count - 1).bit_length() - 1
    return sum_of(rows[:half]) + sum_of(rows[half:])


def sums_of(grad: Tensor, sizes: list[int] | None = None) -> Tensor:
    rows = grad.detach().cpu().float().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        if sizes is None:
            return torch.from_numpy(np.asarray(sum_of(rows) + np.float32(0)))
        ends = np.cumsum([0, *sizes])
        sums = [sum_of(rows[begin:end]) for begin, end in pairwise(ends)]
    return torch.from_numpy(np.array(sums, np.float32).reshape(len(sizes), rows.shape[1]) + np.float32(0))


def assert_same_sums(got: Tensor, expected: Tensor) -> None:
    """Asserts equal bits, except that any NaN equals any NaN: processors give NaN different signs."""
    assert_same_bits(got.isnan(), expected.isnan(), "NaN of grad_bias")
    assert_same_bits(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), "grad_bias")


def bias_gradient(grad: Tensor, sizes: Tensor | None) -> Tensor:
    return ops.bias_backward(grad) if sizes is None else ops.grouped_bias_backward(grad, sizes)[0]


def given(grad: Tensor, sizes: Tensor | None, format: str) -> dict[str, Tensor]:
    """Returns the amaxes for nvfp4. fp8_tensor computes its own amax if the call has none."""
    return given_for(grad, format, sizes) if format.startswith("nvfp4") else {}


@by_case
def test_quantized_bytes_and_sums(case: Case, device: torch.device) -> None:
    grad, format, sizes = case.arguments(device)
    counts = None if sizes is None else sizes.tolist()
    more = given(grad, sizes, format)
    if more:
        expected = ops.quantize(grad, format, sizes, **more, columnwise=True)
    elif counts is None:
        expected = oracle.both_directions(grad, SPECS[format])
    else:
        expected = oracle.grouped_both_directions(grad, counts, SPECS[format])
    sums = sums_of(grad, counts)
    *both, grad_bias = ops.bias_backward_quantize(grad, format, sizes, **more, columnwise=True)
    assert_all_same(tuple(both), expected)
    assert_same_sums(grad_bias.cpu(), sums)
    assert_same_sums(bias_gradient(grad, sizes).cpu(), sums)  # the sum alone, without quantization
    for flags, quantized, own in (
        ({}, expected[:2], rows_of(more)),
        (COLUMNS, expected[2:], columns_of(more)),
    ):
        *got, grad_bias = ops.bias_backward_quantize(grad, format, sizes, **own, **flags)
        assert_all_same(tuple(got), quantized)
        assert_same_sums(grad_bias.cpu(), sums)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_reference_has_the_bytes_of_the_op(case: Case) -> None:
    grad, format, sizes = case.arguments()
    more = given(grad, sizes, format)
    *expected, sums = ops.bias_backward_quantize(grad, format, sizes, **more, columnwise=True)
    *got, got_sums = reference.bias_backward_quantize(grad, format, sizes, **more, columnwise=True)
    assert_all_same(tuple(got), tuple(expected))
    assert_same_sums(got_sums, sums)
    for flags, quantized, own in (
        ({}, expected[:2], rows_of(more)),
        (COLUMNS, expected[2:], columns_of(more)),
    ):
        *got, got_sums = reference.bias_backward_quantize(grad, format, sizes, **own, **flags)
        assert_all_same(tuple(got), tuple(quantized))
        assert_same_sums(got_sums, sums)


def test_order_of_the_sum_by_hand(device: torch.device) -> None:
    """2^-24 is lost if it is added to 1 alone, but not if it is added to another 2^-24 first."""
    tiny = 2.0**-24
    grad = torch.tensor([[1.0], [tiny], [tiny], [tiny], [1.0]], device=device)
    # (1 + tiny) + (tiny + tiny) = 1 + 2 tiny, which is exact in FP32; adding 1 to it rounds to even, which is
    # 2
    assert ops.bias_backward(grad).item() == 2.0
    assert ops.bias_backward(grad[:4]).item() == 1.0 + 2 * tiny
    assert ops.bias_backward(grad[:2]).item() == 1.0
    assert ops.bias_backward(grad[1:5]).item() == 1.0 + 2 * tiny  # (tiny + tiny) + (tiny + 1)
    sizes = torch.tensor([1, 0, 4], device=device)
    assert ops.grouped_bias_backward(grad, sizes)[0].tolist() == [[1.0], [0.0], [1.0 + 2 * tiny]]


def test_sums_are_close_to_float64(device: torch.device) -> None:
    grad = torch.randn(5000, 40, generator=torch.Generator().manual_seed(1)).to(device)
    exact, magnitude = grad.double().sum(0), grad.double().abs().sum(0)
    assert ((ops.bias_backward(grad).double() - exact).abs() <= magnitude * 13 * 2.0**-24).all()  # 13 levels
    assert_same_bits(ops.bias_backward(torch.ones(3, 2).double()), torch.full((2,), 3.0).double())


def test_scaled_rows_are_rounded_before_the_sum(device: torch.device) -> None:
    """With a scale for each row, the products are rounded to float32 before they are added."""
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(300, 70, generator=generator).bfloat16()
    scale, sizes = torch.rand(300, generator=generator), torch.tensor([131, 0, 160])
    bias = torch.zeros(3, 70)
    expected = sums_of(grad.float() * scale[:, None], sizes.tolist())
    on_device = [t.to(device) for t in (grad, sizes, bias, scale)]
    assert_same_sums(ops.grouped_bias_backward(*on_device)[0].cpu(), expected)
    assert_same_sums(reference.grouped_bias_backward(grad, sizes, bias, scale)[0], expected)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_tensor:e5m2,pow2"])
@pytest.mark.parametrize("sizes", [None, [100, 0, 33]])
def test_amax_argument(format: str, sizes: list[int] | None, device: torch.device) -> None:
    grad = torch.randn(140, 96, generator=torch.Generator().manual_seed(2)).to(device)
    groups = None if sizes is None else torch.tensor(sizes, device=device)
    amax = torch.tensor([3.0] if sizes is None else [2.0, 1.0, 9.0], device=device)
    *got, grad_bias = ops.bias_backward_quantize(grad, format, groups, amax=amax, columnwise=True)
    steps = ops.quantize(grad, format, groups, amax=amax, columnwise=True)
    assert_all_same(tuple(got), steps)
    assert_same_bits(grad_bias, bias_gradient(grad, groups))
    *got, _ = ops.bias_backward_quantize(grad, format, groups, amax=amax)
    assert_all_same(tuple(got), steps[:2])
    *meant, _ = reference.bias_backward_quantize(grad, format, groups, amax=amax, columnwise=True)
    assert_all_same(tuple(meant), steps)


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(40, 4 * 256, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 512, device=device).bfloat16()
    one = torch.ones((), device=device).expand(200, 64)  # stride 0
    for grad in (wide[:, ::2], flat[1:].view(24, 512), wide[3:17, 5:517], one):
        copy = grad.clone(memory_format=torch.contiguous_format)
        *got, sums = ops.bias_backward_quantize(grad, "mxfp8", columnwise=True)
        *expected, wanted = ops.bias_backward_quantize(copy, "mxfp8", columnwise=True)
        assert_all_same(tuple(got), tuple(expected))
        assert_same_bits(sums, wanted)
        assert_same_bits(ops.bias_backward(grad), wanted)
    assert_same_bits(ops.bias_backward(one), torch.full((64,), 200.0, device=device))


@pytest.mark.usefixtures("schema_checks_take_fp8")
@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    grad, format, sizes = case.arguments(device)
    more = given(grad, sizes, format)
    arguments = (grad.nan_to_num().requires_grad_(), format, sizes)
    for flags, own in (({}, rows_of(more)), (COLUMNS, columns_of(more)), (BOTH, more)):
        opcheck(OPS.bias_backward_quantize.default, arguments, {**own, **flags})
    opcheck(OPS.bias_backward.default, arguments[:1])


class Recorder(TorchDispatchMode):
    """Records the names of the package's ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "transformer_plugin":
            self.names.append(name_of(func, args, kwargs))
        return func(*args, **(kwargs or {}))


FUSED = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]
OTHERS = [BFloat16(), NVFP4BlockScaling(stochastic_rounding=False)]


def step(
    recipe: Recipe, grouped: bool, wanted: str, device: torch.device, scaled: bool = False
) -> tuple[Tensor, list[str], dict[str, Tensor]]:
    """Runs one linear or grouped_linear. Returns the output gradient, the ops of the backward, and the gradients of
    the leaves."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((176, 64), (3, 96, 64) if grouped else (96, 64), (3, 96) if grouped else (96,), (176, 96))
    x, w, bias, grad = (torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes)
    leaves = {"input": x, "weight": w, "bias": bias}
    for name in wanted.split():
        leaves[name].requires_grad_()
    keys = recipe.input_format, recipe.weight_format, recipe.grad_format
    if grouped:
        scale = torch.rand(176, generator=generator).to(device) if scaled else None
        output = ops.grouped_linear(x, w, groups_of(device), bias, scale, *keys)
    else:
        output = ops.linear(x, w, bias, *keys)
    with Recorder() as recorder:
        output.backward(grad)
    return grad, recorder.names, {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


def groups_of(device: torch.device) -> Tensor:
    return torch.tensor([48, 0, 112], device=device)


def uses_quantized_products(device: torch.device) -> bool:
    """Whether products multiply quantized data directly, so that the weight gradient needs column-wise operands."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@pytest.mark.parametrize("wanted", ["input weight bias", "weight bias", "input bias"])
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped_linear"])
@pytest.mark.parametrize("recipe", FUSED, ids=lambda recipe: recipe.grad_format)
def test_layers_fuse_the_bias_gradient_with_quantization(
    recipe: Recipe, grouped: bool, wanted: str, device: torch.device
) -> None:
    grad, names, got = step(recipe, grouped, wanted, device)
    fused = [name for name in names if name.startswith("bias_backward_quantize")]
    direction = {"input weight bias": " both", "weight bias": " columns", "input bias": ""}[wanted]
    if recipe.grad_format.startswith("fp8_tensor") and not uses_quantized_products(device):
        direction = ""  # one scale serves both directions
    assert fused == [f"bias_backward_quantize{direction}"]
    assert not {"bias_backward", "grouped_bias_backward"} & set(names)
    assert not [name for name in names if name.startswith(("quantize", "grouped quantize"))]
    sums = bias_gradient(grad, groups_of(device) if grouped else None)
    assert_same_bits(got["bias"], sums.bfloat16())
    # The other gradients do not depend on whether the gradient of the bias is requested.
    _, unfused, alone = step(recipe, grouped, wanted.removesuffix(" bias"), device)
    assert not [name for name in unfused if name.startswith("bias_backward")]
    for name, value in alone.items():
        assert_same_bits(got[name], value, name)


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped_linear"])
@pytest.mark.parametrize("recipe", [*OTHERS, *FUSED], ids=lambda recipe: recipe.grad_format)
def test_layers_that_compute_the_bias_gradient_separately(
    recipe: Recipe, grouped: bool, device: torch.device
) -> None:
    wanted = "bias" if recipe in FUSED else "input weight bias"
    grad, names, got = step(recipe, grouped, wanted, device)
    alone = "grouped_bias_backward" if grouped else "bias_backward"
    assert [name for name in names if "bias_backward" in name] == [alone]
    assert_same_bits(got["bias"], bias_gradient(grad, groups_of(device) if grouped else None).bfloat16())


def test_scaled_bias_gradient_is_computed_separately(device: torch.device) -> None:
    _, names, _ = step(MXFP8BlockScaling(), True, "input weight bias", device, scaled=True)
    assert [name for name in names if "bias_backward" in name] == ["grouped_bias_backward"]


def test_unquantized_products_sum_in_the_same_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    x, w, grad = (torch.randn(s, generator=generator).to(device) for s in ((200, 8), (24, 8), (200, 24)))
    scale = torch.full((3,), 100.0, device=device)
    expected = sums_of(grad).to(device)
    for product in (
        lambda bias: ops.linear(x, w, bias),
        lambda bias: ops.gemm(x, w, bias),
        lambda bias: ops.linear(x, w, bias, scale=scale),
    ):
        bias = torch.zeros(24, device=device, requires_grad=True)
        product(bias).backward(grad)
        assert bias.grad is not None
        assert_same_bits(bias.grad, expected)


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=["fp8_block", "mxfp8"])
def test_compiles_without_graph_breaks(recipe: Recipe, device: torch.device) -> None:
    keys = recipe.input_format, recipe.weight_format, recipe.grad_format

    def train(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return ops.linear(x, w, bias, *keys).square().sum()

    def quantize(grad: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return *ops.bias_backward_quantize(grad, keys[2], sizes, columnwise=True), ops.bias_backward(grad)

    compiled = torch.compile(train, fullgraph=True, backend="aot_eager", dynamic=True)
    both = torch.compile(quantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 130, 300):
        generator = torch.Generator().manual_seed(rows)
        leaves = [torch.randn(s, generator=generator).to(device) for s in ((rows, 32), (64, 32), (64,))]
        gradients = []
        for function in (compiled, train):
            copies = [leaf.clone().requires_grad_() for leaf in leaves]
            gradients.append(torch.autograd.grad(function(*copies), copies))
        (x, w, bias), (expected_x, expected_w, expected_bias) = gradients
        assert_same_bits(x, expected_x)
        assert_same_bits(bias, expected_bias)
        limit = of_any_rows(recipe.weight_format.split(":")[0], device)
        assert float((w - expected_w).abs().max()) <= limit * float(expected_w.abs().max())
        arguments = leaves[0], torch.tensor([rows // 2, 1], device=device)
        for got, expected in zip(both(*arguments), quantize(*arguments), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4:rht"])
def test_graph_replays_with_new_sizes(format: str) -> None:
    grad = torch.randn(512, 160, device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor([96, 208, 48], device="cuda")
    more = {"amax": torch.ones(3), "amax_t": torch.ones(3)} if format.startswith("nvfp4") else {}
    there = {name: value.cuda() for name, value in more.items()}
    ops.bias_backward_quantize(grad, format, sizes, **there, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.bias_backward_quantize(grad, format, sizes, **there, columnwise=True)
    for turn, counts in enumerate(([0, 512, 0], [144, 0, 16], [0, 0, 0])):
        sizes.copy_(torch.tensor(counts))
        grad.copy_(torch.randn(512, 160))
        for name, value in more.items():
            there[name].copy_(value.fill_(1.0 + turn))
        graph.replay()
        *expected, sums = ops.bias_backward_quantize(grad.cpu(), format, sizes.cpu(), **more, columnwise=True)
        assert_all_same(tuple(t.cpu() for t in captured[:4]), tuple(expected))
        assert_same_bits(captured[4], sums)
