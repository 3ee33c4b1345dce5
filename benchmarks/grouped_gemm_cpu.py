"""Grouped products on a CPU compared with a loop of ``torch.mm`` over the groups, in one run.

The loop has precomputed slices and writes into one output, which it allocates as the op does; with "out=" both write
into an existing output. There are few long groups, for which torch uses all threads in each product, and many short
ones. Sizes are even or skewed: skewed long groups have any number of rows, some none; skewed short groups have at most
as many rows as even ones. Sizes are the same in every call, which favors the loop: for bfloat16 oneDNN compiles a
kernel for each new group size, and in training sizes are new in every step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Time, host_times, write
from benchmarks.quantize_grouped import skewed_sizes
from transformer_plugin import ops
from transformer_plugin.testing.numerics import relative_error

CPU = torch.device("cpu")
#: allowed relative error (norm): rounding of outputs, and of FP32 sums.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 2**-18}
#: rows per group.
SHORT = 64
ROUNDS = 21


@dataclass(frozen=True)
class Shape:
    """The number of groups, the rows of each if even, and the matrix ``[n, k]`` of each."""

    groups: int
    rows: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.groups} x {self.rows} rows, {self.n} x {self.k}"

    def sizes(self, kind: str) -> Tensor:
        """int32 ``[groups]``, "even" or "skewed"."""
        if kind == "even":
            return torch.full((self.groups,), self.rows, dtype=torch.int32)
        if self.rows > SHORT:
            return skewed_sizes(self.groups * self.rows, self.groups, 1, CPU)
        portions = torch.rand(self.groups, generator=torch.Generator().manual_seed(self.groups))
        return (portions.square() * self.rows).round().to(torch.int32)


SHAPES = (
    Shape(8, 512, 1024, 1024),
    Shape(32, 64, 512, 512),
    Shape(32, 64, 1024, 1024),
    Shape(32, 16, 1024, 1024),
    Shape(128, 64, 512, 256),
    Shape(128, 16, 512, 256),
)


class Data:
    """The tensors of a shape, and the slices for the loop."""

    def __init__(self, shape: Shape, kind: str, dtype: torch.dtype) -> None:
        self.sizes = shape.sizes(kind)
        self.rows = int(self.sizes.sum())
        ends = self.sizes.cumsum(0).tolist()
        self.slices = [slice(end - size, end) for size, end in zip(self.sizes.tolist(), ends, strict=True)]
        self.x = torch.randn(self.rows, shape.k, dtype=dtype)
        self.grad = torch.randn(self.rows, shape.n, dtype=dtype)
        self.weight = torch.randn(shape.groups, shape.n, shape.k, dtype=dtype)
        self.buffer = torch.zeros_like(self.weight)
        self.loop_buffer = torch.zeros_like(self.weight)


def _loop(rows: Tensor, matrices: Tensor, data: Data) -> Tensor:
    out = rows.new_empty(data.rows, matrices.shape[2])
    for g, part in enumerate(data.slices):
        torch.mm(rows[part], matrices[g], out=out[part])
    return out


def _loop_of_weights(data: Data, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(data.weight) if out is None else out
    for g, part in enumerate(data.slices):
        torch.mm(data.grad[part].T, data.x[part], out=out[g])
    return out


def _into_buffer(data: Data) -> Tensor:
    ops.grouped_gemm_wgrad_out(data.grad, data.x, data.sizes, data.buffer, accumulate=False)
    return data.buffer


Call = Callable[[Data], Tensor]
#: (op, loop) by the name of the work.
WORKS: dict[str, tuple[Call, Call]] = {
    "forward": (
        lambda data: ops.grouped_gemm(data.x, data.weight, data.sizes),
        lambda data: _loop(data.x, data.weight.mT, data),
    ),
    "data gradient": (
        lambda data: ops.grouped_gemm(data.grad, data.weight, data.sizes, transpose_b=False),
        lambda data: _loop(data.grad, data.weight, data),
    ),
    "weight gradient": (
        lambda data: ops.grouped_gemm_wgrad(data.grad, data.x, data.sizes),
        _loop_of_weights,
    ),
    "weight gradient, out=": (
        _into_buffer,
        lambda data: _loop_of_weights(data, data.loop_buffer),
    ),
}


def verify(data: Data, work: str) -> None:
    """Checks that both results are near the float64 product."""
    double = {name: getattr(data, name).double() for name in ("x", "grad", "weight")}
    wide = object.__new__(Data)
    wide.__dict__.update(data.__dict__, **double, loop_buffer=torch.empty_like(double["weight"]))
    exact = WORKS[work][1](wide)
    for whose, call in zip(("transformer_plugin", "torch"), WORKS[work], strict=True):
        error = relative_error(call(data), exact)
        if not error < BOUNDS[data.x.dtype]:
            raise AssertionError(f"{work}, {whose}: relative error {error:.2e} against the float64 product")


def measure(
    shape: Shape, kind: str, dtype: torch.dtype, works: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Returns a row for each work; op and loop alternate."""
    data, calls = Data(shape, kind, dtype), dict[str, Callable[[], Any]]()
    for work in works:
        verify(data, work)
        for whose, call in zip(("op", "loop"), WORKS[work], strict=True):
            calls[f"{work}, {whose}"] = partial(call, data)
    times = host_times(calls, CPU, rounds, repeat=1)
    return [row(shape, data, kind, dtype, work, times) for work in works]


