"""RMSNorm and LayerNorm with quantized output: the bytes of the norm followed by quantize."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import SPECS, assert_all_same
from tests.ops.test_norm import arguments_of, assert_same_numbers, norms, op, without_nan
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.fused_cases import given
from transformer_plugin.testing.norm_cases import norm_quantize_cases
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import rows_of

OPS = torch.ops.transformer_plugin
CASES = list(norm_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """Returns the arguments of the norm alone, and the format."""
    *before, format, zero_centered = arguments
    return (*before, zero_centered), format


@norms
@by_case
def test_output_has_the_bytes_of_the_steps(case: Case, centered: bool, device: torch.device) -> None:
    arguments = arguments_of(case, centered, device)
    alone, format = split(arguments)
    output, *stats = op(centered, "_forward")(*alone)
    more = rows_of(given(output, format))
    data, scale, *got_stats = op(centered, "_quantize")(*arguments, **more)
    assert_all_same((data, scale), ops.quantize(output, format, **more))
    if not more:
        assert_all_same((data, scale), oracle.both_directions(output, SPECS[format])[:2])
    for got, expected in zip(got_stats, stats, strict=True):
        assert_same_numbers(got, expected, "statistics")


@norms
@by_case
def test_output_has_the_bytes_of_the_reference(case: Case, centered: bool, device: torch.device) -> None:
    """Compares with the reference on the CPU, so that CPU and CUDA agree to the last byte."""
    arguments = arguments_of(case, centered)
    alone, format = split(arguments)
    more = rows_of(given(op(centered, "")(*alone), format))
    there = {name: value.to(device) for name, value in more.items()}
    data, scale, *stats = op(centered, "_quantize", reference)(*arguments, **more)
    got = op(centered, "_quantize")(*arguments_of(case, centered, device), **there)
    got_data, got_scale, *got_stats = got
    assert_all_same((got_data, got_scale), (data, scale))
    for got, expected in zip(got_stats, stats, strict=True):
        assert_same_numbers(got, expected, "statistics")


@norms
def test_strided_inputs_give_the_same_bits(centered: bool, device: torch.device) -> None:
    wide = torch.randn(40, 512, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 256, device=device).bfloat16()
    parameters = [torch.randn(512, device=device).bfloat16()[::2] for _ in range(1 + centered)]
    for input in (wide[:, ::2], flat[1:].view(24, 256), wide[3:17, 5:261], wide[:1, :256].expand(7, 256)):
        plain = [t.clone(memory_format=torch.contiguous_format) for t in (input, *parameters)]
        for format in ("fp8_block", "mxfp8"):
            got = op(centered, "_quantize")(input, *parameters, 1e-5, format)
            expected = op(centered, "_quantize")(*plain, 1e-5, format)
            assert_all_same(got[:2], expected[:2])
            assert_same_bits(got[-1], expected[-1], "rstd")


@pytest.mark.usefixtures("schema_checks_take_fp8")
@norms
@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.name)
def test_opcheck(case: Case, centered: bool, device: torch.device) -> None:
    arguments = without_nan(arguments_of(case, centered, device))
    overload = (OPS.layer_norm_quantize if centered else OPS.rms_norm_quantize).default
    alone, format = split(arguments)
    more = rows_of(given(op(centered, "")(*alone), format))
    opcheck(overload, (arguments[0].requires_grad_(), *arguments[1:]), more)


@norms
def test_compiles_without_graph_breaks(centered: bool, device: torch.device) -> None:
    def rows(input: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        blocks = op(centered, "_quantize")(input, *parameters, 1e-5, "fp8_block")
        nvfp4 = op(centered, "_quantize")(input, *parameters, 1e-5, "nvfp4", amax=parameters[0][:1].abs())
        more = op(centered, "_quantize")(input, *parameters, 1e-5, "mxfp8:tiled", True)
        return *blocks, *nvfp4, *more

    compiled = torch.compile(rows, fullgraph=True, dynamic=True, backend="aot_eager")
    parameters = [torch.randn(256, device=device) for _ in range(1 + centered)]
    for count in (3, 150):
        input = torch.randn(count, 256, device=device)
        for got, expected in zip(compiled(input, *parameters), rows(input, *parameters), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@norms
def test_graph_replays_with_new_data(centered: bool) -> None:
    input = torch.randn(130, 7168, device="cuda").bfloat16()
    parameters = [torch.randn(7168, device="cuda").bfloat16() for _ in range(1 + centered)]

    amax, seed = torch.ones(1, device="cuda"), torch.ones(1, device="cuda", dtype=torch.int64)

    def step() -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for format in ("fp8_block", "mxfp8"):
            outputs += op(centered, "_quantize")(input, *parameters, 1e-5, format)
        outputs += op(centered, "_quantize")(input, *parameters, 1e-5, "fp8_tensor", amax=amax)
        return *outputs, *op(centered, "_quantize")(input, *parameters, 1e-5, "nvfp4:sr", False, amax, seed)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed_of_replay in range(3):
        generator = torch.Generator().manual_seed(seed_of_replay)
        for tensor in (input, *parameters):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        amax.fill_(3.0 + seed_of_replay)
        seed.fill_(seed_of_replay)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)


def test_code_of_the_manual_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "ops" / "norm.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    x, weight = names["x"].requires_grad_(), names["weight"].requires_grad_()
    ops.rms_norm(x, weight, 1e-5).sum().backward()
    assert_same_bits(names["grad_x"], x.grad)
    assert_same_bits(names["grad_weight"], weight.grad)


X = torch.zeros(4, 96)


@norms
@pytest.mark.parametrize(
    ("input", "format", "text"),
    [
        (
            X,
            "fp8_tensor",
            "argument 'amax': expected a float32 tensor of sizes [1], the largest magnitudes that 'fp8_tensor' scales "
            "by, got None. Compute it with transformer_plugin.ops.amax of what {norm} gave in earlier steps, or use "
            "{norm}, and quantize its result.",
        ),
        (
            X,
            "nvfp4:row_scaled",
            "argument 'amax': expected a float32 tensor of sizes [4], the largest magnitudes that 'nvfp4:row_scaled' "
            "scales by, got None. Compute it with transformer_plugin.ops.amax of what {norm} gave in earlier steps, "
            "or use {norm}, and quantize its result.",
        ),
        (
            X[:, :40],
            "nvfp4",
            "argument 'input': expected a last dimension that is a multiple of 16, the block of nvfp4, got "
            "float32[4, 40] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
        ),
        (
            X,
            "mxfp8:square",
            "argument 'format': expected blocks along a row, got 'mxfp8:square'. Use {norm}, and quantize its result.",
        ),
        (
            X[:, :40],
            "mxfp8",
            "argument 'input': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
            "float32[4, 40] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
        ),
        (
            X.expand(2, 4, 96),
            "fp8_block",
            "argument 'input': expected 2 dimensions, got float32[2, 4, 96] on cpu. Reshape it first.",
        ),
    ],
)
def test_errors_have_four_parts(centered: bool, input: Tensor, format: str, text: str) -> None:
    kind = "layer_norm" if centered else "rms_norm"
    with pytest.raises(ValueError) as caught:
        getattr(ops, kind + "_quantize")(input, *(None,) * (1 + centered), 1e-5, format)
    assert str(caught.value) == f"transformer_plugin::{kind}_quantize: {text.format(norm=kind)}"
