"""Errors for bad arguments of the products with an activation in the epilogue: the full text, in four parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.activations import EXPECTED_KEY, KEY_ADVICE

A, B, S, P = torch.zeros(4, 6), torch.zeros(2, 16, 6), torch.tensor([1, 2]), torch.ones(4)
AGREE = "Pass tensors whose sizes agree."
UNKNOWN = f"'activation': expected {EXPECTED_KEY}, got 'swiglu:interleave=16'. {KEY_ADVICE}."
BLOCKS = (
    "expected whole blocks of 32 columns of the gate and of the linear part, got {} for 8 of each. "
    "Take a multiple of 32, or an activation without interleave."
)
FORWARD, QUANTIZE = "grouped_gemm_activation", "grouped_gemm_activation_quantize"
FORMAT = (
    "expected a format that finds its scales in blocks along a row, fp8_block or mxfp8, got '{}'. "
    "Take one of those, or grouped_gemm_activation, and quantize its result."
)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            FORWARD,
            (A.double(), B.double(), S, P),
            TypeError,
            "'a': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() first.",
        ),
        (
            FORWARD,
            (A, B[:, :15], S, P),
            ValueError,
            "'b': expected an even number of rows in each matrix (gate and linear part), "
            "got float32[2, 15, 6] on cpu. Concatenate the weights of both.",
        ),
        (
            FORWARD,
            (A, B[:, :, :5], S, P),
            ValueError,
            "'b': expected size 6 in dimension 2 (the columns of 'a', summed over), got float32[2, 16, 5] on cpu. "
            + AGREE,
        ),
        (FORWARD, (A, B, S, P, None, "swiglu:interleave=16"), ValueError, UNKNOWN),
        (
            FORWARD,
            (A, B, S, P, None, "swiglu:interleave=32"),
            ValueError,
            "'b': " + BLOCKS.format("float32[2, 16, 6] on cpu"),
        ),
        (
            FORWARD,
            (A, B, torch.tensor([3, 2]), P),
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            FORWARD,
            (A, B, torch.tensor([1, 2, 1]), P),
            ValueError,
            "'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[3] on cpu. "
            + AGREE,
        ),
        (
            FORWARD,
            (A, B, S, P[:3]),
            ValueError,
            "'probs': expected size 4 in dimension 0 (the rows of 'a'), got float32[3] on cpu. " + AGREE,
        ),
        (
            FORWARD,
            (A, B, S, P.bfloat16()),
            TypeError,
            "'probs': expected one of the dtypes float32, got bfloat16. Convert it with .to() first.",
        ),
        (
            FORWARD,
            (A, B, S, P, torch.zeros(2, 8)),
            ValueError,
            "'bias': expected size 16 in dimension 1 (the columns of the output), got float32[2, 8] on cpu. "
            + AGREE,
        ),
        (
            FORWARD,
            (A, B, S, P, None, "swiglu", True, -1),
            ValueError,
            "'max_sms': expected a number of multiprocessors, or 0 for all, got -1. "
            "Pass how many the product may take.",
        ),
        *(
            (QUANTIZE, (A, B, S, key, P), ValueError, "'format': " + FORMAT.format(key))
            for key in ("fp8_tensor", "fp8_block:square", "mxfp8:square", "nvfp4", "bf16", "none")
        ),
        (
            QUANTIZE,
            (A, B, S, "fp8", P),
            ValueError,
            "'format': expected a format key: none, bf16, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, then options "
            "like fp8_block:e4m3,pow2,square,eps=1e-12, got 'fp8'. transformer_plugin.formats lists them.",
        ),
        (
            QUANTIZE,
            (A, B, S, "mxfp8", P),
            ValueError,
            "'b': expected a number of rows in each matrix that is a multiple of 64: gate and linear part in blocks of "
            "mxfp8, 32, got float32[2, 16, 6] on cpu. Pad both with zeros.",
        ),
        (
            QUANTIZE,
            (A, B, S, "fp8_block", P[:3]),
            ValueError,
            "'probs': expected size 4 in dimension 0 (the rows of 'a'), got float32[3] on cpu. " + AGREE,
        ),
        (
            QUANTIZE,
            (A, B, torch.tensor([3, 2]), "fp8_block", P),
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (QUANTIZE, (A, B, S, "fp8_block", P, None, "swiglu:interleave=16"), ValueError, UNKNOWN),
    ],
)
def test_errors(op: str, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
