"""benchmarks/moe_layer.py: routings are as stated, wrong and slow peers are reported, the page has the figures."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import common, moe_layer, moe_layer_page, plot
from benchmarks.moe_layer import Bench, Options
from benchmarks.moe_layer_cases import (
    QUICK_LAYERS,
    ROUTINGS,
    Competitor,
    Data,
    Layer,
    Ours,
    errors,
    fault,
    reference,
)
from benchmarks.moe_layer_peers import PEERS, Stock, route

CPU = torch.device("cpu")
LAYER = QUICK_LAYERS[0]


def options(*competitors: str, **more: Any) -> Options:
    return Options(competitors, more.get("routings", ("natural",)), 3, more.get("tuning", 60.0), True)


@pytest.fixture(scope="module")
def data() -> Data:
    return Data(LAYER, CPU)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file that a quick run of some competitors writes."""
    path = tmp_path_factory.mktemp("results")
    chosen = ["--competitors", "ours bf16", "ours fp8_block", "ours fp8_delayed", "stock"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "RESULTS", path)
        patch.setattr(sys, "argv", ["moe_layer", "--quick", *chosen])
        moe_layer.main()
    found: dict[str, Any] = json.loads((path / "moe_layer_cpu.json").read_text())
    return found


def test_rows_have_times_and_errors(result: dict[str, Any]) -> None:
    assert result["benchmark"] == "moe_layer" and result["options"]["quick"]
    rows = result["rows"]
    assert not [row for row in rows if "note" in row]
    for layer in QUICK_LAYERS:
        of_layer = [row for row in rows if row["layer"] == layer.name]
        assert {row["routing"] for row in of_layer} == set(ROUTINGS)
        assert {row["competitor"] for row in of_layer} == set(result["options"]["competitors"])
        for row in of_layer:
            assert ("step_us" in row) == (not layer.forward_only) and row["times_stock"] > 0
            time = row["forward_us" if layer.forward_only else "step_us"]
            assert 0 < time["low"] <= time["median"] <= time["high"]
    assert {row["mode"] for row in rows if row["competitor"] == "ours bf16"} == {"eager", "compiled"}
    first = [row for row in rows if row["routing"] == "natural" and row["micro_batches"] in (None, 1)]
    for row in first:
        assert set(row["errors"]) == {"output", "tokens", "router", "fc1", "fc2"}
        assert row["first_step_s"] > 0 and row["host_no_grad_us"]["median"] > 0


def test_steps_count_their_part_of_the_quantization(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if row["competitor"] == "ours fp8_block" and "step_us" in row]
    steps = {row["micro_batches"]: row["step_us"]["median"] for row in rows if row["routing"] == "natural"}
    quantize = rows[0]["quantize_us"]["median"]
    assert set(steps) == {1, 4, 8} and quantize > 0
    for count in (4, 8):
        assert steps[1] - steps[count] == pytest.approx(quantize * (1 - 1 / count), abs=1e-3)
    delayed = [row for row in result["rows"] if row["competitor"] == "ours fp8_delayed"]
    assert {row["micro_batches"] for row in delayed} == {None}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_router_chooses_the_stated_experts(routing: str) -> None:
    layer = Layer("", 256, 32, 32, 4, 512)
    data = Data(layer, CPU)
    data.route(routing)
    loads = torch.bincount(data.indices.flatten(), minlength=layer.experts)
    assert int(loads.sum()) == layer.tokens * layer.topk
    violation = float(loads.max()) / (layer.tokens * layer.topk / layer.experts) - 1
    assert data.max_violation == pytest.approx(violation)
    if routing == "natural":
        assert 0 < violation < 1
    else:
        assert violation == pytest.approx({"even": 0.0, "maxvio2": 2.0}[routing], abs=0.05)
    assert torch.equal(Ours(data, "bf16").moe(data.tokens).expert_load, loads)
    _, indices = route(data.tokens, data.router, layer.topk)
    assert torch.equal(indices.sort(1).values, data.indices.sort(1).values)


def test_addresses_stay(data: Data) -> None:
    before = (data.tokens.data_ptr(), data.router.data_ptr(), data.tokens.detach().clone())
    data.route("even")
    assert (data.tokens.data_ptr(), data.router.data_ptr()) == before[:2]
    assert not torch.equal(data.tokens, before[2])
    data.route("natural")
    assert torch.equal(data.tokens, before[2])


@pytest.mark.parametrize("name", ["ours bf16", "ours fp8_tensor", "ours mxfp8", "ours nvfp4", *PEERS])
def test_competitors_are_right(name: str, data: Data) -> None:
    if name in PEERS and name not in ("stock", "transformers"):
        pytest.skip("needs a GPU and the library")
    if name == "transformers":
        pytest.importorskip("transformers")
    competitor = moe_layer.made(name, data)
    assert fault(competitor, errors(competitor, reference(data))) is None


