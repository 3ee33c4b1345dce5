"""Inputs of the products with an activation in the epilogue: ragged rows, features that end inside a tile or a TMA
box, and both orders of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from transformer_plugin.activations import Activation
from transformer_plugin.testing.cases import BLOCK_FORMATS, FLOAT_DTYPES, Case
from transformer_plugin.testing.gemm_cases import GroupedShape, group_sizes, integers, poison_tail

# n is F, the number of features; k is the reduction dimension.
ACTIVATION_SHAPES = (
    GroupedShape("one-group", (9,), 9, 16, 24),
    GroupedShape("odd-widths", (5, 3, 130), 140, 33, 17),
    GroupedShape("half-a-vector", (5, 0, 70), 80, 20, 24),
    GroupedShape("narrow", (3, 130, 0, 64), 200, 8, 16),
    GroupedShape("empty-first", (0, 7, 5), 12, 24, 16),
    GroupedShape("empty-last", (6, 130, 0), 150, 72, 136),
    GroupedShape("all-empty", (0, 0, 0), 6, 32, 8),
    GroupedShape("no-rows", (0, 0), 0, 32, 8),
    GroupedShape("no-groups", (), 5, 32, 8),
    GroupedShape("no-features", (2, 3), 7, 0, 8),
    GroupedShape("nothing-summed", (2, 3), 7, 32, 0),
    GroupedShape("one-block", (20, 1, 47), 70, 32, 72),
    GroupedShape("blocks-within-a-tile", (33, 128, 0, 65), 230, 96, 40),
    GroupedShape("one-tile", (128, 257), 390, 128, 64),
    GroupedShape("past-a-tile", (129, 1, 257), 400, 136, 128),
    GroupedShape("past-a-box", (129, 64, 191), 384, 192, 200),
    GroupedShape("257-groups", tuple(i % 4 for i in range(257)), 390, 32, 16),
    GroupedShape("many-tiles", (300, 1, 0, 513, 128, 385), 1400, 392, 200),
    GroupedShape("many-blocks", (300, 1, 0, 513, 16, 385), 1240, 416, 72),
)
ACTIVATIONS = (Activation("swiglu"), Activation("swiglu", 32))


def _shapes_and_activations(
    dtypes: tuple[torch.dtype, ...],
) -> Iterator[tuple[str, GroupedShape, torch.dtype, Activation, int]]:
    """Yields every shape in every dtype with the column orders that its features support, and the index of the
    shape."""
    for dtype in dtypes:
        for index, shape in enumerate(ACTIVATION_SHAPES):
            for activation in ACTIVATIONS:
                interleave = activation.interleave
                if interleave == 0 or shape.n % interleave == 0:
                    name = f"{str(dtype)[6:]}-{shape.name}-{'blocks' if interleave else 'halves'}"
                    yield name, shape, dtype, activation, index


def grouped_gemm_activation_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """(a, b, group_sizes, probs, bias, activation). Tail rows of ``a`` and ``probs`` are NaN; some cases have no
    probs or bias."""
    for name, shape, dtype, activation, index in _shapes_and_activations(dtypes):

        def make(
            device: torch.device,
            generator: torch.Generator,
            shape: GroupedShape = shape,
            dtype: torch.dtype = dtype,
            activation: Activation = activation,
            index: int = index,
        ) -> tuple[Any, ...]:
            groups = len(shape.sizes)
            a = poison_tail(draw((shape.rows, shape.k), dtype, device, generator), shape.sizes)
            columns = activation.input_columns(shape.n)
            # Divided so that exp does not underflow.
            b = draw((groups, columns, shape.k), dtype, device, generator) / 32
            bias = draw((groups, columns), torch.float32, device, generator) / 4 if index % 2 else None
            probs = None
            if index % 3 != 1:
                probs = poison_tail(torch.rand(shape.rows, generator=generator), shape.sizes).to(device)
            sizes = group_sizes(shape, device, (torch.int64, torch.int32)[index % 2])
            return a, b, sizes, probs, bias, activation.key

        yield Case(name, make)


def grouped_gemm_activation_quantize_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """(a, b, group_sizes, format, probs, bias, activation): the cases of grouped_gemm_activation, each with three of
    the formats that its features support. Over two dtypes, each order of columns has all formats."""
    combinations = zip(
        _shapes_and_activations(dtypes), grouped_gemm_activation_cases(draw, dtypes), strict=True
    )
    for (_, shape, dtype, activation, index), case in combinations:
        allowed = [format for format in BLOCK_FORMATS if shape.n % 32 == 0 or not format.startswith("mxfp8")]
        first = 3 * (dtypes.index(dtype) + index + activation.interleave // 32)
        for i in range(first, first + 3):
            format = allowed[i % len(allowed)]

            def make(
                device: torch.device, generator: torch.Generator, case: Case = case, format: str = format
            ) -> tuple[Any, ...]:
                a, b, sizes, probs, bias, key = case.make(device, generator)
                return a, b, sizes, format, probs, bias, key

            yield Case(f"{case.name}-{format}", make)
