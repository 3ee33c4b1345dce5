"""Tensor parallelism, sharded weights, experts over ranks and copies together, on eight ranks, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from transformer_plugin import nn as tnn
from transformer_plugin import parallel
from transformer_plugin.parallel import shard_
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

WIDTH, EXPERTS, ROWS, TP = 16, 8, 8, 2


class Block(torch.nn.Module):
    """A feed-forward network, and experts on the rows that each rank has of its output."""

    def __init__(self, experts: Any = "local", tp: Any = None) -> None:
        super().__init__()
        sliced: dict[str, Any] = {} if tp is None else {"tp_group": tp, "sequence_parallel": True}
        modes = ("column", "row") if sliced else (None, None)
        self.up, self.down = (
            kind(WIDTH, WIDTH, parallel_mode=mode, **sliced)
            for kind, mode in zip((tnn.LayerNormLinear, tnn.Linear), modes, strict=True)
        )
        dispatch = tnn.DispatchConfig(max_tokens=ROWS // TP, alignment=1)
        options: dict[str, Any] = {"group": experts, "dtensor": False, "bias": True}
        if tp is None:
            dispatch, options = tnn.DispatchConfig(alignment=1), {"bias": True}
        self.moe = tnn.MoE(WIDTH, 24, EXPERTS, 2, dispatch=dispatch, **options, **sliced)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.down(self.up(x))
        result: Tensor = hidden + self.moe(hidden).output
        return result


def rows_of(data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(data)
    return tuple(torch.randn(2, ROWS, WIDTH, generator=generator).unbind(0))  # type: ignore[return-value]


def sharded(rank: Rank, wide: bool) -> tuple[Block, int, int]:
    """On (copies, data, tp) = (2, 2, 2) ranks. Experts are over those of tp, or over those of data and tp.

    Returns the block, and this rank's place among the inputs and among the ranks of tensor parallelism.
    """
    mesh = init_device_mesh("cpu", (2, 2, TP), mesh_dim_names=("copies", "data", "tp"))
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    experts = groups[rank.rank // 4] if wide else mesh["tp"].get_group()
    torch.manual_seed(0)
    block = Block(experts, mesh["tp"])
    if wide:  # only the copies have the same experts
        shard_(block.moe, mesh["copies"])
        shard_(block, mesh["data"], filter=lambda name, _: not name.startswith("moe"))
    else:
        shard_(block, mesh["data"])
    return block, rank.rank // TP, mesh.get_local_rank("tp")


def check(rank: Rank, wide: bool) -> None:
    torch.manual_seed(0)
    full = Block()
    block, data, place = sharded(rank, wide)
    for name, value in parallel.full_state_dict(block).items():
        assert_same_bits(value, full.state_dict()[name], name)
    count = {
        name: layout_of(p).shape[0] // p.shape[0]
        for name, p in block.named_parameters()
        if shard_of_parameter(p)
    }  # type: ignore[union-attr]
    assert count["moe.experts.fc1.weight"] == (8 if wide else 4)
    assert count["up.weight"] == 4 and count["down.weight"] == 2
    model = parallel.data_parallel(block)
    own = slice(place * ROWS // TP, (place + 1) * ROWS // TP)
    for other in range(4):
        x, weight = rows_of(other)
        output = full(x)
        (output * weight).sum().div(4).backward()
        if other == data:
            got = model(x[own])
            torch.testing.assert_close(got, output[own], rtol=1e-5, atol=1e-5)
            (got * weight[own]).sum().backward()
    for name, parameter in block.named_parameters():
        layout, want = layout_of(parameter), full.get_parameter(name).grad
        assert want is not None and float(want.abs().max()) > 1e-3, name
        want = want if layout is None else layout.local_shard_of(want)
        torch.testing.assert_close(
            parameter.grad, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    want = torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5)
    torch.testing.assert_close(parallel.clip_grad_norm_(model, 0.5), want, rtol=1e-5, atol=0)
    for trained in (full, block):
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    for name, value in parallel.full_state_dict(block).items():
        torch.testing.assert_close(value, full.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("wide", [False, True], ids=["experts_of_tp", "experts_of_data_and_tp"])
def test_all_together(make_pool: Any, wide: bool) -> None:
    make_pool(8).run(check, wide)
