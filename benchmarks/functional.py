"""Host time of each function of transformer_plugin beside the op that it calls, and of the construction of values.

Tensors are tiny, so the time from the Python call to the kernel launch is measured. A function and its op alternate in
one run. Goal: a function takes at most 5 us more than its op, and one construction more for each value that it returns.
A construction is that of ``GroupedTensor(data, group_sizes)``; its goal is 12 us.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import devices, host_times, write
from benchmarks.functional_cases import Call, Pair, constructions, pairs

GOAL_US, GOAL_CONSTRUCTION_US = 5.0, 12.0
#: What one construction is.
CONSTRUCTION = "GroupedTensor(data, group_sizes)"


def measure(pair: Pair, construction: Call, device: torch.device) -> dict[str, Any]:
    """All calls, alternating; ``over_us`` is what the function adds, less one construction for each value."""
    times = host_times({"function": pair.function, "op": pair.op, "construction": construction}, device)
    added = times["function"].median - times["op"].median
    values = pair.values()
    over = added - values * times["construction"].median
    row = {"function": pair.name, "function_us": times["function"], "op_us": times["op"], "values": values}
    return {**row, "added_us": round(added, 3), "over_us": round(over, 3)}


def run(device: torch.device) -> None:
    """Measures on one device and writes its file."""
    calls = constructions(device)
    made = host_times(calls, device)
    rows: list[dict[str, Any]] = [{"construction": name, "us": time} for name, time in made.items()]
    print(f"{device.type}: us per construction")
    for name, time in made.items():
        print(f"{name:36s} {time.median:8.2f}")
    print(f"{'us per call':36s} function       op    added   values     over (goal {GOAL_US})")
    for pair in pairs(device):
        row = measure(pair, calls[CONSTRUCTION], device)
        rows.append(row)
        numbers = (
            row["function_us"].median,
            row["op_us"].median,
            row["added_us"],
            row["values"],
            row["over_us"],
        )
        print(f"{pair.name:36s} " + " ".join(f"{number:8.2f}" for number in numbers), flush=True)
    write("functional", device, rows, goal_over_us=GOAL_US, goal_construction_us=GOAL_CONSTRUCTION_US)


def main() -> None:
    """Measures on every device of this machine, or on one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: every device of this machine")
    chosen = parser.parse_args().device
    torch.set_num_threads(1)  # tensors are tiny: waiting for a second thread would only add time
    for device in devices():
        if chosen in (None, device.type):
            run(device)


if __name__ == "__main__":
    main()
