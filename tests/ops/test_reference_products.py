"""References of products, and their ops, over the range of float32, including zero sizes. Powers of two on an
operand multiply the results exactly. A NaN or an infinity affects the results that use it, and no others. Results
agree with float64 within the rounding errors of float32 sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import near
from tests.ops.domain_draw import exact_scale
from tests.ops.gemm_oracle import rows_fp64, wgrad_fp64
from tests.ops.near import UNIT, Near
from tests.ops.product_axes import (
    NOT_USED,
    PRODUCTS,
    STANDS_FOR,
    Axes,
    Powers,
    Product,
    groups_of,
    interleave_of,
    multiply,
    reached,
    split_like,
    whole,
)
from tests.ops.test_norm import assert_same_numbers
from tests.ops.test_references import CASES, of_reference
from tests.ops.test_refusals import BUFFERS, copied, flat
from transformer_plugin import reference
from transformer_plugin.testing.every_op import Call
from transformer_plugin.testing.numerics import assert_rounded_sum

OPS = torch.ops.transformer_plugin
FLOAT32_ONLY = (*("alpha", "beta", "out", "bias_scale", "probs", "scale", "amax", "a_scale", "b_scale"),)
#: The same power of two for all elements of an axis; others are 0.
EVERYWHERE: list[dict[str, int]] = [
    *({"k": 120}, {"k": -120}, {"t": 100}, {"t": -90}, {"n": 100}, {"n": -90}, {"t": 60, "n": 45}),
    *({"t": -40, "n": -45}, {"G": 100}, {"G": -90}, {"A": 100}, {"A": -90}, {"B": 100}, {"B": -90}),
    *({"A": 60, "B": 45}, {"A": -40, "B": -45}, {"j": 100}, {"j": -90}, {"p": 100}, {"p": -90}, {"c": 110}),
    *(
        {"t": 110, "n": -100},
        {"c": -100},
        {"G": -45, "t": -45},
        {"G": 60, "n": 45},
        {"m": 60, "n": 45},
        {"m": -90},
    ),
]
CALLS: dict[str, list[tuple[str, Call]]] = {}
for _case in CASES:
    _call = _case.values[0]
    _format = _call.arguments.get("a_format", _call.arguments.get("grad_format", "none"))
    if "linear" in _call.op or "mlp" in _call.op:
        _format = "none"
    _product = _call.op if _format == "none" else f"{_call.op} {_format}"
    has_main_grad = "weight_grad" in _call.arguments  # its forward is that of the call without
    if _product in PRODUCTS and not has_main_grad:
        CALLS.setdefault(_product, []).append((str(_case.id), _call))
by_product = pytest.mark.parametrize("op", list(PRODUCTS))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def moderate(call: Call, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Draws magnitudes from 1/16 to 1, of either sign, with all bits of the mantissa; indices of rows are random
    and may repeat."""
    generator = torch.Generator().manual_seed(seed)

    def like(value: Tensor, name: str) -> Tensor:
        if name in ("rows", "input_rows"):
            return torch.randint(0, max(1, len(value)), value.shape, generator=generator)
        if not value.is_floating_point() or name == "amax":
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        drawn = exact_scale(
            1 + torch.rand(value.shape, generator=generator),
            torch.randint(-4, 0, value.shape, generator=generator),
        )
        if name == "scale":
            return drawn * 256
        return (signs * drawn * (256 if value.element_size() == 1 else 1)).to(
            value.dtype if value.element_size() == 1 else torch.float32 if name in FLOAT32_ONLY else dtype
        )

    arguments = copied(call.arguments)
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = [like(x, name) for x in value]
        elif isinstance(value, Tensor):
            arguments[name] = like(value, name)
    for name in ("rows", "input_rows"):
        if arguments.get(name) is not None:
            arguments[name][int(arguments["group_sizes"].sum()) :] = -2  # invalid, but not read
    return arguments


def variants(op: str, dtype: torch.dtype) -> Iterator[tuple[str, Call, dict[str, Any]]]:
    """Yields calls with moderate values."""
    for seed, (name, call) in enumerate(CALLS[op]):
        arguments = moderate(call, dtype, seed)
        yield name, call, arguments
        if "accumulate" in arguments:
            yield f"{name}, accumulate", call, {**arguments, "accumulate": True, "beta": None}


def results(function: Callable[..., Any], call: Call, arguments: dict[str, Any]) -> list[Tensor]:
    """Returns the results, then the written buffers; quantized data is dequantized."""
    inputs = copied(arguments)
    found = flat(function(inputs))
    if call.op == "grouped_gemm_activation_quantize":
        found = [reference.dequantize(*found[:2], "mxfp8", group_sizes=inputs["group_sizes"]), found[2]]
    for name in BUFFERS[call.op]:
        value = inputs.get(name)
        found += [whole(value)] if isinstance(value, list) else flat(value)
    return found


