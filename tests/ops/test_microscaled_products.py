"""Products in mxfp8 and nvfp4: the order of scales and the element of mxfp8 change no bit; every code counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import rows_fp64
from tests.ops.grouped_draw import Codes, Groups, codes_of
from tests.ops.on_gpu import captured
from transformer_plugin import ops, reference
from transformer_plugin.testing.gemm_cases import (
    normals,
    poison_tail,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

BF16, FP32 = torch.bfloat16, torch.float32
#: Of rows and of weights, each also with its scales in tiles.
PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8:e5m2", "mxfp8:square"),
    ("mxfp8", "mxfp8:e5m2"),
    ("mxfp8:e5m2", "mxfp8:e5m2,square"),
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:4over6", "nvfp4"),
]
by_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
ROUNDED = 8  # of factors, amaxes and biases


class Shape(NamedTuple):
    """Groups of so many rows, rows past them, and weights [groups, n, k]: widths that a Hopper takes as codes."""

    sizes: tuple[int, ...]
    tail: int
    n: int
    k: int


#: Tiles of scales have 128 lines and 128 (mxfp8) or 64 (nvfp4) codes of each.
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


def apart(codes: Tensor) -> list[Tensor]:
    """Each matrix in memory of its own; torch copies no four-bit floats."""
    return [matrix.view(torch.uint8).clone().view(matrix.dtype) for matrix in codes]


Call = Callable[[], Tensor]


def calls(
    a: Codes, b: Codes, formats: tuple[str, str], groups: Groups, bias: Tensor, alpha: Tensor
) -> dict[str, Call]:
    """Every op over groups of rows, with a bias and factors; the last with the sum over the weights' rows."""
    more = {"group_sizes": groups.device, "bias": bias, "alpha": alpha}
    given = quantized_arguments(a[:3], b[:3], *formats) | more

    def into() -> Tensor:
        out = torch.full((groups.capacity, bias.shape[1]), float("nan"), dtype=BF16, device=bias.device)
        ops.grouped_gemm_out(**given, out=out)
        return out

    def listed() -> Tensor:
        own = None if b.amax is None else list(b.amax.split(1))
        matrices = (apart(b.data), apart(b.scale), own)
        return ops.grouped_gemm(**quantized_arguments(a[:3], matrices, *formats) | more)

    return {
        "fresh": lambda: ops.grouped_gemm(**given),
        "into": into,
        "listed": listed,
    }


