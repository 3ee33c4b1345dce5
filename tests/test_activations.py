"""Activation: keys are parsed, written and rejected as in C++, and the ops take what the table of traits says."""

from __future__ import annotations

import copy
import math
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

WITHOUT_GATE = next(function for function in FUNCTIONS if not TRAITS[function].gated)
#: Each activation with its key.
WRITTEN = [
    ("swiglu", Activation()),
    ("swiglu:interleave=32", Activation("swiglu", 32)),
    ("swiglu:interleave=1", Activation("swiglu", 1)),
    ("swiglu:limit=7,alpha=1.702,offset=1", Activation("swiglu", limit=7, alpha=1.702, offset=1)),
    ("swiglu:interleave=1,limit=0.1", Activation("swiglu", 1, 0.1)),
    ("swiglu:offset=-0.25", Activation(offset=-0.25)),
    ("swiglu:limit=100,alpha=1e-30,offset=1e+30", Activation(limit=100, alpha=1e-30, offset=1e30)),
    ("geglu_tanh", Activation("geglu_tanh")),
    ("geglu_tanh:interleave=32", Activation("geglu_tanh", 32)),
    (WITHOUT_GATE, Activation(WITHOUT_GATE)),
]
#: Other keys of the same activations.
EQUAL = [
    ("swiglu:limit=inf,alpha=1.0,offset=-0", "swiglu"),
    ("swiglu:offset=1.,alpha=1.70200001,limit=7e+0", "swiglu:limit=7,alpha=1.702,offset=1"),
    ("swiglu:limit=.5,interleave=1", "swiglu:interleave=1,limit=0.5"),
    ("swiglu:limit=1.00000005", "swiglu:limit=1"),
    ("swiglu:limit=1.0000001", "swiglu:limit=1.0000001"),
    ("swiglu:limit=16777217", "swiglu:limit=16777216"),
]
REFUSED = [
    *(
        f"swiglu:{name}={text}"
        for name in ("limit", "alpha", "offset")
        for text in (
            "",
            "nan",
            "infinity",
            "Inf",
            "1e99",
            "1e39",
            "1e-60",
            "1e-999",
            "+7",
            "7_0",
            " 7",
            "0x1p2",
            "1e",
            "1-",
            "-",
            "--1",
            "7;",
            "1E5",
            "e5",
            ".",
        )
    ),
    *("swiglu:limit=0", "swiglu:limit=-1", "swiglu:alpha=0", "swiglu:alpha=-1", "swiglu:alpha=inf"),
    *("swiglu:offset=inf", "swiglu:limit", "swiglu:limit=7,limit=8", "swiglu:interleave=1,interleave=32"),
    *(
        f"{WITHOUT_GATE}:limit=7",
        "geglu_tanh:alpha=2",
        f"{WITHOUT_GATE}:interleave=1",
        "swiglu:interleave=2",
        "swiglu:beta=1",
    ),
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


@pytest.mark.parametrize(("key", "canonical"), EQUAL)
def test_equal_activations_have_equal_keys(key: str, canonical: str) -> None:
    activation = Activation.parse(key)
    assert activation.key == canonical and activation == Activation.parse(canonical)
    x = 3 * torch.randn(4, 64)
    assert torch.equal(ops.activation(x, activation=key), ops.activation(x, activation=activation))


def test_every_float32_is_written_so_that_it_is_read_as_it() -> None:
    bits = torch.randint(1, 0x7F800000, (500,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for number in [*bits.view(torch.float32).tolist(), 1.1754943508222875e-38, 1.401298464324817e-45]:
        activation = Activation(limit=number, alpha=number, offset=-number)
        assert Activation.parse(activation.key) == activation
        as_float32 = torch.tensor([activation.limit, activation.alpha, -activation.offset])
        assert torch.equal(as_float32, torch.full((3,), number))
        assert len(activation.key) <= len("swiglu:limit=,alpha=,offset=-") + 3 * len("1234567890000000")


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
            "argument 'interleave': expected 0, 1 or 32, got 16. Leave it out for all of the gate first.",
        ),
        (
            {"function": WITHOUT_GATE, "interleave": 1},
            ValueError,
            "argument 'interleave': expected 0 without a gate, got 1. Leave it out for all of the gate first.",
        ),
        (
            {"limit": 0},
            ValueError,
            "argument 'limit': expected a positive number of float32 or inf, got 0. Leave it out for inf.",
        ),
        (
            {"limit": math.nan},
            ValueError,
            "argument 'limit': expected a positive number of float32 or inf, got nan. Leave it out for inf.",
        ),
        (
            {"alpha": math.inf},
            ValueError,
            "argument 'alpha': expected a positive number of float32, got inf. Leave it out for 1.",
        ),
        (
            {"offset": 1e39},
            ValueError,
            "argument 'offset': expected a number of float32, got 1e+39. Leave it out for 0.",
        ),
        (
            {"function": "geglu_tanh", "limit": 7.0},
            ValueError,
            "argument 'limit': expected inf with geglu_tanh, got 7. Leave it out, or choose swiglu.",
        ),
        (
            {"alpha": "1.702"},
            TypeError,
            "argument 'alpha': expected a number, got '1.702'. The default is 1.0.",
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
        assert not accepts(Activation(function, INTERLEAVE).key) and not accepts(Activation(function, 1).key)
    if function == "swiglu":
        numbers = Activation(function, limit=7, alpha=1.702, offset=1)
        assert accepts(numbers.key) == numbers.traits.has_fused_quantize


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
    for activation in (*map(Activation, FUNCTIONS), Activation(limit=0.5, alpha=1.702, offset=1)):
        x = torch.randn(5, activation.input_columns(8), dtype=torch.float32, requires_grad=True)
        probs = torch.rand(5, requires_grad=True)
        grad = torch.randn(5, 8)
        expected = torch.autograd.grad(reference.activation(x, probs, None, activation), (x, probs), grad)
        got = reference.activation_backward(grad, x.detach(), probs.detach(), None, activation)
        torch.testing.assert_close(got, expected)
