"""Products in mxfp8 and nvfp4: the layout of scales and the element of mxfp8 change no bit, and every bit pattern
is multiplied correctly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import rows_fp64
from tests.ops.grouped_draw import Groups, QuantizedOperand, quantize_operand
from tests.ops.on_gpu import captured
from transformer_plugin import ops, reference
from transformer_plugin.testing.gemm_cases import (
    normals,
    poison_tail,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

BF16, FP32 = torch.bfloat16, torch.float32
#: Formats of rows and of weights; each pair also runs with tiled scales.
PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8:e5m2", "mxfp8:square"),
    ("mxfp8", "mxfp8:e5m2"),
    ("mxfp8:e5m2", "mxfp8:e5m2,square"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:4over6", "nvfp4"),
]
by_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
ROUNDED = 8  # roundings of factors, amaxes and biases


class Shape(NamedTuple):
    """Sizes of groups, rows past them, and weights [groups, n, k], with widths whose quantized data Hopper
    multiplies."""

    sizes: tuple[int, ...]
    tail: int
    n: int
    k: int


#: Tiles of scales cover 128 rows, and 128 (mxfp8) or 64 (nvfp4) elements of each row.
SHAPES = [
    Shape((130, 0, 7, 300), 13, 136, 288),
    Shape((261,), 0, 264, 32),
    Shape((0, 0), 5, 8, 64),
    Shape(tuple(i % 3 for i in range(40)), 12, 72, 544),
    Shape((0, 129, 128, 1, 0), 130, 520, 160),
]


def tiled(key: str) -> str:
    return f"{key}{',' if ':' in key else ':'}tiled"


def groups_of(shape: Shape, device: torch.device) -> Groups:
    host = torch.tensor(shape.sizes)
    return Groups(host, host.to(device), sum(shape.sizes) + shape.tail)


def apart(data: Tensor) -> list[Tensor]:
    """Returns each matrix in separate memory. torch does not copy 4-bit floats, so this copies bytes."""
    return [matrix.view(torch.uint8).clone().view(matrix.dtype) for matrix in data]


Call = Callable[[], Tensor]


def calls(
    a: QuantizedOperand,
    b: QuantizedOperand,
    formats: tuple[str, str],
    groups: Groups,
    bias: Tensor,
    alpha: Tensor,
) -> dict[str, Call]:
    """Returns every op over groups of rows, with a bias and alpha."""
    more = {"group_sizes": groups.device, "bias": bias, "alpha": alpha}
    arguments = quantized_arguments(a[:3], b[:3], *formats) | more

    def into() -> Tensor:
        out = torch.full((groups.capacity, bias.shape[1]), float("nan"), dtype=BF16, device=bias.device)
        ops.grouped_gemm_out(**arguments, out=out)
        return out

    def listed() -> Tensor:
        own = None if b.amax is None else list(b.amax.split(1))
        matrices = (apart(b.data), apart(b.scale), own)
        return ops.grouped_gemm(**quantized_arguments(a[:3], matrices, *formats) | more)

    return {
        "new result": lambda: ops.grouped_gemm(**arguments),
        "into a buffer": into,
        "with a list": listed,
    }


@by_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_products_with_either_layout_of_scales(
    shape: Shape, pair: tuple[str, str], device: torch.device
) -> None:
    generator, groups, count = torch.Generator().manual_seed(0), groups_of(shape, device), len(shape.sizes)
    x = poison_tail(normals((groups.capacity, shape.k), FP32, device, generator), shape.sizes)
    w, bias, alpha = (
        normals(s, FP32, device, generator) for s in ((count, shape.n, shape.k), (count, shape.n), (count,))
    )
    rows = {key: quantize_operand(x, key, groups) for key in (pair[0], tiled(pair[0]))}
    weights = {key: quantize_operand(w, key) for key in (pair[1], tiled(pair[1]))}
    for either in (rows, weights):
        plain, other = either.values()
        assert_same_bits(other.data, plain.data, "data")
        assert_same_bits(other.values, plain.values, "values")
    above = (t.abs() for t in (rows[pair[0]].values, weights[pair[1]].values))
    magnitude = rows_fp64(*above, groups.host, bias.abs(), None, True, alpha.abs())
    exact = rows_fp64(rows[pair[0]].values, weights[pair[1]].values, groups.host, bias, None, True, alpha)
    expected: Tensor | None = None
    for formats in product(rows, weights):
        made = calls(rows[formats[0]], weights[formats[1]], formats, groups, bias, alpha)
        for name, call in made.items():
            got, name = call(), f"{name} of {formats}"
            expected = got if expected is None else expected
            assert_rounded_sum(got, exact, magnitude, shape.k + ROUNDED, name)
            assert_same_bits(got, expected, name)
            assert_same_bits(got[groups.end :], torch.zeros_like(got[groups.end :]), f"tail, {name}")


@by_pair
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(1, 8, 32), (130, 136, 288), (257, 400, 96)], ids=str)
def test_dense_products_with_either_layout_of_scales(
    shape: tuple[int, int, int], dtype: torch.dtype, pair: tuple[str, str], device: torch.device
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (normals(s, FP32, device, generator) for s in ((m, k), (n, k), (n,)))
    rows = {key: quantize_operand(x, key) for key in (pair[0], tiled(pair[0]))}
    weights = {key: quantize_operand(w, key) for key in (pair[1], tiled(pair[1]))}
    a64, b64 = rows[pair[0]].values, weights[pair[1]].values
    magnitude = a64.abs() @ b64.abs().T + bias.double().abs()
    expected: dict[str, Tensor] = {}
    for formats in product(rows, weights):
        a, b = rows[formats[0]], weights[formats[1]]
        arguments = quantized_arguments(a[:3], b[:3], *formats) | {"bias": bias}
        into = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        ops.gemm_out(**arguments, out=into)
        made = {"new result": ops.gemm(**arguments, dtype=dtype), "into a buffer": into}
        for name, got in made.items():
            assert_rounded_sum(
                got, a64 @ b64.T + bias.double(), magnitude, k + ROUNDED, f"{name} of {formats}"
            )
            assert_same_bits(got, expected.setdefault(name, got), f"{name} of {formats}")


# ---- both elements of mxfp8
# -------------------------------------------------------------------------------------

ELEMENTS = {"mxfp8": torch.float8_e4m3fn, "mxfp8:e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("order", ["row-major", "tiled"])
def test_either_element_gives_the_same_bits(order: str, device: torch.device) -> None:
    """Numbers that both elements represent, under the same scales."""
    shape = Shape((130, 0, 7, 300), 13, 136, 288)
    generator, groups = torch.Generator().manual_seed(0), groups_of(shape, device)
    sizes = {"rows": (groups.capacity, shape.k), "weights": (len(shape.sizes), shape.n, shape.k)}

    def drawn(*size: int) -> Tensor:
        return torch.randint(4, 8, size, generator=generator) * torch.exp2(
            torch.randint(-5, 3, size, generator=generator)
        ) * torch.randint(-1, 2, size, generator=generator)  # fmt: skip

    key = tiled("mxfp8") if order == "tiled" else "mxfp8"
    spread = {
        name: torch.exp2(torch.randint(-9, 9, (*s[:-1], 1), generator=generator)) for name, s in sizes.items()
    }
    scales = {
        "rows": ops.quantize(drawn(*sizes["rows"]).mul(spread["rows"]).to(device), key, groups.device)[1],
        "weights": ops.quantize(drawn(*sizes["weights"]).mul(spread["weights"]).to(device), key)[1],
    }
    values = {name: drawn(*s).to(device) for name, s in sizes.items()}
    for name, dtype in product(values, ELEMENTS.values()):
        assert torch.equal(values[name].to(dtype).float(), values[name]), "both elements represent these"
    results = {}
    for formats in product(ELEMENTS, ELEMENTS):
        keys = [tiled(f) if order == "tiled" else f for f in formats]
        a, b = (values[name].to(ELEMENTS[f]) for name, f in zip(values, formats, strict=True))
        arguments = quantized_arguments((a, scales["rows"]), (b, scales["weights"]), keys[0], keys[1])
        results[formats] = ops.grouped_gemm(**arguments, group_sizes=groups.device)
    expected = results["mxfp8", "mxfp8"]
    assert expected[: groups.end].count_nonzero() > groups.end * shape.n / 2
    for formats, got in results.items():
        assert_same_bits(got, expected, str(formats))


#: Scale bytes: 2^-127, which is subnormal; the least under which every value is normal; around 1; the
#: largest; NaN.
SCALES = (0, 17, 64, 127, 190, 254, 255)


@pytest.mark.parametrize("order", ["row-major", "tiled"])
@pytest.mark.parametrize("key", ELEMENTS)
@pytest.mark.parametrize("side", ["rows", "weights"])
def test_every_bit_pattern_with_scales_of_all_magnitudes(
    side: str, key: str, order: str, device: torch.device
) -> None:
    """Rows with one nonzero element each, times rows with a single 1: each result is a value, a zero, or NaN where
    0 is multiplied by infinity or NaN. Values below the smallest normal number are not compared, because bfloat16
    products on some CPUs flush them to zero."""
    count, k = 256 * len(SCALES), 32
    bytes = torch.zeros(count, k, dtype=torch.uint8)
    bytes[torch.arange(count), torch.arange(count) % k] = torch.arange(256, dtype=torch.uint8).repeat(
        len(SCALES)
    )
    data, ones = bytes.view(ELEMENTS[key]), torch.eye(k).to(ELEMENTS[key])
    scale = torch.zeros(count, 4, dtype=torch.uint8)
    scale[:, 0] = torch.tensor(SCALES, dtype=torch.uint8).repeat_interleave(256)
    values = reference.dequantize(data, scale.view(torch.float8_e8m0fnu), key, FP32).double()
    exact = (values[:, None] * torch.eye(k).double()).sum(-1)
    if order == "tiled":  # tiles of 128 rows: 32 rows in each of four columns of 4 bytes
        key = tiled(key)
        scale = scale.view(-1, 4, 32, 4).transpose(1, 2).reshape(count, 4)
    scale_of_ones = torch.zeros(128, 4, dtype=torch.uint8)
    scale_of_ones[:, 0] = 127
    arguments = [(data, scale), (ones, scale_of_ones)]
    if side == "weights":
        arguments, exact = arguments[::-1], exact.T
    (a, a_scale), (b, b_scale) = (
        (c.to(device), s.to(device).view(torch.float8_e8m0fnu)) for c, s in arguments
    )
    got = ops.gemm(**quantized_arguments((a, a_scale), (b, b_scale), key, key)).cpu()
    compared = ~((exact.abs() < torch.finfo(FP32).tiny) & (exact != 0))
    assert compared.sum() > 0.98 * exact.numel() and exact.isnan().any()
    assert exact.isinf().any() and exact.count_nonzero() > 1000
    torch.testing.assert_close(
        got[compared].float(), exact[compared].to(BF16).float(), rtol=0, atol=0, equal_nan=True
    )


# ---- CUDA graphs
# ------------------------------------------------------------------------------------------------

CAPACITY, N, K = 333, 160, 192
REPLAYED = [(0, 0, 0, 0, 0), (333, 0, 0, 0, 0), (1, 2, 3, 5, 7), (17, 100, 0, 33, 120), (127, 1, 128, 0, 77)]
GRAPH_PAIRS = [
    ("mxfp8:tiled", "mxfp8:square,tiled"),
    ("mxfp8:e5m2,tiled", "mxfp8"),
    ("mxfp8", "mxfp8:e5m2"),
    ("nvfp4:tiled", "nvfp4:square,tiled"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("formats", GRAPH_PAIRS, ids="-".join)
def test_graph_replays_with_new_sizes_and_data(formats: tuple[str, str]) -> None:
    device = torch.device("cuda")

    def drawn(
        sizes: tuple[int, ...], seed: int
    ) -> tuple[QuantizedOperand, QuantizedOperand, Groups, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        groups = groups_of(Shape(sizes, CAPACITY - sum(sizes), N, K), device)
        x = poison_tail(normals((CAPACITY, K), FP32, device, generator), sizes)
        w, bias, alpha = (normals(s, FP32, device, generator) for s in ((5, N, K), (5, N), (5,)))
        return quantize_operand(x, formats[0], groups), quantize_operand(w, formats[1]), groups, bias, alpha

    def tensors(
        a: QuantizedOperand, b: QuantizedOperand, groups: Groups, bias: Tensor, alpha: Tensor
    ) -> list[Tensor]:
        return [t for t in (*a[:3], *b[:3], groups.device, bias, alpha) if t is not None]

    a, b, groups, bias, alpha = arguments = drawn((60, 70, 80, 0, 90), 0)
    call = calls(a, b, formats, groups, bias, alpha)["new result"]
    results: list[Tensor] = []
    graph = captured(lambda: results.append(call()))
    result = results[-1]  # the result of the captured call
    for seed, sizes in enumerate(REPLAYED):
        new = drawn(sizes, seed + 1)
        for target, other in zip(tensors(*arguments), tensors(*new), strict=True):
            target.view(torch.uint8).copy_(other.view(torch.uint8))
        result.fill_(float("nan"))
        graph.replay()
        a, b, groups, bias, alpha = new
        exact = rows_fp64(a.values, b.values, groups.host, bias, None, True, alpha)
        above = [t.abs() for t in (a.values, b.values, bias, alpha)]
        magnitude = rows_fp64(*above[:2], groups.host, above[2], None, True, above[3])
        assert_rounded_sum(result, exact, magnitude, K + ROUNDED, str(sizes))
        assert_same_bits(result, calls(a, b, formats, groups, bias, alpha)["new result"](), str(sizes))


# ---- rows that Hopper dequantizes during the GEMM ----------------------------------------------------------

#: With few multiprocessors each of them computes many tiles, and the GEMM overlaps dequantization of the
#: rows; otherwise a kernel dequantizes the rows first.
OVERLAPPING_SMS = (2, 4, 6)
WIDE = Shape((300, 0, 7, 513, 130), 50, 1160, 544)


def test_wide_shape_dequantizes_rows_before_and_during_the_gemm() -> None:
    rows = sum(WIDE.sizes) + WIDE.tail
    for multiprocessors in (114, 132):
        for max_sms in (0, *OVERLAPPING_SMS):
            got = ops.grouped_gemm_plan(
                "forward", BF16, BF16, rows, len(WIDE.sizes), WIDE.n, WIDE.k, multiprocessors,
                max_sms=max_sms, a_format="mxfp8", b_format="mxfp8",
            )  # fmt: skip
            assert got.backend == "sm90"
            assert got.overlaps_dequantize == (max_sms > 0)


@pytest.mark.gpu
@by_pair
def test_rows_dequantized_during_the_gemm_give_the_same_bits(pair: tuple[str, str]) -> None:
    device = torch.device("cuda")
    generator, groups = torch.Generator().manual_seed(0), groups_of(WIDE, device)
    w, bias = (normals(s, FP32, device, generator) for s in ((5, WIDE.n, WIDE.k), (5, WIDE.n)))
    b = quantize_operand(w, pair[1])
    for repeat in range(
        10
    ):  # other rows each time, so that data left in memory by the previous call is wrong
        x = poison_tail(normals((groups.capacity, WIDE.k), FP32, device, generator), WIDE.sizes)
        a = quantize_operand(x, pair[0], groups)

        def call(max_sms: int = 0, a: QuantizedOperand = a) -> Tensor:
            arguments = quantized_arguments(a[:3], b[:3], *pair) | {"bias": bias}
            return ops.grouped_gemm(**arguments, group_sizes=groups.device, max_sms=max_sms)

        results = {max_sms: call(max_sms) for max_sms in OVERLAPPING_SMS}
        expected = call()
        if repeat == 0:
            exact = rows_fp64(a.values, b.values, groups.host, bias, None, True, None)
            magnitude = rows_fp64(a.values.abs(), b.values.abs(), groups.host, bias.abs(), None, True, None)
            assert_rounded_sum(expected, exact, magnitude, WIDE.k + ROUNDED, str(pair))
        for max_sms, got in results.items():
            assert_same_bits(got, expected, f"{max_sms} multiprocessors, repeat {repeat}")


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("mxfp8:e5m2,tiled", "mxfp8"), ("nvfp4", "nvfp4:tiled")], ids="-".join)
def test_graph_dequantizes_rows_during_the_gemm_with_new_sizes(formats: tuple[str, str]) -> None:
    device, n, k = torch.device("cuda"), WIDE.n, WIDE.k
    capacity = sum(WIDE.sizes) + WIDE.tail

    def drawn(sizes: tuple[int, ...], seed: int) -> tuple[QuantizedOperand, QuantizedOperand, Groups]:
        generator = torch.Generator().manual_seed(seed)
        groups = groups_of(Shape(sizes, capacity - sum(sizes), n, k), device)
        x = poison_tail(normals((capacity, k), FP32, device, generator), sizes)
        w = normals((len(sizes), n, k), FP32, device, generator)
        return quantize_operand(x, formats[0], groups), quantize_operand(w, formats[1]), groups

    def tensors(a: QuantizedOperand, b: QuantizedOperand, groups: Groups) -> list[Tensor]:
        return [t for t in (*a[:3], *b[:3], groups.device) if t is not None]

    def call(a: QuantizedOperand, b: QuantizedOperand, groups: Groups, max_sms: int) -> Tensor:
        arguments = quantized_arguments(a[:3], b[:3], *formats)
        return ops.grouped_gemm(**arguments, group_sizes=groups.device, max_sms=max_sms)

    arguments = drawn(WIDE.sizes, 0)
    results: list[Tensor] = []
    graph = captured(lambda: results.append(call(*arguments, 2)))
    others = [(0,) * 5, (capacity, 0, 0, 0, 0), (1, 2, 3, 5, 7), (0, 600, 0, 33, 120), (127, 1, 128, 0, 77)]
    for seed, sizes in enumerate(others):
        new = drawn(sizes, seed + 1)
        for target, other in zip(tensors(*arguments), tensors(*new), strict=True):
            target.view(torch.uint8).copy_(other.view(torch.uint8))
        results[-1].fill_(float("nan"))
        graph.replay()
        assert_same_bits(results[-1], call(*new, 0), str(sizes))
