"""Experts over 1 to 8 ranks against plain PyTorch in float64 in one process, with everyone's tokens and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.parallel.test_received_tokens import Copying
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.recipes import NVFP4BlockScaling, recipe_from_name
from transformer_plugin.testing.distributed import Rank, RankPool

HIDDEN, FFN, EXPERTS, TOPK, MOST = 64, 128, 16, 3, 24
#: of output and gradients, which pass through up to four roundings whose largest relative error is 2^-4 (e4m3), 2^-2
#: (e2m1) or 2^-9 (bfloat16, which the results and what is between the products are rounded to, too); float32: its sums.
BOUNDS = {"none": 1e-5, "bf16": 8 * 2.0**-9} | dict.fromkeys(
    ("fp8_tensor", "fp8_block", "mxfp8"), 2 * 2.0**-4
)
BOUNDS["nvfp4"] = 2 * 2.0**-2
COUNTS = {"even": (24,), "uneven": (24, 7, 0, 16, 1, 0, 24, 3), "one-rank-has-all": (0, 24, 0, 0)}


class NoGradient(torch.autograd.Function):
    """Passes values on and no gradient back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def drawn(rank: int, count: int, routing: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens, experts, weights and the output's gradient of a rank, which every rank can compute."""
    generator = torch.Generator().manual_seed(20 + rank)
    tokens, grad = torch.randn(2, count, HIDDEN, generator=generator).to(dtype)
    indices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    if routing == "one-expert":
        indices = torch.full((count, TOPK), -1)
        indices[:, 0] = EXPERTS - 1
    elif routing == "masked":
        indices[torch.rand(count, TOPK, generator=generator) < 0.3] = -1
    return tokens, indices, torch.rand(count, TOPK, generator=generator), grad


def layer(rank: Rank, recipe: str, copies: bool) -> MoE:
    of_recipe = (
        NVFP4BlockScaling(stochastic_rounding=False) if recipe == "nvfp4" else recipe_from_name(recipe)
    )
    config = DispatchConfig(max_tokens=MOST, alignment=16 if recipe == "nvfp4" else None)
    options: dict[str, Any] = {
        "dispatch": config,
        "recipe": of_recipe,
        "device": rank.device,
        "dtensor": False,
    }
    options["dtype"] = torch.float32 if recipe == "none" else torch.bfloat16
    torch.manual_seed(1)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOPK, group=rank.group, **options)
    if copies:
        moe.experts.__class__ = Copying
    return moe


