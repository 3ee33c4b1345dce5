"""Runs the cases of the quantize ops, grouped products and one-sided exchanges on a GPU under compute-sanitizer, which
finds accesses out of bounds, races in shared memory, and wrong barriers.

    python -m tests.sanitize_gpu            # memcheck, racecheck, synccheck; fails if one reports an error
    python -m tests.sanitize_gpu --jobs 6   # six processes on the same GPU share the cases

Under memcheck torch's allocator does not cache, so an access past a tensor is past an allocation. Tests check results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tests.sanitize_exchange import exchange_calls
from tests.sanitize_products import product_calls
from tests.sanitize_routing import routing_calls
from transformer_plugin import ops
from transformer_plugin.formats import MX_BLOCK, NV_BLOCK, Format
from transformer_plugin.testing.cases import activation_cases
from transformer_plugin.testing.delayed_scaling_cases import (
    grouped_quantize_scaled_cases,
    quantize_scaled_cases,
)
from transformer_plugin.testing.fused_cases import (
    activation_quantize_cases,
    bias_backward_quantize_cases,
    given,
)
from transformer_plugin.testing.gemm_activation_cases import (
    grouped_gemm_activation_cases,
    grouped_gemm_activation_quantize_cases,
)
from transformer_plugin.testing.gemm_cases import (
    apart,
    grouped_gemm_cases,
    grouped_gemm_list_cases,
    grouped_wgrad_cases,
    grouped_wgrad_list_cases,
    quantized_arguments,
    wgrad_arguments,
)
from transformer_plugin.testing.norm_cases import norm_cases, norm_quantize_cases, without_bias
from transformer_plugin.testing.quantize_cases import (
    COLUMNS,
    columns_of,
    extras,
    grouped_per_row_cases,
    grouped_quantize_cases,
    per_row_cases,
    quantize_cases,
    rows_of,
)
from transformer_plugin.testing.rowwise_cases import grouped_gemm_rowwise_cases

TOOLS = ("memcheck", "racecheck", "synccheck")
Call = Callable[[], Any]


def _quantize(input: torch.Tensor, format: str) -> None:
    more = extras(input, format)
    rows, columns = rows_of(more), columns_of(more)
    ops.quantize(input, format, **rows)
    ops.quantize(input, format, **columns, rowwise=False, columnwise=True)
    data, scale, data_t, scale_t = ops.quantize(input, format, **more, columnwise=True)
    amax, amax_t = rows.get("amax"), columns.get("amax_t")
    ops.dequantize(data, scale, format, torch.bfloat16, amax=amax)
    ops.requantize_transposed(data, scale, format, torch.bfloat16, **more)
    ops.dequantize(data_t, scale_t, format, torch.bfloat16, transposed=True, amax=amax_t)
    if Format.parse(format).family in ("fp8_tensor", "nvfp4"):
        ops.amax(input, format, columnwise=True)


def _grouped(input: torch.Tensor, sizes: torch.Tensor, format: str) -> None:
    more = extras(input, format, sizes)
    amax, amax_t = more.get("amax"), more.get("amax_t")
    data, scale, data_t, scale_t = ops.quantize(input, format, sizes, **more, columnwise=True)
    ops.dequantize(data, scale, format, torch.bfloat16, sizes, amax=amax)
    ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, **more)
    ops.dequantize(data_t, scale_t, format, torch.bfloat16, sizes, True, amax_t)
    family = Format.parse(format).family
    if family in ("fp8_tensor", "nvfp4"):
        ops.amax(input, format, sizes, columnwise=True)
    if family in ("fp8_tensor", "fp8_block") and "square" not in format:
        aligned = format + ("," if ":" in format else ":") + "aligned"
        many, index = sizes.new_ones(min(64, len(input))), torch.arange(-1, len(input) - 1).to(sizes.device)
        for groups, rows in ((sizes, None), (many, None), (many, index)):  # short groups: separate kernels
            ops.quantize(input, aligned, groups, columnwise=True, rows=rows)


def _activation(input: torch.Tensor, probs: Any) -> None:
    ops.activation_backward(ops.activation(input, probs), input, probs)


def _fused(input: torch.Tensor, format: str, probs: Any, sizes: Any) -> None:
    more = given(ops.activation(input, probs), format, sizes)
    ops.activation_quantize(input, format, probs, sizes, **rows_of(more))
    ops.activation_quantize(input, format, probs, sizes, **more, columnwise=True)


def _fused_backward(input: torch.Tensor, format: str, probs: Any, sizes: Any) -> None:
    grad = torch.ones(input.shape[0], input.shape[1] // 2, dtype=input.dtype, device=input.device)
    grad_input, _ = ops.activation_backward(grad, input, probs)
    ops.activation_backward_quantize(grad, input, format, probs, sizes, **given(grad_input, format, sizes))


def _bias_backward(grad: torch.Tensor, format: str, sizes: Any) -> None:
    more = given(grad, format, sizes)
    ops.bias_backward_quantize(grad, format, sizes, **rows_of(more))
    ops.bias_backward_quantize(grad, format, sizes, **more, columnwise=True)
    ops.bias_backward(grad) if sizes is None else ops.grouped_bias_backward(grad, sizes)


def _list(input: torch.Tensor, format: str) -> None:
    matrices = list(input) if input.dim() == 3 else [input, input[: input.shape[0] // 2]]
    refused = any(option in format for option in ("rht", "sr", "row_scaled"))
    whole = all(m.shape[0] % Format.parse(format).group_multiple == 0 for m in matrices)
    if matrices and not refused and whole:
        ops.quantize_list(matrices, format, columnwise=True)


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
        operands = ops.quantize(a, formats[0], sizes), ops.quantize(b, formats[1])
        given = quantized_arguments(*operands, *formats) | {"group_sizes": sizes, "bias": extra[0]}
        given |= {"bias_scale": extra[1]}
        ops.grouped_gemm_out(**given, out=ops.grouped_gemm(**given), beta=beta)
        for format, block in (
            ("mxfp8", MX_BLOCK),
            ("mxfp8:e5m2,tiled", MX_BLOCK),
            ("nvfp4", NV_BLOCK),
            ("nvfp4:tiled", NV_BLOCK),
        ):
            if a.shape[1] % block == 0:
                of_a, of_b = rows_of(extras(a, format, sizes)), rows_of(extras(b, format))
                rows_of_a = (*ops.quantize(a, format, sizes, **of_a), of_a.get("amax"))
                stack = (*ops.quantize(b, format, **of_b), of_b.get("amax"))
                given |= quantized_arguments(rows_of_a, stack, format, format)
                ops.grouped_gemm_out(**given, out=ops.grouped_gemm(**given), beta=beta)


def _rows(input: torch.Tensor, *sizes_and_format: Any) -> None:
    *sizes, format = sizes_and_format
    ops.dequantize(*ops.quantize(input, format, *sizes), format, torch.bfloat16, *sizes)
    if not sizes:
        ops.dequantize(*ops.quantize(input, format, **COLUMNS), format, torch.bfloat16, transposed=True)


def _grouped_gemm_rowwise(*arguments: Any) -> None:
    a, a_scale, b, b_scale, sizes, more = arguments
    key = "fp8_row:e5m2" if a.dtype == torch.float8_e5m2 else "fp8_row"
    given = quantized_arguments((a, a_scale), (b, b_scale), key, "fp8_row") | {"group_sizes": sizes} | more
    for dtype in (torch.bfloat16, torch.float32):
        out, beta = ops.grouped_gemm(**given, dtype=dtype), torch.ones(sizes.numel(), device=a.device)
        ops.grouped_gemm_out(**given, out=out, beta=beta)


def _grouped_gemm_list(a: torch.Tensor, b: list[torch.Tensor], sizes: torch.Tensor, *more: Any) -> None:
    ops.grouped_gemm(a, b, sizes, *more)
    *extra, transpose_b = more
    if transpose_b:
        formats = "fp8_block", "fp8_block:square"
        matrices = tuple(map(list, zip(*ops.quantize_list(b, formats[1]), strict=True)))
        operands = ops.quantize(a, formats[0], sizes), matrices
        given = quantized_arguments(*operands, *formats)
        ops.grouped_gemm(**given, group_sizes=sizes, bias=extra[0], bias_scale=extra[1])


def _grouped_wgrad(grad: torch.Tensor, input: torch.Tensor, sizes: torch.Tensor) -> None:
    main_grad = ops.grouped_gemm_wgrad(grad, input, sizes, torch.float32)
    rows = torch.arange(grad.shape[0], device=grad.device, dtype=torch.int32) // 2
    for dtype in (None, torch.float32):
        ops.grouped_gemm_wgrad(grad[: grad.shape[0] // 2 + 1], input, sizes, dtype, grad_rows=rows)
    beta = torch.ones(sizes.numel(), device=grad.device)
    ops.grouped_gemm_wgrad_out(grad, input, sizes, main_grad)
    rounded = ops.grouped_gemm_wgrad(grad, input, sizes)
    for out in (main_grad, rounded) if rounded.dtype != torch.float16 else (main_grad,):
        ops.grouped_gemm_wgrad_out(grad, input, sizes, out, False, beta=beta)
    for format in ("fp8_block", "fp8_block:aligned"):
        operands = [ops.quantize(x, format, sizes, rowwise=False, columnwise=True) for x in (grad, input)]
        given = wgrad_arguments(operands[0], operands[1], format, format) | {"group_sizes": sizes}
        ops.grouped_gemm_wgrad(**given)
        ops.grouped_gemm_wgrad_out(**given, out=main_grad)
        ops.grouped_gemm_wgrad_out(**given, out=main_grad, accumulate=False, beta=beta)
        if 0 < sizes.numel() <= 1024:
            ops.grouped_gemm_wgrad_out(**given, out=apart(main_grad))


def _grouped_wgrad_list(grad: torch.Tensor, input: torch.Tensor, sizes: torch.Tensor) -> None:
    out = apart(torch.zeros(sizes.numel(), grad.shape[1], input.shape[1], device=grad.device))
    for buffers in (out, [matrix.bfloat16() for matrix in out]):
        ops.grouped_gemm_wgrad_out(grad, input, sizes, buffers)
        ops.grouped_gemm_wgrad_out(grad, input, sizes, buffers, accumulate=False)
        beta = torch.ones(len(buffers), device=grad.device)
        ops.grouped_gemm_wgrad_out(grad, input, sizes, buffers, accumulate=False, beta=beta)


def _activation_product_quantized(
    a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, format: str, probs: Any, bias: Any, activation: str
) -> None:
    for keep_input in (True, False):
        ops.grouped_gemm_activation_quantize(a, b, sizes, format, probs, bias, activation, keep_input)


def _losses(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Rows of logits with padding, aligned or not."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for columns in (5, 72, 2048, 9001):
            logits = torch.randn(3, columns, dtype=dtype, device=device, requires_grad=True)
            target = torch.tensor([0, columns - 2, -100], device=device)
            for smoothing in (0.0, 0.1):
                arguments = logits, target, columns - 1, 1, "", smoothing
                yield f"losses {dtype} {columns} {smoothing}", partial(_loss, *arguments)


def _loss(*arguments: Any) -> None:
    ops.vocab_parallel_cross_entropy(*arguments).mean().backward()


def _call_with_arguments(call: Callable[..., Any], case: Any, device: torch.device) -> None:
    """Makes the arguments only in the process that runs the case."""
    call(*case.arguments(device))


def calls(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yields the name and the function of every call."""
    scaled = partial(ops.quantize_scaled, columnwise=True)
    for name, cases, call in (
        ("quantize", quantize_cases(), _quantize),
        ("grouped quantize", grouped_quantize_cases(), _grouped),
        ("quantize_scaled", [*quantize_scaled_cases(), *grouped_quantize_scaled_cases()], scaled),
        ("quantize_list", quantize_cases(), _list),
        ("activation", activation_cases(), _activation),
        ("activation_quantize", activation_quantize_cases(), _fused),
        ("activation_backward_quantize", activation_quantize_cases(widths=(128, 384)), _fused_backward),
        ("bias_backward_quantize", bias_backward_quantize_cases(), _bias_backward),
        ("norm", norm_cases(), _norm),
        ("norm_quantize", norm_quantize_cases(), _norm_quantize),
        ("grouped_gemm", grouped_gemm_cases(), _grouped_gemm),
        ("grouped_gemm_wgrad", grouped_wgrad_cases(), _grouped_wgrad),
        ("grouped_gemm of lists", grouped_gemm_list_cases(), _grouped_gemm_list),
        ("fp8_row", [*per_row_cases(), *grouped_per_row_cases()], _rows),
        ("grouped_gemm of rows", grouped_gemm_rowwise_cases(), _grouped_gemm_rowwise),
        ("grouped_gemm_wgrad_out of lists", grouped_wgrad_list_cases(), _grouped_wgrad_list),
        ("grouped_gemm_activation", grouped_gemm_activation_cases(), ops.grouped_gemm_activation),
        (
            "grouped_gemm_activation_quantize",
            grouped_gemm_activation_quantize_cases(),
            _activation_product_quantized,
        ),
    ):
        for case in cases:
            yield f"{name} {case.name}", partial(_call_with_arguments, call, case, device)
    yield from product_calls(device)
    yield from routing_calls(device)
    yield from exchange_calls()
    yield from _losses(device)


