"""Host time of one op call, without and with its gradient, compared with torch.mul and the torch calls it replaces.

Tensors are tiny, so the time from the Python call to the kernel launch is measured. "With gradient" means a forward
whose input requires a gradient, so that it records the graph. Goal for an op that runs one kernel: with gradient, at
most 2.5 times torch.mul with gradient, in the same run. permute, the grouped ops, fp8_tensor and modules (``nn.``) run
several kernels; compare them with the calls that they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Time, devices, host_times, write
from benchmarks.host_time_cases import Pair, pairs

GOAL = 2.5


def measure(pair: Pair) -> dict[str, Any]:
    """Measures torch.mul, the op and the torch calls, alternating in one run, each without and with a gradient."""
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
    """Measures on every device of this machine and writes one file for each."""
    torch.set_num_threads(1)  # tensors are tiny: waiting for a second thread would only add time
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
