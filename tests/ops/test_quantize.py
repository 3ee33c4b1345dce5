"""The quantize family: bytes and scales equal to arithmetic written here from the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import grouped_quantize_cases, quantize_cases

CASES = list(quantize_cases())
GROUPED_CASES = list(grouped_quantize_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_grouped_case = pytest.mark.parametrize("case", GROUPED_CASES, ids=lambda case: case.name)
NAMES = ("data", "scale", "data_transposed", "scale_transposed")


def assert_all_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for g, e, name in zip(got, expected, NAMES[: len(got)], strict=True):
        assert_same_bits(g, e, name)
        assert g.is_contiguous(), name


@by_case
def test_dense(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    expected = reference.quantize_both(input.cpu(), format)
    assert_all_same(ops.quantize_both(input, format), expected)
    assert_all_same(ops.quantize(input, format), expected[:2])
    assert_all_same(ops.quantize_transposed(input, format), expected[2:])


@by_grouped_case
def test_grouped(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    expected = reference.grouped_quantize_both(input.cpu(), sizes.cpu(), format)
    assert_all_same(ops.grouped_quantize_both(input, sizes, format), expected)
    assert_all_same(ops.grouped_quantize(input, sizes, format), expected[:2])
    assert_all_same(ops.grouped_quantize_transposed(input, sizes, format), expected[2:])
