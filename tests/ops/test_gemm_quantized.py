"""Products of quantized operands, compared with the float64 product of their dequantized values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.gemm_cases import (
    GROUPED_SHAPES,
    GroupedShape,
    group_sizes,
    in_fp8_units,
    normals,
    poison_tail,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums
from transformer_plugin.testing.quantize_cases import (
    COLUMNS,
    amax_of,
    columns_of,
    extras,
    rows_for,
    rows_of,
    width_for,
)

pytestmark = pytest.mark.dtypes_in_turn

_ops = torch.ops.transformer_plugin
PAIRS = (
    ("fp8_tensor:e4m3", "fp8_tensor:e4m3"),
    ("fp8_tensor:e5m2,pow2", "fp8_tensor:e4m3,pow2"),
    ("fp8_tensor:e5m2", "fp8_tensor:pow2"),
    ("fp8_block", "fp8_block:square"),
    ("fp8_block:fp32", "fp8_block:fp32,square"),
    ("fp8_block", "fp8_block"),
    ("fp8_block:fp32", "fp8_block"),
    ("fp8_block:e5m2", "fp8_block"),
    ("fp8_tensor", "fp8_block"),
    ("mxfp8", "mxfp8:square"),
    ("mxfp8:e5m2", "mxfp8"),
    ("mxfp8", "mxfp8:e5m2,tiled"),
    ("mxfp8", "fp8_block"),
    ("mxfp8:tiled", "mxfp8:square,tiled"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:tiled", "nvfp4"),
    ("nvfp4:row_scaled", "nvfp4:4over6,tiled"),
    ("nvfp4:sr", "nvfp4:row_scaled,4over6_mse"),
    ("nvfp4:rht", "nvfp4:rht"),
    ("nvfp4", "mxfp8"),
)
by_pair = pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")


def ragged_cases(shapes: Sequence[GroupedShape]) -> pytest.MarkDecorator:
    """Each shape with every third pair, and each pair with every third shape, in all dtypes that take turns: `make
    test-long` runs the others, too. Ragged matrices do not support square blocks."""
    pairs = [pair for pair in PAIRS if "square" not in pair[0]]
    cases = [
        pytest.param(
            *(pair, shape),
            id=f"{pair[0]}-{pair[1]}-{shape.name}",
            marks=[pytest.mark.long] if (i + j + j // 3) % 3 else [],
        )
        for i, pair in enumerate(pairs)
        for j, shape in enumerate(shapes)
    ]
    return pytest.mark.parametrize(("formats", "shape"), cases)


by_ragged_case = ragged_cases(GROUPED_SHAPES)
by_output = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def without_square(key: str) -> str:
    """Returns the format with row-wise blocks, which ragged matrices require."""
    return replace(Format.parse(key), square_blocks=False).key


class Operand(NamedTuple):
    """Quantized data with its scale, and the amax if the format is nvfp4."""

    data: Tensor
    scale: Tensor
    amax: Tensor | None

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.data, self.scale


def operand(x: Tensor, key: str, sizes: Tensor | None = None, transposed: bool = False) -> Operand:
    """Quantizes a matrix, a stack or a ragged matrix, row-wise or column-wise."""
    more = extras(x, key, sizes)
    options = {**columns_of(more), **COLUMNS} if transposed else rows_of(more)
    data, scale = ops.quantize(x, key, sizes, **options)
    return Operand(data, scale, amax_of(more, transposed).get("amax"))


def values(a: Operand, key: str) -> Tensor:
    """Returns the float64 values of one row-wise matrix."""
    return reference.dequantize(*a.pair, key, torch.float32, amax=a.amax).double()


def fitted(shape: GroupedShape, formats: tuple[str, str]) -> GroupedShape:
    """Rounds the widths and group sizes of a shape up to what the formats require in both directions."""
    sizes = tuple(rows_for(size, *formats) for size in shape.sizes)
    rows = rows_for(shape.rows + sum(sizes) - sum(shape.sizes), *formats)
    n, k = width_for(shape.n, *formats), width_for(shape.k, *formats)
    return replace(shape, sizes=sizes, rows=rows, n=n, k=k)


def group_values(
    x: Tensor, shape: GroupedShape, quantized: Operand, key: str, transposed: bool
) -> list[Tensor]:
    """Returns the dequantized values of each group, [rows, columns]."""
    sizes = group_sizes(shape, x.device)
    back = reference.dequantize(
        *quantized.pair, key, torch.float32, sizes, transposed, quantized.amax
    ).double()
    return list(back[: sum(shape.sizes)].split(list(shape.sizes)))


def ragged(
    shape: GroupedShape, columns: int, key: str, device: torch.device, seed: int
) -> tuple[Operand, Operand, list[Tensor], list[Tensor]]:
    """Quantizes a ragged matrix row-wise and column-wise; also returns each group's values of both. Tail rows are
    NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = poison_tail(normals((shape.rows, columns), torch.float32, device, generator), shape.sizes)
    sizes = group_sizes(shape, device)
    rows, columnwise = operand(x, key, sizes), operand(x, key, sizes, transposed=True)
    return (
        rows,
        columnwise,
        group_values(x, shape, rows, key, False),
        group_values(x, shape, columnwise, key, True),
    )


