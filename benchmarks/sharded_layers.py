"""Layers whose weights are sharded over ranks, forward and backward, compared with FSDP2 around the same layers.

Each rank has other tokens. Competitors: the full weights on every rank without any exchange, which bounds what is
possible; FSDP2, which gathers the weights of a layer in bfloat16 and reduces gradients in bfloat16; and
``parallel.shard_`` in bfloat16 and in FP8 with blocks. FP8 quantizes its weights again in each step. Outputs and
gradients are first compared with those of the full weights. Competitors alternate in one run. Needs two GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common import rested_times, write
from benchmarks.exposed import exposed, kernels_of, spans_of
from transformer_plugin import functional, ops, recipes
from transformer_plugin import nn as tnn
from transformer_plugin.parallel import WeightShard, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool

DENSE = {"layers": 8, "hidden": 8192, "ffn": 28672, "tokens": 4096}
EXPERTS = {"layers": 4, "hidden": 2048, "ffn": 768, "experts": 128, "topk": 8, "tokens": 32768}
SMALL = {"layers": 2, "hidden": 256, "ffn": 512, "experts": 8, "topk": 2, "tokens": 256}
#: Of a gradient, relative to its largest element: each rank rounds its own to bfloat16, then the mean.
BOUND = 2**-7


class Dense(torch.nn.Module):
    """A norm, two products with SwiGLU between them, and the input added."""

    def __init__(self, sizes: dict[str, int], recipe: Any) -> None:
        super().__init__()
        hidden, ffn = sizes["hidden"], sizes["ffn"]
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16, "recipe": recipe}
        self.up = tnn.LayerNormLinear(hidden, 2 * ffn, normalization="RMSNorm", **options)
        self.down = tnn.Linear(ffn, hidden, **options)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.down(functional.activation(self.up(input)))


class Experts(torch.nn.Module):
    """A layer of experts, and the input added."""

    def __init__(self, sizes: dict[str, int], recipe: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "recipe": recipe}
        self.moe = tnn.MoE(sizes["hidden"], sizes["ffn"], sizes["experts"], sizes["topk"], **options)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.moe(input)[0]


def model_of(kind: str, sizes: dict[str, int], recipe: Any) -> torch.nn.Sequential:
    """The same values on every rank."""
    torch.manual_seed(0)
    layer = Dense if kind == "dense" else Experts
    return torch.nn.Sequential(*[layer(sizes, recipe) for _ in range(sizes["layers"])])


def competitors(kind: str, sizes: dict[str, int], rank: Rank) -> dict[str, torch.nn.Module]:
    """The models by name."""
    block = recipes.Float8BlockScaling()
    full, sharded, in_fp8, by_fsdp = (model_of(kind, sizes, r) for r in (None, None, block, None))
    shard_(sharded, rank.group)
    shard_(in_fp8, rank.group)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in by_fsdp:
        fully_shard(layer, mp_policy=policy)
    fully_shard(by_fsdp, mp_policy=policy)
    return {"whole bf16": full, "fsdp2 bf16": by_fsdp, "sharded bf16": sharded, "sharded fp8_block": in_fp8}


def step_of(model: torch.nn.Module, input: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """A forward and backward with fresh gradients."""
    quantized = [m for m in model.modules() if getattr(m, "gathers_quantized", False)]

    def step() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        for layer in quantized:
            layer.quantize_weights()
        output: Tensor = model(input)
        output.backward(grad)
        return output

    return step


def check(
    kind: str, sizes: dict[str, int], models: dict[str, torch.nn.Module], data: Any
) -> dict[str, float]:
    """Compares outputs bit for bit with those of full weights, and gradients with the mean of the ranks'."""
    errors: dict[str, float] = {}
    for name, recipe in (("sharded bf16", None), ("sharded fp8_block", recipes.Float8BlockScaling())):
        full = models["whole bf16"] if recipe is None else model_of(kind, sizes, recipe)
        assert torch.equal(step_of(models[name], *data)(), step_of(full, *data)()), name
        worst = 0.0
        for (key, parameter), other in zip(models[name].named_parameters(), full.parameters(), strict=True):
            shard = shard_of_parameter(parameter)
            if shard is None:
                continue
            assert other.grad is not None and parameter.grad is not None
            mean = other.grad.float()
            dist.all_reduce(mean)
            want = shard.local_shard_of(mean / shard.shard.ranks)
            worst = max(worst, float((parameter.grad.float() - want).norm() / want.norm()))
            assert worst < BOUND, (name, key, worst)
        errors[name] = worst
        for parameter in (*models[name].parameters(), *full.parameters()):
            parameter.grad = None
    return errors


