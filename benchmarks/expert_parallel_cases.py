"""Layers, data and our competitors of :mod:`benchmarks.expert_parallel`, and the float64 reference over all ranks.

Routings are those of one layer with the tokens of all ranks, so that the busiest experts are the same for every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.moe_layer_cases import (
    ROUTINGS,
    ROW_NORM,
    Competitor,
    Data,
    Layer,
    Ours,
    max_violation,
    planned_experts,
)
from transformer_plugin import nn
from transformer_plugin.formats import Format
from transformer_plugin.parallel.expert import Transport
from transformer_plugin.recipes import recipe_from_name
from transformer_plugin.testing.distributed import Rank

#: tokens are those of one rank, experts those of all ranks.
LAYERS = (
    Layer("Qwen3-30B, 8192 tokens", 2048, 768, 128, 8, 8192),
    Layer("DeepSeek-V3, 64 experts, 4096 tokens", 7168, 2048, 64, 8, 4096),
    Layer("Mixtral, 4096 tokens", 4096, 14336, 8, 2, 4096),
    Layer("DeepSeek-V3, 64 experts, 128 tokens", 7168, 2048, 64, 8, 128),
)
#: for tests, on a CPU.
QUICK_LAYERS = (Layer("tiny", 128, 128, 8, 2, 32),)
#: of those of :mod:`benchmarks.moe_layer_cases`: what the router chooses, and a busiest expert of three times the mean.
USED_ROUTINGS = ("natural", "maxvio2")
RECIPES = ("bf16", "fp8_block")
#: tokens of each rank whose results are compared with the reference.
VERIFIED_TOKENS = 128
#: of the tight capacity, over the rows of a balanced routing.
CAPACITY_FACTOR = 1.25


class Traffic(NamedTuple):
    """The routing of all ranks, counted."""

    #: ``[R, R]``: distinct tokens of the first rank with an expert on the second.
    tokens: Tensor
    #: ``[R, R]``: pairs of a token and an expert, likewise.
    pairs: Tensor
    #: T.
    num_tokens: int

    @staticmethod
    def of(indices: Tensor, experts: int, ranks: int) -> Traffic:
        """Counts ``indices [R * T, K]`` of all ranks."""
        owner = (indices // (experts // ranks)).view(ranks, -1, indices.shape[1])
        on = torch.stack([owner == rank for rank in range(ranks)], dim=1)  # [R, R, T, K]
        return Traffic(on.any(3).sum(2).cpu(), on.sum((2, 3)).cpu(), owner.shape[1])

    def moved(self, what: str, rank: int) -> tuple[int, int]:
        """The rows that a rank sends to others and receives from them: "tokens" or "pairs", or "all" tokens."""
        counts = torch.full_like(self.tokens, self.num_tokens) if what == "all" else getattr(self, what)
        sent, received = (int(each.sum() - each[rank]) for each in (counts[rank], counts[:, rank]))
        return sent, received

    @property
    def imbalance(self) -> float:
        """The rows of the busiest rank's experts over the mean, minus 1."""
        rows = self.pairs.sum(0).double()
        return float(rows.max() / rows.mean() - 1)


def gathered(value: Tensor) -> Tensor:
    """The values of all ranks, one after the other."""
    value = value.detach().contiguous()
    whole = value.new_empty(dist.get_world_size() * len(value), *value.shape[1:])
    dist.all_gather_into_tensor(whole, value)
    return whole


