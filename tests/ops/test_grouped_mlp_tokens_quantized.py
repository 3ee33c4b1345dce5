"""grouped_mlp of tokens, with `slot` and `source`: the bits of copying the rows, grouped_mlp of them, and their sums,
in every format, forward and backward; compiled too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.on_gpu import most_memory
from tests.ops.test_linear_ops import NONE, RECIPES, keys
from transformer_plugin import nn, ops
from transformer_plugin.formats import Format, resolve
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits

Formats = tuple[str, str, str]
FORMATS: dict[str, Formats] = {"none": NONE, **{name: keys(recipe) for name, recipe in RECIPES.items()}}
FORMATS["nv-random"] = keys(NVFP4BlockScaling())
FORMATS["block-nan"] = ("fp8_block:nan", "fp8_block:square,nan", "fp8_block:nan")
NAMES = ("tokens", "fc1", "fc2", "probs", "fc1_bias", "fc2_bias")
EXPERTS, HIDDEN, FFN = 5, 160, 96


def drawn(count: int, dtype: torch.dtype, device: torch.device, alignment: int) -> tuple[list[Tensor], ...]:
    """Returns the leaves and (slot, source, group_sizes). An expert gets no token, one token has no row, and a few rows
    are dropped at the end."""
    generator = torch.Generator().manual_seed(count)
    indices = torch.rand(count, EXPERTS - 1, generator=generator).argsort(1)[:, :2]
    indices[indices >= 2] += 1
    indices[:1] = -1
    capacity = max(count * 2 - 3, 0) // 16 * 16 + EXPERTS * (alignment - 1)
    slot, source, _, sizes, _ = ops.assign_slots(indices, 0, EXPERTS, capacity // 16 * 16, alignment)
    shapes = (count, HIDDEN), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN), (EXPERTS, HIDDEN)
    tokens, fc1, fc2, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    probs = torch.rand(source.shape[0], generator=generator)
    first_bias = torch.randn(EXPERTS, 2 * FFN, generator=generator)
    leaves = [x.to(dtype) for x in (tokens, fc1 / 12, fc2 / 10)] + [probs]
    leaves += [first_bias.to(dtype), bias.to(dtype)]
    return [x.to(device) for x in leaves], [x.to(device) for x in (slot, source, sizes)]


def step(
    leaves: list[Tensor], maps: list[Tensor], biases: bool, formats: Formats, by_index: bool, weights: bool
) -> dict[str, Tensor]:
    """Returns the output and the gradients, without those of the weights if they are not wanted."""
    slot, source, sizes = maps
    names = [n for n in NAMES[: 6 if biases else 4] if weights or n not in ("fc1", "fc2")]
    copies = {n: x.clone().requires_grad_(n in names) for n, x in zip(NAMES, leaves, strict=True)}
    tokens, fc1, fc2, probs, *both = copies.values()
    torch.manual_seed(4)
    more = (*(both if biases else (None, None)), *formats)
    if by_index:
        output = ops.grouped_mlp(tokens, fc1, fc2, sizes, probs, *more, slot=slot, source=source)
    else:
        rows = ops.permute_rows(tokens, slot, source)
        output = ops.unpermute(ops.grouped_mlp(rows, fc1, fc2, sizes, probs, *more), slot, source)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    grads = torch.autograd.grad(output, [copies[n] for n in names], grad)
    return {"output": output.detach(), **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "frozen"])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_same_bits_as_copied_rows(
    name: str, dtype: torch.dtype, biases: bool, weights: bool, device: torch.device
) -> None:
    """Padded groups, as nvfp4 needs them, and groups of any sizes."""
    first, weight, grad = FORMATS[name]
    formats = resolve(first, device), weight, resolve(grad, device)
    for alignment in (16,) if name.startswith("nv") else (1, 16):
        leaves, maps = drawn(210, dtype, device, alignment)
        expected = step(leaves, maps, biases, formats, False, weights)
        got = step(leaves, maps, biases, formats, True, weights)
        for key, value in expected.items():
            assert_same_bits(got[key], value, f"{key}, alignment {alignment}")


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8CurrentScaling()], ids=["block", "current"])
def test_compiled_moe(recipe: Recipe, device: torch.device) -> None:
    """One graph, and the bits of eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    moe = nn.MoE(128, 64, 8, 2, recipe=recipe, device=device, dtype=torch.bfloat16)
    fast = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = torch.randn(300, 128).to(device, torch.bfloat16)
    results = []
    for layer in (moe, fast):
        leaf = x.clone().requires_grad_()
        output = layer(leaf).output
        grads = torch.autograd.grad(output.float().square().sum(), [leaf, *moe.parameters()])
        results.append([output.detach(), *grads])
    for got, expected in zip(results[1], results[0], strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8CurrentScaling()], ids=["block", "current"])
@pytest.mark.gpu
def test_rows_are_not_copied_on_a_gpu(recipe: Recipe) -> None:
    """On Hopper a forward needs less memory than the quantized rows of tokens and a copy of them in bf16 take."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU copies the rows")
    tokens, experts, topk, hidden, ffn = 1024, 32, 8, 4096, 64
    indices = torch.rand(tokens, experts).argsort(1)[:, :topk].to(device)
    slot, source, _, sizes, _ = ops.assign_slots(indices, 0, experts, tokens * topk, 1)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    fc1 = torch.randn(experts, 2 * ffn, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    fc2 = torch.randn(experts, hidden, ffn, device=device, dtype=torch.bfloat16)
    first, weight, grad = keys(recipe)
    formats = resolve(first, device), weight, resolve(grad, device)
    assert Format.parse(formats[0]).aligned_groups
    probs = torch.rand(tokens * topk, device=device)
    row_bytes = tokens * topk * hidden

    def of_tokens() -> Tensor:
        return ops.grouped_mlp(x, fc1, fc2, sizes, probs, None, None, *formats, slot=slot, source=source)

    def of_copies() -> Tensor:
        rows = ops.permute_rows(x, slot, source)
        return ops.grouped_mlp(rows, fc1, fc2, sizes, probs, None, None, *formats)

    # Both hold quantized rows (2 bytes per element) and the result of fc2 (2 bytes); of_copies also the copy while it
    # quantizes it, and returns the result itself.
    assert most_memory(of_tokens) < most_memory(of_copies) - row_bytes
