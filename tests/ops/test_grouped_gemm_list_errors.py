"""Errors for bad lists of matrices: the full text, which names the matrix, and buffers that are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transformer_plugin import ops

A, B, S = torch.zeros(4, 6), [torch.zeros(5, 6) for _ in range(2)], torch.tensor([1, 2])
GRAD, INPUT = torch.ones(4, 5), torch.ones(4, 6)
WHOLE = torch.full((3, 5, 6), 7.0)
OUT = [WHOLE[0], WHOLE[1].clone()]
SHARED, WIDE = torch.full((40,), 7.0), torch.full((5, 8), 7.0)
BUFFER = (
    "expected a buffer whose last dimension has stride 1 and whose rows do not overlap, as far apart as those of "
    "'out[0]', got float32[5, 6] on cpu with strides {}. It is written in place and never copied: pass contiguous "
    "buffers, or all with one stride of rows."
)
LIST = (
    "expected 1 to 1024 matrices, as many as a launch takes addresses, got {} of them. Pass more groups than that as "
    "one tensor."
)
APART = (
    "expected a buffer apart from '{}', which is {}, got float32[5, 6] on cpu in the same memory. "
    "Pass a separate buffer"
)
WITH = "written at the same time"


@pytest.mark.parametrize(
    ("op", "arguments", "options", "error", "text"),
    [
        ("grouped_gemm", (A, [], S), {}, ValueError, "'b': " + LIST.format(0)),
        ("grouped_gemm", (A, [B[0]] * 1025, S), {}, ValueError, "'b': " + LIST.format(1025)),
        (
            "grouped_gemm",
            (A, [torch.zeros(2, 5, 6)] * 2, S),
            {},
            ValueError,
            "'b[0]': expected 2 dimensions, got float32[2, 5, 6] on cpu. Reshape it first.",
        ),
        (
            "grouped_gemm",
            (A, [B[0], torch.zeros(6)], S),
            {},
            ValueError,
            "'b[1]': expected 2 dimensions, got float32[6] on cpu. Reshape it first.",
        ),
        (
            "grouped_gemm",
            (A, [B[0], torch.zeros(4, 6)], S),
            {},
            ValueError,
            "'b[1]': expected size 5 in dimension 0 (that of 'b[0]'), got float32[4, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, [B[0], B[1].half()], S),
            {},
            TypeError,
            "'b[1]': expected float32, like b[0], got float16. Convert one of them with .to() first.",
        ),
        (
            "grouped_gemm",
            (A.half(), B, S),
            {},
            TypeError,
            "'b[0]': expected float16, like a, got float32. Convert one of them with .to() first.",
        ),
        (
            "grouped_gemm",
            (A, B, S, None, None, False),
            {},
            ValueError,
            "'b[0]': expected size 6 in dimension 0 (the columns of 'a', summed over), got float32[5, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([1, 2, 1])),
            {},
            ValueError,
            "'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A, B, torch.tensor([3, 2])),
            {},
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 1. Enlarge the buffer or fix the sizes.",
        ),
        (
            "grouped_gemm",
            (A, B, S, torch.zeros(2, 6)),
            {},
            ValueError,
            "'bias': expected size 5 in dimension 1 (the columns of the output), got float32[2, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm",
            (A.clone().requires_grad_(), B, S),
            {"alpha": torch.ones(2, requires_grad=True)},
            ValueError,
            "'alpha': expected a tensor with requires_grad=False, got float32[2] on cpu with requires_grad=True. "
            "It is a constant: detach it, or multiply the result.",
        ),
        (
            "grouped_gemm",
            (A, B, S),
            {"max_sms": -1},
            ValueError,
            "'max_sms': expected a number of multiprocessors, or 0 for all, got -1. "
            "Pass how many the product may take.",
        ),
        ("grouped_gemm_wgrad_out", (GRAD, INPUT, S, []), {}, ValueError, "'out': " + LIST.format(0)),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [WHOLE[0]] * 1025),
            {},
            ValueError,
            "'out': " + LIST.format(1025),
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [out.half() for out in OUT]),
            {},
            TypeError,
            "'out[0]': expected one of the dtypes float32, bfloat16, got float16. Convert it with .to() first.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [OUT[0], OUT[1].bfloat16()]),
            {},
            TypeError,
            "'out[1]': expected float32, like out[0], got bfloat16. Convert one of them with .to() first.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (INPUT, GRAD, S, OUT),
            {},
            ValueError,
            "'out[0]': expected size 6 in dimension 0 (the columns of the gradient), got float32[5, 6] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [*OUT, WHOLE[2]]),
            {},
            ValueError,
            "'group_sizes': expected size 3 in dimension 0 (the matrices of 'out'), got int64[2] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [OUT[0], torch.full((6, 5), 7.0).T]),
            {},
            ValueError,
            "'out[1]': " + BUFFER.format("[1, 5]"),
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [OUT[0], WIDE[:, :6]]),
            {},
            ValueError,
            "'out[1]': " + BUFFER.format("[8, 1]"),
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [OUT[0], OUT[0]]),
            {},
            ValueError,
            "'out[1]': " + APART.format("out[0]", WITH) + ".",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, [SHARED[9:39].view(5, 6), SHARED[:30].view(5, 6)]),
            {},
            ValueError,
            "'out[1]': " + APART.format("out[0]", WITH) + ".",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, WHOLE[0, :4], S, [OUT[1], OUT[0]]),
            {},
            ValueError,
            "'out[1]': " + APART.format("input", "read while it is written") + ".",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, S, OUT),
            {"beta": torch.ones(2)},
            ValueError,
            "'beta': expected none where 'accumulate' adds to what the buffer holds, got float32[2] on cpu and "
            "accumulate=True. Pass one of them, accumulate=False with beta.",
        ),
        (
            "grouped_gemm_wgrad_out",
            (GRAD, INPUT, torch.tensor([5, 0]), OUT),
            {},
            ValueError,
            "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, "
            "got a sum of 5 at group 0. Enlarge the buffer or fix the sizes.",
        ),
    ],
)
def test_errors(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(*arguments, **options)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"
    if op.endswith("_out"):
        assert all((out == 7.0).all() for out in (WHOLE, OUT[1], SHARED, WIDE))


@pytest.mark.gpu
def test_matrices_on_another_device() -> None:
    a, sizes = A.cuda(), S.cuda()
    with pytest.raises(ValueError, match=r"'b\[1\]': expected .* cuda:0"):
        ops.grouped_gemm(a, [B[0].cuda(), B[1]], sizes)
    out = [WHOLE[0].cuda(), WHOLE[1]]
    with pytest.raises(ValueError, match=r"'out\[1\]': expected .* cuda:0"):
        ops.grouped_gemm_wgrad_out(GRAD.cuda(), INPUT.cuda(), sizes, out)
    assert all((matrix == 7.0).all() for matrix in out)
