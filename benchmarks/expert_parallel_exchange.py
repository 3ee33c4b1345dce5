"""Plan, dispatch and combine alone, for :mod:`benchmarks.expert_parallel`: ours, those of the peers, and DeepEP's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.expert_parallel_cases import (
    CAPACITY_FACTOR,
    RankData,
    Traffic,
    gathered,
    tight_capacity,
)
from benchmarks.expert_parallel_measures import (
    Call,
    LinkCounters,
    agreed,
    captured,
    largest,
    rested,
    tried,
)
from benchmarks.expert_parallel_peers import PEERS, Peer
from benchmarks.moe_layer_peers import route
from transformer_plugin.parallel import EpContext
from transformer_plugin.parallel.expert import Transport
from transformer_plugin.testing.numerics import relative_error

Row = dict[str, Any]
#: Of an element that went to ranks and back, for each rank: it is rounded to bfloat16 there, or in a sum over ranks.
BOUND = 2.0**-8
#: multiprocessors that DeepEP is given; its best number depends on the sizes.
DEEP_EP_SMS = (24, 48)
#: seconds of rest before a call: copies do not lower a GPU's clock.
REST = 0.02


class Exchange:
    """Sends a layer's tokens to the ranks of their experts, and rows of the same form back."""

    name: str
    #: what experts get: "copies" of a token, one for each expert; or "tokens", once for each rank.
    form: str
    #: what is sent to another rank, as in :class:`Peer`; None: that is for the counters of the links to say.
    sends: str | None = None
    #: whether combine adds up rows of experts, also where dispatch returns tokens.
    sums = False
    #: whether the host reads nothing in the plan; whether the first dispatch is part of it.
    static_plan = True
    plan_dispatches = False
    #: rows past the capacity, with the present routing.
    dropped = 0

    def plan(self, indices: Tensor, weights: Tensor) -> Any:
        """Computes where the tokens go."""
        raise NotImplementedError

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        """Sends tokens, without weights."""
        raise NotImplementedError

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        """Sums the rows of each token."""
        raise NotImplementedError

    def received(self, plan: Any, rows: Tensor) -> Tensor | None:
        """What dispatch wrote, without memory that it left as it was. None: that is not known."""
        return rows

    def experts(self, plan: Any, rows: Tensor) -> Tensor:
        """What experts that change nothing make of the rows: the argument of combine."""
        return rows

    def close(self) -> None:
        """After the last call."""


class Ours(Exchange):
    """``EpContext``: copies of tokens for experts, or tokens once for each rank (``expand=False``); with ``sums`` rows
    of experts come back to those, as in ``MoE``."""

    def __init__(
        self,
        data: RankData,
        expand: bool = True,
        tight: bool = False,
        sums: bool = False,
        transport: Transport = "auto",
    ) -> None:
        layer = data.layer
        self.form, self.sums = "copies" if expand else "tokens", sums
        self.name = f"ours, {self.form}" + (f", capacity {CAPACITY_FACTOR}" if tight else "")
        self.name += (", sums" if sums else "") + ("" if transport == "auto" else f", {transport}")
        self.context = EpContext(
            data.rank.group,
            num_experts=layer.experts,
            max_tokens_per_rank=layer.tokens,
            hidden_dim=layer.hidden,
            num_topk=layer.topk,
            capacity=tight_capacity(data, 1) if tight else None,
            overflow="drop",
            transport=transport,
            max_token_dtype=torch.bfloat16,
        )
        self.expand = expand

    def plan(self, indices: Tensor, weights: Tensor) -> Any:
        return self.context.plan(indices)

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        rows, _ = self.context.dispatch(plan, tokens, None, expand=self.expand)
        return rows

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self.context.combine(plan, rows, expand=self.expand or self.sums)

    def received(self, plan: Any, rows: Tensor) -> Tensor | None:
        self.dropped = max(0, int(plan.required.max()) - self.context.capacity)
        return rows if self.form == "copies" else self._tokens_here(plan, rows)

    def experts(self, plan: Any, rows: Tensor) -> Tensor:
        if self.form == "copies":
            return rows
        if self.sums:
            of_rows = rows.index_select(0, plan.source.clamp(min=0))
            return of_rows.masked_fill((plan.source < 0)[:, None], 0)
        return self._tokens_here(plan, rows)

    def _tokens_here(self, plan: Any, rows: Tensor) -> Tensor:
        return rows.masked_fill(
            (plan.slot < 0).all(1)[:, None], 0
        )  # experts leave zeros where they have no row

    def close(self) -> None:
        self.context.finalize()


