"""The peers of :mod:`benchmarks.expert_parallel`: layers over ranks in stock PyTorch.

Each has a plan, a dispatch of tokens, and a combine, which are timed alone too. Their experts are
``torch._grouped_mm`` around a SwiGLU that multiplies by the routing weights; the router is that of the stock block of
:mod:`benchmarks.moe_layer_peers`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from benchmarks.expert_parallel_autograd import (
    AddRows,
    AllGather,
    AllToAll,
    Gather,
    GatherAny,
    ReduceScatter,
    SumRows,
    all_gather,
    all_to_all,
    compiled,
    sum_rows,
    swiglu,
    weighted_sum,
)
from benchmarks.expert_parallel_cases import RankData
from benchmarks.moe_layer_cases import Competitor
from benchmarks.moe_layer_peers import Reorder, route


class Peer(Competitor):
    """A layer over ranks. ``fuses``: its element-wise parts and sums are compiled."""

    #: what experts get: "copies" of a token, one for each expert; or "tokens", once for each rank.
    form: ClassVar[str]
    #: what is sent to another rank: "pairs" (the copies for its experts), "tokens" (that it needs), "all" tokens.
    sends: ClassVar[str]
    #: whether the host reads nothing, so that plan and layer can be captured.
    static: ClassVar[bool] = False

    def __init__(self, data: RankData, fuses: bool) -> None:
        super().__init__(data)
        self.topk, self.ranks, self.local = data.layer.topk, data.ranks, data.local_experts
        self.first = data.my_experts.start
        self.each_expert = torch.arange(self.local, device=data.device)
        functions = (swiglu, sum_rows, weighted_sum)
        self.swiglu, self.sum_rows, self.weighted_sum = (
            compiled(function) if fuses and data.device.type == "cuda" else function for function in functions
        )

    def plan(self, indices: Tensor) -> Any:
        """Computes where the tokens ``[T, K]`` of this rank go."""
        raise NotImplementedError

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        """Sends tokens."""
        raise NotImplementedError

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        """Sends rows of the form that dispatch returns back, and sums those of each token, without weights."""
        raise NotImplementedError

    def experts(self, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """The experts of this rank."""
        middle = self.swiglu(torch._grouped_mm(rows, self.fc1.mT, offs=ends), weights)
        return torch._grouped_mm(middle, self.fc2.mT, offs=ends)


def positions(order: Tensor, size: int) -> Tensor:
    """Where each of ``size`` indices is in ``order``, or -1."""
    places = torch.full((size,), -1, dtype=torch.int64, device=order.device)
    return places.scatter_(0, order, torch.arange(len(order), device=order.device))


class CopiesPlan(NamedTuple):
    """Of :class:`Copies`."""

    #: (token, k) of each row that is sent, and the row of each (token, k).
    order: Tensor
    places: Tensor
    #: rows to and from each rank.
    send: list[int]
    receive: list[int]
    #: received rows by expert, the inverse, and where each expert ends.
    by_expert: Tensor
    by_rank: Tensor
    ends: Tensor


class Copies(Peer):
    """A copy of each token for each expert, in one all-to-all there and one back. Weights stay where the tokens are."""

    name = "all-to-all of copies"
    form, sends = "copies", "pairs"

    def plan(self, indices: Tensor) -> CopiesPlan:
        _, order = indices.flatten().sort(stable=True)
        counts = torch.bincount(indices.flatten(), minlength=self.ranks * self.local)
        ones = [1] * self.ranks
        received = all_to_all(counts.view(self.ranks, self.local), ones, ones)  # [R, experts of this rank]
        send, receive = torch.stack([counts.view_as(received).sum(1), received.sum(1)]).tolist()
        of_rows = self.each_expert.repeat(self.ranks).repeat_interleave(
            received.flatten(), output_size=sum(receive)
        )
        _, by_expert = of_rows.sort(stable=True)
        by_rank = positions(by_expert, len(by_expert))
        ends = received.sum(0).cumsum(0).int()
        return CopiesPlan(order, positions(order, len(order)), send, receive, by_expert, by_rank, ends)

    def dispatch(self, plan: CopiesPlan, tokens: Tensor) -> Tensor:
        places = plan.places.view(-1, self.topk)
        rows = Gather.apply(tokens, plan.order // self.topk, places, self.sum_rows)
        rows = AllToAll.apply(rows, plan.send, plan.receive)
        output: Tensor = Reorder.apply(rows, plan.by_expert, plan.by_rank)
        return output

    def _back(self, plan: CopiesPlan, rows: Tensor) -> Tensor:
        rows = Reorder.apply(rows, plan.by_rank, plan.by_expert)
        output: Tensor = AllToAll.apply(rows, plan.receive, plan.send)
        return output

    def combine(self, plan: CopiesPlan, rows: Tensor) -> Tensor:
        return self.sum_rows(self._back(plan, rows), plan.places.view(-1, self.topk))

    def forward(self, tokens: Tensor) -> Tensor:
        weights, indices = route(tokens, self.router, self.topk)
        plan = self.plan(indices)
        rows = self.dispatch(plan, tokens)
        rows = self._back(plan, self.experts(rows, plan.ends, rows.new_ones(len(rows), dtype=torch.float32)))
        rows = Reorder.apply(rows, plan.places, plan.order)
        return self.weighted_sum(rows.view(-1, self.topk, rows.shape[1]), weights)


class TokensPlan(NamedTuple):
    """Of :class:`Tokens`."""

    #: the token of each row that is sent, and the rows of each token, ``[T, R]``, or -1.
    token: Tensor
    sent_as: Tensor
    #: rows to and from each rank.
    send: list[int]
    receive: list[int]
    #: (received row, k) of each row of the experts, the rows of experts of each received row, ``[n, K]``, or -1, and
    #: where each expert ends.
    pairs: Tensor
    rows_of: Tensor
    ends: Tensor


class Tokens(Peer):
    """Each token once to each rank that has experts of it, with its weights. Each rank adds up its experts' rows of a
    token in float32, and sends the sum back."""

    form = sends = "tokens"

    def __init__(self, data: RankData, fuses: bool) -> None:
        super().__init__(data, fuses)
        self.name = "stock" if fuses else "stock, nothing compiled"

    def plan(self, indices: Tensor) -> TokensPlan:
        tokens, ranks, device = len(indices), self.ranks, indices.device
        owner = indices // self.local
        here = torch.zeros(tokens, ranks, dtype=torch.bool, device=device).scatter_(1, owner, True)
        pairs = torch.bincount(owner.flatten(), minlength=ranks)
        counts = torch.stack([here.sum(0), pairs], dim=1)
        received = all_to_all(counts, [1] * ranks, [1] * ranks)
        # The only read: rows to send, rows and pairs to receive.
        send, receive, got_pairs = torch.stack([counts[:, 0], received[:, 0], received[:, 1]]).tolist()
        by_rank = here.t().flatten()
        place = by_rank.cumsum(0) - 1
        slots = torch.zeros(ranks * tokens + 1, dtype=torch.int64, device=device)
        slots.scatter_(
            0, torch.where(by_rank, place, ranks * tokens), torch.arange(len(place), device=device)
        )
        to, token = slots[: sum(send)] // tokens, slots[: sum(send)] % tokens
        sent_as = torch.where(here, place.view(ranks, tokens).t(), -1)
        ids = indices[token] - (to * self.local).unsqueeze(1)
        ids = torch.where((ids >= 0) & (ids < self.local), ids, self.local).int()
        ids = all_to_all(ids, send, receive)
        sorted_ids, order = ids.flatten().sort(stable=True)
        order = order[: sum(got_pairs)]
        ends = torch.searchsorted(sorted_ids, self.each_expert.int(), right=True, out_int32=True)
        rows_of = positions(order, ids.numel()).view(-1, self.topk)
        return TokensPlan(token, sent_as, send, receive, order, rows_of, ends)

    def dispatch(self, plan: TokensPlan, tokens: Tensor) -> Tensor:
        rows = Gather.apply(tokens, plan.token, plan.sent_as, self.sum_rows)
        output: Tensor = AllToAll.apply(rows, plan.send, plan.receive)
        return output

    def combine(self, plan: TokensPlan, rows: Tensor) -> Tensor:
        rows = AllToAll.apply(rows, plan.receive, plan.send)
        output: Tensor = SumRows.apply(rows, plan.sent_as, plan.token, self.sum_rows)
        return output

    def forward(self, tokens: Tensor) -> Tensor:
        weights, indices = route(tokens, self.router, self.topk)
        plan = self.plan(indices)
        received = self.dispatch(plan, tokens)
        of_rows = self.dispatch(plan, weights).flatten().index_select(0, plan.pairs)
        index = plan.pairs // self.topk
        rows = Gather.apply(received, index, plan.rows_of, self.sum_rows)
        rows = self.experts(rows, plan.ends, of_rows)
        return self.combine(plan, SumRows.apply(rows, plan.rows_of, index, self.sum_rows))


class GatheredPlan(NamedTuple):
    """Of :class:`Gathered`. It has ``R * T * K`` rows; those past the last expert are unused."""

    #: (token, k) of the group for each row, its token, or ``R * T``, and where each expert ends.
    order: Tensor
    source: Tensor
    ends: Tensor


class Gathered(Peer):
    """All tokens to all ranks, which copy those of their experts; sums of rows by ``index_add``, then a reduce-scatter.
    Sizes are static."""

    name = "all-gather"
    form, sends = "copies", "all"
    static = True
    modes = ("eager", "graph")

    def plan(self, indices: Tensor) -> GatheredPlan:
        ids = all_gather(indices.int()) - self.first
        ids = torch.where((ids >= 0) & (ids < self.local), ids, self.local).flatten()
        sorted_ids, order = ids.sort(stable=True)
        source = torch.where(sorted_ids < self.local, order // self.topk, len(ids) // self.topk)
        ends = torch.searchsorted(sorted_ids, self.each_expert.int(), right=True, out_int32=True)
        return GatheredPlan(order, source, ends)

    def dispatch(self, plan: GatheredPlan, tokens: Tensor) -> Tensor:
        output: Tensor = GatherAny.apply(AllGather.apply(tokens), plan.source)
        return output

    def combine(self, plan: GatheredPlan, rows: Tensor) -> Tensor:
        count = len(rows) // self.topk
        output: Tensor = ReduceScatter.apply(AddRows.apply(rows, plan.source, count))
        return output

    def forward(self, tokens: Tensor) -> Tensor:
        weights, indices = route(tokens, self.router, self.topk)
        plan = self.plan(indices)
        of_rows = AllGather.apply(weights).flatten()
        # Gradients of unused rows are those of no memory that was written.
        used = plan.source < len(of_rows) // self.topk
        of_rows = Selected.apply(of_rows, plan.order, used)
        return self.combine(plan, self.experts(self.dispatch(plan, tokens), plan.ends, of_rows))


class Selected(torch.autograd.Function):
    """``values[order]`` for a permutation; gradients that are not ``used`` are left out, whatever they hold."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, used: Tensor) -> Tensor:
        ctx.save_for_backward(order, used)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, used = ctx.saved_tensors
        return torch.empty_like(grad).scatter_(0, order, torch.where(used, grad, 0.0)), None, None


#: By name, with whether parts are compiled; the first is the baseline of ratios, in the faster of its two forms.
PEERS: dict[str, tuple[type[Peer], bool]] = {
    "stock": (Tokens, True),
    "stock, nothing compiled": (Tokens, False),
    "all-to-all of copies": (Copies, True),
    "all-gather": (Gathered, True),
}
