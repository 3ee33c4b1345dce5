"""Selects the numpy oracle of a format by the format's key."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops import nvfp4_oracle, quantize_oracle

#: Every format that has an oracle.
FORMATS = (*quantize_oracle.SPECS, *nvfp4_oracle.SPECS)


def both(input: Tensor, format: str, extras: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the four outputs of ``quantize``. For a stack of no matrices they are empty, with the shapes of one
    matrix."""
    if input.dim() == 3 and input.shape[0] == 0:
        one = {
            name: value if name == "seed" else value.new_zeros(1, *value.shape[1:])
            for name, value in extras.items()
        }
        return tuple(output[:0] for output in both(torch.zeros(1, *input.shape[1:]), format, one))
    if format not in nvfp4_oracle.SPECS:
        return quantize_oracle.both_directions(input, quantize_oracle.SPECS[format])
    spec, seed = nvfp4_oracle.SPECS[format], _seed(extras)
    rows = nvfp4_oracle.quantize_direction(input, spec, extras["amax"], seed, 0)
    return *rows, *nvfp4_oracle.quantize_direction(input, spec, extras["amax_t"], seed, 1)


def grouped_both(
    input: Tensor, sizes: list[int], format: str, extras: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """Returns the four outputs for a ragged matrix."""
    if format not in nvfp4_oracle.SPECS:
        return quantize_oracle.grouped_both_directions(input, sizes, quantize_oracle.SPECS[format])
    spec, seed = nvfp4_oracle.SPECS[format], _seed(extras)
    rows = nvfp4_oracle.grouped_quantize_direction(input, sizes, spec, extras["amax"], seed, 0)
    return *rows, *nvfp4_oracle.grouped_quantize_direction(input, sizes, spec, extras["amax_t"], seed, 1)


def dequantized(data: Tensor, scale: Tensor, format: str, amax: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the dequantized values of one row-wise matrix."""
    if format in nvfp4_oracle.SPECS:
        assert amax is not None
        return nvfp4_oracle.dequantized(data, scale, nvfp4_oracle.SPECS[format], amax, dtype)
    spec = quantize_oracle.SPECS[format]
    scales = quantize_oracle.spread(scale, spec, (data.shape[0], data.shape[1]))
    return quantize_oracle.dequantized(data, scales, spec.element, dtype)


def _seed(extras: dict[str, Tensor]) -> int | None:
    return int(extras["seed"].item()) if "seed" in extras else None
