"""What the ops of deferred weight gradients refuse leaves buffers and queue as they were; options of two weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

SIZES = [5, 0, 16, 3]
ROWS, N, K, G = 26, 24, 40, len(SIZES)


@pytest.fixture
def queues() -> Iterator[list[Tensor]]:
    made = [ops.new_wgrad_queue() for _ in range(2)]
    yield made
    for queue in made:
        ops.release_wgrad_queue(queue)


def operands(dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    grad, input = (torch.randn(ROWS, width, dtype=dtype) for width in (N, K))
    return {"grad": grad, "input": input, "group_sizes": torch.tensor(SIZES)}


def quantized(rows: int, width: int, sizes: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    data, scale = ops.quantize(torch.randn(rows, width), "mxfp8", sizes, rowwise=False, columnwise=True)
    return data, [scale]


def refused(queue: Tensor, error: type[Exception], text: str, **given: Any) -> None:
    with pytest.raises(error, match=f"transformer_plugin::defer_wgrad: {text}"):
        ops.defer_wgrad(queue, **given)
    assert ops.count_deferred_wgrads(queue) == 0


@pytest.mark.parametrize("skipped", [[G], [-1]], ids=str)
def test_groups_that_do_not_exist(skipped: list[int], queues: list[Tensor]) -> None:
    text = f"argument 'skipped': expected numbers of groups, got {skipped[0]}"
    refused(queues[0], ValueError, text, **operands(), skipped=skipped)


def test_a_dense_product_skips_nothing(queues: list[Tensor]) -> None:
    given = operands() | {"group_sizes": None, "skipped": [0]}
    refused(queues[0], ValueError, "argument 'skipped': expected numbers of groups, got 0", **given)


@pytest.mark.parametrize("grouped", [False, True])
def test_quantized_operands_of_different_rows(grouped: bool, queues: list[Tensor]) -> None:
    sizes = [torch.tensor([rows]) if grouped else None for rows in (128, 64)]
    (grad, grad_scale), (input, input_scale) = (
        quantized(rows, 32, size) for rows, size in zip((128, 64), sizes, strict=True)
    )
    given = {"grad": grad, "input": input, "grad_scale": grad_scale, "input_scale": input_scale}
    formats = {"grad_format": "mxfp8", "input_format": "mxfp8"}
    refused(queues[0], ValueError, "argument 'input", **given, **formats, group_sizes=sizes[0])


def test_one_operand_without_a_format(queues: list[Tensor]) -> None:
    grad, scale = quantized(128, 32)
    given = {"grad": grad, "grad_scale": [*scale], "grad_format": "mxfp8", "input": torch.randn(128, 32)}
    refused(queues[0], ValueError, "argument 'input_format': ", **given)


def strided_columns() -> list[Tensor]:
    return [torch.randn(N, K * 2)[:, ::2] for _ in range(G)]


@pytest.mark.parametrize("out", ["float16", "strided columns"])
def test_refused_buffers_keep_what_they_hold(out: str, queues: list[Tensor]) -> None:
    """Also those of skipped matrices, which accumulate=False sets to zero."""
    ops.defer_wgrad(queues[0], **operands(), skipped=[1])
    buffers = strided_columns() if out != "float16" else [torch.randn(N, K).half() for _ in range(G)]
    kept = [buffer.clone() for buffer in buffers]
    error: type[Exception] = TypeError if out == "float16" else ValueError
    with pytest.raises(
        error, match=r"transformer_plugin::run_deferred_wgrads: argument 'out\[0\]': expected "
    ):
        ops.run_deferred_wgrads(queues[0], buffers, accumulate=False)
    for buffer, before in zip(buffers, kept, strict=True):
        assert_same_bits(buffer, before)
    assert ops.count_deferred_wgrads(queues[0]) == 1


@pytest.mark.parametrize("rounded", [None, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["grad", "input"])
def test_buffers_in_the_memory_of_operands(name: str, rounded: Any, queues: list[Tensor]) -> None:
    torch.manual_seed(0)
    given = {"grad": torch.randn(K, N), "input": torch.randn(K, K)}
    ops.defer_wgrad(queues[0], **given, dtype=rounded)
    out = given[name].view(-1)[: N * K].view(N, K)
    before = given[name].clone()
    with pytest.raises(
        ValueError, match=r"argument 'out': expected a buffer apart from 'the .* in the queue'"
    ):
        ops.run_deferred_wgrads(queues[0], out)
    assert_same_bits(given[name], before)
    assert ops.count_deferred_wgrads(queues[0]) == 1


@pytest.mark.parametrize("options", [{"weight_grad": "zeros"}, {"accumulate": False}], ids=str)
@pytest.mark.parametrize("key", ["none", "fp8_block"])
def test_options_are_those_of_the_weight_with_a_buffer(
    key: str, options: dict[str, Any], queues: list[Tensor], device: torch.device
) -> None:
    """The second weight of grouped_mlp has no buffer: its gradients are those without main_grad, all of them."""
    torch.manual_seed(0)
    formats = (key, "fp8_block:square" if key != "none" else key, key)
    x = torch.randn(ROWS, 32, device=device)
    weights = [torch.randn(2, 64, 32, device=device), torch.randn(2, 32, 32, device=device)]
    sizes, probs = torch.tensor([20, 6], device=device), torch.rand(ROWS, device=device)
    wanted = [w.clone().requires_grad_() for w in weights]
    leaves = [w.clone().requires_grad_() for w in weights]
    buffer = torch.zeros_like(weights[0])
    given = {"fc1_main_grad": buffer, "fc1_wgrad_queue": queues[0], "fc2_wgrad_queue": queues[1], **options}
    for factor in (1.0, 2.0):
        ops.grouped_mlp(x * factor, *wanted, sizes, probs, None, None, *formats).sum().backward()
        output = ops.grouped_mlp(x * factor, *leaves, sizes, probs, None, None, *formats, **given)
        output.sum().backward()
    assert leaves[1].grad is None
    got = torch.zeros_like(weights[1])
    ops.run_deferred_wgrads(queues[1], got)
    assert wanted[1].grad is not None
    assert_same_bits(got, wanted[1].grad)


def test_expanded_buffers_are_refused_without_gradients(queues: list[Tensor]) -> None:
    with pytest.raises(
        ValueError, match=r"argument 'out\[0\]': expected a buffer with memory for each element"
    ):
        ops.run_deferred_wgrads(queues[0], torch.zeros(1).expand(N, K), accumulate=False)
