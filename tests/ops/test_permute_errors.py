"""Errors of the ops that permute rows: the full text."""

from __future__ import annotations

import pytest
import torch

from transformer_plugin import ops

INDICES = torch.zeros(2, 2, dtype=torch.int32)
MAP = torch.zeros(2, 2, dtype=torch.int32)
SOURCE = torch.zeros(3, dtype=torch.int32)
DTYPE = "Convert it with .to() first."


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ops.assign_slots(INDICES.float(), 0, 2, 4),
            TypeError,
            f"assign_slots: argument 'indices': expected one of the dtypes int32, int64, got float32. {DTYPE}",
        ),
        (
            lambda: ops.assign_slots(INDICES[0], 0, 2, 4),
            ValueError,
            "assign_slots: argument 'indices': expected 2 dimensions, got int32[2] on cpu. Reshape it first.",
        ),
        (
            lambda: ops.assign_slots(INDICES, 0, 1025, 4),
            ValueError,
            "assign_slots: argument 'num_experts': expected from 0 to 1024, got 1025. Give each rank fewer experts.",
        ),
        (
            lambda: ops.assign_slots(INDICES, -1, 2, 4),
            ValueError,
            "assign_slots: argument 'first_expert': expected an expert's number, 0 or more, got -1. Pass the number of "
            "the first expert that gets rows.",
        ),
        (
            lambda: ops.permute(torch.zeros(2, 4), INDICES, 2, -1),
            ValueError,
            "permute: argument 'capacity': expected from 0 to 2^31 - 1 rows, got -1. Pass the rows of the buffer, for "
            "example tokens * topk + num_experts * (alignment - 1).",
        ),
        (
            lambda: ops.permute(torch.zeros(2, 4), INDICES, 2, 4, 0),
            ValueError,
            "permute: argument 'alignment': expected from 1 to 2^31 - 1, got 0. Pass 1 for no padding.",
        ),
        (
            lambda: ops.permute(torch.zeros(3, 4), INDICES, 2, 4),
            ValueError,
            "permute: argument 'indices': expected size 3 in dimension 0 (the rows of 'tokens'), got int32[2, 2] on "
            "cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.permute(torch.zeros(2, 4, dtype=torch.int64), INDICES, 2, 4),
            TypeError,
            "permute: argument 'tokens': expected one of the dtypes float32, bfloat16, float16, float64, "
            f"float8_e4m3fn, float8_e5m2, uint8, int8, got int64. {DTYPE}",
        ),
        (
            lambda: ops.permute(torch.zeros(2, 4), torch.zeros(2, 1025, dtype=torch.int32), 2, 4),
            ValueError,
            "permute: argument 'indices': expected at most 1024 columns, got int32[2, 1025] on cpu. Choose fewer "
            "experts for each token.",
        ),
        (
            lambda: ops.unpermute(torch.zeros(3, 4), MAP.long(), SOURCE),
            TypeError,
            f"unpermute: argument 'slot': expected one of the dtypes int32, got int64. {DTYPE}",
        ),
        (
            lambda: ops.unpermute(torch.zeros(4, 4), MAP, SOURCE),
            ValueError,
            "unpermute: argument 'source': expected size 4 in dimension 0 (the rows of 'rows'), got int32[3] on "
            "cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.unpermute(torch.zeros(3, 4), MAP, SOURCE, torch.zeros(2, 2, dtype=torch.bfloat16)),
            TypeError,
            f"unpermute: argument 'weights': expected one of the dtypes float32, got bfloat16. {DTYPE}",
        ),
        (
            lambda: ops.unpermute(torch.zeros(3, 4), MAP, SOURCE, torch.zeros(2, 3)),
            ValueError,
            "unpermute: argument 'weights': expected size 2 in dimension 1 (the columns of 'slot'), got "
            "float32[2, 3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.assign_weighted_slots(INDICES, torch.zeros(2, 2, dtype=torch.float64), 0, 2, 4),
            TypeError,
            f"assign_weighted_slots: argument 'weights': expected one of the dtypes float32, got float64. {DTYPE}",
        ),
        (
            lambda: ops.assign_weighted_slots(INDICES, torch.zeros(2, 3), 0, 2, 4),
            ValueError,
            "assign_weighted_slots: argument 'weights': expected size 2 in dimension 1 (the columns of 'indices'), got "
            "float32[2, 3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ops.assign_weighted_slots(INDICES, torch.zeros(2, 2), 0, 2, -1),
            ValueError,
            "assign_weighted_slots: argument 'capacity': expected from 0 to 2^31 - 1 rows, got -1. Pass the rows of "
            "the buffer, for example tokens * topk + num_experts * (alignment - 1).",
        ),
        (
            lambda: ops.count_tokens_per_expert(INDICES, -1),
            ValueError,
            "count_tokens_per_expert: argument 'num_experts': expected from 0 to 1024, got -1. Give each rank fewer "
            "experts.",
        ),
    ],
)
def test_errors_have_four_parts(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == "transformer_plugin::" + text


@pytest.mark.gpu
def test_indices_on_another_device() -> None:
    with pytest.raises(ValueError) as caught:
        ops.permute(torch.zeros(2, 4, device="cuda"), INDICES, 2, 4)
    assert str(caught.value) == (
        "transformer_plugin::permute: argument 'indices': expected a tensor on cuda:0, like tokens, got int32[2, 2] on "
        'cpu. Move it with .to("cuda:0") first.'
    )
