"""DTensor sharding rules of ops that are called with ``DTensor`` s. The layers call their ops with plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Layouts of the outputs and of the arguments of an op, of which torch chooses.
Rules = list[tuple[list[Any], list[Any]]]


def register() -> None:
    """Registers the rules, for one dimension of a mesh."""
    ops = torch.ops.transformer_plugin
    _register(ops.linear, _linear)
    _register(ops.gemm, _gemm)
    _register(ops.bias_backward, _bias_backward)
    _register(ops.activation, _activation)
    _register(ops.activation_backward, _activation_backward)
    _register(ops.rms_norm, _rms_norm)
    _register(ops.rms_norm_forward, _rms_norm_forward)
    _register(ops.rms_norm_backward, _rms_norm_backward)
    _register(ops.layer_norm, _layer_norm)
    _register(ops.layer_norm_forward, _layer_norm_forward)
    _register(ops.layer_norm_backward, _layer_norm_backward)


def _register(op: Any, rules: Callable[..., Rules]) -> None:
    """Registers ``rules``, which is called with the arguments of ``op``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op.default)(rules)
    # torch reuses a choice for equal arguments. It compares only those that are tensors, and all from this one on: also
    # which tensors are None, and numbers.
    kinds = [str(argument.type) for argument in op.default._schema.arguments]
    first = next((i for i, kind in enumerate(kinds) if kind != "Tensor"), len(kinds))
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[op.default] = RuntimeSchemaInfo(first, needs_pytree=True)


def _linear(
    input: Any,
    weight: Any,
    bias: Any = None,
    input_format: str = "none",
    weight_format: str = "none",
    *_: Any,
) -> Rules:
    from torch.distributed.tensor import Partial, Replicate, Shard

    replicated, last = Replicate(), input.ndim - 1

    def rule(out: Any, of_input: Any, of_weight: Any, of_bias: Any) -> tuple[list[Any], list[Any]]:
        return [out], [of_input, of_weight] + ([] if bias is None else [of_bias])

    rules = [rule(replicated, replicated, replicated, replicated)]
    if (input_format, weight_format) != ("none", "none"):
        return rules  # a scale covers the full matrix, or blocks that a shard may split
    rules.append(rule(Shard(last), replicated, Shard(0), Shard(0)))
    rules.append(rule(Partial(), Shard(last), Shard(1), Partial()))
    return rules + [rule(Shard(i), Shard(i), replicated, replicated) for i in range(last)]


def _gemm(a: Any, b: Any, bias: Any = None, transpose_b: bool = True, *others: Any) -> Rules:
    """Of unquantized operands alone; gradients of ``linear`` are such products. Scales, which are lists, are of
    matrices or blocks, so that quantized operands are replicated."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    given = [each for one in (bias, *others) for each in (one if isinstance(one, list | tuple) else [one])]
    tensors = [each for each in given if hasattr(each, "placements") or hasattr(each, "tensor_meta")]
    outputs, terms = (0, 1) if transpose_b else (1, 0)
    rules: Rules = [([Replicate()], [Replicate()] * (2 + len(tensors)))]
    if not tensors:
        rules.append(([Shard(0)], [Shard(0), Replicate()]))
        rules.append(([Shard(1)], [Replicate(), Shard(outputs)]))
        rules.append(([Partial()], [Shard(1), Shard(terms)]))
    return rules


def _bias_backward(grad: Any) -> Rules:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(1)]), ([Partial()], [Shard(0)])]


def _by_rows(outputs: list[str], arguments: list[tuple[str, Any]]) -> Rules:
    """Rules of an op on rows: all tensors are replicated, or those of rows are sharded along the same dimension.

    A kind is ``"rows"``, ``"replicated"``, or ``"sum"`` over the rows. The first argument has all dimensions.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    given = [kind for kind, tensor in arguments if tensor is not None]
    rules = []
    for i in (None, *range(arguments[0][1].ndim - 1)):
        layout = Replicate() if i is None else Shard(i)
        layouts = {"rows": layout, "replicated": Replicate(), "sum": Replicate() if i is None else Partial()}
        rules.append(([layouts[kind] for kind in outputs], [layouts[kind] for kind in given]))
    return rules


def _sum_of(parameter: Any) -> str:
    """The kind of a parameter's gradient; of none, a tensor without elements."""
    return "replicated" if parameter is None else "sum"


def _activation(input: Any, probs: Any = None, group_sizes: Any = None, activation: str = "swiglu") -> Rules:
    rules = _by_rows(["rows"], [("rows", input), ("rows", probs), ("replicated", group_sizes)])
    return rules if group_sizes is None else rules[:1]  # sizes count the rows of all ranks


def _activation_backward(
    grad: Any, input: Any, probs: Any = None, group_sizes: Any = None, activation: str = "swiglu"
) -> Rules:
    of_probs = "replicated" if probs is None else "rows"
    arguments = [("rows", grad), ("rows", input), ("rows", probs), ("replicated", group_sizes)]
    rules = _by_rows(["rows", of_probs], arguments)
    return rules if group_sizes is None else rules[:1]


def _rms_norm(input: Any, weight: Any, *_: Any) -> Rules:
    return _by_rows(["rows"], [("rows", input), ("replicated", weight)])


def _rms_norm_forward(input: Any, weight: Any, *_: Any) -> Rules:
    return _by_rows(["rows"] * 2, [("rows", input), ("replicated", weight)])


def _rms_norm_backward(grad: Any, input: Any, weight: Any, rstd: Any, *_: Any) -> Rules:
    arguments = [("rows", grad), ("rows", input), ("replicated", weight), ("rows", rstd)]
    return _by_rows(["rows", _sum_of(weight)], arguments)


def _layer_norm(input: Any, weight: Any, bias: Any, *_: Any) -> Rules:
    return _by_rows(["rows"], [("rows", input), ("replicated", weight), ("replicated", bias)])


def _layer_norm_forward(input: Any, weight: Any, bias: Any, *_: Any) -> Rules:
    return _by_rows(["rows"] * 3, [("rows", input), ("replicated", weight), ("replicated", bias)])


def _layer_norm_backward(
    grad: Any,
    input: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    zero_centered: bool = False,
    has_bias: bool = True,
) -> Rules:
    arguments = [("rows", grad), ("rows", input), ("replicated", weight), ("rows", mean), ("rows", rstd)]
    return _by_rows(["rows", _sum_of(weight), "sum" if has_bias else "replicated"], arguments)