def exact(data: list[tuple[Tensor, ...]], fc1: Tensor, fc2: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients of tokens, weights, fc1 and fc2, of everyone's tokens in float64."""
    tokens, indices, weights, grad = (torch.cat(each) for each in zip(*data, strict=True))
    leaves = [each.double().requires_grad_() for each in (tokens, weights, fc1, fc2)]
    x, w, first, second = leaves
    output = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, k = (indices == expert).nonzero(as_tuple=True)
        gate, linear = (x[token] @ first[expert].T).chunk(2, 1)
        rows = torch.nn.functional.silu(gate) * linear @ second[expert].T
        output = output.index_add(0, token, rows * w[token, k, None])
    return output.detach(), *torch.autograd.grad(output, leaves, grad.double())


def check(rank: Rank, recipe: str, copies: bool, counts: tuple[int, ...], routing: str, how: str) -> None:
    moe = layer(rank, recipe, copies)
    fc1, fc2 = (each.weight for each in (moe.experts.fc1, moe.experts.fc2))
    data = [drawn(r, counts[r % len(counts)], routing, fc1.dtype) for r in range(rank.size)]
    tokens, indices, weights, grad = (each.to(rank.device) for each in data[rank.rank])
    x, w = tokens.requires_grad_(), weights.requires_grad_()

    def run(tokens: Tensor, weights: Tensor) -> Tensor:
        return moe.dispatcher.run(moe.experts, tokens, indices, weights)[0]

    if how.startswith("checkpoint"):
        output = checkpoint(run, x, w, use_reentrant=how == "checkpoint-reentrant")
    elif how == "compiled":
        torch._dynamo.reset()
        output = torch.compile(run, fullgraph=True, backend="aot_eager")(x, w)
    else:
        output = run(x, w)
    times, used = 1, output
    if how == "absent":
        data[0] = (*data[0][:3], torch.zeros_like(data[0][3]))
        used = NoGradient.apply(output) if rank.rank == 0 else output
    if how == "twice":
        used.backward(grad, retain_graph=True)
        times = 2
    used.backward(grad)

    full = [torch.empty(rank.size, *each.shape, dtype=each.dtype, device=rank.device) for each in (fc1, fc2)]
    for each, parts in zip((fc1, fc2), full, strict=True):
        dist.all_gather_into_tensor(parts.view(-1, *each.shape[1:]), each.detach())
    expected = exact(data, *(each.flatten(0, 1).cpu() for each in full))
    first = sum(counts[r % len(counts)] for r in range(rank.rank))
    mine, experts = slice(first, first + len(tokens)), EXPERTS // rank.size
    here = slice(rank.rank * experts, (rank.rank + 1) * experts)
    got = (output, x.grad, w.grad, fc1.grad, fc2.grad)
    names = ("output", "tokens", "weights", "fc1", "fc2")
    for name, value, wanted in zip(names, got, expected, strict=True):
        part = wanted[here if name.startswith("fc") else mine] * (times if name != "output" else 1)
        value = torch.zeros_like(part) if value is None else value.detach().cpu()
        if how == "absent" and rank.rank == 0 and name in ("tokens", "weights"):
            assert not value.any(), name
        # Of all ranks together: one of them may have a single token.
        norms = torch.stack([(value.double() - part).square().sum(), part.square().sum()]).to(rank.device)
        dist.all_reduce(norms)
        error = float((norms[0] / norms[1]).sqrt())
        assert error <= BOUNDS[recipe], f"{name}: {error}"


def pool_of(size: int, make_pool: Any) -> RankPool:
    pool: RankPool = make_pool(size, "gloo")
    return pool


@pytest.mark.parametrize("copies", [False, True], ids=["index", "copies"])
@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_recipes(make_pool: Any, size: int, recipe: str, copies: bool) -> None:
    pool_of(size, make_pool).run(
        check, recipe, copies, COUNTS["uneven" if size > 1 else "even"], "any", "eager"
    )


@pytest.mark.parametrize("routing", ["any", "masked", "one-expert"])
@pytest.mark.parametrize("counts", COUNTS)
def test_routings(ranks: RankPool, counts: str, routing: str) -> None:
    for recipe in ("none", "fp8_block"):
        ranks.run(check, recipe, False, COUNTS[counts], routing, "eager")


@pytest.mark.parametrize("how", ["absent", "twice", "checkpoint", "checkpoint-reentrant", "compiled"])
def test_backwards(ranks: RankPool, how: str) -> None:
    for recipe in ("none", "fp8_block"):
        ranks.run(check, recipe, False, COUNTS["uneven" if how != "compiled" else "even"], "masked", how)


def test_compact_rows_of_eight_ranks(make_pool: Any) -> None:
    """More ranks than experts of a token, and a capacity: received tokens are copied out of those of all ranks."""
    pool_of(8, make_pool).run(check_compact)


def check_compact(rank: Rank) -> None:
    config = DispatchConfig(max_tokens=MOST, capacity=100)
    torch.manual_seed(1)
    options: dict[str, Any] = {"group": rank.group, "device": rank.device, "dtensor": False}
    bounded, free = (
        MoE(HIDDEN, FFN, EXPERTS, TOPK, dispatch=d, **options)
        for d in (config, DispatchConfig(max_tokens=MOST))
    )
    free.load_state_dict(bounded.state_dict())
    tokens, indices, weights, grad = drawn(rank.rank, MOST, "any", torch.float32)
    results = []
    for moe in (bounded, free):
        plan = moe.dispatcher.plan(indices)
        assert (plan.position is not None) == (moe is bounded)
        x = tokens.clone().requires_grad_()
        output, total = moe.dispatcher.run(moe.experts, x, indices, weights)
        assert int(total) <= 100
        results.append((output.detach(), *torch.autograd.grad(output, (x, moe.experts.fc1.weight), grad)))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
