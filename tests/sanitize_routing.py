"""The steps of a layer of experts for :mod:`tests.sanitize_gpu`: router, slots, rows of tokens, sums, and experts that
read tokens by an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from transformer_plugin import ops
from transformer_plugin.formats import resolve
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

#: Tokens, experts, experts of a token, width. Every router kernel, rows in several pieces, and none of 16 bytes.
SIZES = (
    (5, 4, 2, 8),
    (300, 64, 8, 2048),
    (2100, 128, 8, 264),
    (70, 1000, 6, 130),
    (33, 256, 8, 16392),
    (0, 8, 2, 64),
)


def _route(
    tokens: int, experts: int, topk: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routes tokens, two of them to no expert. Returns tokens, indices and weights."""
    input = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    logits = torch.randn(tokens, experts, device=device, requires_grad=True)  # cuBLAS fails under racecheck
    ops.topk_router(logits, torch.zeros(experts, device=device), topk, "sigmoid")[0].sum().backward()
    weights, indices, *_ = ops.topk_router_with_load(logits, None, topk, "softmax")
    weights.sum().backward()
    indices[:2] = -1
    return input, indices, weights.detach()


def _rows(tokens: int, experts: int, topk: int, width: int, alignment: int, device: torch.device) -> None:
    input, indices, weights = _route(tokens, experts, topk, width, device)
    ops.count_tokens_per_expert(indices, experts)
    capacity = tokens * topk + experts * (alignment - 1)
    for room in (capacity, capacity // 3):
        slot, source, *_ = ops.assign_weighted_slots(indices, weights, 0, experts, room, alignment)
        for dtype in (torch.bfloat16, torch.float32):
            rows = ops.permute_rows(input.to(dtype).requires_grad_(), slot, source)
            ops.unpermute(rows, slot, source).sum().backward()


def _experts(recipe: Recipe, device: torch.device) -> None:
    """Forward and backward of experts that read tokens by an index."""
    tokens, indices, weights = _route(300, 8, 2, 256, device)
    slot, source, sizes, _, probs = ops.assign_weighted_slots(indices, weights, 0, 8, 600 + 8 * 127, 128)
    fc1, fc2 = (
        torch.randn(8, *size, dtype=torch.bfloat16, device=device).requires_grad_()
        for size in ((256, 256), (256, 128))
    )
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    formats = [resolve(key, device) for key in keys]
    operands = (tokens.requires_grad_(), fc1, fc2, sizes, probs.requires_grad_())
    ops.grouped_mlp(*operands, None, None, *formats, slot=slot, source=source).sum().backward()


def routing_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name and the function of every call."""
    for sizes in SIZES:
        for alignment in (1, 128):
            yield f"routing {sizes} by {alignment}", partial(_rows, *sizes, alignment, device)
    for recipe in (Recipe(), Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()):
        yield f"routing experts {recipe.input_format}", partial(_experts, recipe, device)
