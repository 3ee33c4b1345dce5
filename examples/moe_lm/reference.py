"""The mixture of experts in plain PyTorch: a careful implementation without this package.

Tokens are sorted by expert and sent with one all-to-all of exact sizes. A loop runs the local experts, and another
all-to-all returns the rows. The host reads the sizes. This file does not import transformer_plugin.
Shapes: N tokens of this rank, K choices per token, D width, E experts, L = E / R local experts on R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class MixtureOutput(NamedTuple):
    output: Tensor
    aux_loss: Tensor


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts; the backward sends the gradient back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        output = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(output, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return output, None, None, None


class _Expand(torch.autograd.Function):
    """Copies row n of the input for each of its K choices, in sorted order; the backward is a gather and a sum."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.topk = topk
        return rows_ND.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _unsort(grads[0], order).unflatten(0, (-1, ctx.topk)).sum(1), None, None


class _Permute(torch.autograd.Function):
    """Reorders rows; the backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _unsort(grads[0], order), None


def _unsort(rows: Tensor, order: Tensor) -> Tensor:
    return rows.index_select(0, _inverse(order))


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class Router(nn.Module):
    """Softmax over the K largest logits (Shazeer et al. 2017), balance loss of Switch (Fedus et al. 2021)."""

    def __init__(self, dim: int, experts: int, topk: int, aux_loss_coeff: float, **factory: Any) -> None:
        super().__init__()
        self.topk = topk
        self.aux_loss_coeff = aux_loss_coeff
        self.weight = nn.Parameter(torch.empty(experts, dim, **factory))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), self.weight.float())
        best_NK, indices_NK = logits_NE.topk(self.topk, dim=-1)
        experts = self.weight.shape[0]
        share_E = torch.bincount(indices_NK.flatten(), minlength=experts) / indices_NK.numel()
        aux_loss = (logits_NE.softmax(-1).mean(0) * share_E).sum() * experts * self.aux_loss_coeff
        return indices_NK, best_NK.softmax(-1), aux_loss


class Weights(nn.Module):
    """One packed parameter ``weight [E, out, in]``, of which a rank has the shard ``[L, out, in]``."""

    def __init__(self, mesh: DeviceMesh, experts: int, outputs: int, inputs: int, **factory: Any) -> None:
        super().__init__()
        weight = torch.empty(experts // mesh.size(), outputs, inputs, **factory)
        if mesh.size() > 1:
            weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        self.weight = nn.Parameter(weight)

    def local(self) -> tuple[Tensor, ...]:
        """The matrices of this rank's experts."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return weight.unbind(0)


class Experts(nn.Module):
    """SwiGLU networks, run one after another, each on its rows."""

    def __init__(self, mesh: DeviceMesh, experts: int, dim: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.fc1 = Weights(mesh, experts, 2 * hidden, dim, **factory)
        self.fc2 = Weights(mesh, experts, dim, hidden, **factory)

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        outputs = []
        for part, fc1, fc2 in zip(rows.split(sizes), self.fc1.local(), self.fc2.local(), strict=True):
            gate, linear = F.linear(part, fc1).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * linear, fc2))
        return torch.cat(outputs)


class PlainMoE(nn.Module):
    """Routes, sends, runs the experts, returns and weights rows. Parameters as in ``transformer_plugin.nn.MoE``."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        topk: int,
        mesh: DeviceMesh,
        aux_loss_coeff: float,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.local = experts // self.ranks
        self.router = Router(dim, experts, topk, aux_loss_coeff, **factory)
        self.experts = Experts(mesh, experts, dim, hidden, **factory)

    def forward(self, input: Tensor) -> MixtureOutput:
        x_ND = input.flatten(0, -2)
        indices_NK, weights_NK, aux_loss = self.router(x_ND)
        topk = indices_NK.shape[1]
        chosen = indices_NK.flatten()
        order = chosen.argsort(stable=True)
        rows = _Expand.apply(x_ND, order, topk)
        counts_E = torch.bincount(chosen, minlength=self.ranks * self.local)
        rows = self._run(rows, counts_E)
        rows_NKD = _Permute.apply(rows, _inverse(order)).unflatten(0, (-1, topk))
        output = (rows_NKD * weights_NK[:, :, None].to(rows.dtype)).sum(1)
        return MixtureOutput(output.view_as(input), aux_loss)

    def _run(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        """Runs rows, sorted by global expert, through their experts on all ranks. Returns them in the same order."""
        if self.ranks == 1:
            return self.experts(rows, counts_E.tolist())
        incoming_E = torch.empty_like(counts_E)
        dist.all_to_all_single(incoming_E, counts_E, group=self.group)
        incoming_RL = incoming_E.view(self.ranks, self.local)
        counts_RL, received_RL = torch.stack([counts_E.view(self.ranks, -1), incoming_RL]).tolist()
        send, receive = [sum(c) for c in counts_RL], [sum(c) for c in received_RL]
        arrived = _Exchange.apply(rows, self.group, send, receive)
        expert_of_row = torch.arange(self.local, device=rows.device).repeat(self.ranks)
        expert_of_row = expert_of_row.repeat_interleave(incoming_E, output_size=sum(receive))
        by_expert = expert_of_row.argsort(stable=True)
        sizes = [sum(column) for column in zip(*received_RL, strict=True)]
        outputs = self.experts(_Permute.apply(arrived, by_expert), sizes)
        return _Exchange.apply(_Permute.apply(outputs, _inverse(by_expert)), self.group, receive, send)
