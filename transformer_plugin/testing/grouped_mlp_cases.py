"""Inputs that grouped_mlp must handle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.gemm_cases import normals, poison_tail
from transformer_plugin.testing.quantize_cases import rows_for, width_for


@dataclass(frozen=True)
class MlpShape:
    """Group sizes, buffer rows, and the columns of the input and between the products."""

    name: str
    sizes: tuple[int, ...]
    rows: int
    hidden: int
    features: int

    def fitted(self, formats: tuple[str, str, str]) -> MlpShape:
        """Returns the shape with sizes rounded up to what the formats require, forward and backward."""
        sizes = tuple(rows_for(size, *formats) for size in self.sizes)
        rows = rows_for(self.rows + sum(sizes) - sum(self.sizes), *formats)
        widths = (width_for(width, *formats) for width in (self.hidden, self.features))
        return MlpShape(self.name, sizes, rows, *widths)


# In some shapes both halves of the SwiGLU gradient begin at a multiple of 128 columns, in others not.
MLP_SHAPES = (
    MlpShape("odd-widths", (5, 3, 130), 140, 33, 17),
    MlpShape("empty-groups", (0, 70, 0, 0, 129, 5, 0), 230, 64, 128),
    MlpShape("tiles", (129, 1, 257), 387, 136, 256),
    MlpShape("part-of-a-tile", (40, 90), 133, 160, 192),
    MlpShape("all-empty", (0, 0, 0), 6, 32, 128),
    MlpShape("no-rows", (0, 0), 0, 32, 128),
    MlpShape("no-groups", (), 5, 32, 128),
    MlpShape("many-groups", tuple(i % 3 for i in range(70)), 80, 32, 32),
    MlpShape("no-features", (2, 3), 7, 16, 0),
    MlpShape("no-columns", (2, 3), 7, 0, 16),
)


def mlp_arguments(
    shape: MlpShape,
    dtype: torch.dtype,
    biases: tuple[bool, bool],
    device: torch.device,
    generator: torch.Generator,
    size_dtype: torch.dtype = torch.int64,
) -> tuple[Any, ...]:
    """Returns (input, fc1_weight, fc2_weight, group_sizes, probs, fc1_bias, fc2_bias).

    Values between the products and after them are near 1. Tail rows of ``input`` and ``probs`` are NaN.
    """
    groups, hidden, features = len(shape.sizes), shape.hidden, shape.features

    def weight(n: int, k: int) -> Tensor:
        drawn = normals((groups, n, k), torch.float32, torch.device("cpu"), generator)
        return (drawn / max(k, 1) ** 0.5).to(dtype).to(device)

    input = poison_tail(normals((shape.rows, hidden), dtype, device, generator), shape.sizes)
    fc1, fc2 = weight(2 * features, hidden), weight(hidden, features)
    probs = poison_tail(torch.rand(shape.rows, generator=generator), shape.sizes).to(device)
    sizes = torch.tensor(shape.sizes, dtype=size_dtype, device=device)
    first, second = (
        normals((groups, columns), dtype, device, generator) if wanted else None
        for wanted, columns in zip(biases, (2 * features, hidden), strict=True)
    )
    return input, fc1, fc2, sizes, probs, first, second


def grouped_mlp_cases(formats: tuple[str, str, str]) -> Iterator[Case]:
    """Arguments of grouped_mlp without its formats: every shape, rounded up for the formats, with every choice of
    biases, and alternating dtypes of data and group sizes."""
    for i, plain in enumerate(MLP_SHAPES):
        for j, biases in enumerate(((False, False), (True, True), (True, False), (False, True))):
            shape, dtype = plain.fitted(formats), FLOAT_DTYPES[(i + j) % 3]

            def make(
                device: torch.device,
                generator: torch.Generator,
                shape: MlpShape = shape,
                dtype: torch.dtype = dtype,
                biases: tuple[bool, bool] = biases,
                size_dtype: torch.dtype = (torch.int64, torch.int32)[i % 2],
            ) -> tuple[Any, ...]:
                return mlp_arguments(shape, dtype, biases, device, generator, size_dtype)

            name = {(False, False): "plain", (True, True): "biases", (True, False): "first-bias"}
            yield Case(f"{shape.name}-{str(dtype)[6:]}-{name.get(biases, 'second-bias')}", make)
