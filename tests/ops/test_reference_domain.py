"""References over the whole range of their inputs, including zero sizes: compared with their ops, and with
independent arithmetic. Products are in test_reference_products.py, routing is in test_routing_range.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops import near, oracles, quantize_oracle
from tests.ops.domain_draw import KINDS, exact_scale, numbers, redrawn
from tests.ops.near import Near
from tests.ops.product_axes import PRODUCTS
from tests.ops.test_bias_backward import sums_of
from tests.ops.test_norm import Exact, assert_same_numbers
from tests.ops.test_references import CASES, of_reference
from tests.ops.test_refusals import BUFFERS, copied, flat
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.reference import activations
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.every_op import Call
from transformer_plugin.testing.quantize_cases import COLUMNS

OPS = torch.ops.transformer_plugin
#: The calls of each reference, for every set of sizes.
CALLS: dict[str, list[tuple[str, Call]]] = {}
for _case in CASES:
    CALLS.setdefault(_case.values[0].op, []).append((str(_case.id), _case.values[0]))
#: Ops that agree within rounding errors, not to the bit: they use exp, or a sum without a documented order.
#: Products are in test_reference_products.py, norm_linear is in test_norm_linear.py. Layers that write into a buffer
#: have the bits of the layers, with which test_layer_out.py compares them.
WITHIN = ("activation", "activation_backward", "grouped_bias_backward", "norm_linear")
WITHIN += ("linear_out", "grouped_linear_out", "grouped_mlp_out")
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def compared(call: Call, arguments: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of what the op and the reference return and write."""
    mine, other = copied(arguments), copied(arguments)
    # The wrapper omits the empty tensors that the registered op returns.
    op = ops.quantize_scaled if call.op == "quantize_scaled" else call.function
    found, expected = op(**mine), of_reference(call, other)
    pairs = list(zip(flat(found), flat(expected), strict=True))
    for name in BUFFERS[call.op]:
        pairs += zip(flat(mine.get(name)), flat(other.get(name)), strict=True)
    return pairs


