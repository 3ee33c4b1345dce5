"""References of the ops of delayed scaling. They read group sizes on the host; only the results are specified."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.reference._fp8 import round_to_fp8

__all__ = [
    "delayed_scale",
    "quantize_scaled",
    "update_delayed_scale_",
]


def _amax(values: Tensor) -> Tensor:
    """Returns the largest magnitude, ignoring NaN; 0 if there are no elements; float32."""
    magnitudes = values.float().abs().nan_to_num(nan=0.0, posinf=float("inf"))
    return magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())


def _parts(input: Tensor, group_sizes: Tensor | None) -> list[Tensor]:
    """Returns the parts that have separate scales: each group of rows, each matrix of a stack, or the one matrix."""
    if group_sizes is not None:
        sizes = group_sizes.tolist()
        return list(input[: sum(sizes)].split(sizes))
    return list(input) if input.dim() == 3 else [input]


def quantize_scaled(
    input: Tensor,
    scale: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    group_sizes: Tensor | None = None,
    first: int = 0,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, ...]:
    """Multiplies each matrix, or group of rows, by its scale and rounds it; its amax updates ``amax`` by a maximum.
    One scale per tensor serves both directions."""
    fmt = Format.parse(format) if isinstance(format, str) else format
    assert fmt.dtype is not None
    data = torch.zeros(input.shape, dtype=torch.uint8, device=input.device)
    for i, part in enumerate(_parts(input, group_sizes)):
        _parts(data, group_sizes)[i].copy_(
            round_to_fp8(part.float() * scale[first + i], fmt).view(torch.uint8)
        )
        if amax is not None:
            amax[first + i] = torch.maximum(amax[first + i], _amax(part))
    count = len(_parts(input, group_sizes))
    scale_inv = 1 / scale[first : first + count]
    along_rows = (data.view(fmt.dtype), scale_inv) if rowwise else ()
    along_columns = (data.mT.contiguous().view(fmt.dtype), scale_inv.clone()) if columnwise else ()
    return along_rows + along_columns


def delayed_scale(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    formats: list[str],
    margin: int = 0,
    algorithm: str = "max",
) -> Tensor:
    """Returns the next scale of each tensor, and writes nothing."""
    return update_delayed_scale_(history.clone(), scale.clone(), amax.clone(), formats, margin, algorithm)


def update_delayed_scale_(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    formats: list[str],
    margin: int = 0,
    algorithm: str = "max",
    group: str = "",
) -> Tensor:
    """Updates the history of each tensor whose last amax is not 0, and computes its next scale. With a ``group``, the
    largest amaxes of its ranks are used.

    Source: NVIDIA TransformerEngine 2.20, delayed scaling.
    """
    largest = torch.tensor([Format.parse(key).largest for key in formats], dtype=torch.float32)
    largest = (largest * 2.0**-margin).repeat_interleave(len(scale) // len(formats)).to(scale.device)
    if group:
        functional = torch.ops._c10d_functional
        amax.copy_(functional.wait_tensor(functional.all_reduce(amax, "max", group)))
    last = torch.where(amax != 0, amax, history[0])
    window = torch.cat([history[1:], last[None]])
    advances = last != 0
    rolled = window.clone()
    rolled[0] = 0
    history.copy_(torch.where(advances, rolled, history))
    chosen = window.nan_to_num(nan=0.0, posinf=float("inf")).amax(0) if algorithm == "max" else last
    usable = advances & (chosen > 0) & chosen.isfinite()
    scale.copy_(torch.where(usable, largest / chosen, scale).clamp(max=torch.finfo(torch.float32).max))
    amax.zero_()
    return scale.clone()
