"""Ten thousand random grouped products: any groups, sizes, dtypes, formats, factors, indices, strides and buffers.

Each is compared with the float64 product of its operands' values: to the bit if they are whole numbers, otherwise
within the bound of an FP32 sum, or of FP8 tensor cores, rounded once. Other tests check the values of a format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import rows_fp64, rows_in_units, wgrad_fp64, wgrad_in_units
from tests.ops.grouped_draw import (
    Draw,
    Groups,
    assert_bits,
    is_whole,
    memory_around,
    quantize_operand,
    values_of,
)
from tests.ops.test_linear_ops import NONE, RECIPES, keys
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.gemm_cases import in_fp8_units, quantized_arguments, wgrad_arguments
from transformer_plugin.testing.numerics import assert_rounded_sum

# Cases by default; and, for each product, parts that can run on several workers, and cases of each part.
FEW, PARTS, CASES = 30, 20, 100
BLOCKS = [("fp8_block", "fp8_block:square"), ("fp8_block:fp32", "fp8_block:fp32,square")]
OTHERS = [
    ("fp8_block:e5m2", "fp8_block"),
    ("fp8_block", "fp8_block"),
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_tensor:e5m2,pow2", "fp8_tensor:pow2"),
    ("mxfp8", "mxfp8:square"),
    ("mxfp8:e5m2,tiled", "mxfp8:tiled"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:row_scaled,4over6", "nvfp4:tiled"),
    ("mxfp8", "fp8_block"),
]
PAIRS = [*BLOCKS * 4, *OTHERS]
ROUNDED_SCALES = 8  # roundings of dequantized values, factors and biases, in addition to those of the sum


class Product(NamedTuple):
    """One product: how to call it, with a new result or into a buffer, and its exact value in float64."""

    op: str
    operands: tuple[Any, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtypes: tuple[torch.dtype, ...]
    exact: Tensor
    magnitude: Tensor
    terms: int
    #: The error of FP8 tensor cores if they compute a result of this dtype.
    away: Callable[[torch.dtype], Tensor | float]

    def call(self) -> Tensor:
        return getattr(ops, self.op)(*self.operands, dtype=self.dtype, **self.options)

    def call_out(self, out: Tensor, **more: Any) -> None:
        getattr(ops, self.op + "_out")(*self.operands, out=out, **self.options, **more)


def no_error(_: torch.dtype) -> float:
    return 0.0


def compare(draw: Draw, got: Tensor, product: Product, exact: Tensor, magnitude: Tensor, away: Any) -> None:
    if draw.whole:
        assert_bits(got + 0, (exact + 0.0).to(got.dtype), "output")
    else:
        assert_rounded_sum(got, exact, magnitude, product.terms, more=away)


def initial_values(draw: Draw, out: Tensor, groups: Groups) -> tuple[dict[str, Any], Tensor]:
    """Returns options for the use of the buffer, and what they add in float64. Elements not to be read become NaN."""
    of_weights = out.dim() == 3
    mode = draw.random.choice(["over", "beta", "add"] if of_weights else ["over", "beta"])
    if mode == "add":
        return {}, out.double()
    beta = draw.factors(groups.count) if mode == "beta" else None
    more: dict[str, Any] = {"accumulate": False} if of_weights else {}
    if beta is None:
        out.fill_(float("nan"))
        return more, torch.zeros_like(out, dtype=torch.float64)
    if of_weights:
        each = beta[:, None, None]
    else:  # rows past the groups are unchanged
        each = torch.ones(groups.capacity, 1, device=draw.device)
        each[: groups.end, 0] = beta.repeat_interleave(groups.device, output_size=groups.end)
    unread = (each == 0).expand(out.shape)
    initial = (out.double() * each.double()).masked_fill(unread, 0.0)
    out.masked_fill_(unread, float("nan"))
    return {**more, "beta": beta}, initial


def check_product(draw: Draw, product: Product, groups: Groups) -> None:
    if draw.maybe(0.4):
        got = product.call()
        assert got.dtype == product.dtype
        compare(draw, got, product, product.exact, product.magnitude, product.away(got.dtype))
        tail = torch.zeros_like(got)
    else:
        out = draw.buffer(
            *product.shape, dtype=draw.random.choice([d for d in product.out_dtypes if d in draw.dtypes])
        )
        more, initial = initial_values(draw, out, groups)
        around, version, tail = memory_around(out), out._version, out.clone()
        product.call_out(out, **more)
        assert out._version == version
        assert_bits(memory_around(out), around, "the memory around the buffer")
        added = more.get("accumulate", True) and len(product.shape) == 3
        rounded_after = added and out.dtype != torch.float32
        in_units = is_whole(out) and not rounded_after
        away = product.away(out.dtype) if in_units else 0.0
        compare(draw, out, product, product.exact + initial, product.magnitude + initial.abs(), away)
        got, tail = out, tail if "beta" in more else torch.zeros_like(tail)
    if got.dim() == 2:
        assert_bits(got[groups.end :], tail[groups.end :], "tail")


def with_bias(draw: Draw, groups: Groups, n: int) -> dict[str, Tensor | None]:
    bias = draw.tensor(groups.count, n, dtype=draw.random.choice(draw.dtypes)) if draw.maybe() else None
    scale = draw.tensor(groups.capacity) / 4 if bias is not None and draw.maybe() else None
    if scale is not None:
        scale[groups.end :] = float("nan")
    return {"bias": bias, "bias_scale": scale, "alpha": draw.factors(groups.count)}


def absolute(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.abs()


def rows_product(
    op: str,
    operands: tuple[Any, ...],
    options: dict[str, Any],
    values: tuple[Tensor, Tensor],
    groups: Groups,
    dtype: torch.dtype,
    units: Callable[[torch.dtype], bool],
) -> Product:
    """Returns the product of each row with its group's matrix; ``values`` are the dequantized operands."""
    a, b = values
    extra = [options[name] for name in ("bias", "bias_scale")]
    alpha, transpose_b = options["alpha"], options["transpose_b"]
    exact = rows_fp64(a, b, groups.host, *extra, transpose_b, alpha)
    above = [absolute(t) for t in (*extra, alpha)]
    magnitude = rows_fp64(a.abs(), b.abs(), groups.host, *above[:2], transpose_b, above[2])

    def away(out: torch.dtype) -> Tensor | float:
        return rows_in_units(a, b, groups.host, transpose_b, alpha) if units(out) else 0.0

    shape, terms, outs = tuple(exact.shape), a.shape[1] + ROUNDED_SCALES, (torch.bfloat16, *FLOAT_DTYPES)
    return Product(op, operands, options, shape, dtype, outs, exact, magnitude, terms, away)


