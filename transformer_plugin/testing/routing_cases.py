"""Routings that every routing op must handle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_plugin.testing.cases import Case, randn


@dataclass(frozen=True)
class Routing:
    """One routing: sizes, layout, and the distribution of the experts."""

    name: str
    tokens: int
    topk: int
    experts: int
    capacity: int
    alignment: int = 1
    skew: float = 0.0  # additional weight of expert 0 in the random draw; each expert has weight 1
    masked: float = 0.0  # fraction of entries that are -1
    dtype: torch.dtype = torch.int32

    def indices(self, device: torch.device, generator: torch.Generator) -> Tensor:
        """``[tokens, topk]``; some tokens name an expert twice."""
        odds = torch.ones(max(self.experts, 1))
        odds[0] += self.skew
        if self.experts > 4:
            odds[[1, self.experts // 2, self.experts - 1]] = 0.0  # experts without tokens
        drawn = torch.multinomial(
            odds, max(self.tokens * self.topk, 1), replacement=True, generator=generator
        )
        drawn = drawn[: self.tokens * self.topk].view(self.tokens, self.topk)
        masks = torch.rand(self.tokens, self.topk, generator=generator)
        drawn = torch.where(masks < self.masked, -1, drawn)
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
    Routing("most_in_one_block", 512, 8, 64, 4000, masked=0.05),
    Routing("few_in_many_rows", 64, 2, 8, 40000, 4, masked=0.1),
    Routing("no_tokens_many_rows", 0, 2, 4, 40000, 4),
    Routing("several_chunks", 1700, 4, 8, 7000, 4, skew=3.0, masked=0.05),
    Routing("chunks_of_most_experts", 3000, 3, 1024, 20000, 8, dtype=torch.int64),
)


def assign_slots_cases() -> Iterator[Case]:
    """Each routing for all experts, and for a range of experts, as on one rank of an expert-parallel group."""
    for routing in ROUTINGS:

        def all_experts(device: torch.device, generator: torch.Generator, r: Routing = routing) -> tuple:
            return r.indices(device, generator), 0, r.experts, r.capacity, r.alignment, r.experts

        def window(device: torch.device, generator: torch.Generator, r: Routing = routing) -> tuple:
            first, last = r.experts // 3, r.experts - r.experts // 4
            return r.indices(device, generator), first, last - first, r.capacity, r.alignment, r.experts

        yield Case(routing.name, all_experts)
        yield Case(routing.name + "-window", window)


def permute_cases() -> Iterator[Case]:
    """Arguments of permute: every routing, widths that are not multiples of a vector, every dtype."""
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


@dataclass(frozen=True)
class Router:
    """One router configuration, and the size of its logits."""

    name: str
    tokens: int
    experts: int
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    groups: tuple[int, int] = (1, 1)
    scaling: float = 1.0
    bias: bool = False
    dtype: torch.dtype = torch.float32
    masked: float = 0.0  # fraction of logits that are -inf

    def make(self, device: torch.device, generator: torch.Generator) -> tuple:
        """The arguments of topk_router."""
        logits = randn((self.tokens, self.experts), self.dtype, device, generator, scale=2.0)
        holes = torch.rand(self.tokens, self.experts, generator=generator) < self.masked
        logits = logits.masked_fill(holes.to(device), -torch.inf)
        bias = randn((self.experts,), torch.float32, device, generator, scale=0.3) if self.bias else None
        choice = (self.score_function, self.pre_softmax, *self.groups, self.scaling)
        return logits, bias, self.topk, *choice


ROUTERS = (
    Router("no_tokens", 0, 8, 2),
    Router("one_expert", 5, 1, 1),
    Router("all_experts", 7, 6, 6, pre_softmax=True),
    Router("mixtral", 65, 8, 2),
    Router("pre_softmax", 130, 33, 4, pre_softmax=True, scaling=2.5),
    Router("pre_softmax_bf16", 40, 128, 8, pre_softmax=True, dtype=torch.bfloat16),
    Router("post_fp16", 40, 64, 6, dtype=torch.float16),
    Router("softmax_groups", 50, 32, 4, groups=(8, 2)),
    Router("pre_softmax_groups", 50, 160, 6, pre_softmax=True, groups=(8, 3), scaling=16.0),
    Router("deepseek_v3", 40, 256, 8, "sigmoid", groups=(8, 4), scaling=2.5, bias=True),
    Router("sigmoid_one", 40, 16, 1, "sigmoid"),
    Router("sigmoid_bf16", 40, 20, 3, "sigmoid", bias=True, dtype=torch.bfloat16),
    Router("sqrtsoftplus", 40, 48, 6, "sqrtsoftplus", scaling=1.5, bias=True),
    Router("masked", 60, 16, 4, masked=0.5),
    Router("masked_pre_softmax", 60, 16, 4, pre_softmax=True, groups=(4, 2), masked=0.8),
    Router("masked_sigmoid", 60, 16, 4, "sigmoid", groups=(4, 2), bias=True, masked=0.8),
    Router("many_experts", 9, 1024, 16, "sigmoid", groups=(512, 8)),
    # Around the sizes of the kernels that keep a row in registers: 128 and 256 experts, topk 32, 32 groups.
    Router("experts_128", 37, 128, 8, bias=True, score_function="sigmoid", masked=0.3),
    Router("experts_129", 21, 129, 7, dtype=torch.bfloat16),
    Router("experts_256", 21, 256, 32, "sqrtsoftplus", bias=True, dtype=torch.float16),
    Router("experts_257", 21, 257, 8, pre_softmax=True),
    Router("topk_32", 11, 70, 32, pre_softmax=True, dtype=torch.bfloat16),
    Router("topk_33", 11, 70, 33, "sigmoid", scaling=0.5),
    Router("groups_32", 33, 256, 8, "sigmoid", groups=(32, 5), bias=True, masked=0.2),
    Router("groups_33", 33, 66, 6, groups=(33, 6)),
    Router("many_tokens", 3000, 128, 8),
)


def topk_router_cases() -> Iterator[Case]:
    """Arguments of topk_router."""
    for router in ROUTERS:
        yield Case(router.name, router.make)


#: name, router, ``group_score_topk``.
GROUP_RULES = (
    ("no_tokens", Router("", 0, 16, 2, "sigmoid", groups=(4, 2), bias=True), 2),
    ("deepseek_v2", Router("", 30, 160, 6, pre_softmax=True, groups=(8, 3), scaling=16.0), 1),
    ("deepseek_v3", Router("", 30, 256, 8, "sigmoid", groups=(8, 4), scaling=2.5, bias=True), 2),
    ("fewer_than_groups", Router("", 30, 32, 2, "sigmoid", groups=(8, 4), bias=True), 2),
    ("logits", Router("", 30, 32, 4, groups=(4, 2)), 3),
    ("whole_groups", Router("", 30, 24, 4, "sigmoid", groups=(6, 2)), 4),
    ("groups_of_one", Router("", 30, 12, 3, pre_softmax=True, groups=(12, 5)), 1),
    ("megatron", Router("", 30, 32, 6, "sigmoid", groups=(4, 2), bias=True), None),
    ("odd_groups", Router("", 30, 105, 5, "sigmoid", groups=(7, 3)), 4),
    ("half_precision", Router("", 30, 256, 8, groups=(8, 4), dtype=torch.bfloat16), 2),
)

#: The same with masked experts.
MASKED_GROUP_RULES = (
    ("odd_groups", Router("", 30, 105, 5, "sqrtsoftplus", groups=(7, 3), masked=0.6), 4),
    ("small_groups", Router("", 30, 64, 4, "sigmoid", groups=(16, 4), bias=True, masked=0.9), 3),
    ("best_expert", Router("", 30, 64, 4, "sigmoid", groups=(16, 4), bias=True, masked=0.9), 1),
    ("pre_softmax", Router("", 30, 160, 6, pre_softmax=True, groups=(8, 3), masked=0.8), 2),
)


def group_rule_cases(rules: tuple[tuple[str, Router, int | None], ...] = GROUP_RULES) -> Iterator[Case]:
    """Arguments of topk_router including ``group_score_topk``."""
    for name, router, score_topk in rules:

        def make(
            device: torch.device,
            generator: torch.Generator,
            router: Router = router,
            score_topk: int | None = score_topk,
        ) -> tuple:
            return *router.make(device, generator), score_topk

        yield Case(name, make)


def aux_loss_cases() -> Iterator[Case]:
    """Arguments of aux_loss: no tokens, one and several chunks of the sum, numbers of experts around a warp's 32."""
    for tokens, experts in ((0, 4), (1, 1), (5, 3), (128, 32), (129, 33), (700, 256), (300, 1500)):

        def make(
            device: torch.device, generator: torch.Generator, tokens: int = tokens, experts: int = experts
        ) -> tuple:
            scores = torch.rand(tokens, experts, generator=generator)
            counts = torch.randint(0, 50, (experts,), generator=generator)
            return scores.to(device), counts.to(device), torch.tensor(tokens, device=device), 2, 0.01

        yield Case(f"{tokens}x{experts}", make)
