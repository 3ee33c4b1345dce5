"""Inputs of products in fp8_row: FP8 data with one scale per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.cases import Case, randn
from transformer_plugin.testing.gemm_cases import (
    GROUPED_SHAPES,
    GroupedShape,
    group_sizes,
    normals,
    poison_tail,
)


def rowwise_quantized(
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Quantized normal values with one scale per row, chosen so that float16 can hold the products."""
    data = (normals(shape, torch.float32, torch.device("cpu"), generator) * 8).to(dtype).to(device)
    return data, 2.0 ** (randn(shape[:-1], torch.float32, device, generator, 2.0) - 6)


def poison_quantized_tail(data: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sets every row past the groups to NaN."""
    data.view(torch.uint8)[sum(sizes) :] = 0x7F
    return data


def grouped_gemm_rowwise_cases() -> Iterator[Case]:
    """(a, a_scale, b, b_scale, group_sizes, options by name): every shape and both element formats of ``a``.

    Each without options, with a bias, and with a bias, ``bias_scale`` and ``alpha``. Tail rows are NaN.
    """
    for index, shape in enumerate(GROUPED_SHAPES):
        for extra in ("plain", "bias", "scaled"):

            def make(
                device: torch.device,
                generator: torch.Generator,
                shape: GroupedShape = shape,
                extra: str = extra,
                dtype: torch.dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[index % 2],
                size_dtype: torch.dtype = (torch.int64, torch.int32)[index % 2],
            ) -> tuple[Any, ...]:
                groups = len(shape.sizes)
                a, a_scale = rowwise_quantized((shape.rows, shape.k), device, generator, dtype)
                b, b_scale = rowwise_quantized((groups, shape.n, shape.k), device, generator)
                more: dict[str, Tensor] = {}
                if extra != "plain":
                    more["bias"] = normals((groups, shape.n), torch.bfloat16, device, generator)
                if extra == "scaled":
                    scale = normals((shape.rows,), torch.float32, device, generator)
                    more["bias_scale"] = poison_tail(scale, shape.sizes)
                    more["alpha"] = normals((groups,), torch.float32, device, generator)
                poison_tail(a_scale, shape.sizes)
                sizes = group_sizes(shape, device, size_dtype)
                return poison_quantized_tail(a, shape.sizes), a_scale, b, b_scale, sizes, more

            yield Case(f"{shape.name}-{extra}", make)
