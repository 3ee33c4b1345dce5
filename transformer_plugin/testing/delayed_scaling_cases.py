"""Inputs of the delayed-scaling ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.cases import FLOAT_DTYPES, Case, randn
from transformer_plugin.testing.quantize_cases import GROUPS, SHAPES, STACKS, special_matrix

E4M3, E5M2 = "fp8_tensor:e4m3", "fp8_tensor:e5m2"
FORMATS = (E4M3, E5M2)
#: (length, number of tensors) of the histories.
HISTORIES = ((1, 1), (1, 5), (2, 3), (3, 9), (16, 6), (515, 3), (1024, 12), (1030, 8))


def _state(count: int, first: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scales from tiny to huge; amaxes that the data exceeds for some tensors only. Both have two unused entries."""
    scale = torch.exp2(torch.randint(-6, 8, (first + count + 2,), generator=generator).float())
    scale *= 1 + torch.rand(first + count + 2, generator=generator)
    amax = torch.rand(first + count + 2, generator=generator) * 20
    amax[::2] = 0
    return scale.to(device), amax.to(device)


def quantize_scaled_cases() -> Iterator[Case]:
    """Arguments of quantize_scaled: input, scale, format, amax, group_sizes, first."""
    for i, shape in enumerate(SHAPES + STACKS):
        for j, format in enumerate(FORMATS):
            dtype, first = FLOAT_DTYPES[(i + j) % 3], (i + j) % 2 * 3

            def make(
                device: torch.device,
                generator: torch.Generator,
                shape: tuple[int, ...] = shape,
                dtype: torch.dtype = dtype,
                format: str = format,
                first: int = first,
            ) -> tuple[Any, ...]:
                scale, amax = _state(shape[0] if len(shape) == 3 else 1, first, generator, device)
                return randn(shape, dtype, device, generator, 3.0), scale, format, amax, None, first

            yield Case(f"{'x'.join(map(str, shape))}-{format}-{str(dtype)[6:]}", make)
    for dtype in FLOAT_DTYPES:
        for format in FORMATS:

            def special(
                device: torch.device,
                generator: torch.Generator,
                dtype: torch.dtype = dtype,
                format: str = format,
            ) -> tuple[Any, ...]:
                scale, amax = _state(16, 0, generator, device)
                return special_matrix(dtype).to(device)[:, None], scale, format, amax, None, 0

            yield Case(f"special-{format}-{str(dtype)[6:]}", special)


def grouped_quantize_scaled_cases() -> Iterator[Case]:
    """The same with group sizes. The tail rows are NaN and 1e4, which must not reach any amax."""
    for i, (sizes, tail) in enumerate(GROUPS):
        for j, format in enumerate(FORMATS):
            dtype = FLOAT_DTYPES[(i + j) % 3]

            def make(
                device: torch.device,
                generator: torch.Generator,
                sizes: list[int] = sizes,
                tail: int = tail,
                format: str = format,
                dtype: torch.dtype = dtype,
                columns: int = (130, 33, 0 if tail == 3 else 257)[(i + j) % 3],
                index: torch.dtype = torch.int32 if (i + j) % 2 else torch.int64,
            ) -> tuple[Any, ...]:
                scale, amax = _state(len(sizes), 1, generator, device)
                values = randn((sum(sizes) + tail, columns), dtype, torch.device("cpu"), generator, 3.0)
                values[sum(sizes) :] = 1e4
                values[sum(sizes) :: 2] = float("nan")
                group_sizes = torch.tensor(sizes, dtype=index, device=device)
                return values.to(device), scale, format, amax, group_sizes, 1

            yield Case(f"{len(sizes)}groups-{sum(sizes)}+{tail}-{format}-{str(dtype)[6:]}", make)


def delayed_scale_cases() -> Iterator[Case]:
    """Arguments of delayed_scale and update_delayed_scale_: history, scale, amax, formats, margin, algorithm.

    The states are those in the middle of a training. Some tensors have an amax of zero, infinity, NaN or a tiny value.
    """
    for i, (length, tensors) in enumerate(HISTORIES):
        for algorithm in ("max", "most_recent"):
            formats = [E4M3, E4M3, E5M2] if tensors % 3 == 0 else [FORMATS[i % 2]]
            margin = (0, 2, -1)[i % 3]

            def make(
                device: torch.device,
                generator: torch.Generator,
                length: int = length,
                tensors: int = tensors,
                algorithm: str = algorithm,
                formats: list[str] = formats,
                margin: int = margin,
            ) -> tuple[Any, ...]:
                history = torch.rand(length, tensors, generator=generator) * 100
                history[: length // 2] = 0
                amax = torch.rand(tensors, generator=generator) * 50
                edges = torch.tensor([0.0, 1e-44, 3e38, float("inf"), 0.0, float("nan"), 1e-45, 7.0, 0.0])
                count = min(tensors, len(edges))
                amax[tensors - count :] = edges[:count]
                history[0, -1] = 5.0 if tensors > 2 else 0.0  # an older state may have a value here
                if tensors > 4:
                    history[length // 2, 1] = float("inf")
                    history[-1, 2] = float("nan")
                scale = torch.rand(tensors, generator=generator) * 9
                state = (history.to(device), scale.to(device), amax.to(device))
                return *state, formats, margin, algorithm

            yield Case(f"{length}x{tensors}-margin{margin}-{algorithm}", make)
