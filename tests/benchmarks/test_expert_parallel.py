"""benchmarks/expert_parallel.py on two ranks of a CPU: all rows are there, wrong competitors are reported, and the page
and the plot have the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import common, expert_parallel, expert_parallel_page, plot
from benchmarks.expert_parallel_cases import QUICK_LAYERS, USED_ROUTINGS, RankData, Traffic, gathered
from benchmarks.expert_parallel_exchange import OfPeer, fault
from benchmarks.expert_parallel_layers import ALL_GATHER, Layers, Options, competitor_names, measure
from benchmarks.expert_parallel_measures import Call, LinkCounters
from benchmarks.expert_parallel_peers import PEERS, Tokens
from benchmarks.moe_layer_cases import Layer
from transformer_plugin.testing.distributed import Rank, RankPool

(LAYER,) = QUICK_LAYERS
#: of a CPU, which has one transport for layers
NAMES = [name for name in competitor_names() if ALL_GATHER not in name]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file that a quick run writes."""
    path = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "RESULTS", path)
        patch.setattr(sys, "argv", ["expert_parallel", "--quick"])
        expert_parallel.main()
    found: dict[str, Any] = json.loads((path / "expert_parallel_cpu.json").read_text())
    return found


def rows_of(result: dict[str, Any], kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By competitor and routing."""
    rows = [row for row in result["rows"] if row["kind"] == kind]
    return {(row["competitor"], row["routing"]): row for row in rows}


def test_every_competitor_is_right_and_timed(result: dict[str, Any]) -> None:
    assert result["benchmark"] == "expert_parallel" and result["ranks"] == 2
    assert [row for row in result["rows"] if "note" in row] == []
    layers = rows_of(result, "layer")
    assert set(layers) == {(name, routing) for name in NAMES for routing in USED_ROUTINGS}
    for (name, routing), row in layers.items():
        assert 0 < row["step_us"]["low"] <= row["step_us"]["median"] <= row["step_us"]["high"]
        assert row["times_stock"] > 0 and row["mode"] == "eager"
        assert ("errors" in row) == (routing == USED_ROUTINGS[0])
        assert ("quantize_us" in row) == ("fp8" in name)
        assert (
            ("over_one_rank" in row) == ("over_capacity" in row) == (name in ("ours bf16", "ours fp8_block"))
        )


def test_exchanges_have_times_and_bytes(result: dict[str, Any]) -> None:
    exchanges = rows_of(result, "exchange")
    names = {name for name, _ in exchanges}
    assert names >= {
        "ours, copies",
        "ours, copies, capacity 1.25",
        "ours, tokens",
        "ours, tokens, capacity 1.25",
        "stock",
        "all-gather",
        "all-to-all of copies",
    }
    for (name, _), row in exchanges.items():
        assert all(row[f"{work}_us"]["median"] > 0 for work in ("plan", "dispatch", "combine"))
        assert row["needed_sent"] > 0 and row["needed_received"] > 0
        if name == "stock":
            assert row["stated_sent"] == row["needed_sent"] and row["form"] == "tokens"
        elif not name.startswith("ours"):
            assert row["stated_sent"] >= row["needed_sent"]


def test_traffic_counts_what_goes_between_ranks() -> None:
    # Two tokens of each of two ranks; experts 0 and 1 are on the first rank.
    indices = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 2]])
    traffic = Traffic.of(indices, 4, 2)
    assert traffic.tokens.tolist() == [[2, 1], [0, 2]]
    assert traffic.pairs.tolist() == [[3, 1], [0, 4]]
    assert [traffic.moved(what, 0) for what in ("tokens", "pairs", "all")] == [(1, 0), (1, 0), (2, 2)]
    assert traffic.imbalance == pytest.approx(5 / 4 - 1)


class WrongLayer(Tokens):
    """The rows of one rank are a little too large."""

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return super().combine(plan, rows * 1.03 if self.first else rows)


class LosesARow(OfPeer):
    """A row of one rank does not come back."""

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        rows = rows.clone()
        if self.peer.first:
            rows[0] = 0
        return super().combine(plan, rows)


class SendsAnother(OfPeer):
    """One row of one rank is another one, and comes back as it should."""

    def dispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        rows = super().dispatch(plan, tokens).clone()
        if self.peer.first:
            rows[0] += 0.125
        return rows

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return super().combine(plan, super().dispatch(plan, self.peer.data.tokens.detach()))


def with_wrong_competitors(rank: Rank) -> tuple[Any, ...]:
    layers = Layers(LAYER, rank, Options((), USED_ROUTINGS, 1, False))
    PEERS["stock"] = (WrongLayer, True)
    layers.add("stock")
    data: RankData = layers.data
    everything = {"tokens": gathered(data.tokens), "indices": gathered(data.indices)}
    notes = []
    for wrong in (OfPeer, LosesARow, SendsAnother):
        exchange = wrong(Tokens(data, False))
        notes.append(fault(exchange, exchange.plan(data.indices, None), data, everything))
    return layers.notes, layers.entries, notes


def test_wrong_competitors_are_reported_and_not_timed() -> None:
    with RankPool(2) as pool:
        both = pool.run(with_wrong_competitors)
    for notes, entries, _ in both:
        assert entries == []
        assert notes[0]["note"].startswith("wrong: ")  # on both ranks
    right, lost, another = zip(*(each[2] for each in both), strict=True)
    assert right == (None, None)
    assert lost[0].startswith("wrong: combine: ") and lost[1] is None
    assert another == (None, another[1]) and another[1].startswith("wrong: sum of the dispatched rows")


#: Stands for nvidia-smi: each of 6 links has sent 8 KiB and received 16 KiB between two calls; a 7th does not count.
COUNTS = """echo >> {file}; n=$(wc -l < {file}); echo "GPU 0: NVIDIA (UUID: GPU-7)"
for link in 0 1 2 3 4 5; do
  echo "\t Link $link: Data Tx: $((8 * n)) KiB"; echo "\t Link $link: Data Rx: $((16 * n)) KiB"
done; echo "\t Link 6: Data Tx: N/A" """


def counted(rank: Rank, folder: str) -> tuple[list[int], dict[str, int], dict[str, int]]:
    calls: list[int] = []
    counters = LinkCounters(rank.device)
    without = counters.of(Call(lambda: calls.append(0), "eager"), rank.device)
    counters.command = ["sh", "-c", COUNTS.format(file=f"{folder}/{rank.rank}")]
    found = counters.of(Call(lambda: calls.append(1), "graph", repeat=2), rank.device, times=4)
    return calls, without, found


def test_bytes_on_links_are_those_of_one_call(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for calls, without, found in pool.run(counted, str(tmp_path)):
            assert calls == [0] * 4 + [1] * 4 and without == {}
            assert found == {"counted_sent": 6 * 8 * 1024 // 8, "counted_received": 6 * 16 * 1024 // 8}


def test_section_and_plot_have_every_competitor(result: dict[str, Any]) -> None:
    note = {"kind": "exchange", "layer": LAYER.name, "competitor": "deep_ep 24", "note": "failed: no"}
    with_note = {**result, "rows": [*result["rows"], note]}
    text = expert_parallel_page.section(with_note)
    for name in NAMES:
        assert f"| {name} | eager |" in text
    assert "- `deep_ep 24`, exchange: failed: no.\n" in text
    row = rows_of(result, "exchange")["stock", "natural"]
    assert f"| stock | tokens | {row['plan_us']['median']:.0f} (eager) |" in text
    figure = plot.DRAWINGS["expert_parallel"](with_note)
    labels = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert {"stock, eager: dispatch", "one rank bf16, eager", "bf16, natural", "fp8_block, maxvio2"} <= set(
        labels
    )
    plot.pyplot.close(figure)


def test_page_has_the_recorded_figures() -> None:
    page = expert_parallel_page.PAGE.read_text()
    assert page == expert_parallel_page.with_section(page)


@pytest.mark.gpus(2)
def test_graphs_on_two_gpus() -> None:
    """What reads nothing on the host is captured, with the results that it has without a graph."""
    names = (
        "ours bf16",
        "ours fp8_block",
        "ours bf16, capacity 1.25",
        "one rank bf16",
        "stock",
        "all-gather",
    )
    options = Options(names, ("natural",), 3, True)
    layer = Layer("small", 512, 256, 16, 4, 1024)
    with RankPool(2, "nccl") as pool:
        rows = pool.run(measure, layer, options, timeout=240.0)[0]
    assert [row for row in rows if any(key.endswith("note") for key in row)] == []
    modes = {(row["competitor"], row["mode"]) for row in rows if row["kind"] == "layer"}
    both = {(f"ours {recipe}", mode) for recipe in ("bf16", "fp8_block") for mode in ("eager", "graph")}
    captured = {(name, "graph") for name in ("ours bf16, capacity 1.25", "one rank bf16", "all-gather")}
    assert modes == both | captured | {("stock", "eager")}
    for row in rows:
        if row["kind"] == "layer":
            assert row["peak_bytes"] > 0 and row["step_us"].median > 0
        else:
            assert row["dispatch_mode"] == row["combine_mode"] == "graph"
