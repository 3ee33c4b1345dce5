"""nvfp4 of matrices with whole tiles of 128x128, and edges, groups and blocks that the fast path does not handle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.quantize_cases import columns_of, extras

FORMATS = ["nvfp4", "nvfp4:rht", "nvfp4:sr,tiled", "nvfp4:rht,sr", "nvfp4:rht,sr,tiled"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns ordinary values, some NaN and infinities, a row of zeros, and blocks whose scales are subnormal, zero
    or the largest."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    values[5, 7] = float("nan")
    values[70, 80] = float("inf")
    values[100] = 0.0
    values[33, 16:48] *= 1e-4
    values[:, 50] *= 1e-5
    values[-20, -40:] *= 1e4
    values[-40:, -3] = -float("nan")
    return values.to(dtype)


def finite(amax: Tensor) -> Tensor:
    return torch.full_like(amax, 5.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (272, 400)])
def test_whole_tiles_and_edges(
    rows: int, columns: int, format: str, dtype: torch.dtype, device: torch.device
) -> None:
    input = matrix(rows, columns, dtype)
    options = {name: finite(t) if "amax" in name else t for name, t in extras(input, format).items()}
    expected = reference.quantize(input, format, **options, columnwise=True)
    there = {name: t.to(device) for name, t in options.items()}
    assert_all_same(ops.quantize(input.to(device), format, **there, columnwise=True), expected)
    got = ops.quantize(input.to(device), format, **columns_of(there), rowwise=False, columnwise=True)
    assert_all_same(got, expected[2:])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [[128, 0, 256, 128], [16, 144, 256, 112], [0, 0, 0, 400]], ids=str)
def test_groups_and_tail_with_whole_tiles(
    sizes: list[int], format: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Each group has a different amax, and rows past the groups are zero."""
    input = matrix(640, 256, dtype)
    groups = torch.tensor(sizes)
    options = {"seed": torch.tensor([11])} if "sr" in format else {}
    amax, amax_t = torch.tensor([4.0, 5.0, 6.0, 7.0]), torch.tensor([14.0, 5.5, 16.0, 7.0])
    expected = reference.quantize(input, format, groups, amax, amax_t, **options, columnwise=True)
    there = {name: t.to(device) for name, t in options.items()}
    got = ops.quantize(
        input.to(device),
        format,
        groups.to(device),
        amax=amax.to(device),
        amax_t=amax_t.to(device),
        **there,
        columnwise=True,
    )
    assert_all_same(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4:rht,sr"])
def test_graph_replays_with_new_groups_and_seeds(format: str) -> None:
    """Which tiles are whole changes between replays."""
    device = torch.device("cuda")
    input, seed = torch.empty(512, 256, dtype=torch.bfloat16, device=device), torch.zeros(1).long().to(device)
    groups = torch.tensor([128, 128, 128, 128], device=device)
    amax = torch.full((4,), 5.0, device=device)
    options = {"seed": seed} if "sr" in format else {}
    ops.quantize(input, format, groups, amax=amax, amax_t=amax, **options, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.quantize(input, format, groups, amax=amax, amax_t=amax, **options, columnwise=True)
    for i, sizes in enumerate(([256, 0, 128, 128], [16, 240, 0, 32], [0, 512, 0, 0], [144, 128, 112, 0])):
        input.copy_(matrix(512, 256, torch.bfloat16) * (i + 1))
        groups.copy_(torch.tensor(sizes))
        seed.fill_(i)
        graph.replay()
        amaxes = {"amax": amax.cpu(), "amax_t": amax.cpu()}
        own = {name: t.cpu() for name, t in options.items()}
        expected = reference.quantize(input.cpu(), format, groups.cpu(), **amaxes, **own, columnwise=True)
        assert_all_same(got, expected)
