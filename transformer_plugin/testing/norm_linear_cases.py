"""Inputs that norm_linear must handle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.quantize_cases import rows_for, width_for

NORMS = ("rms_norm", "layer_norm")
#: Sizes of the input and the number of outputs; rows and widths are rounded up for the formats.
NORM_LINEAR_SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((9, 24), 16),
    ((0, 40), 8),
    ((1, 136), 33),
    ((40,), 24),
    ((2, 5, 48), 40),
    ((140, 200), 33),
    ((257, 136), 130),
    ((131, 1056), 64),
]


def fitted(
    shape: tuple[int, ...], columns: int, formats: tuple[str, str, str]
) -> tuple[tuple[int, ...], int]:
    """Returns the sizes, rounded up to what the formats require, forward and backward."""
    *leading, width = shape
    leading = leading or [1]
    leading[-1] = rows_for(leading[-1], *formats)
    if len(shape) == 1 and leading == [1]:
        leading = []
    return (*leading, width_for(width, *formats)), width_for(columns, *formats)


def norm_linear_arguments(
    shape: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    normalization: str,
    device: torch.device,
    generator: torch.Generator,
    kind: int = 0,
) -> tuple[Any, ...]:
    """Returns (input, norm_weight, norm_bias, weight, bias, eps, normalization, zero_centered).

    ``kind`` modulo 4 selects which of the parameters that may be None are there: all, the norm's, none, the bias;
    ``kind`` modulo 8 of 4 or more is zero centered.
    """
    width = shape[-1]

    def parameter(size: int, there: bool) -> Tensor | None:
        return normals((size,), dtype, device, generator) if there else None

    scales = 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator).to(device)
    input = (normals(shape, torch.float32, device, generator) * scales + 0.25).to(dtype)
    norm_weight = parameter(width, kind % 4 < 2)
    norm_bias = parameter(width, kind % 4 < 2 and normalization == "layer_norm")
    weight = (normals((columns, width), torch.float32, device, generator) / width**0.5).to(dtype)
    bias = parameter(columns, kind % 4 in (0, 3))
    return input, norm_weight, norm_bias, weight, bias, (1e-5, 1e-3)[kind % 2], normalization, kind % 8 >= 4


def norm_linear_cases(formats: tuple[str, str, str]) -> Iterator[Case]:
    """Arguments of norm_linear without its formats: every shape, rounded up for the formats, with both norms, and
    alternating dtypes and parameters."""
    for i, plain in enumerate(NORM_LINEAR_SHAPES):
        for j, normalization in enumerate(NORMS):
            shape, columns = fitted(*plain, formats)
            dtype, kind = FLOAT_DTYPES[(i + j) % 3], 3 * i + j

            def make(
                device: torch.device,
                generator: torch.Generator,
                shape: tuple[int, ...] = shape,
                columns: int = columns,
                dtype: torch.dtype = dtype,
                normalization: str = normalization,
                kind: int = kind,
            ) -> tuple[Any, ...]:
                return norm_linear_arguments(shape, columns, dtype, normalization, device, generator, kind)

            sizes = "x".join(map(str, plain[0]))
            yield Case(f"{normalization}-{sizes}-{str(dtype)[6:]}-{kind % 8}", make)
