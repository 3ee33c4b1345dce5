"""Ten thousand random inputs for each op of the quantize family: CUDA gives the bytes of the CPU.

Other tests check the bytes themselves; here shapes, groups, formats, strides and bit patterns vary widely.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    BOTH,
    COLUMNS,
    FORMATS,
    GROUPED_FORMATS,
    GROUPED_MX_FORMATS,
    GROUPED_NV_FORMATS,
    MX_FORMATS,
    NV_FORMATS,
    PER_ROW_FORMATS,
    ROW_FORMATS,
    TENSOR_FORMATS,
    amax_of,
    columns_of,
    extras,
    rows_for,
    rows_of,
    width_for,
)

PARTS, CASES = 5, 2000  # cases of each op; parts can run on several workers
EDGES = [0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200, 255, 256, 257, 300]
DENSE = FORMATS + MX_FORMATS + NV_FORMATS
GROUPED = GROUPED_FORMATS + GROUPED_MX_FORMATS + GROUPED_NV_FORMATS
FUSED = ROW_FORMATS + MX_FORMATS[:2] + TENSOR_FORMATS + GROUPED_NV_FORMATS
LISTED = [f for f in DENSE if not any(option in f for option in ("rht", "sr", "row_scaled"))]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Make = Callable[[Random], Call]


def matrix(random: Random, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Draws normal values whose magnitude differs by row, sometimes random bit patterns, sometimes strided."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    dtype = dtype or random.choice(FLOAT_DTYPES)
    step = random.choice([1, 1, 2])
    exponents = torch.randint(
        *random.choice([(-1, 2), (-20, 20), (-140, 127)]), (rows, 1), generator=generator
    )
    values = torch.randn(rows, columns * step, generator=generator).double() * 2.0 ** exponents.double()
    values = values.to(dtype)
    if random.random() < 0.5:
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        bits = torch.randint(-(2**31), 2**31, values.shape, generator=generator).to(integer).view(dtype)
        values = torch.where(torch.rand(values.shape, generator=generator) < 0.02, bits, values)
    return values[:, ::step]


def size(random: Random) -> int:
    return random.choice(EDGES)


def dense(random: Random, format: str, dtype: torch.dtype | None = None) -> Tensor:
    """Draws a matrix or a stack whose shape the format supports in both directions."""
    rows, columns = rows_for(size(random), format), width_for(size(random), format)
    if random.random() < 0.2:
        dtype = dtype or random.choice(FLOAT_DTYPES)
        return torch.stack([matrix(random, rows, columns, dtype) for _ in range(random.randint(1, 3))])
    return matrix(random, rows, columns, dtype)


def ragged(random: Random, format: str, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Draws a ragged matrix, including rows past the groups, and its group sizes."""
    sizes = [rows_for(size(random), format) for _ in range(random.randint(0, 6))]
    rows = sum(sizes) + rows_for(random.choice([0, 0, 3, 130]), format)
    columns = width_for(size(random), format) if columns is None else columns
    index = random.choice([torch.int32, torch.int64])
    return matrix(random, rows, columns), torch.tensor(sizes, dtype=index)