@kinds
@pytest.mark.parametrize("op", sorted(CALLS.keys() - PRODUCTS.keys() - set(WITHIN)))
def test_reference_has_the_bits_of_the_op(op: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits; references that quantize an activation use the op's own, whose exp differs in the last bit."""
    if op.startswith("activation_"):
        monkeypatch.setattr(activations, "activation", OPS.activation)
        monkeypatch.setattr(activations, "activation_backward", OPS.activation_backward)
    for index, (name, call) in enumerate(CALLS[op]):
        for dtype in FLOAT_DTYPES if name.startswith("all") else [FLOAT_DTYPES[index % 3]]:
            for position, (got, expected) in enumerate(compared(call, redrawn(call, kind, dtype, index))):
                where = f"{name}, {dtype}, output {position}"
                if got.element_size() == 1:
                    got, expected = got.view(torch.uint8), expected.view(torch.uint8)
                assert_same_numbers(got, expected, where)


def test_every_reference_is_tested() -> None:
    assert set(WITHIN) < CALLS.keys() and {name.split()[0] for name in PRODUCTS} < CALLS.keys()


def implementations(call: Call) -> list[Any]:
    """Returns the reference and the op, both of which are compared with the arithmetic of a test."""
    return [getattr(reference, call.packet), call.function]


def of_swiglu(op: str) -> list[tuple[str, Call]]:
    return [(name, call) for name, call in CALLS[op] if "activation" not in call.arguments]


@kinds
@dtypes
def test_swiglu(kind: str, dtype: torch.dtype) -> None:
    for seed, (name, call) in enumerate(of_swiglu("activation") * 2):
        arguments = with_moderate_gates(redrawn(call, kind, dtype, seed), seed)
        gate, linear = (Near.of(half) for half in arguments["input"].chunk(2, 1))
        expected = near.swiglu(gate, linear, Near.of(arguments["probs"][:, None]))
        for function in implementations(call):
            expected.within(function(**arguments), name)


@kinds
@dtypes
def test_swiglu_backward(kind: str, dtype: torch.dtype) -> None:
    for seed, (name, call) in enumerate(of_swiglu("activation_backward") * 2):
        arguments = with_moderate_gates(redrawn(call, kind, dtype, seed), seed)
        gate, linear = (Near.of(half) for half in arguments["input"].chunk(2, 1))
        prob = Near.of(arguments["probs"][:, None])
        *halves, terms = near.swiglu_backward(Near.of(arguments["grad"]), gate, linear, prob)
        for function in implementations(call):
            grad_input, grad_probs = function(**arguments)
            near.concatenated(*halves).within(grad_input, f"{name}, input")
            near.row_sums(terms).within(grad_probs, f"{name}, probs")


def with_moderate_gates(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """For odd seeds, replaces the gates by values up to 100, where the sigmoid is not only 0, a half or 1."""
    if seed % 2:
        gate = arguments["input"].chunk(2, 1)[0]
        gate.copy_(torch.rand(gate.shape, generator=generator(seed)) * 200 - 100)
    return arguments


@kinds
@dtypes
def test_bias_gradients_agree_with_documented_order_and_float64(kind: str, dtype: torch.dtype) -> None:
    """Column sums have the documented order. Row sums have none, and are compared with float64 where no partial sum
    can overflow."""
    for seed, (name, call) in enumerate(CALLS["bias_backward"]):
        grad = redrawn(call, kind, dtype, seed)["grad"]
        grad[:, :2] = -0.0
        for function in implementations(call):
            assert_same_numbers(function(grad), sums_of(grad), name)
    for seed, (name, call) in enumerate(CALLS["grouped_bias_backward"]):
        arguments = redrawn(call, kind, dtype, seed)
        grad, bias, scale = (arguments[x] for x in ("grad", "bias", "bias_scale"))
        sizes = arguments["group_sizes"].tolist()
        group = torch.arange(len(sizes)).repeat_interleave(arguments["group_sizes"])
        columns = sums_of(grad.float() * scale[:, None], sizes)
        terms = (grad[: len(group)].float() * bias[group].float()).double()
        exact, size = terms.sum(1), terms.abs().sum(1)
        decided = ~((size >= 2.0**127) & terms.isfinite().all(1))
        bound = (terms.shape[1] + 2) * (2.0**-24 * size + 2.0**-150)
        for function in implementations(call):
            grad_bias, grad_scale = function(**arguments)
            assert_same_numbers(grad_bias, columns, name)
            got = grad_scale[: len(group)].double()
            good = ((got - exact).abs() <= bound) | (got == exact) | (got.isnan() & exact.isnan())
            assert (good | ~decided).all() and decided.sum() >= len(decided) // 4, name
            assert not grad_scale[len(group) :].any(), name


@kinds
@dtypes
@pytest.mark.parametrize("format", oracles.FORMATS)
def test_quantized_bytes_agree_with_the_oracle(format: str, kind: str, dtype: torch.dtype) -> None:
    """Compares with numpy: dense matrices and groups, amaxes of the matrix and others."""
    of_nv = format.startswith("nvfp4")
    for seed, (rows, columns, groups) in enumerate(
        [(32, 160, (16, 0, 16)), (48, 64, (16,)), (0, 32, (0,)), (16, 0, (16,)), (16, 32, ())]
    ):
        input = numbers(kind, (rows, columns), dtype, generator(seed))
        sizes = torch.tensor(groups, dtype=torch.int64)
        for of_groups in (None, *([] if "square" in format else [sizes])):
            extras: dict[str, Tensor] = {}
            if of_nv:
                extras = dict(
                    zip(
                        ("amax", "amax_t"),
                        reference.amax(input, format, of_groups, columnwise=True),
                        strict=True,
                    )
                )
                extras = {k: v * (1.0, 0.25, 64.0)[seed % 3] for k, v in extras.items()}
                if Format.parse(format).stochastic_rounding:
                    extras["seed"] = torch.tensor([seed])
            if of_groups is None:
                expected = oracles.both(input, format, extras)
                got = reference.quantize(input, format, **extras, columnwise=True)
            else:
                expected = oracles.grouped_both(input, list(groups), format, extras)
                got = reference.quantize(input, format, sizes, **extras, columnwise=True)
            quantize_oracle.assert_all_same(got, expected)


@kinds
@dtypes
@pytest.mark.parametrize("format", [f for f in oracles.FORMATS if "square" not in f and "rht" not in f])
def test_dequantize_random_bit_patterns(format: str, kind: str, dtype: torch.dtype) -> None:
    """Random bit patterns and any scales: the table's value times the scale in float32."""
    for seed, (rows, columns) in enumerate([(32, 160), (48, 64), (0, 32), (16, 0)]):
        like = torch.zeros(rows, columns, dtype=dtype)
        extras = {"amax": reference.amax(like, format)} if format.startswith("nvfp4") else {}
        rounding = {"seed": torch.tensor([1])} if Format.parse(format).stochastic_rounding else {}
        data, scale = reference.quantize(like, format, **extras, **rounding)
        draw = generator(seed)
        data = torch.randint(0, 256, data.shape, generator=draw, dtype=torch.uint8).view(data.dtype)
        if scale.element_size() == 1:
            bytes = torch.randint(0, 256, scale.shape, generator=draw, dtype=torch.uint8)
            scale = bytes.view(scale.dtype)
        else:
            scale = numbers(kind, tuple(scale.shape), torch.float32, draw)
        if extras:
            extras["amax"] = numbers(kind, tuple(extras["amax"].shape), torch.float32, draw).abs()
        with np.errstate(all="ignore"):
            expected = oracles.dequantized(data, scale, format, extras.get("amax"), dtype)
        assert_same_numbers(reference.dequantize(data, scale, format, dtype, **extras), expected)


@kinds
@dtypes
def test_delayed_scaling_agrees_with_python(kind: str, dtype: torch.dtype) -> None:
    """Quantized data from numpy, and the rule of the next scale in Python's numbers."""
    for seed, (rows, columns) in enumerate([(32, 24), (5, 1), (0, 3), (4, 0)]):
        input = numbers(kind, (rows, columns), dtype, generator(seed))
        scale = numbers(kind, (3,), torch.float32, generator(seed + 50))
        for element in ("e4m3", "e5m2"):
            state = torch.tensor([0.0, 2.0**-140, 7.0])
            with np.errstate(all="ignore"):
                bits = quantize_oracle.round_to_fp8(input.float().numpy() * scale[1].numpy(), element)
                inverse = torch.from_numpy(np.float32(1) / scale[1:2].numpy())
            own = [abs(x) for x in input.flatten().tolist() if x == x]
            data, scale_inv = reference.quantize_scaled(input, scale, f"fp8_tensor:{element}", state, first=1)
            assert np.array_equal(data.view(torch.uint8).numpy(), bits)
            assert_same_numbers(scale_inv, inverse)
            assert state.tolist() == [0.0, max([2.0**-140, *own]), 7.0]
    for algorithm in ("max", "most_recent"):
        history, amax = (numbers(kind, s, torch.float32, generator(9)).abs() for s in ((4, 40), (40,)))
        history[:, :5], amax[3:8] = 0.0, 0.0
        history[:, 10:14], amax[10:14], history[2, 10:12] = math.nan, 2.0**-20, 2.0**-18
        scale = numbers(kind, (40,), torch.float32, generator(11)).abs()
        formats = ["fp8_tensor:e4m3", "fp8_tensor:e5m2"]
        got = reference.delayed_scale(history, scale, amax, formats, 2, algorithm)
        expected = [
            next_scale(history[:, i].tolist(), scale[i].item(), amax[i].item(), i >= 20, algorithm)
            for i in range(40)
        ]
        assert_same_numbers(got, torch.tensor(expected))


def next_scale(history: list[float], scale: float, amax: float, is_e5m2: bool, algorithm: str) -> float:
    """Returns the next scale, with margin 2. The newest value is the amax, or if that is 0, the first entry of the
    history."""
    last = amax if amax != 0 else history[0]
    window = [x for x in [*history[1:], last] if x == x]
    chosen = last if algorithm == "most_recent" else max(window, default=0.0)
    largest = float(np.finfo(np.float32).max)
    if last == 0 or not 0 < chosen < math.inf:
        return scale if scale != scale else min(scale, largest)
    with np.errstate(over="ignore"):
        wanted = np.float32((57344.0 if is_e5m2 else 448.0) / 4) / np.float32(chosen)
    return min(float(wanted), largest)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[:2], ids=str)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norms_agree_with_float64(centered: bool, dtype: torch.dtype) -> None:
    """Rows of any magnitude whose squares do not overflow float32."""
    name = "layer_norm" if centered else "rms_norm"
    for seed, (rows, columns) in enumerate([(40, 96), (7, 1), (0, 8), (9, 1500)]):
        draw = generator(seed)
        powers = torch.randint(-50, 50, (rows, 1), generator=draw)
        input = exact_scale(torch.randn(rows, columns, generator=draw).to(dtype), powers)
        weight, *bias = (
            exact_scale(
                torch.randn(columns, generator=draw).to(dtype),
                torch.randint(-9, 9, (columns,), generator=draw),
            )
            for _ in range(1 + centered)
        )
        grad = exact_scale(
            torch.randn(rows, columns, generator=draw).to(dtype),
            torch.randint(-20, 20, (rows, 1), generator=draw),
        )
        eps = 0.0 if columns > 1 and seed % 2 == 0 else 2.0**-90
        exact = Exact((input, weight, *bias, eps, True), centered)
        output, *stats = getattr(reference, f"{name}_forward")(input, weight, *bias, eps, True)
        exact.assert_output(output)
        flags = (True, True) if centered else (True,)
        got = getattr(reference, f"{name}_backward")(grad, input, weight, *stats, *flags)
        exact.assert_gradients(list(got), grad)


@kinds
@dtypes
def test_amax_agrees_with_python(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, columns, groups) in enumerate(
        [(33, 7, (5, 0, 20)), (0, 4, (0,)), (4, 0, (4,)), (6, 3, ())]
    ):
        input = numbers(kind, (rows, columns), dtype, generator(seed))

        def largest(part: Tensor) -> float:
            return max((abs(x) for x in part.flatten().tolist() if x == x), default=0.0)

        parts = list(input[: sum(groups)].split(list(groups))) if groups else []
        sizes = torch.tensor(groups, dtype=torch.int64)
        for flags in ({}, COLUMNS):
            assert reference.amax(input, "fp8_tensor", **flags).tolist() == [largest(input)]
            found = reference.amax(input, "fp8_tensor", sizes, **flags)
            assert found.tolist() == [largest(part) for part in parts]
