"""The amax of nvfp4 in every direction: of each matrix, group or row, before and after the rotation."""

from __future__ import annotations

import pytest
import torch

from tests.opcheck import opcheck
from tests.ops import nvfp4_oracle
from tests.ops.nvfp4_oracle import SPECS
from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS, grouped_quantize_cases, quantize_cases

OPS = torch.ops.transformer_plugin
KEYS = ("nvfp4", "nvfp4:rht", "nvfp4:row_scaled")  # other options have the amax of one of these
CASES = [case for case in quantize_cases() if any(f"-{key}-" in case.name for key in KEYS)]
GROUPED_CASES = [case for case in grouped_quantize_cases() if any(f"-{key}-" in case.name for key in KEYS)]
# opcheck compares inputs before and after the call, and NaN is not equal to itself.
NOT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_amax(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = tuple(nvfp4_oracle.amax(input, SPECS[format], None, direction) for direction in (0, 1))
    assert_all_same(reference.amax(input.cpu(), format, columnwise=True), expected)
    assert_all_same(
        (ops.amax(input, format), ops.amax(input, format, rowwise=False, columnwise=True)), expected
    )
    assert_all_same(ops.amax(input, format, columnwise=True), expected)


@pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)
def test_grouped_amax(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    spec, counts = SPECS[format], sizes.tolist()
    expected = tuple(nvfp4_oracle.amax(input, spec, counts, direction) for direction in (0, 1))
    assert_all_same(reference.amax(input.cpu(), format, sizes.cpu(), columnwise=True), expected)
    assert_all_same(
        (ops.amax(input, format, sizes), ops.amax(input, format, sizes, rowwise=False, columnwise=True)),
        expected,
    )
    assert_all_same(ops.amax(input, format, sizes, columnwise=True), expected)


@pytest.mark.parametrize("case", CASES[:9] + GROUPED_CASES[:9], ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, *sizes, format = case.arguments(device)
    for flags in ({}, COLUMNS, BOTH):
        opcheck(OPS.amax.default, (input, format, *sizes), flags, test_utils=NOT_SCHEMA)


def test_rowwise_amax_supports_any_number_of_rows(device: torch.device) -> None:
    """Only the transposed direction requires whole blocks of rows."""
    for rows in (1, 17, 129):
        input = torch.randn(rows, 48, device=device)
        for format in ("nvfp4", "nvfp4:row_scaled"):
            got = ops.amax(input, format)
            assert_all_same((got,), (nvfp4_oracle.amax(input, SPECS[format], None, 0),))


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(64, 160, device=device).bfloat16()
    for input in (wide.T, wide[:, ::2], wide[16:48, 16:128], torch.ones((), device=device).expand(32, 64)):
        for format in KEYS:
            assert_all_same(
                ops.amax(input, format, columnwise=True),
                ops.amax(input.contiguous(), format, columnwise=True),
            )
