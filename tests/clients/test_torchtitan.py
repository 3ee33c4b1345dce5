"""torchtitan's grouped experts beside this package's layer: same weights, same rows, output and gradients.

torchtitan 0.3 does not import on torch 2.11: `make test-titan` runs this file with a newer one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin.testing.numerics import relative_error

moe = pytest.importorskip("torchtitan.models.common.moe")

EXPERTS, HIDDEN, FFN = 4, 64, 96
NAMES = ("w1_EFD", "w3_EFD", "w2_EDF")  # gate, linear part, down


def their_experts(device: torch.device) -> torch.nn.Module:
    experts = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS).build().to(device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in NAMES:
            weight = getattr(experts, name)
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return experts


def our_experts(theirs: torch.nn.Module, device: torch.device) -> tp.nn.GroupedMLP:
    experts = tp.nn.GroupedMLP(EXPERTS, HIDDEN, FFN, dtype=torch.bfloat16, device=device)
    gate, linear, down = (getattr(theirs, name).detach() for name in NAMES)
    with torch.no_grad():
        experts.fc1.weight.copy_(torch.cat([gate, linear], dim=1))
        experts.fc2.weight.copy_(down)
    return experts


def in_float64(theirs: torch.nn.Module, x: Tensor, counts: list[int]) -> list[Tensor]:
    """The output and the gradients of the sum of its squares, by other arithmetic, of weights in bfloat16."""
    rows = x.detach().double().requires_grad_()
    weights = [getattr(theirs, name).detach().bfloat16().double().requires_grad_() for name in NAMES]
    gate, linear, down = weights
    outputs = [
        (torch.nn.functional.silu(part @ gate[i].T) * (part @ linear[i].T)) @ down[i].T
        for i, part in enumerate(rows.split(counts))
    ]
    output = torch.cat(outputs)
    output.square().sum().backward()
    return [output.detach(), rows.grad, *(weight.grad for weight in weights)]  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [[20, 0, 7, 13], [0, 40, 0, 0], [1, 2, 3, 34]])
def test_output_and_gradients(counts: list[int], device: torch.device) -> None:
    theirs = their_experts(device)
    ours = our_experts(theirs, device)
    sizes = torch.tensor(counts, device=device)
    x = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    exact = in_float64(theirs, x, counts)
    results = []
    for experts in (theirs, ours):
        rows = x.detach().clone().requires_grad_()
        output = (
            experts(rows, sizes)
            if experts is theirs
            else experts(rows, sizes, torch.ones(len(x), device=device))
        )
        output.float().square().sum().backward()
        if experts is theirs:
            grads = [getattr(theirs, name).grad for name in NAMES]
        else:
            grads = [*ours.fc1.weight.grad.split(FFN, dim=1), ours.fc2.weight.grad]
        results.append([output.detach(), rows.grad, *grads])
    for of_theirs, of_ours, expected in zip(*results, exact, strict=True):
        assert relative_error(of_ours, expected) < 2**-6  # a few roundings to bfloat16
        assert relative_error(of_ours, expected) < 1.5 * relative_error(of_theirs, expected)
