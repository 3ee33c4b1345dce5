"""Inputs of the quantize family: formats, shapes, groups, and values at the edges of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import reference
from transformer_plugin.formats import MX_BLOCK, NV_BLOCK, Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case, randn

TENSOR_FORMATS = ("fp8_tensor", "fp8_tensor:e5m2,pow2", "fp8_tensor:e5m2,eps=0.25")
ROW_FORMATS = ("fp8_block", "fp8_block:e5m2,fp32", "fp8_block:fp32,eps=1e-3")
SQUARE_FORMATS = ("fp8_block:square", "fp8_block:e5m2,fp32,square")
PER_ROW_FORMATS = (
    "fp8_row",
    "fp8_row:e5m2",
    "fp8_row:pow2",
    "fp8_row:e5m2,pow2,eps=1e-3",
    "fp8_row:eps=0.25",
)
MX_FORMATS = ("mxfp8", "mxfp8:e5m2", "mxfp8:square", "mxfp8:tiled", "mxfp8:e5m2,square,tiled")
NV_FORMATS = (
    "nvfp4",
    "nvfp4:square",
    "nvfp4:rht",
    "nvfp4:sr",
    "nvfp4:rht,sr",
    "nvfp4:square,sr,tiled",
    "nvfp4:row_scaled",
    "nvfp4:4over6",
    "nvfp4:4over6_mse,tiled",
    "nvfp4:row_scaled,4over6,tiled",
)
FORMATS = TENSOR_FORMATS + ROW_FORMATS + SQUARE_FORMATS
GROUPED_FORMATS = TENSOR_FORMATS + ROW_FORMATS
GROUPED_MX_FORMATS = ("mxfp8", "mxfp8:e5m2", "mxfp8:tiled")
GROUPED_NV_FORMATS = tuple(f for f in NV_FORMATS if "square" not in f)

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
# Widths that mxfp8 supports: see width_for.
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
# Rows and columns in whole blocks of 16, which nvfp4 requires for both directions.
NV_SHAPES: list[tuple[int, ...]] = [
    (0, 16),
    (32, 0),
    (16, 16),
    (16, 112),
    (128, 128),
    (144, 48),
    (272, 304),
]
NV_STACKS: list[tuple[int, ...]] = [(0, 16, 32), (2, 0, 64), (3, 144, 16), (2, 16, 272)]

#: Shapes for fp8_row, which has one scale per row. From 1024 columns on, a GPU uses other kernels for some
#: widths.
PER_ROW_SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 5), (1, 0), (0, 7), (3, 0), (1, 1), (17, 127), (9, 128), (3, 5, 40), (2, 0, 8), (9, 512), (5, 516), (9, 1024),
    (5, 1032), (3, 2056), (3, 4100), (2, 8192), (2, 8200), (2, 16384), (2, 16392), (1, 16385),
)  # fmt: skip

# Group sizes, and rows of the buffer past their sum.
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
# Groups for nvfp4, whose transposed copies require groups of whole blocks.
NV_GROUPS = [
    ([], 0),
    ([], 16),
    ([0], 0),
    ([0], 144),
    ([144], 0),
    ([0, 16, 128], 16),  # empty first
    ([128, 0, 16], 0),  # empty in the middle
    ([16, 256, 0], 144),  # empty last
    ([144, 272, 16], 0),
    ([32, 0, 16, 16] * 64, 48),  # 256 groups
]


def width_for(columns: int, *formats: str) -> int:
    """Returns ``columns`` rounded up to a width that all of the formats support: mxfp8 and nvfp4 require whole
    blocks."""
    blocks = [NV_BLOCK for f in formats if f.startswith("nvfp4")]
    blocks += [MX_BLOCK for f in formats if f.startswith("mxfp8")]
    return -(-columns // max(blocks)) * max(blocks) if blocks else columns


def rows_for(rows: int, *formats: str) -> int:
    """Returns ``rows`` rounded up to a number for which all of the formats have a transposed copy."""
    return -(-rows // NV_BLOCK) * NV_BLOCK if any(f.startswith("nvfp4") for f in formats) else rows


#: Flags of ops that quantize: column-wise only, and both directions. Without flags, row-wise only.
COLUMNS = {"rowwise": False, "columnwise": True}
BOTH = {"columnwise": True}


def extras(input: Tensor, format: str, group_sizes: Tensor | None = None) -> dict[str, Tensor]:
    """Returns the additional arguments of ``quantize`` in both directions, by name: amaxes and a seed if the format
    needs them, on the device of the input. ``amax_t`` is included only if the number of rows is a multiple of the
    block."""
    fmt, more = Format.parse(format), dict[str, Tensor]()
    if fmt.needs_amax:
        sizes = None if group_sizes is None else group_sizes.cpu()
        here = input.detach().cpu()
        more["amax"] = reference.amax(here, format, sizes).to(input.device)
        if here.shape[-2] % fmt.group_multiple == 0:
            more["amax_t"] = reference.amax(here, format, sizes, rowwise=False, columnwise=True).to(
                input.device
            )
    if fmt.stochastic_rounding:
        more["seed"] = torch.tensor([0x0123456789ABCDEF], device=input.device)
    return more


def rows_of(extras: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of :func:`extras` that row-wise ``quantize`` needs."""
    return {name: value for name, value in extras.items() if name != "amax_t"}