class OfPeer(Exchange):
    """That of a layer in stock PyTorch."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.name = peer, peer.name
        self.form, self.sends, self.static_plan = peer.form, peer.sends, peer.static

    def plan(self, indices: Tensor, weights: Tensor) -> Any:
        return self.peer.plan(indices)

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        return self.peer.dispatch(plan, tokens)

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self.peer.combine(plan, rows)

    def received(self, plan: Any, rows: Tensor) -> Tensor | None:
        return rows[: int(plan.ends[-1])] if self.form == "copies" else rows


class DeepEP(Exchange):
    """``deep_ep.Buffer`` within a host: a dispatch with a known layout, and combine. Its plan ends with a dispatch that
    returns the number of received rows to the host."""

    form = sends = "tokens"
    static_plan = False
    plan_dispatches = True

    def __init__(self, data: RankData, multiprocessors: int) -> None:
        from deep_ep import Buffer

        self.data, self.name = data, f"deep_ep, {multiprocessors} SMs"
        Buffer.set_num_sms(multiprocessors)
        ranks, row_bytes = data.ranks, data.layer.hidden * 2
        self.to, self.back = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        size = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in (self.to, self.back))
        self.buffer = Buffer(data.rank.group, size, 0)

    def plan(self, indices: Tensor, weights: Tensor) -> Any:
        layout = self.buffer.get_dispatch_layout(indices, self.data.layer.experts)
        handle = self.buffer.dispatch(
            self.data.tokens.detach(),
            topk_idx=indices,
            topk_weights=weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
            config=self.to,
        )[4]
        return handle

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        output: Tensor = self.buffer.dispatch(tokens, handle=plan, config=self.to)[0]
        return output

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        output: Tensor = self.buffer.combine(rows, plan, config=self.back)[0]
        return output


def of_peer(peer: type[Peer], data: RankData) -> OfPeer:
    """The exchange of a new layer."""
    return OfPeer(peer(data, True))


def makers(data: RankData) -> dict[str, Callable[[], Exchange]]:
    """All exchanges by name, ours first; those whose library is not installed are left out."""
    ours = [partial(Ours, data, expand, tight) for expand in (True, False) for tight in (False, True)]
    ours.append(partial(Ours, data, expand=False, sums=True))
    if data.device.type == "cuda":
        ours += [
            partial(Ours, data, expand=False, sums=sums, transport="all_gather") for sums in (False, True)
        ]
    found: dict[str, Callable[[], Exchange]] = {f"ours {i}": make for i, make in enumerate(ours)}
    found |= {name: partial(of_peer, peer, data) for name, (peer, fuses) in PEERS.items() if fuses}
    if data.device.type == "cuda" and importlib.util.find_spec("deep_ep"):
        found.update({f"deep_ep {sms}": partial(DeepEP, data, sms) for sms in DEEP_EP_SMS})
    return found


@torch.no_grad()
def fault(exchange: Exchange, plan: Any, data: RankData, everything: dict[str, Tensor]) -> str | None:
    """Says what differs from float64: the sum of the received rows, or of a token's rows that went out and back."""
    tokens, experts = everything["tokens"], everything["indices"] // data.local_experts
    rows = exchange.dispatch(plan, data.tokens.detach())
    received = exchange.received(plan, rows)
    # Both calls, before a rank that found a fault returns.
    back = exchange.combine(plan, exchange.experts(plan, rows)).double()
    dropped = int(largest([exchange.dropped], data.device)[0])
    here = experts == data.index
    copies = here.sum(1) if exchange.form == "copies" else here.any(1)
    if received is not None and not dropped:
        want = copies.double() @ tokens.double()
        error = relative_error(received.sum(0, dtype=torch.float64), want)
        if not error < 1e-9:
            return f"wrong: sum of the dispatched rows: relative error {error:.1e}"
    mine = slice(data.index * data.layer.tokens, (data.index + 1) * data.layer.tokens)
    of_ranks = torch.stack([(experts[mine] == rank).sum(1) for rank in range(data.ranks)])
    of_rows = exchange.sums or exchange.form == "copies"
    count = of_ranks.sum(0) if of_rows else (of_ranks > 0).sum(0)
    want = data.tokens.detach().double() * count[:, None]
    error_of = (back - want).abs() if not dropped else back.abs() - want.abs()  # then some rows are zero
    wrong = int((~(error_of <= data.ranks * BOUND * want.abs())).sum())
    return f"wrong: combine: {wrong} of {want.numel()} elements" if wrong else None


def _append(made: list[Exchange], make: Callable[[], Exchange]) -> None:
    made.append(make())


