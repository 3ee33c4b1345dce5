"""Grouped products plus beta times the contents of a buffer: exact bits over several tiles, tails, and memory that
must not be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import row_buffers, rows_fp64, wgrad_fp64, whole
from tests.ops.grouped_draw import Groups, QuantizedOperand, quantize_operand
from tests.ops.test_grouped_gemm import strided_buffers
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    apart,
    factors,
    integers,
    normals,
    poison_tail,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Groups that are empty, that end inside a tile, and whose beta is 0 (every fourth).
GROUPS = {
    "any": (1, 0, 127, 129, 0, 128, 255, 257, 0, 65),
    "many, some empty": tuple(7 * i % 61 if i % 5 else 0 for i in range(40)),
    "one": (385,),
    "none": (0, 0, 0, 0),
}
# One tile; several tiles, also an odd number of columns of tiles; a partial last tile; one K step and many.
WIDTHS = [(8, 8), (264, 72), (520, 200), (776, 336)]
by_groups = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
by_widths = pytest.mark.parametrize(("n", "k"), WIDTHS)


def sizes_of(groups: tuple[int, ...]) -> Groups:
    host = torch.tensor(groups)
    return Groups(host, host, sum(groups) + 37)


def limits(device: torch.device) -> tuple[int, ...]:
    """The limits of multiprocessors to test: none, and two that process all tiles. A CPU has none to limit."""
    return (0, 2) if device.type == "cuda" else (0,)


def per_row(beta: Tensor, groups: Groups) -> Tensor:
    """Expands beta to the rows of the groups, [rows, 1]."""
    return beta.repeat_interleave(groups.host, output_size=groups.end)[:, None]


def check_rows(
    product: Tensor, beta: Tensor, groups: Groups, outs: list[Tensor], call: Callable[[Tensor], None]
) -> None:
    """``product`` is in float64 on the CPU. Rows whose beta is 0 and the tail contain NaN before the call."""
    shape, each = tuple(product.shape), per_row(beta, groups)
    before = integers(shape, torch.float64, CPU, torch.Generator().manual_seed(3))
    expected = product[: groups.end] + before[: groups.end] * each.double() + 0.0
    before[: groups.end].masked_fill_((each == 0).expand(groups.end, shape[1]), float("nan"))
    before[groups.end :] = float("nan")
    for i, out in enumerate(outs):
        initial = before.to(out.dtype).to(out.device)  # once: two conversions may give different NaNs
        out.copy_(initial)
        storage = whole(out).clone()
        call(out)
        assert_same_bits(out[: groups.end] + 0, expected.to(out.dtype).to(out.device), f"buffer {i}")
        out[: groups.end].copy_(initial[: groups.end])
        assert_same_bits(whole(out), storage, f"the tail and the memory around buffer {i}")


def check_wgrad(product: Tensor, beta: Tensor, outs: list[Tensor], call: Callable[[Tensor], None]) -> None:
    before = integers(tuple(product.shape), torch.float64, CPU, torch.Generator().manual_seed(3))
    expected = product + before * beta.double()[:, None, None] + 0.0
    before[beta == 0] = float("nan")
    for i, out in enumerate(outs):
        initial = before.to(out.dtype).to(out.device)
        out.copy_(initial)
        storage = whole(out).clone()
        call(out)
        assert_same_bits(out + 0, expected.to(out.dtype).to(out.device), f"buffer {i}")
        out.copy_(initial)
        assert_same_bits(whole(out), storage, f"the memory around buffer {i}")


@by_groups
@by_widths
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(("dtype", "extra"), [(BF16, True), (BF16, False), (FP16, True)])
def test_rows_have_exact_sums(
    groups: tuple[int, ...],
    n: int,
    k: int,
    transpose_b: bool,
    dtype: torch.dtype,
    extra: bool,
    device: torch.device,
) -> None:
    """On the whole GPU and on two multiprocessors that process all tiles; also with indexed rows."""
    generator, of = torch.Generator().manual_seed(0), sizes_of(groups)
    count = of.count
    x = poison_tail(integers((of.capacity, k), dtype, CPU, generator, 4), groups)
    b = integers((count, n, k) if transpose_b else (count, k, n), dtype, CPU, generator, 4)
    alpha, beta = (factors(count, CPU, generator) for _ in range(2))
    bias = integers((count, n), FP32, CPU, generator) if extra else None
    scale = poison_tail(integers((of.capacity,), FP32, CPU, generator) / 4, groups) if extra else None
    product = rows_fp64(x, b, of.host, bias, scale, transpose_b, alpha)
    reversed_rows = x.flip(0).nan_to_num(0.0).to(device)
    index = torch.arange(of.capacity).flip(0).to(device)
    sizes = of.host.to(device)
    a, b, alpha, there = (t.to(device) for t in (x, b, alpha, beta))
    bias, scale = (None if t is None else t.to(device) for t in (bias, scale))
    for max_sms in limits(device):

        def call(out: Tensor, max_sms: int = max_sms) -> None:
            ops.grouped_gemm_out(a, b, sizes, out, bias, scale, transpose_b, alpha, there, max_sms=max_sms)

        def indexed(out: Tensor, max_sms: int = max_sms) -> None:
            more: dict[str, Any] = {"rows": index, "max_sms": max_sms}
            ops.grouped_gemm_out(reversed_rows, b, sizes, out, bias, scale, transpose_b, alpha, there, **more)

        shape = (of.capacity, n)
        check_rows(product, beta, of, row_buffers(shape, dtype, device), call)
        check_rows(product, beta, of, row_buffers(shape, dtype, device)[:2], indexed)


@by_groups
@by_widths
@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP32)])
def test_wgrad_has_exact_sums(
    groups: tuple[int, ...],
    n: int,
    k: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Into a stack with any strides, and into a list of buffers with padded rows."""
    generator, of = torch.Generator().manual_seed(0), sizes_of(groups)
    grad, input = (
        poison_tail(integers((of.capacity, width), dtype, CPU, generator, 4), groups) for width in (n, k)
    )
    alpha, beta = (factors(of.count, CPU, generator) for _ in range(2))
    product = wgrad_fp64(grad, input, of.host, alpha)
    grad, input, sizes = (t.to(device) for t in (grad, input, of.host))
    alpha, there = alpha.to(device), beta.to(device)
    shape = (of.count, n, k)
    for max_sms in limits(device):

        def call(out: Tensor, max_sms: int = max_sms) -> None:
            ops.grouped_gemm_wgrad_out(grad, input, sizes, out, False, alpha, there, max_sms=max_sms)

        def listed(out: Tensor, max_sms: int = max_sms) -> None:
            wide = [torch.zeros(n, k + 8, dtype=out_dtype, device=device) for _ in range(of.count)]
            matrices = [matrix[:, :k] for matrix in wide]
            for matrix, value in zip(matrices, out, strict=True):
                matrix.copy_(value)
            ops.grouped_gemm_wgrad_out(grad, input, sizes, matrices, False, alpha, there, max_sms=max_sms)
            assert not any(matrix[:, k:].any() for matrix in wide)
            out.copy_(torch.stack(matrices))

        check_wgrad(product, beta, strided_buffers(shape, out_dtype, device), call)
        check_wgrad(product, beta, strided_buffers(shape, out_dtype, device)[:1], listed)