@by_pair
@by_output
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("shape", [(0, 8, 16), (3, 5, 0), (9, 16, 24), (140, 33, 200), (130, 264, 520)])
def test_gemm_quantized(
    shape: tuple[int, int, int],
    transpose_b: bool,
    dtype: torch.dtype,
    formats: tuple[str, str],
    device: torch.device,
) -> None:
    m, (n, k) = shape[0], (width_for(width, *formats) for width in shape[1:])
    generator = torch.Generator().manual_seed(0)
    a = operand(normals((m, k), torch.float32, device, generator), formats[0])
    b = operand(normals((n, k) if transpose_b else (k, n), torch.float32, device, generator), formats[1])
    a64, b64 = values(a, formats[0]), values(b, formats[1])
    b64 = b64.T if transpose_b else b64
    for bias in (None, normals((n,), torch.bfloat16, device, generator)):
        added = 0 if bias is None else bias.double()
        options = quantized_arguments(a, b, *formats)
        got = ops.gemm(**options, bias=bias, transpose_b=transpose_b, dtype=dtype)
        assert got.dtype == dtype
        magnitude = a64.abs() @ b64.abs() + abs(added)
        columns = bias is None and in_fp8_units(*formats, dtype, n, None, device)
        units = in_fp8_units(*formats, dtype, n, k, device) or columns
        more = fp8_sums(a64, b64) if units and transpose_b else 0.0
        assert_rounded_sum(got, a64 @ b64 + added, magnitude, k, more=more)


@by_ragged_case
@by_output
def test_grouped_gemm_quantized(
    shape: GroupedShape, dtype: torch.dtype, formats: tuple[str, str], device: torch.device
) -> None:
    shape = fitted(shape, formats)
    units = in_fp8_units(*formats, dtype, shape.n, shape.k, device)
    generator = torch.Generator().manual_seed(1)
    a, _, a_values, _ = ragged(shape, shape.k, formats[0], device, 0)
    sizes = group_sizes(shape, device)
    bias = normals((len(shape.sizes), shape.n), dtype, device, generator)
    scale = poison_tail(normals((shape.rows,), torch.float32, device, generator), shape.sizes)
    for transpose_b in (True, False):
        b_shape = (shape.n, shape.k) if transpose_b else (shape.k, shape.n)
        weight = normals((len(shape.sizes), *b_shape), torch.float32, device, generator)
        b = operand(weight, formats[1])
        for extra in ((None, None), (bias, scale)):
            options = quantized_arguments(a, b, *formats) | {"bias": extra[0], "bias_scale": extra[1]}
            got = ops.grouped_gemm(**options, group_sizes=sizes, transpose_b=transpose_b, dtype=dtype)
            begin, back = 0, reference.dequantize(*b.pair, formats[1], torch.float32, amax=b.amax)
            exact, magnitude, more = (
                torch.zeros(sum(shape.sizes), shape.n, device=device).double() for _ in range(3)
            )
            for g, (rows, size) in enumerate(zip(a_values, shape.sizes, strict=True)):
                member = back[g].double()
                member = member.T if transpose_b else member
                added = torch.zeros((), dtype=torch.float64, device=device)
                if extra[0] is not None:
                    added = scale[begin : begin + size, None].double() * bias[g].double()
                here = slice(begin, begin + size)
                exact[here] = rows @ member + added
                magnitude[here] = rows.abs() @ member.abs() + added.abs()
                if units and transpose_b:
                    more[here] = fp8_sums(rows, member)
                begin += size
            assert_rounded_sum(got[:begin], exact, magnitude, shape.k, more=more)
            assert_same_bits(got[begin:], torch.zeros_like(got[begin:]), "tail")


