"""Speed of the quantize family as a fraction of a copy's, beside torch.compile of the reference, in the same run.

Quantizing is memory-bound: a copy that moves as many bytes (the op's input once and its outputs once, half of the sum
read and half written) is what it is held against. Inputs and the copy's buffers rotate, so that no cache serves them.
Before an op is timed its bytes are compared with the reference's, on the first rows of the same data. A grouped op,
its skewed sizes on the device ("padded": in multiples of 128, as modules lay groups out), also stands beside the
single op on the same rows. On a CPU the reference runs eagerly as well, and a call that returns fresh tensors pays for
their pages, which the copy does not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Time, device_times, devices, host_times, synchronize, write
from benchmarks.quantize_cases import Call, Case, Tensors, cases

SHAPES = {"cuda": (32768, 7168), "cpu": (2048, 2048)}
QUICK_ROWS = {"cuda": 4096, "cpu": 256}
CHECKED_ROWS = 4096  # of these bytes are compared; enough for several tiles and groups
ROTATION = 2**28  # bytes of inputs that calls in a row go through: five times the L2 cache of an H200
PAGE = 2**20  # of a copy: one of odd sizes can be a third slower


def as_tuple(result: Tensor | Tensors) -> Tensors:
    """What an op returned, one tensor or several."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def equal_bytes(got: Tensors, expected: Tensors) -> bool:
    """Whether dtypes, shapes and every byte agree."""
    return len(got) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(got, expected, strict=True)
    )


def verify(case: Case, matrix: Tensor) -> None:
    """The op's bytes are the reference's."""
    slab = case.prepare(matrix[:CHECKED_ROWS])
    got, expected = as_tuple(case.op(*slab)), as_tuple(case.reference(*slab))
    assert equal_bytes(got, expected), f"{case.name}: the op's bytes are not the reference's"


def rotating(call: Call, arguments: Sequence[Tensors]) -> Call:
    """``call`` on the next arguments each time."""
    turns = itertools.cycle(arguments)
    return lambda: call(*next(turns))


