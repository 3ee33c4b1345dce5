"""Redraws the arguments of a call from the table of all ops, over the whole range of their dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ops.test_refusals import BUFFERS, copied
from transformer_plugin.testing.every_op import Call

#: Every element has its own exponent; every row has one; or either of them, with infinities and NaN mixed in.
KINDS = ("elements", "rows", "nonfinite")
DELAYED = ("delayed_scale", "update_delayed_scale_", "quantize_scaled")
#: Arguments that stay float32 whatever the dtype of the operands.
FLOAT32_ONLY = ("probs", "rstd", "mean", "bias_scale", "amax", "amax_t", "scale", "scale_inv", "history")


def exact_scale(values: Tensor, exponents: Tensor | int) -> Tensor:
    """Returns ``values * 2**exponents``, rounded to their dtype: exact unless the result leaves the range."""
    powers = exponents.numpy() if isinstance(exponents, Tensor) else exponents
    scaled = torch.from_numpy(np.asarray(np.ldexp(values.double().numpy(), powers)))
    return torch.empty(scaled.shape, dtype=values.dtype).copy_(
        scaled
    )  # numpy's empty arrays have strides of 0


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draws exponents from the least subnormal number to the largest number, of either sign. A tenth of the values
    are the ends of that range."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    lowest, highest = int(math.log2(smallest)), int(math.log2(info.max)) + 1
    by_row = kind == "rows" or (kind == "nonfinite" and float(torch.rand((), generator=generator)) < 0.5)
    exponents = torch.randint(
        lowest, highest, (*shape[:-1], 1) if by_row and shape else shape, generator=generator
    )
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    mantissas = torch.rand(shape, generator=generator, dtype=torch.float64)
    mantissas = 4 * mantissas - 2 if by_row else signs * (1 + mantissas)
    drawn = exact_scale(mantissas, exponents).clamp(-info.max, info.max).to(dtype)
    ends = [0.0, -0.0, smallest, -smallest, info.smallest_normal, info.max, -info.max]
    drawn = _sprinkled(drawn, 0.1, ends[:5] if by_row else ends, generator)
    if kind != "nonfinite":
        return drawn
    return _sprinkled(drawn, 0.03, [math.inf, -math.inf, math.nan], generator)


def _sprinkled(values: Tensor, part: float, others: list[float], generator: torch.Generator) -> Tensor:
    picked = torch.tensor(others, dtype=values.dtype)[
        torch.randint(0, len(others), values.shape, generator=generator)
    ]
    return torch.where(torch.rand(values.shape, generator=generator) < part, picked, values)


def redrawn(call: Call, kind: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Returns the call's arguments with newly drawn numbers and operands in ``dtype``. Buffers that are only
    written are unchanged."""
    generator = torch.Generator().manual_seed(seed)
    arguments = copied(call.arguments)
    for name, value in arguments.items():
        only_written = name in BUFFERS[call.op] and call.op not in DELAYED
        if only_written or name in ("group_sizes", "indices", "seed", "noop", "rows"):
            continue
        if name == "dtype":
            arguments[name] = dtype
        elif name == "eps":
            arguments[name] = (1e-5, 0.0, 1e-30, 1e30)[seed % 4]
        elif isinstance(value, list) and isinstance(value[0], Tensor):
            arguments[name] = [_like(x, name, kind, dtype, generator) for x in value]
        elif isinstance(value, Tensor):
            arguments[name] = _like(value, name, kind, dtype, generator)
    return arguments


def _like(value: Tensor, name: str, kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if value.element_size() == 1:
        bits = torch.randint(0, 256, value.shape, generator=generator, dtype=torch.uint8)
        return bits.view(value.dtype)
    drawn = numbers(kind, tuple(value.shape), torch.float32 if name in FLOAT32_ONLY else dtype, generator)
    return drawn.abs() if name in ("amax", "amax_t", "history") else drawn
