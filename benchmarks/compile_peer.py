"""Compiles a case in plain PyTorch with torch.compile, as a peer: for one shape, within a time limit, bytes compared.
On a CPU the unmodified reference is compiled too.

"max-autotune" tries configurations one after the other, which takes a minute for some kernels. So on a GPU the chosen
cases are compiled in advance, several at once, in separate processes that fill Inductor's cache (``python -m
benchmarks.compile_peer`` runs one of them). Their autotuning results are discarded, because they shared the GPU: the
benchmark measures all configurations again on an idle GPU, with cached binaries.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import synchronize, time_limit
from benchmarks.peers import Tensors
from benchmarks.quantize_case import Call, Case
from benchmarks.quantize_cases import cases

ROOT = Path(__file__).resolve().parents[1]
START = 60.0  # seconds that a process may take in addition to compiling
GROUP = 0.4  # least seconds to compile one group of a reference's unrolled loop: 256 groups took 107 s
NOTE = "peer: "


def as_tuple(result: Tensor | Tensors) -> Tensors:
    """Converts the result of an op, one tensor or several, to a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def equal_bytes(got: Tensors, expected: Tensors) -> bool:
    """Whether shapes and all bytes are equal; a compiled function may return uint8 for a dtype it does not know."""
    return len(got) == len(expected) and all(
        a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(got, expected, strict=True)
    )


def compile_peer(case: Case, inputs: Tensors, limit: float) -> tuple[Call | None, str]:
    """Returns the compiled function or None, and a note. Resets dynamo, whose recompile limit counts earlier cases."""
    torch._dynamo.reset()
    if case.groups:
        return None, "not compiled: it reads the sizes on the host"
    mode = "max-autotune-no-cudagraphs" if inputs[0].is_cuda else "default"
    whole = case.compiled or case.peer or case.steps or case.reference
    begin = time.monotonic()
    try:
        with time_limit(limit):
            try:
                call, got = _compile([whole], mode, inputs)
            except Exception:
                if time.monotonic() - begin >= limit or len(as_tuple(case.op(*inputs))) <= 2:
                    raise
                torch._dynamo.reset()
                # One graph for each direction, because a compiler removes outputs that are not returned.
                halves = [lambda *x: whole(*x)[:2], lambda *x: whole(*x)[2:]]
                call, got = _compile(halves, mode, inputs)
                mode += " in 2 graphs"
    except Exception as error:  # any failure of a compiler is a result
        torch._dynamo.reset()
        return None, _refusal(error, begin, limit)
    return call, f"{mode}, {same_bytes(case, inputs, got)}"


def compile_reference(case: Case, inputs: Tensors, limit: float) -> tuple[Call | None, str]:
    """Returns the compiled reference or None, and a note. It may have several graphs. Keeps a compiled peer."""
    if case.groups * GROUP > limit:
        return None, f"not compiled: {case.groups} groups unrolled take more than {limit:g} s"
    begin = time.monotonic()
    call = torch.compile(case.reference, dynamic=False)
    try:
        # In this thread: a C++ compiler for which another thread waits would outlive the limit.
        with time_limit(limit), torch._inductor.config.patch(compile_threads=1):
            got = as_tuple(call(*inputs))
    except Exception as error:
        return None, _refusal(error, begin, limit)
    return call, f"default, {same_bytes(case, inputs, got)}"


def _refusal(error: Exception, begin: float, limit: float) -> str:
    said = str(error).strip().splitlines() or [""]
    late = time.monotonic() - begin >= limit
    reason = f"not done after {limit:g} s" if late else f"{type(error).__name__}: {said[0]}"
    return f"not compiled: {reason}"


def same_bytes(case: Case, inputs: Tensors, got: Tensors) -> str:
    """Says whether these are the op's bytes."""
    return "the same bytes" if equal_bytes(got, as_tuple(case.op(*inputs))) else "other bytes"


def _compile(parts: list[Call], mode: str, inputs: Tensors) -> tuple[Call, Tensors]:
    """Compiles for this shape alone, and calls once."""
    graphs = [torch.compile(part, dynamic=False, fullgraph=True, mode=mode) for part in parts]

    def call(*tensors: Tensor) -> Tensors:
        return tuple(itertools.chain.from_iterable(as_tuple(graph(*tensors)) for graph in graphs))

    got = call(*inputs)
    synchronize(inputs[0].device)
    return call, got


def precompile(
    chosen: list[Case], shape: tuple[int, int], device: torch.device, limit: float, jobs: int
) -> dict[str, str]:
    """Fills Inductor's cache, which this process then uses. Returns why cases cannot be compiled."""
    cache = tempfile.mkdtemp(prefix="inductor_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def note(case: Case) -> str:
        command = [
            sys.executable,
            "-m",
            "benchmarks.compile_peer",
            "--name",
            case.name,
            "--limit",
            str(limit),
        ]
        command += ["--device", device.type, "--shape", *map(str, shape)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=limit + START, cwd=ROOT, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"not compiled: not done after {limit + START:g} s"
        lines = [line for line in run.stdout.splitlines() if line.startswith(NOTE)]
        if not lines:
            raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-4000:]}")
        return lines[-1].removeprefix(NOTE)

    with ThreadPoolExecutor(jobs) as pool:
        notes = list(tqdm(pool.map(note, chosen), total=len(chosen), unit="graph", file=sys.stderr))
    for best in Path(cache).rglob("*.best_config"):
        best.unlink()
    return {
        case.name: note for case, note in zip(chosen, notes, strict=True) if note.startswith("not compiled")
    }


def main() -> None:
    """Compiles one case and prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape", type=int, nargs=2, required=True)
    parser.add_argument("--limit", type=float, required=True)
    arguments = parser.parse_args()
    (case,) = (case for case in cases() if case.name == arguments.name)
    torch.manual_seed(0)
    matrix = torch.randn(*arguments.shape, device=arguments.device, dtype=torch.bfloat16)
    print(NOTE + compile_peer(case, case.prepare(matrix), arguments.limit)[1])


if __name__ == "__main__":
    main()
