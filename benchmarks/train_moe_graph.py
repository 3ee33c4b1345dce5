"""Training steps of examples/train_moe.py as one CUDA graph each, beside the same steps launched one kernel at a time.

Two trainers of the small model alternate in one process on one GPU, ten steps at a time, on the same data. Their losses
must have the same bits.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write

ROUNDS, BLOCK = 12, 10  # the first round includes the capture, and is not timed


def run(world: Any, name: str, config: Any) -> dict[str, Any]:
    """Trains both; returns the tokens per second of each."""
    from moe_lm.data import load_corpus
    from moe_lm.trainer import Trainer

    corpus = load_corpus(None, config.text_bytes, config.seq_len + 1)
    trainers = {graph: Trainer(config, world, corpus, cuda_graph=graph) for graph in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    losses: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for block in range(ROUNDS):
        for graph in (True, False) if block % 2 else (False, True):
            world.synchronize()
            start = time.perf_counter()
            for step in range(block * BLOCK, (block + 1) * BLOCK):
                losses[graph].append(trainers[graph].step(step))
            world.synchronize()
            seconds[graph].append((time.perf_counter() - start) / BLOCK)
    assert torch.equal(torch.stack(losses[True]), torch.stack(losses[False])), name
    medians = {graph: statistics.median(times[1:]) for graph, times in seconds.items()}
    row = {
        "name": name,
        "steps": ROUNDS * BLOCK,
        "graph_tokens_per_second": round(trainers[True].tokens_per_step / medians[True]),
        "launched_tokens_per_second": round(trainers[True].tokens_per_step / medians[False]),
        "ratio": round(medians[False] / medians[True], 3),
    }
    print(f"{name}: {row['ratio']} x as fast as a CUDA graph", flush=True)
    return row


def main() -> None:
    """Measures on a GPU and writes ``results/train_moe_graph_cuda.json``."""
    if not torch.cuda.is_available():
        print("train_moe_graph: expected a GPU, got none. Nothing is measured.")
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from moe_lm.config import Config
    from moe_lm.world import joined_world

    config = Config(ranks=1, data_parallel="none", dtype="bfloat16")
    quantized = replace(config, format="fp8_block")
    runs = {
        "bfloat16": config,
        "fp8_block": quantized,
        "fp8_block, cached weights": replace(quantized, cached_weights=True),
        "fp8_block, cached weights, compiled": replace(quantized, cached_weights=True, compile=True),
    }
    with joined_world(1) as world:
        rows = [run(world, name, each) for name, each in runs.items()]
    write("train_moe_graph", torch.device("cuda"), rows)


if __name__ == "__main__":
    main()
