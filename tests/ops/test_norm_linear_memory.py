"""norm_linear: which ops run, and which tensors are saved for the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_grouped_mlp_memory import RecordedCalls
from tests.ops.test_linear_ops import saved_bytes
from tests.ops.test_norm_linear import (
    FORMATS,
    NAMES,
    Formats,
    by_formats,
    by_norm,
    leaves_of,
    one_case,
    run,
    steps,
)
from transformer_plugin import ops


def calls_of(formats: Formats, wanted: tuple[str, ...] = NAMES, return_normalized: bool = False) -> list[str]:
    arguments = one_case(formats, torch.device("cpu"))
    with RecordedCalls() as calls:
        run(ops.norm_linear, arguments, formats, wanted, return_normalized)
    return calls.names


@pytest.mark.parametrize("name", ["block", "mx"])
def test_the_norm_is_quantized_by_the_op_that_computes_it(name: str) -> None:
    formats = FORMATS[name]
    weight = "quantize both" if name == "mx" else "quantize"  # on a CPU square blocks serve both directions
    again = ["layer_norm", "quantize columns"]
    assert calls_of(formats) == [
        *("layer_norm_quantize", weight, "gemm"),
        *("bias_backward_quantize both", *again, "gemm", "gemm", "layer_norm_backward"),
    ]
    assert calls_of(formats, return_normalized=True)[:3] == ["layer_norm_forward", "quantize", weight]
    assert calls_of(formats, ()) == ["norm_linear"]


@by_formats
def test_only_requested_gradients_are_computed(formats: Formats) -> None:
    def backward(wanted: tuple[str, ...]) -> list[str]:
        calls = calls_of(formats, wanted)
        products = [i for i, name in enumerate(calls) if name == "gemm"]
        return calls[products[0] + 1 :]

    assert backward(("bias",)) == ["bias_backward"]
    of_weight = backward(("weight",))
    assert "layer_norm" in of_weight and "layer_norm_backward" not in of_weight
    for wanted in ("input", "norm_weight", "norm_bias"):
        of_norm = backward((wanted,))
        assert of_norm[-1] == "layer_norm_backward" and "layer_norm" not in of_norm
        assert not any("columns" in name or "both" in name for name in of_norm)


@by_norm
@by_formats
def test_no_normalized_values_are_saved(formats: Formats, normalization: str) -> None:
    """The input, the statistics of the rows, the norm's parameters, and what linear saves of the weight."""
    arguments = one_case(formats, torch.device("cpu"), normalization)
    rows, width = arguments[0].shape

    def saved(function: Any, *wanted: str) -> int:
        leaves = leaves_of(arguments, wanted)
        return saved_bytes(lambda: function(*leaves.values(), *arguments[5:], False, *formats)[0])

    own = arguments[0].nbytes
    stats = rows * 4 * (2 if normalization == "layer_norm" else 1)
    of_linear = saved_bytes(
        lambda: ops.linear(arguments[0].clone().requires_grad_(), arguments[3], None, *formats)
    )
    parameter = width * 2
    biases = parameter if normalization == "layer_norm" else 0
    assert saved(ops.norm_linear, *NAMES) == own + stats + of_linear + parameter + biases
    assert saved(ops.norm_linear, "input") == own + stats + of_linear + parameter
    assert saved(ops.norm_linear, "weight") == own + parameter + biases
    assert saved(ops.norm_linear, "bias") == 0
    assert saved(ops.norm_linear) == 0
    assert saved(steps, *NAMES) > saved(ops.norm_linear, *NAMES)
