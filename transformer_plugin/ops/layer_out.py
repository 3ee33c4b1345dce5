"""Layers that write their output into a buffer of the caller, for example one in memory that other ranks read.

Each is the layer without ``_out``, with its arguments, gradients and bits; ``out`` follows the required arguments. It
is contiguous, of the sizes and the dtype of the output, and shares memory with no other argument. After the call
``out`` is the output: where a gradient is needed, ``out.grad_fn`` is the layer's node. So ``out`` must not have a
history, nor be a view: pass ``buffer.detach()``, a new tensor in the same memory, in each call. A backward that finds
that memory written again since another layer kept it raises torch's error about in-place operations.

Rows of grouped layers past the last group become zero, as in what the layers return.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.activations import Activation, key_of_activation
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, layer_keys, listed, listed_or_none

__all__ = [
    "grouped_linear_out",
    "grouped_mlp_out",
    "linear_out",
]

_ops = torch.ops.transformer_plugin


def linear_out(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    input_format: str | Format = "none",
    weight_format: str | Format = "none",
    grad_format: str | Format = "none",
    quantized_weight: Sequence[Tensor] | None = None,
    main_grad: Tensor | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    wgrad_queue: Tensor | None = None,
    save_original_input: bool = False,
    dgrad_out: Tensor | None = None,
) -> None:
    """:func:`~transformer_plugin.ops.linear` into ``out``, ``[..., N]``.

    Args: as for :func:`~transformer_plugin.ops.linear`, and ``out``, see above.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.linear`; a buffer that does not fit. Nothing is written
        then.
    """
    formats = layer_keys("linear_out", input_format, weight_format, grad_format)
    into = (main_grad, accumulate, weight_grad, wgrad_queue, save_original_input, dgrad_out)
    _ops.linear_out.default(input, weight, out, bias, *formats, quantized_weight, *into)


def grouped_linear_out(
    input: Tensor,
    weight: Tensors,
    group_sizes: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    input_format: str | Format = "none",
    weight_format: str | Format = "none",
    grad_format: str | Format = "none",
    quantized_weight: Sequence[Tensor] | None = None,
    max_sms: int = 0,
    expected_rows: int = -1,
    main_grad: Tensors | None = None,
    accumulate: bool = True,
    weight_grad: str = "none",
    wgrad_queue: Tensor | None = None,
    save_original_input: bool = False,
    dgrad_out: Tensor | None = None,
) -> None:
    """:func:`~transformer_plugin.ops.grouped_linear` into ``out``, ``[T, N]``.

    Args: as for :func:`~transformer_plugin.ops.grouped_linear`, and ``out``, see above.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.grouped_linear`; a buffer that does not fit. Nothing is
        written then.
    """
    op = "grouped_linear_out"
    required = (input, listed(weight, op, "weight"), group_sizes, out, bias, bias_scale)
    options = (quantized_weight, max_sms, expected_rows, listed_or_none(main_grad, op, "main_grad"))
    into = (accumulate, weight_grad, wgrad_queue, save_original_input, dgrad_out)
    formats = layer_keys(op, input_format, weight_format, grad_format)
    _ops.grouped_linear_out.default(*required, *formats, *options, *into)


def grouped_mlp_out(
    input: Tensor,
    fc1_weight: Tensors,
    fc2_weight: Tensors,
    group_sizes: Tensor,
    probs: Tensor,
    out: Tensor,
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
) -> None:
    """:func:`~transformer_plugin.ops.grouped_mlp` into ``out``, ``[T, H]``; with ``slot`` copied into it.

    Args: as for :func:`~transformer_plugin.ops.grouped_mlp`, and ``out``, see above.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.grouped_mlp`; a buffer that does not fit. Nothing is
        written then.
    """
    op = "grouped_mlp_out"
    weights = [listed(w, op, f"fc{i}_weight") for i, w in enumerate((fc1_weight, fc2_weight), 1)]
    required = (input, *weights, group_sizes, probs, out, fc1_bias, fc2_bias)
    function = key_of_activation(activation, op)
    options = (quantized_fc1_weight, quantized_fc2_weight, function, max_sms, expected_rows)
    buffers = [
        listed_or_none(b, op, f"fc{i}_main_grad") for i, b in enumerate((fc1_main_grad, fc2_main_grad), 1)
    ]
    into = (*buffers, accumulate, weight_grad, fc1_wgrad_queue, fc2_wgrad_queue, dgrad_out, slot, source)
    formats = layer_keys(op, input_format, weight_format, grad_format)
    _ops.grouped_mlp_out.default(*required, *formats, *options, *into)
