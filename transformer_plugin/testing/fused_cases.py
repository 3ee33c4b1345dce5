"""Inputs of ops that compute a matrix and quantize it in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case, randn
from transformer_plugin.testing.quantize_cases import GROUPED_NV_FORMATS, NV_FORMATS, extras

ROW_FORMATS = ("fp8_block", "fp8_block:e5m2,fp32", "mxfp8", "mxfp8:e5m2")
SQUARE_FORMATS = ("fp8_block:square", "mxfp8:square")
TENSOR_FORMATS = ("fp8_tensor", "fp8_tensor:e5m2,pow2", "fp8_tensor:eps=0.25")
# Rows, features for fp8_block, features for mxfp8.
SHAPES = [(0, 5, 32), (1, 1, 32), (17, 127, 96), (129, 130, 160), (130, 256, 256)]
# Group sizes, and the number of rows past their sum.
GROUPS = [([], 7), ([0, 17, 128], 3), ([129, 0, 257], 130), ([2, 0, 1, 3] * 16, 0)]
# For nvfp4: whole blocks in both directions.
NV_SHAPES = [(0, 16), (16, 16), (48, 112), (144, 160), (272, 256)]
NV_GROUPS = [([], 16), ([0, 16, 128], 16), ([144, 0, 272], 144), ([32, 0, 16, 16] * 16, 0)]


def given(matrix: Tensor, format: str, group_sizes: Tensor | None = None) -> dict[str, Tensor]:
    """Returns, by name, the amaxes and seed that a fused op needs to quantize this matrix.

    As :func:`~transformer_plugin.testing.quantize_cases.extras`, but the amaxes are 0.75 times those of the matrix and
    finite, as if they came from an earlier step.
    """
    more = extras(matrix, format, group_sizes)
    if Format.parse(format).family == "fp8_tensor":
        sizes = None if group_sizes is None else group_sizes.cpu()
        more["amax"] = reference.amax(matrix.detach().cpu(), format, sizes).to(matrix.device)
    return {
        name: value if name == "seed" else (0.75 * value).clamp(max=1e4).contiguous()
        for name, value in more.items()
    }


def _case(
    name: str,
    rows: int,
    features: int,
    dtype: torch.dtype,
    format: str,
    with_probs: bool,
    sizes: list[int] | None,
) -> Case:
    used = rows if sizes is None else sum(sizes)

    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        input = randn((rows, 2 * features), torch.float32, torch.device("cpu"), generator, scale=3.0)
        input[:used] *= torch.rand(used, 1, generator=generator) * 4
        if rows > 2 and features > 1:
            input[0, 1], input[1, features] = float("nan"), float("inf")
        input[used:] = float("nan")  # the tail must not affect anything
        probs = torch.rand(rows, generator=generator) if with_probs else None
        if probs is not None:
            probs[used:] = float("nan")
            probs = probs.to(device)
        groups = None if sizes is None else torch.tensor(sizes, device=device, dtype=torch.int64)
        return input.to(dtype).to(device), format, probs, groups

    kind = f"{str(dtype)[6:]}-{'probs' if with_probs else 'plain'}"
    return Case(f"{name}x{features}-{format}-{kind}", make)


def activation_quantize_cases(widths: tuple[int, ...] = ()) -> Iterator[Case]:
    """Arguments of activation_quantize and its variants: shapes by formats, with alternating dtypes and probabilities.

    ``widths`` replaces the numbers of features.
    """
    for i, (rows, *features) in enumerate(SHAPES):
        for j, format in enumerate(ROW_FORMATS + SQUARE_FORMATS):
            width = widths[i % len(widths)] if widths else features[format.startswith("mxfp8")]
            yield _case(str(rows), rows, width, FLOAT_DTYPES[(i + j) % 3], format, (i + j) % 2 == 0, None)
    for i, (sizes, tail) in enumerate(GROUPS):
        for j, format in enumerate(ROW_FORMATS):
            rows = sum(sizes) + tail
            width = widths[i % len(widths)] if widths else (130, 96)[format.startswith("mxfp8")]
            name = f"{len(sizes)}groups-{rows}"
            yield _case(name, rows, width, FLOAT_DTYPES[(i + j) % 3], format, (i + j) % 2 == 1, sizes)
    yield from _amax_argument_cases(widths)


def _amax_argument_cases(widths: tuple[int, ...]) -> Iterator[Case]:
    """Cases of formats whose amax is an argument."""
    of_shapes: tuple[tuple[Any, tuple[str, ...]], ...] = ((SHAPES, TENSOR_FORMATS), (NV_SHAPES, NV_FORMATS))
    for shapes, formats in of_shapes:
        for i, (rows, features, *_) in enumerate(shapes):
            for j, format in enumerate(formats):
                width = widths[i % len(widths)] if widths else features
                yield _case(str(rows), rows, width, FLOAT_DTYPES[(i + j) % 3], format, (i + j) % 2 == 0, None)
    for groups, formats in ((GROUPS, TENSOR_FORMATS), (NV_GROUPS, GROUPED_NV_FORMATS)):
        for i, (sizes, tail) in enumerate(groups):
            for j, format in enumerate(formats):
                rows = sum(sizes) + tail
                width = widths[i % len(widths)] if widths else (130, 80)[format.startswith("nvfp4")]
                name = f"{len(sizes)}groups-{rows}"
                yield _case(name, rows, width, FLOAT_DTYPES[(i + j) % 3], format, (i + j) % 2 == 1, sizes)


BIAS_FORMATS = ("fp8_tensor", "fp8_tensor:e5m2,pow2", *ROW_FORMATS, "mxfp8:tiled")
# Rows and columns of a gradient. Column sums have additional steps above 16 tiles of 128 rows, and above 256 tiles.
BIAS_SHAPES = [(0, 32), (5, 0), (1, 32), (17, 96), (127, 160), (260, 288), (2200, 64)]
BIAS_GROUPS: list[tuple[list[int], int, int]] = [
    ([], 7, 32),
    ([0], 130, 96),
    ([0, 17, 128], 3, 160),
    ([129, 0, 257], 130, 96),
    ([2, 0, 1, 3] * 64, 40, 32),
    ([2100, 1, 0, 2049], 0, 32),
    ([1] * 1025, 5, 32),
]


def _bias_case(rows: int, columns: int, dtype: torch.dtype, format: str, sizes: list[int] | None) -> Case:
    used = rows if sizes is None else sum(sizes)

    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        grad = randn((rows, columns), torch.float32, torch.device("cpu"), generator)
        grad *= torch.rand(rows, 1, generator=generator) * 4
        if rows > 2 and columns > 2:
            grad[0, 0], grad[1, 1], grad[2, 2] = float("nan"), float("inf"), -float("inf")
        grad[:, -1:] = -0.0
        grad[used:] = float("nan")  # the tail must not affect anything
        groups = None if sizes is None else torch.tensor(sizes, device=device, dtype=torch.int32)
        return grad.to(dtype).to(device), format, groups

    name = f"{rows}x{columns}" if sizes is None else f"{len(sizes)}groups-{rows}x{columns}"
    return Case(f"{name}-{format}-{str(dtype)[6:]}", make)


def bias_backward_quantize_cases() -> Iterator[Case]:
    """Arguments of bias_backward_quantize and its variants: shapes and groups by formats, with alternating dtypes."""
    for i, (rows, columns) in enumerate(BIAS_SHAPES):
        for j, format in enumerate((*BIAS_FORMATS, *SQUARE_FORMATS)):
            yield _bias_case(rows, columns, FLOAT_DTYPES[(i + j) % 3], format, None)
    yield _bias_case(33000, 32, torch.bfloat16, "mxfp8", None)
    for i, (groups, tail, columns) in enumerate(BIAS_GROUPS):
        for j, format in enumerate(BIAS_FORMATS):
            yield _bias_case(sum(groups) + tail, columns, FLOAT_DTYPES[(i + j) % 3], format, groups)
    for i, (rows, columns) in enumerate(NV_SHAPES):
        for j, format in enumerate(NV_FORMATS):
            yield _bias_case(rows, columns, FLOAT_DTYPES[(i + j) % 3], format, None)
    for i, (groups, tail) in enumerate([*NV_GROUPS, ([2096, 16, 0, 2064], 0)]):
        for j, format in enumerate(GROUPED_NV_FORMATS):
            columns = (32, 80)[(i + j) % 2]
            yield _bias_case(sum(groups) + tail, columns, FLOAT_DTYPES[(i + j) % 3], format, groups)
    for format in ("fp8_tensor", "fp8_block"):  # widths that are not multiples of the block
        for sizes in (None, [7, 128]):
            yield _bias_case(140, 133, torch.bfloat16, format, sizes)