@by_ragged_case
def test_grouped_wgrad_quantized(shape: GroupedShape, formats: tuple[str, str], device: torch.device) -> None:
    formats = (formats[0], without_square(formats[1]))
    shape = fitted(shape, formats)
    _, grad, _, grad_values = ragged(shape, shape.n, formats[0], device, 0)
    _, input, _, input_values = ragged(shape, shape.k, formats[1], device, 1)
    sizes = group_sizes(shape, device)
    size = (len(shape.sizes), shape.n, shape.k)
    before = normals(size, torch.float32, device, torch.Generator().manual_seed(2))
    exact, magnitude, sums = (torch.zeros(size, dtype=torch.float64, device=device) for _ in range(3))
    for g, (x, y) in enumerate(zip(grad_values, input_values, strict=True)):
        exact[g], magnitude[g], sums[g] = x.T @ y, x.T.abs() @ y.abs(), fp8_sums(x.T, y)
    terms = sizes[:, None, None]
    for dtype in (torch.float32, torch.bfloat16):
        options = wgrad_arguments(grad, input, *formats) | {"group_sizes": sizes}
        got = ops.grouped_gemm_wgrad(**options, dtype=dtype)
        assert got.shape == size
        assert got.dtype == dtype
        added = before.to(dtype, copy=True)
        over = torch.full(size, float("nan"), dtype=dtype, device=device)
        ops.grouped_gemm_wgrad_out(**options, out=added)
        ops.grouped_gemm_wgrad_out(**options, out=over, accumulate=False)
        start = before.to(dtype).double()
        more = sums if in_fp8_units(*formats, dtype, shape.k, None, device) else 0.0
        assert_rounded_sum(got, exact, magnitude, terms, more=more)
        assert_rounded_sum(over, exact, magnitude, terms, "overwritten", more)
        added_more = more if dtype == torch.float32 else 0.0
        assert_rounded_sum(added, start + exact, start.abs() + magnitude, terms, "accumulated", added_more)