def functions(call: Call) -> list[Callable[..., Any]]:
    """Returns the reference and the op, which must have the same properties."""
    return [lambda inputs: of_reference(call, inputs), lambda inputs: call.function(**inputs)]


@dtypes
@by_product
def test_powers_of_two_multiply_results_exactly(op: str, dtype: torch.dtype) -> None:
    product = PRODUCTS[op]
    letters = {STANDS_FOR.get(x, x) for axes in product.powers.values() for along in axes for x in along}
    for name, call, drawn in variants(op, dtype):
        choices: list[tuple[dict[str, int] | None, bool]] = [(None, True), (None, False)]
        choices += [(each, False) for each in EVERYWHERE if each.keys() & letters]
        for seed, (everywhere, by_row) in enumerate(choices if name.startswith("all") else choices[:2]):
            arguments = dict(drawn)
            if by_row and "bias" in arguments and "T" in " ".join(product.powers["bias"]):
                arguments["bias"] = None
            powers = Powers(arguments, everywhere, by_row, seed)
            inputs = multiply(product, arguments, powers)
            for function in functions(call):
                before, after = (results(function, call, x) for x in (arguments, inputs))
                axes = product.of_results + ([product.powers["amax"]] if "amax" in product.powers else [])
                for index, (x, y) in enumerate(zip(before, after, strict=True)):
                    where = f"{name}, result {index}, powers {everywhere or f'by row: {by_row}'}"
                    assert bool(x.isfinite().all()), where
                    assert_same_numbers(y, powers.times(x, axes[index]), where)


@dtypes
@pytest.mark.parametrize("op", [op for op in PRODUCTS if op != "grouped_gemm_activation_quantize"])
def test_nan_and_inf_affect_exactly_the_results_that_use_them(op: str, dtype: torch.dtype) -> None:
    product = PRODUCTS[op]
    draw, infinities = torch.Generator().manual_seed(3), itertools.cycle([math.inf, -math.inf])
    for name, call, inputs in variants(op, dtype):
        if dtype != torch.float32 and not name.startswith("all"):
            continue
        for argument, axes in product.arguments.items():
            value = inputs.get(argument)
            if value is None or (whole(value) if isinstance(value, list) else value).numel() == 0:
                continue
            if argument == "b" and axes[0] == "G" and inputs.get("transpose_b") is False:
                axes = (axes[0], axes[2], axes[1])
            for number in (math.nan,) if product.nan_only else (math.nan, next(infinities)):
                changed = copied(inputs)
                tensor = whole(changed[argument]) if isinstance(value, list) else changed[argument]
                place = tuple(int(torch.randint(0, n, (), generator=draw)) for n in tensor.shape)
                tensor[place] = number
                changed[argument] = split_like(tensor, value) if isinstance(value, list) else tensor
                where = f"{name}, {number} in {argument}{list(place)}"
                assert_only_users_change(product, argument, axes, place, call, inputs, changed, where)


def assert_only_users_change(
    product: Product,
    argument: str,
    axes: Axes,
    place: tuple[int, ...],
    call: Call,
    inputs: dict[str, Any],
    changed: dict[str, Any],
    where: str,
) -> None:
    """Asserts that results which use the element are not finite, and that the others are unchanged."""
    of_nothing = argument == "alpha" and axes == ("G",) and int(inputs["group_sizes"][place[0]]) == 0
    for function in functions(call):
        before, after = (results(function, call, x) for x in (inputs, changed))
        for x, y, result in zip(before, after, product.results, strict=False):
            mask = reached(product, axes, place, result, x.shape, inputs)
            if argument == "out":  # also rows past the last group, which keep their contents
                mask[place] = True
            if (of_nothing and result[0] == "G") or (argument, result) in NOT_USED:
                mask = torch.zeros_like(mask)
            assert not bool(y[mask].isfinite().any()), f"{where} is lost"
            assert_same_numbers(y[~mask], x[~mask], where)