def columns_of(extras: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of :func:`extras` that column-wise ``quantize`` needs. If there is only one amax, it serves
    both directions."""
    rows_alone = "amax" if "amax_t" in extras else ""
    return {name: value for name, value in extras.items() if name != rows_alone}


def amax_of(extras: dict[str, Tensor], transposed: bool = False) -> dict[str, Tensor]:
    """Returns the part of :func:`extras` that ``dequantize`` needs."""
    name = "amax_t" if transposed else "amax"
    return {"amax": extras[name]} if name in extras else {}


def special_values() -> Tensor:
    """Returns float32 values: ties and neighbors of both FP8 types, ends of the range, zeros of both signs, inf,
    NaN."""
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
    """Returns rows of extreme values: a NaN, an inf, all NaN, all zero, tiny and huge. Requires at least 131
    columns."""
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
    """Input and format of quantize in any direction: shapes by formats, with alternating dtypes. :func:`extras`
    returns the amaxes and seeds for nvfp4."""
    for shapes, formats in (
        (SHAPES + STACKS, FORMATS),
        (MX_SHAPES + MX_STACKS, MX_FORMATS),
        (NV_SHAPES + NV_STACKS, NV_FORMATS),
    ):
        for i, shape in enumerate(shapes):
            for j, format in enumerate(formats):
                dtype = FLOAT_DTYPES[(i + j) % 3]
                yield _case(f"{'x'.join(map(str, shape))}-{format}-{str(dtype)[6:]}", shape, dtype, format)
    for dtype in FLOAT_DTYPES:
        for format in FORMATS + MX_FORMATS + NV_FORMATS:

            def make(
                device: torch.device,
                generator: torch.Generator,
                dtype: torch.dtype = dtype,
                format: str = format,
            ) -> tuple[Any, ...]:
                return special_matrix(dtype, 260 if format in FORMATS else 288).to(device), format

            yield Case(f"special-{format}-{str(dtype)[6:]}", make)


def _grouped_case(
    sizes: list[int], tail: int, columns: int, format: str, dtype: torch.dtype, index: torch.dtype
) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        rows = sum(sizes)
        values = torch.randn(rows + tail, columns, generator=generator)
        values *= torch.rand(rows + tail, 1, generator=generator) * 8
        values[rows:] = 1e4
        values[rows::2] = float("nan")
        return values.to(dtype).to(device), torch.tensor(sizes, dtype=index, device=device), format

    return Case(f"{len(sizes)}groups-{sum(sizes)}+{tail}x{columns}-{format}-{str(dtype)[6:]}", make)


def grouped_quantize_cases() -> Iterator[Case]:
    """Arguments of quantize with group sizes. Tail rows contain NaN and 1e4, which must not affect any amax."""
    for groups, formats in (
        (GROUPS, GROUPED_FORMATS + GROUPED_MX_FORMATS),
        (NV_GROUPS, GROUPED_NV_FORMATS),
    ):
        for i, (sizes, tail) in enumerate(groups):
            for j, format in enumerate(formats):
                dtype = FLOAT_DTYPES[(i + j) % 3]
                index = torch.int32 if (i + j) % 2 else torch.int64
                columns = (130, 16, 33, 0 if tail == 3 else 257)[(i + j) % 4]
                if format not in GROUPED_FORMATS:
                    columns = (32, 96, 0 if tail in (3, 16) else 128, 160)[(i + j) % 4]
                yield _grouped_case(sizes, tail, columns, format, dtype, index)


def per_row_cases() -> Iterator[Case]:
    """Input and format of quantize with fp8_row: every shape, dtype and option, with rows of different magnitudes."""
    for dtype in FLOAT_DTYPES:
        for index, shape in enumerate(PER_ROW_SHAPES):
            for format in PER_ROW_FORMATS[index % 2 :: 2]:

                def make(
                    device: torch.device,
                    generator: torch.Generator,
                    shape: tuple[int, ...] = shape,
                    dtype: torch.dtype = dtype,
                    format: str = format,
                ) -> tuple[Any, ...]:
                    values = randn(shape, torch.float32, torch.device("cpu"), generator)
                    values *= 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
                    return values.to(dtype).to(device), format

                yield Case(f"{str(dtype)[6:]}-{'x'.join(map(str, shape))}-{format}", make)


def grouped_per_row_cases() -> Iterator[Case]:
    """Arguments of quantize with fp8_row and group sizes. Tail rows contain NaN and 1e4."""
    for i, (sizes, tail) in enumerate(GROUPS):
        for j, format in enumerate(PER_ROW_FORMATS):
            columns = (130, 16, 33, 0 if tail == 3 else 257, 1032)[(i + j) % 5]
            index = torch.int32 if (i + j) % 2 else torch.int64
            yield _grouped_case(sizes, tail, columns, format, FLOAT_DTYPES[(i + j) % 3], index)
