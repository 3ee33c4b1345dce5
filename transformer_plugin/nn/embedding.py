"""Embedding: torch.nn.Embedding whose table may be cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.nn._dtensor import is_dtensor, run_embedding
from transformer_plugin.nn._module import layer_forward, registered
from transformer_plugin.nn._sharded_weight import ShardedWeightMixin


class Embedding(ShardedWeightMixin, torch.nn.Embedding):
    """The rows of a table ``[N, K]`` that indices name.

    A drop-in replacement for :class:`torch.nn.Embedding`, of which it is a subclass: the same constructor, initial
    values, parameters and ``state_dict``. :func:`transformer_plugin.parallel.shard_` cuts its table over ranks. It
    has no ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(self, name) not in (None, False):
                raise ValueError(
                    f"transformer_plugin::Embedding: argument '{name}': expected its default, got "
                    f"{getattr(self, name)}. Use torch.nn.Embedding for that."
                )

    @layer_forward
    def forward(self, input: Tensor) -> Tensor:
        """Returns ``[..., K]`` for int32 or int64 indices ``[...]``, differentiable in the table."""
        weight = registered(self, self._parameters, "weight")
        padding = -1 if self.padding_idx is None else self.padding_idx
        if is_dtensor(weight):
            return run_embedding(self, input, weight, padding)
        return ops.embedding(input, weight, padding, self._shard_key())