class Exchanges:
    """The exchanges of a layer."""

    def __init__(self, data: RankData, rounds: int) -> None:
        self.data, self.rounds = data, rounds
        self.counters = LinkCounters(data.device)
        self.made: dict[str, Exchange] = {}
        self.notes: list[Row] = []
        for name, make in makers(data).items():
            made: list[Exchange] = []
            note = tried(partial(_append, made, make))
            if note is None:
                self.made[name] = made[0]
            else:
                self.notes.append({"kind": "exchange", "competitor": name, "note": note})

    def measure(self, base: Row, counts: bool) -> list[Row]:
        """The rows of the present routing; with the bytes on the links if it ``counts`` them."""
        data = self.data
        weights, indices = route(data.tokens.detach(), data.router, data.layer.topk)
        everything = {"tokens": gathered(data.tokens), "indices": gathered(indices)}
        traffic = Traffic.of(everything["indices"], data.layer.experts, data.ranks)
        pool = torch.cuda.graph_pool_handle() if data.device.type == "cuda" else None
        calls: dict[str, Call] = {}
        rows: dict[str, Row] = {}
        for name, exchange in self.made.items():
            row = {"kind": "exchange", **base, "competitor": exchange.name, "form": exchange.form}
            plan, note = self._planned(exchange, indices, weights, everything)
            if note is not None:
                self.notes.append({**row, "note": note})
                continue
            row["dropped_rows"] = int(largest([exchange.dropped], data.device)[0])
            row |= self._stated(exchange, traffic)
            for work, (call, why) in self._works(exchange, plan, indices, weights, pool).items():
                calls[f"{name}|{work}"] = call
                row[f"{work}_mode"] = call.mode
                row |= {} if why is None else {f"{work}_note": why}
            rows[name] = row
        return self._timed(rows, calls, counts)

    def _planned(
        self, exchange: Exchange, indices: Tensor, weights: Tensor, everything: dict[str, Tensor]
    ) -> tuple[Any, str | None]:
        """A plan of the present routing; or why it cannot be used, the same on every rank."""
        found: list[Any] = []

        def plan() -> None:
            found.append(exchange.plan(indices, weights))

        def check() -> None:
            found.append(fault(exchange, found[0], self.data, everything))

        note = tried(plan) or tried(check) or agreed(found[1])
        return found[0] if note is None else None, note

    @torch.no_grad()
    def _works(
        self, exchange: Exchange, plan: Any, indices: Tensor, weights: Tensor, pool: Any
    ) -> dict[str, tuple[Call, str | None]]:
        """What is timed of an exchange, and why something is not captured."""
        device, tokens = self.data.device, self.data.tokens.detach()
        received = exchange.experts(plan, exchange.dispatch(plan, tokens))

        # Each is called later, too, where gradients are enabled.
        @torch.no_grad()
        def plan_again() -> Any:
            return exchange.plan(indices, weights)

        @torch.no_grad()
        def dispatch(with_plan: Any = plan) -> Tensor:
            return exchange.dispatch(with_plan, tokens)

        @torch.no_grad()
        def combine(rows: Tensor = received, with_plan: Any = plan) -> Tensor:
            return exchange.combine(with_plan, rows)

        def back(rows: Tensor, with_plan: Any = plan) -> Tensor:
            return combine(exchange.experts(with_plan, rows), with_plan)

        def from_plan(other: Any) -> Tensor:
            return back(dispatch(other), other)

        def itself(output: Tensor) -> Tensor:
            return output

        name = "plan_and_dispatch" if exchange.plan_dispatches else "plan"
        reads = (Call(plan_again, "eager"), None)
        return {
            name: captured(plan_again, from_plan, device, pool) if exchange.static_plan else reads,
            "dispatch": captured(dispatch, back, device, pool),
            "combine": captured(combine, itself, device, pool),
        }

    def _stated(self, exchange: Exchange, traffic: Traffic) -> Row:
        """Bytes of a dispatch, the most of any rank: what must be sent, and what this exchange sends."""
        index, row_bytes = self.data.index, self.data.layer.hidden * 2
        found = {}
        for key, what in (("needed", "tokens"), ("stated", exchange.sends)):
            if what is not None:
                most = largest([rows * row_bytes for rows in traffic.moved(what, index)], self.data.device)
                found[f"{key}_sent"], found[f"{key}_received"] = (int(value) for value in most)
        return found

    def _timed(self, rows: dict[str, Row], calls: dict[str, Call], counts: bool) -> list[Row]:
        times = rested(calls, self.data.device, self.rounds, REST)
        for key, call in calls.items():
            name, work = key.split("|")
            rows[name][f"{work}_us"] = times[key]
            if counts and work in ("dispatch", "combine"):
                found = self.counters.of(call, self.data.device)
                rows[name] |= {f"{work}_{column}": value for column, value in found.items()}
        return list(rows.values())

    def close(self) -> None:
        """Ends the contexts, after the graphs of their calls are gone."""
        for exchange in self.made.values():
            exchange.close()
