"""Grouped GEMMs with SwiGLU in the epilogue (plain or quantized) compared with separate ops.

Shapes of known mixtures of experts, even groups, bfloat16, with probabilities. Results are first compared with those of
the separate ops. Device time is measured with a CUDA graph. On a CPU, where the op runs the same steps, shapes are
small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import device_times, devices, host_times, write
from transformer_plugin import ops

BF16 = torch.bfloat16
BLOCKS, MX = "fp8_block", "mxfp8"


@dataclass(frozen=True)
class Experts:
    """``rows`` in equal groups through ``[groups, 2 * features, hidden]`` and ``[groups, hidden, features]``."""

    name: str
    groups: int
    features: int
    hidden: int
    rows: int


SHAPES = (
    Experts("Qwen3-30B", 128, 768, 2048, 65536),
    Experts("DeepSeek-V3", 32, 2048, 7168, 32768),
    Experts("Mixtral", 8, 14336, 4096, 16384),
)
SMALL = (Experts("small", 4, 64, 128, 256),)

Call = Callable[[], tuple[Tensor, ...]]


def forward_steps(x: Tensor, w1: Tensor, sizes: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    h = ops.grouped_gemm(x, w1, sizes)
    return ops.activation(h, probs), h


def quantized_steps(
    x: Tensor, w1: Tensor, sizes: Tensor, format: str, probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    h = ops.grouped_gemm(x, w1, sizes)
    return *ops.activation_quantize(h, format, probs, sizes), h


def calls_of(shape: Experts, device: torch.device) -> dict[str, dict[str, Call]]:
    """Returns, by direction, the calls: the op in both column orders, and the separate ops."""
    hidden, features = shape.hidden, shape.features
    x, w1 = (
        torch.randn(size, dtype=BF16, device=device)
        for size in (
            (shape.rows, hidden),
            (shape.groups, 2 * features, hidden),
        )
    )
    probs = torch.rand(shape.rows, device=device)
    sizes = torch.full((shape.groups,), shape.rows // shape.groups, device=device)
    forward = x, w1, sizes, probs
    return {
        "forward": {
            "fused": partial(ops.grouped_gemm_activation, *forward),
            "interleaved": partial(ops.grouped_gemm_activation, *forward, activation="swiglu:interleave=32"),
            "without h": partial(ops.grouped_gemm_activation, *forward, keep_input=False),
            "steps": partial(forward_steps, *forward),
            "product": lambda: (ops.grouped_gemm(x, w1, sizes),),
        },
        **{
            f"into {format} rows": {
                "fused": partial(ops.grouped_gemm_activation_quantize, x, w1, sizes, format, probs),
                "interleaved": partial(
                    ops.grouped_gemm_activation_quantize,
                    x,
                    w1,
                    sizes,
                    format,
                    probs,
                    activation="swiglu:interleave=32",
                ),
                "without h": partial(
                    ops.grouped_gemm_activation_quantize, x, w1, sizes, format, probs, keep_input=False
                ),
                "steps": partial(quantized_steps, x, w1, sizes, format, probs),
                "product": lambda: (ops.grouped_gemm(x, w1, sizes),),
            }
            for format in (BLOCKS, MX)
        },
    }


def measure(shape: Experts, device: torch.device) -> list[dict[str, Any]]:
    """Returns a row for each direction."""
    rows = []
    for direction, calls in calls_of(shape, device).items():
        for got, expected in zip(calls["fused"](), calls["steps"](), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (
                f"{shape.name} {direction}: differs from the separate ops"
            )
        times = device_times(calls) if device.type == "cuda" else host_times(calls, device, 5, 2)
        row: dict[str, Any] = {"experts": shape.name, "direction": direction}
        row |= {f"{name}_us": time for name, time in times.items()}
        rows.append(row | {"times_as_fast": round(times["steps"].median / times["fused"].median, 3)})
    return rows


def main() -> None:
    """Measures on every device of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, nothing is written: to try the benchmark"
    )
    tiny = parser.parse_args().tiny
    for device in devices():
        shapes = SMALL if tiny or device.type == "cpu" else SHAPES
        rows = [row for shape in shapes for row in measure(shape, device)]
        for row in rows:
            medians = {key: time.median for key, time in row.items() if key.endswith("_us")}
            print(row["experts"], row["direction"], medians, row["times_as_fast"])
        if device.type == "cuda" and not tiny:
            write("grouped_swiglu", device, rows)


if __name__ == "__main__":
    main()
