"""Activation: keys are parsed, written and rejected as in C++, and the ops take what the table of traits says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from transformer_plugin import ops, reference
from transformer_plugin.activations import (
    EXPECTED_KEY,
    FUNCTIONS,
    INTERLEAVE,
    TRAITS,
    Activation,
    Function,
    key_of_activation,
)
from transformer_plugin.reference.activations import FUNCTIONS as REFERENCES

#: Each activation with its key.
WRITTEN = [("swiglu", Activation()), ("swiglu:interleave=32", Activation("swiglu", 32))]
REFUSED = [
    "",
    ":",
    "SwiGLU",
    "silu",
    "swiglu ",
    "swiglu:",
    "swiglu,interleave=32",
    "swiglu:interleave",
    "swiglu:interleave=",
    "swiglu:interleave=0",
    "swiglu:interleave=16",
    "swiglu:interleave=032",
    "swiglu:interleave=32,",
    "swiglu:,interleave=32",
    "swiglu: interleave=32",
    "swiglu:e4m3",
]


@pytest.mark.parametrize(("key", "activation"), WRITTEN, ids=str)
def test_keys_are_read_and_written(key: str, activation: Activation) -> None:
    assert Activation.parse(key) == activation and activation.key == key
    assert key_of_activation(key, "activation") == key_of_activation(activation, "activation") == key
    assert hash(activation) == hash(Activation.parse(key))
    assert copy.deepcopy(activation) == pickle.loads(pickle.dumps(activation)) == activation
    assert pickle.loads(pickle.dumps(activation)).key == key


@pytest.mark.parametrize("key", REFUSED)
def test_other_keys_are_refused_by_python_and_the_ops(key: str) -> None:
    with pytest.raises(ValueError) as caught:
        Activation.parse(key)
    text = f"argument 'key': expected {EXPECTED_KEY}, got '{key}'. transformer_plugin.activations lists them."
    assert str(caught.value) == f"transformer_plugin.Activation.parse: {text}"
    with pytest.raises(ValueError) as caught:
        ops.activation(torch.ones(2, 64), activation=key)
    text = text.replace("'key'", "'activation'", 1)
    assert str(caught.value) == f"transformer_plugin::activation: {text}"


def test_a_repeated_option_counts_once() -> None:
    key = "swiglu:interleave=32,interleave=32"
    assert Activation.parse(key) == Activation("swiglu", 32)
    x = torch.randn(2, 64)
    assert torch.equal(
        ops.activation(x, activation=key), ops.activation(x, activation=Activation("swiglu", 32))
    )


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (
            {"function": "gelu"},
            ValueError,
            f"argument 'function': expected one of {', '.join(FUNCTIONS)}, got 'gelu'. Choose one of them.",
        ),
        (
            {"function": 3},
            TypeError,
            "argument 'function': expected the name of a function, got 3. The default is 'swiglu'.",
        ),
        (
            {"interleave": 16},
            ValueError,
            "argument 'interleave': expected 0 or 32, got 16. Leave it out for all of the gate first.",
        ),
        (
            {"interleave": "32"},
            TypeError,
            "argument 'interleave': expected an integer, got '32'. The default is 0.",
        ),
        (
            {"interleave": True},
            TypeError,
            "argument 'interleave': expected an integer, got True. The default is 0.",
        ),
    ],
)
def test_errors_of_the_fields(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        Activation(**fields)
    assert str(caught.value) == f"transformer_plugin.Activation: {text}"


def test_errors_of_other_types() -> None:
    with pytest.raises(ValueError) as caught:
        Activation.parse(Activation())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "transformer_plugin.Activation: argument 'key': expected a string such as 'swiglu', got Activation. "
        "An Activation has one: .key."
    )
    x, sizes, weight = torch.ones(2, 64), torch.tensor([2]), torch.ones(1, 64, 64)
    for op, arguments in (
        ("activation", (x,)),
        ("activation_backward", (x[:, :32], x)),
        ("activation_quantize", (x, "mxfp8")),
        ("activation_backward_quantize", (x[:, :32], x, "mxfp8")),
        ("grouped_gemm_activation", (x, weight, sizes)),
        ("grouped_gemm_activation_quantize", (x, weight, sizes, "mxfp8")),
        ("grouped_mlp", (x, weight, weight[:, :, :32].contiguous(), sizes, torch.ones(2))),
    ):
        with pytest.raises(TypeError) as wrong:
            getattr(ops, op)(*arguments, activation=32)
        assert str(wrong.value) == (
            f"transformer_plugin::{op}: argument 'activation': expected an activation key or a "
            "transformer_plugin.activations.Activation, got int. Pass for example 'swiglu'."
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_traits_are_those_of_the_ops(function: Function) -> None:
    """An op takes a function and an order exactly if the table says so."""
    traits, activation = TRAITS[function], Activation(function)
    assert activation.traits == traits and activation.input_columns(48) == (96 if traits.gated else 48)
    x = torch.randn(4, activation.input_columns(128))
    assert ops.activation(x, activation=activation).shape == (4, 128)
    assert (ops.activation(x, activation=function).shape == (4, x.shape[1] // 2)) == traits.gated

    def accepts(key: str) -> bool:
        accepted = []
        for call in (
            lambda: ops.activation_quantize(x, "mxfp8", activation=key),
            lambda: ops.activation_backward_quantize(x[:, :128], x, "mxfp8", activation=key),
        ):
            try:
                call()
            except ValueError as error:
                assert "argument 'activation'" in str(error)
                accepted.append(False)
            else:
                accepted.append(True)
        assert len(set(accepted)) == 1
        return accepted[0]

    assert accepts(function) == traits.has_fused_quantize
    if traits.gated:
        assert not accepts(Activation(function, INTERLEAVE).key)


def test_fused_quantization_takes_one_order_of_columns() -> None:
    x = torch.ones(4, 256)
    text = (
        "argument 'activation': expected an activation whose columns of the gate lie first, got "
        "'swiglu:interleave=32'. Take {}, and quantize its "
    )
    for op, arguments in (
        ("activation_quantize", (x, "mxfp8")),
        ("activation_backward_quantize", (x[:, :128], x, "mxfp8")),
    ):
        with pytest.raises(ValueError) as caught:
            getattr(ops, op)(*arguments, activation="swiglu:interleave=32")
        expected = f"transformer_plugin::{op}: " + text.format(op.removesuffix("_quantize"))
        assert str(caught.value).startswith(expected)


def test_every_function_has_a_reference() -> None:
    assert tuple(REFERENCES) == FUNCTIONS
    for function in FUNCTIONS:
        activation = Activation(function)
        x = torch.randn(5, activation.input_columns(8), dtype=torch.float32, requires_grad=True)
        probs = torch.rand(5, requires_grad=True)
        grad = torch.randn(5, 8)
        expected = torch.autograd.grad(reference.activation(x, probs, None, activation), (x, probs), grad)
        got = reference.activation_backward(grad, x.detach(), probs.detach(), None, activation)
        torch.testing.assert_close(got, expected)