@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_wgrad_without_rows_scales_the_buffer(out_dtype: torch.dtype, device: torch.device) -> None:
    """The product is zero, and the buffer is multiplied by beta all the same."""
    beta = torch.tensor([0.5, 0.0, -2.0], device=device)
    for capacity in (0, 5):
        grad, input = (torch.full((capacity, w), float("nan"), device=device).bfloat16() for w in (16, 24))
        out = torch.full((3, 16, 24), 3.0, dtype=out_dtype, device=device)
        out[1] = float("nan")
        ops.grouped_gemm_wgrad_out(
            grad, input, torch.zeros(3, dtype=torch.int64, device=device), out, False, beta=beta
        )
        assert_same_bits(out[:, 0, 0] + 0, torch.tensor([1.5, 0.0, -6.0], dtype=out_dtype, device=device))
        assert (out == out[:, :1, :1]).all()


def whole_numbers(
    shape: tuple[int, ...],
    key: str,
    device: torch.device,
    generator: torch.Generator,
    groups: Groups | None = None,
    columns: bool = False,
) -> QuantizedOperand:
    """Quantizes small whole numbers, which formats with power-of-two scales represent exactly and whose sums are
    exact in FP8 tensor cores."""
    values = integers(shape, FP32, device, generator, 2)
    if groups is not None:
        values[groups.end :] = 0
    quantized = quantize_operand(values, key, groups, columns)
    assert torch.equal(
        quantized.values[: groups.end if groups else None], values[: groups.end if groups else None]
    )
    return quantized