def chosen(only: str) -> Iterator[tuple[str, Call]]:
    """Yields the calls whose name contains `only`."""
    return ((name, call) for name, call in calls(torch.device("cuda")) if only in name)


def take(cases: Path, number: int) -> bool:
    """Claims a case; returns False if another process has it. The claim is a file in `cases`."""
    try:
        (cases / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_cases(only: str, cases: Path) -> None:
    """Makes every call that no other process has claimed."""
    count = 0
    for number, (_, call) in enumerate(chosen(only)):
        if take(cases, number):
            call()
            count += 1
    torch.cuda.synchronize()
    print(f"ran {count} cases", flush=True)


def run_under(tool: str, jobs: int, only: str, number_of_cases: int) -> None:
    """Starts `jobs` processes of this module under the tool; exits if one reports an error."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    else:  # do not check torch's kernels
        command += ["--kernel-name", "kernel_substring=transformer_plugin"]
    with (
        tempfile.TemporaryDirectory() as cases,
        tqdm(total=number_of_cases, desc=tool, unit="case") as progress,
    ):
        worker = [sys.executable, "-m", __spec__.name, "--cases", cases, "--only", only]
        running = [subprocess.Popen([*command, *worker], env=environment) for _ in range(jobs)]
        while any(process.poll() is None for process in running):
            time.sleep(1)
            progress.update(len(os.listdir(cases)) - progress.n)
        missing = number_of_cases - len(os.listdir(cases))
    if missing or any(process.returncode for process in running):
        sys.exit(f"{tool}: errors, see above, or {missing} cases that did not run")


def main() -> None:
    """Runs the cases, or starts this module under each tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=Path, metavar="FOLDER", help="run the cases that are not claimed in this folder"
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases with this in their name")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments = parser.parse_args()
    if arguments.cases:
        run_cases(arguments.only, arguments.cases)
        return
    number_of_cases = sum(1 for _ in chosen(arguments.only))
    if not number_of_cases:
        parser.error(f"--only: expected a part of a case's name, got {arguments.only!r}, which is in none")
    for tool in arguments.tools:
        run_under(tool, arguments.jobs, arguments.only, number_of_cases)


if __name__ == "__main__":
    main()