def wgrad_product(
    op: str,
    operands: tuple[Any, ...],
    options: dict[str, Any],
    values: tuple[Tensor, Tensor],
    groups: Groups,
    dtype: torch.dtype,
    units: Callable[[torch.dtype], bool],
) -> Product:
    """Returns the product of each group's rows, transposed, with the rows of the other operand."""
    grad, input = values
    alpha = options["alpha"]
    exact = wgrad_fp64(grad, input, groups.host, alpha)
    magnitude = wgrad_fp64(grad.abs(), input.abs(), groups.host, absolute(alpha))

    def away(out: torch.dtype) -> Tensor | float:
        return wgrad_in_units(grad, input, groups.host, alpha) if units(out) else 0.0

    shape, terms, outs = tuple(exact.shape), groups.longest + ROUNDED_SCALES, (torch.float32, torch.bfloat16)
    return Product(op, operands, options, shape, dtype, outs, exact, magnitude, terms, away)


def never(_: torch.dtype) -> bool:
    return False


def grouped_gemm(draw: Draw) -> tuple[Product, Groups]:
    dtype, groups = draw.random.choice(draw.dtypes), draw.groups()
    n, k, transpose_b = draw.width(), draw.width(), draw.maybe()
    a = copy = draw.matrix(groups, k, dtype)
    rows = None
    if draw.maybe(0.3):
        a, rows, copy = draw.rows_of(groups, k, dtype)
    b = draw.operand(groups.count, *((n, k) if transpose_b else (k, n)), dtype=dtype)
    options = {**with_bias(draw, groups, n), "transpose_b": transpose_b, "rows": rows}
    to = draw.random.choice([dtype, dtype, *draw.dtypes])
    operands = (a, b, groups.device)
    return rows_product("grouped_gemm", operands, options, (copy, b), groups, to, never), groups


