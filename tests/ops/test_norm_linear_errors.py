"""Errors for bad arguments of norm_linear: the full text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_plugin import ops

X, GAMMA, W = torch.zeros(4, 6), torch.ones(6), torch.zeros(5, 6)
RMS, LAYER = {"normalization": "rms_norm"}, {"normalization": "layer_norm"}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (
            (X, GAMMA, None, W, None, 1e-5),
            {"normalization": "LayerNorm"},
            ValueError,
            "'normalization': expected 'rms_norm' or 'layer_norm', got 'LayerNorm'. Use one of the two.",
        ),
        (
            (X, GAMMA, GAMMA, W, None, 1e-5),
            RMS,
            ValueError,
            "'norm_bias': expected None with rms_norm, which has no bias, got float32[6] on cpu. Leave it out, or use "
            "layer_norm.",
        ),
        (
            (X, GAMMA, GAMMA[:5], W, None, 1e-5),
            LAYER,
            ValueError,
            "'norm_bias': expected size 6 in dimension 0 (the last dimension of 'input'), got float32[5] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (X, GAMMA.bfloat16(), None, W, None, 1e-5),
            RMS,
            TypeError,
            "'norm_weight': expected float32, like input, got bfloat16. Convert one of them with .to() first.",
        ),
        (
            (X.double(), GAMMA.double(), None, W.double(), None, 1e-5),
            RMS,
            TypeError,
            "'input': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() first.",
        ),
        (
            (X[:, :0], GAMMA[:0], None, W[:, :0], None, 1e-5),
            RMS,
            ValueError,
            "'input': expected a last dimension of at least 1, got float32[4, 0] on cpu. There is nothing to normalise "
            "in an empty row.",
        ),
        (
            (X, GAMMA, None, torch.zeros(5, 7), None, 1e-5),
            RMS,
            ValueError,
            "'weight': expected size 6 in dimension 1 (the last dimension of 'input'), got float32[5, 7] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (X, GAMMA, None, W, None, -1.0),
            RMS,
            ValueError,
            "'eps': expected a number that is not negative, got -1. Pass a small one, for example 1e-5.",
        ),
        (
            (X, None, None, W, None, 1e-5),
            {"input_format": "fp8_block", "weight_format": "bf16", "grad_format": "fp8_block"},
            ValueError,
            "'weight_format': expected a format of the family of input_format, 'fp8_block', got 'bf16'. "
            "Use the three formats of one recipe.",
        ),
        (
            (torch.zeros(4, 40), None, None, torch.zeros(32, 40), None, 1e-5),
            dict.fromkeys(("input_format", "weight_format", "grad_format"), "mxfp8"),
            ValueError,
            "'input': expected a last dimension that is a multiple of 32, the block of mxfp8, got float32[4, 40] on "
            "cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
        ),
        (
            (X, None, None, W, None, 1e-5),
            {"quantized_weight": [W]},
            ValueError,
            "'quantized_weight': expected None with the format 'none', which rounds no weight, got 1 tensors. "
            "Leave it out.",
        ),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
    requires_grad: bool,
) -> None:
    arguments = (arguments[0].clone().requires_grad_(requires_grad), *arguments[1:])
    with pytest.raises(error) as caught:
        ops.norm_linear(*arguments, **options)
    assert str(caught.value) == f"transformer_plugin::norm_linear: argument {text}"
    meta = [a.detach().to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(error, match="expected"):  # a compiler meets the error while it traces
        ops.norm_linear(*meta, **options)
