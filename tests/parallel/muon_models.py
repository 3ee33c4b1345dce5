"""Matrices and stacks of experts that are sharded over ranks in every way, and torch's Muon on the full ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter

from tests.parallel.sharded_models import RECIPES
from transformer_plugin import nn as tnn
from transformer_plugin import optim
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

#: 2 F rows are no multiple of the rows of blocks on each rank, and the vocabulary is none of the ranks.
K, F, VOCABULARY, EXPERTS = 48, 96, 50, 3


class Matrices(torch.nn.Module):
    """Layers that divide rows, in sections and with padding, columns, and experts, of which some ranks have none."""

    def __init__(self, key: str, device: torch.device, dtype: torch.dtype, tp_group: Any = None) -> None:
        super().__init__()
        plain: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"recipe": RECIPES[key](), **plain}
        tp = {} if tp_group is None else {"tp_group": tp_group}
        column: dict[str, Any] = {**tp, "parallel_mode": "column"} if tp else {}
        row: dict[str, Any] = {**tp, "parallel_mode": "row"} if tp else {}
        self.up = tnn.LayerNormLinear(K, 2 * F, **options, **column, **({"sections": (F, F)} if tp else {}))
        self.down = tnn.Linear(F, K, **options, **row)
        self.head = tnn.Linear(
            K, VOCABULARY, False, **plain, **column, **({"pad_outputs": True} if tp else {})
        )
        self.experts = tnn.GroupedMLP(EXPERTS, K, F, **options, **tp)
        # 301 elements do not fill the vectors of a CPU.
        self.odd = tnn.Linear(43, 7, False, **plain)


def weights_of(model: torch.nn.Module) -> dict[str, Parameter]:
    """The matrices and stacks of a model, without biases of experts."""
    return {name: p for name, p in model.named_parameters() if name.endswith("weight") and p.dim() > 1}


def twins(
    rank: Rank, tp: int, key: str = "bf16", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Matrices, Matrices, DeviceMesh]:
    """The same model unsharded, and over a mesh of (data, tp) ranks with its weights sharded over the data ranks."""
    mesh = init_device_mesh(rank.device.type, (rank.size // tp, tp), mesh_dim_names=("data", "tp"))
    models = []
    for group in (None, mesh["tp"] if tp > 1 else None):
        torch.manual_seed(seed)
        models.append(Matrices(key, rank.device, dtype, group))
    shard_(models[1], mesh["data"])
    return models[0], models[1], mesh


def drawn_grads(full: torch.nn.Module, step: int) -> dict[str, Tensor]:
    """Gradients of the full weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    weights = weights_of(full).items()
    return {name: torch.randn(p.shape, generator=generator).to(p) for name, p in weights}


def give(model: torch.nn.Module, grads: dict[str, Tensor]) -> None:
    """Sets the gradients of a model, of shards those of their elements. Padding, which nothing may read, is NaN."""
    for name, parameter in weights_of(model).items():
        layout = layout_of(parameter)
        parameter.grad = grads[name].clone() if layout is None else layout.local_shard_of(grads[name])
        if layout is not None:
            parameter.grad[layout.local_shard_of(torch.ones_like(grads[name])) == 0] = torch.nan


class Reference:
    """torch's Muon on the matrices of a full model, those of experts one by one."""

    def __init__(self, full: torch.nn.Module, **options: Any) -> None:
        self.matrices = {
            name: [Parameter(each.detach().clone()) for each in (p if p.dim() == 3 else p[None])]
            for name, p in weights_of(full).items()
        }
        self.stacks = {name for name, p in weights_of(full).items() if p.dim() == 3}
        self.optimizer = torch.optim.Muon([p for some in self.matrices.values() for p in some], **options)

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, parameters in self.matrices.items():
            for i, parameter in enumerate(parameters):
                parameter.grad = (grads[name][i] if name in self.stacks else grads[name]).clone()
        self.optimizer.step()

    def weight(self, name: str) -> Tensor:
        return self._together(name, [p.detach() for p in self.matrices[name]])

    def momentum(self, name: str) -> Tensor:
        return self._together(name, [self.optimizer.state[p]["momentum_buffer"] for p in self.matrices[name]])

    def _together(self, name: str, values: list[Tensor]) -> Tensor:
        return torch.stack(values) if name in self.stacks else values[0]

    def compare(self, model: torch.nn.Module, optimizer: optim.Muon) -> None:
        """All elements of a model and of its optimizer have the bits of torch's, and padding is zero."""
        for name, parameter in weights_of(model).items():
            got, momentum = full_weight(parameter), full_of(parameter, momentum_of(optimizer, parameter))
            assert_same_bits(momentum, self.momentum(name), f"momentum of {name}")
            if parameter.is_cuda and name in self.stacks:  # other kernels for other numbers of experts
                torch.testing.assert_close(got, self.weight(name), rtol=2e-2, atol=1e-3)
            else:
                assert_same_bits(got, self.weight(name), name)
            layout = layout_of(parameter)
            if layout is not None:
                assert_same_bits(parameter.detach(), layout.local_shard_of(got), f"padding of {name}")
                shard = shard_of_parameter(parameter)
                assert shard is None or not parameter[shard.valid_rows :].any()


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    value: Tensor = optimizer.state[parameter]["momentum_buffer"]
    assert type(value) is Tensor and value.shape == parameter.shape
    return value


def full_of(parameter: Tensor, value: Tensor) -> Tensor:
    """The full tensor of one that is sharded as a parameter."""
    like = Parameter(value.clone())
    like.__dict__.update(parameter.__dict__)
    return full_weight(like)
