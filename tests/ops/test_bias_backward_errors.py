"""Errors of the ops that compute the gradient of a bias: the full text for each bad argument."""

from __future__ import annotations

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS

X = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (X.int(), "fp8_block", None),
            TypeError,
            "argument 'grad': expected one of the dtypes float32, bfloat16, float16, got int32. "
            "Convert it with .to() first.",
        ),
        (
            (X.view(2, 2, 64), "fp8_block", None),
            ValueError,
            "argument 'grad': expected 2 dimensions, got float32[2, 2, 64] on cpu. Reshape it first.",
        ),
        (
            (X.repeat(4, 1), "nvfp4", None),
            ValueError,
            "argument 'amax': expected a float32 tensor of sizes [1], the largest magnitudes that 'nvfp4' scales by, "
            "got None. Compute it with transformer_plugin.ops.amax.",
        ),
        (
            (X, "bf16", None),
            ValueError,
            "argument 'format': expected a format with scales, fp8_tensor, fp8_block, mxfp8 or nvfp4, got 'bf16'. Use "
            "the unquantized tensor, or convert it with .to().",
        ),
        (
            (X, "fp8_block:square", torch.tensor([4])),
            ValueError,
            "argument 'format': expected blocks along a row for a ragged matrix, whose groups do not end on square "
            "blocks, got 'fp8_block:square'. Leave out 'square'.",
        ),
        (
            (X[:, :33], "mxfp8", None),
            ValueError,
            "argument 'grad': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
            "float32[4, 33] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
        ),
        (
            (X, "mxfp8", None, torch.ones(1)),
            ValueError,
            "argument 'amax': expected None for 'mxfp8', which has no use for it, got float32[1] on cpu. Leave it out.",
        ),
        (
            (X, "fp8_tensor", torch.tensor([2, 2]), torch.ones(1)),
            ValueError,
            "argument 'amax': expected sizes [2], the largest magnitudes that 'fp8_tensor' scales by, got float32[1] "
            "on cpu. Compute it with transformer_plugin.ops.amax.",
        ),
        (
            (X, "mxfp8", torch.tensor([5])),
            ValueError,
            "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at "
            "group 0. Enlarge the buffer or fix the sizes.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    for flags in ({}, COLUMNS, BOTH):
        with pytest.raises(error) as caught:
            ops.bias_backward_quantize(*arguments, **flags)
        expected = text
        if flags == COLUMNS and arguments[1] == "nvfp4":
            expected = text.replace("'amax'", "'amax_t'").replace("ops.amax", "ops.amax and columnwise=True")
        assert str(caught.value) == f"transformer_plugin::bias_backward_quantize: {expected}"


def test_errors_of_bias_backward() -> None:
    with pytest.raises(TypeError) as caught:
        ops.bias_backward(X.int())
    assert str(caught.value) == (
        "transformer_plugin::bias_backward: argument 'grad': expected one of the dtypes float32, bfloat16, float16, "
        "float64, got int32. Convert it with .to() first."
    )
    with pytest.raises(ValueError) as caught:
        ops.bias_backward(X[0])
    assert str(caught.value) == (
        "transformer_plugin::bias_backward: argument 'grad': expected 2 dimensions, got float32[64] on cpu. "
        "Reshape it first."
    )
