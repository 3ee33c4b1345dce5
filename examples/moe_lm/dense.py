"""Dense layers: torch's in plain PyTorch, otherwise this package's, which ranks may share by tensor parallelism.

R tensor-parallel ranks have the same B sequences and one loss together. Between layers a rank has B / R of the
sequences, which a column layer gathers and a row layer divides. Parameters have the same names in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DenseLayers:
    """Makes layers.

    Args:
        reference: whether they are torch's.
        tensor_ranks: the ranks that share each layer; None: every rank has all of it.
        device: of the parameters.
    """

    reference: bool
    tensor_ranks: DeviceMesh | None
    device: torch.device | str

    @property
    def size(self) -> int:
        """The number of ranks that share a layer."""
        return 1 if self.tensor_ranks is None else self.tensor_ranks.size()

    @property
    def sequence_parallel(self) -> dict[str, Any]:
        """Options of layers of this package: each rank has some of the sequences, or of what is read from them."""
        if self.tensor_ranks is None:
            return {}
        return {"tp_group": self.tensor_ranks, "sequence_parallel": True}

    def embedding(self, rows: int, dim: int) -> nn.Embedding:
        """From all sequences ``[B, T]`` to this rank's ``[B / R, T, D]``."""
        if self.reference:
            return nn.Embedding(rows, dim, device=self.device)
        import transformer_plugin.nn as tpnn

        return tpnn.Embedding(rows, dim, device=self.device, **self.sequence_parallel)

    def norm(self, dim: int) -> nn.RMSNorm:
        """Of this rank's sequences. torch's if these are all sequences."""
        if self.tensor_ranks is None:
            return nn.RMSNorm(dim, device=self.device)
        import transformer_plugin.nn as tpnn

        return tpnn.RMSNorm(dim, eps=None, device=self.device, **self.sequence_parallel)

    def column(self, inputs: int, *sections: int, **options: Any) -> nn.Linear:
        """From this rank's sequences to an equal part of each section of the outputs, for all sequences."""
        if self.tensor_ranks is not None:
            options |= {"parallel_mode": "column", "sections": sections if len(sections) > 1 else ()}
        return self._linear(inputs, sum(sections), options)

    def row(self, inputs: int, outputs: int) -> nn.Linear:
        """From a part of the columns of all sequences to all columns of this rank's."""
        return self._linear(inputs, outputs, {} if self.tensor_ranks is None else {"parallel_mode": "row"})

    def _linear(self, inputs: int, outputs: int, options: dict[str, Any]) -> nn.Linear:
        if self.reference:
            return nn.Linear(inputs, outputs, bias=False, device=self.device)
        import transformer_plugin.nn as tpnn

        options |= self.sequence_parallel
        return tpnn.Linear(inputs, outputs, bias=False, device=self.device, **options)


def cross_entropy(logits: Tensor, targets: Tensor, classes: int, tensor_ranks: DeviceMesh | None) -> Tensor:
    """The mean cross entropy, float32, the same on all tensor-parallel ranks, of which each has some of the columns.

    No rank has full logits: the ranks exchange a few numbers for each row.
    """
    if tensor_ranks is None:
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    from transformer_plugin import ops

    group = tensor_ranks.size(), tensor_ranks.get_group().group_name
    return ops.vocab_parallel_cross_entropy(logits, targets, classes, *group).mean()


def full_logits(logits: Tensor, classes: int, tensor_ranks: DeviceMesh | None) -> Tensor:
    """The columns of all tensor-parallel ranks, without a gradient."""
    if tensor_ranks is None:
        return logits
    from transformer_plugin import ops

    columns = logits.detach().movedim(-1, 0).contiguous()
    gathered = ops.all_gather(columns, tensor_ranks.size(), tensor_ranks.get_group().group_name)
    return gathered[:classes].movedim(0, -1)
