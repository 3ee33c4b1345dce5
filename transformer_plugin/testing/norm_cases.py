"""Inputs of the norms, with plain and with quantized outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.cases import BLOCK_FORMATS, FLOAT_DTYPES, Case

#: Rows and columns. On a GPU the kernel keeps a row in registers if it has at most 8192 bfloat16 columns and their
#: number is a multiple of 8; otherwise it reads the row again.
SHAPES = [(0, 8), (1, 1), (3, 7), (5, 64), (9, 136), (2, 1023), (4, 1024), (7, 2056), (6, 3000), (3, 8192)]
SHAPES += [(300, 24), (2, 8200), (2, 16384), (2, 9001)]
LEADING = [(2, 3, 40), (16,), (2, 0, 8)]
#: Rows and columns for fp8_block, and for mxfp8.
QUANTIZED_SHAPES = [
    ((0, 5), (0, 32)),
    ((1, 1), (1, 32)),
    ((5, 7), (6, 96)),
    ((17, 127), (17, 160)),
    ((129, 136), (129, 1056)),
    ((6, 1024), (6, 1024)),
    ((7, 7168), (7, 7168)),
    ((2, 8192), (2, 8192)),
    ((3, 8200), (3, 8224)),
    ((2, 16384), (2, 16384)),
]
# For formats whose amax is an argument. The blocks of nvfp4 lie along rows, so any number of rows works.
TENSOR_FORMATS = ("fp8_tensor", "fp8_tensor:e5m2,pow2", "fp8_tensor:eps=0.25")
NV_SHAPES = [(0, 32), (1, 16), (6, 96), (17, 160), (129, 1056), (7, 7168), (3, 8208)]
NV_FORMATS = (
    "nvfp4",
    "nvfp4:square",
    "nvfp4:rht,sr",
    "nvfp4:square,sr,tiled",
    "nvfp4:row_scaled",
    "nvfp4:4over6",
    "nvfp4:row_scaled,4over6_mse,tiled",
)


def _parameters(width: int, dtype: torch.dtype, generator: torch.Generator, kind: int) -> list[Tensor | None]:
    """Weight and bias: ``kind`` modulo 4 selects both, none, or one of them."""
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    return [weight if kind % 4 in (0, 2) else None, bias if kind % 4 in (0, 3) else None]


def _matrix(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, special: bool) -> Tensor:
    """Rows of different scales and means. Large matrices have rows of zeros, tiny, huge, equal values, NaN, inf."""
    values = torch.randn(shape, generator=generator) * 3
    values = values + torch.randn((*shape[:-1], 1), generator=generator)
    if special and len(shape) == 2 and shape[0] >= 6:
        values[0] = 0.0
        values[1, shape[1] // 2] = float("nan")
        values[2, -1] = float("inf")
        values[3] *= 1e-7
        values[4] *= 1e4
        values[5] = -1.5
    return values.to(dtype)


def _case(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: int, *more: Any) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        input = _matrix(shape, dtype, generator, special=bool(more)).to(device)
        parameters = _parameters(shape[-1], dtype, generator, kind)
        weight, bias = (None if p is None else p.to(device) for p in parameters)
        return input, weight, bias, (1e-5, 0.0, 1e-6)[kind % 3], *more, kind % 8 >= 4

    sizes = "x".join(map(str, shape))
    return Case(f"{name}{sizes}-{str(dtype)[6:]}-{kind % 4}{'z' if kind % 8 >= 4 else ''}", make)


def norm_cases() -> Iterator[Case]:
    """Arguments of layer_norm (for rms_norm drop the bias): shapes by dtypes, with alternating parameters."""
    for i, shape in enumerate([*SHAPES, *LEADING]):
        for j, dtype in enumerate(FLOAT_DTYPES):
            yield _case("", shape, dtype, 3 * i + j)
    for thousands in range(1, 9):  # on a GPU each thread has one vector of 8 columns per 1024 columns
        yield _case("", (6, 1024 * thousands - 40), torch.bfloat16, 3 * thousands)


def norm_quantize_cases() -> Iterator[Case]:
    """Arguments of layer_norm_quantize; for rms_norm_quantize drop the bias."""
    for i, shapes in enumerate(QUANTIZED_SHAPES):
        for j, format in enumerate(BLOCK_FORMATS):
            shape = shapes[format.startswith("mxfp8")]
            yield _case(f"{format}-", shape, FLOAT_DTYPES[(i + j) % 3], i + 3 * j, format)
    for thousands in range(1, 9):  # on a GPU each thread has one vector of 8 columns per 1024 columns
        for j, format in enumerate(("fp8_block", "mxfp8", "mxfp8:tiled")):
            columns = 1024 * thousands - 544 * (j % 2)
            yield _case(f"{format}-", (6, columns), torch.bfloat16, 3 * thousands + j, format)
    for i, shape in enumerate(NV_SHAPES):
        for j, format in enumerate(NV_FORMATS):
            yield _case(f"{format}-", shape, FLOAT_DTYPES[(i + j) % 3], i + 3 * j, format)
    for i, (shape, _) in enumerate(QUANTIZED_SHAPES):
        for j, format in enumerate(TENSOR_FORMATS):
            yield _case(f"{format}-", shape, FLOAT_DTYPES[(i + j) % 3], i + 3 * j, format)
    for thousands in range(1, 9):
        yield _case("fp8_tensor-", (6, 1024 * thousands - 40), torch.bfloat16, 3 * thousands, "fp8_tensor")
    for format in ("fp8_block", "mxfp8"):  # the usual case, with a last 128-row strip that is not full
        yield _case(f"{format}-", (131, 7168), torch.bfloat16, 0, format)


def without_bias(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drops the bias: the arguments of the RMSNorm op."""
    return arguments[:2] + arguments[3:]
