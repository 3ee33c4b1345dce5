"""Errors for bad operands of ``fp8_row``: the full text, in four parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_gemm_rowwise import E4M3, E5M2, operands
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import wgrad_arguments

A, AS = torch.zeros(4, 16).to(E4M3), torch.ones(4)
B, BS = torch.zeros(2, 8, 16).to(E4M3), torch.ones(2, 8)
S = torch.tensor([1, 2])
GIVES = "what the format gives data of this size"
AGREE = "Pass tensors whose sizes agree."


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((A.float(), AS, B, BS, S), {}, TypeError,
         "'a': expected one of the dtypes float8_e4m3fn, got float32. Convert it with .to() first."),
        ((A, AS, B.float().to(E5M2), BS, S), {}, TypeError,
         "'b': expected one of the dtypes float8_e4m3fn, got float8_e5m2. Convert it with .to() first."),
        ((A, AS, B.float().to(E5M2), BS, S), {"b_format": "fp8_row:e5m2"}, ValueError,
         "'b_format': expected fp8_row with e4m3, because a_format is 'fp8_row', got 'fp8_row:e5m2'. "
         "Quantize both operands to fp8_row, the second one to e4m3."),
        ((A, AS, B, AS[:2], S), {"b_format": "fp8_tensor"}, ValueError,
         "'b_format': expected fp8_row with e4m3, because a_format is 'fp8_row', got 'fp8_tensor'. "
         "Quantize both operands to fp8_row, the second one to e4m3."),
        ((A, AS[:2], B, BS, S), {"a_format": "fp8_tensor"}, ValueError,
         "'b_format': expected another family than fp8_row, because a_format is 'fp8_tensor', got 'fp8_row'. "
         "Quantize both operands to fp8_row, the second one to e4m3."),
        ((A, AS, B, BS, S), {"transpose_b": False}, ValueError,
         "'transpose_b': expected True with fp8_row, whose scales are those of rows of 'b', got False. "
         "Pass the transposed matrix, quantized along its rows."),
        ((A[0], AS, B, BS, S), {}, ValueError,
         "'a': expected 2 dimensions, got float8_e4m3fn[16] on cpu. Reshape it first."),
        ((A, AS, B[None], BS, S), {}, ValueError,
         "'b': expected 3 dimensions, got float8_e4m3fn[1, 2, 8, 16] on cpu. Reshape it first."),
        ((A, AS.double(), B, BS, S), {}, TypeError,
         "'a_scale[0]': expected one of the dtypes float32, got float64. Convert it with .to() first."),
        ((A, AS[:3], B, BS, S), {}, ValueError,
         f"'a_scale[0]': expected size 4 in dimension 0 ({GIVES}), got float32[3] on cpu. {AGREE}"),
        ((A, AS[:, None], B, BS, S), {}, ValueError,
         "'a_scale[0]': expected 1 dimensions, got float32[4, 1] on cpu. Reshape it first."),
        ((A, AS, B, BS[:, :7], S), {}, ValueError,
         f"'b_scale[0]': expected size 8 in dimension 1 ({GIVES}), got float32[2, 7] on cpu. "
         f"{AGREE}"),
        ((A[:, :8], AS, B, BS, S), {}, ValueError,
         "'b': expected size 8 in dimension 2 (the columns of 'a', summed over), got float8_e4m3fn[2, 8, 16] on cpu. "
         f"{AGREE}"),
        ((A, AS, B, BS, S[:1]), {}, ValueError,
         f"'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[1] on cpu. {AGREE}"),
        ((A, AS, B, BS, S + 1), {}, ValueError,
         "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at group 1. "
         "Enlarge the buffer or fix the sizes."),
        ((A, AS, B, BS, S), {"dtype": torch.float64}, TypeError,
         "'dtype': expected one of float32, bfloat16, float16, got float64. Convert the result with .to() instead."),
        ((A, AS, B, BS, S), {"alpha": torch.ones(1)}, ValueError,
         f"'alpha': expected size 2 in dimension 0 (one factor for each product), got float32[1] on cpu. {AGREE}"),
        ((A, AS, B, BS, S), {"bias": torch.ones(8)}, ValueError,
         "'bias': expected 2 dimensions, got float32[8] on cpu. Reshape it first."),
        ((A, AS, B, BS, S), {"bias_scale": AS}, ValueError,
         "'bias_scale': expected no scale without a bias, got float32[4] on cpu. "
         "Pass the bias that it scales, or leave it out."),
        ((A, AS, B, BS, S), {"expected_rows": -2}, ValueError,
         "'expected_rows': expected the rows of all groups together, or -1 for the rows of the buffer, got -2. "
         "Leave it out where it is not known."),
    ],
)  # fmt: skip
def test_errors(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        ops.grouped_gemm(**operands(*arguments, **options))
    assert str(caught.value) == f"transformer_plugin::grouped_gemm: argument {text}"


def test_errors_of_gemm() -> None:
    with pytest.raises(ValueError, match=r"gemm: argument 'b': expected 2 dimensions"):
        ops.gemm(**operands(A, AS, B, BS))
    with pytest.raises(ValueError, match=r"gemm: argument 'b_scale\[0\]': expected size 8 in dimension 0"):
        ops.gemm(**operands(A, AS, B[0], AS))
    with pytest.raises(ValueError, match=r"gemm: argument 'bias': expected size 8 in dimension 0"):
        ops.gemm(**operands(A, AS, B[0], BS[0], bias=AS))


def test_weight_gradient_is_refused() -> None:
    operands_of_call = wgrad_arguments((A.T, AS), (A.T, AS), "fp8_row", "fp8_row")
    with pytest.raises(ValueError) as caught:
        ops.grouped_gemm_wgrad(**operands_of_call, group_sizes=S)
    assert str(caught.value) == (
        "transformer_plugin::grouped_gemm_wgrad: argument 'grad_format': expected a format with scales along the rows "
        "that are summed over, not one for each of them, got 'fp8_row'. "
        "Pass the operands in bfloat16, without a format."
    )


@pytest.mark.gpu
def test_operands_on_another_device() -> None:
    a, a_scale, b, b_scale, sizes = (t.cuda() for t in (A, AS, B, BS, S))
    for i, name in enumerate(("a_scale", "b", "b_scale", "group_sizes")):
        operands_of_call = [a_scale, b, b_scale, sizes]
        operands_of_call[i] = operands_of_call[i].cpu()
        with pytest.raises(ValueError, match=rf"'{name}(\[0\])?': expected .* cuda:0"):
            ops.grouped_gemm(**operands(a, *operands_of_call))
