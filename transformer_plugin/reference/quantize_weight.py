"""What a weight is rounded to before layers multiply it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference.quantize import amax, quantize

__all__ = [
    "quantize_weight",
    "quantize_weight_out",
]


def quantize_weight(
    weight: Tensor, input_format: str, weight_format: str, grad_format: str, columns: bool | None = None
) -> list[Tensor]:
    """Along rows, then along columns if the values there are others; ``columns`` has those anyway, as devices need them
    whose kernels multiply quantized data. Without rounding at random."""
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
        for tensor in tensors:  # what the values are scaled by: of nvfp4 the amaxes
            if tensor.dtype in (torch.float32, torch.float8_e8m0fnu):
                tensor.copy_(torch.full_like(tensor, float("nan"), dtype=torch.float32))
    return tensors


def nonfinite_mark(matrix: Tensor, group_sizes: Tensor | None = None) -> Tensor:
    """1, or NaN if the matrix holds a NaN or an infinity, of ragged rows those of its groups."""
    used = matrix if group_sizes is None else matrix[: int(group_sizes.sum())]
    return torch.tensor(1.0 if used.isfinite().all() else float("nan"), device=matrix.device)


def quantize_weight_out(
    weight: Tensor, input_format: str, weight_format: str, grad_format: str, out: Sequence[Tensor]
) -> None:
    """:func:`quantize_weight` into tensors."""
    one = 3 if Format.parse(weight_format).family == "nvfp4" else 2
    values = quantize_weight(weight, input_format, weight_format, grad_format, columns=len(out) > one)
    for buffer, value in zip(out, values, strict=True):
        buffer.view(torch.uint8).copy_(value.view(torch.uint8))