def spread(call: Call, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Multiplies every element by a random power of two, from 2^-12 to 2^11."""
    generator = torch.Generator().manual_seed(seed + 100)

    def scaled(value: Any) -> Any:
        if isinstance(value, list):
            return [scaled(x) for x in value]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() == 1:
            return value
        return exact_scale(value, torch.randint(-12, 12, value.shape, generator=generator))

    return {name: scaled(value) for name, value in moderate(call, dtype, seed).items()}


def in_float64(op: str, inputs: dict[str, Any], wide: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Computes the product of the arguments, after ``wide`` is applied to each; also returns the number of terms of
    each sum."""
    x = {k: whole(v) if isinstance(v, list) and v else v for k, v in inputs.items()}
    x = {k: wide(v.double()) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in x.items()}
    sizes, rows = x.get("group_sizes"), x.get("rows", x.get("input_rows"))
    if op == "gather_rows_backward":
        end = int(sizes.sum())
        sums = torch.zeros(x["num_rows"], x["grad"].shape[1], dtype=torch.float64)
        return sums.index_add_(0, x["rows"][:end], x["grad"][:end]), end
    beta, out = x.get("beta"), x.get("out")
    if op.startswith("gemm_out") and x.get("accumulate"):
        beta = torch.ones(1, dtype=torch.float64)
    if "wgrad" in op:
        taken = x["input"][rows.clamp(min=0)] if len(rows) else x["input"]
        product = wgrad_fp64(x["grad"], taken, sizes, x["alpha"])
        added = 0.0 if out is None else out if beta is None else beta[:, None, None] * out
        return product + added, len(x["grad"])
    a, b = (x.get(name, x.get(other)) for name, other in (("a", "input"), ("b", "weight")))
    if "fp8_row" in op:
        a, b = a * x["a_scale"][:, None], b * x["b_scale"][..., None]
    if rows is not None:
        a = a[rows.clamp(min=0)] if len(rows) else a
    bias = x.get("bias")
    if sizes is None:
        sizes, b, bias = torch.tensor([len(a)]), b[None], None if bias is None else bias[None]
    more = (bias, x.get("bias_scale"), x.get("transpose_b", True), x.get("alpha"))
    product = rows_fp64(a, b, sizes, *more)
    if out is not None:
        group = groups_of(len(out), sizes)
        factor = torch.cat([beta, torch.ones(1, dtype=torch.float64)])  # rows past the groups are unchanged
        product = product + factor[group][:, None] * out
    return product, a.shape[1]


@dtypes
@pytest.mark.parametrize(
    "op", [op for op in PRODUCTS if not any(x in op for x in ("scaled", "activation", "mlp"))]
)
def test_products_agree_with_float64(op: str, dtype: torch.dtype) -> None:
    for seed, (name, call) in enumerate(CALLS[op]):
        inputs = spread(call, dtype, seed)
        exact, terms = in_float64(op, inputs, lambda x: x)
        magnitude, _ = in_float64(op, inputs, torch.abs)
        for function in functions(call):
            [got] = results(function, call, inputs)
            assert_rounded_sum(got, exact, magnitude, terms + 3, name)


def near_product(
    a: Near, b: Tensor, sizes: Tensor, bias: Tensor | None, scale: Tensor | None, to: Any
) -> Near:
    """Returns a grouped product of a matrix with error bounds, rounded to a dtype."""
    value, error = torch.from_numpy(a.value), torch.from_numpy(a.error)
    exact = rows_fp64(value, b, sizes, bias, scale, True)
    absolute = [None if x is None else x.abs() for x in (bias, scale)]
    sums = rows_fp64(value.abs() + error, b.abs(), sizes, *absolute, True)
    inherited = rows_fp64(error, b.abs(), sizes, None, None, True)
    bound = inherited + (b.shape[2] + 4) * UNIT * sums + torch.finfo(to).eps * exact.abs()
    return Near(exact.numpy(), bound.numpy())


@dtypes
@pytest.mark.parametrize("op", ["grouped_gemm_activation", "grouped_mlp"])
def test_activation_of_a_product_is_within_its_bound(op: str, dtype: torch.dtype) -> None:
    for name, call, inputs in variants(op, dtype):
        sizes, probs = inputs["group_sizes"], inputs["probs"]
        inputs = {k: whole(v) if k.endswith("_weight") else v for k, v in inputs.items()}
        names = ("input", "fc1_weight", "fc1_bias") if op == "grouped_mlp" else ("a", "b", "bias")
        a, b, bias = (inputs[name] for name in names)
        h = near_product(Near.of(a * 4), b, sizes, bias, None, dtype)  # gates up to 20
        width, step = b.shape[1], interleave_of(inputs) or max(1, b.shape[1] // 2)
        is_gate = torch.arange(width) // step % 2 == 0
        act = near.swiglu(h[:, is_gate.numpy()], h[:, ~is_gate.numpy()], Near.of(probs[:, None]))
        act = Near(act.value, act.error + torch.finfo(dtype).eps * abs(act.value))
        expected = act
        if op == "grouped_mlp":
            fc2 = (inputs["fc2_weight"], sizes, inputs["fc2_bias"], probs, dtype)
            expected = near_product(act, *fc2)
        for function in functions(call):
            listed = {k: [v] for k, v in inputs.items() if k.endswith("_weight")}
            got = results(function, call, {**inputs, **listed, names[0]: a * 4})
            expected.within(got[0], name)
            if op != "grouped_mlp":
                h.within(got[1], f"{name}, h")
