"""Groups of rows with skewed sizes on the device, compared with the same op without groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import Tensors
from benchmarks.quantize_case import DIRECTIONS, Case
from transformer_plugin import ops, reference
from transformer_plugin.formats import BLOCK, Format


def skewed_sizes(rows: int, groups: int, multiple: int, device: torch.device) -> Tensor:
    """Returns sizes in the proportions of a Dirichlet(1) sample, multiples of ``multiple``; their sum is ``rows``."""
    generator = torch.Generator().manual_seed(groups)
    weights = torch.empty(groups, dtype=torch.float64).exponential_(generator=generator)
    ends = (weights.cumsum(0) / weights.sum() * (rows // multiple)).round().long() * multiple
    return ends.diff(prepend=ends.new_zeros(1)).to(device, torch.int32)


def _grouped(label: str, key: str, direction: str, groups: int, multiple: int) -> Case:
    fmt = Format.parse(key)
    op, meaning, single = (
        partial(quantize, **DIRECTIONS[direction])
        for quantize in (ops.quantize, reference.quantize, ops.quantize)
    )
    sizes = "any sizes" if multiple == 1 else "padded"
    # The amaxes of nvfp4: one per group, and one for the op without groups.
    names = (["amax", "amax_t"] if direction == "both" else ["amax"]) if fmt.family == "nvfp4" else []

    def prepare(x: Tensor) -> Tensors:
        group_sizes = skewed_sizes(x.shape[0], groups, multiple, x.device)
        if not names:
            return x, group_sizes
        count = len(names)
        return (
            x,
            group_sizes,
            *ops.amax(x, fmt.key, group_sizes, columnwise=True)[:count],
            *ops.amax(x, fmt.key, columnwise=True)[:count],
        )

    def of_groups(amaxes: Tensors) -> dict[str, Tensor]:
        return dict(zip(names, amaxes[: len(names)], strict=True))

    def of_all(amaxes: Tensors) -> dict[str, Tensor]:
        return dict(zip(names, amaxes[len(names) :], strict=True))

    return Case(
        f"grouped {label} {direction}, {groups}, {sizes}",
        fmt,
        prepare=prepare,
        op=lambda x, group_sizes, *amaxes: op(x, fmt.key, group_sizes, **of_groups(amaxes)),
        reference=lambda x, group_sizes, *amaxes: meaning(x, fmt, group_sizes, **of_groups(amaxes)),
        single=lambda x, group_sizes, *amaxes: single(x, fmt.key, **of_all(amaxes)),
        groups=groups,
    )


def grouped_cases() -> Iterator[Case]:
    """Yields padded and unpadded groups."""
    for groups, multiple in ((8, BLOCK), (256, BLOCK), (8, 1), (256, 1)):  # modules pad groups to blocks
        for direction in ("rows", "both"):
            yield _grouped("fp8_block", "fp8_block:e4m3", direction, groups, multiple)
            yield _grouped("mxfp8", "mxfp8:e4m3", direction, groups, multiple)
            if multiple == BLOCK:
                yield _grouped("nvfp4", "nvfp4:e2m1", direction, groups, multiple)
