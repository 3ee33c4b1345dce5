"""An argument of a type that the schema does not have is named by the op's own error, without torch's schema text: as
``torch.ops.transformer_plugin.x(...)``, as its ``default``, and as the wrapper in ``ops``."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.test_refusals import CALLS, copied
from transformer_plugin import ops
from transformer_plugin.testing.every_op import Call, overload

FIRST_CALLS = list({call.op: call for call in reversed(CALLS)}.values())
X, W, SIZES = torch.ones(32, 64), torch.ones(2, 32, 64), torch.tensor([16, 16])


def without_strides() -> dict[str, torch.Tensor]:
    """Nested, sparse, mkldnn and ``torch.quantize_per_tensor`` tensors; of some torch has no sizes or strides."""
    rows = [torch.ones(2, 32), torch.ones(3, 32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and betas of torch
        return {
            "nested": torch.nested.nested_tensor(rows),
            "vectors": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "coo": torch.ones(32, 32).to_sparse(),
            "csr": torch.ones(32, 32).to_sparse_csr(),
            "mkldnn": torch.ones(32, 32).to_mkldnn(),
            "qint8": torch.quantize_per_tensor(torch.ones(32, 32), 1.0, 0, torch.qint8),
        }


WITHOUT_STRIDES = without_strides()
#: Values that some arguments take.
OTHERS: tuple[Any, ...] = (
    *(None, "text", 3, -1, 1.5, float("nan"), True, 2**70, b"x", 1j, int, torch.float32),
    *([1, 2], [[1.0]], (), {}, torch.ones(2, 2), [torch.ones(2), None], np.ones((2, 2), np.float32)),
    *(WITHOUT_STRIDES[kind] for kind in ("nested", "jagged", "coo", "csr")),
)
FOUR_PARTS = r"transformer_plugin::\w+: argument '[\w\[\]]+': expected .*, got .*\. \S"


def forms(op: str) -> dict[str, Callable[..., Any]]:
    """The op in each form that Python code has."""
    name = op.partition(".")[0]
    packet = getattr(torch.ops.transformer_plugin, name)
    found: dict[str, Callable[..., Any]] = {"ops.x": packet, "ops.x.default": overload(op)}
    return {**found, **({"wrapper": getattr(ops, name)} if name in ops.__all__ else {})}


@pytest.mark.parametrize("call", FIRST_CALLS, ids=lambda call: call.op)
def test_each_argument_is_named(call: Call) -> None:
    for form, function in forms(call.op).items():
        for name in call.arguments:
            arguments = copied(call.arguments) | {name: object()}
            if form == "wrapper" and name not in inspect.signature(function).parameters:
                continue
            with pytest.raises(TypeError) as caught:
                function(**accepted(function, arguments) if form == "wrapper" else arguments)
            assert str(caught.value).startswith(f"transformer_plugin::{call.packet}: argument '{name}"), form
            assert ", got object. " in str(caught.value)


def accepted(wrapper: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that a wrapper has; it fills in others itself."""
    names = inspect.signature(wrapper).parameters
    return {name: value for name, value in arguments.items() if name in names}


@pytest.mark.parametrize("call", FIRST_CALLS, ids=lambda call: call.op)
def test_other_values_are_valid_or_named(call: Call) -> None:
    """None, negative numbers, arrays, lists of something else: nothing but errors of four parts."""
    for form, function in forms(call.op).items():
        names = inspect.signature(function).parameters if form == "wrapper" else call.arguments
        for name in names:
            for value in OTHERS:
                arguments = copied(call.arguments) | {name: value}
                try:
                    function(**accepted(function, arguments) if form == "wrapper" else arguments)
                except (ValueError, TypeError) as error:
                    where = f"{form}, {name}={value!r}: {error}"
                    assert re.match(FOUR_PARTS, str(error), re.DOTALL), where


@pytest.mark.parametrize(
    ("op", "argument", "call", "expected"),
    [
        ("quantize", "input", lambda: ops.quantize(None, "mxfp8"), "a tensor, got NoneType."),
        ("gemm", "a", lambda: ops.gemm(None, None), "a tensor, got NoneType."),
        ("gemm", "dtype", lambda: ops.gemm(X, X, dtype="float32"), "a torch.dtype or None, got 'float32'."),
        ("gemm", "a_scale", lambda: ops.gemm(X, X, a_scale=1), "a tensor or a sequence of tensors, got int."),
        (
            "grouped_gemm",
            "b",
            lambda: ops.grouped_gemm(X, 3, SIZES),
            "a tensor or a sequence of tensors, got int.",
        ),
        (
            "grouped_gemm",
            "b",
            lambda: ops.grouped_gemm(X, [W[0], 1], SIZES),
            "a list of tensors, got list of Tensor, int.",
        ),
        (
            "grouped_gemm",
            "max_sms",
            lambda: ops.grouped_gemm(X, W, SIZES, max_sms=2**70),
            f"an integer of 64 bits, got {2**70}.",
        ),
        (
            "grouped_gemm",
            "group_sizes",
            lambda: ops.grouped_gemm(X, W, [16, 16]),
            "a tensor, got list of int.",
        ),
        (
            "grouped_gemm_activation_quantize",
            "format",
            lambda: ops.grouped_gemm_activation_quantize(X, W, SIZES, torch.ones(32), "mxfp8"),
            "a format key or a transformer_plugin.formats.Format, got Tensor.",
        ),
        ("linear", "input_format", lambda: ops.linear(X, W[0], input_format=3), "a format key or a"),
        ("quantize", "rowwise", lambda: ops.quantize(X, "mxfp8", rowwise="no"), "True or False, got 'no'."),
        (
            "quantize_out",
            "out",
            lambda: ops.quantize_out(X, "mxfp8", None),
            "a list of tensors, got NoneType.",
        ),
        ("quantize_out", "out", lambda: ops.quantize_out(X, "mxfp8", X), "a list of tensors, got Tensor."),
        ("quantize_list", "inputs", lambda: ops.quantize_list(W, "mxfp8"), "a list of matrices, got Tensor."),
        (
            "quantize_list",
            "inputs",
            lambda: ops.quantize_list([X, None], "mxfp8"),
            "a list of tensors, got list of NoneType, Tensor.",
        ),
        ("delayed_scale", "formats", lambda: ops.delayed_scale(X, X, X, [3]), "a format key or a"),
    ],
)
def test_messages(op: str, argument: str, call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(
        f"transformer_plugin::{op}: argument '{argument}': expected {expected}"
    )
    assert "Declaration" not in str(caught.value)