def row(
    shape: Shape, data: Data, kind: str, dtype: torch.dtype, work: str, times: dict[str, Time]
) -> dict[str, Any]:
    """Returns one row of the result."""
    op, loop = times[f"{work}, op"], times[f"{work}, loop"]
    operations = 2 * data.rows * shape.n * shape.k
    name = str(dtype).removeprefix("torch.")
    return {
        "name": f"{shape.name}, {name}",
        "groups": shape.groups,
        "n": shape.n,
        "k": shape.k,
        "rows": data.rows,
        "dtype": name,
        "sizes": kind,
        "work": work,
        "peer": "a loop of torch.mm",
        "op_us": op,
        "peer_us": loop,
        "op_gflops": round(operations / op.median / 1e3, 1),
        "peer_gflops": round(operations / loop.median / 1e3, 1),
        "ratio": round(loop.median / op.median, 3),
    }


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns geometric means of the ratios, for each work, dtype, and short or long groups."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for line in rows:
        length = "long" if line["rows"] > SHORT * line["groups"] else "short"
        ratios.setdefault((line["work"], f"{length}, {line['dtype']}"), []).append(line["ratio"])
    return [
        {
            "work": work,
            "sizes": sizes,
            "shapes": len(them),
            "ratio": round(statistics.geometric_mean(them), 3),
        }
        for (work, sizes), them in ratios.items()
    ]


def run(only: str, rounds: int) -> None:
    """Measures the works whose name contains the text, prints, and writes the file if all were measured."""
    works = [work for work in WORKS if only.lower() in work]
    rows: list[dict[str, Any]] = []
    cases = [(s, kind, dtype) for dtype in BOUNDS for s in SHAPES for kind in ("even", "skewed")]
    torch.manual_seed(0)
    for shape, kind, dtype in (bar := tqdm(cases, file=sys.stderr, dynamic_ncols=True)):
        for line in measure(shape, kind, dtype, works, rounds):
            rows.append(line)
            times = " ".join(f"{line[f'{whose}_us'].median:9.0f}" for whose in ("op", "peer"))
            bar.write(f"{line['name']:36s} {kind:6s} {line['work']:30s} {times} us {line['ratio']:6.3f}")
    averages = means(rows)
    for mean in averages:
        print(
            f"{mean['work']:30s} {mean['sizes']:16s} {mean['ratio']:6.3f}  mean over {mean['shapes']} shapes"
        )
    if len(works) == len(WORKS):
        write("grouped_gemm", CPU, rows, means=averages, options={"rounds": rounds})
