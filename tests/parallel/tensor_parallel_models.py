"""A block with and without tensor parallelism, and how their results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import full_weight
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

#: Rows of all ranks, and the widths; multiples of 128 per rank keep the blocks of weights whole.
ROWS, K, F = 64, 256, 512
#: The error of the parallel block beside that of the full one, both of float64: the partial sums are rounded, too, and
#: scales of full tensors are those of slices.
FACTOR = 1.25


class Block(torch.nn.Module):
    """A gated feed-forward network with a norm, and a norm after it."""

    def __init__(self, recipe: Any, device: torch.device, bias: bool = True, **parallel: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
        column = {**parallel, "parallel_mode": "column"} if parallel else {}
        row = {**parallel, "parallel_mode": "row"} if parallel else {}
        sections = {"sections": (F, F)} if parallel else {}
        of_norm = parallel if parallel.get("sequence_parallel") else {}
        self.up = tnn.LayerNormLinear(K, 2 * F, bias, **options, **column, **sections)
        self.down = tnn.Linear(F, K, bias, **options, **row)
        self.norm = tnn.RMSNorm(K, device=device, dtype=torch.bfloat16, **of_norm)
        self.out = tnn.Linear(K, K, bias, **options, **column)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = x + self.down(ops.activation(up.flatten(0, -2)).view(*up.shape[:-1], -1))
        return self.out(self.norm(hidden))


def drawn(*sizes: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def twins(rank: Rank, key: str, sequence_parallel: bool, bias: bool = True) -> tuple[Block, Block]:
    """The same block, unsharded and tensor parallel, with values of biases and norms that are not constant."""
    torch.manual_seed(1)
    full = Block(RECIPES[key](), rank.device, bias)
    torch.manual_seed(1)
    options = {"tp_group": rank.group, "sequence_parallel": sequence_parallel}
    parallel = Block(RECIPES[key](), rank.device, bias, **options)
    assert_state(full, parallel)
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            if "norm" in name:
                parameter += 0.25 * drawn(*parameter.shape, seed=len(name), device=rank.device)
    parallel.load_state_dict(full.state_dict())
    return full, parallel


def assert_state(full: torch.nn.Module, parallel: torch.nn.Module) -> None:
    for name, parameter in parallel.named_parameters():
        assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), name)


def close(got: Tensor, full: Tensor, exact: Tensor, name: str) -> None:
    """The parallel result is not less accurate than that of the full block."""
    scale = exact.norm().clamp(min=1e-12)
    own, other = (got.double() - exact).norm() / scale, (full.double() - exact).norm() / scale
    assert own <= FACTOR * other + 2**-9, f"{name}: {own} beside {other}"


def in_float64(block: Block, x: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the parameters and of the input (""), in plain PyTorch."""
    p = {name: value.detach().double().requires_grad_() for name, value in block.named_parameters()}
    x = x.detach().double().requires_grad_()
    functional = torch.nn.functional
    normalized = functional.layer_norm(x, (K,), p["up.norm_weight"], p["up.norm_bias"], block.up.eps)
    gate, up = functional.linear(normalized, p["up.weight"], p["up.bias"]).chunk(2, -1)
    hidden = x + functional.linear(functional.silu(gate) * up, p["down.weight"], p["down.bias"])
    hidden = functional.rms_norm(hidden, (K,), p["norm.weight"], block.norm.eps)
    output = functional.linear(hidden, p["out.weight"], p["out.bias"])
    (output * weight).sum().backward()
    grads = {name: value.grad for name, value in (*p.items(), ("", x)) if value.grad is not None}
    return output.detach(), grads


def relative(got: Tensor, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


def full_grad(parameter: Tensor) -> Tensor:
    """The gradient of the full parameter, from those of the slices."""
    assert parameter.grad is not None
    slices = getattr(parameter, "tensor_slices", None)
    if slices is None:
        return parameter.grad
    every = ops.all_gather(parameter.grad.unsqueeze(0), len(slices.ranks), slices.group_name)
    return slices.join(every.unbind(0))
