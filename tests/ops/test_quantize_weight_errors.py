"""Quantized weights that do not fit are refused before anything is written; each error has four parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_linear_ops import NONE, RECIPES, keys
from tests.ops.test_quantize_weight import layers, leaves_of
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

BF16, BLOCK, MX, NV = (keys(RECIPES[name]) for name in ("bf16", "block", "mx", "nv"))
ONES = torch.ones(32, 64)
ADVICE = (
    "Make it with transformer_plugin.ops.quantize_weight, of this weight and these formats, on its device."
)


def quantized_ones(formats: tuple[str, str, str], **changes: Tensor) -> list[Tensor]:
    """Returns the tensors that fit ONES, some of them replaced: ``_1`` replaces the second."""
    tensors = ops.quantize_weight(ONES, *formats)
    for name, tensor in changes.items():
        tensors[int(name[1:])] = tensor
    return tensors


FP8 = torch.float8_e4m3fn
CASES: list[tuple[tuple[str, str, str], list[Tensor], type[Exception], str]] = [
    (BLOCK, [], ValueError,
     f"': expected 2 or 4 tensors, those of '{BLOCK[1]}' along rows, and along columns or not, got 0. {ADVICE}"),
    (BLOCK, quantized_ones(BLOCK) + quantized_ones(BLOCK)[:1], ValueError,
     f"': expected 2 or 4 tensors, those of '{BLOCK[1]}' along rows, and along columns or not, got 3. {ADVICE}"),
    (BLOCK, quantized_ones(MX), TypeError, "[1]': expected one of the dtypes float32, got float8_e8m0fnu. "),
    (MX, quantized_ones(MX)[:2], ValueError,
     f"': expected 4 tensors, those of '{MX[1]}' along rows and along columns, got 2. {ADVICE}"),
    (BLOCK, quantized_ones(MX)[:2], TypeError,
     "[1]': expected one of the dtypes float32, got float8_e8m0fnu. "),
    (BLOCK, quantized_ones(BLOCK, _0=torch.ones(64, 32).to(FP8)), ValueError,
     "[0]': expected a contiguous tensor of sizes [32, 64] for 'weight', got float8_e4m3fn[64, 32] on cpu with "
     f"strides [32, 1]. {ADVICE}"),
    (BLOCK, quantized_ones(BLOCK, _0=torch.ones(64, 32).to(FP8).t()), ValueError,
     "[0]': expected a contiguous tensor of sizes [32, 64] for 'weight', got float8_e4m3fn[32, 64] on cpu with "
     f"strides [1, 32]. {ADVICE}"),
    (BLOCK, quantized_ones(BLOCK, _1=torch.ones(4, 1)), ValueError,
     "[1]': expected a contiguous tensor of sizes [1, 4] for 'weight', got float32[4, 1] on cpu with strides [1, 1]. "
     f"{ADVICE}"),
    (BLOCK, quantized_ones(BLOCK, _0=torch.ones(32, 64).to(torch.float8_e5m2)), TypeError,
     "[0]': expected one of the dtypes float8_e4m3fn, got float8_e5m2. "),
    (BLOCK, quantized_ones(BLOCK, _1=torch.ones(1, 4, requires_grad=True)), ValueError,
     "[1]': expected a tensor with requires_grad=False, got float32[1, 4] on cpu with requires_grad=True. "
     "What is quantized has no gradient: detach it."),
    (BF16, [ONES], TypeError, "[0]': expected one of the dtypes bfloat16, got float32. "),
    (MX, quantized_ones(MX, _2=quantized_ones(MX)[0].clone()), ValueError,
     "[2]': expected a contiguous tensor of sizes [64, 32] for 'weight', got float8_e4m3fn[32, 64] on cpu with "
     f"strides [64, 1]. {ADVICE}"),
    (NV, quantized_ones(NV, _2=torch.ones(2)), ValueError,
     f"[2]': expected a contiguous tensor of sizes [1] for 'weight', got float32[2] on cpu with strides [1]. {ADVICE}"),
]  # fmt: skip


@pytest.mark.parametrize(("formats", "tensors", "error", "text"), CASES, ids=range(len(CASES)))
def test_tensors_that_do_not_fit_are_refused(
    formats: tuple[str, str, str], tensors: list[Tensor], error: type[Exception], text: str
) -> None:
    x = torch.ones(16, 64)
    for input in (x, x.clone().requires_grad_()):
        with pytest.raises(error) as caught:
            ops.linear(input, ONES, None, *formats, tensors)
        assert str(caught.value).startswith(
            f"transformer_plugin::linear: argument 'quantized_weight{text}"
        ), str(caught.value)
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(error) as caught:
        ops.quantize_weight_out(3 * ONES, *formats, tensors)
    assert str(caught.value).startswith(f"transformer_plugin::quantize_weight_out: argument 'out{text}")
    for now, then in zip(tensors, before, strict=True):
        assert_same_bits(now.detach(), then)


def test_quantized_weight_of_another_layer_is_refused() -> None:
    """The error names the argument, also for the op with two weights and on every path."""
    for name, layer in layers(BLOCK, torch.float32, torch.device("cpu")).items():
        for place, argument in layer.weights.items():
            weight = layer.arguments[place]
            tensors = ops.quantize_weight(weight[..., :-8, :], *BLOCK)
            for leaves in (layer.arguments, leaves_of(layer)):
                with pytest.raises(ValueError) as caught:
                    layer.function(*leaves, *BLOCK, **{argument: tensors})
                assert str(caught.value).startswith(
                    f"transformer_plugin::{name}: argument '{argument}[0]': expected a contiguous tensor of sizes "
                    f"{list(weight.shape)} for '{'weight' if len(layer.weights) == 1 else f'fc{place}_weight'}', got "
                )


def test_formats_without_quantization_refuse_quantized_weights() -> None:
    for name, layer in layers(NONE, torch.float32, torch.device("cpu")).items():
        for argument in layer.weights.values():
            for leaves in (layer.arguments, leaves_of(layer)):
                with pytest.raises(ValueError) as caught:
                    layer.function(*leaves, *NONE, **{argument: [torch.zeros(1)]})
                assert str(caught.value) == (
                    f"transformer_plugin::{name}: argument '{argument}': expected None with the format 'none', which "
                    "rounds no weight, got 1 tensors. Leave it out."
                )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((ONES, *NONE), ValueError,
         "argument 'weight_format': expected a format that rounds the weight, got 'none'. Multiply the weight "
         "without quantizing it."),
        ((ONES.double(), *BLOCK), TypeError,
         "argument 'weight': expected one of the dtypes float32, bfloat16, float16, got float64. "),
        ((ONES[0], *BF16), ValueError,
         "argument 'weight': expected 2 or 3 dimensions, got float32[64] on cpu. Reshape it first."),
        ((ONES[:, :40], *MX), ValueError,
         "argument 'weight': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
         "float32[32, 40] on cpu. Pad it with zeros, for example with torch.nn.functional.pad."),
        ((ONES, "fp8_block", "mxfp8", "fp8_block"), ValueError,
         "argument 'weight_format': expected a format of the family of input_format, 'fp8_block', got 'mxfp8'. "
         "Use the three formats of one recipe."),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_quantized(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    for op, more in ((ops.quantize_weight, ()), (ops.quantize_weight_out, ([torch.zeros(1)],))):
        with pytest.raises(error) as caught:
            op(*arguments, *more)
        assert str(caught.value).startswith(f"transformer_plugin::{op.__name__}: {text}")


def test_overlapping_buffers_are_refused() -> None:
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match="'out\\[0\\]': expected a buffer apart from 'weight', which is read"
    ):
        ops.quantize_weight_out(weight, *BF16, [weight])
    square = torch.ones(32, 32)
    tensors = ops.quantize_weight(square, *MX)
    before = [t.clone() for t in tensors]
    tensors[2] = tensors[0]
    with pytest.raises(ValueError, match="'out\\[2\\]': expected a buffer apart from 'out\\[0\\]'"):
        ops.quantize_weight_out(square + 1, *MX, tensors)
    assert_same_bits(tensors[0], before[0])


@pytest.mark.gpu
def test_tensors_on_another_device() -> None:
    tensors = ops.quantize_weight(ONES.cuda(), *MX)
    with pytest.raises(ValueError, match=r"argument 'quantized_weight\[0\]': expected"):
        ops.linear(torch.ones(16, 64), ONES, None, *MX, tensors)
    with pytest.raises(ValueError, match=r"argument 'out\[0\]': expected"):
        ops.quantize_weight_out(ONES, *MX, tensors)
