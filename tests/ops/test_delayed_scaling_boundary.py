"""The ops of delayed scaling: opcheck, compilation without graph breaks, CUDA graphs, and the text of each error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.delayed_scaling_cases import (
    E4M3,
    E5M2,
    delayed_scale_cases,
    grouped_quantize_scaled_cases,
    quantize_scaled_cases,
)
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH

OPS = torch.ops.transformer_plugin
# torch 2.11 compares inputs before and after the call, and an FP8 NaN is not equal to itself: cases with NaN
# are left out.
CASES = [case for case in quantize_scaled_cases() if not case.name.startswith("special")]
NOT_DISPATCH = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", CASES + list(grouped_quantize_scaled_cases()), ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(OPS.quantize_scaled.default, arguments, test_utils=NOT_DISPATCH)
    opcheck(OPS.quantize_scaled.default, arguments, BOTH)
    stateless = (arguments[0].requires_grad_(), *arguments[1:3], None, *arguments[4:])
    opcheck(OPS.quantize_scaled.default, stateless)


@pytest.mark.parametrize("case", list(delayed_scale_cases())[::2], ids=lambda case: case.name)
def test_update_passes_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(OPS.delayed_scale.default, arguments)
    opcheck(OPS.update_delayed_scale_.default, arguments)


def three_steps(input: Tensor, sizes: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
    """Three steps that update the state in between."""
    results = []
    for i in range(3):
        scale = ops.update_delayed_scale_(*state, [E4M3, E5M2])
        one = ops.quantize_scaled(input * (i + 1), scale, E4M3, state[2], columnwise=True)
        results += [*one, *ops.quantize_scaled(input, scale, E5M2, state[2], sizes, 2)]
    return (*results, *state)


def fresh_state(device: torch.device | str) -> list[Tensor]:
    return [torch.zeros(5, 4, device=device), torch.ones(4, device=device), torch.zeros(4, device=device)]


def test_compiles_without_graph_breaks(device: torch.device) -> None:
    compiled = torch.compile(three_steps, fullgraph=True, dynamic=True)
    for rows in (130, 40):
        input = torch.randn(rows, 64, device=device)
        sizes = torch.tensor([rows - 9, 4], device=device)
        states = fresh_state(device), fresh_state(device)
        assert_same = zip(
            compiled(input, sizes, states[0]), three_steps(input, sizes, states[1]), strict=True
        )
        for got, expected in assert_same:
            assert_same_bits(got, expected)
        for got, expected in zip(*states, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
def test_graph_replays_update_the_state() -> None:
    """Each replay continues from the state of the previous one, with new data and sizes."""
    input, sizes = torch.randn(300, 130, device="cuda"), torch.tensor([100, 200], device="cuda")
    state, eager = fresh_state("cuda"), fresh_state("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        three_steps(input, sizes, fresh_state("cuda"))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = three_steps(input, sizes, state)
    for seed, now in enumerate([[0, 0], [300, 0], [129, 44]]):
        torch.manual_seed(seed)
        input.copy_(torch.randn(300, 130) * (seed + 1))
        sizes.copy_(torch.tensor(now))
        graph.replay()
        assert_all_same(captured[:2], three_steps(input, sizes, eager)[:2])
        for got, expected in zip(state, eager, strict=True):
            assert_same_bits(got, expected)


ONES, TWO = torch.ones(4, 6), torch.ones(2)
HISTORY = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (ops.quantize_scaled, (ONES.double(), TWO, E4M3), TypeError,
         "argument 'input': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with .to() "
         "first."),
        (partial(ops.quantize_scaled, **BOTH), (ONES[0], TWO, E4M3), ValueError,
         "argument 'input': expected 2 or 3 dimensions, got float32[6] on cpu. Reshape it first."),
        (ops.quantize_scaled, (ONES[None], TWO, E4M3, None, torch.tensor([1])), ValueError,
         "argument 'input': expected 2 dimensions, got float32[1, 4, 6] on cpu. Reshape it first."),
        (ops.quantize_scaled, (ONES, TWO.double(), E4M3), TypeError,
         "argument 'scale': expected one of the dtypes float32, got float64. Convert it with .to() first."),
        (ops.quantize_scaled, (ONES, TWO[None], E4M3), ValueError,
         "argument 'scale': expected 1 dimensions, got float32[1, 2] on cpu. Reshape it first."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, torch.ones(4)[::2]), ValueError,
         "argument 'amax': expected a contiguous tensor, got float32[2] on cpu with strides [2]. Call .contiguous() on "
         "it first."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, TWO[:1], None, 1), ValueError,
         "argument 'amax': expected at least 2 entries, of which this call has those from 1 on, got float32[1] on "
         "cpu. Pass one for each tensor or group."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, None, torch.tensor([1, 1, 2])), ValueError,
         "argument 'scale': expected at least 3 entries, of which this call has those from 0 on, got float32[2] on "
         "cpu. Pass one for each tensor or group."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, None, None, -1), ValueError,
         "argument 'first': expected an index that is not negative, got -1. Pass where the scales of this input "
         "begin."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, TWO, None, 2**63 - 1), ValueError,
         "argument 'first': expected an index below 2**31, got 9223372036854775807. Pass where the scales of this "
         "input begin."),
        (ops.quantize_scaled, (ONES, TWO, E4M3, TWO, None, 2**31 - 1), ValueError,
         "argument 'scale': expected at least 2147483648 entries, of which this call has those from 2147483647 on, got "
         "float32[2] on cpu. Pass one for each tensor or group."),
        (ops.quantize_scaled, (ONES, TWO, "fp8_tensor:pow2"), ValueError,
         "argument 'format': expected fp8_tensor:e4m3 or fp8_tensor:e5m2, without pow2 or eps, got 'fp8_tensor:pow2'. "
         "The scale is given: pow2 and eps are for scales that come from the data."),
        (partial(ops.quantize_scaled, **BOTH), (ONES, TWO, E4M3, None, torch.tensor([1, 9])), ValueError,
         "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 10 at "
         "group 1. Enlarge the buffer or fix the sizes."),
        (ops.update_delayed_scale_, (HISTORY[0], TWO, TWO, [E4M3]), ValueError,
         "argument 'history': expected 2 dimensions, got float32[2] on cpu. Reshape it first."),
        (ops.update_delayed_scale_, (HISTORY[:0], TWO, TWO, [E4M3]), ValueError,
         "argument 'history': expected at least 1 row, got float32[0, 2] on cpu. Make it of zeros, a row for each step "
         "to remember."),
        (ops.update_delayed_scale_, (HISTORY, TWO.half(), TWO, [E4M3]), TypeError,
         "argument 'scale': expected one of the dtypes float32, got float16. Convert it with .to() first."),
        (ops.update_delayed_scale_, (HISTORY, TWO, torch.ones(3), [E4M3]), ValueError,
         "argument 'amax': expected size 2 in dimension 0 (the columns of 'history'), got float32[3] on cpu. Pass "
         "tensors whose sizes agree."),
        (ops.update_delayed_scale_, (HISTORY.T, torch.ones(3), torch.ones(3), [E4M3]), ValueError,
         "argument 'history': expected a contiguous tensor, got float32[2, 3] on cpu with strides [1, 2]. Call "
         ".contiguous() on it first."),
        (ops.update_delayed_scale_, (HISTORY, TWO, TWO, [E4M3] * 3), ValueError,
         "argument 'formats': expected 1 to 16 keys, each for as many of the tensors in a row, got 3 for 2 tensors. "
         "Split the call."),
        (ops.delayed_scale, (HISTORY, TWO, TWO, []), ValueError,
         "argument 'formats': expected 1 to 16 keys, each for as many of the tensors in a row, got 0 for 2 tensors. "
         "Split the call."),
        (ops.delayed_scale, (HISTORY, TWO, TWO, ["mxfp8"]), ValueError,
         "argument 'formats': expected fp8_tensor:e4m3 or fp8_tensor:e5m2, without pow2 or eps, got 'mxfp8'. The scale "
         "is given: pow2 and eps are for scales that come from the data."),
        (ops.delayed_scale, (HISTORY, TWO, TWO, [E4M3], 101), ValueError,
         "argument 'margin': expected a number from -100 to 100, got 101. It divides the scale by 2^margin; 0 is "
         "usual."),
        (ops.delayed_scale, (HISTORY, TWO, TWO, [E4M3], 0, "mean"), ValueError,
         "argument 'algorithm': expected 'max' or 'most_recent', got 'mean'. Choose one of them."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(
    op: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(error) as caught:
        op(*arguments)
    assert str(caught.value) == f"transformer_plugin::{getattr(op, 'func', op).__name__}: {text}"
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now, then)
