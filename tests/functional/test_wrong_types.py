"""Any value for any argument of a function: it is valid, or an error of four parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.functional.values import draw
from tests.ops.test_wrong_types import OTHERS, WITHOUT_STRIDES
from transformer_plugin import functional

G, N, K, T = 3, 48, 64, 32
FUNCTIONS = [name for name in functional.__all__ if name != "Permutation"]


def right_calls() -> dict[str, dict[str, Any]]:
    """The arguments of a valid call of each function, without those that have a default."""
    x, w, y, stack = draw(T, K), draw(N, K, seed=1), draw(T, N, seed=2), draw(G, N, K, seed=3)
    sizes, indices = torch.tensor([16, 0, 16]), torch.arange(2 * T).view(T, 2) % G
    quantized, ones = tp.quantize(x, "fp8_block"), torch.ones(K, dtype=x.dtype)
    rows, permutation = tp.permute(x, indices, G, 2 * T)
    experts = {"fc1_weight": draw(G, 2 * N, K, seed=4), "fc2_weight": draw(G, K, N, seed=5)}
    return {
        "bias_backward": {"grad": y},
        "dequantize": {"value": quantized},
        "gemm": {"a": x, "b": w},
        "gemm_wgrad": {"grad": y, "input": x},
        "grouped_gemm": {"a": x, "b": stack, "group_sizes": sizes},
        "grouped_gemm_activation": {"a": x, "b": stack, "group_sizes": sizes},
        "grouped_gemm_wgrad": {"grad": y, "input": x, "group_sizes": sizes},
        "grouped_linear": {"input": x, "weight": stack, "group_sizes": sizes},
        "grouped_mlp": {"input": x, **experts, "group_sizes": sizes},
        "layer_norm": {"input": x, "weight": ones, "bias": ones, "eps": 1e-5},
        "linear": {"input": x, "weight": w},
        "permute": {"tokens": x, "indices": indices, "num_experts": G, "capacity": 2 * T},
        "quantize": {"input": x, "format": "fp8_block"},
        "rms_norm": {"input": x, "weight": ones, "eps": 1e-5},
        "activation": {"input": x},
        "activation_backward": {"grad": draw(T, K // 2, seed=6), "input": x},
        "topk_router": {"logits": draw(T, 8, seed=7).float(), "expert_bias": None, "topk": 2},
        "unpermute": {"rows": rows, "permutation": permutation},
        "with_columnwise": {"value": quantized},
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_values_are_valid_or_named(name: str) -> None:
    function: Callable[..., Any] = getattr(tp, name)
    function(**right_calls()[name])
    names = inspect.signature(function).parameters
    for argument in names:
        refused = 0
        for value in (object(), *OTHERS):
            try:
                function(**{**right_calls()[name], argument: value})
            except (ValueError, TypeError) as error:
                refused += 1
                four_parts = r"transformer_plugin::\w+: argument '[\w\[\]]+': expected .*, got .*\. \S"
                assert re.match(four_parts, str(error), re.DOTALL), f"{argument}={value!r}: {error}"
        assert refused > 5, argument


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_type_names_the_argument(name: str) -> None:
    """Of the arguments that must be there, by the name of the function."""
    for argument in right_calls()[name]:
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(tp, name)(**{**right_calls()[name], argument: object()})
        assert re.match(rf"transformer_plugin::{name}: argument '{argument}'", str(caught.value)), argument


@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_strides(name: str, kind: str) -> None:
    """Nested and sparse tensors: by the name of the function, or of its part that reads them first."""
    right = right_calls()[name]
    for argument, value in right.items():
        if not isinstance(value, torch.Tensor) or (name, argument) == ("with_columnwise", "value"):
            continue
        with pytest.raises(TypeError) as caught:
            getattr(tp, name)(**{**right, argument: WITHOUT_STRIDES[kind]})
        text = f"transformer_plugin::{name}: argument '{argument}"
        assert str(caught.value).startswith(text), argument
        assert "by strides" in str(caught.value) or kind == "qint8", argument


@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
def test_lists_and_values_with_tensors_without_strides(kind: str) -> None:
    other, x, sizes = WITHOUT_STRIDES[kind], draw(T, K), torch.tensor([16, 0, 16])
    value = tp.quantize(x, "fp8_block")
    calls: list[Callable[[], Any]] = [
        lambda: tp.grouped_linear(x, [other, other, other], sizes),
        lambda: tp.quantize([other], "fp8_block"),
        lambda: tp.GroupedTensor(other),
        lambda: tp.GroupedTensor(x, other),
        lambda: tp.GroupedTensor.from_members([other]),
        lambda: tp.QuantizedTensor(other, value.scale_inv, format="fp8_block"),
        lambda: tp.QuantizedTensor(value.rowwise_data, other, format="fp8_block"),
        lambda: value.quantize_(other),
        lambda: value.copy_(other),
    ]
    before = value.rowwise_data.clone()
    for i, call in enumerate(calls):
        with pytest.raises(TypeError) as caught:
            call()
        assert re.match(r"transformer_plugin::\w+: argument '[\w\[\]]+': expected", str(caught.value)), i
        assert "by strides" in str(caught.value) or kind == "qint8", i
    assert torch.equal(before.view(torch.uint8), value.rowwise_data.view(torch.uint8))
    with pytest.raises(
        ValueError, match="transformer_plugin::with_columnwise: argument 'value': expected a value"
    ):
        tp.with_columnwise(other)