def grouped_gemm_wgrad(draw: Draw) -> tuple[Product, Groups]:
    dtype, groups = draw.random.choice(draw.dtypes), draw.groups()
    grad = grad_copy = draw.matrix(groups, n := draw.width(), dtype)
    input = copy = draw.matrix(groups, k := draw.width(), dtype)
    rows = grad_rows = None
    if draw.maybe(0.3):
        input, rows, copy = draw.rows_of(groups, k, dtype)
    if draw.maybe(0.3):
        grad, grad_rows, grad_copy = draw.rows_of(groups, n, dtype)
    options = {"alpha": draw.factors(groups.count), "input_rows": rows, "grad_rows": grad_rows}
    to = draw.random.choice([dtype, torch.float32, *draw.dtypes])
    operands = (grad, input, groups.device)
    return wgrad_product(
        "grouped_gemm_wgrad", operands, options, (grad_copy, copy), groups, to, never
    ), groups


def grouped_gemm_of_formats(draw: Draw) -> tuple[Product, Groups]:
    formats = draw.random.choice(PAIRS)
    groups, n, k = draw.groups(*formats), draw.width(*formats), draw.width(*formats)
    transpose_b = draw.maybe(0.7)
    a = quantize_operand(draw.matrix(groups, k, torch.float32), formats[0], groups)
    b = quantize_operand(draw.tensor(groups.count, *((n, k) if transpose_b else (k, n))), formats[1])
    options: dict[str, Any] = {**with_bias(draw, groups, n), "transpose_b": transpose_b}
    options |= quantized_arguments(a[:3], b[:3], *formats) | {"group_sizes": groups.device}

    def units(dtype: torch.dtype) -> bool:
        return transpose_b and in_fp8_units(*formats, dtype, n, k, draw.device)

    to = draw.random.choice([torch.bfloat16, torch.bfloat16, *draw.dtypes])
    values = (a.values, b.values)
    return rows_product("grouped_gemm", (), options, values, groups, to, units), groups


def grouped_gemm_wgrad_of_formats(draw: Draw) -> tuple[Product, Groups]:
    keys = [replace(Format.parse(key), square_blocks=False).key for key in draw.random.choice(PAIRS)]
    groups, n, k = draw.groups(*keys), draw.width(*keys), draw.width(*keys)
    grad, input = (
        quantize_operand(draw.matrix(groups, width, torch.float32), key, groups, columns=True)
        for width, key in zip((n, k), keys, strict=True)
    )
    options: dict[str, Any] = {"alpha": draw.factors(groups.count), "group_sizes": groups.device}
    options |= wgrad_arguments(grad[:3], input[:3], *keys)

    def units(dtype: torch.dtype) -> bool:
        return in_fp8_units(*keys, dtype, k, None, draw.device)

    to = draw.random.choice(draw.dtypes)
    values = (grad.values, input.values)
    return wgrad_product("grouped_gemm_wgrad", (), options, values, groups, to, units), groups


def check_linear(draw: Draw) -> None:
    """Checks grouped_linear and its gradients."""
    formats = draw.random.choice([NONE, *map(keys, RECIPES.values()), *[keys(RECIPES["block"])] * 6])
    input_key, weight_key, grad_key = formats
    groups, n, k = draw.groups(*formats), draw.width(*formats), draw.width(*formats)
    dtype = draw.random.choice([torch.bfloat16, torch.bfloat16, *draw.dtypes])
    x, grad = (draw.matrix(groups, width, dtype) for width in (k, n))
    w, more = draw.tensor(groups.count, n, k, dtype=dtype), with_bias(draw, groups, n)
    bias, scale = more["bias"], more["bias_scale"]
    leaves = {"x": x, "w": w, "bias": bias, "scale": scale}
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items() if t is not None}
    output = ops.grouped_linear(
        leaves["x"], leaves["w"], groups.device, leaves.get("bias"), leaves.get("scale"), *formats
    )
    wanted = [name for name in leaves if draw.maybe(0.8)] or ["x"]
    got = dict(zip(wanted, torch.autograd.grad(output, [leaves[name] for name in wanted], grad), strict=True))
    got["output"] = output.detach()
    options = {"bias": None, "bias_scale": None, "alpha": None, "transpose_b": True}

    def units(width: int, of: int | None, a: str, b: str) -> Callable[[torch.dtype], bool]:
        return lambda to: in_fp8_units(a, b, to, width, of, draw.device)

    def expected(name: str) -> Product:
        if name == "output":
            values = (values_of(x, input_key, groups), values_of(w, weight_key))
            extra = {**options, "bias": bias, "bias_scale": scale}
            return rows_product(name, (), extra, values, groups, dtype, units(n, k, input_key, weight_key))
        if name == "x":
            values = (values_of(grad, grad_key, groups), values_of(w, weight_key, columns=True))
            extra = {**options, "transpose_b": False}
            return rows_product(name, (), extra, values, groups, dtype, units(k, n, grad_key, weight_key))
        # In fp8_row the weight gradient uses the values before quantization.
        of_grad, of_input = ("none" if key.startswith("fp8_row") else key for key in (grad_key, input_key))
        values = (values_of(grad, of_grad, groups, True), values_of(x, of_input, groups, True))
        return wgrad_product(name, (), options, values, groups, dtype, units(k, None, grad_key, input_key))

    for name in {"output", "x", "w"} & got.keys():
        product = expected(name)
        compare(draw, got[name], product, product.exact, product.magnitude, product.away(dtype))
        if name != "w":
            assert_bits(got[name][groups.end :], torch.zeros_like(got[name][groups.end :]), "tail")
    check_bias(draw, groups, grad, bias, scale, got)


