"""Modules beside torch's: the host time of a call, and a training step whose weight gradients go into main_grad.

Host time: tiny tensors, forward (and backward of the grouped layer), alternating with the peer in one run. Step:
forward and backward of the experts of Qwen3-30B (128 experts, 8192 tokens with 8 experts each) in bfloat16,
``main_grad`` in float32 added to in the GEMM's epilogue, beside the same layer that writes ``.grad`` and adds it
afterwards. Gradients are compared before timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import device_times, devices, host_times, sustained_times, write
from transformer_plugin import GroupedTensor, nn
from transformer_plugin.testing.numerics import relative_error

#: What the time of ours over the peer's may be.
MUST = {
    "Linear": 1.6,
    "Linear with gradient": 1.6,
    "GroupedLinear, forward and backward": 1.0,
    "main_grad": 0.92,
}
#: Microseconds.
CONSTRUCTION_US = 12.0
GROUPS = 128


def host_pairs(device: torch.device) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Ours and the peer, by name."""
    dtype = torch.bfloat16
    x = torch.randn(16, 64, device=device, dtype=dtype)
    leaf = x.clone().requires_grad_()
    linear, theirs = (m(64, 64, device=device, dtype=dtype) for m in (nn.Linear, torch.nn.Linear))
    rows = torch.randn(GROUPS * 8, 64, device=device, dtype=dtype)
    grouped = nn.GroupedLinear(GROUPS, 64, 64, False, device=device, dtype=dtype)
    weight = grouped.weight.detach().transpose(1, 2).clone().requires_grad_()
    sizes = torch.full((GROUPS,), 8, device=device)
    offsets = sizes.cumsum(0).to(torch.int32)
    grad = torch.randn(GROUPS * 8, 64, device=device, dtype=dtype)

    def ours() -> None:
        grouped(rows, sizes).backward(grad)
        grouped.weight.grad = None

    def stock() -> None:
        torch._grouped_mm(rows, weight, offs=offsets).backward(grad)
        weight.grad = None

    def without(module: torch.nn.Module) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                module(x)

        return call

    return {
        "Linear": (without(linear), without(theirs)),
        "Linear with gradient": (lambda: linear(leaf), lambda: theirs(leaf)),
        "GroupedLinear, forward and backward": (ours, stock),
    }


def host_rows(device: torch.device) -> list[dict[str, Any]]:
    """Host time of each pair, and of making a GroupedTensor."""
    rows = []
    for name, (ours, theirs) in host_pairs(device).items():
        times = host_times({"ours": ours, "peer": theirs}, device)
        ratio = round(times["ours"].median / times["peer"].median, 3)
        rows.append(
            {
                "work": name,
                "ours_us": times["ours"],
                "peer_us": times["peer"],
                "ratio": ratio,
                "must": MUST[name],
            }
        )
    data = torch.empty(GROUPS, 64, 64, device=device)
    sizes = torch.zeros(GROUPS, dtype=torch.int64, device=device)
    times = host_times(
        {"ours": lambda: GroupedTensor(data), "ragged": lambda: GroupedTensor(data[0], sizes)}, device
    )
    rows.append({"work": "GroupedTensor of a buffer", "ours_us": times["ours"], "must_us": CONSTRUCTION_US})
    rows.append({"work": "ragged GroupedTensor", "ours_us": times["ragged"], "must_us": CONSTRUCTION_US})
    return rows


def main_grad_row(device: torch.device) -> dict[str, Any]:
    """A step of the experts with the gradient added in the epilogue, and in a second pass."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    fused = nn.GroupedMLP(GROUPS, 2048, 768, fuse_wgrad_accumulation=True, **options)
    plain = nn.GroupedMLP(GROUPS, 2048, 768, **options)
    plain.load_state_dict(fused.state_dict())
    weights = [(layer.fc1.weight, layer.fc2.weight) for layer in (fused, plain)]
    for pair in weights:
        for weight in pair:
            weight.main_grad = torch.zeros(weight.shape, device=device)
    x = torch.randn(65536, 2048, **options).requires_grad_()
    sizes = torch.full((GROUPS,), 512, device=device)
    probs, grad = torch.rand(65536, device=device), torch.randn(65536, 2048, **options)

    def step(layer: nn.GroupedMLP, pair: tuple[Tensor, ...]) -> None:
        x.grad = None
        layer(x, sizes, probs).backward(grad)
        for weight in pair:
            if weight.grad is not None:
                weight.main_grad.add_(weight.grad)
                weight.grad = None

    calls = {"fused": lambda: step(fused, weights[0]), "added": lambda: step(plain, weights[1])}
    for call in calls.values():
        call()
    for a, b in zip(*weights, strict=True):
        assert relative_error(a.main_grad, b.main_grad.double()) < 2**-8
    rested, sustained = device_times(calls, repeat=1), sustained_times(calls)
    ratio = round(sustained["fused"].median / sustained["added"].median, 3)
    times = {f"{name}_us": value for name, value in rested.items()}
    more = {f"{name}_sustained_us": value for name, value in sustained.items()}
    return {"work": "main_grad", **times, **more, "ratio": ratio, "must": MUST["main_grad"]}


def main() -> None:
    """Measures on every device of this machine and writes one file for each."""
    torch.set_num_threads(1)
    for device in devices():
        rows = host_rows(device)
        if device.type == "cuda":
            rows.append(main_grad_row(device))
        for row in rows:
            times = ", ".join(
                f"{k[:-3]} {v.median:.1f} us" for k, v in row.items() if k.endswith("_us") and k != "must_us"
            )
            print(f"{device.type}: {row['work']}: {times}, ratio {row.get('ratio', '-')}", flush=True)
        write("modules", device, rows)


if __name__ == "__main__":
    main()
