"""Host time of one op call, without and with its gradient, beside torch.mul and the torch call that the op replaces.

Tensors are tiny, so that what is measured is the way from the Python call to the kernel's launch. "With gradient" is
the forward of an input that requires one: it records the graph. Goal: a small op, one that runs one kernel, with its
gradient within 2.5 times torch.mul with its own, in the same run. permute and grouped_linear run several: they count
beside what they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import Time, devices, host_times, write
from transformer_plugin import ops, reference

GOAL = 2.5


@dataclass(frozen=True)
class Pair:
    """An op's call and the torch call that it replaces, each a function of the leading tensor."""

    op: str
    torch_name: str
    call: Callable[[Tensor], Any]
    torch_call: Callable[[Tensor], Any]
    input: Tensor
    differentiable: bool = True


def _activation_and_quantize(device: torch.device) -> Iterator[Pair]:
    gate_and_linear = torch.randn(4, 32, device=device)
    probs = torch.rand(4, device=device)

    def torch_swiglu(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return functional.silu(gate) * linear * probs[:, None]

    yield Pair(
        "swiglu", "chunk, silu, mul, mul", lambda x: ops.swiglu(x, probs), torch_swiglu, gate_and_linear
    )

    weight = torch.ones(32, device=device)
    yield Pair(
        "rms_norm",
        "rms_norm",
        lambda x: ops.rms_norm(x, weight, 1e-5),
        lambda x: functional.rms_norm(x, (32,), weight, 1e-5),
        gate_and_linear,
    )

    one = torch.ones((), device=device)

    def torch_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.where(x.abs().amax() > 0, 448.0 / x.abs().amax(), one)
        return (x * scale).to(torch.float8_e4m3fn), 1 / scale

    rows = torch.randn(4, 128, device=device)
    for key in ("fp8_tensor:e4m3", "fp8_block:e4m3,pow2"):

        def quantize(x: Tensor, key: str = key) -> tuple[Tensor, ...]:
            return ops.quantize(x, key)

        yield Pair(
            f"quantize {key}", "amax, where, mul, to", quantize, torch_quantize, rows, differentiable=False
        )


def _gemm(device: torch.device) -> Iterator[Pair]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(16, 16, device=device, dtype=dtype)
    weight = torch.randn(16, 16, device=device, dtype=dtype)
    weights = torch.randn(2, 16, 16, device=device, dtype=dtype)
    sizes = torch.tensor([8, 8], device=device, dtype=torch.int32)
    ends = sizes.cumsum(0).to(torch.int32)

    def torch_grouped(a: Tensor) -> Tensor:
        if a.dtype == torch.bfloat16:
            return functional.grouped_mm(a, weights.transpose(1, 2), offs=ends)
        return torch.cat(
            [functional.linear(part, w) for part, w in zip(a.split([8, 8]), weights, strict=True)]
        )

    yield Pair(
        "gemm",
        "mm",
        lambda a: ops.gemm(a, weight),
        lambda a: torch.mm(a, weight.t()),
        x,
        differentiable=False,
    )
    grouped = "grouped_mm" if dtype == torch.bfloat16 else "split, linear, cat"
    yield Pair("linear", "linear", lambda a: ops.linear(a, weight), lambda a: functional.linear(a, weight), x)
    yield Pair("grouped_linear", grouped, lambda a: ops.grouped_linear(a, weights, sizes), torch_grouped, x)


def _routing(device: torch.device) -> Iterator[Pair]:
    tokens = torch.randn(8, 16, device=device)
    indices = torch.arange(16, device=device, dtype=torch.int32).reshape(8, 2) % 4
    experts = torch.arange(4, device=device, dtype=torch.int32)
    rows, _, slot, source, _ = reference.permute(tokens, indices, 4, 16)
    weights = torch.rand(8, 2, device=device)
    back = slot.long()

    def torch_permute(x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        return x.index_select(0, order // 2), (chosen[:, None] == experts).sum(0)

    def torch_unpermute(x: Tensor) -> Tensor:
        return (x[back] * weights[..., None]).sum(1)

    yield Pair(
        "permute",
        "argsort, div, index_select, eq, sum",
        lambda x: ops.permute(x, indices, 4, 16),
        torch_permute,
        tokens,
    )
    yield Pair(
        "unpermute",
        "index, mul, sum",
        lambda x: ops.unpermute(x, slot, source, weights),
        torch_unpermute,
        rows,
    )


def pairs(device: torch.device) -> Iterator[Pair]:
    """Every small op with what it replaces."""
    yield from _activation_and_quantize(device)
    yield from _gemm(device)
    yield from _routing(device)


def measure(pair: Pair) -> dict[str, Any]:
    """torch.mul, the op and the torch call, alternating in one run, each without and with a gradient."""
    leaf = pair.input.detach().clone().requires_grad_(pair.differentiable)
    calls: dict[str, Callable[[], Any]] = {}
    for name, call in (("mul", lambda x: torch.mul(x, x)), ("op", pair.call), ("torch", pair.torch_call)):
        calls[name] = lambda call=call: call(pair.input)
        if pair.differentiable or name == "mul":
            tensor = leaf if pair.differentiable else pair.input.detach().clone().requires_grad_()
            calls[f"{name}_grad"] = lambda call=call, tensor=tensor: call(tensor)
    times: dict[str, Time] = host_times(calls, pair.input.device)
    row: dict[str, Any] = {
        "op": pair.op,
        "torch": pair.torch_name,
        **{f"{k}_us": v for k, v in times.items()},
    }
    row["op_over_mul"] = round(times["op"].median / times["mul"].median, 3)
    row["op_over_torch"] = round(times["op"].median / times["torch"].median, 3)
    if pair.differentiable:
        row["op_over_mul_grad"] = round(times["op_grad"].median / times["mul_grad"].median, 3)
        row["op_over_torch_grad"] = round(times["op_grad"].median / times["torch_grad"].median, 3)
    return row


def _line(row: dict[str, Any]) -> str:
    def us(name: str) -> str:
        return f"{row[name].median:8.2f}" if name in row else "       -"

    columns = " ".join(
        us(f"{name}_us") for name in ("mul", "mul_grad", "op", "op_grad", "torch", "torch_grad")
    )
    ratio = row.get("op_over_mul_grad", row["op_over_mul"])
    return f"{row['op']:30s} {columns} {ratio:8.2f}  {row['torch']}"


def main() -> None:
    """Measures on every device here and writes one file for each."""
    torch.set_num_threads(1)  # tiny tensors: a second thread would only be waited for
    for device in devices():
        print(
            f"{device.type}: us per call\n{'':30s}      mul    +grad       op    +grad    torch    +grad   op/mul"
        )
        rows = []
        for pair in pairs(device):
            rows.append(measure(pair))
            print(_line(rows[-1]), flush=True)
        write("host_time", device, rows, goal_op_over_mul_grad=GOAL)


if __name__ == "__main__":
    main()
