"""Inputs of the quantize family: formats, shapes, groups, and values at the edges of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import MX_BLOCK
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case, randn

TENSOR_FORMATS = ("fp8_tensor", "fp8_tensor:e5m2,pow2", "fp8_tensor:e5m2,eps=0.25")
ROW_FORMATS = ("fp8_block", "fp8_block:e5m2,fp32", "fp8_block:fp32,eps=1e-3")
SQUARE_FORMATS = ("fp8_block:square", "fp8_block:e5m2,fp32,square")
MX_FORMATS = ("mxfp8", "mxfp8:e5m2", "mxfp8:square")
FORMATS = TENSOR_FORMATS + ROW_FORMATS + SQUARE_FORMATS
GROUPED_FORMATS = TENSOR_FORMATS + ROW_FORMATS
GROUPED_MX_FORMATS = ("mxfp8", "mxfp8:e5m2")

SHAPES: list[tuple[int, ...]] = [
    (0, 5),
    (5, 0),
    (1, 1),
    (1, 128),
    (17, 127),
    (127, 129),
    (128, 128),
    (129, 17),
    (260, 258),
]
STACKS: list[tuple[int, ...]] = [(0, 3, 4), (2, 0, 3), (3, 130, 17), (2, 4, 260)]
# Widths that mxfp8 takes: see width_for.
MX_SHAPES: list[tuple[int, ...]] = [
    (0, 32),
    (5, 0),
    (1, 32),
    (17, 96),
    (127, 128),
    (129, 160),
    (260, 288),
]
MX_STACKS: list[tuple[int, ...]] = [(0, 3, 32), (2, 0, 64), (3, 130, 32), (2, 4, 288)]

# Sizes, and rows of the buffer past their sum.
GROUPS = [
    ([], 0),
    ([], 7),
    ([0], 0),
    ([0], 130),
    ([129], 0),
    ([0, 17, 128], 3),  # empty first
    ([128, 0, 1], 0),  # empty in the middle
    ([5, 256, 0], 130),  # empty last
    ([129, 257, 1], 0),  # 1 modulo 128
    ([2, 0, 1, 3] * 64, 40),  # 256 groups
]


def width_for(columns: int, *formats: str) -> int:
    """``columns``, or the next multiple of 32 where one of the formats is mxfp8, which takes no other width."""
    return -(-columns // MX_BLOCK) * MX_BLOCK if any(f.startswith("mxfp8") for f in formats) else columns


def special_values() -> Tensor:
    """float32: ties and neighbours of both elements, ends of the range, zeros of both signs, inf, NaN."""
    grid = [
        float.fromhex(f"0x1.{m:x}p{e}") * s
        for m in range(16)
        for e in range(-20, 18)
        for s in (1, 1 + 2**-20, 1 - 2**-20)
    ]
    ends = [0.0, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 3.4e38, 1e-45, 1e-40, 1.2e-38, float("inf")]
    positive = torch.tensor(grid + ends, dtype=torch.float64).float()
    return torch.cat([positive, -positive, torch.tensor([float("nan")])])


def special_matrix(dtype: torch.dtype, columns: int = 260) -> Tensor:
    """Rows of edges: a NaN, an inf, all NaN, all zero, tiny and huge values. At least 131 columns."""
    rows = torch.randn(16, columns, generator=torch.Generator().manual_seed(3))
    rows[1, 5] = float("nan")
    rows[2, 130] = float("inf")
    rows[3, 7] = -float("inf")
    rows[4] = float("nan")
    rows[5] = 0.0
    rows[6] = -0.0
    rows[7] *= 1e-44
    rows[8] *= 1e-38
    rows[9] *= 1e-5
    rows[10] *= 1e37
    rows[11, ::2] = -float("nan")
    rows[12] = rows[12].abs() * 448
    return rows.to(dtype)


def _case(name: str, shape: tuple[int, ...], dtype: torch.dtype, format: str, scale: float = 3.0) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        return randn(shape, dtype, device, generator, scale), format

    return Case(name, make)


def quantize_cases() -> Iterator[Case]:
    """Arguments of quantize, quantize_transposed and quantize_both: shapes by formats, dtypes in turn."""
    for shapes, formats in ((SHAPES + STACKS, FORMATS), (MX_SHAPES + MX_STACKS, MX_FORMATS)):
        for i, shape in enumerate(shapes):
            for j, format in enumerate(formats):
                dtype = FLOAT_DTYPES[(i + j) % 3]
                yield _case(f"{'x'.join(map(str, shape))}-{format}-{str(dtype)[6:]}", shape, dtype, format)
    for dtype in FLOAT_DTYPES:
        for format in FORMATS + MX_FORMATS:

            def make(
                device: torch.device,
                generator: torch.Generator,
                dtype: torch.dtype = dtype,
                format: str = format,
            ) -> tuple[Any, ...]:
                columns = 288 if format in MX_FORMATS else 260
                return special_matrix(dtype, columns).to(device), format

            yield Case(f"special-{format}-{str(dtype)[6:]}", make)


def grouped_quantize_cases() -> Iterator[Case]:
    """Arguments of the grouped ops. The tail is poisoned with NaN and 1e4, which must reach no amax."""
    for i, (sizes, tail) in enumerate(GROUPS):
        for j, format in enumerate(GROUPED_FORMATS + GROUPED_MX_FORMATS):
            dtype = FLOAT_DTYPES[(i + j) % 3]
            index = torch.int32 if (i + j) % 2 else torch.int64
            columns = (130, 16, 33, 0 if tail == 3 else 257)[(i + j) % 4]
            if format in MX_FORMATS:
                columns = (32, 96, 0 if tail == 3 else 128, 160)[(i + j) % 4]

            def make(
                device: torch.device,
                generator: torch.Generator,
                sizes: list[int] = sizes,
                tail: int = tail,
                format: str = format,
                dtype: torch.dtype = dtype,
                index: torch.dtype = index,
                columns: int = columns,
            ) -> tuple[Any, ...]:
                rows = sum(sizes)
                values = torch.randn(rows + tail, columns, generator=generator)
                values *= torch.rand(rows + tail, 1, generator=generator) * 8
                values[rows:] = 1e4
                values[rows::2] = float("nan")
                return values.to(dtype).to(device), torch.tensor(sizes, dtype=index, device=device), format

            yield Case(f"{len(sizes)}groups-{sum(sizes)}+{tail}x{columns}-{format}-{str(dtype)[6:]}", make)
