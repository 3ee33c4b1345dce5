"""One mixture-of-experts layer, tokens to tokens, forward and backward, compared with its peers.

Router, permutation, experts and combine are in the time. All competitors have the same weights, tokens and choices of
experts: a natural routing, an even one, and one whose busiest expert has three times the mean load (MaxVio 2). Outputs
and gradients are compared with float64 before timing; a wrong peer is reported, not timed.

``nn.MoE`` runs in bfloat16 and with recipes, eager, compiled (one graph) and replayed from a CUDA graph. With a recipe
its weights are quantized once for N micro-batches, and each step counts 1/N of that time; with delayed scaling every
forward quantizes them. In the layer without a backward they were quantized before. Competitors alternate in one run.
Each time is the median of rounds of up to 8 calls after a pause; sustained times are those of calls without pauses.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import common
from benchmarks import moe_layer_measures as measures
from benchmarks.common import Time, write
from benchmarks.moe_layer_cases import (
    LAYERS,
    MORE_RECIPES,
    QUICK_LAYERS,
    RECIPES,
    ROUTINGS,
    Competitor,
    Data,
    Layer,
    Ours,
    errors,
    fault,
    reference,
)
from benchmarks.moe_layer_measures import Entry
from benchmarks.moe_layer_peers import PEERS, PUBLISHED, installed

ROUNDS, QUICK_ROUNDS = 5, 3
#: seconds for the first step of a peer, in which it tunes its kernels.
TUNING = 60.0
MICRO_BATCHES = (1, 4, 8)
#: the baseline of the ratios, in the faster of its modes.
BASELINE = "stock"

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What is measured."""

    competitors: tuple[str, ...]
    routings: tuple[str, ...]
    rounds: int
    tuning: float
    quick: bool


def competitor_names(all_recipes: bool, quick: bool) -> tuple[str, ...]:
    """All competitors, ours first. Off a GPU only ours and the stock block."""
    ours = ("bf16", *RECIPES, *(MORE_RECIPES if all_recipes else ()))
    return tuple(f"ours {recipe}" for recipe in ours) + ((BASELINE,) if quick else tuple(PEERS))


def made(name: str, data: Data) -> Competitor:
    """Makes a competitor."""
    return Ours(data, name.removeprefix("ours ")) if name.startswith("ours ") else PEERS[name][0](data)


def modes_of(competitor: Competitor, layer: Layer, quick: bool) -> list[str]:
    """The modes that are run after the eager one. On a CPU only one competitor is compiled, which takes long."""
    if quick:
        compiles = competitor.name == "ours bf16" and not layer.forward_only
        return ["compiled"] if compiles else []
    captured = ["compiled"] if competitor.captured == "compiled" else []
    wanted = (*captured, "graph") if layer.forward_only else competitor.modes[1:]
    return [mode for mode in wanted if mode in competitor.modes]