def maybe_ragged(random: Random, format: str, columns: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Draws a matrix, with or without group sizes."""
    input, sizes = ragged(random, format, columns)
    return input, sizes if random.random() < 0.5 else None


def amaxes(random: Random, input: Tensor, format: str, sizes: Tensor | None = None) -> dict[str, Tensor]:
    """Returns the amaxes and seed that a format needs."""
    more = extras(input, format, sizes)
    if "seed" in more:
        more["seed"] = torch.tensor([random.getrandbits(64) - 2**63])
    return more


def fused_amaxes(random: Random, made: Tensor, format: str, sizes: Tensor | None = None) -> dict[str, Tensor]:
    """Returns amaxes for an op that computes a matrix and quantizes it; they may differ from the amaxes of that
    matrix."""
    more = amaxes(random, made, format, sizes)
    if format in TENSOR_FORMATS:
        more["amax"] = ops.amax(made, format, sizes)
    factor = random.choice([1.0, 0.75, 2.0 ** random.randint(-20, 20)])
    return {key: value if key == "seed" else value * factor for key, value in more.items()}


def direction_of(random: Random, more: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the flags of a random direction, with the amaxes and seed for it."""
    return random.choice([rows_of(more), {**columns_of(more), **COLUMNS}, {**more, **BOTH}])


def quantize(random: Random) -> Call:
    format = random.choice((*DENSE, *PER_ROW_FORMATS))
    input = dense(random, format)
    return ops.quantize, (input, format), direction_of(random, amaxes(random, input, format))


def quantize_groups(random: Random) -> Call:
    format = random.choice((*GROUPED, PER_ROW_FORMATS[0]))
    input, sizes = ragged(random, format)
    more = amaxes(random, input, format, sizes)
    only = {} if format.startswith("fp8_row") else direction_of(random, more)
    return ops.quantize, (input, format, sizes), only


def amax(random: Random) -> Call:
    format = random.choice(TENSOR_FORMATS + GROUPED_NV_FORMATS)
    input, sizes = ragged(random, format) if random.random() < 0.5 else (dense(random, format), None)
    return ops.amax, (input, format, sizes), random.choice([{}, COLUMNS, BOTH])


def dequantize(random: Random) -> Call:
    format, transposed = random.choice((*DENSE, *PER_ROW_FORMATS)), random.random() < 0.5
    input = dense(random, format)
    more = amaxes(random, input, format)
    data, scale = ops.quantize(input, format, **more, columnwise=True)[2 * transposed : 2 * transposed + 2]
    arguments = data, scale, format, random.choice(FLOAT_DTYPES), None, transposed
    return ops.dequantize, arguments, amax_of(more, transposed)


def dequantize_groups(random: Random) -> Call:
    format, transposed = random.choice(GROUPED), random.random() < 0.5
    input, sizes = ragged(random, format)
    more = amaxes(random, input, format, sizes)
    both = ops.quantize(input, format, sizes, **more, columnwise=True)
    data, scale = both[2 * transposed : 2 * transposed + 2]
    arguments = data, scale, format, random.choice(FLOAT_DTYPES), sizes, transposed
    return ops.dequantize, arguments, amax_of(more, transposed)


def requantize_transposed(random: Random) -> Call:
    if random.random() < 0.5:
        format, sizes = random.choice(DENSE), None
        input = dense(random, format)
        more = amaxes(random, input, format)
        data, scale = ops.quantize(input, format, **rows_of(more))
    else:
        format = random.choice(GROUPED)
        input, sizes = ragged(random, format)
        more = amaxes(random, input, format, sizes)
        data, scale = ops.quantize(input, format, sizes, **rows_of(more))
    if "amax_t" in more:  # may differ from the amax of the data
        more["amax_t"] = more["amax_t"] * random.choice([1.0, 0.75, 2.0 ** random.randint(-20, 20)])
    return ops.requantize_transposed, (data, scale, format, random.choice(FLOAT_DTYPES), sizes), more


def quantize_scaled(random: Random) -> Call:
    format = random.choice(["fp8_tensor:e4m3", "fp8_tensor:e5m2"])
    input, sizes = maybe_ragged(random, format)
    first = random.randint(0, 2)
    state = torch.Generator().manual_seed(random.getrandbits(32))
    scale, collected = torch.rand(2, first + 6, generator=state) * 2.0 ** random.randint(-30, 30)
    flags = random.choice([{}, COLUMNS, BOTH])
    return ops.quantize_scaled, (input, scale, format, collected, sizes, first), flags


def activation_quantize(random: Random) -> Call:
    format = random.choice(FUSED)
    input, sizes = maybe_ragged(random, format, 2 * width_for(size(random), format))
    probs = random.choice([None, matrix(random, 1, input.shape[0], torch.float32)[0].contiguous()])
    more = fused_amaxes(random, ops.activation(input, probs), format, sizes)
    return ops.activation_quantize, (input, format, probs, sizes), direction_of(random, more)


def activation_backward(random: Random) -> Call:
    format, features = random.choice(FUSED), random.choice([0, 128, 256, 384])
    input, sizes = maybe_ragged(random, format, 2 * features)
    grad = matrix(random, input.shape[0], features, input.dtype)
    probs = random.choice([None, matrix(random, 1, input.shape[0], torch.float32)[0].contiguous()])
    more = fused_amaxes(random, ops.activation_backward(grad, input, probs)[0], format, sizes)
    return ops.activation_backward_quantize, (grad, input, format, probs, sizes), more


def bias_backward(random: Random) -> Call:
    format = random.choice(FUSED)
    input, sizes = maybe_ragged(random, format)
    more = fused_amaxes(random, input, format, sizes)
    if format in TENSOR_FORMATS and random.random() < 0.5:
        more = {}  # the op computes the amax of the gradient itself
    return ops.bias_backward_quantize, (input, format, sizes), direction_of(random, more)


def norm(name: str, vectors: int) -> Make:
    def make(random: Random) -> Call:
        format = random.choice(FUSED)
        columns = max(width_for(random.choice([*EDGES[1:], 512, 1000, 2048]), format), 1)
        input = matrix(random, size(random), columns)
        parameters = [matrix(random, 1, columns, input.dtype)[0] for _ in range(vectors)]
        arguments = input, *parameters, random.choice([1e-5, 1e-6])
        made = getattr(ops, name.removesuffix("_quantize"))(*arguments)
        more = fused_amaxes(random, made, format)
        return getattr(ops, name), (*arguments, format), rows_of(more)

    return make


def quantize_list(random: Random) -> Call:
    format, dtype = random.choice(LISTED), random.choice(FLOAT_DTYPES)
    shapes = [
        (rows_for(size(random), format), width_for(size(random), format))
        for _ in range(random.choice([1, 2, 5, 65]))
    ]
    matrices = [matrix(random, *shape, dtype) for shape in shapes]
    return ops.quantize_list, (matrices, format), random.choice([{}, COLUMNS, BOTH])


def quantize_wide_rows(random: Random) -> Call:
    input = matrix(random, size(random), random.choice([*EDGES, 1024, 2056, 4100, 8200]))
    return ops.quantize, (input, random.choice(PER_ROW_FORMATS)), {}


OPS: dict[str, Make] = {
    "quantize": quantize,
    "grouped quantize": quantize_groups,
    "quantize wide rows": quantize_wide_rows,
    "amax": amax,
    "dequantize": dequantize,
    "grouped dequantize": dequantize_groups,
    "requantize_transposed": requantize_transposed,
    "quantize_scaled": quantize_scaled,
    "activation_quantize": activation_quantize,
    "activation_backward_quantize": activation_backward,
    "bias_backward_quantize": bias_backward,
    "rms_norm_quantize": norm("rms_norm_quantize", 1),
    "layer_norm_quantize": norm("layer_norm_quantize", 2),
    "quantize_list": quantize_list,
}


def tensors_of(value: Any) -> list[Tensor]:
    """Returns all tensors in a result or in arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors_of(part)] if isinstance(value, (list, tuple)) else []


def copied_to(value: Any, device: torch.device) -> Any:
    """Returns a copy with the same strides on another device."""
    if isinstance(value, Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)
    return (
        type(value)(copied_to(part, device) for part in value) if isinstance(value, (list, tuple)) else value
    )


def assert_same(got: Tensor, expected: Tensor, name: str) -> None:
    """Asserts equal bytes, except that any float32 NaN equals any NaN: processors give NaN different signs."""
    if expected.dtype == torch.float32 and bool(expected.isnan().any()):
        assert_same_bits(got.isnan(), expected.isnan(), f"NaN of {name}")
        got, expected = (t.cpu().nan_to_num(nan=0.0, posinf=3e38, neginf=-3e38) for t in (got, expected))
    assert_same_bits(got, expected, name)


def check(make: Make, random: Random, device: torch.device) -> None:
    op, arguments, named = make(random)
    other = copied_to(arguments, device), {key: copied_to(value, device) for key, value in named.items()}
    expected, got = op(*arguments, **named), op(*other[0], **other[1])
    for i, (a, b) in enumerate(zip(tensors_of(got), tensors_of(expected), strict=True)):
        assert_same(a, b, f"output {i}")
    for i, (a, b) in enumerate(zip(tensors_of(other[0]), tensors_of(arguments), strict=True)):
        assert_same(a, b, f"argument {i} afterwards")


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("op", OPS)
def test_cuda_gives_the_bytes_of_the_cpu(op: str, part: int) -> None:
    for case in range(CASES):
        seed = f"{op}, {part}, {case}"
        try:
            check(OPS[op], Random(seed), torch.device("cuda"))
        except Exception as error:
            raise AssertionError(f"inputs of Random({seed!r}): {error}") from error
