"""Delayed scaling: quantized data from the scales passed in, the amaxes collected in the same pass, and the update
between steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.quantize_oracle import DTYPES, as_numpy, assert_all_same, round_to_fp8
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.delayed_scaling_cases import (
    E4M3,
    E5M2,
    delayed_scale_cases,
    grouped_quantize_scaled_cases,
    quantize_scaled_cases,
)
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS

CASES = [*quantize_scaled_cases(), *grouped_quantize_scaled_cases()]
STATES = list(delayed_scale_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_state = pytest.mark.parametrize("case", STATES, ids=lambda case: case.name)
FLT_MAX = np.float32(3.4028234663852886e38)
INF, NAN = float("inf"), float("nan")


def scaled_parts(input: Tensor, group_sizes: Tensor | None) -> list[tuple[slice | int, np.ndarray]]:
    """Returns the parts that have separate scales: the index of each part and its float32 values."""
    values = as_numpy(input)
    if group_sizes is None:
        return list(enumerate(values)) if input.dim() == 3 else [(slice(None), values)]
    ends = group_sizes.cpu().cumsum(0).tolist()
    starts = [0, *ends][: len(ends)]
    return [(slice(a, b), values[a:b]) for a, b in zip(starts, ends, strict=True)]


def quantized(
    input: Tensor, scale: Tensor, format: str, amax: Tensor, group_sizes: Tensor | None, first: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the four outputs, computed in numpy, and the amax state after the call."""
    element, scales = format.split(":")[1], scale.cpu().numpy()
    state = amax.cpu().numpy().copy()
    bits = np.zeros(input.shape, np.uint8)
    parts = scaled_parts(input, group_sizes)
    for i, (where, values) in enumerate(parts):
        with np.errstate(over="ignore", invalid="ignore"):
            bits[where] = round_to_fp8(values * scales[first + i], element)
        numbers = np.abs(values[~np.isnan(values)])
        state[first + i] = max(state[first + i], numbers.max() if numbers.size else 0)
    with np.errstate(over="ignore", divide="ignore"):
        scale_inv = torch.from_numpy(np.float32(1) / scales[first : first + len(parts)])
    transposed = np.ascontiguousarray(np.swapaxes(bits, -1, -2))
    data, data_t = (torch.from_numpy(c).view(DTYPES[element]) for c in (bits, transposed))
    return (data, scale_inv, data_t, scale_inv), torch.from_numpy(state)


@by_case
def test_quantize_scaled(case: Case, device: torch.device) -> None:
    input, scale, format, amax, group_sizes, first = case.arguments(device)
    expected, after = quantized(input, scale, format, amax, group_sizes, first)
    for flags, wanted in (({}, expected[:2]), (COLUMNS, expected[2:]), (BOTH, expected)):
        for family in (ops, reference):
            state = amax.clone()
            got = family.quantize_scaled(input, scale, format, state, group_sizes, first, **flags)
            assert_all_same(got, wanted)
            assert_same_bits(state.cpu(), after, "amax")
    assert_all_same(ops.quantize_scaled(input, scale, format, None, group_sizes, first), expected[:2])


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [1.0, 0.37, 448.0, 2.0**-130, 3.4e38, 0.0])
def test_every_bfloat16_value(format: str, factor: float, device: torch.device) -> None:
    """All 65,536 bit patterns, with scales that overflow and underflow."""
    input = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(256, 256).to(device)
    scale, amax = torch.tensor([factor], device=device), torch.zeros(1, device=device)
    expected, _ = quantized(input, scale, format, amax, None, 0)
    assert_all_same(ops.quantize_scaled(input, scale, format, amax, columnwise=True), expected)
    assert amax.item() == INF


def test_scale_of_the_data_gives_the_bytes_of_quantize(device: torch.device) -> None:
    input = torch.randn(300, 130, device=device)
    sizes = torch.tensor([100, 0, 150], device=device)
    for format in (E4M3, E5M2):
        largest = 448.0 if format == E4M3 else 57344.0
        scale = torch.full((1,), largest, device=device) / input.abs().amax()
        assert_all_same(
            ops.quantize_scaled(input, scale, format, columnwise=True),
            ops.quantize(input, format, columnwise=True),
        )
        tops = torch.stack(
            [input[:100].abs().amax(), torch.tensor(largest).to(device), input[100:250].abs().amax()]
        )
        assert_all_same(
            ops.quantize_scaled(
                input, torch.full_like(tops, largest) / tops, format, group_sizes=sizes, columnwise=True
            ),
            ops.quantize(input, format, sizes, columnwise=True),
        )


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(40, 600, device=device).bfloat16()
    scale = torch.tensor([17.0], device=device)
    for input in (wide[:, ::2], wide.T, torch.ones((), device=device).expand(130, 36), wide[3:17, 5:200]):
        amax, wanted = torch.zeros(1, device=device), torch.zeros(1, device=device)
        got = ops.quantize_scaled(input, scale, E4M3, amax, columnwise=True)
        assert_all_same(
            got,
            ops.quantize_scaled(
                input.clone(memory_format=torch.contiguous_format), scale, E4M3, wanted, columnwise=True
            ),
        )
        assert_same_bits(amax, wanted)