@by_pair
@pytest.mark.parametrize("shape", GROUPED_SHAPES[1:9:2], ids=lambda shape: shape.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(shape: GroupedShape, formats: tuple[str, str], device: torch.device) -> None:
    shape = fitted(shape, formats)
    ragged_key = without_square(formats[1])
    a, a_t, _, _ = ragged(shape, shape.k, formats[0], device, 0)
    _, grad_t, _, _ = ragged(shape, shape.n, ragged_key, device, 1)
    sizes = group_sizes(shape, device)
    groups = len(shape.sizes)
    weight = torch.randn(groups, shape.n, shape.k, device=device)
    bias = torch.randn(groups, shape.n, device=device)
    scale = torch.randn(shape.rows, device=device)
    b = operand(weight, formats[1])
    options = quantized_arguments(a, b, *formats) | {"b": [b.data], "group_sizes": sizes}
    for extra in ({}, {"bias": bias, "bias_scale": scale}):
        opcheck(_ops.grouped_gemm.default, (), options | extra)
    options = wgrad_arguments(grad_t, a_t, ragged_key, formats[0]) | {"group_sizes": sizes}
    opcheck(_ops.grouped_gemm_wgrad.default, (), options)
    out = torch.zeros(groups, shape.n, shape.k, device=device)
    opcheck(_ops.grouped_gemm_wgrad_out.default, (), options | {"out": [out]})
    dense = operand(torch.randn(shape.rows, shape.k, device=device), formats[0])
    other = operand(torch.randn(shape.n, shape.k, device=device), formats[1])
    options = quantized_arguments(dense, other, *formats)
    opcheck(_ops.gemm.default, (), options | {"dtype": torch.float16})


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck_with_beta(device: torch.device) -> None:
    sizes, key = torch.tensor([2, 1], device=device), "fp8_block"
    q = ops.quantize(torch.randn(4, 128, device=device), key, sizes)
    w = ops.quantize(torch.randn(2, 16, 128, device=device), key)
    out = torch.zeros(4, 24, device=device)[:, :16]
    more = {"alpha": torch.ones(2, device=device), "beta": torch.ones(2, device=device)}
    options = quantized_arguments(q, w, key, key) | more | {"b": [w[0]], "group_sizes": sizes}
    opcheck(_ops.grouped_gemm_out.default, (), options | {"out": out})
    t = ops.quantize(torch.randn(4, 16, device=device), key, sizes, rowwise=False, columnwise=True)
    out = torch.zeros(2, 16, 16, device=device)
    options = wgrad_arguments(t, t, key, key) | {"group_sizes": sizes, "out": [out], "accumulate": False}
    opcheck(_ops.grouped_gemm_wgrad_out.default, (), options | more)


KEY = "fp8_block"
X, W = torch.randn(4, 130), torch.randn(2, 5, 130)
SIZES = torch.tensor([1, 2])
QX, QG, QW = ops.quantize(X, KEY), ops.quantize(X, KEY, SIZES), ops.quantize(W, KEY)
Q0 = ops.quantize(W[0], KEY)
QT = ops.quantize(X, KEY, SIZES, rowwise=False, columnwise=True)


def rows(a: tuple[Tensor, ...], b: tuple[Tensor, ...], *formats: str, **more: Any) -> dict[str, Any]:
    return quantized_arguments(a, b, formats[0], formats[1]) | more


def columns(grad: tuple[Tensor, ...], input: tuple[Tensor, ...], **more: Any) -> dict[str, Any]:
    return wgrad_arguments(grad, input, KEY, KEY) | {"group_sizes": SIZES} | more


WITHOUT = "Pass what the operand was quantized to."


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        ("gemm", rows(QX, Q0, "bf16", KEY), ValueError,
         "'a_format': expected a format with scales, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, got 'bf16'. "
         "Use the unquantized tensor, or convert it with .to()."),
        ("gemm", rows(QX, Q0, "none", KEY), ValueError,
         "'a_format': expected a format with scales, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, got 'none'. "
         "Use the unquantized tensor, or convert it with .to()."),
        ("gemm", {"a": X, "b": X, "b_scale": QX[1]}, ValueError,
         "'b_scale': expected no tensors for format 'none', got 1 of them. "
         "Name the format that the operand was quantized to."),
        ("gemm", rows(QX, Q0[:1], KEY, KEY), ValueError,
         f"'b_scale': expected scale_inv, 1 tensor for 'fp8_block', got 0. {WITHOUT}"),
        ("gemm", rows((*QX, QX[1]), Q0, KEY, KEY), ValueError,
         f"'a_scale': expected scale_inv, 1 tensor for 'fp8_block', got 2. {WITHOUT}"),
        ("gemm", rows(QX, Q0, KEY, KEY + ":e5m2"), TypeError,
         "'b': expected one of the dtypes float8_e5m2, got float8_e4m3fn. Convert it with .to() first."),
        ("gemm", rows((QX[0], QX[1][:1]), Q0, KEY, KEY), ValueError,
         "'a_scale[0]': expected size 2 in dimension 0 (what the format gives data of this size), "
         "got float32[1, 4] on cpu. Pass tensors whose sizes agree."),
        ("gemm", rows(QX, Q0, KEY, KEY, dtype=torch.float64), TypeError,
         "'dtype': expected one of float32, bfloat16, float16, got float64. "
         "Convert the result with .to() instead."),
        ("grouped_gemm", rows(QG, QW, KEY, KEY, group_sizes=torch.tensor([4])), ValueError,
         "'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[1] on cpu. "
         "Pass tensors whose sizes agree."),
        ("grouped_gemm", rows(QG, QW, KEY + ":square", KEY, group_sizes=SIZES), ValueError,
         "'a_format': expected blocks along a row for a ragged matrix, whose groups do not end on square blocks, "
         "got 'fp8_block:square'. Leave out 'square'."),
        ("grouped_gemm", rows(QG, QW, KEY, KEY, group_sizes=SIZES, rows=SIZES), ValueError,
         "'rows': expected None with quantized operands, got int64[2] on cpu. "
         "Take the rows before they are quantized."),
        ("grouped_gemm_wgrad", columns((QT[0], QT[1][1:]), QT), ValueError,
         "'grad_scale[0]': expected size 3 in dimension 0 (what the format gives data of this size), "
         "got float32[2, 132] on cpu. Pass tensors whose sizes agree."),
        ("grouped_gemm_wgrad", columns(QT, QT, input_rows=SIZES), ValueError,
         "'input_rows': expected None with quantized operands, got int64[2] on cpu. "
         "Take the rows before they are quantized."),
        ("grouped_gemm_wgrad", columns(QT, QT, grad_rows=SIZES), ValueError,
         "'grad_rows': expected None with quantized operands, got int64[2] on cpu. "
         "Take the rows before they are quantized."),
        ("grouped_gemm_wgrad", {"grad": X, "input": X, "group_sizes": SIZES, "grad_scale": QX[1]}, ValueError,
         "'grad_scale': expected no tensors for format 'none', got 1 of them. "
         "Name the format that the operand was quantized to."),
        ("grouped_gemm_wgrad_out", columns(QT, QT, out=torch.zeros(2, 130, 130).transpose(1, 2)), ValueError,
         "'out': expected a buffer whose last dimension has stride 1 and whose rows do not overlap, "
         "got float32[2, 130, 130] on cpu with strides [16900, 1, 130]. It is written in place and never copied: "
         "pass a contiguous buffer, or one with strided rows or groups."),
    ],
)  # fmt: skip
def test_errors(op: str, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        getattr(ops, op)(**arguments)
    assert str(caught.value) == f"transformer_plugin::{op}: argument {text}"


def test_random_bit_patterns_of_mxfp8(device: torch.device) -> None:
    """Random bit patterns of data and scales, large and small. A NaN in either affects only its row or column."""
    generator = torch.Generator().manual_seed(3)
    m, n, k = 140, 72, 256
    data = [torch.randint(256, (rows, k), generator=generator, dtype=torch.uint8) for rows in (m, n)]
    scales = [
        torch.randint(95, 160, (256 if rows > 128 else 128, k // 32), generator=generator) for rows in (m, n)
    ]
    for bits in data:
        bits[bits % 128 == 127] -= 1  # replace NaN by the largest finite value
    data[0][3, 70], data[1][11, 255], scales[0][129, 1] = 127, 255, 255
    a, b = (bits.to(device).view(torch.float8_e4m3fn) for bits in data)
    a_scale, b_scale = (scale.byte().to(device).view(torch.float8_e8m0fnu) for scale in scales)
    got = ops.gemm(**quantized_arguments((a, a_scale), (b, b_scale), "mxfp8", "mxfp8"))
    x, y = (
        bits.double() * scale[: bits.shape[0]].float().double().repeat_interleave(32, 1)
        for bits, scale in ((a, a_scale), (b, b_scale))
    )
    bad = torch.zeros_like(got, dtype=torch.bool)
    bad[[3, 129]], bad[:, 11] = True, True
    assert torch.equal(got.isnan(), bad)
    exact, magnitude = (f(x) @ f(y).T for f in (lambda t: t, torch.abs))
    one = torch.ones((), dtype=torch.float64, device=device)
    assert_rounded_sum(got.where(~bad, one.bfloat16()), exact.where(~bad, one), magnitude.where(~bad, one), k)
