"""Buffers for weight gradients that do not fit are refused in the forward, before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.main_grad_runs import BUFFERS, FORMATS, AllCalls, buffers, layer_of
from tests.ops.test_quantize_weight import Layer
from transformer_plugin import ops

LAYERS = tuple(BUFFERS)
SOME = {key: FORMATS[key] for key in ("none", "block")}
by_layer = pytest.mark.parametrize("name", LAYERS)
by_some_formats = pytest.mark.parametrize("formats", SOME.values(), ids=SOME.keys())
Wrong = Callable[[Tensor, Layer], Any]

#: A wrong buffer in place of a right one, its error and a part of its text.
STACKS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "rows": (lambda b, _: b[..., :-1, :], ValueError, "of the sizes"),
    "columns": (lambda b, _: b.new_zeros(*b.shape[:-1], b.shape[-1] + 1), ValueError, "of the sizes"),
    "dimensions": (lambda b, _: b.view(-1), ValueError, "of the sizes"),
    "float16": (lambda b, _: b.half(), TypeError, "float32, bfloat16"),
    "float64": (lambda b, _: b.double(), TypeError, "float32, bfloat16"),
    "int32": (lambda b, _: b.int(), TypeError, "float32, bfloat16"),
    "requires_grad": (lambda b, _: b.requires_grad_(), ValueError, "requires_grad=False"),
    "transposed": (lambda b, _: b.mT.contiguous().mT, ValueError, "last dimension has stride 1"),
    "expanded": (lambda b, _: b[..., :1, :].expand(b.shape), ValueError, "rows do not overlap"),
    "weight": (lambda b, layer: layer.arguments[1], ValueError, "apart from '(fc1_)?weight'"),
}


def described(buffer: Tensor) -> str:
    return rf"\[{', '.join(map(str, buffer.shape))}\] on \S+"


def with_strides(buffer: Tensor) -> str:
    return rf"{described(buffer)} with strides \[{', '.join(map(str, buffer.stride()))}\]"


def refuses(
    layer: Layer, formats: tuple[str, str, str], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """With and without gradients; nothing is computed, and no tensor changes."""
    everything = list(layer.arguments) + [
        x for value in options.values() for x in (value if isinstance(value, list) else [value])
    ]
    tensors = [x for x in everything if isinstance(x, Tensor)]
    before = [(x.detach().clone(), x._version) for x in tensors]
    for wants in (True, False):
        leaves = [x.detach().requires_grad_(wants) if x.is_floating_point() else x for x in layer.arguments]
        with AllCalls() as calls, pytest.raises(error, match=text):
            layer.function(*leaves, *formats, **options)
        own = f"transformer_plugin::{layer.function.__name__}"
        assert set(calls.names) <= {own, "aten::unsqueeze", "aten::detach"}
    for x, (content, version) in zip(tensors, before, strict=True):
        assert torch.equal(x.nan_to_num(), content.nan_to_num()) and x._version == version


@by_layer
@by_some_formats
@pytest.mark.parametrize("case", STACKS.values(), ids=STACKS.keys())
def test_wrong_buffers(
    name: str,
    formats: tuple[str, str, str],
    case: tuple[Wrong, type[Exception], str],
    device: torch.device,
) -> None:
    layer = layer_of(name, formats, torch.float32, device)
    change, error, text = case
    right = buffers(name, layer, torch.float32, 0.25)
    argument = BUFFERS[name][1]
    wrong = change(right[argument], layer)
    got = described(wrong) if text.startswith("apart") else with_strides(wrong)
    text = rf"transformer_plugin::{name}: argument '{argument}': expected .*{text}.*, got .*{got}.*\. \w"
    refuses(layer, formats, {**right, argument: wrong}, error, text)


@pytest.mark.parametrize("name", LAYERS[1:])
@by_some_formats
def test_wrong_lists(name: str, formats: tuple[str, str, str], device: torch.device) -> None:
    layer = layer_of(name, formats, torch.float32, device)
    right = buffers(name, layer, torch.float32, 0.25, as_list=True)
    argument = BUFFERS[name][1]
    first, second, *rest = right[argument]
    wider = torch.zeros(second.shape[0], second.shape[1] + 8, device=device)[:, :-8]
    cases = {
        "an empty list": ([], ValueError, ""),
        "4 groups, got 3 matrices": ([second, *rest], ValueError, ""),
        "of the sizes": ([first, second[1:], *rest], ValueError, r"\[1\]"),
        "float32, as": ([first, second.bfloat16(), *rest], TypeError, r"\[1\]"),
        "as far apart as": ([first, wider, *rest], ValueError, r"\[1\]"),
        "apart from": ([first, first, *rest], ValueError, r"\[[01]\]"),
        "requires_grad=False": ([first, second.clone().requires_grad_(), *rest], ValueError, r"\[1\]"),
        "apart from 'input'": (
            [first, layer.arguments[0].view(-1)[: second.numel()].view(second.shape), *rest],
            ValueError,
            r"\[1\]",
        ),
    }
    for text, (wrong, error, index) in cases.items():
        match = rf"transformer_plugin::{name}: argument '{argument}{index}': expected .*{text}"
        refuses(layer, formats, {**right, argument: wrong}, error, match)


@by_layer
def test_a_view_of_negatives(name: str, device: torch.device) -> None:
    """Ops get a copy of such a view, which the caller would not see."""
    layer = layer_of(name, FORMATS["none"], torch.float32, device)
    given = {k: torch._neg_view(b) for k, b in buffers(name, layer, torch.float32, 0.25).items()}
    text = f"{name}: argument '{BUFFERS[name][1]}': expected a buffer whose numbers are those in its memory"
    refuses(layer, FORMATS["none"], given, ValueError, text)


@by_some_formats
def test_buffers_of_both_products_are_apart(formats: tuple[str, str, str], device: torch.device) -> None:
    layer = layer_of("grouped_mlp", formats, torch.float32, device)
    first = torch.zeros(layer.arguments[1].shape, device=device)
    shape = layer.arguments[2].shape
    second = first.view(-1)[: layer.arguments[2].numel()].view(shape)
    text = "argument 'fc[12]_main_grad': expected a buffer apart from 'fc[12]_main_grad'"
    refuses(layer, formats, {"fc1_main_grad": first, "fc2_main_grad": second}, ValueError, text)


@by_layer
def test_a_quantized_weight_is_apart(name: str, device: torch.device) -> None:
    formats = FORMATS["bf16"]
    layer = layer_of(name, formats, torch.float32, device)
    quantized = {
        option: ops.quantize_weight(layer.arguments[i], *formats) for i, option in layer.weights.items()
    }
    [main_grad] = quantized[layer.weights[1]]
    given = {**quantized, BUFFERS[name][1]: main_grad}
    refuses(layer, formats, given, ValueError, rf"apart from '{layer.weights[1]}'")


@by_layer
@by_some_formats
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight_grad": "ones"}, "'none', 'empty' or 'zeros', got 'ones'"),
        ({"weight_grad": "zeros"}, "'none' without a main_grad.*, got 'zeros'"),
        ({"accumulate": False}, "True without a main_grad.*, got False"),
    ],
    ids=["mode", "mode-alone", "accumulate-alone"],
)
def test_options_that_do_not_fit(
    name: str, formats: tuple[str, str, str], options: dict[str, Any], text: str, device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.float32, device)
    [argument] = options
    match = rf"transformer_plugin::{name}: argument '{argument}': expected {text}\. \w"
    refuses(layer, formats, options, ValueError, match)
    if options.get("weight_grad") == "ones":
        given = buffers(name, layer, torch.float32, 0.25)
        refuses(layer, formats, {**given, **options}, ValueError, match)


@pytest.mark.gpu
@by_layer
def test_another_device(name: str) -> None:
    layer = layer_of(name, FORMATS["none"], torch.float32, torch.device("cuda"))
    given = {k: b.cpu() for k, b in buffers(name, layer, torch.float32, 0.25).items()}
    refuses(layer, FORMATS["none"], given, ValueError, "main_grad': expected a tensor on cuda")
