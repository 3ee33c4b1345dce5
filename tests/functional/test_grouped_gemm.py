"""grouped_gemm and grouped_gemm_wgrad against the ops with data and scales by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.functional.test_gemm import COLUMNS, by_hand, by_pair
from tests.functional.values import ROWS, SIZES, assert_ragged, buffers, draw, scales, sizes_on
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.numerics import assert_same_bits

G, N, K = len(SIZES), 32, 64
Keys = tuple[str, str]
by_wgrad_pair = pytest.mark.parametrize(
    "keys",
    [
        *(pair for pair in COLUMNS if not Format.parse(pair[1]).square_blocks),
        ("fp8_block:aligned", "fp8_block:aligned"),
    ],
    ids=" with ".join,
)


def wgrad_by_hand(found: list[dict[str, Tensor]], keys: Keys) -> tuple[list[Tensor], dict[str, Any]]:
    """Columnwise data of grad and input, and the arguments for their scales."""
    options = {"grad_format": keys[0], "input_format": keys[1]}
    both = {"grad_scale": scales(found[0], True), "input_scale": scales(found[1], True)}
    return [one["columnwise_data"] for one in found], {**options, **both}


@by_pair
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_of_both(keys: Keys, dtype: torch.dtype, device: torch.device) -> None:
    a, b = draw(ROWS, K, device=device, dtype=dtype), draw(G, N, K, seed=1, device=device, dtype=dtype)
    sizes = sizes_on(device)
    operands, options = by_hand(buffers(a, keys[0], sizes), buffers(b, keys[1]), keys, (False, False))
    expected = ops.grouped_gemm(*operands, sizes, dtype=dtype, **options)
    right = tp.quantize(b, keys[1], columnwise=True)
    members = tp.quantize(list(b), keys[1], columnwise=True)
    for weights in (right, members, right.members(), tuple(members)):
        left = tp.quantize(tp.GroupedTensor(a, sizes), keys[0])
        assert_ragged(tp.grouped_gemm(left, weights), expected, sizes)
    if Format.parse(keys[0]).family in (
        "fp8_block",
        "mxfp8",
    ):  # the scales of rows do not depend on the groups
        got = tp.grouped_gemm(tp.quantize(a, keys[0]), right, sizes)
        assert type(got) is Tensor
        assert_same_bits(got[: sum(SIZES)], expected[: sum(SIZES)])


@pytest.mark.parametrize("keys", COLUMNS, ids=" with ".join)
def test_data_gradient(keys: Keys, device: torch.device) -> None:
    grad, weight = draw(ROWS, N, device=device), draw(G, N, K, seed=1, device=device)
    sizes = sizes_on(device)
    rows = buffers(grad, keys[0], sizes)
    left = tp.quantize(grad, keys[0], group_sizes=sizes)
    operands, options = by_hand(rows, buffers(weight, keys[1], columnwise=True), keys, (False, True))
    expected = ops.grouped_gemm(*operands, sizes, dtype=torch.float32, **options)
    for rowwise in (True, False):
        stack = tp.quantize(weight, keys[1], rowwise=rowwise, columnwise=True)
        each = tp.quantize(list(weight), keys[1], rowwise=rowwise, columnwise=True)
        for weights in (stack, each):
            assert_ragged(tp.grouped_gemm(left, weights, transpose_b=False), expected, sizes)
    operands, options = by_hand(rows, buffers(weight, keys[1]), keys, (False, False))
    alone = ops.grouped_gemm(*operands, sizes, transpose_b=False, dtype=torch.float32, **options)
    got = tp.grouped_gemm(left, tp.quantize(weight, keys[1]), transpose_b=False)
    assert_ragged(got, alone, sizes)


def test_plain_operands(device: torch.device) -> None:
    a, b, sizes = draw(ROWS, K, device=device), draw(G, N, K, seed=1, device=device), sizes_on(device)
    expected = ops.grouped_gemm(a, b, sizes)
    for weights in (b, list(b), tp.GroupedTensor(b), iter(b.unbind())):
        got = tp.grouped_gemm(a, weights, sizes)
        assert type(got) is Tensor
        assert_same_bits(got, expected)
    assert_ragged(tp.grouped_gemm(tp.GroupedTensor(a, sizes), tp.GroupedTensor(b)), expected, sizes)


def test_options(device: torch.device) -> None:
    a, b, sizes = draw(ROWS, K, device=device), draw(G, N, K, seed=1, device=device), sizes_on(device)
    bias, alpha = draw(G, N, seed=2, device=device), draw(G, seed=3, device=device)
    more: dict[str, Any] = {"bias_scale": draw(ROWS, seed=4, device=device), "alpha": alpha}
    more["dtype"] = torch.bfloat16
    launch = tp.LaunchOptions(max_sms=4, expected_rows=64)
    index = torch.arange(ROWS, device=device).flip(0)
    got = tp.grouped_gemm(a, b, sizes, bias, rows=index, launch_options=launch, **more)
    assert_same_bits(
        got, ops.grouped_gemm(a, b, sizes, bias, rows=index, max_sms=4, expected_rows=64, **more)
    )
    keys = ("fp8_block", "fp8_block:square")
    operands, options = by_hand(buffers(a, keys[0], sizes), buffers(b, keys[1]), keys, (False, False))
    left = tp.quantize(tp.GroupedTensor(a, sizes), keys[0])
    got = tp.grouped_gemm(left, tp.quantize(b, keys[1]), bias=bias, launch_options=launch, **more)
    assert_ragged(got, ops.grouped_gemm(*operands, sizes, bias, **more, **options), sizes)


@by_wgrad_pair
def test_wgrad_reads_the_columns_of_both(keys: Keys, device: torch.device) -> None:
    grad, x, sizes = draw(ROWS, N, device=device), draw(ROWS, K, seed=1, device=device), sizes_on(device)
    found = [
        buffers(t, key, sizes, rowwise=False, columnwise=True) for t, key in zip((grad, x), keys, strict=True)
    ]
    operands, options = wgrad_by_hand(found, keys)
    alpha = draw(G, seed=2, device=device)
    expected = ops.grouped_gemm_wgrad(*operands, sizes, torch.float32, alpha, **options)
    for rowwise in (False, True):
        left, right = (
            tp.quantize(tp.GroupedTensor(t, sizes), key, rowwise=rowwise, columnwise=True)
            for t, key in zip((grad, x), keys, strict=True)
        )
        assert_same_bits(tp.grouped_gemm_wgrad(left, right, alpha=alpha), expected)


@pytest.mark.parametrize("grouped", ((True, True), (True, False), (False, True), (False, False)), ids=str)
def test_wgrad_takes_the_groups_of_either(grouped: tuple[bool, bool], device: torch.device) -> None:
    grad, x, sizes = draw(ROWS, N, device=device), draw(ROWS, K, seed=1, device=device), sizes_on(device)
    left, right = (
        tp.GroupedTensor(t, sizes) if own else t for t, own in zip((grad, x), grouped, strict=True)
    )
    given = None if any(grouped) else sizes
    got = tp.grouped_gemm_wgrad(left, right, given, dtype=torch.bfloat16)
    assert_same_bits(got, ops.grouped_gemm_wgrad(grad, x, sizes, torch.bfloat16))


@pytest.mark.parametrize("key", ("", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"))
@pytest.mark.parametrize("kind", ("tensor", "value", "list"))
def test_wgrad_into_buffers(key: str, kind: str, device: torch.device) -> None:
    grad, x, sizes = draw(ROWS, N, device=device), draw(ROWS, K, seed=1, device=device), sizes_on(device)
    left: Any = tp.GroupedTensor(grad, sizes)
    right: Any = tp.GroupedTensor(x, sizes)
    operands, options = [grad, x], {}
    if key:
        found = [buffers(t, key, sizes, rowwise=False, columnwise=True) for t in (grad, x)]
        operands, options = wgrad_by_hand(found, (key, key))
        left, right = (tp.quantize(t, key, columnwise=True) for t in (left, right))
    for accumulate, start in ((True, draw(G, N, K, seed=2, device=device)), (False, None)):
        expected = torch.zeros(G, N, K, device=device) if start is None else start.clone()
        ops.grouped_gemm_wgrad_out(*operands, sizes, expected, accumulate, **options)
        storage = torch.full_like(expected, float("nan")) if start is None else start.clone()
        out: Any = {"tensor": storage, "value": tp.GroupedTensor(storage), "list": list(storage)}[kind]
        assert tp.grouped_gemm_wgrad(left, right, out=out, accumulate=accumulate) is out
        assert_same_bits(storage, expected)


def test_wgrad_into_the_main_grad_of_a_parameter(device: torch.device) -> None:
    """Nothing of it is recorded, also where operands or the buffer have a gradient."""
    grad, x, sizes = draw(ROWS, N, device=device), draw(ROWS, K, seed=1, device=device), sizes_on(device)
    expected = ops.grouped_gemm_wgrad(grad, x, sizes)
    rows = tp.GroupedTensor(x, sizes, requires_grad=True)
    out = tp.GroupedTensor(torch.full((G, N, K), float("nan"), device=device))
    tp.grouped_gemm_wgrad(grad.requires_grad_(), rows, out=out, accumulate=False)
    assert_same_bits(out.packed(), expected)
    assert not out.requires_grad
