#!/usr/bin/env python3
"""1. An ``nn.MoE`` over ranks is trained, and has the losses of one process with all experts.

    python examples/ep/01_layer_over_ranks.py                # two ranks: two GPUs, or a CPU
    torchrun --nproc-per-node 4 examples/ep/01_layer_over_ranks.py

Every rank has other tokens, a share of the experts, and copies of the other parameters. In addition, every rank trains
the same model with all experts on the tokens of all ranks. The program ends with status 1 if they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ranks import run, show

import transformer_plugin as tp

HIDDEN, FFN, EXPERTS, TOPK, TOKENS, STEPS = 32, 64, 8, 2, 64, 10
#: Relative: float32 sums are made in another order.
BOUND = 1e-4


class Block(torch.nn.Module):
    """A norm, a mixture of experts, and the input added."""

    def __init__(self, device: torch.device, **placement: Any) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN, device=device)
        self.moe = tp.nn.MoE(HIDDEN, FFN, EXPERTS, TOPK, device=device, **placement)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.moe(self.norm(tokens)).output


def train(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Takes a few steps; returns the loss of each, the mean over these tokens."""
    # The experts are DTensors and the others are not: foreach would take them in one call.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(tokens) - targets).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main(device: torch.device) -> bool:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(ranks * TOKENS, HIDDEN, generator=generator).to(device)
    targets = tokens @ torch.randn(HIDDEN, HIDDEN, generator=generator).to(device) / HIDDEN**0.5

    torch.manual_seed(0)
    one = Block(device)  # all experts on this rank
    dispatch = tp.nn.DispatchConfig(max_tokens=TOKENS)  # the most tokens of any rank in one call
    over_ranks = Block(device, group=dist.group.WORLD, dispatch=dispatch)
    over_ranks.load_state_dict(one.state_dict())  # of the experts, it takes this rank's

    # Gradients become those of the mean over all ranks: of experts, too, which no other rank holds.
    model = tp.parallel.data_parallel(over_ranks)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    losses = torch.stack(train(model, tokens[mine], targets[mine]))
    dist.all_reduce(losses)
    losses /= ranks
    expected = torch.stack(train(one, tokens, targets))

    show(f"step  loss over {ranks} ranks  in one process")
    for step, (got, want) in enumerate(zip(losses.tolist(), expected.tolist(), strict=True), 1):
        show(f"{step:4d}  {got:17.7f}  {want:14.7f}")
    of_losses = float(((losses - expected) / expected).abs().max())
    of_weights = []
    for (name, got), want in zip(over_ranks.named_parameters(), one.parameters(), strict=True):
        whole = got.full_tensor() if name.startswith("moe.experts.") else got
        of_weights.append(float((whole - want).detach().norm() / want.detach().norm()))
    learned = bool(losses[-1] < 0.9 * losses[0])
    show(f"compared {STEPS} losses: relative difference up to {of_losses:.1e}, allowed {BOUND:.0e}")
    show(f"compared {len(of_weights)} weights after the steps: up to {max(of_weights):.1e}, likewise")
    right = of_losses < BOUND and max(of_weights) < BOUND and learned
    show("the same" if right else "WRONG: they differ" if learned else "WRONG: nothing was learned")
    return right


if __name__ == "__main__":
    run(main)
