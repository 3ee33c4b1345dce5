"""Experts over ranks compared with peers: plan, dispatch and combine alone, and one layer, forward and backward.

Each rank has other tokens and a share of the experts. All competitors have the same weights, tokens and choices of
experts: a natural routing, and one whose busiest expert has three times the mean load. Before timing, outputs and
gradients are compared with float64; a wrong peer is reported, not timed.

``nn.MoE`` runs with its default capacity, which fits any routing, and with one of 1.25 times a balanced routing; and on
one rank with its share of the experts, the same tokens and choices for each, and no exchange; and with the transport
"all_gather". Peers are layers in stock PyTorch: ``stock`` sends each token once to each rank and sums before it sends
back; the others send a copy for each expert, or all tokens to all ranks. DeepEP's exchange is timed where ``deep_ep``
is installed.

Times are those of the slowest rank: steps and calls are replayed from CUDA graphs after a pause, competitors in turn.
What reads sizes on the host cannot be captured, and has the host's time. Needs two GPUs; ``--quick`` takes two ranks
on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import Time, write
from benchmarks.expert_parallel_cases import LAYERS, QUICK_LAYERS, RECIPES, USED_ROUTINGS
from benchmarks.expert_parallel_layers import ALL_GATHER, TIGHT, Options, competitor_names, measure
from benchmarks.expert_parallel_peers import PEERS
from benchmarks.moe_layer_cases import Layer
from transformer_plugin.testing.distributed import RankError, RankPool

#: three at least: quartiles of two lie outside of them.
ROUNDS, QUICK_ROUNDS = 5, 3
#: seconds that one layer may take.
LIMIT = 300.0
#: the baseline of the ratios, in the faster of its forms.
BASELINE = tuple(name for name in PEERS if name.startswith("stock"))

Row = dict[str, Any]


def add_ratios(rows: list[Row]) -> None:
    """Adds to the rows of one layer and routing how they compare with others.

    ``times_stock``: how many times as fast as the baseline. Of ours, ``over_one_rank``: the time over that without
    exchange; and ``over_capacity``: the default capacity's time over the tight one's, in which rows may be dropped.
    """

    def step(name: str, mode: str | None = None, key: str = "step_us") -> float | None:
        found = [row for row in rows if row.get("competitor") == name and key in row]
        times = [row[key].median for row in found if mode in (None, row["mode"])]
        return min(times, default=None)

    for key, suffix in (("step_us", ""), ("sustained_us", "_sustained")):
        stock = min((time for name in BASELINE if (time := step(name, key=key))), default=None)
        for row in rows:
            if row["kind"] != "layer" or key not in row:
                continue
            time, name, mode = row[key].median, row["competitor"], row["mode"]
            if stock:
                row[f"times_stock{suffix}"] = round(stock / time, 3)
            if name in [f"ours {recipe}" for recipe in RECIPES]:
                alone = step(name.replace("ours", "one rank"), mode, key)
                tight = step(name + TIGHT, mode, key)
                for column, other in (("over_one_rank", alone), ("over_capacity", tight)):
                    if other:
                        row[column + suffix] = round(time / other, 3)


def add_exchange_ratios(rows: list[Row]) -> None:
    """Adds to ours the time with the default capacity over that with the tight one."""
    times = {row["competitor"]: row for row in rows if row["kind"] == "exchange" and "note" not in row}
    for name, row in times.items():
        tight = times.get(name + TIGHT)
        if tight is not None:
            for work in ("dispatch", "combine"):
                ratio = row[f"{work}_us"].median / tight[f"{work}_us"].median
                row[f"{work}_over_capacity"] = round(ratio, 3)


def line(row: Row) -> str:
    """A row for the terminal."""
    if "note" in row:
        return f"{row['layer']:36s} {row['kind']:8s} {row['competitor']}: {row['note']}"

    def text(name: str, key: str, unit: str, scale: float = 1.0, digits: int = 0) -> str:
        value = row.get(key)
        value = value.median if isinstance(value, Time) else value
        return "" if value is None else f"{name} {value / scale:.{digits}f}{unit}"

    mode = row.get("mode", row.get("dispatch_mode"))
    parts = [text(work, f"{work}_us", " us") for work in ("plan", "plan_and_dispatch", "dispatch", "combine")]
    parts += [text("step", "step_us", " us"), text("peak", "peak_bytes", " GiB", 2**30, 2)]
    parts += [
        text("sent", "dispatch_counted_sent", " MB", 1e6, 1),
        text("sent", "counted_sent", " MB", 1e6, 1),
    ]
    parts += [text("times stock", "times_stock", "", digits=2)]
    parts += [text("over one rank", "over_one_rank", "", digits=2)]
    parts += [text("over capacity", "over_capacity", "", digits=2)]
    parts += [text("dropped", "dropped_rows", " rows") if row.get("dropped_rows") else ""]
    parts += [f"{key}: {row[key]}" for key in row if key.endswith("_note")]
    head = f"{row['layer']:36s} {row['routing']:8s} {row['competitor'] + ', ' + mode:40s}"
    return head + ", ".join(part for part in parts if part)


def measured(layer: Layer, pool: RankPool, options: Options) -> list[Row]:
    """The rows of a layer. If it fails, that is a note."""
    try:
        rows: list[Row] = pool.run(measure, layer, options, timeout=LIMIT)[0]
    except RankError as error:
        print(error, file=sys.stderr)
        note = f"failed: {str(error).strip().splitlines()[-1]}"
        return [{"kind": "layer", "layer": layer.name, "competitor": "all", "note": note}]
    for routing in options.routings:
        of_routing = [row for row in rows if row.get("routing") == routing and "note" not in row]
        add_ratios(of_routing)
        add_exchange_ratios(of_routing)
    return rows


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny layer on two ranks of a CPU")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, but a number that divides the experts")
    parser.add_argument(
        "--layers", default="", metavar="TEXT", help="only layers whose name contains the text"
    )
    parser.add_argument("--competitors", nargs="+", metavar="NAME", help='such as "ours bf16" "all-gather"')
    parser.add_argument("--routings", nargs="+", choices=USED_ROUTINGS, default=list(USED_ROUTINGS))
    parser.add_argument("--no-exchanges", action="store_true", help="layers only")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, {QUICK_ROUNDS} with --quick")
    return parser, parser.parse_args()


def main() -> None:
    """Measures on all GPUs of this machine, or a tiny layer on a CPU, and writes
    ``results/expert_parallel_<device>.json``."""
    parser, arguments = parsed()
    quick, gpus = arguments.quick, torch.cuda.device_count()
    if not quick and gpus < 2:
        print(f"expert_parallel: expected two GPUs, got {gpus}. Nothing is measured; --quick takes a CPU.")
        return
    ranks = arguments.ranks or (2 if quick else 2 ** (min(gpus, 8).bit_length() - 1))
    if ranks < 2 or (not quick and ranks > gpus):
        parser.error(f"--ranks: expected from 2 to the number of GPUs, got {ranks}")
    names = tuple(arguments.competitors or [n for n in competitor_names() if not (quick and ALL_GATHER in n)])
    if not set(names) <= set(competitor_names()):
        parser.error(f"--competitors: expected some of {', '.join(competitor_names())}")
    text = arguments.layers.lower()
    layers = tuple(layer for layer in (QUICK_LAYERS if quick else LAYERS) if text in layer.name.lower())
    layers = tuple(layer for layer in layers if layer.experts % ranks == 0)
    if not layers:
        parser.error(f"--layers {arguments.layers!r}: no layer with experts for {ranks} ranks")
    rounds = arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    options = Options(names, tuple(arguments.routings), rounds, not arguments.no_exchanges)
    device = torch.device("cpu" if quick else "cuda")
    about = {
        "ranks": ranks,
        "options": {**asdict(options), "layers": arguments.layers},
        "peers": {"deep_ep": importlib.util.find_spec("deep_ep") is not None},
    }
    rows: list[Row] = []
    with RankPool(ranks, "gloo" if quick else "nccl") as pool:
        for layer in tqdm(layers, unit="layer", dynamic_ncols=True, file=sys.stderr):
            found = measured(layer, pool, options)
            tqdm.write("\n".join(line(row) for row in found))
            rows += found
            write("expert_parallel", device, rows, **about)  # what is there, if a later layer is interrupted


if __name__ == "__main__":
    main()
