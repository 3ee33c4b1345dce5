"""Speed of the quantize ops as a fraction of a copy's, compared with torch.compile of plain PyTorch, in one run.

Quantizing is memory-bound, so the yardstick is a copy of as many bytes (the op's input once plus its outputs once; half
of the sum read, half written). Inputs and the copy's buffers rotate, so that no cache contains them. Before timing, an
op's bytes are compared with the reference's, and a fused op's with those of its separate steps, on the first rows of
the same data. A grouped op (skewed sizes on the device; "padded": multiples of 128, as modules pad groups) is also
compared with the op without groups on the same rows. On a CPU, a call that returns new tensors includes page faults,
which the copy does not. ``--compile`` names the rows for which a peer is compiled, ``--limit`` ends a compilation.

On a CPU the reference (:mod:`transformer_plugin.reference`) is measured too: eager, and with
``torch.compile(dynamic=False)`` in as many graphs as needed; a note says why if it cannot be compiled. "x ref." and
"x comp." are the op's speedup over them. "eager" is the best other eager code: the package's separate ops, or torch's
norm followed by the reference's quantization. Slow calls run less often; the row says which.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Time, device_times, devices, host_times, write
from benchmarks.compile_peer import (
    as_tuple,
    compile_peer,
    compile_reference,
    equal_bytes,
    precompile,
    same_bytes,
)
from benchmarks.peers import Tensors
from benchmarks.quantize_case import Call, Case
from benchmarks.quantize_cases import cases

SHAPES = {"cuda": (32768, 7168), "cpu": (2048, 2048)}
QUICK_ROWS = {"cuda": 4096, "cpu": 256}
CHECKED_ROWS = 4096  # rows whose bytes are compared; enough for several tiles and groups
ROTATION = 2**28  # bytes of rotating inputs: five times the L2 cache of an H200
SLOW = 0.05  # seconds: on a CPU slower calls run once in every third round
PAGE = 2**20  # the copy's size is a multiple of this; odd sizes can be a third slower


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the number of bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def verify(case: Case, matrix: Tensor) -> None:
    """Checks that the op's bytes are those of its separate steps, or of the reference."""
    slab = case.prepare(matrix[:CHECKED_ROWS])
    meaning = case.steps or case.reference
    got, expected = as_tuple(case.op(*slab)), as_tuple(meaning(*slab))
    same = equal_bytes(got, expected) and [t.dtype for t in got] == [t.dtype for t in expected]
    assert same, f"{case.name}: the op's bytes differ from those of its steps or of the reference"


def rotating(call: Call, arguments: Sequence[Tensors]) -> Call:
    """Returns a function that calls ``call`` with the next arguments each time."""
    turns = itertools.cycle(arguments)
    return lambda: call(*next(turns))


