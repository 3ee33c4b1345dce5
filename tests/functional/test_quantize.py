"""quantize, dequantize and with_columnwise against the ops called with every scale by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.functional.values import (
    DIRECTIONS,
    FAMILIES,
    FORMATS,
    GROUPED_DIRECTIONS,
    ROWS,
    assert_value,
    buffers,
    draw,
    id_of,
    seed_of,
    sizes_on,
)
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.numerics import assert_same_bits

by_direction = pytest.mark.parametrize("directions", DIRECTIONS, ids=id_of)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@by_direction
@pytest.mark.parametrize("key", FORMATS)
def test_matrix(key: str, directions: dict[str, bool], device: torch.device) -> None:
    for dtype in DTYPES:
        x = draw(48, 64, device=device, dtype=dtype)
        for format in (key, Format.parse(key)):
            value = tp.quantize(x, format, seed=seed_of(key, device), **directions)
            assert_value(value, buffers(x, key, **directions), x, key)


@by_direction
@pytest.mark.parametrize("key", FORMATS)
def test_stack(key: str, directions: dict[str, bool], device: torch.device) -> None:
    x = draw(3, 32, 64, device=device, dtype=torch.bfloat16)
    expected = buffers(x, key, **directions)
    for stack in (x, tp.GroupedTensor(x)):
        value = tp.quantize(stack, key, seed=seed_of(key, device), **directions)
        assert_value(value, expected, x, key)
        assert value.num_groups == 3 and not value.is_ragged


@pytest.mark.parametrize("key, directions", GROUPED_DIRECTIONS, ids=id_of)
def test_ragged(key: str, directions: dict[str, bool], device: torch.device) -> None:
    for index in (torch.int32, torch.int64):
        x, sizes = draw(ROWS, 64, device=device), sizes_on(device, index)
        expected = buffers(x, key, sizes, **directions)
        seed = seed_of(key, device)
        given = tp.quantize(x, key, group_sizes=sizes, seed=seed, **directions)
        own = tp.quantize(tp.GroupedTensor(x, sizes), key, seed=seed, **directions)
        for value in (given, own):
            assert_value(value, expected, x, key)
            assert value.group_sizes is sizes


@by_direction
@pytest.mark.parametrize("key", [key for key in FORMATS if "sr" not in key])
def test_list(key: str, directions: dict[str, bool], device: torch.device) -> None:
    matrices = [draw(16 * (i + 1), 64, seed=i, device=device) for i in range(3)]
    values = tp.quantize(matrices, key, **directions)
    assert type(values) is list and len(values) == 3
    for value, x in zip(values, matrices, strict=True):
        assert_value(value, buffers(x, key, **directions), x, key)
    for value, x in zip(tp.quantize(iter(matrices), key, **directions), matrices, strict=True):
        assert_value(value, buffers(x, key, **directions), x, key)


@by_direction
@pytest.mark.parametrize("key", FAMILIES)
def test_dequantize(key: str, directions: dict[str, bool], device: torch.device) -> None:
    def numbers(x: torch.Tensor, found: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
        prefix = "" if "rowwise_data" in found else "columnwise_"
        data = found[(prefix or "rowwise_") + "data"]
        scale, amax = found[prefix + "scale_inv"], found.get(prefix + "amax")
        return ops.dequantize(data, scale, key, dtype, found.get("group_sizes"), bool(prefix), amax)

    has_columns = Format.parse(key).traits.has_group_columns
    cases = [(draw(48, 64, device=device), None), (draw(3, 32, 64, device=device), None)]
    cases += [(draw(ROWS, 64, device=device), sizes_on(device))] if has_columns or not directions else []
    for x, sizes in cases:
        value = tp.quantize(x, key, group_sizes=sizes, **directions)
        found = buffers(x, key, sizes, **directions)
        assert_same_bits(tp.dequantize(value), numbers(x, found, torch.float32))
        assert_same_bits(tp.dequantize(value, torch.bfloat16), numbers(x, found, torch.bfloat16))
        assert type(tp.dequantize(value)) is torch.Tensor


def test_dequantize_of_what_is_not_quantized(device: torch.device) -> None:
    x = draw(ROWS, 16, device=device)
    assert tp.dequantize(x) is x
    assert tp.dequantize(x, torch.bfloat16).dtype == torch.bfloat16
    assert_same_bits(tp.dequantize(tp.GroupedTensor(x, sizes_on(device))), x)


@pytest.mark.parametrize("key", ("fp8_tensor", "fp8_block", "fp8_block:square", "mxfp8", "fp8_block:aligned"))
def test_with_columnwise(key: str, device: torch.device) -> None:
    cases = [(draw(48, 64, device=device), None)]
    cases += [] if "square" in key else [(draw(ROWS, 64, device=device), sizes_on(device))]
    for x, sizes in cases:
        value = tp.quantize(x.bfloat16(), key, group_sizes=sizes)
        both = tp.with_columnwise(value)
        data, scale = ops.requantize_transposed(value.rowwise_data, value.scale_inv, key, group_sizes=sizes)
        rows = buffers(x.bfloat16(), key, sizes)
        expected = {**rows, "columnwise_data": data, "columnwise_scale_inv": scale}
        assert_value(both, expected, x.bfloat16(), key)
        assert both.rowwise_data is value.rowwise_data and both.scale_inv is value.scale_inv
        again = tp.quantize(value.dequantize(torch.float32), key, group_sizes=sizes, columnwise=True)
        assert_same_bits(both.columnwise_data, again.columnwise_data)
        assert value.columnwise_data is None


def test_inputs_with_a_gradient_give_values_without_one(device: torch.device) -> None:
    x = draw(ROWS, 64, device=device).requires_grad_()
    for given in (x, tp.GroupedTensor(x.detach(), sizes_on(device), requires_grad=True), [x]):
        value = tp.quantize(given, "fp8_block")
        assert not (value[0] if isinstance(value, list) else value).requires_grad


def test_strided_inputs_and_no_rows(device: torch.device) -> None:
    x = draw(64, 96, device=device).t()[::2]
    assert_value(
        tp.quantize(x, "fp8_block", columnwise=True), buffers(x, "fp8_block", columnwise=True), x, "fp8_block"
    )
    none = draw(0, 64, device=device)
    assert_value(tp.quantize(none, "mxfp8"), buffers(none, "mxfp8"), none, "mxfp8")
