"""Embedding: torch.nn.Embedding whose table may be sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import check_dtype, typed
from transformer_plugin.nn._dtensor import is_dtensor, run_embedding
from transformer_plugin.nn._module import layer_forward, registered
from transformer_plugin.nn._shardable import ShardableModule
from transformer_plugin.nn._tensor_parallel import (
    SlicePlan,
    TensorParallel,
    initialize_full_params,
    shard_parameters,
    tensor_parallel_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Embedding(ShardableModule, torch.nn.Embedding):
    """The rows of a table ``[N, K]`` that indices name.

    A drop-in replacement for :class:`torch.nn.Embedding`, of which it is a subclass: the same constructor, initial
    values, parameters and ``state_dict``. :func:`transformer_plugin.parallel.shard_` shards its table over ranks that
    look up other indices. It has no ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.

    Args:
        arguments, options: those of ``torch.nn.Embedding``.
        tp_group: a process group or a mesh of one dimension: tensor parallelism over ranks with the same indices, see
            :doc:`/tensor-parallel`. Each rank has ``ceil(N / R)`` rows of the table, zeros after the last, and
            ``num_embeddings`` of the module is that number.
        sequence_parallel: whether each rank gets only some of the rows, the first dimension, of the output;
            otherwise all ranks get all.
    """

    @typed
    def __init__(
        self,
        *arguments: Any,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        mode = "row" if sequence_parallel or tp_group is not None else None
        parallel = tensor_parallel_of("Embedding", mode, tp_group, sequence_parallel, ("row",))
        super().__init__(*arguments, **options)
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(self, name) not in (None, False):
                raise ValueError(
                    f"transformer_plugin::Embedding: argument '{name}': expected its default, got "
                    f"{getattr(self, name)}. Use torch.nn.Embedding for that."
                )
        if parallel is not None:
            self._divide(parallel)

    def _divide(self, parallel: TensorParallel) -> None:
        """Keeps this rank's rows."""
        shard_parameters(self, parallel, {"weight": SlicePlan(0, "num_embeddings", pads=True)})
        self.num_embeddings = self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Fresh initial values, as in :class:`torch.nn.Embedding`."""
        with initialize_full_params(self):
            super().reset_parameters()

    @layer_forward
    def forward(self, input: Tensor) -> Tensor:
        """Returns ``[..., K]`` for int32 or int64 indices ``[...]``, differentiable in the table."""
        weight = registered(self, self._parameters, "weight")
        padding = -1 if self.padding_idx is None else self.padding_idx
        if is_dtensor(weight):
            return run_embedding(self, input, weight, padding)
        if self.tensor_parallel is None:
            return ops.embedding(input, weight, padding, self._weight_source.shard_key(self))
        return self.tensor_parallel.output(self._own_rows(input, weight, padding), None)

    def _own_rows(self, input: Tensor, weight: Tensor, padding: int) -> Tensor:
        """The rows that this rank has, and zeros for those of the others."""
        self._check_slices()
        # Before the first row is subtracted, which makes int64 of bool.
        check_dtype("embedding", "indices", input, torch.int64, torch.int32)
        slices = self.tensor_slices["weight"]
        first, rows = next(iter(slices.own), (0, 0))
        _check_range(input, slices.size)
        is_elsewhere = (input < first) | (input >= first + rows)
        own = (input - first).masked_fill(is_elsewhere, 0)
        own_padding = padding - first if first <= padding < first + rows else -1
        found = ops.embedding(own, weight, own_padding, self._weight_source.shard_key(self))
        return found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """As in torch, and the tensor parallelism where there is one."""
        return super().extra_repr() + str(self.tensor_parallel or "")


def _check_range(indices: Tensor, rows: int) -> None:
    """On a CPU. On a GPU an index outside of the table finds zeros, on every rank."""
    if torch.compiler.is_compiling() or indices.device.type != "cpu" or not indices.numel():
        return
    least, most = indices.aminmax()
    if int(least) < 0 or int(most) >= rows:
        raise ValueError(
            f"transformer_plugin::embedding: argument 'indices': expected rows of the table, 0 to {rows - 1}, got "
            f"{int(least)} to {int(most)}. Pass indices of rows."
        )
