"""Gathering a weight sharded by rows over ranks, in eight or four bits, compared with NCCL's all-gather in bfloat16.

Each rank has other rows. "ready": quantized rows are gathered, data and scales in one collective. "quantized": they are
quantized first, and where a format needs it the amax is reduced over ranks. The bytes are first compared with those of
the full weight. Both sides write into buffers; competitors alternate. Needs two GPUs or more, and uses all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import graph_of, rested_times, write
from transformer_plugin import ops
from transformer_plugin.parallel._gather_layout import Shards, buffer_layouts
from transformer_plugin.testing.distributed import Rank, RankPool

#: A dense layer of Llama-3-70B, and an expert-sized one.
SHAPES = ((28672, 8192), (7168, 4096))
FORMATS = ("fp8_block:square", "fp8_tensor", "mxfp8", "nvfp4")
REPEAT = 8
PEER = "nccl bf16"

Calls = dict[str, Callable[[], Any]]


class Gather:
    """One format: buffers of this rank, and of the full weight."""

    def __init__(self, rank: Rank, rows: Tensor, key: str) -> None:
        self.rank, self.rows, self.key = rank, rows, key
        shards = Shards(key, (rows.shape[0] * rank.size, rows.shape[1]), rank.size, "none")
        self.layouts = [each for each in buffer_layouts(shards) if not each.name.endswith("amax")]
        self.needs_amax = shards.format.needs_amax or key == "fp8_tensor"
        self.amax = torch.zeros(1, device=rows.device)
        self.planes = [torch.empty(p.shard, dtype=p.dtype, device=rows.device) for p in self.layouts]
        sent = [(p, plane) for p, plane in zip(self.layouts, self.planes, strict=True) if p.axis is not None]
        self.sent = [plane for _, plane in sent]
        self.received = [plane.new_empty(rank.size * plane.shape[0], *plane.shape[1:]) for plane in self.sent]

    def ready(self) -> None:
        """Gathers what is quantized."""
        ops.all_gather_list_out(self.sent, self.received, self.rank.size, self.rank.group_name)

    def quantized(self) -> None:
        """Quantizes this rank's rows, and gathers them."""
        amax = None
        if self.needs_amax:
            ops.amax_list_out([self.rows], self.key, self.amax)
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
            amax = self.amax
        ops.quantize_out(self.rows, self.key, self.planes, amax=amax)
        self.ready()

    def check(self, full: Tensor) -> None:
        """Compares the gathered bytes with those of the full weight."""
        self.quantized()
        amax = ops.amax(full, self.key) if self.needs_amax else None
        expected = [t.view(torch.uint8) for t in ops.quantize(full, self.key, None, amax)[:2]]
        pairs = zip(self.layouts, expected, strict=True)
        sent = [(layout, want) for layout, want in pairs if layout.axis is not None]
        for (layout, want), received in zip(sent, self.received, strict=True):
            got = torch.empty_like(want)
            layout.assemble(received.view(torch.uint8).view(-1), got.view(layout.dtype))
            assert torch.equal(got, want), (self.key, layout)

    @property
    def bytes(self) -> int:
        """Of the full weight."""
        return sum(received.nbytes for received in self.received)


def measure(rank: Rank, shape: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns one row for each format and mode."""
    generator = torch.Generator(rank.device).manual_seed(rank.rank)
    rows = torch.randn(shape[0] // rank.size, shape[1], device=rank.device, generator=generator).bfloat16()
    full = rows.new_empty(shape)

    def peer() -> None:
        dist.all_gather_into_tensor(full, rows)

    peer()
    calls: Calls = {PEER: peer}
    gathers = {key: Gather(rank, rows, key) for key in FORMATS}
    for key, gather in gathers.items():
        gather.check(full)
        calls |= {f"{key} ready": gather.ready, f"{key} quantized": gather.quantized}
    results = []
    for mode in ("graph", "eager"):

        def repeated(call: Callable[[], Any]) -> None:
            for _ in range(REPEAT):
                call()

        if mode == "graph":
            launched: Calls = {name: graph_of(call, REPEAT).replay for name, call in calls.items()}
        else:
            launched = {name: (lambda call=call: repeated(call)) for name, call in calls.items()}
        times = rested_times(launched, REPEAT, ready=dist.barrier)
        for key, gather in gathers.items():
            row = {
                "shape": list(shape),
                "ranks": rank.size,
                "format": key,
                "mode": mode,
                "bytes": gather.bytes,
            }
            row["nccl_bf16_us"] = times[PEER]
            for what in ("ready", "quantized"):
                row[f"{what}_us"] = times[f"{key} {what}"]
                row[f"{what}_of_nccl_bf16"] = round(times[f"{key} {what}"].median / times[PEER].median, 3)
            results.append(row)
        del launched
    return results


def main() -> None:
    """Measures on all GPUs of this machine."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        print("two GPUs or more are needed")
        return
    with RankPool(ranks, "nccl") as pool:
        rows = [row for shape in tqdm(SHAPES) for row in pool.run(measure, shape, timeout=300.0)[0]]
    for row in rows:
        print({key: value for key, value in row.items() if not key.endswith("_us")})
    write("weight_gather", torch.device("cuda"), rows)


if __name__ == "__main__":
    main()
