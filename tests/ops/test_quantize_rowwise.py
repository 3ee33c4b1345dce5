"""quantize_rowwise: bytes and scales against the rule written in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.quantize_oracle import DTYPES, FLT_MAX, Spec, as_numpy, round_to_codes, scale_of
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import special_matrix
from transformer_plugin.testing.rowwise_cases import ROWWISE_OPTIONS, quantize_rowwise_cases

CASES = list(quantize_rowwise_cases())
_op = torch.ops.transformer_plugin.quantize_rowwise.default
each_option = pytest.mark.parametrize("options", ROWWISE_OPTIONS, ids=str)


def named(options: tuple[str, bool, float]) -> dict[str, Any]:
    return dict(zip(("element", "power_of_two_scales", "epsilon"), options, strict=True))


def oracle(
    input: Tensor, element: str, power_of_two_scales: bool, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Each row a matrix of its own under the scale of the whole."""
    spec = Spec(element, power_of_two_scales, None, epsilon)
    rows = as_numpy(input).reshape(input.shape[:-1].numel(), input.shape[-1])
    factors = np.array([scale_of(row, spec, float(FLT_MAX)) for row in rows], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = round_to_codes(rows * factors[:, None], element)
    scale = torch.from_numpy(np.float32(1) / factors).view(input.shape[:-1])
    return torch.from_numpy(codes).view(input.shape).view(DTYPES[element]), scale


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], name: str = "") -> None:
    for part, one, other in zip(("codes", "scale"), got, expected, strict=True):
        assert_same_bits(one, other.to(one.device), f"{name} {part}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: Case, device: torch.device) -> None:
    input, options = case.arguments()
    expected = oracle(input, **options)
    assert_same(reference.quantize_rowwise(input, **options), expected, "reference")
    assert_same(ops.quantize_rowwise(input.to(device), **options), expected)


@each_option
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("width", [288, 291])
def test_special_values(
    width: int, dtype: torch.dtype, options: tuple[str, bool, float], device: torch.device
) -> None:
    """NaN, infinities, subnormals, ends of the range; rows of one kind alone, whose scales overflow or are 1."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    alone = [0.0, float("nan"), float("-inf"), tiny, -tiny, torch.finfo(dtype).max]
    rows = torch.tensor(alone, dtype=dtype)[:, None].repeat(1, width)
    input = torch.cat([special_matrix(dtype, width), rows])
    expected = oracle(input, **named(options))
    assert_same(reference.quantize_rowwise(input, **named(options)), expected, "reference")
    assert_same(ops.quantize_rowwise(input.to(device), **named(options)), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(40, 3 * 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_device = wide.to(device)
    for view in (
        lambda x: x[:, ::3],
        lambda x: x.T,
        lambda x: x.flatten()[1:4097].view(64, 64),  # rows that begin off 16 bytes
        lambda x: x[3:9, 5:37],
        lambda x: x[:1].expand(7, 192),
        lambda x: x[0],
    ):
        assert_same(ops.quantize_rowwise(view(on_device)), oracle(view(wide), "e4m3", False))


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(case: Case, device: torch.device) -> None:
    input, options = case.arguments(device)
    opcheck(_op, (input,), options)


def test_has_no_gradient(device: torch.device) -> None:
    codes, scale = ops.quantize_rowwise(torch.randn(3, 16, device=device, requires_grad=True))
    assert not codes.requires_grad
    assert not scale.requires_grad


def test_compiled(device: torch.device) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.quantize_rowwise(x * 2, element="e5m2", power_of_two_scales=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 40), (7, 24)):
        x = torch.randn(shape, device=device)
        assert_same(compiled(x), step(x))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 1024, 2048, 8193])
def test_cuda_graph(width: int) -> None:
    x = torch.zeros(37, width, device="cuda", dtype=torch.bfloat16)
    ops.quantize_rowwise(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.quantize_rowwise(x)
    for seed in range(3):
        new = torch.randn(37, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
        x.copy_(new)
        graph.replay()
        assert_same(captured, oracle(new, "e4m3", False))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 1023])
def test_past_32_bits(width: int) -> None:
    """Rows past 2**31 elements."""
    rows = 2**31 // width + 130
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    last = torch.randn(140, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-140:] = last.cuda()
    codes, scale = ops.quantize_rowwise(x)
    assert_same((codes[-140:], scale[-140:]), oracle(last, "e4m3", False))
    assert bool((scale[:-140] == 1).all())
    assert not codes[:-140].view(torch.uint8).any()


ONES = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("input", "options", "error", "text"),
    [
        (
            ONES.double(),
            {},
            TypeError,
            "'input': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() first.",
        ),
        (
            torch.ones(()),
            {},
            ValueError,
            "'input': expected at least 1 dimension, the last of which holds rows, got float32[] on cpu. "
            "Reshape it first.",
        ),
        (
            ONES,
            {"element": "e2m1"},
            ValueError,
            "'element': expected 'e4m3' or 'e5m2', got 'e2m1'. Pass one of the two.",
        ),
        (
            ONES,
            {"epsilon": -1.0},
            ValueError,
            "'epsilon': expected a magnitude of float32, at least 0, got -1. Leave it out for none.",
        ),
        (
            ONES,
            {"epsilon": float("nan")},
            ValueError,
            "'epsilon': expected a magnitude of float32, at least 0, got nan. Leave it out for none.",
        ),
        (
            ONES,
            {"epsilon": 1e39},
            ValueError,
            "'epsilon': expected a magnitude of float32, at least 0, got 1e+39. Leave it out for none.",
        ),
    ],
)
def test_errors(input: Tensor, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.quantize_rowwise(input, **options)
    assert str(caught.value) == f"transformer_plugin::quantize_rowwise: argument {text}"
    with pytest.raises(error):
        ops.quantize_rowwise(input.to("meta"), **options)
