"""DTensor sharding rules of ``linear``, so that ``parallelize_module`` shards a ``transformer_plugin.nn.Linear``."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Registers the rules of ``linear`` and of ``bias_backward``, for a one-dimensional mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    ops = torch.ops.transformer_plugin
    whole = Replicate()

    def placements(
        out: Any, input: Any, weight: Any, bias: Any, has_bias: bool
    ) -> tuple[list[Any], list[Any]]:
        return [out], [input, weight, bias if has_bias else None, None, None, None, None]

    def linear(
        input: Any,
        weight: Any,
        bias: Any = None,
        input_format: str = "none",
        weight_format: str = "none",
        grad_format: str = "none",
        quantized_weight: Any = None,
    ) -> list[tuple[list[Any], list[Any]]]:
        last, has_bias = input.ndim - 1, bias is not None
        rules = [placements(whole, whole, whole, whole, has_bias)]
        if (input_format, weight_format) != ("none", "none"):
            return rules  # a scale covers the whole matrix, or blocks that a shard may split
        rules.append(placements(Shard(last), whole, Shard(0), Shard(0), has_bias))
        rules.append(placements(Partial(), Shard(last), Shard(1), Partial(), has_bias))
        return rules + [placements(Shard(i), Shard(i), whole, whole, has_bias) for i in range(last)]

    def bias_backward(grad: Any) -> list[tuple[list[Any], list[Any]]]:
        return [([whole], [whole]), ([Shard(0)], [Shard(1)]), ([Partial()], [Shard(0)])]

    register_sharding(ops.linear.default)(linear)
    register_sharding(ops.bias_backward.default)(bias_backward)