POWER_OF_TWO_SCALES = [
    ("fp8_block", "fp8_block:square"),
    ("fp8_tensor:pow2", "fp8_tensor:pow2"),
    ("fp8_tensor:e5m2,pow2", "fp8_tensor:pow2"),
    ("mxfp8", "mxfp8"),
]


@by_groups
@pytest.mark.parametrize(("n", "k"), [(8, 32), (264, 96), (520, 224)])
@pytest.mark.parametrize("formats", POWER_OF_TWO_SCALES, ids=lambda pair: pair[0])
def test_quantized_rows_have_exact_sums(
    formats: tuple[str, str], groups: tuple[int, ...], n: int, k: int, device: torch.device
) -> None:
    generator, of = torch.Generator().manual_seed(0), sizes_of(groups)
    of = Groups(of.host, of.host.to(device), of.capacity)
    a, b = (
        whole_numbers((of.capacity, k), formats[0], device, generator, of),
        whole_numbers((of.count, n, k), formats[1], device, generator),
    )
    alpha, beta = (factors(of.count, CPU, generator) for _ in range(2))
    bias = integers((of.count, n), FP32, CPU, generator)
    scale = poison_tail(integers((of.capacity,), FP32, CPU, generator) / 4, groups)
    product = rows_fp64(a.values.cpu(), b.values.cpu(), of.host, bias, scale, True, alpha)
    arguments = quantized_arguments(a[:2], b[:2], *formats) | {
        "group_sizes": of.device,
        "bias": bias.to(device),
    }
    arguments |= {"bias_scale": scale.to(device), "alpha": alpha.to(device), "beta": beta.to(device)}
    for max_sms in limits(device):

        def call(out: Tensor, max_sms: int = max_sms) -> None:
            ops.grouped_gemm_out(**arguments, out=out, max_sms=max_sms)

        check_rows(product, beta, of, row_buffers((of.capacity, n), BF16, device), call)


