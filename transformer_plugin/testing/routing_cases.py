"""Routings that every routing op must get right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_plugin.testing.cases import Case, randn


@dataclass(frozen=True)
class Routing:
    """Tokens to experts: sizes, the layout, and how the experts are drawn."""

    name: str
    tokens: int
    topk: int
    experts: int
    capacity: int
    alignment: int = 1
    skew: float = 0.0  # weight of expert 0 among the drawn, beside 1 for each other
    masked: float = 0.0  # share of -1 and of numbers past the last expert
    dtype: torch.dtype = torch.int32

    def indices(self, device: torch.device, generator: torch.Generator) -> Tensor:
        """``[tokens, topk]``; experts repeat inside a token now and then."""
        odds = torch.ones(max(self.experts, 1))
        odds[0] += self.skew
        if self.experts > 4:
            odds[[1, self.experts // 2, self.experts - 1]] = 0.0  # empty experts near the edges and inside
        drawn = torch.multinomial(
            odds, max(self.tokens * self.topk, 1), replacement=True, generator=generator
        )
        drawn = drawn[: self.tokens * self.topk].view(self.tokens, self.topk)
        masks = torch.rand(self.tokens, self.topk, generator=generator)
        drawn = torch.where(masks < self.masked / 2, -1, drawn)
        drawn = torch.where(masks > 1 - self.masked / 2, self.experts + 3, drawn)
        return drawn.to(self.dtype).to(device)


ROUTINGS = (
    Routing("no_tokens", 0, 2, 4, 8, 4),
    Routing("no_tokens_no_rows", 0, 2, 4, 0),
    Routing("no_k", 3, 0, 4, 8),
    Routing("one_token", 1, 1, 1, 1),
    Routing("one_expert", 33, 2, 1, 80, 16),
    Routing("plain", 64, 2, 8, 128),
    Routing("aligned_4", 64, 2, 8, 128 + 8 * 3, 4),
    Routing("aligned_16", 50, 3, 8, 150 + 8 * 15, 16, dtype=torch.int64),
    Routing("masked", 70, 4, 16, 280, masked=0.4),
    Routing("all_masked", 20, 2, 4, 16, 4, masked=1.0, dtype=torch.int64),
    Routing("skewed", 130, 8, 32, 1040 + 32 * 15, 16, skew=60.0),
    Routing("capacity_cuts", 64, 2, 8, 70, 4, masked=0.1),
    Routing("capacity_zero", 16, 2, 4, 0),
    Routing("many_experts", 300, 8, 256, 2400 + 256 * 7, 8, masked=0.05),
    Routing("most_experts", 40, 4, 1024, 200, dtype=torch.int64),
    Routing("several_chunks", 1700, 2, 8, 3500, 4, skew=3.0, masked=0.05),
)


def assign_slots_cases() -> Iterator[Case]:
    """Each routing for all experts, and for a window of them as a rank of an expert group sees it."""
    for routing in ROUTINGS:

        def all_experts(device: torch.device, generator: torch.Generator, r: Routing = routing) -> tuple:
            return r.indices(device, generator), 0, r.experts, r.capacity, r.alignment

        def window(device: torch.device, generator: torch.Generator, r: Routing = routing) -> tuple:
            first, last = r.experts // 3, r.experts - r.experts // 4
            return r.indices(device, generator), first, last - first, r.capacity, r.alignment

        yield Case(routing.name, all_experts)
        yield Case(routing.name + "-window", window)


def permute_cases() -> Iterator[Case]:
    """Arguments of permute: every routing, widths that fit no vector, every kind of element."""
    layouts = [(r, 20, torch.float32) for r in ROUTINGS]
    plain, skewed, cut = (
        next(r for r in ROUTINGS if r.name == n) for n in ("aligned_4", "skewed", "capacity_cuts")
    )
    layouts += [(plain, h, torch.bfloat16) for h in (0, 1, 7, 64, 515)]
    layouts += [(skewed, 96, torch.float16), (cut, 33, torch.bfloat16), (plain, 10, torch.float64)]
    layouts += [(cut, 48, torch.float8_e4m3fn), (plain, 17, torch.uint8)]
    for routing, width, dtype in layouts:

        def make(
            device: torch.device,
            generator: torch.Generator,
            r: Routing = routing,
            h: int = width,
            dtype: torch.dtype = dtype,
        ) -> tuple:
            indices = r.indices(device, generator)
            scale = 20.0 if dtype == torch.uint8 else 1.0
            values = torch.randn(r.tokens, h, generator=generator).abs() if dtype == torch.uint8 else None
            if values is not None:
                tokens = (values * scale).to(dtype).to(device)
            else:
                tokens = randn((r.tokens, h), dtype, device, generator)
            return tokens, indices, r.experts, r.capacity, r.alignment

        yield Case(f"{routing.name}-{width}-{str(dtype)[6:]}", make)