class Wrong(Stock):
    """A weight of every token is a little too large."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 1.03


class Slow(Competitor):
    """Never ends, in the backward, as a library that tunes its kernels."""

    def forward(self, tokens: Tensor) -> Tensor:
        output = tokens * 1.0
        output.register_hook(lambda grad: time.sleep(60))
        return output


def test_a_wrong_peer_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "liger", (Wrong, "torch"))
    layer = Layer("Qwen3-30B, 32768 tokens", 128, 128, 8, 2, 64)
    bench = Bench(layer, CPU, options("liger"), set())
    bench.add("liger")
    assert bench.entries == []
    (row,) = bench.notes
    assert row["note"].startswith("wrong: output: relative error 3.")
    assert (row["published_tflops"], row["published_on"]) == (413.0, "NVIDIA H100")


def test_a_slow_peer_is_stopped_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "sonicmoe", (Slow, "torch"))
    slow: set[str] = set()
    notes = []
    for _ in range(2):
        bench = Bench(LAYER, CPU, options("sonicmoe", tuning=0.2), slow)
        begin = time.monotonic()
        bench.add("sonicmoe")
        assert time.monotonic() - begin < 30
        notes.append(bench.notes[0]["note"])
    assert slow == {"sonicmoe"}
    assert notes == ["no first step within 0.2 s", "no first step within 0.2 s in an earlier layer"]


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "liger", (Stock, "no-such-distribution"))
    bench = Bench(LAYER, CPU, options("liger"), set())
    bench.add("liger")
    assert [row["note"] for row in bench.notes] == ["not installed"]


def test_rows_of_other_layers_are_kept(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert moe_layer.kept_rows(CPU, {"tiny"}) == []
    path = tmp_path / "moe_layer_cpu.json"
    path.write_text(json.dumps(result))
    assert {row["layer"] for row in moe_layer.kept_rows(CPU, {"tiny"})} == {"tiny, forward"}
    path.write_text(json.dumps({**result, "environment": {**result["environment"], "torch": "1.0"}}))
    with pytest.raises(SystemExit, match="of other versions"):
        moe_layer.kept_rows(CPU, {"tiny"})


def test_tables_and_plot_have_every_competitor(result: dict[str, Any]) -> None:
    note = {"layer": "tiny", "competitor": "liger", "note": "not installed"}
    published = {"published_tflops": 413.0, "published_on": "NVIDIA H100"}
    with_note = {**result, "rows": [*result["rows"], {**note, **published}]}
    text = moe_layer_page.tables(with_note)
    for name in result["options"]["competitors"]:
        assert f"| {name} | eager |" in text
    assert "- `liger`: not installed. Published by its authors: 413 TFLOP/s on NVIDIA H100." in text
    assert "maxvio2, MaxVio 2.00" in text
    row = next(row for row in result["rows"] if row["competitor"] == "stock")
    assert f"| stock | eager | {row['forward_us']['median']:.0f} | {row['step_us']['median']:.0f} |" in text
    figure = plot.DRAWINGS["moe_layer"](with_note)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "liger, published" in labels and "stock, eager" in labels and "ours fp8_block, eager" in labels


def test_page_has_the_recorded_figures() -> None:
    page = moe_layer_page.PAGE.read_text()
    assert page == moe_layer_page.with_tables(page)


@pytest.mark.gpu
def test_modes_on_a_gpu() -> None:
    """Eager, compiled and captured steps have equal gradients, memory and launches are counted."""
    names = ("ours bf16", "ours fp8_block", "ours fp8_delayed", "stock")
    chosen = Options(names, ("natural", "maxvio2"), 2, 60.0, False)
    bench = Bench(Layer("small", 512, 256, 16, 4, 1024), torch.device("cuda"), chosen, set())
    for name in names:
        bench.add(name)
    bench.ready()
    assert bench.notes == []
    assert {(entry.competitor.name, entry.mode) for entry in bench.entries} == {
        (name, mode) for name in names for mode in ("eager", "compiled", "graph")
    }
    rows = bench.measure("natural")
    for row in rows:
        assert row["step_us"].median > 0 and row["forward_us"].median > 0 and row["times_stock"] > 0
        assert ("sustained_us" in row) == (row["mode"] == "graph")
        if row["mode"] != "graph" and row["micro_batches"] in (None, 1):
            assert row["peak_bytes"] > 0 and row["forward_launches"] > 3 and row["backward_launches"] > 3
    others = bench.measure("maxvio2")
    assert {row["mode"] for row in others} == {"graph"} and others[0]["max_violation"] > 1.9
