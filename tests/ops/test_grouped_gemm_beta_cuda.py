"""Beta on a GPU: no copies of the operands on Hopper, CUDA graphs, and more tiles than thread blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_oracle import rows_fp64, wgrad_fp64
from tests.ops.grouped_draw import Groups, quantize_operand
from tests.ops.on_gpu import captured, most_memory
from tests.ops.test_grouped_gemm_beta import check_rows, check_wgrad, per_row, sizes_of
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    apart,
    factors,
    integers,
    normals,
    poison_tail,
    quantized_arguments,
    row_index,
    wgrad_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def skip_unless_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has kernels for this")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_beta_of_zero_has_the_bits_of_a_product_without_beta(dtype: torch.dtype) -> None:
    """The same kernel must run with and without beta; another kernel would add in another order."""
    skip_unless_hopper()
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([300, 0, 385, 129], device=CUDA)
    x, grad = (normals((830, width), dtype, CUDA, generator) for width in (1016, 776))
    weight = normals((4, 776, 1016), dtype, CUDA, generator)
    bias, zero = normals((4, 776), FP32, CUDA, generator), torch.zeros(4, device=CUDA)
    end = 814
    for a, transpose_b, c in ((x, True, None), (x, True, bias), (grad, False, None)):
        expected = ops.grouped_gemm(a, weight, sizes, c, transpose_b=transpose_b)
        out = torch.full_like(expected, float("nan"))
        ops.grouped_gemm_out(a, weight, sizes, out, c, transpose_b=transpose_b, beta=zero)
        assert_same_bits(out[:end], expected[:end], f"rows, {transpose_b}")
        assert out[end:].isnan().all()
    for out_dtype in (FP32, BF16) if dtype == BF16 else (FP32,):
        weights = ops.grouped_gemm_wgrad(grad, x, sizes, out_dtype)
        out = torch.full_like(weights, float("nan"))
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out, False, beta=zero)
        assert_same_bits(out, weights, f"weight gradient into {out_dtype}")
        matrices = apart(torch.full_like(weights, float("nan")))
        ops.grouped_gemm_wgrad_out(grad, x, sizes, matrices, False, beta=zero)
        assert_same_bits(torch.stack(matrices), weights, f"weight gradients into {out_dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_b", [True, False])
def test_indexed_rows_are_not_copied(transpose_b: bool) -> None:
    skip_unless_hopper()
    places, n, k = 16384, 256, 4096
    a = torch.randn(64, k, device=CUDA).bfloat16()
    b = torch.randn((2, n, k) if transpose_b else (2, k, n), device=CUDA).bfloat16()
    rows = torch.randint(0, 64, (places,), device=CUDA)
    sizes, beta = torch.tensor([10000, 6000], device=CUDA), torch.tensor([1.0, 0.5], device=CUDA)
    out = torch.zeros(places, n, dtype=BF16, device=CUDA)

    def call() -> None:
        ops.grouped_gemm_out(a, b, sizes, out, transpose_b=transpose_b, beta=beta, rows=rows)

    assert most_memory(call) < places * k * 2 // 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    "formats",
    [("fp8_block", "fp8_block:square"), ("fp8_tensor", "fp8_tensor"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")],
)
def test_quantized_weights_are_not_dequantized_to_memory(formats: tuple[str, str]) -> None:
    skip_unless_hopper()
    generator, host = torch.Generator().manual_seed(0), torch.full((8,), 16)
    groups = Groups(host, host.to(CUDA), 128)
    a = quantize_operand(normals((128, 1024), FP32, CUDA, generator), formats[0], groups)
    b = quantize_operand(normals((8, 1024, 1024), FP32, CUDA, generator), formats[1])
    out, beta = torch.zeros(128, 1024, dtype=BF16, device=CUDA), torch.ones(8, device=CUDA)
    operands = quantized_arguments(a[:3], b[:3], *formats)

    def call() -> None:
        ops.grouped_gemm_out(**operands, group_sizes=groups.device, out=out, beta=beta)

    assert most_memory(call) < 8 * 1024 * 1024 // 2, "a quarter of the values of the weights"


@pytest.mark.gpu
@pytest.mark.parametrize("key", ["fp8_block:aligned", "fp8_tensor:aligned"])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_wgrad_operands_are_not_dequantized_to_memory(key: str, out_dtype: torch.dtype) -> None:
    skip_unless_hopper()
    generator, host = torch.Generator().manual_seed(0), torch.full((8,), 1024)
    groups = Groups(host, host.to(CUDA), 8192)
    grad, input = (
        quantize_operand(normals((8192, 512), FP32, CUDA, generator), key, groups, columns=True)
        for _ in range(2)
    )
    out, beta = torch.zeros(8, 512, 512, dtype=out_dtype, device=CUDA), torch.ones(8, device=CUDA)

    def call() -> None:
        operands = wgrad_arguments(grad[:2], input[:2], key, key)
        ops.grouped_gemm_wgrad_out(
            **operands, group_sizes=groups.device, out=out, accumulate=False, beta=beta
        )

    assert most_memory(call) < 8192 * 512 // 2, "a quarter of the values of one operand"


@pytest.mark.gpu
def test_graph_replays_with_new_beta() -> None:
    """As with microbatches: the first replay overwrites the buffers, and the others add to them."""
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([100, 0, 200, 33], device=CUDA)
    x, grad = (integers((340, width), BF16, CUDA, generator) for width in (200, 264))
    weight, beta = integers((4, 264, 200), BF16, CUDA, generator), torch.zeros(4, device=CUDA)
    main_grad = torch.zeros(4, 264, 200, device=CUDA)
    rows = torch.zeros(340, 264, dtype=BF16, device=CUDA)

    def step() -> None:
        ops.grouped_gemm_wgrad_out(grad, x, sizes, main_grad, False, beta=beta)
        ops.grouped_gemm_out(x, weight, sizes, rows, beta=beta)

    graph = captured(step)
    product = wgrad_fp64(grad.cpu(), x.cpu(), sizes.cpu())
    exact = rows_fp64(x.cpu(), weight.cpu(), sizes.cpu(), None, None, True)[:333]
    main_grad.fill_(float("nan"))
    rows.fill_(float("nan"))
    main_grad_fp64, rows_fp64_expected = torch.zeros_like(product), torch.zeros_like(exact)
    for new in ([0.0] * 4, [1.0] * 4, [0.5, 0.25, 0.0, -1.0], [1.0] * 4):
        beta.copy_(torch.tensor(new))
        graph.replay()
        main_grad_fp64 = product + main_grad_fp64 * torch.tensor(new).double()[:, None, None]
        each = per_row(torch.tensor(new), sizes_of((100, 0, 200, 33))).double()
        rows_fp64_expected = (exact + rows_fp64_expected * each).bfloat16().double()
        assert_same_bits(main_grad + 0, main_grad_fp64.float().to(CUDA) + 0, f"weight gradient, beta {new}")
        assert_same_bits(rows[:333] + 0, rows_fp64_expected.bfloat16().to(CUDA) + 0, f"rows, beta {new}")
        assert rows[333:].isnan().all()


@pytest.mark.gpu
def test_more_tiles_than_thread_blocks() -> None:
    """With long sums, so that the pipeline stages wrap around many times between tiles that read the buffer."""
    generator, groups = torch.Generator().manual_seed(0), (3000, 0, 129, 4000, 1, 1270, 64, 2111)
    of = sizes_of(groups)
    x, grad = (poison_tail(integers((of.capacity, w), BF16, CUDA, generator), groups) for w in (1032, 1304))
    weight = integers((8, 1304, 1032), BF16, CUDA, generator)
    beta, rows = factors(8, CPU, generator), row_index(of.host, of.capacity, 97, CPU, generator).to(CUDA)
    few = integers((97, 1032), BF16, CUDA, generator)
    sizes, there = of.host.to(CUDA), beta.to(CUDA)
    taken = torch.zeros_like(x)
    taken[: of.end] = few[rows[: of.end].long()]

    def product(a: Tensor, b: Tensor, transpose_b: bool) -> Tensor:
        return rows_fp64(a, b, of.host, None, None, transpose_b).cpu()

    def forward(out: Tensor) -> None:
        ops.grouped_gemm_out(x, weight, sizes, out, beta=there)

    def indexed(out: Tensor) -> None:
        ops.grouped_gemm_out(few, weight, sizes, out, beta=there, rows=rows)

    def data_grad(out: Tensor) -> None:
        ops.grouped_gemm_out(grad, weight, sizes, out, transpose_b=False, beta=there)

    def wgrad(out: Tensor) -> None:
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out, False, beta=there)

    for call, exact in (
        (forward, product(x, weight, True)),
        (indexed, product(taken, weight, True)),
        (data_grad, product(grad, weight, False)),
    ):
        for _ in range(3):
            out = torch.zeros(exact.shape, dtype=BF16, device=CUDA)
            check_rows(exact, beta, of, [out], call)
    exact = wgrad_fp64(grad, x, of.host).cpu()
    for dtype in (FP32, BF16):
        check_wgrad(exact, beta, [torch.zeros(exact.shape, dtype=dtype, device=CUDA)] * 3, wgrad)
