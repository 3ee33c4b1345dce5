"""Products of :mod:`tests.sanitize_gpu` in which every stage of a pipeline, or every block, works several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.gemm_cases import quantized_arguments

RAGGED = [300, 0, 7, 130, 290]
#: Sizes, n and k of products for which every pipeline stage is reused, within a tile and by the next tile.
LONG_SUMS = (([300, 0, 1, 129, 77], 520, 1408), ([5] * 150, 264, 640), ([700], 776, 2064))


def _input_weight_sizes(
    sizes: list[int], n: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bfloat16 rows, three of them past the groups, and their weights."""
    input = torch.randn(sum(sizes) + 3, k, dtype=torch.bfloat16, device=device)
    weight = torch.randn(len(sizes), n, k, dtype=torch.bfloat16, device=device)
    return input, weight, torch.tensor(sizes, dtype=torch.int32, device=device)


def _long_sums(group_sizes: list[int], n: int, k: int, device: torch.device) -> None:
    recipe = Float8BlockScaling()
    input, weight, sizes = _input_weight_sizes(group_sizes, n, k, device)
    operands = (
        ops.quantize(input, recipe.input_format, sizes),
        ops.quantize(weight, recipe.weight_format),
    )
    given = quantized_arguments(*operands, recipe.input_format, recipe.weight_format)
    ops.grouped_gemm(**given, group_sizes=sizes)


def _in_turn(max_sms: int, device: torch.device) -> None:
    """Few blocks, so that each processes several tiles of ragged rows."""
    input, weight, sizes = _input_weight_sizes(RAGGED, 776, 264, device)
    rows = torch.arange(input.shape[0], device=device) // 2
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
        ops.quantize(input, recipe.input_format, sizes),
        ops.quantize(weight, recipe.weight_format),
    )
    given = quantized_arguments(*operands, recipe.input_format, recipe.weight_format)
    ops.grouped_gemm(**given, group_sizes=sizes, **plan)
    operands = ops.quantize(input[:, :256], "fp8_row"), ops.quantize(weight[..., :256], "fp8_row")
    given = quantized_arguments(*operands, "fp8_row", "fp8_row")
    ops.grouped_gemm(**given, group_sizes=sizes, **plan)
    ops.grouped_gemm_activation(input, weight[:, :768], sizes, **plan)
    ops.grouped_gemm_activation_quantize(input, weight[:, :768], sizes, "fp8_block", **plan)


def _overlapped_dequantize(format: str, device: torch.device) -> None:
    """Few SMs, so that rows are dequantized within the GEMM kernel."""
    input, weight, sizes = _input_weight_sizes(RAGGED, 1032, 352, device)
    amaxes = {}
    if Format.parse(format).family == "nvfp4":
        amaxes = {"a_amax": ops.amax(input, format, sizes), "b_amax": ops.amax(weight, format)}
    a = (*ops.quantize(input, format, sizes, amaxes.get("a_amax")), amaxes.get("a_amax"))
    b = (*ops.quantize(weight, format, None, amaxes.get("b_amax")), amaxes.get("b_amax"))
    ops.grouped_gemm(**quantized_arguments(a, b, format, format), group_sizes=sizes, max_sms=4)


def product_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name and the function of every call."""
    for sizes, n, k in LONG_SUMS:
        yield f"grouped_gemm long-sums-{k}", partial(_long_sums, sizes, n, k, device)
    for max_sms in (2, 8):  # with 8 the last tiles are half-N tiles
        yield f"grouped_gemm in-turn-{max_sms}", partial(_in_turn, max_sms, device)
    for format in ("mxfp8", "mxfp8:e5m2,tiled", "nvfp4"):
        yield f"grouped_gemm overlapped-dequantize-{format}", partial(_overlapped_dequantize, format, device)
