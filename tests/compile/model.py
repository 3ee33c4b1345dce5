"""A model with every module of the package, for the compile, export and graph tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.nn import DispatchConfig, GroupedLinear, GroupedMLP, Linear, MoE, RouterConfig
from transformer_plugin.recipes import Recipe
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

HIDDEN, FFN, EXPERTS, TOPK, GROUPS = 32, 64, 8, 2, 3


class Everything(torch.nn.Module):
    """Residual blocks of Linear, GroupedLinear, GroupedMLP and MoE."""

    def __init__(
        self,
        recipe: Recipe | None = None,
        group: torch.distributed.ProcessGroup | str = "local",
        dispatch: DispatchConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        options = {"device": device, "recipe": recipe}
        unit = Format.parse(recipe.input_format).group_multiple if recipe else 1
        dispatch = dispatch or DispatchConfig(alignment=max(4, unit))
        self.linear = Linear(HIDDEN, HIDDEN, **options)
        self.grouped = GroupedLinear(GROUPS, HIDDEN, HIDDEN, scale_bias=True, **options)
        self.mlp = GroupedMLP(GROUPS, HIDDEN, FFN, True, **options)
        router = RouterConfig(aux_loss_coeff=0.1)
        self.moe = MoE(
            HIDDEN, FFN, EXPERTS, TOPK, group=group, router=router, dispatch=dispatch, bias=True, **options
        )

    def forward(self, x: Tensor, group_sizes: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Takes ``x [T, HIDDEN]``, the rows of GROUPS groups. Returns as many rows, and the auxiliary loss."""
        x = x + self.linear(x)
        x = x + self.grouped(x, group_sizes, probs)
        x = x + self.mlp(x, group_sizes, probs)
        mixed = self.moe(x)
        return x + mixed.output, mixed.aux_loss


class Batch(NamedTuple):
    x: Tensor
    group_sizes: Tensor
    probs: Tensor


def batch(tokens: int, seed: int, device: torch.device | str = "cpu", unit: int = 1) -> Batch:
    """Rows, routing and group sizes depend on the seed; some groups are empty, and some rows are in no group. The rows
    and the sizes are multiples of ``unit``."""
    tokens = -(-tokens // unit) * unit
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, tokens // unit + 1, (GROUPS,), generator=generator).sort().values * unit
    sizes = torch.diff(cuts, prepend=torch.zeros(1, dtype=cuts.dtype))
    if seed % 3 == 0:
        sizes[1] = 0
    x = torch.randn(tokens, HIDDEN, generator=generator)
    probs = torch.rand(tokens, generator=generator)
    return Batch(x.to(device), sizes.to(device), probs.to(device))


def step(model: torch.nn.Module, data: Batch) -> dict[str, Tensor]:
    """Returns output, auxiliary loss and all gradients of one training step. Random numbers depend on torch's seed."""
    x, probs = data.x.clone().requires_grad_(), data.probs.clone().requires_grad_()
    output, aux_loss = model(x, data.group_sizes, probs)
    leaves = {"x": x, "probs": probs} | dict(model.named_parameters())
    loss = output.square().mean() + aux_loss
    grads = torch.autograd.grad(loss, list(leaves.values()))
    grads = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    result = {"output": output.detach(), "aux_loss": aux_loss.detach()}
    return result | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """With a limit of 0 the bits must be equal; otherwise the limit bounds the relative error."""
    for (name, g), e in zip(got.items(), expected.values(), strict=True):
        name = name.replace("_orig_mod.", "")
        if limit == 0:
            assert_same_bits(g, e, name)
        else:
            assert relative_error(g, e) <= limit, name


def of_any_rows(name: str, device: torch.device) -> float:
    """The allowed error of a graph for any number of rows, relative to eager. On a GPU such a graph uses another kernel
    for the weight gradient of a dense layer with block scales, which adds in another order."""
    return 1e-5 if name == "fp8_block" and device.type == "cuda" else 0
