"""Random programs on models whose weights are sharded, and the same on full weights.

Numbers are small integers, so that float32 has every sum exactly, in whatever order gradients are added.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.parallel.sharded_models import TOKENS
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

#: No number of ranks divides it, and of four ranks the last has no rows.
WIDTH = 5
EXPERTS = 3
KINDS = ("plain", "recompute", "no_grad", "stop_forward", "stop_backward", "twice", "asked")


class Layers(torch.nn.Module):
    """Layers of which a program uses any, in any order; weights are -1, 0 or 1."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.table = tnn.Embedding(7, WIDTH)
        self.dense = torch.nn.ModuleList(tnn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(3))
        self.experts = tnn.GroupedLinear(EXPERTS, WIDTH, WIDTH, False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def use(self, layer: int, x: Tensor, sizes: Tensor) -> Tensor:
        result: Tensor = self.experts(x, sizes) if layer == 3 else self.dense[layer](x)
        return result


@dataclass
class Use:
    """One forward, and what becomes of it."""

    kind: str
    chain: list[int]
    seed: int
    stop: int

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, sizes of groups, and the gradient of the output: other ones on each rank."""
        generator = torch.Generator().manual_seed(10 * self.seed + rank)
        tokens = torch.randint(7, (TOKENS // 8,), generator=generator)
        ends = torch.randint(TOKENS // 8 + 1, (EXPERTS - 1,), generator=generator).sort().values
        sizes = torch.diff(torch.cat([torch.tensor([0]), ends, torch.tensor([TOKENS // 8])]))
        return tokens, sizes, torch.randint(-1, 2, (TOKENS // 8, WIDTH), generator=generator).float()


@dataclass
class Pair:
    """A model with full weights and one with shards; what the gradients of the full weights add up to."""

    full: Layers
    sharded: Layers
    totals: dict[str, Tensor] = field(default_factory=dict)

    def forget(self, set_to_none: bool = True) -> None:
        self.sharded.zero_grad(set_to_none)
        self.totals = {} if set_to_none else {n: torch.zeros_like(t) for n, t in self.totals.items()}


def make_pair(rank: Rank, seed: int, prefetch: int) -> Pair:
    pair = Pair(Layers(seed), Layers(seed))
    shard_(pair.sharded, rank.group, gradient="sum", prefetch=prefetch)
    return pair


def forward(model: Layers, use: Use, rank: int, recompute: bool = False, until: int | None = None) -> Any:
    """The output, and the tensor between the first layer and the second."""
    tokens, sizes, _ = use.inputs(rank)
    first = x = model.table(tokens)
    for layer in use.chain[:until]:
        x = (
            checkpoint(model.use, layer, x, sizes, use_reentrant=False)
            if recompute
            else model.use(layer, x, sizes)
        )
    return x, first


def add_reference(pair: Pair, use: Use, rank: Rank, times: int) -> dict[str, Tensor]:
    """Adds the gradients of all ranks to the totals, so many times; returns them."""
    once: dict[str, Tensor] = {}
    for other in range(rank.size):
        pair.full.zero_grad()
        output, _ = forward(pair.full, use, other)
        if output.requires_grad:
            output.backward(use.inputs(other)[2])
        for name, parameter in pair.full.named_parameters():
            if parameter.grad is None or (
                shard_of_parameter(pair.sharded.get_parameter(name)) is None and other != rank.rank
            ):
                continue
            once[name] = once.get(name, torch.zeros_like(parameter)) + parameter.grad
    for name, grad in once.items() if times else ():
        pair.totals[name] = pair.totals.get(name, torch.zeros_like(grad)) + times * grad
    return once


def run_use(pair: Pair, use: Use, rank: Rank) -> Any:
    """The forward, with its output compared; returns the backward."""
    stop = min(use.stop, len(use.chain) - 1) if use.kind == "stop_forward" else None
    with torch.set_grad_enabled(use.kind != "no_grad"):
        output, first = forward(pair.sharded, use, rank.rank, use.kind == "recompute", stop)
    with torch.no_grad():
        assert_same_bits(output.detach(), forward(pair.full, use, rank.rank, until=stop)[0])
    if use.kind in ("no_grad", "stop_forward") or not output.requires_grad:
        return lambda: None
    return lambda: run_backward(pair, use, rank, output, first)


class StopError(Exception):
    """Raised in the middle of a backward."""


def raise_stop(_: Any) -> None:
    raise StopError


def run_backward(pair: Pair, use: Use, rank: Rank, output: Tensor, first: Tensor) -> None:
    grad = use.inputs(rank.rank)[2]
    if use.kind == "asked":
        once = add_reference(pair, use, rank, 0)
        names = [n for n, p in pair.sharded.named_parameters() if p.requires_grad and n in once]
        asked = torch.autograd.grad(output, [pair.sharded.get_parameter(n) for n in names], grad)
        for name, got in zip(names, asked, strict=True):
            assert_same_bits(got, own_shard(pair, name, once[name]), name)
        return
    if use.kind == "stop_backward" and first.requires_grad and len(use.chain) > 0:
        first.register_hook(raise_stop)
        try:
            output.backward(grad)
            raise AssertionError("the backward was not stopped")
        except StopError:
            pair.forget()
        return
    times = 2 if use.kind == "twice" else 1
    for i in range(times):
        output.backward(grad, retain_graph=i + 1 < times)
    add_reference(pair, use, rank, times)


def own_shard(pair: Pair, name: str, value: Tensor) -> Tensor:
    shard = shard_of_parameter(pair.sharded.get_parameter(name))
    return value if shard is None else shard.local_shard_of(value)


def compare_gradients(pair: Pair, about: str) -> None:
    for name, parameter in pair.sharded.named_parameters():
        if name not in pair.totals:
            assert parameter.grad is None, (about, name)
            continue
        assert parameter.grad is not None, (about, name)
        assert_same_bits(parameter.grad + 0, own_shard(pair, name, pair.totals[name]) + 0, f"{about} {name}")


def change_weights(pair: Pair, how: str, seed: int) -> None:
    """New values between -1 and 1: by a step of an optimizer, by one that torch counts, by one that it does not."""
    if how == "none":
        return
    generator = torch.Generator().manual_seed(seed)
    after = {
        n: torch.randint(-1, 2, p.shape, generator=generator).float() for n, p in pair.full.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in pair.full.named_parameters():
            parameter.copy_(after[name])
        if how == "add":
            for name, parameter in pair.sharded.named_parameters():
                parameter.copy_(own_shard(pair, name, after[name]))
        elif how == "data":
            for name, parameter in pair.sharded.named_parameters():
                parameter.data.copy_(own_shard(pair, name, after[name]))
            ops.invalidate_prefetched()
    if how == "step":
        optimizer = torch.optim.SGD(pair.sharded.parameters(), lr=1.0)
        kept = {n: p.grad for n, p in pair.sharded.named_parameters()}
        for name, parameter in pair.sharded.named_parameters():
            parameter.grad = parameter.detach() - own_shard(pair, name, after[name])
        optimizer.step()
        for name, parameter in pair.sharded.named_parameters():
            parameter.grad = kept[name]


def change_weights_in_flight(pair: Pair, choose: random.Random, rank: Rank, seed: int) -> None:
    """While the next weight is gathered early, in an order of use that is known."""
    use = Use("no_grad", [choose.randrange(4) for _ in range(3)], seed, 0)
    for _ in range(2):
        run_use(pair, use, rank)
    run_use(pair, Use("stop_forward", use.chain, seed, choose.randrange(2)), rank)
    change_weights(pair, choose.choice(["none", "step", "add", "data"]), seed)
    run_use(pair, use, rank)


def draw_use(choose: random.Random) -> Use:
    chain = [choose.randrange(4) for _ in range(choose.randint(1, 4))]
    return Use(choose.choice(KINDS), chain, choose.randrange(10**6), choose.randrange(4))


def run_program(rank: Rank, seed: int) -> None:
    """Micro-batches of two models, with backwards in any order; weights change and freeze, models are replaced."""
    choose = random.Random(seed)
    name, distance = rank.group_name, choose.randrange(4)
    start = ops.count_gathers(name)
    pairs = [make_pair(rank, seed + i, distance) for i in range(2)]
    for step in range(4):
        for pair in pairs:
            for layer, parameter in pair.sharded.named_parameters():
                wanted = choose.random() < 0.7
                parameter.requires_grad_(wanted)
                pair.full.get_parameter(layer).requires_grad_(wanted)
            waiting = []
            for _ in range(choose.randint(1, 3)):
                waiting.append(run_use(pair, draw_use(choose), rank))
                if choose.random() < 0.5:
                    waiting.pop(choose.randrange(len(waiting)))()
            choose.shuffle(waiting)
            for backward in waiting:
                backward()
            compare_gradients(pair, f"program {seed}, step {step}")
        for pair in pairs:
            if choose.random() < 0.6:
                change_weights_in_flight(pair, choose, rank, seed + step)
            if choose.random() < 0.7:
                pair.forget(choose.random() < 0.7)
        if choose.random() < 0.2:
            pairs[choose.randrange(2)] = make_pair(rank, seed + 10 + step, distance)
    for pair in pairs:
        for key, parameter in pair.sharded.named_parameters():
            assert_same_bits(full_weight(parameter), pair.full.get_parameter(key).detach(), key)
    ops.clear_gathers(name)
    ops.configure_gathers(name, 1)
    made = [now - then for now, then in zip(ops.count_gathers(name), start, strict=True)]
    assert made[1] == made[2] + made[3], made  # every early gather was used or dropped
    mine = torch.tensor([*made, distance])
    every = ops.all_gather(mine[None], rank.size, name)
    assert (every == mine).all(), every  # all ranks have decided alike
