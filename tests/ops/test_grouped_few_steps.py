"""Grouped products with one or a few K steps per tile and many tiles, so that on Hopper most pipeline stages begin
a new tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    apart,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

N = 544
#: K: a part of one step of 64, one whole step and five; or 1, 1 and 3 steps of 128. The last wraps around a
#: pipeline of four stages.
LENGTHS = (32, 64, 288)
#: Numbers of multiprocessors: one cluster takes whole tiles; with others the last tiles are half tiles or
#: not.
MULTIPROCESSORS = (2, 6, 8, 40, 0)

Product = Callable[..., tuple[Tensor, ...]]


def signs(*size: int, device: torch.device, seed: int) -> Tensor:
    """Draws -1, 0 and 1 in bfloat16: all sums are whole numbers that every kind of product computes exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, size, generator=generator).to(device, torch.bfloat16)


def products(x: Tensor, weight: Tensor, sizes: Tensor) -> Iterator[tuple[str, Product, bool]]:
    """Yields the name and function of each product, and whether its result is the matrix product itself."""
    reversed_rows, rows = x.flip(0), torch.arange(x.shape[0], device=x.device).flip(0)
    matrices, weight_t = apart(weight), weight.mT.contiguous()
    yield "forward", lambda **plan: (ops.grouped_gemm(x, weight, sizes, **plan),), True
    yield (
        "data gradient",
        lambda **plan: (ops.grouped_gemm(x, weight_t, sizes, transpose_b=False, **plan),),
        True,
    )
    yield (
        "indexed rows",
        lambda **plan: (ops.grouped_gemm(reversed_rows, weight, sizes, rows=rows, **plan),),
        True,
    )
    yield "a list", lambda **plan: (ops.grouped_gemm(x, matrices, sizes, **plan),), True
    for name, key, weight_key in (
        ("fp8_block", "fp8_block:pow2", "fp8_block:square,pow2"),
        ("fp8_tensor", "fp8_tensor:pow2", "fp8_tensor:pow2"),
        ("mxfp8", "mxfp8", "mxfp8"),
    ):
        a, b = ops.quantize(x, key, sizes), ops.quantize(weight, weight_key)
        arguments = quantized_arguments(a, b, key, weight_key) | {"group_sizes": sizes}
        yield name, lambda arguments=arguments, **plan: (ops.grouped_gemm(**arguments, **plan),), True
    by_row = [ops.quantize(m, "fp8_row:pow2") for m in (x, weight)]
    of_rows = quantized_arguments(by_row[0], by_row[1], "fp8_row", "fp8_row") | {"group_sizes": sizes}
    yield "fp8_row", lambda **plan: (ops.grouped_gemm(**of_rows, **plan),), True
    first_product = ops.grouped_gemm_activation
    yield "SwiGLU", lambda **plan: first_product(x, weight, sizes, None, **plan), False
    yield (
        "SwiGLU into fp8_block",
        lambda **plan: ops.grouped_gemm_activation_quantize(x, weight, sizes, "fp8_block", **plan),
        False,
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_exact_sums_with_any_number_of_multiprocessors(length: int, device: torch.device) -> None:
    groups = 200 if device.type == "cuda" else 5
    sizes = torch.full((groups,), 129, device=device)
    sizes[::7] = 0
    sizes[3] = 1
    end = int(sizes.sum())
    x, weight = (
        signs(end + 3, length, device=device, seed=0),
        signs(groups, N, length, device=device, seed=1),
    )
    of_row = torch.arange(groups, device=device).repeat_interleave(sizes)
    exact = torch.zeros(end + 3, N, dtype=torch.float64, device=device)
    for group in range(groups):
        exact[:end][of_row == group] = x[:end][of_row == group].double() @ weight[group].double().T
    assert exact.abs().max() <= 256  # whole numbers that bfloat16 represents exactly
    for name, product, is_product in products(x, weight, sizes):
        first = product(max_sms=MULTIPROCESSORS[0])
        if is_product:
            assert torch.equal(first[0].double(), exact), name
        for plan in MULTIPROCESSORS[1:]:
            for got, expected in zip(product(max_sms=plan), first, strict=True):
                assert_same_bits(got, expected, f"{name}, {plan} multiprocessors")


@pytest.mark.gpu
@pytest.mark.parametrize("filled", [0, 1])
def test_empty_products_terminate(filled: int) -> None:
    """All groups are empty, or all but one row: a thousand products each, alternating between two streams."""
    device = torch.device("cuda")
    sizes = torch.zeros(40, dtype=torch.int32, device=device)
    sizes[17] = filled
    x, weight = signs(64, 64, device=device, seed=0), signs(40, N, 64, device=device, seed=1)
    expected = torch.zeros(64, N, dtype=torch.bfloat16, device=device)
    if filled:
        expected[0] = (x[0].double() @ weight[17].double().T).bfloat16()
    for name, product, is_product in products(x, weight, sizes):
        if not is_product:
            continue
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results = []
        torch.cuda.synchronize()
        for i in range(1000):
            with torch.cuda.stream(streams[i % 2]):
                results = [*results[-1:], *product()]
        torch.cuda.synchronize()
        for result in results:
            assert torch.equal(result, expected), name
