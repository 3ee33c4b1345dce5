"""Generated inputs of the quantize family: any shape, groups, options, strides and bit patterns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import nvfp4_oracle
from tests.ops import quantize_oracle as oracle
from tests.ops.nvfp4_oracle import NvSpec, make_nv_spec
from tests.ops.quantize_oracle import MX_ROW, MX_SQUARE, ROW, SQUARE, Spec
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import width_for

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))

sizes = st.one_of(st.integers(0, 5), st.sampled_from([16, 17, 127, 128, 129, 255, 256, 257]))
dtypes = st.sampled_from(FLOAT_DTYPES)


@st.composite
def specs(draw: st.DrawFn, square: bool) -> Spec:
    blocks: list[tuple[int, int] | None] = [None, ROW, MX_ROW] + ([SQUARE, MX_SQUARE] if square else [])
    epsilon = draw(st.sampled_from([0.0, 0.0, 1e-12, 0.5, 1e30]))
    block = draw(st.sampled_from(blocks))
    tiled = block in (MX_ROW, MX_SQUARE) and draw(st.booleans())
    return Spec(draw(st.sampled_from(["e4m3", "e5m2"])), draw(st.booleans()), block, epsilon, tiled)


@st.composite
def nv_specs(draw: st.DrawFn, square: bool) -> NvSpec:
    """Draws options of nvfp4 that can be combined."""
    kind = draw(st.sampled_from(["plain", "alone", *(["square"] if square else [])]))
    return make_nv_spec(
        square=kind == "square",
        rht=kind == "plain" and draw(st.booleans()),
        sr=kind != "alone" and draw(st.booleans()),
        row_scaled=kind == "alone" and draw(st.booleans()),
        four_over_six=draw(st.sampled_from(["", "mae", "mse"])) if kind == "alone" else "",
        tiled=draw(st.booleans()),
    )


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """Draws normal values whose magnitude differs by row, sometimes random bit patterns, sometimes strided."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(dtypes)
    step = draw(st.sampled_from([1, 1, 2]))
    values = torch.randn(rows, columns * step, generator=generator)
    exponents = torch.randint(
        *draw(st.sampled_from([(-1, 2), (-20, 20), (-140, 127)])), (rows, 1), generator=generator
    )
    values = (values.double() * 2.0 ** exponents.double()).to(dtype)
    if draw(st.booleans()):
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        bits = torch.randint(-(2**31), 2**31, values.shape, generator=generator).to(integer).view(dtype)
        values = torch.where(torch.rand(values.shape, generator=generator) < 0.02, bits, values)
    return values[:, ::step]


def check_dense(data: st.DataObject, device: torch.device) -> None:
    spec = data.draw(specs(square=True))
    transposed = data.draw(st.booleans())
    rows, columns = data.draw(sizes), data.draw(sizes)
    if transposed:
        input = data.draw(matrices(width_for(rows, spec.key), columns)).T
    else:
        input = data.draw(matrices(rows, width_for(columns, spec.key)))
    got = ops.quantize(input.to(device), spec.key, columnwise=True)
    for g, e in zip(got, oracle.both_directions(input, spec), strict=True):
        assert_same_bits(g, e)


def check_grouped(data: st.DataObject, device: torch.device) -> None:
    spec = data.draw(specs(square=False))
    groups = data.draw(st.lists(sizes, max_size=6))
    columns = width_for(data.draw(sizes), spec.key)
    input = data.draw(matrices(sum(groups) + data.draw(sizes), columns))
    index = data.draw(st.sampled_from([torch.int32, torch.int64]))
    group_sizes = torch.tensor(groups, dtype=index)
    got = ops.quantize(input.to(device), spec.key, group_sizes.to(device), columnwise=True)
    for g, e in zip(got, oracle.grouped_both_directions(input, groups, spec), strict=True):
        assert_same_bits(g, e)


def check_dense_nvfp4(data: st.DataObject, device: torch.device) -> None:
    spec = data.draw(nv_specs(square=True))
    rows, columns = (16 * data.draw(st.integers(0, 18)) for _ in range(2))
    transposed = data.draw(st.booleans())
    input = data.draw(matrices(columns, rows)).T if transposed else data.draw(matrices(rows, columns))
    amax, amax_t = (draw_amax(data, a) for a in reference.amax(input, spec.key, columnwise=True))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1)) if spec.sr else None
    amaxes_and_seed = (
        amax.to(device),
        amax_t.to(device),
        None if seed is None else torch.tensor([seed], device=device),
    )
    got = ops.quantize(input.to(device), spec.key, None, *amaxes_and_seed, columnwise=True)
    for direction, of in ((0, amax), (1, amax_t)):
        expected = nvfp4_oracle.quantize_direction(input, spec, of, seed, direction)
        for g, e in zip(got[2 * direction :], expected, strict=False):
            assert_same_bits(g, e)


def check_grouped_nvfp4(data: st.DataObject, device: torch.device) -> None:
    spec = data.draw(nv_specs(square=False))
    groups = [16 * n for n in data.draw(st.lists(st.integers(0, 18), max_size=6))]
    columns = 16 * data.draw(st.integers(0, 18))
    input = data.draw(matrices(sum(groups) + 16 * data.draw(st.integers(0, 9)), columns))
    sizes = torch.tensor(groups, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    amax, amax_t = (draw_amax(data, a) for a in reference.amax(input, spec.key, sizes, columnwise=True))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1)) if spec.sr else None
    amaxes_and_seed = (
        amax.to(device),
        amax_t.to(device),
        None if seed is None else torch.tensor([seed], device=device),
    )
    got = ops.quantize(input.to(device), spec.key, sizes.to(device), *amaxes_and_seed, columnwise=True)
    for direction, of in ((0, amax), (1, amax_t)):
        expected = nvfp4_oracle.grouped_quantize_direction(input, groups, spec, of, seed, direction)
        for g, e in zip(got[2 * direction :], expected, strict=False):
            assert_same_bits(g, e)


def draw_amax(data: st.DataObject, own: Tensor) -> Tensor:
    """Returns the amax of the matrix, or one below or above it."""
    return own * data.draw(st.sampled_from([1.0, 1.0, 0.3, 100.0]))


@QUICK
@given(st.data())
def test_dense_agrees_with_the_oracle(device: torch.device, data: st.DataObject) -> None:
    check_dense(data, device)


@QUICK
@given(st.data())
def test_grouped_agrees_with_the_oracle(device: torch.device, data: st.DataObject) -> None:
    check_grouped(data, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(st.data())
def test_dense_for_thousands_of_inputs(device: torch.device, data: st.DataObject) -> None:
    check_dense(data, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(st.data())
def test_grouped_for_thousands_of_inputs(device: torch.device, data: st.DataObject) -> None:
    check_grouped(data, device)


@QUICK
@given(st.data())
def test_dense_nvfp4_agrees_with_the_oracle(device: torch.device, data: st.DataObject) -> None:
    check_dense_nvfp4(data, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(st.data())
def test_dense_nvfp4_for_thousands_of_inputs(device: torch.device, data: st.DataObject) -> None:
    check_dense_nvfp4(data, device)


@QUICK
@given(st.data())
def test_grouped_nvfp4_agrees_with_the_oracle(device: torch.device, data: st.DataObject) -> None:
    check_grouped_nvfp4(data, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
@LONG
@given(st.data())
def test_grouped_nvfp4_for_thousands_of_inputs(device: torch.device, data: st.DataObject) -> None:
    check_grouped_nvfp4(data, device)
