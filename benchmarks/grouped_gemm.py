"""Speed of grouped products compared with torch._grouped_mm, in one run, at the sizes of known mixtures of experts.

Group sizes are "even", "skewed" (multiples of 128, as modules pad groups) or "any" (skewed without padding, every tenth
group empty). All have the same number of rows, from which rates are computed. The peer of "any" is the same op with
even groups. torch gets precomputed offsets; the ops compute them from the sizes. The peer of a weight gradient that is
added to a float32 main gradient is torch's product and a compiled addition. The peer of FP8 operands, which are
quantized before timing, is torch's bfloat16 product. Times are measured after a pause. On a GPU a sustained ratio is
added, from calls that alternate without pauses. Data is normally distributed, because the data affects the GPU's clock.

Results are compared with the float64 product of some groups before timing. Host time is measured with tiny groups. A
CPU has other shapes and another peer (grouped_gemm_cpu.py). With ``--tiny`` the shapes are tiny, on any device, and
nothing is written: use it to try the benchmark, not for results.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import grouped_gemm_cpu
from benchmarks.common import RESULTS, Time, device_times, host_times, sustained_times, synchronize, write
from benchmarks.grouped_gemm_works import (
    MODELS,
    SHAPES,
    WORKS,
    Call,
    Data,
    Shape,
    Work,
    forward,
    tiny,
    torch_forward,
)
from transformer_plugin import ops
from transformer_plugin.formats import BLOCK
from transformer_plugin.testing.numerics import assert_rounded_sum, fp8_sums, relative_error

ROUNDS = 5
REPEAT = 4
#: allowed relative error (norm) of bfloat16 results; one missing block of a sum exceeds it.
ROUNDING = 2**-8
HOST = "host time"


def verify(data: Data, work: Work, kind: str) -> None:
    """Checks that the op's result is the product rounded once, in the largest, the smallest (or an empty), the last and
    the last nonempty group, and that the peer's is near it."""
    sizes = data.sizes[kind]
    last = int(sizes.nonzero()[-1])
    groups = sorted({int(sizes.argmax()), int(sizes.argmin()), last, sizes.numel() - 1})
    results = {"transformer_plugin": _parts(data, work, work.op, kind, groups)}
    if work.same_numbers and kind != "any":
        results["torch"] = _parts(data, work, work.peer, kind, groups)
    for group in groups:
        a, b = (factor.double() for factor in work.factors(data, kind, group))
        product, magnitude = a @ b, a.abs() @ b.abs()
        for whose, parts in results.items():
            before, got = parts[group]
            name, exact = f"{work.name}, {kind} sizes, group {group}, {whose}", before + product
            error = relative_error(got, exact)
            if not error < ROUNDING:
                raise AssertionError(f"{name}: relative error {error:.2e} against the float64 product")
            if whose != "torch":
                more = fp8_sums(a, b) if work.name.startswith("FP8") else 0.0
                terms = a.shape[1] + 1
                assert_rounded_sum(got, exact, before.abs() + magnitude, terms, name, more)


