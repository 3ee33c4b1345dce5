"""Refusals: the four parts of each error, and a buffer that a refused call leaves as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.functional.values import ROWS, draw, sizes_on
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.numerics import assert_same_bits

G, N, K = 3, 32, 64
B = "fp8_block"
Kind = type[Exception]
#: Op, argument, expected, got, advice.
Parts = tuple[str, str, str, str, str]


class Given:
    """The arguments of one refused call."""

    def __init__(self, device: torch.device) -> None:
        self.x, self.sizes = draw(ROWS, K, device=device), sizes_on(device)
        self.weight = draw(G, N, K, seed=1, device=device)
        self.grad = draw(ROWS, N, seed=2, device=device)
        self.rows = tp.GroupedTensor(self.x, self.sizes)
        self.grads = tp.GroupedTensor(self.grad, self.sizes)
        self.quantized = tp.quantize(self.x, B)
        self.ragged = tp.quantize(self.rows, B)
        self.columns = tp.quantize(self.rows, B, rowwise=False, columnwise=True)
        self.stack = tp.quantize(self.weight, B)
        self.wide = draw(ROWS, 256, seed=3, device=device)
        self.seed = torch.ones(1, dtype=torch.int64, device=device)


RAGGED_X = f"GroupedTensor [{ROWS}, {K}] in none"
TWICE = "None, since '{}' has its own"
MATRIX = "a matrix without groups"
DENSE = "Call grouped_{}, or packed() for all rows"
NO_FORMAT = "Pass format, or leave it out"

CASES: dict[str, tuple[Callable[[Given], Any], Kind, Parts]] = {
    "sizes twice": (
        lambda g: tp.grouped_gemm(g.rows, g.weight, g.sizes),
        ValueError,
        ("grouped_gemm", "group_sizes", TWICE.format("a"), "Tensor [3] of int64 on", "Leave it out"),
    ),
    "sizes twice, wgrad, second": (
        lambda g: tp.grouped_gemm_wgrad(g.grad, g.rows, g.sizes),
        ValueError,
        ("grouped_gemm_wgrad", "group_sizes", TWICE.format("input"), "Tensor [3] of int64", "Leave it out"),
    ),
    "sizes twice, layer": (
        lambda g: tp.grouped_linear(g.rows, g.weight, g.sizes),
        ValueError,
        ("grouped_linear", "group_sizes", TWICE.format("input"), "Tensor [3] of int64", "Leave it out"),
    ),
    "sizes twice, quantize": (
        lambda g: tp.quantize(g.rows, B, group_sizes=g.sizes),
        ValueError,
        ("quantize", "group_sizes", TWICE.format("input"), "Tensor [3] of int64", "Leave it out"),
    ),
    "sizes twice, gradient": (
        lambda g: tp.activation_backward(g.grads, g.x, format=B, group_sizes=g.sizes),
        ValueError,
        ("activation_backward", "group_sizes", TWICE.format("grad"), "Tensor [3] of int64", "Leave it out"),
    ),
    "other groups": (
        lambda g: tp.grouped_gemm_wgrad(g.grads, tp.GroupedTensor(g.x, g.sizes[:2])),
        ValueError,
        ("grouped_gemm_wgrad", "input", "3 groups, as 'grad'", RAGGED_X, "Both have the same groups"),
    ),
    **{
        f"sizes never, {name}": (
            call,
            ValueError,
            (
                name,
                "group_sizes",
                "the rows of each group",
                "None",
                f"Pass them, or a GroupedTensor with group sizes as '{argument}'",
            ),
        )
        for name, argument, call in (
            ("grouped_gemm", "a", lambda g: tp.grouped_gemm(g.x, g.weight)),
            ("grouped_gemm_wgrad", "grad", lambda g: tp.grouped_gemm_wgrad(g.grad, g.x)),
            ("grouped_linear", "input", lambda g: tp.grouped_linear(g.x, g.weight)),
            ("grouped_mlp", "input", lambda g: tp.grouped_mlp(g.x, g.weight, g.weight)),
            ("grouped_gemm_activation", "a", lambda g: tp.grouped_gemm_activation(g.x, g.weight)),
        )
    },
    "nothing to write over": (
        lambda g: tp.gemm_wgrad(g.grad, g.x, accumulate=False),
        ValueError,
        ("gemm_wgrad", "accumulate", "True without 'out'", "False", "Pass the tensor to write"),
    ),
    "nothing to write over, grouped": (
        lambda g: tp.grouped_gemm_wgrad(g.grads, g.rows, accumulate=False),
        ValueError,
        ("grouped_gemm_wgrad", "accumulate", "True without 'out'", "False", "Pass the tensor to write"),
    ),
    "a seed of a format that rounds to nearest": (
        lambda g: tp.activation_backward(g.wide[:, :128], g.wide, format=B, seed=g.seed),
        ValueError,
        ("activation_backward_quantize", "seed", "", "", ""),
    ),
    "no rows": (
        lambda g: tp.grouped_gemm(g.columns, g.weight),
        ValueError,
        ("grouped_gemm", "a", "rowwise data", "GroupedTensor [144, 64]", "Quantize it with rowwise=True"),
    ),
    "no columns": (
        lambda g: tp.gemm_wgrad(g.quantized, g.quantized),
        ValueError,
        ("gemm_wgrad", "grad", "columnwise data", "QuantizedTensor [144", "Quantize it with columnwise=True"),
    ),
    "no columns, grouped": (
        lambda g: tp.grouped_gemm_wgrad(g.columns, g.ragged),
        ValueError,
        ("grouped_gemm_wgrad", "input", "columnwise data", "GroupedTensor [144", "Quantize it with col"),
    ),
    **{
        f"quantized, {name}": (
            call,
            ValueError,
            (name, argument, "values that are not quantized", "Tensor [", "Call dequantize() on it"),
        )
        for name, argument, call in (
            ("quantize", "input", lambda g: tp.quantize(g.quantized, B)),
            ("activation", "input", lambda g: tp.activation(g.ragged)),
            ("activation_backward", "grad", lambda g: tp.activation_backward(g.quantized, g.x)),
            ("bias_backward", "grad", lambda g: tp.bias_backward(g.quantized, format=B)),
            ("rms_norm", "input", lambda g: tp.rms_norm(g.ragged, None, 1e-5)),
            ("layer_norm", "input", lambda g: tp.layer_norm(g.ragged, None, None, 1e-5, format=B)),
            ("linear", "weight", lambda g: tp.linear(g.x, g.quantized)),
            ("grouped_linear", "weight", lambda g: tp.grouped_linear(g.rows, g.stack)),
            ("grouped_mlp", "fc2_weight", lambda g: tp.grouped_mlp(g.rows, g.weight, g.stack)),
            ("grouped_gemm_activation", "a", lambda g: tp.grouped_gemm_activation(g.ragged, g.weight)),
            ("unpermute", "rows", lambda g: tp.unpermute(g.ragged, tp.Permutation(*[g.sizes] * 3))),
        )
    },
    **{
        f"ragged, {name}": (call, ValueError, (name, argument, MATRIX, RAGGED_X, DENSE.format(name)))
        for name, argument, call in (
            ("gemm", "a", lambda g: tp.gemm(g.rows, g.weight[0])),
            ("gemm", "b", lambda g: tp.gemm(g.x, g.rows)),
            ("gemm_wgrad", "input", lambda g: tp.gemm_wgrad(g.grad, g.rows)),
            ("linear", "input", lambda g: tp.linear(g.rows, g.weight[0])),
        )
    },
    "ragged matrices": (
        lambda g: tp.grouped_gemm(g.rows, g.rows),
        ValueError,
        ("grouped_gemm", "b", MATRIX, RAGGED_X, "Pass a stack of matrices, or a list"),
    ),
    "ragged in a list": (
        lambda g: tp.quantize([g.x, g.rows], B),
        ValueError,
        ("quantize", "input", MATRIX, RAGGED_X, "Quantize it on its own"),
    ),
    "sizes with a list": (
        lambda g: tp.quantize([g.x], B, group_sizes=g.sizes),
        ValueError,
        ("quantize", "group_sizes", "None with a list", "Tensor [3] of int64", "Quantize each matrix on its"),
    ),
    "seed with a list": (
        lambda g: tp.quantize([g.x], "nvfp4:sr", seed=g.seed),
        ValueError,
        ("quantize", "seed", "None with a list", "Tensor [1] of int64", "Quantize each matrix on its own"),
    ),
    "columns without a format": (
        lambda g: tp.activation(g.x, columnwise=True),
        ValueError,
        ("activation", "columnwise", "False without a format", "True", NO_FORMAT),
    ),
    "sizes without a format": (
        lambda g: tp.activation(g.x, group_sizes=g.sizes),
        ValueError,
        ("activation", "group_sizes", "None without a format", "Tensor [3] of int64", NO_FORMAT),
    ),
    "seed without a format": (
        lambda g: tp.rms_norm(g.x, None, 1e-5, seed=g.seed),
        ValueError,
        ("rms_norm", "seed", "None without a format", "Tensor [1] of int64", NO_FORMAT),
    ),
    "one direction without a format": (
        lambda g: tp.bias_backward(g.x, columnwise=False),
        ValueError,
        ("bias_backward", "columnwise", "True without a format", "False", NO_FORMAT),
    ),
    "no rows without a format": (
        lambda g: tp.bias_backward(g.x, rowwise=False),
        ValueError,
        ("bias_backward", "rowwise", "True without a format", "False", NO_FORMAT),
    ),
    "columns without a format, epilogue": (
        lambda g: tp.grouped_gemm_activation(g.rows, g.weight, columnwise=True),
        ValueError,
        ("grouped_gemm_activation", "columnwise", "False without a format", "True", NO_FORMAT),
    ),
    "seed of a format that rounds to nearest": (
        lambda g: tp.grouped_gemm_activation(g.rows, g.weight, format=B, seed=g.seed),
        ValueError,
        (
            "grouped_gemm_activation",
            "seed",
            "None for 'fp8_block:e4m3,pow2', which",
            "Tensor [1]",
            "Leave it",
        ),
    ),
    "delayed scaling": (
        lambda g: tp.grouped_linear(g.rows, g.weight, recipe=DelayedScaling()),
        ValueError,
        ("grouped_linear", "recipe", "a recipe whose scales come from", "DelayedScaling(", "Use the module"),
    ),
    "delayed scaling, dense": (
        lambda g: tp.linear(g.x, g.weight[0], recipe=DelayedScaling()),
        ValueError,
        ("linear", "recipe", "a recipe whose scales come from", "DelayedScaling(", "Use the module"),
    ),
    "format of a wrong type": (
        lambda g: tp.quantize(g.x, 8),
        TypeError,
        ("quantize", "format", "a format key or a ", "int", "Pass for"),
    ),
    "format of a wrong type, fused": (
        lambda g: tp.activation(g.x, format=torch.bfloat16),
        TypeError,
        ("activation", "format", "a format key or a ", "dtype", "Pass for"),
    ),
    "no tensor": (
        lambda g: tp.gemm_wgrad("x", g.x),
        TypeError,
        ("gemm_wgrad", "grad", "a tensor", "str", "Pass a tensor"),
    ),
    "no tensor, layer": (
        lambda g: tp.grouped_linear(g.rows, None),
        TypeError,
        ("grouped_linear", "weight", "a tensor", "NoneType", "Pass a tensor"),
    ),
    "no list": (
        lambda g: tp.grouped_gemm(g.rows, 3),
        TypeError,
        ("grouped_gemm", "b", "a tensor or a sequence of tensors", "int", "Pass a tensor, or a list"),
    ),
    "matrices of several formats": (
        lambda g: tp.grouped_gemm(g.ragged, [tp.quantize(g.weight[0], B), g.weight[1], g.weight[2]]),
        ValueError,
        ("grouped_gemm", "b", "matrices of one format, ", "Tensor [32, 64]", "Quantize them alike"),
    ),
    "columns of nvfp4": (
        lambda g: tp.with_columnwise(tp.quantize(g.x, "nvfp4")),
        ValueError,
        (
            "with_columnwise",
            "value",
            "a format whose scales ",
            "QuantizedTensor",
            "Quantize the original values",
        ),
    ),
    "columns of what is not quantized": (
        lambda g: tp.with_columnwise(g.rows),
        ValueError,
        ("with_columnwise", "value", "a value with rowwise data", RAGGED_X, "Call transformer_plugin"),
    ),
    "columns of columns": (
        lambda g: tp.with_columnwise(g.columns),
        ValueError,
        (
            "with_columnwise",
            "value",
            "a value with rowwise data",
            "GroupedTensor [144",
            "Call transformer_plugin",
        ),
    ),
}


def assert_parts(error: Exception, parts: Parts) -> None:
    """``transformer_plugin::op: argument 'name': expected ..., got .... advice``."""
    op, argument, expected, got, advice = map(re.escape, parts)
    pattern = (
        rf"transformer_plugin::{op}: argument '{argument}': expected {expected}.*, got .*{got}.*\. {advice}"
    )
    assert re.match(pattern, str(error)), f"{error}\nis not\n{pattern}"


@pytest.mark.parametrize("name", CASES)
def test_error_has_four_parts(name: str, device: torch.device) -> None:
    call, kind, parts = CASES[name]
    with pytest.raises(kind) as caught:
        call(Given(device))
    assert type(caught.value) is kind
    assert_parts(caught.value, parts)


def test_unknown_format_and_format_without_scales(device: torch.device) -> None:
    x = draw(32, 64, device=device)
    with pytest.raises(
        ValueError, match=r"quantize: argument 'format': expected a format key: .*, got 'fp9'\. "
    ):
        tp.quantize(x, "fp9")
    with pytest.raises(ValueError, match="argument 'format': expected a format with scales"):
        tp.quantize(x, "bf16")
    with pytest.raises(ValueError, match="argument 'inputs': expected at least one matrix"):
        tp.quantize([], "nvfp4")


#: Calls that are refused after an ``out`` was given: the function, and the arguments it is given beside it.
INTO: dict[str, tuple[Callable[[Given, Any], Any], Parts]] = {
    "dtype": (
        lambda g, out: tp.grouped_gemm_wgrad(g.grads, g.rows, dtype=torch.bfloat16, out=out),
        ("grouped_gemm_wgrad", "dtype", "None with 'out', whose dtype is", "torch.bfloat16", "Leave it out"),
    ),
    "sizes twice": (
        lambda g, out: tp.grouped_gemm_wgrad(g.grads, g.rows, g.sizes, out=out),
        ("grouped_gemm_wgrad", "group_sizes", TWICE.format("grad"), "Tensor", "Leave it out"),
    ),
    "no columns": (
        lambda g, out: tp.grouped_gemm_wgrad(g.columns, g.ragged, out=out),
        ("grouped_gemm_wgrad", "input", "columnwise data", "GroupedTensor", "Quantize it"),
    ),
    "quantized out in a list": (
        lambda g, out: tp.grouped_gemm_wgrad(
            g.grads, g.rows, out=[*out[:2], tp.quantize(g.weight[0], B)], accumulate=False
        ),
        ("grouped_gemm_wgrad", "out", "values that are not quantized", "QuantizedTensor", "Call dequantize"),
    ),
    "ragged out": (
        lambda g, out: tp.grouped_gemm_wgrad(g.grads, g.rows, out=[*out[:2], g.rows], accumulate=False),
        ("grouped_gemm_wgrad", "out", "a stack of matrices", RAGGED_X, "Pass a main_grad"),
    ),
    "no tensor in a list": (
        lambda g, out: tp.grouped_gemm_wgrad(g.grads, g.rows, out=[*out[:2], None], accumulate=False),
        ("grouped_gemm_wgrad", "out", "a tensor", "NoneType", "Pass a tensor"),
    ),
    "out of another size": (
        lambda g, out: tp.grouped_gemm_wgrad(g.grads, g.rows, out=out[:2]),
        ("grouped_gemm_wgrad_out", "out", "", "", ""),
    ),
    "dense dtype": (
        lambda g, out: tp.gemm_wgrad(g.grad, g.x, dtype=torch.bfloat16, out=out[0]),
        ("gemm_wgrad", "dtype", "None with 'out', whose dtype is", "torch.bfloat16", "Leave it out"),
    ),
    "dense quantized out": (
        lambda g, out: tp.gemm_wgrad(g.grad, g.x, out=tp.quantize(out[0], B)),
        ("gemm_wgrad", "out", "values that are not quantized", "QuantizedTensor", "Call dequantize"),
    ),
    "dense ragged": (
        lambda g, out: tp.gemm_wgrad(g.grads, g.x, out=out[0]),
        ("gemm_wgrad", "grad", MATRIX, "GroupedTensor", "Call grouped_gemm_wgrad"),
    ),
    "dense out of another size": (
        lambda g, out: tp.gemm_wgrad(g.grad, g.x, out=out[0, :8], accumulate=False),
        ("gemm_out", "out", "", "", ""),
    ),
}


@pytest.mark.parametrize("name", INTO)
def test_refused_call_leaves_the_buffer(name: str, device: torch.device) -> None:
    call, parts = INTO[name]
    given, out = Given(device), draw(G, N, K, seed=7, device=device)
    before, version = out.clone(), out._version
    with pytest.raises((ValueError, TypeError)) as caught:
        call(given, out)
    assert_parts(caught.value, parts)
    assert_same_bits(out, before)
    assert out._version == version


def test_refusal_in_a_compiled_graph_has_the_same_text(device: torch.device) -> None:
    given = Given(device)
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="argument 'group_sizes': expected None, since 'a'"
    ):
        torch.compile(tp.grouped_gemm, fullgraph=True, backend="eager")(given.rows, given.weight, given.sizes)
    torch._dynamo.reset()
