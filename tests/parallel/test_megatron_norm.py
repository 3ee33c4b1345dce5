"""Megatron-LM's gradient norm over tensor-parallel layers: its attributes say which gradients count on which rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils import swap_tensors

from tests.parallel.replaced_layers import CASES, drawn, own
from transformer_plugin import nn as tnn
from transformer_plugin import ops, optim, parallel
from transformer_plugin.testing.distributed import Rank, RankPool

H, F, V, ROWS, EXPERTS = 16, 24, 22, 8, 2
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


class Block(torch.nn.Module):
    """A layer of each kind: slices of rows and of columns, of sections, of experts, of a padded head, and norms."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        slices: dict[str, Any] = {} if group is None else {"tp_group": group}
        rows = {**slices, "sequence_parallel": True} if slices else {}
        column = {**rows, "parallel_mode": "column"} if slices else {}
        row = {**rows, "parallel_mode": "row"} if slices else {}
        self.table = tnn.Embedding(V, H, **rows)
        self.up = tnn.LayerNormLinear(H, 2 * F, **column, **({"sections": (F, F)} if slices else {}))
        self.down = tnn.Linear(F, H, **row)
        self.norm = tnn.RMSNorm(H, **rows)
        self.mlp = tnn.GroupedMLP(EXPERTS, H, F, bias=True, **slices)
        self.head = tnn.Linear(H, V, bias=False, **column, **({"pad_outputs": True} if slices else {}))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and what the experts make of rows that all ranks have."""
        x = self.table(tokens)
        x = self.norm(x + self.down(ops.activation(self.up(x))))
        rows = torch.linspace(-1, 1, ROWS * H, device=x.device).view(ROWS, H)
        sizes = torch.tensor([3, ROWS - 3], device=x.device)
        return self.head(x), self.mlp(rows, sizes, torch.ones(ROWS, device=x.device))


def counts_here(parameter: Any, rank: int) -> bool:
    """Megatron-LM's ``param_is_not_tensor_parallel_duplicate`` (core/tensor_parallel/layers.py)."""
    is_slice = hasattr(parameter, "tensor_model_parallel") and parameter.tensor_model_parallel
    return is_slice or rank == 0


def megatron_norm(parameters: Any, rank: Rank) -> Tensor:
    """``get_grad_norm_fp32`` of the gradients that count on this rank, over the tensor-parallel group."""
    squares = [p.grad.double().square().sum() for p in parameters if counts_here(p, rank.rank)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    total = total.to(rank.device)
    dist.all_reduce(total, group=rank.group)
    return total.sqrt()


def gradients(block: Any, rank: Rank | None = None) -> None:
    """Of a full block, or of this rank's slices of it."""
    block.zero_grad()
    tokens = torch.arange(ROWS) * 5 % V
    factors = drawn(ROWS, V, seed=3), drawn(ROWS, H, seed=4)
    if rank is not None:
        tokens = tokens.to(rank.device)
        factors = own(factors[0], 1, rank).to(rank.device), factors[1].to(rank.device)
    logits, experts = block(tokens)
    ((logits * factors[0]).sum() + (experts * factors[1]).sum()).backward()


#: Of the sliced parameters: the dimension, and how many sections of it are divided.
PARTITIONS = {
    "table.weight": (0, 1),
    "up.weight": (0, 2),
    "up.bias": (0, 2),
    "down.weight": (1, 1),
    "mlp.fc1.weight": (1, 2),
    "mlp.fc1.bias": (1, 2),
    "mlp.fc2.weight": (2, 1),
    "head.weight": (0, 1),
}


def check_attributes(block: Any) -> None:
    found = {
        name: (p.partition_dim, p.partition_stride)
        for name, p in block.named_parameters()
        if getattr(p, "tensor_model_parallel", False)
    }
    assert found == PARTITIONS
    # Megatron-LM would add the gradients of these over the ranks again, which layers have done.
    assert not any(hasattr(p, "sequence_parallel") for p in block.parameters())


def replaced(block: Any, way: str) -> Any:
    """The block after PyTorch has replaced its parameters."""
    if way == "deepcopy":
        return copy.deepcopy(block)
    if way == "load":
        block.load_state_dict({n: v.detach().clone() for n, v in block.state_dict().items()}, assign=True)
    elif way == "empty":
        values = [p.detach().clone() for p in block.parameters()]
        block.to("meta").to_empty(device=values[0].device)
        with torch.no_grad():
            for p, value in zip(block.parameters(), values, strict=True):
                p.copy_(value)
    for layer in block.modules():
        for name, p in list(layer._parameters.items()):
            if p is not None and way == "assign":
                setattr(layer, name, Parameter(p.detach().clone()))
            elif p is not None and way == "swap":  # noticed in the next forward
                swap_tensors(p, Parameter(p.detach().clone()))
    return block


def check_norm(rank: Rank) -> None:
    torch.manual_seed(0)
    full = Block()
    gradients(full)
    wanted = torch.stack([p.grad.double().norm() for p in full.parameters()]).norm()  # type: ignore[union-attr]
    torch.manual_seed(0)
    block: Any = Block(rank.group).to(rank.device)
    for way in ("", "assign", "swap", "load", "empty", "deepcopy"):
        block = replaced(block, way)
        gradients(block, rank)
        check_attributes(block)
        for found in (megatron_norm(block.parameters(), rank), parallel.clip_grad_norm_(block, 1e9)):
            torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-5, atol=0, msg=way)
        for name, p in block.named_parameters():
            if name in PARTITIONS and "table" not in name and "head" not in name:  # those have padding
                dim, stride = PARTITIONS[name]  # Megatron-LM's _initialize_affine_weight_cpu
                each = full.get_parameter(name).shape[dim] // (rank.size * stride)
                mine = full.get_parameter(name).split(each, dim)[rank.rank :: rank.size]
                torch.testing.assert_close(p.cpu(), torch.cat(mine, dim), rtol=0, atol=0)
    masters = optim.MasterWeights(block.parameters(), lambda weights: torch.optim.SGD(weights, lr=0.1))
    for p, master in zip(masters.parameters, masters.master_weights, strict=True):
        assert [getattr(p, a, None) for a in ATTRIBUTES] == [getattr(master, a, None) for a in ATTRIBUTES]


def test_norm(pair: RankPool) -> None:
    """Counts each slice, and what all ranks have once; also after parameters were replaced."""
    pair.run(check_norm)


def check_others(rank: Rank) -> None:
    """Shards of data ranks and of experts are no tensor-parallel slices."""
    for key in ("linear", "sharded_linear", "sharded_list", "experts", "dtensor_experts"):
        for p in CASES[key].make(rank).parameters():
            assert not any(hasattr(p, name) for name in ATTRIBUTES), key


def test_others(pair: RankPool) -> None:
    pair.run(check_others)