class RankData(Data):
    """The weights of this rank's experts, and its tokens and output gradients, which differ between ranks.

    With ``alone``, of a layer with this rank's number of experts only, and the same tokens and choices for each.
    """

    def __init__(self, layer: Layer, rank: Rank, alone: bool = False) -> None:
        self.rank, self.ranks = rank, 1 if alone else rank.size
        self.index = 0 if alone else rank.rank
        if alone:
            layer = replace(layer, experts=layer.experts // rank.size)
        super().__init__(layer, rank.device)
        self.local_experts = layer.experts // self.ranks
        self.grad.normal_(generator=self._of_this_rank(1000))

    def _of_this_rank(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed + self.rank.rank)

    @property
    def my_experts(self) -> slice:
        """The experts of this rank."""
        return slice(self.index * self.local_experts, (self.index + 1) * self.local_experts)

    def keep_my_experts(self) -> None:
        """Drops the weights of other experts, of which only the reference knows."""
        self.fc1, self.fc2 = (weight[self.my_experts].clone() for weight in (self.fc1, self.fc2))

    @torch.no_grad()
    def route(self, routing: str) -> None:
        """Sets the router's weight, the same on every rank, and this rank's tokens, in place."""
        layer = self.layer
        common = torch.Generator(self.device).manual_seed(1 + ROUTINGS.index(routing))
        plan = planned_experts(replace(layer, tokens=self.ranks * layer.tokens), routing, common)
        router = torch.randn(layer.hidden, layer.experts, generator=common, device=self.device)
        if plan is None:
            self.router.copy_(router.t() * layer.hidden**-0.5)
        else:  # as in Data: a token that contains the rows of its experts has large logits for them only
            self.router.copy_(torch.linalg.qr(router)[0].t() * ROW_NORM)
            plan = plan[self.index * layer.tokens : (self.index + 1) * layer.tokens]
        self._draw_tokens(plan, self._of_this_rank(2000 + 100 * ROUTINGS.index(routing)))

    def all_indices(self) -> Tensor:
        """``[R * T, K]``: the experts of all ranks' tokens."""
        return self.indices if self.ranks == 1 else gathered(self.indices)

    @property
    def violation(self) -> float:
        """MaxVio of the tokens of all ranks."""
        return max_violation(self.all_indices(), self.layer.experts)


def reference(data: RankData) -> dict[str, Tensor]:
    """Output and gradients in float64 for the first tokens of every rank: those of this rank, and of its experts.

    Expert by expert, as the float64 weights of all of them are large.
    """
    count = min(data.layer.tokens, VERIFIED_TOKENS)
    tokens, indices, grad = (gathered(value[:count]) for value in (data.tokens, data.indices, data.grad))
    x = tokens.double().requires_grad_()
    mine = slice(data.index * count, (data.index + 1) * count)
    router = data.router.detach().double().requires_grad_()
    logits = x @ router.t()
    weights = logits.gather(1, indices).softmax(1)
    output, x_grad, weights_grad = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    of_experts: list[tuple[Tensor, ...]] = []
    first = data.my_experts.start
    for expert in range(data.layer.experts):
        token, k = (indices == expert).nonzero(as_tuple=True)
        values = (x[token], weights[token, k], data.fc1[expert].double(), data.fc2[expert].double())
        leaf = [value.detach().requires_grad_() for value in values]
        gate, linear = (leaf[0] @ leaf[2].t()).chunk(2, dim=1)
        rows = (F.silu(gate) * linear) @ leaf[3].t() * leaf[1][:, None]
        found = torch.autograd.grad(rows, leaf, grad[token].double())
        output.index_add_(0, token, rows.detach())
        x_grad.index_add_(0, token, found[0])
        weights_grad[token, k] = found[1]
        if first <= expert < first + data.local_experts:
            of_experts.append(found[2:])
    # Each rank has a router of its own, whose gradient is that of its tokens.
    through, of_router = torch.autograd.grad(weights[mine], (x, router), weights_grad[mine])
    fc1, fc2 = (torch.stack(grads) for grads in zip(*of_experts, strict=True))
    wanted = {"output": output[mine], "tokens": (x_grad + through)[mine], "router": of_router}
    return {**wanted, "fc1": fc1, "fc2": fc2}


class OursOverRanks(Ours):
    """``transformer_plugin.nn.MoE`` over ranks, with the default capacity or a tight one."""

    modes = ("eager", "graph")

    def __init__(
        self, data: RankData, recipe: str, tight: bool = False, transport: Transport = "auto"
    ) -> None:
        Competitor.__init__(self, data)
        layer = data.layer
        self.name = f"ours {recipe}" + (f", capacity {CAPACITY_FACTOR}" if tight else "")
        self.name += "" if transport == "auto" else f", {transport}"
        self.recipe = None if recipe == "bf16" else recipe_from_name(recipe)
        self.capacity = tight_capacity(data, alignment_of(self.recipe, data.device)) if tight else None
        dispatch = nn.DispatchConfig(
            max_tokens=layer.tokens,
            capacity=self.capacity,
            # With a capacity the default is 1, which would be another difference.
            alignment=alignment_of(self.recipe, data.device) if tight else None,
            transport=transport,
        )
        sizes = (layer.hidden, layer.ffn_hidden, layer.experts, layer.topk)
        options = {"device": data.device, "dtype": torch.bfloat16, "recipe": self.recipe}
        self.moe = nn.MoE(*sizes, group=data.rank.group, dtensor=False, dispatch=dispatch, **options)
        self.moe.router.weight = self.router
        self.moe.experts.fc1.weight, self.moe.experts.fc2.weight = self.fc1, self.fc2
        if self.caches_weights:
            self.quantize_weights()

    @torch.no_grad()
    def dropped(self) -> int:
        """Rows that do not fit into this rank's capacity, with the present routing."""
        received = int(self.moe(self.data.tokens).received)
        return 0 if self.capacity is None else max(0, received - self.capacity)


class OneRank(Ours):
    """``transformer_plugin.nn.MoE`` with this rank's number of experts, and no exchange."""

    modes = ("graph",)

    def __init__(self, data: RankData, recipe: str) -> None:
        super().__init__(data, recipe)
        self.name = f"one rank {recipe}"


def alignment_of(recipe: object, device: torch.device) -> int:
    """What ``DispatchConfig(alignment=None)`` means without a capacity."""
    if device.type == "cpu":
        return 1
    keys = ("input_format", "weight_format", "grad_format")
    return max(Format.parse(getattr(recipe, key, "none")).alignment for key in keys)


def tight_capacity(data: RankData, alignment: int) -> int:
    """A quarter more rows than those of a balanced routing, and their padding."""
    rows = CAPACITY_FACTOR * data.layer.tokens * data.layer.topk
    padded = int(rows) + data.local_experts * (alignment - 1)
    return -(-padded // alignment) * alignment