@by_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_with_scales_in_either_order(
    shape: Shape, pair: tuple[str, str], device: torch.device
) -> None:
    generator, groups, count = torch.Generator().manual_seed(0), groups_of(shape, device), len(shape.sizes)
    x = poison_tail(normals((groups.capacity, shape.k), FP32, device, generator), shape.sizes)
    w, bias, alpha = (
        normals(s, FP32, device, generator) for s in ((count, shape.n, shape.k), (count, shape.n), (count,))
    )
    rows = {key: codes_of(x, key, groups) for key in (pair[0], tiled(pair[0]))}
    weights = {key: codes_of(w, key) for key in (pair[1], tiled(pair[1]))}
    for either in (rows, weights):
        plain, other = either.values()
        assert_same_bits(other.data, plain.data, "codes")
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
def test_matrices_with_scales_in_either_order(
    shape: tuple[int, int, int], dtype: torch.dtype, pair: tuple[str, str], device: torch.device
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (normals(s, FP32, device, generator) for s in ((m, k), (n, k), (n,)))
    rows = {key: codes_of(x, key) for key in (pair[0], tiled(pair[0]))}
    weights = {key: codes_of(w, key) for key in (pair[1], tiled(pair[1]))}
    a64, b64 = rows[pair[0]].values, weights[pair[1]].values
    magnitude = a64.abs() @ b64.abs().T + bias.double().abs()
    expected: dict[str, Tensor] = {}
    for formats in product(rows, weights):
        a, b = rows[formats[0]], weights[formats[1]]
        given = quantized_arguments(a[:3], b[:3], *formats) | {"bias": bias}
        into = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        ops.gemm_out(**given, out=into)
        made = {"fresh": ops.gemm(**given, dtype=dtype), "into": into}
        for name, got in made.items():
            assert_rounded_sum(
                got, a64 @ b64.T + bias.double(), magnitude, k + ROUNDED, f"{name} of {formats}"
            )
            assert_same_bits(got, expected.setdefault(name, got), f"{name} of {formats}")


# ---- both elements of mxfp8 -------------------------------------------------------------------------------------

ELEMENTS = {"mxfp8": torch.float8_e4m3fn, "mxfp8:e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("order", ["lines", "tiles"])
def test_either_element_gives_the_bits_of_the_values(order: str, device: torch.device) -> None:
    """Numbers that both elements have, under the same scales."""
    shape = Shape((130, 0, 7, 300), 13, 136, 288)
    generator, groups = torch.Generator().manual_seed(0), groups_of(shape, device)
    sizes = {"rows": (groups.capacity, shape.k), "weights": (len(shape.sizes), shape.n, shape.k)}

    def drawn(*size: int) -> Tensor:
        return torch.randint(4, 8, size, generator=generator) * torch.exp2(
            torch.randint(-5, 3, size, generator=generator)
        ) * torch.randint(-1, 2, size, generator=generator)  # fmt: skip

    key = tiled("mxfp8") if order == "tiles" else "mxfp8"
    spread = {
        name: torch.exp2(torch.randint(-9, 9, (*s[:-1], 1), generator=generator)) for name, s in sizes.items()
    }
    scales = {
        "rows": ops.quantize(drawn(*sizes["rows"]).mul(spread["rows"]).to(device), key, groups.device)[1],
        "weights": ops.quantize(drawn(*sizes["weights"]).mul(spread["weights"]).to(device), key)[1],
    }
    values = {name: drawn(*s).to(device) for name, s in sizes.items()}
    for name, dtype in product(values, ELEMENTS.values()):
        assert torch.equal(values[name].to(dtype).float(), values[name]), "both elements have these"
    results = {}
    for formats in product(ELEMENTS, ELEMENTS):
        keys = [tiled(f) if order == "tiles" else f for f in formats]
        a, b = (values[name].to(ELEMENTS[f]) for name, f in zip(values, formats, strict=True))
        given = quantized_arguments((a, scales["rows"]), (b, scales["weights"]), keys[0], keys[1])
        results[formats] = ops.grouped_gemm(**given, group_sizes=groups.device)
    expected = results["mxfp8", "mxfp8"]
    assert expected[: groups.end].count_nonzero() > groups.end * shape.n / 2
    for formats, got in results.items():
        assert_same_bits(got, expected, str(formats))


#: 2^-127, which is subnormal, the least under which every value is normal, ones around 1, the largest, NaN.
SCALES = (0, 17, 64, 127, 190, 254, 255)


@pytest.mark.parametrize("order", ["lines", "tiles"])
@pytest.mark.parametrize("key", ELEMENTS)
@pytest.mark.parametrize("side", ["rows", "weights"])
def test_every_code_under_scales_of_all_magnitudes(
    side: str, key: str, order: str, device: torch.device
) -> None:
    """Lines that hold one code each, times lines that hold one 1 each: a value, a zero, or NaN where a zero is
    multiplied by what is not finite. Values below the smallest normal number aside, which products of bfloat16 on
    some CPUs take for zero."""
    count, k = 256 * len(SCALES), 32
    bytes = torch.zeros(count, k, dtype=torch.uint8)
    bytes[torch.arange(count), torch.arange(count) % k] = torch.arange(256, dtype=torch.uint8).repeat(
        len(SCALES)
    )
    codes, ones = bytes.view(ELEMENTS[key]), torch.eye(k).to(ELEMENTS[key])
    scale = torch.zeros(count, 4, dtype=torch.uint8)
    scale[:, 0] = torch.tensor(SCALES, dtype=torch.uint8).repeat_interleave(256)
    values = reference.dequantize(codes, scale.view(torch.float8_e8m0fnu), key, FP32).double()
    exact = (values[:, None] * torch.eye(k).double()).sum(-1)
    if order == "tiles":  # of 128 lines, 32 in each of four columns of words
        key = tiled(key)
        scale = scale.view(-1, 4, 32, 4).transpose(1, 2).reshape(count, 4)
    of_ones = torch.zeros(128, 4, dtype=torch.uint8)
    of_ones[:, 0] = 127
    given = [(codes, scale), (ones, of_ones)]
    if side == "weights":
        given, exact = given[::-1], exact.T
    (a, a_scale), (b, b_scale) = ((c.to(device), s.to(device).view(torch.float8_e8m0fnu)) for c, s in given)
    got = ops.gemm(**quantized_arguments((a, a_scale), (b, b_scale), key, key)).cpu()
    compared = ~((exact.abs() < torch.finfo(FP32).tiny) & (exact != 0))
    assert compared.sum() > 0.98 * exact.numel() and exact.isnan().any()
    assert exact.isinf().any() and exact.count_nonzero() > 1000
    torch.testing.assert_close(
        got[compared].float(), exact[compared].to(BF16).float(), rtol=0, atol=0, equal_nan=True
    )


# ---- a graph ----------------------------------------------------------------------------------------------------

CAPACITY, N, K = 333, 160, 192
REPLAYED = [(0, 0, 0, 0, 0), (333, 0, 0, 0, 0), (1, 2, 3, 5, 7), (17, 100, 0, 33, 120), (127, 1, 128, 0, 77)]
IN_A_GRAPH = [
    ("mxfp8:tiled", "mxfp8:square,tiled"),
    ("mxfp8:e5m2,tiled", "mxfp8"),
    ("mxfp8", "mxfp8:e5m2"),
    ("nvfp4:tiled", "nvfp4:square,tiled"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("formats", IN_A_GRAPH, ids="-".join)
def test_graph_follows_new_sizes_and_data(formats: tuple[str, str]) -> None:
    device = torch.device("cuda")

    def drawn(sizes: tuple[int, ...], seed: int) -> tuple[Codes, Codes, Groups, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        groups = groups_of(Shape(sizes, CAPACITY - sum(sizes), N, K), device)
        x = poison_tail(normals((CAPACITY, K), FP32, device, generator), sizes)
        w, bias, alpha = (normals(s, FP32, device, generator) for s in ((5, N, K), (5, N), (5,)))
        return codes_of(x, formats[0], groups), codes_of(w, formats[1]), groups, bias, alpha

    def tensors(a: Codes, b: Codes, groups: Groups, bias: Tensor, alpha: Tensor) -> list[Tensor]:
        return [t for t in (*a[:3], *b[:3], groups.device, bias, alpha) if t is not None]

    a, b, groups, bias, alpha = given = drawn((60, 70, 80, 0, 90), 0)
    call = calls(a, b, formats, groups, bias, alpha)["fresh"]
    results: list[Tensor] = []
    graph = captured(lambda: results.append(call()))
    result = results[-1]  # of the call that was recorded
    for seed, sizes in enumerate(REPLAYED):
        new = drawn(sizes, seed + 1)
        for held, other in zip(tensors(*given), tensors(*new), strict=True):
            held.view(torch.uint8).copy_(other.view(torch.uint8))
        result.fill_(float("nan"))
        graph.replay()
        a, b, groups, bias, alpha = new
        exact = rows_fp64(a.values, b.values, groups.host, bias, None, True, alpha)
        above = [t.abs() for t in (a.values, b.values, bias, alpha)]
        magnitude = rows_fp64(*above[:2], groups.host, above[2], None, True, above[3])
        assert_rounded_sum(result, exact, magnitude, K + ROUNDED, str(sizes))
        assert_same_bits(result, calls(a, b, formats, groups, bias, alpha)["fresh"](), str(sizes))


# ---- rows that Hopper dequantizes during the GEMM ---------------------------------------------------------------

#: With few multiprocessors each has many tiles, and rows are dequantized during the GEMM; else a kernel before it does.
BESIDE = (2, 4, 6)
WIDE = Shape((300, 0, 7, 513, 130), 50, 1160, 544)


def test_the_shape_widens_rows_in_both_ways() -> None:
    rows = sum(WIDE.sizes) + WIDE.tail
    for multiprocessors in (114, 132):
        for max_sms in (0, *BESIDE):
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
    b = codes_of(w, pair[1])
    for turn in range(10):  # of other rows each: what the last call left in memory is wrong for this one
        x = poison_tail(normals((groups.capacity, WIDE.k), FP32, device, generator), WIDE.sizes)
        a = codes_of(x, pair[0], groups)

        def call(max_sms: int = 0, a: Codes = a) -> Tensor:
            given = quantized_arguments(a[:3], b[:3], *pair) | {"bias": bias}
            return ops.grouped_gemm(**given, group_sizes=groups.device, max_sms=max_sms)

        results = {max_sms: call(max_sms) for max_sms in BESIDE}
        expected = call()
        if turn == 0:
            exact = rows_fp64(a.values, b.values, groups.host, bias, None, True, None)
            magnitude = rows_fp64(a.values.abs(), b.values.abs(), groups.host, bias.abs(), None, True, None)
            assert_rounded_sum(expected, exact, magnitude, WIDE.k + ROUNDED, str(pair))
        for max_sms, got in results.items():
            assert_same_bits(got, expected, f"{max_sms} multiprocessors, turn {turn}")


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("mxfp8:e5m2,tiled", "mxfp8"), ("nvfp4", "nvfp4:tiled")], ids="-".join)
def test_graph_widens_rows_beside_products_of_new_sizes(formats: tuple[str, str]) -> None:
    device, n, k = torch.device("cuda"), WIDE.n, WIDE.k
    capacity = sum(WIDE.sizes) + WIDE.tail

    def drawn(sizes: tuple[int, ...], seed: int) -> tuple[Codes, Codes, Groups]:
        generator = torch.Generator().manual_seed(seed)
        groups = groups_of(Shape(sizes, capacity - sum(sizes), n, k), device)
        x = poison_tail(normals((capacity, k), FP32, device, generator), sizes)
        w = normals((len(sizes), n, k), FP32, device, generator)
        return codes_of(x, formats[0], groups), codes_of(w, formats[1]), groups

    def tensors(a: Codes, b: Codes, groups: Groups) -> list[Tensor]:
        return [t for t in (*a[:3], *b[:3], groups.device) if t is not None]

    def call(a: Codes, b: Codes, groups: Groups, max_sms: int) -> Tensor:
        given = quantized_arguments(a[:3], b[:3], *formats)
        return ops.grouped_gemm(**given, group_sizes=groups.device, max_sms=max_sms)

    given = drawn(WIDE.sizes, 0)
    results: list[Tensor] = []
    graph = captured(lambda: results.append(call(*given, 2)))
    others = [(0,) * 5, (capacity, 0, 0, 0, 0), (1, 2, 3, 5, 7), (0, 600, 0, 33, 120), (127, 1, 128, 0, 77)]
    for seed, sizes in enumerate(others):
        new = drawn(sizes, seed + 1)
        for held, other in zip(tensors(*given), tensors(*new), strict=True):
            held.view(torch.uint8).copy_(other.view(torch.uint8))
        results[-1].fill_(float("nan"))
        graph.replay()
        assert_same_bits(results[-1], call(*new, 0), str(sizes))