class Bench:
    """The competitors of one layer that run and are right, and notes on the others."""

    def __init__(self, layer: Layer, device: torch.device, options: Options, slow: set[str]) -> None:
        torch._dynamo.reset()
        #: peers whose first step took too long in an earlier layer.
        self.slow = slow
        self.layer, self.device, self.options = layer, device, options
        self.data = Data(layer, device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.expected = reference(self.data)
        self.entries: list[Entry] = []
        self.notes: list[Row] = []
        self.found: dict[str, dict[str, float]] = {}

    def add(self, name: str) -> None:
        """Makes, checks and captures a competitor, and measures what does not depend on the routing."""
        if name in PEERS and not installed(name):
            note: str | None = "not installed"
        elif name in self.slow:
            note = f"{measures.TOO_SLOW} {self.options.tuning:g} s in an earlier layer"
        else:
            note = self._add(name)
        if note is not None:
            row = {"layer": self.layer.name, "competitor": name, "note": note}
            if (name, self.layer.name) in PUBLISHED:
                row["published_tflops"], row["published_on"] = PUBLISHED[name, self.layer.name]
            self.notes.append(row)

    def _add(self, name: str) -> str | None:
        limit = self.options.tuning if name in PEERS and name != BASELINE else 0.0
        entries: list[Entry] = []

        def make() -> None:
            competitor = made(name, self.data)
            entries.append(Entry(competitor, "eager", competitor.forward))

        def check() -> None:
            self.found[name] = errors(entries[0].competitor, self.expected)

        note = (
            measures.attempt(make, limit)
            or measures.first_step(entries[0], self.layer.forward_only, limit)
            or measures.attempt(check, limit)
            or fault(entries[0].competitor, self.found[name])
        )
        if note is not None:
            if note.startswith(measures.TOO_SLOW):
                self.slow.add(name)
            return note
        measures.fixed_measures(entries[0], self.layer.forward_only)
        self._add_other_modes(entries, limit)
        self.entries += entries[-1:] if self.layer.forward_only else entries
        return None

    def _add_other_modes(self, entries: list[Entry], limit: float) -> None:
        """Adds the compiled and the captured mode, whose gradients are compared with the eager ones."""
        (eager,) = entries
        functions, wanted = {"eager": eager.function}, {}
        if not self.layer.forward_only:
            eager.launch_step()
            wanted = measures.gradients(eager)
            eager.clear()
        for mode in modes_of(eager.competitor, self.layer, self.options.quick):
            got: dict[str, Tensor] = {}
            if mode == "compiled":
                entry = self._compiled(eager.competitor)
                functions[mode] = entry.function
                got = measures.gradients(entry) if wanted else {}
                measures.fixed_measures(entry, self.layer.forward_only)
                note = None
            else:
                entry = Entry(eager.competitor, mode, functions[eager.competitor.captured])
                works = ["forward", *(["step"] if wanted else [])]
                works += ["quantize"] if entry.competitor.caches_weights else []
                note = measures.attempt(partial(measures.capture, entry, works, self.pool, got), limit)
            note = note or measures.disagreement(entry, wanted, got)
            if note is None:
                entries.append(entry)
            else:
                names = {"competitor": entry.competitor.name, "mode": mode}
                self.notes.append({"layer": self.layer.name, **names, "note": note})

    def _compiled(self, competitor: Competitor) -> Entry:
        """The compiled mode, after its first step. On a CPU without code generation: a C++ compiler takes long."""
        backend = "aot_eager" if self.options.quick else "inductor"
        function = torch.compile(competitor.forward, fullgraph=True, dynamic=False, backend=backend)
        entry = Entry(competitor, "compiled", function)
        measures.first_step(entry, self.layer.forward_only)
        return entry

    def ready(self) -> None:
        """Frees what only :meth:`add` needs."""
        self.expected = {}
        gc.collect()

    def _main_entries(self) -> list[Entry]:
        """One entry of each competitor: the captured one, or the last."""
        return list({entry.competitor.name: entry for entry in self.entries}.values())

    def measure(self, routing: str) -> list[Row]:
        """The rows of a routing. Modes other than the main one run with the first routing only."""
        self.data.route(routing)
        first = routing == self.options.routings[0]
        entries = self.entries if first else self._main_entries()
        work = "forward" if self.layer.forward_only else "step"
        main = self._main_entries()
        times = {}
        if first or work == "forward":
            times["forward"] = self._times(measures.rested, "forward", entries)
        if work == "step":
            times["step"] = self._times(measures.rested, "step", entries)
        times["sustained"] = self._times(measures.sustained, work, main)
        rows = [row for entry in entries for row in self._rows(entry, routing, times, first)]
        add_ratios(rows)
        return rows

    def _times(
        self, measure: Callable[..., dict[str, Time]], work: str, entries: list[Entry]
    ) -> dict[str, Time]:
        calls = {entry.name: entry.call(work) for entry in entries}
        for entry in self._main_entries():
            if entry.competitor.caches_weights and not self.layer.forward_only:
                calls[f"{entry.competitor.name}, quantize"] = entry.call("quantize")
        found = measure(calls, self.device, self.options.rounds)
        for entry in entries:
            entry.clear()
        return found

    def _rows(self, entry: Entry, routing: str, times: dict[str, dict[str, Time]], first: bool) -> list[Row]:
        layer, competitor = self.layer, entry.competitor
        base = {("layer" if key == "name" else key): value for key, value in asdict(layer).items()}
        base |= {"routing": routing, "max_violation": round(self.data.max_violation, 3)}
        base |= {"competitor": competitor.name, "mode": entry.mode}
        rows = []
        counts = MICRO_BATCHES if competitor.caches_weights and not layer.forward_only else (None,)
        for count in counts:
            row = {**base, "micro_batches": count}
            for key, found in times.items():
                if entry.name not in found:
                    continue
                part = found.get(f"{competitor.name}, quantize") if count else None
                time = measures.plus(found[entry.name], part, count or 1)
                row[f"{key}_us"] = time
                if key != "sustained":
                    flops = layer.forward_flops * (3 if key == "step" else 1)
                    row[f"{key}_tflops"] = round(flops / time.median / 1e6, 1)
                if part is not None and key == "step":
                    row["quantize_us"] = part
            if first and count in (None, 1):
                row |= {"errors": self.found[competitor.name], **entry.measures}
            rows.append(row)
        return rows


def add_ratios(rows: list[Row]) -> None:
    """Adds how many times as fast as the baseline each row is: ``times_stock``, ``sustained_times_stock``."""
    for name, key in (("times_stock", "step_us"), ("sustained_times_stock", "sustained_us")):
        if name == "times_stock" and not any(key in row for row in rows):
            key = "forward_us"
        stock = [row[key].median for row in rows if row["competitor"] == BASELINE and key in row]
        for row in rows:
            if stock and key in row:
                row[name] = round(min(stock) / row[key].median, 3)


def line(row: Row) -> str:
    """A row for the terminal."""
    if "note" in row:
        return f"{row['layer']:30s} {row['competitor']}: {row['note']}"

    def number(key: str, scale: float = 1.0) -> str:
        value = row.get(key, "")
        value = value.median if isinstance(value, Time) else value
        return f"{value / scale:.4g}" if value != "" else "-"

    name = f"{row['competitor']}, {row['mode']}" + (
        f", N={row['micro_batches']}" if row["micro_batches"] else ""
    )
    parts = [f"{row['layer']:30s} {row['routing']:8s} {name:32s} forward {number('forward_us'):>7s} us"]
    parts.append(f"step {number('step_us'):>7s} us {number('step_tflops'):>5s} TFLOP/s")
    parts.append(f"{number('times_stock'):>5s} x stock (sustained {number('sustained_times_stock')})")
    if "peak_bytes" in row:
        parts.append(f"{number('peak_bytes', 2**30)} GiB, host {number('host_grad_us')} us")
    return ", ".join(parts)


def shown(rows: list[Row], bar: Any) -> list[Row]:
    """Prints rows above the progress bar."""
    for row in rows:
        bar.write(line(row))
    return rows


def measure(layers: tuple[Layer, ...], device: torch.device, options: Options) -> list[Row]:
    """All rows: those of each layer, then the notes on its other competitors."""
    rows: list[Row] = []
    slow: set[str] = set()
    total = len(layers) * (len(options.competitors) + len(options.routings))
    with tqdm(total=total, unit="part", dynamic_ncols=True, file=sys.stderr) as bar:
        for layer in layers:
            bar.set_description(layer.name)
            bench = Bench(layer, device, options, slow)
            for name in options.competitors:
                bench.add(name)
                bar.update()
            bench.ready()
            for routing in options.routings:
                rows += shown(bench.measure(routing), bar)
                bar.update()
            rows += shown(bench.notes, bar)
            del bench
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def kept_rows(device: torch.device, measured: set[str]) -> list[Row]:
    """The rows of the other layers in the present file, if they are of this GPU and these versions."""
    path = common.RESULTS / f"moe_layer_{device.type}.json"
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    same = ("torch", "cuda", "processor", "transformer_plugin")
    now = common.environment(device)
    gpus = [(found["gpu"] or {}).get("name") for found in (before["environment"], now)]
    if gpus[0] != gpus[1] or any(before["environment"][key] != now[key] for key in same):
        sys.exit(
            f"moe_layer: {path} is of another machine or of other versions. Run all layers without --keep."
        )
    return [row for row in before["rows"] if row["layer"] not in measured]


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny layers on a CPU, ours and the stock block")
    parser.add_argument(
        "--layers", default="", metavar="TEXT", help="only layers whose name contains the text"
    )
    parser.add_argument("--competitors", nargs="+", metavar="NAME", help='such as "ours bf16" stock liger')
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--all-recipes", action="store_true", help=f"also {', '.join(MORE_RECIPES)}")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other layers")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, {QUICK_ROUNDS} with --quick")
    parser.add_argument("--tuning", type=float, default=TUNING, help=f"seconds, default: {TUNING:g}")
    return parser, parser.parse_args()


