"""Weight gradients that are computed later: a queue is a list of what was deferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.ops._operands import Tensors, listed
from transformer_plugin.reference.gemm import grouped_gemm_wgrad

__all__ = [
    "defer_wgrad",
    "run_deferred_wgrads",
]


def defer_wgrad(
    queue: list[dict[str, Any]],
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
    accumulate: bool = True,
    skipped: Sequence[int] = (),
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
) -> None:
    """Keeps the unquantized operands of a weight gradient in a list."""
    sizes = torch.tensor([grad.shape[0]]) if group_sizes is None else group_sizes
    queue.append(
        {"grad": grad, "input": input, "group_sizes": sizes, "dtype": dtype, "accumulate": accumulate}
        | {"skipped": skipped, "input_rows": input_rows, "grad_rows": grad_rows}
    )


def run_deferred_wgrads(queue: list[dict[str, Any]], out: Tensors, accumulate: bool = True) -> None:
    """Adds the gradients of the list to ``out``: rounded to their ``dtype`` first, or once with what ``out`` holds."""
    tensors = listed(out, "reference", "out")
    members = tensors if len(tensors) > 1 or tensors[0].dim() == 2 else list(tensors[0])
    if not accumulate:
        for member in members:
            member.zero_()
    while queue:
        wgrad = queue.pop(0)
        wide = torch.float64 if members[0].dtype == torch.float64 else torch.float32
        dtype = wgrad["dtype"] or wide
        rows = {name: wgrad[name] for name in ("input_rows", "grad_rows")}
        values = grouped_gemm_wgrad(wgrad["grad"], wgrad["input"], wgrad["group_sizes"], dtype, **rows)
        for i, (member, value) in enumerate(zip(members, values, strict=True)):
            if i not in wgrad["skipped"]:
                before = member.to(value.dtype) if wgrad["dtype"] is None else member
                member.copy_(value + before if wgrad["accumulate"] else value)