def _parts(
    data: Data, work: Work, call: Call, kind: str, groups: list[int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the rows of these groups before the product was added, in float64, and the result."""
    nothing = torch.zeros((), dtype=torch.float64, device=data.x.device)
    before = {group: data.main_grad[group].double() if work.added else nothing for group in groups}
    result = call(data, kind)
    where = {group: group if result.dim() == 3 else data.rows_of(kind, group) for group in groups}
    return {group: (before[group], result[where[group]].clone()) for group in groups}


def measure(shape: Shape, data: Data, works: list[Work], rounds: int) -> list[dict[str, Any]]:
    """Measures works with the same peer, for each kind of group sizes, alternating in one run."""
    calls: dict[str, Callable[[], Any]] = {}
    for kind in shape.kinds:
        for work in works:
            verify(data, work, kind)
            calls[f"{work.name}, {kind}"] = partial(work.op, data, kind)
        if kind != "any":
            calls[f"peer, {kind}"] = partial(works[0].peer, data, kind)
    torch.cuda.empty_cache()  # graphs allocate from separate memory pools
    sustained: dict[str, Time] = {}
    if data.x.is_cuda:
        times = device_times(calls, rounds, REPEAT)
        sustained = sustained_times(calls)
    else:
        times = host_times(calls, data.x.device, rounds, repeat=1)
    return [row(shape, work, kind, times, sustained) for work in works for kind in shape.kinds]


def row(
    shape: Shape, work: Work, kind: str, times: dict[str, Time], sustained: dict[str, Time]
) -> dict[str, Any]:
    """Returns one row of the result; ``sustained`` is empty on a CPU."""
    op_name = f"{work.name}, {kind}"
    peer_name = f"{work.name}, even" if kind == "any" else f"peer, {kind}"
    op, peer = times[op_name], times[peer_name]
    operations = 2 * shape.rows * shape.n * shape.k
    return {
        "name": shape.name,
        "groups": shape.groups,
        "n": shape.n,
        "k": shape.k,
        "rows": shape.rows,
        "sizes": kind,
        "work": work.name,
        "peer": "the op, even sizes" if kind == "any" else work.peer_name,
        "op_us": op,
        "peer_us": peer,
        "op_tflops": round(operations / op.median / 1e6, 1),
        "peer_tflops": round(operations / peer.median / 1e6, 1),
        "ratio": round(peer.median / op.median, 3),
        **_sustained(sustained.get(op_name), sustained.get(peer_name)),
    }


def _sustained(op: Time | None, peer: Time | None) -> dict[str, Any]:
    if op is None or peer is None:
        return {}
    ratio = round(peer.median / op.median, 3)
    return {"sustained_op_us": op, "sustained_peer_us": peer, "sustained_ratio": ratio}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns geometric means of the ratios over the models' shapes, for each work and kind of sizes."""
    names = {shape.name for shape in MODELS}
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["name"] in names:
            alike.setdefault((row["work"], row["sizes"]), []).append(row)
    return [
        {"work": work, "sizes": kind, "shapes": len(them)}
        | {
            ratio: round(statistics.geometric_mean(row[ratio] for row in them), 3)
            for ratio in ("ratio", "sustained_ratio")
            if all(ratio in row for row in them)
        }
        for (work, kind), them in alike.items()
    ]


def host(device: torch.device) -> dict[str, Time]:
    """Returns the host time of one eager call, with groups so small that device time is negligible."""
    data = Data(Shape("tiny", 8, BLOCK, BLOCK, 128, ("even",)), device)
    both = {"op": forward, "torch": torch_forward}
    return host_times({name: partial(call, data, "even") for name, call in both.items()}, device)


def measure_shape(
    shape: Shape, works: list[Work], device: torch.device, rounds: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Measures the chosen works of one shape. Its tensors are freed afterwards."""
    data = Data(shape, device)
    results: list[dict[str, Any]] = []
    by_peer: dict[Call, list[Work]] = {}
    for work in works:
        by_peer.setdefault(work.peer, []).append(work)
    for alike in by_peer.values():
        bar.set_description(f"{shape.name}, {alike[0].name}")
        part = measure(shape, data, alike, rounds)
        for result in part:
            bar.write(_line(result))
        bar.update(len(alike))
        results += part
    return results


def _line(row: dict[str, Any]) -> str:
    def columns(name: str) -> str:
        time: Time = row[f"{name}_us"]
        return f"{time.median:9.1f} {f'{time.low:.1f} - {time.high:.1f}':>19s} {row[f'{name}_tflops']:6.1f}"

    words = f"{row['name']:15s} {row['sizes']:6s} {row['work']:34s}"
    sustained = row.get("sustained_ratio", float("nan"))
    return f"{words} {columns('op')} {columns('peer')} {row['ratio']:6.3f} {sustained:9.3f}"


def updated(
    device: torch.device, rows: list[dict[str, Any]], more: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the new content of the device's file: these rows replace those of the same names."""
    path = RESULTS / f"grouped_gemm_{device.type}.json"
    if not path.exists():
        return rows, more
    before = json.loads(path.read_text())
    by_name = {(row["name"], row["sizes"], row["work"]): row for row in (*before["rows"], *rows)}
    return list(by_name.values()), {key: before[key] for key in ("host",) if key in before} | more


def run(device: torch.device, chosen: dict[Shape, list[Work]], arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes the file unless ``--tiny``."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"options": {key: getattr(arguments, key) for key in ("only", "rounds", "update")}}
    if arguments.only.lower() in HOST:
        times = host(device)
        ratio = round(times["op"].median / times["torch"].median, 3)
        print(
            f"host: us per call, grouped_gemm {times['op'].median:.1f}, "
            f"torch._grouped_mm {times['torch'].median:.1f}: {ratio:.2f} times"
        )
        more["host"] = {f"{name}_us": asdict(time) for name, time in times.items()} | {"op_over_torch": ratio}
    heads = " ".join(f"{'us':>9s} {'middle half':>19s} {'TFLOPS':>6s}" for _ in range(2))
    print(f"{device.type}: the op, its peer (of 'any': the op with even sizes), and peer / op")
    print(f"{'':57s} {heads} {'ratio':>6s} {'sustained':>9s}", flush=True)
    rows: list[dict[str, Any]] = []
    total = sum(map(len, chosen.values()))
    with tqdm(total=total, unit="work", dynamic_ncols=True, file=sys.stderr) as bar:
        for shape, works in chosen.items():
            rows += measure_shape(shape, works, device, arguments.rounds, bar)
            gc.collect()
            torch.cuda.empty_cache()
    synchronize(device)
    ops.check_group_sizes()
    if arguments.update:
        rows, more = updated(device, rows, more)
    averages = means(rows)
    for mean in averages:
        words = f"{mean['work']:25s} {mean['sizes']:6s}"
        ratios = f"{mean['ratio']:6.3f} {mean.get('sustained_ratio', float('nan')):6.3f}"
        print(f"{words} {ratios}  geometric means over {mean['shapes']} shapes")
    if rows and not arguments.tiny:
        write("grouped_gemm", device, rows, means=averages, **more)


def main() -> None:
    """Measures on the GPU, or on the requested device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument("--only", default="", metavar="TEXT", help="only if 'SHAPE WORK' contains the text")
    rounds = f"default: {ROUNDS}, {grouped_gemm_cpu.ROUNDS} on a CPU"
    parser.add_argument("--rounds", type=int, help=rounds)
    parser.add_argument("--update", action="store_true", help="keep the other rows of the result file")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the benchmark")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not arguments.tiny:
        grouped_gemm_cpu.run(arguments.only, arguments.rounds or grouped_gemm_cpu.ROUNDS)
        return
    arguments.rounds = arguments.rounds or ROUNDS
    chosen: dict[Shape, list[Work]] = {}
    for shape in SHAPES:
        works = [
            work
            for work in WORKS
            if arguments.only.lower() in f"{shape.name} {work.name}".lower()
            and (device.type == "cuda" or not work.gpu_peer)
        ]
        if works:
            chosen[tiny(shape) if arguments.tiny else shape] = works
    if not chosen and arguments.only.lower() not in HOST:
        names = [*(shape.name for shape in SHAPES), *(work.name for work in WORKS), HOST]
        parser.error(f"--only {arguments.only!r}: in none of {'; '.join(names)}")
    run(device, chosen, arguments)


if __name__ == "__main__":
    main()
