"""Every case of the quantize family and of grouped products on a GPU under compute-sanitizer: accesses out of bounds,
races in shared memory, barriers.

    python -m tests.sanitize_gpu            # memcheck, racecheck, synccheck; fails where one has a report
    python -m tests.sanitize_gpu --jobs 6   # the cases shared out among six processes on the same GPU

Memory is not cached by torch's allocator here, so that an access past a tensor is one past an allocation. Results are
not looked at: the tests do that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from transformer_plugin import ops
from transformer_plugin.formats import MX_BLOCK, NV_BLOCK, Format
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.cases import swiglu_cases
from transformer_plugin.testing.delayed_scaling_cases import (
    grouped_quantize_scaled_cases,
    quantize_scaled_cases,
)
from transformer_plugin.testing.fused_cases import (
    bias_backward_quantize_cases,
    given,
    swiglu_quantize_cases,
)
from transformer_plugin.testing.gemm_cases import (
    apart,
    grouped_gemm_cases,
    grouped_gemm_list_cases,
    grouped_wgrad_cases,
    grouped_wgrad_list_cases,
)
from transformer_plugin.testing.gemm_swiglu_cases import (
    grouped_gemm_swiglu_backward_cases,
    grouped_gemm_swiglu_cases,
    grouped_gemm_swiglu_quantize_cases,
)
from transformer_plugin.testing.norm_cases import norm_cases, norm_quantize_cases, without_bias
from transformer_plugin.testing.quantize_cases import (
    columns_of,
    extras,
    grouped_quantize_cases,
    quantize_cases,
    rows_of,
)
from transformer_plugin.testing.rowwise_cases import grouped_gemm_rowwise_cases, quantize_rowwise_cases

TOOLS = ("memcheck", "racecheck", "synccheck")
Call = Callable[[], Any]
#: Sizes, n and k of products in which every stage of shared memory is filled again, within a tile and by the next.
LONG_SUMS = (([300, 0, 1, 129, 77], 520, 1408), ([5] * 150, 264, 640), ([700], 776, 2064))


def _quantize(input: torch.Tensor, format: str) -> None:
    more = extras(input, format)
    rows, columns = rows_of(more), columns_of(more)
    ops.quantize(input, format, **rows)
    ops.quantize_transposed(input, format, **columns)
    data, scale, data_t, scale_t = ops.quantize_both(input, format, **more)
    amax, amax_t = rows.get("amax"), columns.get("amax")
    ops.dequantize(data, scale, format, torch.bfloat16, amax=amax)
    ops.requantize_transposed(data, scale, format, torch.bfloat16, **more)
    ops.dequantize(data_t, scale_t, format, torch.bfloat16, transposed=True, amax=amax_t)
    if Format.parse(format).family in ("fp8_tensor", "nvfp4"):
        ops.amax_both(input, format)


def _grouped(input: torch.Tensor, sizes: torch.Tensor, format: str) -> None:
    more = extras(input, format, sizes)
    amax, amax_t = more.get("amax"), more.get("amax_t")
    data, scale, data_t, scale_t = ops.grouped_quantize_both(input, sizes, format, **more)
    ops.grouped_dequantize(data, scale, sizes, format, torch.bfloat16, amax=amax)
    ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, **more)
    ops.grouped_dequantize(data_t, scale_t, sizes, format, torch.bfloat16, transposed=True, amax=amax_t)
    family = Format.parse(format).family
    if family in ("fp8_tensor", "nvfp4"):
        ops.amax_both(input, format, sizes)
    if family in ("fp8_tensor", "fp8_block") and "square" not in format:
        aligned = format + ("," if ":" in format else ":") + "aligned"
        ops.grouped_quantize_both(input, sizes, aligned)
        many = sizes.new_ones(min(64, input.shape[0]))  # short groups have a kernel of their own
        ops.grouped_quantize_both(input, many, aligned)


def _swiglu(input: torch.Tensor, probs: Any) -> None:
    ops.swiglu_backward(ops.swiglu(input, probs), input, probs)


def _fused(input: torch.Tensor, probs: Any, sizes: Any, format: str) -> None:
    more = given(ops.swiglu(input, probs), format, sizes)
    ops.swiglu_quantize(input, probs, sizes, format, **rows_of(more))
    ops.swiglu_quantize_both(input, probs, sizes, format, **more)


def _fused_backward(input: torch.Tensor, probs: Any, sizes: Any, format: str) -> None:
    grad = torch.ones(input.shape[0], input.shape[1] // 2, dtype=input.dtype, device=input.device)
    grad_input, _ = ops.swiglu_backward(grad, input, probs)
    ops.swiglu_backward_quantize_both(grad, input, probs, sizes, format, **given(grad_input, format, sizes))


def _bias_backward(grad: torch.Tensor, sizes: Any, format: str) -> None:
    more = given(grad, format, sizes)
    ops.bias_backward_quantize(grad, sizes, format, **rows_of(more))
    ops.bias_backward_quantize_both(grad, sizes, format, **more)
    ops.bias_backward(grad) if sizes is None else ops.grouped_bias_backward(grad, sizes)


def _list(input: torch.Tensor, format: str) -> None:
    matrices = list(input) if input.dim() == 3 else [input, input[: input.shape[0] // 2]]
    refused = any(option in format for option in ("rht", "sr", "row_scaled"))
    if (
        matrices
        and not refused
        and all(m.shape[0] % Format.parse(format).group_multiple == 0 for m in matrices)
    ):
        ops.quantize_list_both(matrices, format)


def _norm(*arguments: Any) -> None:
    input, weight, bias, _, zero_centered = arguments
    _, rstd = ops.rms_norm_forward(*without_bias(arguments))
    ops.rms_norm_backward(input, input, weight, rstd, zero_centered)
    _, mean, rstd = ops.layer_norm_forward(*arguments)
    ops.layer_norm_backward(input, input, weight, mean, rstd, zero_centered, bias is not None)


def _norm_quantize(*arguments: Any) -> None:
    *before, format, zero_centered = arguments
    more = rows_of(given(ops.layer_norm(*before, zero_centered), format))
    ops.rms_norm_quantize(*without_bias(arguments), **more)
    ops.layer_norm_quantize(*arguments, **more)


def _grouped_gemm(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, *more: Any) -> None:
    product = ops.grouped_gemm(a, b, sizes, *more)
    *extra, transpose_b = more
    beta = torch.ones(sizes.numel(), device=a.device)
    ops.grouped_gemm_out(a, b, sizes, product, *more, beta, beta)
    rows = torch.arange(a.shape[0], device=a.device) // 2
    taken = ops.grouped_gemm(a[: a.shape[0] // 2 + 1], b, sizes, *more, rows=rows)
    ops.gather_rows_backward(taken, rows, sizes, a.shape[0])
    if transpose_b:
        formats = "fp8_block", "fp8_block:square"
        operands = *ops.grouped_quantize(a, sizes, formats[0]), *ops.quantize(b, formats[1])
        quantized = ops.grouped_gemm_quantized(*operands, sizes, *formats, torch.bfloat16, *extra)
        ops.grouped_gemm_quantized_out(*operands, sizes, *formats, quantized, *extra, beta=beta)
        for format, block in (
            ("mxfp8", MX_BLOCK),
            ("mxfp8:e5m2,tiled", MX_BLOCK),
            ("nvfp4", NV_BLOCK),
            ("nvfp4:tiled", NV_BLOCK),
        ):
            if a.shape[1] % block == 0:
                of_a, of_b = rows_of(extras(a, format, sizes)), rows_of(extras(b, format))
                operands = *ops.grouped_quantize(a, sizes, format, **of_a), *ops.quantize(b, format, **of_b)
                amaxes = {"a_amax": of_a.get("amax"), "b_amax": of_b.get("amax")}
                arguments = (*operands, sizes, format, format)
                quantized = ops.grouped_gemm_quantized(*arguments, torch.bfloat16, *extra, **amaxes)
                ops.grouped_gemm_quantized_out(*arguments, quantized, *extra, **amaxes, beta=beta)


def _quantize_rowwise(input: torch.Tensor, options: dict[str, Any]) -> None:
    ops.quantize_rowwise(input, **options)


def _grouped_gemm_rowwise(*arguments: Any) -> None:
    *operands, more = arguments
    for dtype in (torch.bfloat16, torch.float32):
        ops.grouped_gemm_rowwise(*operands, dtype=dtype, **more)


def _grouped_gemm_list(a: torch.Tensor, b: list[torch.Tensor], sizes: torch.Tensor, *more: Any) -> None:
    ops.grouped_gemm_list(a, b, sizes, *more)
    *extra, transpose_b = more
    if transpose_b:
        formats = "fp8_block", "fp8_block:square"
        operands = *ops.grouped_quantize(a, sizes, formats[0]), *ops.quantize_list(b, formats[1])
        ops.grouped_gemm_quantized_list(*operands, sizes, *formats, torch.bfloat16, *extra)


def _grouped_wgrad(grad: torch.Tensor, input: torch.Tensor, sizes: torch.Tensor) -> None:
    main_grad = ops.grouped_gemm_wgrad(grad, input, sizes, torch.float32)
    beta = torch.ones(sizes.numel(), device=grad.device)
    ops.grouped_gemm_wgrad_out(grad, input, sizes, main_grad)
    rounded = ops.grouped_gemm_wgrad(grad, input, sizes)
    for out in (main_grad, rounded) if rounded.dtype != torch.float16 else (main_grad,):
        ops.grouped_gemm_wgrad_out(grad, input, sizes, out, False, beta=beta)
    for format in ("fp8_block", "fp8_block:aligned"):
        operands = (
            *ops.grouped_quantize_transposed(grad, sizes, format),
            *ops.grouped_quantize_transposed(input, sizes, format),
        )
        ops.grouped_gemm_wgrad_quantized(*operands, sizes, format, format, torch.bfloat16)
        ops.grouped_gemm_wgrad_quantized_out(*operands, sizes, format, format, main_grad)
        ops.grouped_gemm_wgrad_quantized_out(*operands, sizes, format, format, main_grad, False, beta=beta)


def _grouped_wgrad_list(grad: torch.Tensor, input: torch.Tensor, sizes: torch.Tensor) -> None:
    out = apart(torch.zeros(sizes.numel(), grad.shape[1], input.shape[1], device=grad.device))
    for buffers in (out, [matrix.bfloat16() for matrix in out]):
        ops.grouped_gemm_wgrad_list_out(grad, input, sizes, buffers)
        ops.grouped_gemm_wgrad_list_out(grad, input, sizes, buffers, accumulate=False)
        beta = torch.ones(len(buffers), device=grad.device)
        ops.grouped_gemm_wgrad_list_out(grad, input, sizes, buffers, accumulate=False, beta=beta)


def _swiglu_product_quantized(
    a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, probs: Any, format: str, bias: Any, interleave: int
) -> None:
    for keep_input in (True, False):
        ops.grouped_gemm_swiglu_quantize(a, b, sizes, probs, format, bias, interleave, keep_input)


def _long_sums(sizes: torch.Tensor, n: int, k: int) -> None:
    recipe = Float8BlockScaling()
    input = torch.randn(int(sizes.sum()) + 3, k, dtype=torch.bfloat16, device=sizes.device)
    weight = torch.randn(sizes.numel(), n, k, dtype=torch.bfloat16, device=sizes.device)
    operands = (
        *ops.grouped_quantize(input, sizes, recipe.input_format),
        *ops.quantize(weight, recipe.weight_format),
    )
    formats = recipe.input_format, recipe.weight_format
    ops.grouped_gemm_quantized(*operands, sizes, *formats, torch.bfloat16)


def _in_turn(sizes: torch.Tensor, max_sms: int) -> None:
    """By so few blocks that each takes several tiles of ragged rows."""
    input = torch.randn(int(sizes.sum()) + 3, 264, dtype=torch.bfloat16, device=sizes.device)
    weight = torch.randn(sizes.numel(), 776, 264, dtype=torch.bfloat16, device=sizes.device)
    rows = torch.arange(input.shape[0], device=sizes.device) // 2
    plan = {"max_sms": max_sms}
    product = ops.grouped_gemm(input, weight, sizes, **plan)
    ops.grouped_gemm_wgrad(product, input, sizes, **plan)
    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    ops.grouped_gemm_wgrad_out(product, input, sizes, main_grad, **plan)
    ops.grouped_gemm(input, weight, sizes, rows=rows, **plan)
    ops.grouped_gemm(product, weight, sizes, transpose_b=False, **plan)
    ops.grouped_gemm(product, weight, sizes, transpose_b=False, rows=rows, **plan)
    recipe = Float8BlockScaling()
    operands = (
        *ops.grouped_quantize(input, sizes, recipe.input_format),
        *ops.quantize(weight, recipe.weight_format),
    )
    formats = recipe.input_format, recipe.weight_format
    ops.grouped_gemm_quantized(*operands, sizes, *formats, torch.bfloat16, **plan)
    codes = *ops.quantize_rowwise(input[:, :256]), *ops.quantize_rowwise(weight[..., :256])
    ops.grouped_gemm_rowwise(*codes, sizes, **plan)
    _, h = ops.grouped_gemm_swiglu(input, weight[:, :768], sizes, None, **plan)
    ops.grouped_gemm_swiglu_quantize(input, weight[:, :768], sizes, None, "fp8_block", **plan)
    ops.grouped_gemm_swiglu_backward(input, weight.mT[..., :384].contiguous(), sizes, h, None, **plan)


def _widened_beside(sizes: torch.Tensor, format: str) -> None:
    """So few multiprocessors that rows are widened beside the products."""
    input = torch.randn(int(sizes.sum()) + 3, 352, dtype=torch.bfloat16, device=sizes.device)
    weight = torch.randn(sizes.numel(), 1032, 352, dtype=torch.bfloat16, device=sizes.device)
    amaxes = {}
    if Format.parse(format).family == "nvfp4":
        amaxes = {"a_amax": ops.amax(input, format, sizes), "b_amax": ops.amax(weight, format)}
    operands = (
        *ops.grouped_quantize(input, sizes, format, amaxes.get("a_amax")),
        *ops.quantize(weight, format, amaxes.get("b_amax")),
    )
    formats = format, format
    ops.grouped_gemm_quantized(*operands, sizes, *formats, torch.bfloat16, **amaxes, max_sms=4)


def calls(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Every call, by its name."""
    for name, cases, call in (
        ("quantize", quantize_cases(), _quantize),
        ("grouped_quantize", grouped_quantize_cases(), _grouped),
        ("quantize_scaled", quantize_scaled_cases(), ops.quantize_scaled_both),
        ("grouped_quantize_scaled", grouped_quantize_scaled_cases(), ops.quantize_scaled_both),
        ("quantize_list", quantize_cases(), _list),
        ("swiglu", swiglu_cases(), _swiglu),
        ("swiglu_quantize", swiglu_quantize_cases(), _fused),
        ("swiglu_backward_quantize", swiglu_quantize_cases(widths=(128, 384)), _fused_backward),
        ("bias_backward_quantize", bias_backward_quantize_cases(), _bias_backward),
        ("norm", norm_cases(), _norm),
        ("norm_quantize", norm_quantize_cases(), _norm_quantize),
        ("grouped_gemm", grouped_gemm_cases(), _grouped_gemm),
        ("grouped_gemm_wgrad", grouped_wgrad_cases(), _grouped_wgrad),
        ("grouped_gemm_list", grouped_gemm_list_cases(), _grouped_gemm_list),
        ("quantize_rowwise", quantize_rowwise_cases(), _quantize_rowwise),
        ("grouped_gemm_rowwise", grouped_gemm_rowwise_cases(), _grouped_gemm_rowwise),
        ("grouped_gemm_wgrad_list_out", grouped_wgrad_list_cases(), _grouped_wgrad_list),
        ("grouped_gemm_swiglu", grouped_gemm_swiglu_cases(), ops.grouped_gemm_swiglu),
        ("grouped_gemm_swiglu_quantize", grouped_gemm_swiglu_quantize_cases(), _swiglu_product_quantized),
        (
            "grouped_gemm_swiglu_backward",
            grouped_gemm_swiglu_backward_cases(),
            ops.grouped_gemm_swiglu_backward,
        ),
    ):
        for case in cases:
            yield f"{name} {case.name}", partial(call, *case.arguments(device))
    for sizes, n, k in LONG_SUMS:
        groups = torch.tensor(sizes, dtype=torch.int32, device=device)
        yield f"grouped_gemm long-sums-{k}", partial(_long_sums, groups, n, k)
    groups = torch.tensor([300, 0, 7, 130, 290], dtype=torch.int32, device=device)
    for max_sms in (2, 8):  # with 8 the last tiles are taken in halves
        yield f"grouped_gemm in-turn-{max_sms}", partial(_in_turn, groups, max_sms)
    for format in ("mxfp8", "mxfp8:e5m2,tiled", "nvfp4"):
        yield f"grouped_gemm widened-beside-{format}", partial(_widened_beside, groups, format)


def main() -> None:
    """Walks the cases, or starts itself under each tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walk", action="store_true", help="only walk the cases, in this process")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases with this in their name")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at once, each with a share of the cases"
    )
    parser.add_argument("--share", type=int, default=0, help="of --walk: which of the --jobs shares")
    arguments = parser.parse_args()
    if arguments.walk:
        chosen = (call for name, call in calls(torch.device("cuda")) if arguments.only in name)
        count = 0
        for count, call in enumerate(chosen, 1):
            if count % arguments.jobs == arguments.share:
                call()
        torch.cuda.synchronize()
        if not count:
            parser.error(
                f"--only: expected a part of a case's name, got {arguments.only!r}, which is in none"
            )
        print(f"walked share {arguments.share + 1} of {arguments.jobs} of {count} cases")
        return
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in arguments.tools:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "1",
            sys.executable,
            "-m",
            __spec__.name,
            *("--walk", "--only", arguments.only, "--jobs", str(arguments.jobs)),
        ]
        print(f"== {tool}", flush=True)
        running = [
            subprocess.Popen([*command, "--share", str(share)], env=environment)
            for share in range(arguments.jobs)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(f"{tool}: a report, above")


if __name__ == "__main__":
    main()
