"""All parameters of a model in one buffer, and their gradients in another.

One all-reduce then serves every replicated parameter, and the optimizer walks a few long tensors. Layout:

    | replicated, decayed | replicated, not decayed | slots | experts, decayed | experts, not decayed |

The slots are a few numbers that are summed over the ranks together with the gradients: losses, the experts'
share of the gradient norm, and the wish to stop.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lm.model import is_expert
from moe_lm.world import World

ALIGNMENT = 64  # elements; every parameter starts at a multiple
SLOTS = 64


class FlatParameters:
    """Makes the parameters of ``model`` and their ``.grad`` views of two buffers.

    ``master`` and ``gradient`` are float32; a model in bfloat16 has copies, rounded after each step.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        named = list(model.named_parameters())
        decayed = [[], []], [[], []]
        for name, parameter in named:
            decayed[is_expert(name)][parameter.ndim < 2].append(parameter)
        dtype, device = named[0][1].dtype, named[0][1].device
        sections = [decayed[0][0], decayed[0][1], None, decayed[1][0], decayed[1][1]]
        bounds, places, position = [0], [], 0
        for section in sections:
            for parameter in section or []:
                places.append((parameter, position))
                position += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            position += SLOTS if section is None else 0
            bounds.append(position)
        self.work = torch.zeros(position, dtype=dtype, device=device)
        self.work_gradient = torch.zeros_like(self.work)
        for parameter, start in places:
            view = self.work[start : start + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.work_gradient[start : start + parameter.numel()].view_as(parameter)
        self.mixed = dtype != torch.float32
        self.master = self.work.float() if self.mixed else self.work
        self.gradient = torch.zeros_like(self.master) if self.mixed else self.work_gradient
        self.bounds = bounds

    def optimizer_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """What the optimizer steps: one tensor per section that is not empty."""
        groups: list[dict[str, object]] = []
        for section, decay in ((0, weight_decay), (1, 0.0), (3, weight_decay), (4, 0.0)):
            start, end = self.bounds[section], self.bounds[section + 1]
            if end > start:
                tensor = nn.Parameter(self.master[start:end])
                tensor.grad = self.gradient[start:end]
                groups.append({"params": [tensor], "weight_decay": decay})
        return groups

    def zero_grad(self) -> None:
        """Before each backward, which adds."""
        self.work_gradient.zero_()

    @torch.no_grad()
    def reduce(self, numbers: list[Tensor | float], clip_norm: float) -> Tensor:
        """Averages the gradients over the ranks and scales their norm down to ``clip_norm``.

        An expert's gradient already holds the tokens of every rank, so it is divided but not summed.

        Returns:
            float32: the mean over the ranks of each of ``numbers``, then the norm before clipping.
        """
        size, count = self.world.size, len(numbers)
        if self.mixed:
            self.gradient.copy_(self.work_gradient)
        replicated, slots = self.gradient[: self.bounds[2]], self.gradient[self.bounds[2] : self.bounds[3]]
        experts = self.gradient[self.bounds[3] :]
        for i, number in enumerate(numbers):
            slots[i] = number
        slots[count] = torch.dot(experts, experts)
        if size > 1:
            dist.all_reduce(self.gradient[: self.bounds[3]], group=self.world.group)
        norm = (torch.dot(replicated, replicated) + slots[count]).sqrt() / size
        results = torch.cat([slots[:count] / size, norm[None]])
        slots.zero_()
        self.gradient.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0) / size)
        return results

    @torch.no_grad()
    def publish(self) -> None:
        """After an optimizer step: the model's copies from the float32 ones."""
        if self.mixed:
            self.work.copy_(self.master)
