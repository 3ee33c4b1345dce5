"""Inputs of the gemm family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import listed
from transformer_plugin.ops.gemm_plan import grouped_gemm_plan
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case


@dataclass(frozen=True)
class GroupedShape:
    """Sizes of the groups, rows of the buffer, and the widths."""

    name: str
    sizes: tuple[int, ...]
    rows: int
    n: int
    k: int


GROUPED_SHAPES = (
    GroupedShape("one-group", (9,), 9, 16, 24),
    GroupedShape("odd-widths", (5, 3, 130), 140, 33, 17),
    GroupedShape("empty-first", (0, 7, 5), 12, 24, 16),
    GroupedShape("empty-middle", (7, 0, 0, 5), 16, 16, 40),
    GroupedShape("empty-last", (6, 130, 0), 150, 136, 72),
    GroupedShape("all-empty", (0, 0, 0), 6, 16, 8),
    GroupedShape("no-rows", (0, 0), 0, 16, 8),
    GroupedShape("no-groups", (), 5, 16, 8),
    GroupedShape("one-past-a-block", (129, 1, 257), 400, 128, 128),
    GroupedShape("257-groups", tuple(i % 4 for i in range(257)), 390, 8, 16),
    GroupedShape("no-columns", (2, 3), 5, 0, 8),
    GroupedShape("nothing-summed", (2, 3), 7, 8, 0),
    GroupedShape("wide", (40, 0, 25), 70, 264, 520),
    GroupedShape("many-tiles", (300, 1, 0, 513, 128, 385), 1400, 776, 200),
    GroupedShape("tiles-of-fp8", (300, 1, 0, 385), 690, 392, 272),
    GroupedShape("one-long-group", (900,), 903, 264, 136),
    GroupedShape("1100-groups", tuple(i % 3 for i in range(1100)), 1110, 16, 24),
)


def in_fp8_units(
    a_key: str, b_key: str, dtype: torch.dtype, width: int, k: int | None, device: torch.device
) -> bool:
    """Whether FP8 tensor cores multiply two quantized operands, as :func:`grouped_gemm_plan` says.

    ``width`` is the number of output columns and ``dtype`` the output's. ``k`` is the number of columns of rowwise
    operands; None means columnwise operands, those of a weight gradient. False for formats that no product takes.
    """
    fp8 = Format.parse(a_key).family in ("fp8_tensor", "fp8_row", "fp8_block")
    if device.type != "cuda" or not fp8:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    product, n, columns = ("weight_grad", 16, width) if k is None else ("forward", width, k)
    sizes = (1024, 2, n, columns)
    try:
        plan = grouped_gemm_plan(
            product,
            torch.bfloat16,
            dtype,
            *sizes,
            132,
            a_format=a_key,
            b_format=b_key,
            capability=10 * major + minor,
        )
    except ValueError:
        return False
    return plan.backend == "sm90"


def integers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    most: int = 8,
) -> Tensor:
    """Draws small whole numbers: their FP32 sums are exact, so a product is either right to the last bit or wrong."""
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype).to(device)


def normals(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Draws normal values on the CPU in float64, and rounds them once."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def poison_tail(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sets every row past the groups to NaN, so that reading them shows."""
    tensor[sum(sizes) :] = float("nan")
    return tensor


