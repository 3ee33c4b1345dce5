"""Errors for bad arguments of the grouped products: the full text, in four parts, and buffers that are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_plugin import ops

A, B, S = torch.zeros(4, 6), torch.zeros(2, 5, 6), torch.tensor([1, 2])
GRAD, INPUT = torch.ones(4, 5), torch.ones(4, 6)
BUFFER = (
    "expected a buffer whose last dimension has stride 1 and whose rows do not overlap, got float32[2, 5, 6] on cpu "
    "with strides {}. It is written in place and never copied: pass a contiguous buffer, or one with strided rows or "
    "groups."
)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            "grouped_gemm",
            (A, B, torch.tensor([1, -1])),
            ValueError,
            "'group_sizes': expected sizes that are not negative, got -1 for group 1. "
            "Pass the number of rows of each group.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([3, 2], dtype=torch.int32)),
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([1, 2**63 - 1])),
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 9223372036854775808 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([1.0, 2.0])),
            TypeError,
            "'group_sizes': expected one of the dtypes int32, int64, got float32. Convert it with .to() first.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([1, 2, 1])),
            ValueError,
            "'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, S, None, None, False),
            ValueError,
            "'b': expected size 6 in dimension 1 (the columns of 'a', summed over), got float32[2, 5, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, S, torch.zeros(2, 6)),
            ValueError,
            "'bias': expected size 5 in dimension 1 (the columns of the output), got float32[2, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, S, torch.zeros(2, 5), torch.zeros(3)),
            ValueError,
            "'bias_scale': expected size 4 in dimension 0 (the rows of the buffer), got float32[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, S, None, torch.zeros(4)),
            ValueError,
            "'bias_scale': expected no scale without a bias, got float32[4] on cpu. "
            "Pass the bias that it scales, or leave it out.",
        ),
        (
            "grouped_gemm_wgrad",
            (GRAD, INPUT[:3], S),
            ValueError,
            "'input': expected size 4 in dimension 0 (the rows of 'grad'), got float32[3, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad",
            (GRAD, INPUT, S, torch.int32),
            TypeError,
            "'dtype': expected one of float32, bfloat16, float16 with grad in float32, got int32. "
            "Convert the result with .to() instead.",
        ),
        (
            "grouped_bias_backward",
            (GRAD, S, torch.zeros(3, 5)),
            ValueError,
            "'bias': expected size 2 in dimension 0 (the groups), got float32[3, 5] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
    ],
)
def test_errors(op: str, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"


@pytest.mark.parametrize(
    ("out", "sizes", "error", "text"),
    [
        (torch.full((2, 6, 5), 7.0).transpose(1, 2), S, ValueError, "'out': " + BUFFER.format("[30, 1, 5]")),
        (torch.full((2, 1, 6), 7.0).expand(2, 5, 6), S, ValueError, "'out': " + BUFFER.format("[6, 0, 1]")),
        (torch.full((1, 5, 6), 7.0).expand(2, 5, 6), S, ValueError, "'out': " + BUFFER.format("[0, 6, 1]")),
        (
            torch.full((99,), 7.0).as_strided((2, 5, 6), (20, 6, 1)),
            S,
            ValueError,
            "'out': " + BUFFER.format("[20, 6, 1]"),
        ),
        (
            torch.full((2, 5, 6), 7.0, dtype=torch.float16),
            S,
            TypeError,
            "'out': expected one of the dtypes float32, bfloat16, got float16. Convert it with .to() first.",
        ),
        (
            torch.full((2, 5, 7), 7.0),
            S,
            ValueError,
            "'out': expected size 6 in dimension 2 (the columns of the input), got float32[2, 5, 7] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            torch.full((2, 5, 6), 7.0),
            torch.tensor([4, 1]),
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes.",
        ),
    ],
)
def test_refused_buffer_is_unchanged(
    out: torch.Tensor, sizes: torch.Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        ops.grouped_gemm_wgrad_out(GRAD, INPUT, sizes, out)
    assert str(caught.value) == "transformer_plugin::grouped_gemm_wgrad_out: argument " + text
    assert (out == 7.0).all()


LATE = (
    "argument 'group_sizes': expected sizes that fit their buffer in the calls before this one, got a call with "
    "{} rows for group {} where {} of 8 are left. Rows past the buffer were dropped: fix the sizes or "
    "enlarge the buffer."
)


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_wrong_sizes_stay_in_bounds_and_are_reported_later(index: torch.dtype) -> None:
    """On CUDA the host does not read sizes: negative sizes count as 0, and rows past the buffer are dropped."""
    a = torch.ones(8, 16, device="cuda")
    b = torch.ones(4, 16, 16, device="cuda")
    sizes = torch.tensor([2, 0, 100, 3], device="cuda", dtype=index)
    for dtype in (torch.float32, torch.bfloat16):
        got = ops.grouped_gemm(a.to(dtype), b.to(dtype), sizes)
        torch.testing.assert_close(got, torch.full_like(got, 16.0))
        with pytest.raises(ValueError) as caught:
            ops.check_group_sizes()
        assert str(caught.value) == "transformer_plugin::check_group_sizes: " + LATE.format(100, 2, 6)
        rows = ops.grouped_gemm_wgrad(a.to(dtype), a.to(dtype), sizes)[:, 0, 0]
        torch.testing.assert_close(rows.float().cpu(), torch.tensor([2.0, 0.0, 6.0, 0.0]))
        with pytest.raises(ValueError) as caught:
            ops.grouped_gemm_wgrad(a.to(dtype), a.to(dtype), sizes)
        assert str(caught.value) == "transformer_plugin::grouped_gemm_wgrad: " + LATE.format(100, 2, 6)
    ops.check_group_sizes()  # an error is reported once


@pytest.mark.gpu
def test_wrong_sizes_in_a_graph_are_reported() -> None:
    """Also negative sizes, and the first of several wrong sizes that one pass of the kernel does not scan together."""
    x = torch.ones(8, 128, device="cuda")
    sizes = torch.zeros(600, dtype=torch.int64, device="cuda")
    sizes[300] = 8
    ops.quantize(x, "fp8_block", sizes)  # libraries load before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, _ = ops.quantize(x, "fp8_block", sizes)
    graph.replay()
    torch.cuda.synchronize()
    ops.check_group_sizes()
    for group, size, left in ((400, -5, 0), (299, 3, 8)):
        sizes[group] = size
        graph.replay()
        torch.cuda.synchronize()
        first = (group, size, left) if size < 0 else (300, 8, 5)
        with pytest.raises(ValueError) as caught:
            ops.check_group_sizes()
        assert str(caught.value) == "transformer_plugin::check_group_sizes: " + LATE.format(
            first[1], first[0], first[2]
        )
    assert (data.float() != 0).all()


def test_no_error_without_wrong_sizes() -> None:
    ops.check_group_sizes()


@pytest.mark.gpu
def test_float64_is_refused_on_a_gpu() -> None:
    with pytest.raises(TypeError) as caught:
        ops.grouped_gemm(A.double().cuda(), B.double().cuda(), S.cuda())
    assert str(caught.value) == (
        "transformer_plugin::grouped_gemm: argument 'a': expected one of the dtypes float32, bfloat16, float16, "
        "got float64. Convert it with .to() first."
    )
