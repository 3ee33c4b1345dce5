"""References of quantizing a weight before a layer uses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, listed
from transformer_plugin.reference.quantize import amax, quantize

__all__ = [
    "quantize_weight",
    "quantize_weight_out",
]


def stacked_weight(weight: Tensors) -> Tensor:
    """A tensor, or several matrices as one."""
    tensors = listed(weight, "reference", "weight")
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def quantize_weight(
    weight: Tensors, input_format: str, weight_format: str, grad_format: str, columns: bool | None = None
) -> list[Tensor]:
    """Quantizes row-wise, and column-wise if the values differ in that direction. ``columns`` forces the
    column-wise data, which devices need whose kernels multiply quantized data directly. Rounding is not stochastic."""
    weight = stacked_weight(weight)
    format = Format.parse(weight_format)
    mark = nonfinite_mark(weight) if format.nonfinite_is_nan else torch.ones((), device=weight.device)
    if format.family == "bf16":
        return [(weight.bfloat16() * mark).clone(memory_format=torch.contiguous_format)]
    if columns is None:
        columns = format.family != "fp8_tensor" and not format.square_blocks
    nv = format.family == "nvfp4"
    tensors: list[Tensor] = []
    for rowwise in [True, False] if columns else [True]:
        of_direction = amax(weight, format, rowwise=rowwise, columnwise=not rowwise) if nv else None
        assert not isinstance(of_direction, tuple)
        tensors += quantize(
            weight,
            format,
            amax=of_direction if rowwise else None,
            amax_t=None if rowwise else of_direction,
            rowwise=rowwise,
            columnwise=not rowwise,
        )
        tensors += [] if of_direction is None else [of_direction]
    if mark.isnan():
        for tensor in tensors:  # for nvfp4 also the amaxes by which values are scaled
            if tensor.dtype in (torch.float32, torch.float8_e8m0fnu):
                tensor.copy_(torch.full_like(tensor, float("nan"), dtype=torch.float32))
    return tensors


def nonfinite_mark(matrix: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """Returns 1, or NaN if the matrix contains a NaN or an infinity; of a ragged matrix, only the rows of groups
    count."""
    used = matrix if group_sizes is None else matrix[: int(group_sizes.sum())]
    return torch.tensor(1.0 if used.isfinite().all() else float("nan"), device=matrix.device)


def quantize_weight_out(
    weight: Tensors,
    input_format: str,
    weight_format: str,
    grad_format: str,
    out: Sequence[Tensor],
    noop: Tensor | None = None,
) -> None:
    """Writes the results of :func:`quantize_weight` into tensors, unless ``noop`` is 1."""
    if noop is not None and float(noop) == 1:
        return
    one = 3 if Format.parse(weight_format).family == "nvfp4" else 2
    values = quantize_weight(weight, input_format, weight_format, grad_format, columns=len(out) > one)
    for buffer, value in zip(out, values, strict=True):
        buffer.view(torch.uint8).copy_(value.view(torch.uint8))
