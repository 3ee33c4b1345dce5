"""Errors for bad arguments of linear and grouped_linear: the full text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_plugin import ops

X, W, G = torch.zeros(4, 6), torch.zeros(2, 5, 6), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            "linear",
            (X, torch.zeros(5, 7)),
            ValueError,
            "'weight': expected size 6 in dimension 1 (the last dimension of 'input'), got float32[5, 7] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "linear",
            (torch.tensor(1.0), torch.zeros(5, 7)),
            ValueError,
            "'input': expected at least 1 dimension, got float32[] on cpu. Reshape it first.",
        ),
        (
            "linear",
            (X, torch.zeros(5, 6), None, "fp8_tensor", "bf16", "fp8_tensor"),
            ValueError,
            "'weight_format': expected a format of the family of input_format, 'fp8_tensor', got 'bf16'. "
            "Use the three formats of one recipe.",
        ),
        (
            "linear",
            (X, torch.zeros(5, 6), None, "fp9", "none", "none"),
            ValueError,
            "'input_format': expected a format key: none, bf16, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, then "
            "options like fp8_block:e4m3,pow2,square,eps=1e-12, got 'fp9'. transformer_plugin.formats lists them.",
        ),
        (
            "linear",
            (X.double(), torch.zeros(5, 6).double(), None, "bf16", "bf16", "bf16"),
            TypeError,
            "'input': expected one of the dtypes float32, bfloat16, float16, got float64. "
            "Convert it with .to() first.",
        ),
        *[
            (
                op,
                (
                    torch.zeros(32, columns),
                    torch.zeros(*groups, rows, columns),
                    *sizes,
                    *[None] * (1 + len(groups)),
                    *[format] * 3,
                ),
                ValueError,
                text,
            )
            for op, groups, sizes, dim in (("linear", (), (), 0), ("grouped_linear", (2,), (G,), 1))
            for format, rows, columns, text in (
                (
                    "mxfp8",
                    64,
                    40,
                    "'input': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
                    "float32[32, 40] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
                ),
                (
                    "nvfp4",
                    40,
                    64,
                    f"'weight': expected a dimension {dim} that is a multiple of 16, the block of nvfp4, "
                    f"got float32[{'2, ' * dim}40, 64] on cpu. Pad the weight with rows of zeros, and drop those "
                    "columns of the output.",
                ),
            )
        ],
        (
            "grouped_linear",
            (X, W, torch.tensor([1, 2, 3])),
            ValueError,
            "'group_sizes': expected size 2 in dimension 0 (the matrices of 'weight'), got int64[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_linear",
            (X, W, G, None, None, "fp8_block:square", "fp8_block:square", "fp8_block"),
            ValueError,
            "'input_format': expected blocks along rows, which end where a group ends, got 'fp8_block:square'. "
            "Square blocks are for the weight.",
        ),
        (
            "grouped_linear",
            (X, W, G, None, torch.ones(4)),
            ValueError,
            "'bias_scale': expected no scale without a bias, got float32[4] on cpu. "
            "Pass the bias that it scales, or leave it out.",
        ),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors(
    op: str, arguments: tuple[Any, ...], error: type[Exception], text: str, requires_grad: bool
) -> None:
    arguments = (arguments[0].clone().requires_grad_(requires_grad), *arguments[1:])
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
    meta = [a.detach().to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(error, match="expected"):  # a compiler meets the error while it traces
        getattr(ops, op)(*meta)