def group_sizes(shape: GroupedShape, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns the sizes as a tensor on the device."""
    return torch.tensor(shape.sizes, dtype=dtype).to(device)


def factors(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draws alpha or beta, one per group: multiples of a quarter, so that exact sums stay exact. Every fourth is 0."""
    values = torch.randint(-8, 9, (count,), generator=generator).float() / 4
    values[3::4] = 0.0
    return values.to(device)


def row_index(
    sizes: Tensor, capacity: int, matrix_rows: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Draws the row of a matrix for each row of a buffer: some repeat, some do not occur. Entries of the tail are
    out of range."""
    index = torch.randint(0, max(1, matrix_rows), (capacity,), generator=generator, dtype=sizes.dtype)
    index[int(sizes.sum()) :] = 2**31 - 1
    return index.to(device)


def grouped_gemm_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """(a, b, group_sizes, bias, bias_scale, transpose_b): every shape, with and without bias and scale, both layouts.

    Tail rows of ``a`` and ``bias_scale`` are NaN.
    """
    for dtype in dtypes:
        for index, shape in enumerate(GROUPED_SHAPES):
            for extra in ("plain", "bias", "scaled"):
                for transpose_b in {"plain": (True, False), "bias": (True,), "scaled": (False,)}[extra]:

                    def make(
                        device: torch.device,
                        generator: torch.Generator,
                        shape: GroupedShape = shape,
                        dtype: torch.dtype = dtype,
                        extra: str = extra,
                        transpose_b: bool = transpose_b,
                        size_dtype: torch.dtype = (torch.int64, torch.int32)[index % 2],
                    ) -> tuple[Any, ...]:
                        groups = len(shape.sizes)
                        a = draw((shape.rows, shape.k), dtype, device, generator)
                        b_shape = (shape.n, shape.k) if transpose_b else (shape.k, shape.n)
                        b = draw((groups, *b_shape), dtype, device, generator)
                        bias = draw((groups, shape.n), dtype, device, generator) if extra != "plain" else None
                        scale = None
                        if extra == "scaled":
                            scale = integers((shape.rows,), torch.float32, device, generator) / 4
                            poison_tail(scale, shape.sizes)
                        sizes = group_sizes(shape, device, size_dtype)
                        return poison_tail(a, shape.sizes), b, sizes, bias, scale, transpose_b

                    name = f"{str(dtype)[6:]}-{shape.name}-{extra}-{'nt' if transpose_b else 'nn'}"
                    yield Case(name, make)


def grouped_wgrad_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """(grad, input, group_sizes); tail rows of both are NaN."""
    for dtype in dtypes:
        for index, shape in enumerate(GROUPED_SHAPES):

            def make(
                device: torch.device,
                generator: torch.Generator,
                shape: GroupedShape = shape,
                dtype: torch.dtype = dtype,
                size_dtype: torch.dtype = (torch.int32, torch.int64)[index % 2],
            ) -> tuple[Any, ...]:
                grad = poison_tail(draw((shape.rows, shape.n), dtype, device, generator), shape.sizes)
                input = poison_tail(draw((shape.rows, shape.k), dtype, device, generator), shape.sizes)
                return grad, input, group_sizes(shape, device, size_dtype)

            yield Case(f"{str(dtype)[6:]}-{shape.name}", make)


def apart(stack: Tensor) -> list[Tensor]:
    """Returns the matrices of a stack in separate memory, allocated in another order."""
    groups = stack.shape[0]
    order = [(7 * g + 3) % groups for g in range(groups)] if groups % 7 else list(range(groups))[::-1]
    matrices = {g: stack[g].clone() for g in order}
    return [matrices[g] for g in range(groups)]


def grouped_gemm_list_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """The cases of :func:`grouped_gemm_cases` with 1 to 1024 groups, with ``b`` as a list."""
    for case in grouped_gemm_cases(draw, dtypes):
        if "no-groups" in case.name or "1100-groups" in case.name:
            continue

        def make(device: torch.device, generator: torch.Generator, case: Case = case) -> tuple[Any, ...]:
            a, b, *rest = case.make(device, generator)
            return a, apart(b), *rest

        yield Case(case.name, make)


def grouped_wgrad_list_cases(
    draw: Any = integers, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[Case]:
    """The cases of :func:`grouped_wgrad_cases` with 1 to 1024 groups."""
    for case in grouped_wgrad_cases(draw, dtypes):
        if "no-groups" not in case.name and "1100-groups" not in case.name:
            yield case


GEMM_SHAPES = (
    (0, 8, 8),
    (1, 1, 1),
    (3, 0, 5),
    (4, 6, 0),
    (5, 33, 17),
    (16, 16, 16),
    (130, 129, 72),
    (64, 264, 520),
)


def gemm_cases(draw: Any = integers) -> Iterator[Case]:
    """(a, b, bias, transpose_b, dtype): shapes with zeros and odd widths, both layouts, wider and narrower outputs."""
    for dtype in (*FLOAT_DTYPES, torch.float64):
        for index, (m, n, k) in enumerate(GEMM_SHAPES):
            others = (torch.float32, torch.bfloat16) if dtype != torch.float64 and index % 3 == 1 else ()
            for output in (None, *others):
                for variant in range(4) if dtype != torch.float64 else (0, 3):

                    def make(
                        device: torch.device,
                        generator: torch.Generator,
                        shape: tuple[int, int, int] = (m, n, k),
                        dtype: torch.dtype = dtype,
                        output: torch.dtype | None = output,
                        variant: int = variant,
                    ) -> tuple[Any, ...]:
                        m, n, k = shape
                        transpose_b = variant % 2 == 0
                        a = draw((m, k), dtype, device, generator)
                        b = draw((n, k) if transpose_b else (k, n), dtype, device, generator)
                        bias = draw((n,), dtype, device, generator) if variant >= 2 else None
                        return a, b, bias, transpose_b, output

                    name = f"{str(dtype)[6:]}-{m}x{n}x{k}-{str(output)[-8:]}-{variant}"
                    yield Case(name, make)


def quantized_arguments(
    a: tuple[Any, ...], b: tuple[Any, ...], a_format: str, b_format: str, names: tuple[str, str] = ("a", "b")
) -> dict[str, Any]:
    """Returns, by name, the arguments of a product for two operands ``(data, scale)`` or ``(data, scale, amax)``.
    Each entry is a tensor or a list of tensors."""
    arguments: dict[str, Any] = {}
    for name, (data, *scales), format in zip(names, (a, b), (a_format, b_format), strict=True):
        tensors = [t for scale in scales if scale is not None for t in listed(scale, "reference", "scale")]
        arguments |= {name: data, f"{name}_scale": tensors, f"{name}_format": format}
    return arguments


def wgrad_arguments(
    grad: tuple[Any, ...], input: tuple[Any, ...], grad_format: str, input_format: str
) -> dict[str, Any]:
    """Returns the same for the column-wise quantized operands of a weight gradient."""
    return quantized_arguments(grad, input, grad_format, input_format, ("grad", "input"))