def test_amax_keeps_its_autograd_version(device: torch.device) -> None:
    """The amax may be saved for a backward that updates it."""
    amax = torch.zeros(3, device=device)
    input = torch.randn(4, 8, device=device, requires_grad=True)
    outputs = ops.quantize_scaled(input, torch.ones(3, device=device), E5M2, amax, first=1, columnwise=True)
    assert amax[1] > 0 and amax._version == 0 and not any(o.requires_grad for o in outputs)


# The update of the scales.


def updated(
    history: np.ndarray, scale: float, amax: float, largest: float, algorithm: str
) -> tuple[np.ndarray, np.float32]:
    """Returns the history and scale of one tensor after an update, computed from the rule one number at a time."""
    last = np.float32(amax if amax != 0 else history[0])
    if last == 0:
        return history, np.float32(scale)
    window = [*history[1:], last]
    if algorithm == "max":
        numbers = [value for value in window if not math.isnan(value)]
        chosen = max(numbers) if numbers else 0.0
    else:
        chosen = last
    if math.isfinite(chosen) and chosen > 0:
        with np.errstate(over="ignore"):
            scale = np.float32(largest) / np.float32(chosen)
    window[0] = 0.0
    return np.array(window, np.float32), min(np.float32(scale), FLT_MAX)


@by_state
def test_update(case: Case, device: torch.device) -> None:
    history, scale, amax, formats, margin, algorithm = case.arguments(device)
    per_format = len(scale) // len(formats)
    for _ in range(3):  # the second update has an amax of 0 and uses the first entry of the history
        columns = []
        for t in range(len(scale)):
            largest = (448.0 if formats[t // per_format] == E4M3 else 57344.0) * 2.0**-margin
            columns.append(
                updated(history[:, t].cpu().numpy(), scale[t].item(), amax[t].item(), largest, algorithm)
            )
        wanted_history = torch.from_numpy(np.stack([h for h, _ in columns], 1))
        wanted_scale = torch.from_numpy(np.array([s for _, s in columns], np.float32))
        before = [t.clone() for t in (history, scale, amax)]
        only = ops.delayed_scale(history, scale, amax, formats, margin, algorithm)
        for tensor, then in zip((history, scale, amax), before, strict=True):
            assert_same_bits(tensor, then, "delayed_scale writes nothing")
        meant = [t.clone() for t in before]
        assert_same_bits(
            reference.update_delayed_scale_(*meant, formats, margin, algorithm).cpu(),
            wanted_scale,
            "reference",
        )
        assert_same_bits(reference.delayed_scale(*before, formats, margin, algorithm).cpu(), wanted_scale)
        got = ops.update_delayed_scale_(history, scale, amax, formats, margin, algorithm)
        for name, tensors, wanted in (
            ("copy", [got, only], wanted_scale),
            ("scale", [scale, meant[1]], wanted_scale),
            ("history", [history, meant[0]], wanted_history),
            ("amax", [amax, meant[2]], torch.zeros(len(scale))),
        ):
            for tensor in tensors:
                assert_same_bits(tensor.cpu(), wanted, name)
        assert got.data_ptr() != scale.data_ptr()


@pytest.mark.parametrize(("format", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_of_extreme_amaxes(format: str, largest: float, algorithm: str, device: torch.device) -> None:
    """The expected scales are those of TransformerEngine's tests of delayed scaling."""
    tiny = float(np.float32(largest) / FLT_MAX / np.float32(2))
    scenarios = [(0.0, 1.0), (tiny, float(FLT_MAX)), (3.0, largest / 3), (INF, 1.0), (NAN, 1.0)]
    amax = torch.tensor([a for a, _ in scenarios], device=device)
    history, scale = torch.zeros(4, 5, device=device), torch.ones(5, device=device)
    got = ops.update_delayed_scale_(history, scale, amax, [format], 0, algorithm)
    assert_same_bits(got.cpu(), torch.tensor([s for _, s in scenarios]))


def test_sequence_of_updates_by_hand(device: torch.device) -> None:
    """With a history of three, an amax of 4 counts for three more steps, a step with amax 0 is skipped, and an
    infinite amax leaves the scale unchanged while it is in the history."""
    steps = [
        # amax, history after the update, divisor of 448
        (4.0, [0, 0, 4], 4),
        (1.0, [0, 4, 1], 4),
        (0.0, [0, 4, 1], 4),
        (2.0, [0, 1, 2], 4),  # 4 is the oldest entry: it counts once more and is then removed
        (1.0, [0, 2, 1], 2),
        (INF, [0, 1, INF], 2),
        (8.0, [0, INF, 8], 2),
        (2.0, [0, 8, 2], 2),
        (2.0, [0, 2, 2], 8),
    ]
    history, scale = torch.zeros(3, 1, device=device), torch.ones(1, device=device)
    for amax, after, divisor in steps:
        ops.update_delayed_scale_(history, scale, torch.tensor([amax], device=device), [E4M3])
        assert history.flatten().tolist() == after and scale.item() == 448 / divisor, amax


def test_margin_halves_the_scale(device: torch.device) -> None:
    for margin in (-100, -3, 0, 1, 5, 100):
        amax = torch.tensor([3.0], device=device)
        state = torch.zeros(2, 1, device=device), torch.ones(1, device=device), amax
        got = ops.update_delayed_scale_(*state, [E5M2], margin)
        assert got.item() == np.float32(57344.0 * 2.0**-margin) / np.float32(3)