def copy_of(size: int, device: torch.device) -> Call:
    """Returns a copy that reads half of ``size`` bytes and writes the other half, in whole pages."""
    half = -(-size // 2 // PAGE) * PAGE
    pairs = [
        tuple(torch.randint(256, (half,), dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(max(2, -(-ROTATION // size)))
    ]
    return rotating(lambda source, target: target.copy_(source), pairs)


def measure(case: Case, matrices: list[Tensor], note: str, limit: float, quick: bool) -> dict[str, Any]:
    """Measures the op, the copy and the peers, alternating in one run. A ``note`` says why no peer is compiled."""
    device = matrices[0].device
    verify(case, matrices[0])
    inputs = [case.prepare(matrix) for matrix in matrices]
    data = inputs[0] if case.single is None else inputs[0][:1]  # the group sizes do not count as data
    read = bytes_of(data)
    total = read + bytes_of(as_tuple(case.op(*inputs[0])))
    calls = {"op": rotating(case.op, inputs), "copy": copy_of(total, device)}
    if case.single is not None:
        calls["single"] = rotating(case.single, inputs)
    asked, rounds = not note, 3 if quick else 9
    if asked:
        call, note = compile_peer(case, inputs[0], limit)
        if call is not None:
            calls["compiled"] = rotating(call, inputs)
    said: dict[str, Any] = {"compile_peer": note}
    if device.type == "cuda":
        times: dict[str, Time] = device_times(calls, rounds=rounds)
    else:
        added, notes = cpu_peers(case, inputs, limit if asked else None)
        calls |= added
        seldom = [name for name, call in calls.items() if seconds_of(call) > SLOW]
        times = host_times(calls, device, rounds=rounds, repeat=1 if quick else 2, seldom=seldom)
        said |= {**notes, "seldom": seldom}
    return {
        "name": case.name,
        "format": case.format.key,
        "shape": list(matrices[0].shape),
        "bytes": total,
        **said,
        **{f"{name}_us": time for name, time in times.items()},
        "gigabytes_per_second": round(total / times["op"].median / 1e3, 1),
        "fraction_of_copy": round(times["copy"].median / times["op"].median, 3),
        # of a kernel that reads the input as often as necessary and moves bytes as fast as the copy
        "fraction_in_reach": round(total / (total + (case.reads - 1) * read), 3),
        **ratios(times),
    }


def cpu_peers(
    case: Case, inputs: list[Tensors], limit: float | None
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the peers that only a CPU measures, with a note on the reference: the reference, its compiled version if
    there is a ``limit``, and other eager code."""
    notes = {"reference_eager": same_bytes(case, inputs[0], as_tuple(case.reference(*inputs[0])))}
    calls = {"reference_eager": rotating(case.reference, inputs)}
    other, note = case.peer or case.steps, "not asked for"
    if other is not None:
        calls["eager"] = rotating(other, inputs)
    if limit is not None:
        call, note = compile_reference(case, inputs[0], limit)
        if call is not None:
            calls["reference_compile"] = rotating(call, inputs)
    return calls, notes | {"reference_compile": note}


def seconds_of(call: Call) -> float:
    """Times one call on a CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratios(times: dict[str, Time]) -> dict[str, float]:
    """Returns the speed of each peer relative to the copy, and of the op relative to the others."""
    op, copy, figures = times["op"].median, times["copy"].median, {}
    for name in ("compiled", "eager"):
        if name in times:
            figures[f"{name}_fraction_of_copy"] = round(copy / times[name].median, 3)
    if "single" in times:
        figures["fraction_of_single"] = round(times["single"].median / op, 3)
    for name in ("reference_eager", "reference_compile"):
        if name in times:
            figures[f"times_{name}"] = round(times[name].median / op, 2)
    return figures


# Columns of the table: title, key in a row, format.
COLUMNS = (
    ("op", "fraction_of_copy", ".3f"),
    ("compiled", "compiled_fraction_of_copy", ".3f"),
    ("eager", "eager_fraction_of_copy", ".3f"),
    ("/ single", "fraction_of_single", ".3f"),
    ("x ref.", "times_reference_eager", ".1f"),
    ("x comp.", "times_reference_compile", ".1f"),
)


def _line(row: dict[str, Any]) -> str:
    columns = " ".join(f"{format(row[key], form) if key in row else '-':>9s}" for _, key, form in COLUMNS)
    notes = f"{row['compile_peer']:.60s}"
    if row.get("reference_compile", "").startswith("not compiled"):
        notes += f"; reference {row['reference_compile']:.80s}"
    return f"{row['op_us'].median:10.1f} {row['gigabytes_per_second']:8.1f} {columns}  {notes}"


def write_rows(device: torch.device, results: list[dict[str, Any]], update: bool, **more: Any) -> None:
    """Writes the file of a device. With ``update`` it keeps the rows that were not measured now."""
    path = RESULTS / f"quantize_{device.type}.json"
    if update and path.exists():
        rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
        rows.update((row["name"], row) for row in results)
        results = [rows[case.name] for case in cases() if case.name in rows]
    write("quantize", device, results, **more)


def run(device: torch.device, chosen: list[Case], arguments: argparse.Namespace) -> None:
    """Measures the chosen cases on one device and writes its file."""
    rows, columns = SHAPES[device.type]
    rows = arguments.rows or (QUICK_ROWS[device.type] if arguments.quick else rows)
    notes = {case.name: "not asked for" for case in chosen if not among(arguments.compile, case)}
    if device.type == "cuda":
        compiled = [case for case in chosen if case.name not in notes and not case.groups]
        notes |= precompile(compiled, (rows, columns), device, arguments.limit, arguments.jobs)
    torch.manual_seed(0)
    count = max(2, -(-ROTATION // (rows * columns * 2)))
    matrices = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    print(
        f"{device.type}: {rows} x {columns}, bfloat16; fractions of a copy's speed, of the single op's; x reference"
    )
    print(f"{'':44s} {'us':>10s} {'GB/s':>8s} {' '.join(f'{head:>9s}' for head, *_ in COLUMNS)}")
    results = []
    for case in chosen:
        print(f"{case.name:44s}", end=" ", flush=True)
        note = notes.get(case.name, "")
        results.append(measure(case, matrices, note, arguments.limit, arguments.quick))
        print(_line(results[-1]), flush=True)
    write_rows(device, results, arguments.update, options=_options(arguments))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(arguments, key) for key in ("only", "quick", "compile", "limit", "update")}


def among(patterns: list[str], case: Case) -> bool:
    """Whether one of the shell patterns matches the case's name."""
    return any(fnmatchcase(case.name, pattern) for pattern in patterns)


def main() -> None:
    """Measures on every device of this machine, or on the requested one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = {"nargs": "*", "default": ["*"], "metavar": "NAME"}
    parser.add_argument("--only", **names, help="only rows with these names; * matches any text")
    parser.add_argument("--compile", **names, help="rows for which a peer is compiled (default: all)")
    parser.add_argument("--limit", type=float, default=60, help="seconds per compilation (default: 60)")
    parser.add_argument("--jobs", type=int, default=12, help="parallel compilations for a GPU (default: 12)")
    parser.add_argument("--update", action="store_true", help="keep the other rows of the result file")
    parser.add_argument("--rows", type=int, default=0, help="rows of the input")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: to try the benchmark")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: every device of this machine")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if among(arguments.only, case)]
    if not chosen:
        parser.error(f"--only {arguments.only!r}: in none of {'; '.join(case.name for case in cases())}")
    for device in devices():
        if arguments.device in (None, device.type):
            run(device, chosen, arguments)


if __name__ == "__main__":
    main()