def check_bias(
    draw: Draw,
    groups: Groups,
    grad: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    got: dict[str, Tensor],
) -> None:
    end, sizes = groups.end, groups.device.long()
    of_row = torch.arange(groups.count, device=draw.device).repeat_interleave(sizes, output_size=end)
    rows = grad[:end].double()
    if "bias" in got:
        weighted = rows if scale is None else rows * scale[:end, None].double()
        zeros = torch.zeros(groups.count, grad.shape[1], dtype=torch.float64, device=draw.device)
        sums = [zeros.index_add(0, of_row, t) for t in (weighted, weighted.abs())]
        assert_rounded_sum(got["bias"], *sums, groups.longest, "gradient of the bias")
    if "scale" in got:
        assert bias is not None
        weighted = rows * bias[of_row].double()
        sums = [weighted.sum(1), weighted.abs().sum(1)]
        assert_rounded_sum(got["scale"][:end], *sums, grad.shape[1], "gradient of the scale")


PRODUCTS = {
    make.__name__: make
    for make in (grouped_gemm, grouped_gemm_wgrad, grouped_gemm_of_formats, grouped_gemm_wgrad_of_formats)
}
KINDS = [*PRODUCTS, "grouped_linear"]


def check(kind: str, seed: str, device: torch.device) -> None:
    plain = kind in ("grouped_gemm", "grouped_gemm_wgrad")
    draw = Draw(f"{kind}, {seed}", device, None if plain else False)
    if kind == "grouped_linear":
        check_linear(draw)
    else:
        check_product(draw, *PRODUCTS[kind](draw))


def check_all(kind: str, part: str, count: int, device: torch.device) -> None:
    for case in range(count):
        seed = f"{part}, {case}"
        try:
            check(kind, seed, device)
        except Exception as error:
            raise AssertionError(f"case {seed!r} of {kind}: {error}") from error


def with_wrong_element(op: Callable[..., Any], change: Callable[[Tensor], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        result = op(*arguments, **options)
        if result is not None:
            result = result.clone()
        change(options["out"] if result is None else result)
        return result

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_checks_detect_one_wrong_element(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes one element of each result and asserts that the checks of this file fail."""
    changed: list[bool] = []

    @torch.no_grad()
    def change(result: Tensor) -> None:
        largest = result.float().nan_to_num(0.0).abs().amax() if result.numel() else torch.zeros(())
        changed.append(bool(largest > 0))
        if changed[-1]:
            result[tuple(n // 2 for n in result.shape)] += largest / 8

    op = kind.removesuffix("_of_formats")
    for name in (op, op + "_out"):
        if hasattr(ops, name):
            monkeypatch.setattr(ops, name, with_wrong_element(getattr(ops, name), change))
    for case in range(FEW):
        detected = False
        try:
            check(kind, f"spoiled, {case}", torch.device("cpu"))
        except AssertionError:
            detected = True
        assert detected == changed.pop(), case


@pytest.mark.parametrize("kind", KINDS)
def test_few_products(kind: str, device: torch.device) -> None:
    check_all(kind, "few", FEW, device)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_products(kind: str, part: int, device: torch.device) -> None:
    check_all(kind, str(part), CASES, device)