def main() -> None:
    """Measures on a GPU, or a tiny layer on a CPU, and writes ``results/moe_layer_<device>.json``."""
    parser, arguments = parsed()
    quick = arguments.quick
    if not quick and not torch.cuda.is_available():
        print("moe_layer: expected a GPU, got none. Nothing is measured; --quick runs tiny layers on a CPU.")
        return
    device = torch.device("cpu" if quick else "cuda")
    known = competitor_names(True, quick)
    names = tuple(arguments.competitors or competitor_names(arguments.all_recipes, quick))
    if not set(names) <= set(known):
        parser.error(f"--competitors: expected some of {', '.join(known)}, got {', '.join(names)}")
    layers = tuple(
        layer
        for layer in (QUICK_LAYERS if quick else LAYERS)
        if arguments.layers.lower() in layer.name.lower()
    )
    if not layers:
        names_of_all = "; ".join(layer.name for layer in (QUICK_LAYERS if quick else LAYERS))
        parser.error(f"--layers {arguments.layers!r}: in none of {names_of_all}")
    rounds = arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    options = Options(names, tuple(arguments.routings), rounds, arguments.tuning, quick)
    if device.type == "cuda":  # the first call of the process loads cuBLAS
        torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)
    threads = torch.get_num_threads()
    if quick:  # tensors are tiny: waiting for a second thread would only add time
        torch.set_num_threads(1)
    with torch._dynamo.config.patch(recompile_limit=256):  # each competitor, shape and gradient mode counts
        rows = measure(layers, device, options)
    if arguments.keep:
        rows += kept_rows(device, {layer.name for layer in layers})
    versions = {name: installed(name) for name in PEERS}
    write("moe_layer", device, rows, options={**asdict(options), "layers": arguments.layers}, peers=versions)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
