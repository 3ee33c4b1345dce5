"""The experts of a mixture as one op: two products over groups of rows with an activation between them.

Letters: T rows of a buffer, of which the first ``sum(group_sizes)`` belong to G groups, in order; H columns of the
input and the output; F columns between the products. What :mod:`transformer_plugin.ops.gemm` says of groups holds here.

Bit for bit the output and the gradients of three ops, in one node::

    linear = grouped_linear(input, fc1_weight, group_sizes, fc1_bias, None, *formats)
    hidden = activation(linear, probs)
    grouped_linear(hidden, fc2_weight, group_sizes, fc2_bias, probs if fc2_bias is given, *formats)

For a backward with ``nvfp4`` the group sizes and T are multiples of 16.

With ``slot`` int32 ``[tokens, K]`` and ``source`` int32 ``[T]``, both of
:func:`~transformer_plugin.ops.assign_weighted_slots`, the input is tokens ``[tokens, H]`` and the result one row for
each of them; T is the capacity. A ``dgrad_out`` gets a copy of the gradient. Bit for bit::

    rows = permute_rows(input, slot, source)
    output = unpermute(grouped_mlp(rows, ...), slot, source)

With ``over_ranks`` the experts are distributed over the ranks of a group, each of which calls the op. ``slot [N, K]``,
``source``, ``received`` and ``position`` are those of its :func:`~transformer_plugin.ops.expert_parallel.plan`,
``group_sizes`` the plan's ``tokens_per_expert``, ``probs`` the routing weights float32 ``[tokens, K]``; ``group_name``
and ``timeout_ms`` are as for :func:`~transformer_plugin.ops.expert_parallel.dispatch`. Bit for bit::

    maps = {"expand": False, "received": received, "position": position}
    tokens, row_probs = dispatch(input, probs, slot, source, *group, **maps)
    sums = grouped_mlp(tokens, ..., row_probs, slot, source)
    combine(sums, slot, source, len(input), *group, **maps)

The op is one node. In it the sums over the rows of a received token, of the output and of the gradient of the input,
are part of the exchange and are not stored in between. Every rank makes the same exchanges, also one without tokens or
rows: in the backward those of the gradients that the forward recorded.

Without formats no copy of the rows is made where Hopper's kernels read rows by an index: the products read ``input``,
and in the backward the gradient of the output, where they lie; the tokens are saved once and not once for each expert
that they take.

With a second bias the gradient of ``probs`` is the float32 sum of the bias part and the activation's, in this order.

In ``fp8_block`` and ``mxfp8`` the activation is quantized in the pass that computes it and is never in memory in 16
bits; so is the gradient of the first product, if F is a multiple of 128 and ``fc1_bias`` needs no gradient, which sums
the values before quantization. Without formats the first product and the activation are one kernel on Hopper if the
weight is one tensor, or matrices that lie in memory as one; of other matrices they are two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.activations import Activation, key_of_activation
from transformer_plugin.errors import with_peers
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, layer_keys, listed, listed_or_none

__all__ = [
    "grouped_mlp",
]

_ops = torch.ops.transformer_plugin


def grouped_mlp(
    input: Tensor,
    fc1_weight: Tensors,
    fc2_weight: Tensors,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    input_format: str | Format = "none",
    weight_format: str | Format = "none",
    grad_format: str | Format = "none",
    quantized_fc1_weight: Sequence[Tensor] | None = None,
    quantized_fc2_weight: Sequence[Tensor] | None = None,
    activation: str | Activation = "swiglu",
    max_sms: int = 0,
    expected_rows: int = -1,
    fc1_main_grad: Tensors | None = None,
    fc2_main_grad: Tensors | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    fc1_wgrad_queue: Tensor | None = None,
    fc2_wgrad_queue: Tensor | None = None,
    dgrad_out: Tensor | None = None,
    slot: Tensor | None = None,
    source: Tensor | None = None,
    weight_shard: str = "",
    over_ranks: bool = False,
    group_name: str = "",
    timeout_ms: int = -1,
    received: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """``fc2(activation(fc1(input)) * probs)`` for each group of rows with the group's own weights and biases.

    Args:
        input: ``[T, H]`` float32, bfloat16 or float16.
        fc1_weight, fc2_weight: ``[G, 2F, H]`` (without a gate ``[G, F, H]``) and ``[G, H, F]`` in the dtype of
            ``input``; or G matrices each (:mod:`transformer_plugin.ops.linear`).
        group_sizes, probs: int32 or int64 ``[G]``; float32 ``[T]``, the factors of the activation and ``fc2_bias``.
        fc1_bias, fc2_bias: ``[G, 2F]`` (without a gate ``[G, F]``) and ``[G, H]``, any float dtype.
        input_format, weight_format, grad_format: of both products; for ``mxfp8`` H and F are multiples of 32.
        activation: as in :func:`~transformer_plugin.ops.activation`; the order is that of the rows of ``fc1_weight``.
        others: as for :func:`~transformer_plugin.ops.grouped_linear`, or see above. Both main_grads or neither.

    Returns:
        ``[T, H]``, or ``[tokens, H]``, like ``input``; tail rows zero. Differentiable in input, weights, probs, biases.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.grouped_linear`. Over ranks as ``dispatch``.
    """
    op, function = "grouped_mlp", key_of_activation(activation, "grouped_mlp")
    weights = [listed(fc1_weight, op, "fc1_weight"), listed(fc2_weight, op, "fc2_weight")]
    formats = layer_keys(op, input_format, weight_format, grad_format)
    options = (*formats, quantized_fc1_weight, quantized_fc2_weight, function, max_sms, expected_rows)
    fc1_buffers = listed_or_none(fc1_main_grad, op, "fc1_main_grad")
    buffers = (fc1_buffers, listed_or_none(fc2_main_grad, op, "fc2_main_grad"))
    into = (*buffers, accumulate, weight_grad, fc1_wgrad_queue, fc2_wgrad_queue, dgrad_out, slot, source)
    required = (input, *weights, group_sizes, probs, fc1_bias, fc2_bias)
    ranks = (over_ranks, group_name, timeout_ms, received, position)
    return with_peers(_ops.grouped_mlp.default, *required, *options, *into, weight_shard, *ranks)
