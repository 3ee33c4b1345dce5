#!/usr/bin/env python3
"""2. Tokens are sent to experts of your own and back with an ``EpContext``: plan, dispatch, experts, combine.

    python examples/ep/02_exchange_by_hand.py                # two ranks: two GPUs, or a CPU
    torchrun --nproc-per-node 4 examples/ep/02_exchange_by_hand.py

The experts are any module that takes the rows of each expert after those of the one before. These here have a squared
ReLU. Outputs and gradients are compared with those of a loop over all experts in float64, which has no ranks. The
program ends with status 1 if they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ranks import run, show

import transformer_plugin as tp

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 32, 48, 8, 2, 40
#: Relative: the products and sums are those of float32.
BOUND = 1e-5


class Experts(torch.nn.Module):
    """The experts of this rank."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        options = {"bias": False, "device": up.device, "dtype": up.dtype}
        self.up = tp.nn.GroupedLinear(len(up), HIDDEN, FFN, **options)
        self.down = tp.nn.GroupedLinear(len(up), FFN, HIDDEN, **options)
        with torch.no_grad():
            self.up.weight.copy_(up)
            self.down.weight.copy_(down)

    def forward(self, rows: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
        hidden = self.up(rows, group_sizes).relu().square()
        # combine adds without weights: experts multiply by them.
        return self.down(hidden * weights[:, None], group_sizes)


def one_process(tokens: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same for the tokens of all ranks, in plain PyTorch."""
    output = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        token, k = (indices == expert).nonzero(as_tuple=True)
        rows = (tokens[token] @ up[expert].t()).relu().square() @ down[expert].t()
        output = output.index_add(0, token, rows * weights[token, k, None])
    return output


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative, in the norm; inf if there is a NaN."""
    error = float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())
    return error if error == error else float("inf")


def main(device: torch.device) -> bool:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)  # all ranks draw the values of all ranks

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    tokens, output_grad = normal(ranks * TOKENS, HIDDEN), normal(ranks * TOKENS, HIDDEN)
    weights, indices = normal(ranks * TOKENS, EXPERTS).softmax(1).topk(TOPK)
    up, down = normal(EXPERTS, FFN, HIDDEN), normal(EXPERTS, HIDDEN, FFN)

    leaves = [value.double().requires_grad_() for value in (tokens, weights, up, down)]
    expected = one_process(leaves[0], indices, *leaves[1:])
    grads = torch.autograd.grad(expected, leaves, output_grad.double())

    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    count = EXPERTS // ranks
    my_experts = slice(rank * count, (rank + 1) * count)
    my_tokens, my_weights = tokens[mine].requires_grad_(), weights[mine].requires_grad_()
    experts = Experts(up[my_experts], down[my_experts])

    sizes = {"num_experts": EXPERTS, "max_tokens_per_rank": TOKENS, "hidden_dim": HIDDEN, "num_topk": TOPK}
    with tp.parallel.EpContext(dist.group.WORLD, **sizes) as context:
        plan = context.plan(indices[mine].contiguous())
        rows, row_weights = context.dispatch(plan, my_tokens, my_weights)
        output = context.combine(plan, experts(rows, row_weights, plan.tokens_per_expert))
        output.backward(output_grad[mine])  # sends too: all ranks must call it
        # A copy to the host waits for the GPU. Only what is printed needs it: the steps above did not.
        sent = (
            f"rank 0 received {int(plan.total)} rows for {count} experts: {plan.tokens_per_expert.tolist()}"
        )

    show(sent)
    compared = {
        "output": (output, expected[mine]),
        "gradient of the tokens": (my_tokens.grad, grads[0][mine]),
        "gradient of the routing weights": (my_weights.grad, grads[1][mine]),
        "gradient of the experts' first weight": (experts.up.weight.grad, grads[2][my_experts]),
        "gradient of the experts' second weight": (experts.down.weight.grad, grads[3][my_experts]),
    }
    errors = {name: difference(got, want) for name, (got, want) in compared.items()}
    for name, error in errors.items():
        show(f"{name}: relative difference {error:.1e}, allowed {BOUND:.0e}")
    right = max(errors.values()) < BOUND
    show("the same as in one process" if right else "WRONG: they differ")
    return right


if __name__ == "__main__":
    run(main)
