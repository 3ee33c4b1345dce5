"""One launch for the amaxes of many weights, compared with one call for each weight.

The weights have one size; the float32 amaxes are written into one buffer. Results are first compared bit for bit.
Device time is measured with a CUDA graph, which excludes the host; host time is that of the calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.common import device_times, devices, host_times, write
from transformer_plugin import ops

WEIGHTS = 64
SIZES = ((256, 256), (1024, 1024), (2048, 1408))


def measure(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Returns one row of the result."""
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(WEIGHTS)]
    amax = torch.zeros(WEIGHTS, device=device)

    def together() -> None:
        ops.amax_list_out(weights, "fp8_tensor", amax)

    def one_by_one() -> list[Tensor]:
        return [ops.amax(weight, "fp8_tensor") for weight in weights]

    together()
    assert torch.equal(amax, torch.cat(one_by_one())), (
        "amaxes of the list differ from those of separate calls"
    )
    calls = {"list": together, "separate": one_by_one}
    times = {"host": host_times(calls, device, rounds=9, repeat=2)}
    if device.type == "cuda":
        times["device"] = device_times(calls)
    row: dict[str, Any] = {"weights": WEIGHTS, "shape": list(shape)}
    for where, pair in times.items():
        row |= {f"{where}_{name}_us": time for name, time in pair.items()}
        row[f"{where}_times_as_fast"] = round(pair["separate"].median / pair["list"].median, 2)
    return row


def main() -> None:
    """Measures on every device of this machine."""
    for device in devices():
        rows = [measure(shape, device) for shape in SIZES]
        for row in rows:
            print({key: value for key, value in row.items() if not key.endswith("_us")})
        write("amax_list", device, rows)


if __name__ == "__main__":
    main()