@by_groups
@pytest.mark.parametrize(("n", "k"), [(8, 8), (264, 72), (133, 520)])
@pytest.mark.parametrize(
    "formats", ["fp8_block", "fp8_block:aligned", "fp8_tensor:pow2", "fp8_tensor:e5m2,pow2"]
)
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_quantized_wgrad_has_exact_sums(
    formats: str, groups: tuple[int, ...], n: int, k: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    generator, of = torch.Generator().manual_seed(0), sizes_of(groups)
    of = Groups(of.host, of.host.to(device), of.capacity)
    keys = formats, formats.replace("e5m2,", "")
    grad, input = (
        whole_numbers((of.capacity, width), key, device, generator, of, columns=True)
        for width, key in zip((n, k), keys, strict=True)
    )
    alpha, beta = (factors(of.count, CPU, generator) for _ in range(2))
    product = wgrad_fp64(grad.values.cpu(), input.values.cpu(), of.host, alpha)
    arguments = wgrad_arguments(grad[:2], input[:2], *keys) | {"group_sizes": of.device, "accumulate": False}
    arguments |= {"alpha": alpha.to(device), "beta": beta.to(device)}
    for max_sms in limits(device):

        def call(out: Tensor, max_sms: int = max_sms) -> None:
            ops.grouped_gemm_wgrad_out(**arguments, out=out, max_sms=max_sms)

        check_wgrad(product, beta, strided_buffers((of.count, n, k), out_dtype, device), call)
        stack = normals((of.count, n, k), out_dtype, device, generator)
        matrices = apart(stack)
        call(stack)
        ops.grouped_gemm_wgrad_out(**arguments, out=matrices, max_sms=max_sms)
        assert_same_bits(torch.stack(matrices), stack, "a list of buffers")


@by_groups
@pytest.mark.parametrize(("n", "k"), [(8, 32), (264, 96), (520, 224)])
def test_nvfp4_rows_are_within_the_bound(
    groups: tuple[int, ...], n: int, k: int, device: torch.device
) -> None:
    """The scales of nvfp4 are not powers of two, so the result is compared within the bound of an FP32 sum."""
    key, generator, of = "nvfp4", torch.Generator().manual_seed(0), sizes_of(groups)
    of = Groups(of.host, of.host.to(device), of.capacity)
    x = normals((of.capacity, k), FP32, device, generator)
    x[of.end :] = 0
    a, b = (
        quantize_operand(x, key, of),
        quantize_operand(normals((of.count, n, k), FP32, device, generator), key),
    )
    alpha, beta = (factors(of.count, device, generator) for _ in range(2))
    out = normals((of.capacity, n), BF16, device, generator)
    each = per_row(beta.cpu(), of).to(device).double()
    initial = out[: of.end].double() * each
    out[: of.end].masked_fill_((each == 0).expand(of.end, n), float("nan"))
    tail = out[of.end :].clone()
    arguments = quantized_arguments(a[:3], b[:3], key, key)
    ops.grouped_gemm_out(**arguments, group_sizes=of.device, out=out, alpha=alpha, beta=beta)
    exact = rows_fp64(a.values, b.values, of.host, None, None, True, alpha)[: of.end] + initial
    above = rows_fp64(a.values.abs(), b.values.abs(), of.host, None, None, True, alpha.abs())[: of.end]
    assert_rounded_sum(out[: of.end], exact, above + initial.abs(), k + 8)
    assert_same_bits(out[of.end :], tail, "tail")


def test_consecutive_calls_accumulate(device: torch.device) -> None:
    """Each call reads what the previous call wrote, which may still be running when this call starts."""
    generator, groups, times = torch.Generator().manual_seed(0), (130, 0, 65, 61), 20
    sizes = torch.tensor(groups, device=device)
    x, grad = (integers((256, width), BF16, device, generator, 2) for width in (136, 264))
    weight = integers((4, 264, 136), BF16, device, generator, 2)
    one = torch.ones(4, device=device)
    product = wgrad_fp64(grad.cpu(), x.cpu(), sizes.cpu())
    added = torch.zeros(product.shape, device=device)
    for _ in range(times):
        ops.grouped_gemm_wgrad_out(grad, x, sizes, added, False, beta=one)
    assert_same_bits(added + 0, (product * times).float().to(device))
    rows = torch.zeros(256, 264, dtype=BF16, device=device)
    expected = rows.double().cpu()
    exact = rows_fp64(x.cpu(), weight.cpu(), sizes.cpu(), None, None, True)
    for _ in range(times):
        ops.grouped_gemm_out(x, weight, sizes, rows, beta=one)
        expected = (expected + exact).bfloat16().double()
    assert_same_bits(rows + 0, expected.bfloat16().to(device) + 0)
