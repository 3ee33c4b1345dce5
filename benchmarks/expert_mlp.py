"""The experts of a mixture (fc1, SwiGLU times probability, fc2), forward and backward, compared with stock PyTorch.

``GroupedMLP`` runs in bfloat16 and with ``Float8BlockScaling``. The latter quantizes weights in every call, or uses
cached quantized weights (``quantize_weights()``, as for the micro-batches of a step). The peer is ``torch._grouped_mm``
with precomputed offsets and a compiled SwiGLU. All use even groups and one set of weights, and compute the gradients of
the input, the probabilities and both weights, in bfloat16. Memory is the peak of one step alone, including weights,
cached quantized weights and gradients. Times are measured after a pause, with as many steps as the GPU runs before it
lowers its clock; sustained times are measured with steps that alternate without pauses. Outputs and gradients are
compared before timing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import device_times, sustained_times, synchronize, write
from transformer_plugin import nn
from transformer_plugin.formats import Format
from transformer_plugin.recipes import Float8BlockScaling, Recipe
from transformer_plugin.testing.numerics import relative_error

ROUNDS = 5
#: microseconds of work that the GPU does after a pause before it lowers its clock, which took 30 to 40 ms.
RESTED_US = 30e3
MOST_REPEATS = 8
CACHED_WEIGHTS = "fp8_block, weights quantized in advance"
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8_block": Float8BlockScaling(),
    CACHED_WEIGHTS: Float8BlockScaling(),
}
#: relative error (norm) that is allowed for a bfloat16 result after several roundings.
BF16_BOUND = 2**-6


@dataclass(frozen=True)
class Workload:
    """``rows`` of ``hidden`` columns for ``groups`` experts with ``ffn_hidden`` columns between the products."""

    name: str
    groups: int
    hidden: int
    ffn_hidden: int
    rows: int


WORKLOADS = (
    Workload("Qwen3-30B", 128, 2048, 768, 65536),
    Workload("DeepSeek-V3 slice", 32, 7168, 2048, 32768),
    Workload("Mixtral", 8, 4096, 14336, 16384),
)


def _swiglu(x: Tensor, probs: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * probs.unsqueeze(-1)).to(x.dtype)


class Data:
    """Inputs and weights of a workload, and its training steps."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        def leaf(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (torch.randn(size, device=device) * scale).to(dtype).requires_grad_()

        hidden, ffn = work.hidden, work.ffn_hidden
        self.input, self.probs = leaf(work.rows, hidden), leaf(work.rows, dtype=torch.float32)
        self.fc1 = leaf(work.groups, 2 * ffn, hidden, scale=hidden**-0.5)
        self.fc2 = leaf(work.groups, hidden, ffn, scale=ffn**-0.5)
        self.grad = torch.randn(work.rows, hidden, device=device, dtype=torch.bfloat16)
        self.sizes = torch.full((work.groups,), work.rows // work.groups, dtype=torch.int32, device=device)
        self.ends = self.sizes.cumsum(0, dtype=torch.int32)
        torch._dynamo.reset()  # dynamo's recompile limit counts earlier shapes
        self.swiglu = torch.compile(_swiglu, dynamic=False, fullgraph=True)
        self.modules = {name: self._module(work, recipe, device) for name, recipe in RECIPES.items()}

    def _module(self, work: Workload, recipe: Recipe | None, device: torch.device) -> nn.GroupedMLP:
        sizes = (work.groups, work.hidden, work.ffn_hidden)
        module = nn.GroupedMLP(*sizes, device="meta", dtype=torch.bfloat16, recipe=recipe)
        module.fc1.weight = torch.nn.Parameter(self.fc1.detach())
        module.fc2.weight = torch.nn.Parameter(self.fc2.detach())
        return module

    def cache_weights(self, name: str) -> None:
        """Caches quantized weights if the step of this name uses them."""
        if name == CACHED_WEIGHTS:
            self.modules[name].quantize_weights()

    def drop_cached_weights(self) -> None:
        """Frees cached quantized weights, so that they do not count in the memory of other steps."""
        self.modules[CACHED_WEIGHTS].forget_quantized_weights()

    def leaves(self, name: str) -> list[Tensor]:
        """Returns the tensors whose gradients are computed."""
        if name == "torch":
            return [self.input, self.probs, self.fc1, self.fc2]
        module = self.modules[name]
        return [self.input, self.probs, module.fc1.weight, module.fc2.weight]

    def step(self, name: str) -> tuple[Tensor, ...]:
        """Returns the output, and the gradients of the leaves."""
        if name == "torch":
            middle = torch._grouped_mm(self.input, self.fc1.mT, offs=self.ends)
            output = torch._grouped_mm(self.swiglu(middle, self.probs), self.fc2.mT, offs=self.ends)
        else:
            output = self.modules[name](self.input, self.sizes, self.probs)
        return output.detach(), *torch.autograd.grad(output, self.leaves(name), self.grad)


def verify(data: Data, name: str) -> None:
    """Checks that outputs and gradients equal the peer's, except for the format's rounding."""
    recipe = RECIPES[name]
    data.cache_weights(name)
    bound = BF16_BOUND if recipe is None else 3 * Format.parse(recipe.input_format).gemm_tolerance
    names = ("output", "gradient of input", "of probs", "of fc1", "of fc2")
    for what, got, wanted in zip(names, data.step(name), data.step("torch"), strict=True):
        error = relative_error(got, wanted.double())
        if not error < bound:
            raise AssertionError(f"{name}, {what}: relative error {error:.2e} against stock PyTorch")
    data.drop_cached_weights()


def peaks(data: Data, calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, int]:
    """Returns the peak memory of each call in bytes; only the call's own quantized weights are cached."""
    memory = {}
    for name, call in calls.items():
        data.cache_weights(name)
        memory[name] = peak(call, device)
        data.drop_cached_weights()
    return memory


def peak(call: Callable[[], Any], device: torch.device) -> int:
    """Returns the peak memory of a call in bytes, including what was allocated before."""
    call()
    synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def repeats(calls: dict[str, Callable[[], Any]]) -> int:
    """Returns how many steps to run after a pause, so that the slowest does not exceed the time at a full clock."""
    slowest = max(time.median for time in device_times(calls, rounds=2, repeat=1).values())
    return max(1, min(MOST_REPEATS, int(RESTED_US / slowest)))


def measure(work: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each recipe."""
    data = Data(work, device)
    for name in RECIPES:
        verify(data, name)
    calls = {name: partial(data.step, name) for name in ("torch", *RECIPES)}
    memory = peaks(data, calls, device)
    data.cache_weights(CACHED_WEIGHTS)
    repeat = repeats(calls)
    times, sustained = device_times(calls, rounds, repeat), sustained_times(calls)
    return [
        {
            "name": work.name,
            "groups": work.groups,
            "hidden": work.hidden,
            "ffn_hidden": work.ffn_hidden,
            "rows": work.rows,
            "recipe": name,
            "steps_after_a_rest": repeat,
            "op_us": times[name],
            "peer_us": times["torch"],
            "of_the_time": round(times[name].median / times["torch"].median, 3),
            "sustained_op_us": sustained[name],
            "sustained_peer_us": sustained["torch"],
            "sustained_of_the_time": round(sustained[name].median / sustained["torch"].median, 3),
            "op_peak_bytes": memory[name],
            "peer_peak_bytes": memory["torch"],
            "of_the_memory": round(memory[name] / memory["torch"], 3),
        }
        for name in RECIPES
    ]


def main() -> None:
    """Measures on the GPU. On a CPU it checks a tiny workload and times nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only workloads whose name contains the text"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    if device.type == "cpu":
        data = Data(Workload("tiny", 4, 256, 128, 512), device)
        for name in RECIPES:
            verify(data, name)
        print("checked on a CPU; only a GPU is timed")
        return
    chosen = [work for work in WORKLOADS if arguments.only.lower() in work.name.lower()]
    if not chosen:
        parser.error(f"--only {arguments.only!r}: in none of {'; '.join(work.name for work in WORKLOADS)}")
    rows: list[dict[str, Any]] = []
    print(
        f"{'':18s} {'recipe':40s} {'ms':>8s} {'peer ms':>8s} {'of it':>6s}",
        f"{'sustained':>9s} {'peer':>8s} {'of it':>6s}",
        f"{'GiB':>6s} {'peer GiB':>8s} {'of it':>6s}",
    )
    with tqdm(total=len(chosen), unit="workload", dynamic_ncols=True, file=sys.stderr) as bar:
        for work in chosen:
            bar.set_description(work.name)
            for row in measure(work, device, arguments.rounds):
                rows.append(row)
                times = f"{row['op_us'].median / 1e3:8.2f} {row['peer_us'].median / 1e3:8.2f} {row['of_the_time']:6.3f}"
                sustained = (row["sustained_op_us"].median / 1e3, row["sustained_peer_us"].median / 1e3)
                times += f" {sustained[0]:9.2f} {sustained[1]:8.2f} {row['sustained_of_the_time']:6.3f}"
                bytes_ = (row["op_peak_bytes"] / 2**30, row["peer_peak_bytes"] / 2**30, row["of_the_memory"])
                memory = f"{bytes_[0]:6.2f} {bytes_[1]:8.2f} {bytes_[2]:6.3f}"
                bar.write(f"{row['name']:18s} {row['recipe']:40s} {times} {memory}")
            bar.update()
            gc.collect()
            torch.cuda.empty_cache()
    write("expert_mlp", device, rows, options={"only": arguments.only, "rounds": arguments.rounds})


if __name__ == "__main__":
    main()
