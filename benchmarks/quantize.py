"""Speed of the quantize family as a fraction of a copy's, beside torch.compile of plain PyTorch, in the same run.

Quantizing is memory-bound: a copy that moves as many bytes (the op's input once and its outputs once, half of the sum
read and half written) is what it is held against. Inputs and the copy's buffers rotate, so that no cache serves them.
Before an op is timed its bytes are compared with the reference's, a fused op's with those of its steps, on the first
rows of the same data. A grouped op, its skewed sizes on the device ("padded": in multiples of 128, as modules lay
groups out), also stands beside the single op on the same rows. A call that returns fresh tensors pays for their pages
on a CPU, which the copy does not. ``--compile`` names the rows beside which something is compiled, ``--limit`` ends a
compilation.

On a CPU the reference stands beside the op as well, as :mod:`transformer_plugin.reference` has it: run eagerly, and by
``torch.compile(dynamic=False)`` in as many graphs as that makes of it, or why it made none. "x ref." and "x comp." are
how many times as fast the op is. "eager" is what else there is to run eagerly: the package's own ops in turn, or
torch's norm before the reference's quantizing. What is slow is called less often; a row says what was.
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
    compile_beforehand,
    compile_peer,
    compile_reference,
    equal_bytes,
    same_bytes,
)
from benchmarks.peers import Tensors
from benchmarks.quantize_case import Call, Case
from benchmarks.quantize_cases import cases

SHAPES = {"cuda": (32768, 7168), "cpu": (2048, 2048)}
QUICK_ROWS = {"cuda": 4096, "cpu": 256}
CHECKED_ROWS = 4096  # of these bytes are compared; enough for several tiles and groups
ROTATION = 2**28  # bytes of inputs that calls in a row go through: five times the L2 cache of an H200
SLOW = 0.05  # seconds: what takes longer on a CPU is called once in every third round
PAGE = 2**20  # of a copy: one of odd sizes can be a third slower


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def verify(case: Case, matrix: Tensor) -> None:
    """The op's bytes are those of its steps, or the reference's."""
    slab = case.prepare(matrix[:CHECKED_ROWS])
    meaning = case.steps or case.reference
    got, expected = as_tuple(case.op(*slab)), as_tuple(meaning(*slab))
    same = equal_bytes(got, expected) and [t.dtype for t in got] == [t.dtype for t in expected]
    assert same, f"{case.name}: the op's bytes are not those that it stands for"


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


def measure(case: Case, matrices: list[Tensor], note: str, limit: float, quick: bool) -> dict[str, Any]:
    """The op, the copy and the peers, alternating in one run; a ``note`` says why none is compiled."""
    device = matrices[0].device
    verify(case, matrices[0])
    inputs = [case.prepare(matrix) for matrix in matrices]
    data = inputs[0] if case.single is None else inputs[0][:1]  # the sizes are no data
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
        # of a kernel that moves bytes as fast as the copy and reads the input as often as it has to
        "fraction_in_reach": round(total / (total + (case.reads - 1) * read), 3),
        **ratios(times),
    }


def cpu_peers(
    case: Case, inputs: list[Tensors], limit: float | None
) -> tuple[dict[str, Call], dict[str, str]]:
    """What only a CPU compares: the reference, compiled if there is a ``limit``, what else is eager, and what is to
    be said of the reference."""
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
    """Of one call on a CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratios(times: dict[str, Time]) -> dict[str, float]:
    """How fast the peers are beside the copy, and the op beside the rest."""
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


# Of the table: what it is called, the key in a row, and how it is written.
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
    """Writes the file of a device; with ``update`` the rows in it that were not measured now stay."""
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
        notes |= compile_beforehand(compiled, (rows, columns), device, arguments.limit, arguments.jobs)
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
    """Whether one of the shell patterns is the case's name."""
    return any(fnmatchcase(case.name, pattern) for pattern in patterns)


def main() -> None:
    """Measures on every device here, or on the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = {"nargs": "*", "default": ["*"], "metavar": "NAME"}
    parser.add_argument("--only", **names, help="only rows of these names, which may hold *")
    parser.add_argument(
        "--compile", **names, help="rows beside which something is compiled, all unless given"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds of one compilation, 60")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile for a GPU at once, 12")
    parser.add_argument("--update", action="store_true", help="keep the other rows of the result file")
    parser.add_argument("--rows", type=int, default=0, help="rows of the input")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows and rounds: to try it, not to quote it"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="every device here unless given")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if among(arguments.only, case)]
    if not chosen:
        parser.error(f"--only {arguments.only!r}: in none of {'; '.join(case.name for case in cases())}")
    for device in devices():
        if arguments.device in (None, device.type):
            run(device, chosen, arguments)


if __name__ == "__main__":
    main()