def copy_of(size: int, device: torch.device) -> Call:
    """Reads half of ``size`` bytes and writes the other half, in whole pages."""
    half = -(-size // 2 // PAGE) * PAGE
    pairs = [
        tuple(torch.randint(256, (half,), dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(max(2, -(-ROTATION // size)))
    ]
    return rotating(lambda source, target: target.copy_(source), pairs)


def compile_reference(case: Case, inputs: Tensors) -> tuple[Call | None, str]:
    """The compiled reference, or None, and what is to be said of it."""
    if case.single is not None and len(inputs) > 1:
        return None, "not compiled: it reads the sizes on the host"
    mode = "max-autotune-no-cudagraphs" if inputs[0].is_cuda else "default"
    try:
        call, got = _compile((case.peer or case.reference,), mode, inputs)
    except Exception as error:  # a compiler's failure is a result, whatever it raises
        said = str(error).strip().splitlines() or [""]
        failure = f"{type(error).__name__}: {said[0]}"
        if not case.steps:
            return None, f"not compiled: {failure}"
        try:
            call, got = _compile(case.steps, mode, inputs)
        except Exception:
            return None, f"not compiled, nor in steps: {failure}"
        mode += f" in {len(case.steps)} steps"
    same = equal_bytes(got, as_tuple(case.op(*inputs)))
    return call, f"{mode}, {'the same bytes' if same else 'other bytes'}"


def _compile(steps: tuple[Call, ...], mode: str, inputs: Tensors) -> tuple[Call, Tensors]:
    """Compiled for this shape alone and called once. What was compiled before would count against dynamo's limit."""
    torch._dynamo.reset()
    graphs = [torch.compile(step, dynamic=False, fullgraph=True, mode=mode) for step in steps]

    def call(*tensors: Tensor) -> Tensors:
        return tuple(itertools.chain.from_iterable(as_tuple(graph(*tensors)) for graph in graphs))

    got = call(*inputs)
    synchronize(inputs[0].device)
    return call, got


def measure(case: Case, matrices: list[Tensor], compiled: bool, quick: bool) -> dict[str, Any]:
    """The op, the copy and the peers, alternating in one run."""
    device = matrices[0].device
    verify(case, matrices[0])
    inputs = [case.prepare(matrix) for matrix in matrices]
    data = inputs[0] if case.single is None else inputs[0][:1]  # the sizes are no data
    read = bytes_of(data)
    total = read + bytes_of(as_tuple(case.op(*inputs[0])))
    calls = {"op": rotating(case.op, inputs), "copy": copy_of(total, device)}
    if case.single is not None:
        calls["single"] = rotating(case.single, inputs)
    if device.type == "cpu":
        calls["eager"] = rotating(case.peer or case.reference, inputs)
    note = "not asked for"
    if compiled:
        call, note = compile_reference(case, inputs[0])
        if call is not None:
            calls["compiled"] = rotating(call, inputs)
    rounds = 3 if quick else 9
    if device.type == "cuda":
        times: dict[str, Time] = device_times(calls, rounds=rounds)
    else:
        times = host_times(calls, device, rounds=rounds, repeat=1 if quick else 2)
    row: dict[str, Any] = {
        "name": case.name,
        "format": case.format.key,
        "shape": list(matrices[0].shape),
        "bytes": total,
        "compile_peer": note,
        **{f"{name}_us": time for name, time in times.items()},
        "gigabytes_per_second": round(total / times["op"].median / 1e3, 1),
        "fraction_of_copy": round(times["copy"].median / times["op"].median, 3),
        # of a kernel that moves bytes as fast as the copy and reads the input as often as it has to
        "fraction_in_reach": round(total / (total + (case.reads - 1) * read), 3),
    }
    for peer in ("compiled", "eager"):
        if peer in times:
            row[f"{peer}_fraction_of_copy"] = round(times["copy"].median / times[peer].median, 3)
    if "single" in times:
        row["fraction_of_single"] = round(times["single"].median / times["op"].median, 3)
    return row


def _line(row: dict[str, Any]) -> str:
    def column(key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    peers = ("compiled_fraction_of_copy", "eager_fraction_of_copy", "fraction_of_single")
    columns = " ".join(f"{column(key, '.3f'):>9s}" for key in ("fraction_of_copy", *peers))
    return f"{row['op_us'].median:10.1f} {row['gigabytes_per_second']:8.1f} {columns}  {row['compile_peer']:.60s}"


def run(device: torch.device, chosen: list[Case], arguments: argparse.Namespace) -> None:
    """Measures the chosen cases on one device and writes its file."""
    rows, columns = SHAPES[device.type]
    rows = arguments.rows or (QUICK_ROWS[device.type] if arguments.quick else rows)
    torch.manual_seed(0)
    count = max(2, -(-ROTATION // (rows * columns * 2)))
    matrices = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    print(f"{device.type}: {rows} x {columns}, bfloat16; fractions of a copy's speed, and of the single op's")
    heads = f"{'us':>10s} {'GB/s':>8s} {'op':>9s} {'compiled':>9s} {'eager':>9s} {'/ single':>9s}"
    print(f"{'':44s} {heads}")
    results = []
    for case in chosen:
        print(f"{case.name:44s}", end=" ", flush=True)
        results.append(measure(case, matrices, arguments.compile, arguments.quick))
        print(_line(results[-1]), flush=True)
    options = {"only": arguments.only, "quick": arguments.quick, "compile": arguments.compile}
    write("quantize", device, results, options=options)


def main() -> None:
    """Measures on every device here, or on the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only rows with this in their name")
    parser.add_argument("--rows", type=int, default=0, help="rows of the input")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows and rounds: to try it, not to quote it"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without that peer")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="every device here unless given")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if arguments.only in case.name]
    if not chosen:
        parser.error(f"--only {arguments.only!r} is in none of: {'; '.join(case.name for case in cases())}")
    for device in devices():
        if arguments.device in (None, device.type):
            run(device, chosen, arguments)


if __name__ == "__main__":
    main()
