"""Inputs that every op must handle. Tests, opcheck, sanitizer runs and benchmarks use the same lists.

A case is a name and a function ``make(device, generator) -> tuple of arguments``. It draws data on the CPU, so that
every device has the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Formats that compute their scales from blocks along a row.
BLOCK_FORMATS = (
    "fp8_block",
    "fp8_block:e5m2,fp32",
    "fp8_block:fp32,eps=1e-3",
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp8:tiled",
)


@dataclass(frozen=True)
class Case:
    """One set of arguments of one op."""

    name: str
    make: Callable[[torch.device, torch.Generator], tuple[Any, ...]]

    def arguments(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Any, ...]:
        """The arguments; for one seed the values are the same on every device."""
        return self.make(torch.device(device), torch.Generator().manual_seed(seed))


def randn(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Tensor:
    """Normal values, drawn on the CPU in float32."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def activation_cases() -> Iterator[Case]:
    """Zero rows, one row, odd widths, wide rows, no probabilities, values from tiny to overflowing in exp."""
    shapes = [(0, 16), (1, 2), (3, 34), (5, 66), (129, 128), (7, 2048)]
    for dtype in FLOAT_DTYPES:
        for rows, columns in shapes:
            for with_probs in (True, False):

                def make(
                    device: torch.device,
                    generator: torch.Generator,
                    shape: tuple[int, int] = (rows, columns),
                    dtype: torch.dtype = dtype,
                    with_probs: bool = with_probs,
                ) -> tuple[Any, ...]:
                    input = randn(shape, dtype, device, generator, scale=3.0)
                    probs = torch.rand(shape[0], generator=generator).to(device) if with_probs else None
                    return input, probs

                name = f"{str(dtype)[6:]}-{rows}x{columns}-{'probs' if with_probs else 'plain'}"
                yield Case(name, make)
