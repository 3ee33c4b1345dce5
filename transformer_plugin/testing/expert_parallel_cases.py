"""Routings that expert parallelism must handle, for any number of ranks.

Data is drawn from the seed and the rank, so it is different on every rank. Every rank can also draw the data of the
other ranks, and so compute alone what it should receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Routing = Callable[[torch.Generator, int, int, int], Tensor]


def uniform(generator: torch.Generator, tokens: int, topk: int, experts: int) -> Tensor:
    """Random experts, all different within a token."""
    if tokens == 0:
        return torch.empty(0, topk, dtype=torch.int64)
    scores = torch.rand(tokens, max(experts, topk), generator=generator)
    chosen = scores.argsort(1)[:, :topk].contiguous()
    return torch.where(chosen < experts, chosen, -1)  # if there are more columns than experts


def duplicated(generator: torch.Generator, tokens: int, topk: int, experts: int) -> Tensor:
    """Experts drawn with replacement from the first few."""
    return torch.randint(0, max(1, experts // 2), (tokens, topk), generator=generator)


def masked(generator: torch.Generator, tokens: int, topk: int, experts: int) -> Tensor:
    """A third of the entries are -1, and all entries of the first token."""
    indices = uniform(generator, tokens, topk, experts)
    indices[torch.rand(tokens, topk, generator=generator) < 0.33] = -1
    indices[:1] = -1
    return indices


def one_expert(generator: torch.Generator, tokens: int, topk: int, experts: int) -> Tensor:
    """Every token goes to the last expert (and its neighbors), so the other ranks receive nothing."""
    return (experts - 1 - torch.arange(topk)).expand(tokens, topk).clamp(min=0).contiguous()


@dataclass(frozen=True)
class EpCase:
    """One routing and its sizes."""

    name: str
    routing: Routing = uniform
    tokens: tuple[int, ...] = (5, 3, 6, 4)
    topk: int = 2
    hidden: int = 8
    local_experts: int = 2
    capacity: int = 64
    alignment: int = 1
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    max_tokens: int = 7

    def experts(self, ranks: int) -> int:
        return self.local_experts * ranks

    def draw(self, rank: int, ranks: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """``topk_idx``, ``tokens`` and ``topk_weights`` of one rank, on the CPU."""
        generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
        count = self.tokens[rank % len(self.tokens)]
        indices = self.routing(generator, count, self.topk, self.experts(ranks)).to(self.index_dtype)
        tokens = torch.randn(count, self.hidden, generator=generator).to(self.dtype)
        weight_type = torch.float64 if self.dtype == torch.float64 else torch.float32
        weights = torch.rand(count, self.topk, generator=generator, dtype=weight_type)
        return indices, tokens, weights


def ep_cases() -> Iterator[EpCase]:
    """Dtypes, widths, K, experts per rank, uneven and missing tokens, masks, duplicates, capacities, alignments."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield EpCase(f"{str(dtype)[6:]}", dtype=dtype, topk=4, local_experts=4, capacity=128)
    yield EpCase("int32", index_dtype=torch.int32)
    for hidden in (0, 1, 17, 1000, 2880):
        yield EpCase(f"hidden-{hidden}", hidden=hidden, dtype=torch.bfloat16)
    for topk in (1, 6, 8, 9, 16):
        yield EpCase(f"topk-{topk}", topk=topk, local_experts=8, capacity=512, dtype=torch.bfloat16)
    yield EpCase("one-expert-a-rank", local_experts=1, topk=1)
    yield EpCase("many-experts", local_experts=64, topk=8, capacity=256)
    yield EpCase("uneven", tokens=(7, 0, 1, 5), dtype=torch.bfloat16)
    yield EpCase("rank-0-has-none", tokens=(0, 4, 2, 7))
    yield EpCase("nobody-has-any", tokens=(0,))
    yield EpCase("all-have-the-most", tokens=(7,))
    yield EpCase("no-tokens-at-all", tokens=(0,), max_tokens=0)
    yield EpCase("masked", masked, topk=4, local_experts=4, dtype=torch.bfloat16)
    yield EpCase("duplicated", duplicated, topk=6, local_experts=3, capacity=256, dtype=torch.bfloat16)
    yield EpCase("one-expert", one_expert, tokens=(7, 5, 6, 2), alignment=4)
    for alignment in (0, 2, 16):
        yield EpCase(f"align-{alignment}", masked, topk=3, local_experts=3, capacity=128, alignment=alignment)
    for capacity in (0, 1, 4, 9):
        yield EpCase(f"capacity-{capacity}", duplicated, topk=4, capacity=capacity, dtype=torch.bfloat16)
    yield EpCase("capacity-cuts-padding", topk=2, local_experts=3, capacity=18, alignment=8)