def host_times(rank: Rank, calls: int = 60) -> dict[str, float]:
    """Microseconds of the host for a use of a weight that was gathered early, which begins the gather of the next, and
    for an all-gather of NCCL through torch."""
    weights = [torch.randn(256, 1024, device=rank.device) for _ in range(3)]
    full = torch.empty(256 * rank.size, 1024, device=rank.device)
    shard = str(WeightShard(rows=256 * rank.size, ranks=rank.size, group_name=rank.group_name, param_group=1))
    times = {}
    for name, call in {
        "host_us_of_a_use": lambda i: ops.gather_weight(weights[i], None, None, "none", False, False, shard),
        "host_us_of_nccl": lambda i: dist.all_gather_into_tensor(full, weights[i]),
    }.items():
        samples = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(calls):
                call(i % 3)
            samples.append((time.perf_counter() - begin) / calls * 1e6)
        times[name] = round(sorted(samples)[len(samples) // 2], 1)
    torch.cuda.synchronize()
    ops.clear_gathers(rank.group_name)
    return times


def weight_bytes(model: torch.nn.Module) -> int:
    """Of this rank's parameters and of their quantized copies."""
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    copies = [m.quantized_weight for m in model.modules() if getattr(m, "gathers_quantized", False)]
    return sum(t.nbytes for t in local) + sum(t.nbytes for copy in copies for t in copy.tensors)


def formula_gib(kind: str, sizes: dict[str, int], rank: Rank, saved: float) -> float:
    """What a step in bfloat16 may take besides weights: what the backward of full weights keeps (``saved``), the
    gradients of this rank's shards, two gathered weights, two gradients of full weights and their two sums.

    A weight is what is used together: of a dense layer one matrix, of experts those of both products.
    """
    matrix = sizes["hidden"] * sizes["ffn"] * 2 / 2**30
    largest = 2 * matrix if kind == "dense" else 3 * matrix * sizes["experts"]
    all_weights = sizes["layers"] * 3 * matrix * sizes.get("experts", 1)
    return saved + all_weights / rank.size + largest * (2 + 2 + 2 / rank.size)


def measure(rank: Rank, kind: str, sizes: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """One row for each competitor."""
    torch.manual_seed(100 + rank.rank)
    input = torch.randn(sizes["tokens"], sizes["hidden"], device=rank.device).bfloat16().requires_grad_()
    grad = torch.randn_like(input)
    models = competitors(kind, sizes, rank)
    steps = {name: step_of(model, input, grad) for name, model in models.items()}
    errors = check(kind, sizes, models, (input, grad))
    torch.cuda.empty_cache()
    uses = host_times(rank)
    peaks, hosts, saved = {}, {}, 0.0
    for name, step in steps.items():
        step()
        for parameter in models[name].parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        if name == "whole bf16":  # a forward alone would leave others with a weight that was gathered early
            output = models[name](input)
            saved = (torch.cuda.memory_allocated() - held) / 2**30
            del output
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        hosts[name] = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
    times = rested_times(steps, 1, rounds, ready=dist.barrier)
    traces = {name: kernels_of(step) for name, step in steps.items()}
    held = {name: weight_bytes(model) for name, model in models.items()}
    peer, formula = times["fsdp2 bf16"].median, formula_gib(kind, sizes, rank, saved)
    return [
        {
            "model": kind,
            **sizes,
            "ranks": rank.size,
            "competitor": name,
            "step_us": value,
            "of_fsdp2": round(value.median / peer, 3),
            "of_whole": round(value.median / times["whole bf16"].median, 3),
            "peak_gib_above_weights": round(peaks[name], 3),
            "saved_gib_of_whole": round(saved, 3),
            "peak_of_formula": round(peaks[name] / formula, 3),
            "host_ms": round(hosts[name], 2),
            **uses,
            "weights_gib": round(held[name] / 2**30, 3),
            "trace": exposed(traces[name]),
            "spans": spans_of(traces[name]) if kind == "dense" else [],
            "relative_error_of_gradients": errors.get(name),
        }
        for name, value in times.items()
    ]


def main() -> None:
    """Measures on all GPUs of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="dense, experts; default: both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--small", action="store_true", help="small layers, to try it out; nothing is written"
    )
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        print("two GPUs or more are needed")
        return
    rows = []
    with RankPool(ranks, "nccl") as pool:
        for kind in arguments.kinds or ("dense", "experts"):
            sizes = SMALL if arguments.small else (DENSE if kind == "dense" else EXPERTS)
            rows += pool.run(measure, kind, sizes, arguments.rounds, timeout=400.0)[0]
    for row in rows:
        print({key: value for key, value in row.items() if key != "spans"})
    if arguments.small:
        return
    spans = [
        {"competitor": row["competitor"], "spans": row.pop("spans")}
        for row in rows
        if row["model"] == "dense" and row["competitor"].startswith("sharded")
    ]
    write("sharded_trace", torch.device("cuda"), spans)
    write(
        "sharded_layers",
        torch.device("cuda"),
        [{k: v for k, v in row.items() if k != "spans"} for row in rows],
    )


if __name__ == "__main__":
    main()
