"""What functions take for weights and biases, and operands that they refuse before any op is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import transformer_plugin as tp
from tests.functional.values import ROWS, draw, sizes_on
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

G, N, K = 3, 32, 64


def packed(value: Any) -> torch.Tensor:
    return value.packed() if isinstance(value, tp.GroupedTensor) else value


BIASED: dict[str, Callable[..., Any]] = {
    "grouped_gemm": lambda x, w, b: tp.grouped_gemm(x, w, bias=b),
    "grouped_linear": lambda x, w, b: tp.grouped_linear(x, w, bias=b),
    "grouped_gemm_activation": lambda x, w, b: tp.grouped_gemm_activation(x, w, bias=b)[0],
}


@pytest.mark.parametrize("name", BIASED)
def test_bias_as_a_value(name: str, device: torch.device) -> None:
    rows = tp.GroupedTensor(draw(ROWS, K, device=device), sizes_on(device))
    weight, bias = draw(G, N, K, seed=1, device=device), draw(G, N, seed=2, device=device)
    results = []
    for leaf in (Parameter(bias.clone()), Parameter(tp.GroupedTensor(bias.clone()))):
        y = packed(BIASED[name](rows, weight, leaf))
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    for got, expected in zip(results[1], results[0], strict=True):
        assert got is not None and expected is not None
        assert_same_bits(got, expected)


def test_quantized_products_with_a_bias_as_a_value(device: torch.device) -> None:
    rows = tp.GroupedTensor(draw(ROWS, K, device=device), sizes_on(device))
    weight, bias = draw(G, N, K, seed=1, device=device), draw(G, N, seed=2, device=device)
    a, b = tp.quantize(rows, "fp8_block"), tp.quantize(weight, "fp8_block")
    got = tp.grouped_gemm(a, b, bias=tp.GroupedTensor(bias))
    assert_same_bits(got.packed(), tp.grouped_gemm(a, b, bias=bias).packed())
    activations = [
        tp.grouped_gemm_activation(rows, weight, bias=c, format="fp8_block")[0]
        for c in (bias, tp.GroupedTensor(bias))
    ]
    sizes = int(rows.group_sizes.sum())
    assert_same_bits(*(value.rowwise_data.view(torch.uint8)[:sizes] for value in activations))


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
def test_separate_weights(recipe: Any, device: torch.device) -> None:
    rows = tp.GroupedTensor(draw(ROWS, K, device=device), sizes_on(device))
    fc1, fc2 = draw(G, 2 * K, K, seed=1, device=device), draw(G, K, K, seed=2, device=device)
    whole = [Parameter(fc1.clone()), Parameter(fc2.clone())]
    parts = [[Parameter(matrix.clone()) for matrix in weight] for weight in (fc1, fc2)]
    for function, count in ((tp.grouped_linear, 1), (tp.grouped_mlp, 2)):
        outputs = [function(rows, *weights[:count], recipe=recipe).packed() for weights in (whole, parts)]
        assert_same_bits(*outputs)
        for output in outputs:
            output.square().sum().backward()
        for weight, matrices in zip(whole[:count], parts, strict=False):
            assert weight.grad is not None
            assert_same_bits(torch.stack([matrix.grad for matrix in matrices]), weight.grad)


Refusals = dict[str, tuple[Callable[[], Any], type[Exception], str]]


def refusals_of_products(device: torch.device) -> Refusals:
    x, sizes = draw(ROWS, K, device=device), sizes_on(device)
    w = draw(G, N, K, seed=1, device=device)
    rows = tp.GroupedTensor(x, sizes)
    matrix, stack = tp.quantize(x, "fp8_block", columnwise=True), tp.quantize(w, "fp8_block", columnwise=True)
    ragged = tp.quantize(rows, "fp8_block", columnwise=True)
    trained = tp.quantize(w, "fp8_block").requires_grad_()
    like_a, like_b = (
        "expected values quantized as 'a', in fp8_block",
        "expected values quantized as 'b', in fp8_block",
    )
    return {
        "plain a": (lambda: tp.gemm(x, stack[0]), ValueError, f"'a': {like_b}"),
        "plain b": (lambda: tp.gemm(matrix, w[0]), ValueError, f"'b': {like_a}"),
        "plain rows": (lambda: tp.grouped_gemm(rows, stack), ValueError, f"'a': {like_b}"),
        "plain matrices": (lambda: tp.grouped_gemm(ragged, list(w)), ValueError, f"'b': {like_a}"),
        "plain grad": (
            lambda: tp.gemm_wgrad(x, matrix),
            ValueError,
            "'grad': expected values quantized as 'input'",
        ),
        "plain input": (
            lambda: tp.grouped_gemm_wgrad(ragged, rows),
            ValueError,
            "'input': expected values quantized",
        ),
        "a parameter": (
            lambda: tp.grouped_gemm(ragged, trained),
            ValueError,
            "'b': expected a value with requires_grad=F",
        ),
    }


def refusals(device: torch.device) -> Refusals:
    x, sizes = draw(ROWS, K, device=device), sizes_on(device)
    w = draw(G, N, K, seed=1, device=device)
    rows, biases = tp.GroupedTensor(x, sizes), tp.GroupedTensor(draw(G, N, seed=2, device=device))
    weight = tp.GroupedTensor(w[0].clone(), sizes)
    choice = torch.zeros(ROWS, 1, dtype=torch.int32, device=device)
    recipe: Any = "fp8_block"
    return {
        **refusals_of_products(device),
        "a stack of biases": (
            lambda: tp.quantize(biases, "mxfp8"),
            ValueError,
            "'input': expected members that are matr",
        ),
        "a number": (lambda: tp.dequantize(3), TypeError, "'value': expected a value or a tensor, got int"),  # type: ignore[arg-type]
        "a list": (lambda: tp.dequantize([x]), TypeError, "'value': expected a value or a tensor, got list"),  # type: ignore[arg-type]
        "a ragged weight": (
            lambda: tp.linear(x, weight),
            ValueError,
            "'weight': expected a matrix without groups",
        ),
        "ragged weights": (
            lambda: tp.grouped_linear(rows, weight),
            ValueError,
            "'weight': expected a matrix without gr",
        ),
        "a name": (
            lambda: tp.linear(x, w[0], recipe=recipe),
            TypeError,
            "'recipe': expected a recipe of .* got str",
        ),
        "ragged tokens": (
            lambda: tp.permute(rows, choice, 1, ROWS),
            ValueError,
            "'tokens': expected a matrix without",
        ),
        "a tuple": (
            lambda: tp.unpermute(x, (1, 2, 3)),
            TypeError,
            "'permutation': expected a Permutation, got tuple",
        ),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", refusals(torch.device("cpu")))
def test_refusals(name: str, device: torch.device) -> None:
    call, error, text = refusals(device)[name]
    with pytest.raises(error, match=rf"^transformer_plugin::\w+: argument {text}") as raised:
        call()
    assert re.search(r"expected .+, got .+\. \w.*\.$", str(raised.value))


def test_a_parameter_is_multiplied_where_no_gradient_is_wanted(device: torch.device) -> None:
    rows = tp.quantize(tp.GroupedTensor(draw(ROWS, K, device=device), sizes_on(device)), "fp8_block")
    weight = tp.quantize(draw(G, N, K, seed=1, device=device), "fp8_block")
    expected = tp.grouped_gemm(rows, weight).packed()
    with torch.no_grad():
        assert_same_bits(tp.grouped_gemm(rows, Parameter(weight)).packed(), expected)


def test_probabilities_of_one_are_float32(device: torch.device) -> None:
    """Also where the default dtype is another."""
    x, sizes = draw(ROWS, K, device=device), sizes_on(device)
    fc1, fc2 = draw(G, 2 * K, K, seed=1, device=device), draw(G, K, K, seed=2, device=device)
    expected = tp.grouped_mlp(x, fc1, fc2, sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same_bits(tp.grouped_mlp(x, fc1, fc2, sizes), expected)
    finally:
        torch.set_default_dtype(before)
