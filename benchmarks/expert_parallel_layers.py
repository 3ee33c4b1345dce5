"""One layer over ranks, tokens to tokens, on each rank: what :mod:`benchmarks.expert_parallel` runs in processes."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import moe_layer_measures as measures
from benchmarks.expert_parallel_cases import (
    CAPACITY_FACTOR,
    RECIPES,
    OneRank,
    OursOverRanks,
    RankData,
    Traffic,
    reference,
)
from benchmarks.expert_parallel_exchange import Exchanges
from benchmarks.expert_parallel_measures import (
    Call,
    LinkCounters,
    agreed,
    largest,
    rested,
    sustained,
    tried,
)
from benchmarks.expert_parallel_peers import PEERS
from benchmarks.moe_layer_cases import Competitor, Layer, errors, fault
from benchmarks.moe_layer_cases import reference as reference_alone
from benchmarks.moe_layer_measures import Entry
from transformer_plugin.parallel.expert import Transport
from transformer_plugin.testing.distributed import Rank

Row = dict[str, Any]
#: steps for which weights are quantized once: a step counts this part of that time.
MICRO_BATCHES = 4
#: seconds of rest before steps, after which the GPU's clock is back.
REST = 0.12
TIGHT = f", capacity {CAPACITY_FACTOR}"
ALL_GATHER = ", all_gather"


@dataclass(frozen=True)
class Options:
    """What is measured."""

    competitors: tuple[str, ...]
    routings: tuple[str, ...]
    rounds: int
    exchanges: bool


def competitor_names() -> tuple[str, ...]:
    """All layers, ours first."""
    ours = [f"{before}{recipe}{after}" for before, after in _OURS for recipe in RECIPES]
    return (*ours, *PEERS)


_OURS = (("ours ", ""), ("ours ", TIGHT), ("ours ", ALL_GATHER), ("one rank ", ""))


class Layers:
    """The competitors of one layer that run and are right, and notes on the others."""

    def __init__(self, layer: Layer, rank: Rank, options: Options) -> None:
        self.layer, self.rank, self.options, self.device = layer, rank, options, rank.device
        self.data = RankData(layer, rank)
        self.expected = reference(self.data)
        self.data.keep_my_experts()
        # The routers' choice needs one expert more than a token has.
        few = self.data.local_experts <= layer.topk
        self.alone = None if few else RankData(layer, rank, alone=True)
        self.expected_alone = {} if self.alone is None else reference_alone(self.alone)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.counters = LinkCounters(self.device)
        self.entries: list[Entry] = []
        self.notes: list[Row] = []

    def made(self, name: str) -> Competitor:
        """Makes a competitor."""
        if name.startswith("one rank "):
            assert self.alone is not None
            return OneRank(self.alone, name.removeprefix("one rank "))
        if name.startswith("ours "):
            recipe, *options = name.removeprefix("ours ").split(", ")
            transport: Transport = "all_gather" if ALL_GATHER.removeprefix(", ") in options else "auto"
            return OursOverRanks(self.data, recipe, name.endswith(TIGHT), transport)
        peer, fuses = PEERS[name]
        return peer(self.data, fuses)

    def add(self, name: str) -> None:
        """Makes, checks and captures a competitor, and measures what does not depend on the routing."""
        if name.startswith("one rank") and self.alone is None:
            few = f"{self.data.local_experts} experts on a rank are too few for {self.layer.topk} choices"
            self.notes.append({"kind": "layer", "competitor": name, "note": few})
            return
        entries: list[Entry] = []
        found: list[dict[str, float]] = []

        def make() -> None:
            competitor = self.made(name)
            entries.append(Entry(competitor, "eager", competitor.forward))

        def check() -> None:
            alone = name.startswith("one rank")
            found.append(errors(entries[0].competitor, self.expected_alone if alone else self.expected))

        note = tried(make) or tried(check) or agreed(fault(entries[0].competitor, found[0]))
        note = note or tried(partial(self._measure, entries, found))
        if note is None and self.device.type == "cuda" and "graph" in entries[0].competitor.modes:
            note = self._add_graph(entries)
        if note is not None:
            self.notes.append({"kind": "layer", "competitor": name, "note": note})
        kept = entries if note is None or len(entries) > 1 else []
        if len(kept) > 1 and not (name.startswith("ours") and "," not in name):
            kept = kept[1:]  # of these, the captured step is enough
        self.entries += kept

    def _measure(self, entries: list[Entry], found: list[dict[str, float]]) -> None:
        (entry,) = entries
        entry.measures["errors"] = found[0]
        entry.launch_step()
        if self.device.type == "cuda":
            peak = largest([measures.step_peak(entry)], self.device)
            entry.measures["peak_bytes"] = int(peak[0])
        entry.clear()

    def _add_graph(self, entries: list[Entry]) -> str | None:
        """Adds the captured step, whose gradients are compared with the eager ones."""
        (eager,) = entries
        eager.launch_step()
        wanted = measures.gradients(eager)
        got: dict[str, Tensor] = {}
        eager.clear()
        entry = Entry(eager.competitor, "graph", eager.function, measures=eager.measures)
        works = ["step", *(["quantize"] if entry.competitor.caches_weights else [])]
        note = tried(partial(measures.capture, entry, works, self.pool, got))
        note = note or agreed(measures.disagreement(entry, wanted, got))
        if note is None:
            entries.append(entry)
        return note

    def ready(self) -> None:
        """Frees what only :meth:`add` needs."""
        self.expected = self.expected_alone = {}
        gc.collect()

    def measure(self, base: Row, counts: bool) -> list[Row]:
        """The rows of the present routing; with the bytes on the links if it ``counts`` them."""
        calls = {entry.name: Call(entry.call("step"), entry.mode) for entry in self.entries}
        for entry in self.entries:
            if entry.competitor.caches_weights:
                name = f"{entry.competitor.name}, quantize"
                calls[name] = Call(entry.call("quantize"), entry.mode)
        times = rested(calls, self.device, self.options.rounds, REST)
        main = {entry.competitor.name: entry for entry in self.entries}
        steps = {entry.name: calls[entry.name] for entry in main.values()}
        under_load = sustained(steps, self.device, 2 * self.options.rounds)
        rows = []
        for entry in self.entries:
            row = {"kind": "layer", **base, "competitor": entry.competitor.name, "mode": entry.mode}
            quantize = times.get(f"{entry.competitor.name}, quantize")
            if quantize is not None:
                row |= {"micro_batches": MICRO_BATCHES, "quantize_us": quantize}
            row["step_us"] = measures.plus(times[entry.name], quantize, MICRO_BATCHES)
            if entry.name in under_load:
                row["sustained_us"] = measures.plus(under_load[entry.name], quantize, MICRO_BATCHES)
            row |= self._of_routing(entry, calls[entry.name], counts)
            rows.append(row)
        for entry in self.entries:
            entry.clear()
        return rows

    def _of_routing(self, entry: Entry, call: Call, counts: bool) -> Row:
        """Rows that were dropped, and what does not depend on the routing."""
        row: Row = {}
        if isinstance(entry.competitor, OursOverRanks) and entry.competitor.capacity is not None:
            row["dropped_rows"] = int(largest([entry.competitor.dropped()], self.device)[0])
        if counts:
            row |= entry.measures | self.counters.of(call, self.device)
        return row


def traffic_columns(data: RankData) -> Row:
    """Of the present routing: the busiest expert and rank, and the bytes of tokens that a step must send."""
    traffic = Traffic.of(data.all_indices(), data.layer.experts, data.ranks)
    sent, received = traffic.moved("tokens", data.index)
    # Forward and backward, there and back: what dispatch sends, combine receives, and so for the gradients.
    step = 2 * (sent + received) * data.layer.hidden * 2
    return {
        "max_violation": round(data.violation, 3),
        "rank_violation": round(traffic.imbalance, 3),
        "needed_bytes_of_step": int(largest([step], data.device)[0]),
    }


def measure(rank: Rank, layer: Layer, options: Options) -> list[Row]:
    """All rows of a layer: times of the slowest rank, and notes on competitors without them."""
    torch._dynamo.reset()
    gc.collect()
    if rank.device.type == "cuda":  # the first call of the process loads cuBLAS
        torch.ones(16, 16, device=rank.device) @ torch.ones(16, 16, device=rank.device)
        torch.cuda.empty_cache()
    with torch._dynamo.config.patch(recompile_limit=256):  # each size and gradient mode counts
        return _measure(rank, layer, options)


def _measure(rank: Rank, layer: Layer, options: Options) -> list[Row]:
    layers = Layers(layer, rank, options)
    for name in options.competitors:
        layers.add(name)
    layers.ready()
    exchanges = Exchanges(layers.data, options.rounds) if options.exchanges else None
    named = {("layer" if key == "name" else key): value for key, value in asdict(layer).items()}
    named = {key: value for key, value in named.items() if key != "forward_only"} | {"ranks": rank.size}
    rows: list[Row] = []
    for routing in options.routings:
        layers.data.route(routing)
        if layers.alone is not None:
            layers.alone.route(routing)
        base = {**named, "routing": routing, **traffic_columns(layers.data)}
        counts = routing == options.routings[0]
        if exchanges is not None:
            rows += exchanges.measure(base, counts)
        rows += layers.measure(base, counts)
    notes = layers.notes + (exchanges.notes if exchanges is not None else [])
    if exchanges is not None:
        gc.collect()  # graphs first
        exchanges.close()
    return rows + [{**named, **note} for note in notes]
