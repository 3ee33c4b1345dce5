"""Linear layers whose operands are rounded to formats, and weights that are rounded once for many of their calls.

Letters are those of :mod:`transformer_plugin.ops.gemm`, and what it says of groups holds here.

**Formats** are keys of one family, as a recipe gives them; each group has its own scales. The input is rounded along
its rows for the output and along its columns for the weight's gradient; the output's gradient likewise; the weight once
when its format is the same along both (``bf16``, ``fp8_tensor``, square blocks). In a format without group columns
(:mod:`transformer_plugin.formats`) the weight's gradient is computed from the input and the output's gradient before
quantization. What no gradient needs is not computed or kept. On Hopper pass :func:`transformer_plugin.formats.resolve`
of the formats of input and gradient of a grouped layer: weight gradients of groups that begin at any row then need no
copy.

The **weight** of a grouped layer is one tensor ``[G, N, K]``, or a sequence of 1 to 1024 matrices ``[N, K]`` at any
addresses, each with its own gradient. Matrices are never copied into one tensor: unquantized, the products read them
where they are; quantized, they are written into one tensor of quantized data, the bytes that their stack would give.
(With ``row_scaled`` and ``sr`` each is quantized alone, and the quantized data is copied into one tensor; ``sr`` then
draws other numbers.) A list has one quantized weight, that of the stack.

A **main_grad** is a buffer for the gradient of the weight: the backward adds the gradient to it, in FP32 and rounded
once, in place of returning it. It is float32 or bfloat16 (float64 with a float64 weight), of the sizes of the weight;
of a grouped layer also a sequence of G matrices of one dtype and one stride of rows, however the weight is passed. Rows
may be strided, as those of a view of a bucket. It is written through its pointer: its autograd version does not change,
so that several forwards may come before their backwards. It stays untouched where the weight needs no gradient, and for
each matrix of a list that needs none. A backward with a ``main_grad`` cannot be differentiated.

- ``accumulate=False`` writes over the buffer, whatever it holds; a group without rows becomes zero.
- ``weight_grad`` is what autograd gets as the gradient of the weight: ``"none"``; or, for frameworks whose hooks want a
  ``.grad`` that they discard, ``"empty"``, an uninitialized tensor like the weight, or ``"zeros"``.

On CUDA, :func:`linear` without formats adds in one GEMM of torch if ``main_grad`` has the dtype of the operands or is
float32, otherwise through a float32 temporary; grouped products and those of quantized operands add in the epilogue of
the kernels of this package. ``torch.compile`` gives the bits of eager. The code that Inductor makes does not change
autograd versions either; the backend ``aot_eager`` copies a new tensor into the buffer, which does, so there each
forward must be followed by its backward. A buffer that begins later in its memory, as a view of a bucket does, is
compiled with a temporary of its size.

**Delayed scaling**: with a ``scale`` the operands are quantized to ``fp8_tensor`` with the scales of earlier steps
(:mod:`transformer_plugin.ops.delayed_scaling`): one state tensor for the input, the weight and the gradient of the
output, in this order, of a grouped layer for each group. ``amax``, of the same size, collects amaxes: in training it is
raised to those of input and weight in the forward, unless activation checkpointing recomputes it inside a backward, and
to that of the gradient in the backward. It is written through its pointer: its autograd version does not change, and
changes of it between forward and backward are no error. The backward reads ``scale`` again, so pass the copy that
:func:`~transformer_plugin.ops.update_delayed_scale_` returns. Formats left out are ``fp8_tensor:e4m3``, that of the
gradient ``fp8_tensor:e5m2``. Not with a ``quantized_weight``, a ``main_grad``, a queue, buffers,
``save_original_input`` and ``sequence_parallel_size``. The op is then its overload ``scaled``, which writes ``amax``;
of a grouped layer the state is ``[3 * G]``: the input's groups, the weights, the gradient's groups.

**Rows over ranks** (sequence parallelism): with ``sequence_parallel_size`` above 1 the input ``[n, ..., K]`` of
:func:`linear` is this rank's rows, along the first dimension, over the ranks of the c10d group
``sequence_parallel_group``. The output is that of all rows, in ascending order of ranks, as if
:func:`~transformer_plugin.ops.all_gather` came first; the gradient of the input is this rank's rows of the sum over
ranks. The backward keeps this rank's rows and gathers them again. Rows of formats whose scales belong to rows (FP8
blocks, MXFP8) travel quantized in the forward. Not with ``dgrad_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.errors import with_peers
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import (
    Tensors,
    are,
    buffers,
    layer_keys,
    listed,
    listed_or_none,
    weights,
)

__all__ = [
    "embedding",
    "grouped_linear",
    "linear",
    "quantize_weight",
    "quantize_weight_out",
]

_ops = torch.ops.transformer_plugin
_NO_FORMATS = ("none", "none", "none")
_DELAYED_FORMATS = ("fp8_tensor:e4m3", "fp8_tensor:e4m3", "fp8_tensor:e5m2")
#: Options that delayed scaling does not have, and what leaves each out.
_NOT_DELAYED: dict[str, Any] = {
    "quantized_weight": None,
    "main_grad": None,
    "accumulate": True,
    "weight_grad": "none",
    "wgrad_queue": None,
    "save_original_input": False,
    "dgrad_out": None,
    "sequence_parallel_size": 1,
}
_PLAIN = (*_NO_FORMATS, True, "none", "", 1)  # what linear takes besides tensors, by default
_PLAIN_GROUPED = (*_NO_FORMATS, 0, -1, True, "none", "")  # and grouped_linear


def _delayed_keys(
    op: str, scale: Tensor | None, formats: Sequence[str | Format], *options: Any
) -> tuple[str, ...]:
    """The keys of the formats of delayed scaling, for those that were left out too. Refuses the options of ``linear``
    that delayed scaling does not have: ``options`` in the order of ``_NOT_DELAYED``."""
    if scale is None:
        raise ValueError(
            f"transformer_plugin::{op}: argument 'amax': expected None without 'scale', got a tensor. Pass both."
        )
    for (name, none), value in zip(_NOT_DELAYED.items(), options, strict=False):
        if value is not none and (type(value) is not type(none) or value != none):
            got = repr(value) if none is not None else "another value"
            raise ValueError(
                f"transformer_plugin::{op}: argument '{name}': expected {none!r} with 'scale', got {got}. Leave it "
                "out, or leave out 'scale'."
            )
    keys = zip(layer_keys(op, *formats), _DELAYED_FORMATS, strict=True)
    return tuple(otherwise if key == "none" else key for key, otherwise in keys)


def linear(
    input: Tensor,
    weight: Tensor,
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
    weight_shard: str = "",
    sequence_parallel_size: int = 1,
    sequence_parallel_group: str = "",
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` with operands in the given formats; ``torch.nn.functional.linear`` by default.

    Args:
        input: ``[..., K]`` float32, bfloat16 or float16 (float64 without formats).
        weight, bias: ``[N, K]`` in the dtype of ``input``; ``[N]``, any float dtype.
        input_format, weight_format, grad_format: keys or :class:`~transformer_plugin.formats.Format`, see above.
        quantized_weight: what :func:`quantize_weight` made of ``weight`` with these formats: the same bits, without
            quantizing the weight again. ``weight`` is then not read; its gradient is the usual one.
        main_grad, accumulate, weight_grad: where the gradient of the weight goes, see above; ``[N, K]``.
        wgrad_queue: where the backward leaves the operands of the weight gradient
            (:mod:`transformer_plugin.ops.deferred_wgrad`).
        save_original_input: whether the backward keeps ``input`` itself, and quantizes it again with the same bits.
            Less memory where another layer keeps it, too. Not with stochastic rounding of the input.
        dgrad_out: where the backward writes the gradient of ``input``, contiguous, of its sizes and dtype; autograd
            gets that memory. Do not read or write it between the backward and the use of that gradient.
        weight_shard: the key of a weight that is sharded over ranks (:mod:`transformer_plugin.ops.sharded`), of which
            ``weight``, ``quantized_weight`` and ``main_grad`` are this rank's ``[n, K]``. Not with ``wgrad_queue``.
        sequence_parallel_size, sequence_parallel_group: the ranks over which the rows of ``input`` are sharded,
            see above.
        scale, amax: float32 ``[3]``, contiguous: delayed scaling, see above.

    Returns:
        ``[..., N]`` in the dtype of ``input``. Differentiable in ``input``, ``weight`` and ``bias``.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree; formats that do not exist or go
        together; a quantized weight or a buffer that does not fit; a buffer that shares memory or requires a gradient.
    """
    gradient = (main_grad, accumulate, weight_grad, wgrad_queue, save_original_input, dgrad_out)
    formats = (input_format, weight_format, grad_format)
    if scale is not None or amax is not None:
        keys = _delayed_keys("linear", scale, formats, quantized_weight, *gradient, sequence_parallel_size)
        return with_peers(_ops.linear.scaled, input, weight, scale, amax, bias, *keys, weight_shard)
    no_tensors = quantized_weight is None and main_grad is wgrad_queue is dgrad_out is None
    if no_tensors and are(
        (*formats, accumulate, weight_grad, weight_shard, sequence_parallel_size), _PLAIN
    ):  # strings that are not passed need not be parsed: 0.5 us
        return _ops.linear.default(input, weight, bias)
    options = (quantized_weight, *gradient, weight_shard, sequence_parallel_size, sequence_parallel_group)
    return with_peers(_ops.linear.default, input, weight, bias, *layer_keys("linear", *formats), *options)


def grouped_linear(
    input: Tensor,
    weight: Tensors,
    group_sizes: Tensor,
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
    weight_shard: str = "",
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """:func:`linear` for each group of rows with the group's own weight and bias.

    Args:
        input, group_sizes: ``[T, K]`` float32, bfloat16 or float16 (float64 on a CPU without formats); int ``[G]``.
        weight: ``[G, N, K]`` in the dtype of ``input``, or G matrices, see above.
        bias, bias_scale: ``[G, N]``, any float dtype; float32 ``[T]``, a factor of the bias for each row.
        input_format, weight_format, grad_format, quantized_weight: as for :func:`linear`.
        max_sms, expected_rows: as for :func:`~transformer_plugin.ops.grouped_gemm`, for all products.
        main_grad, accumulate, weight_grad: see above; ``[G, N, K]`` or G matrices.
        wgrad_queue, save_original_input, dgrad_out: as for :func:`linear`; tail rows of ``dgrad_out`` become zero.
        weight_shard: as for :func:`linear`, of ``[n, N, K]``, or with ``list`` of a list of ``[n, K]``.
        scale, amax: as for :func:`linear`; ``[3 * G]``, and ``weight`` is one tensor.

    Returns:
        ``[T, N]`` in the dtype of ``input``, tail rows zero. Differentiable in all floats but ``scale`` and ``amax``.

    Raises:
        TypeError, ValueError: as :func:`~transformer_plugin.ops.grouped_gemm` and :func:`linear`; square blocks.
    """
    formats = (input_format, weight_format, grad_format)
    rest = (wgrad_queue, save_original_input, dgrad_out)
    if scale is not None or amax is not None:
        options = (quantized_weight, main_grad, accumulate, weight_grad, *rest)
        keys = _delayed_keys("grouped_linear", scale, formats, *options)
        operands = (input, weight, group_sizes, scale, amax, bias, bias_scale)
        return with_peers(_ops.grouped_linear.scaled, *operands, *keys, max_sms, expected_rows, weight_shard)
    required = (input, listed(weight, "grouped_linear", "weight"), group_sizes, bias, bias_scale)
    into = (listed_or_none(main_grad, "grouped_linear", "main_grad"), accumulate, weight_grad)
    keys = layer_keys("grouped_linear", *formats)
    no_tensors = quantized_weight is main_grad is wgrad_queue is dgrad_out is None
    others = (*keys, max_sms, expected_rows, accumulate, weight_grad, weight_shard)
    if no_tensors and are(others, _PLAIN_GROUPED):
        return _ops.grouped_linear.default(*required)  # what is not passed need not be parsed
    first = (*required, *keys, quantized_weight, max_sms, expected_rows)
    return with_peers(_ops.grouped_linear.default, *first, *into, *rest, weight_shard)


def embedding(indices: Tensor, weight: Tensor, padding_idx: int = -1, weight_shard: str = "") -> Tensor:
    """The rows of a table that indices name: ``torch.nn.functional.embedding``, for a table that may be
    sharded over ranks.

    Args:
        indices: ``[...]`` int32 or int64, of rows. On a GPU others are not noticed by the host, as in torch.
        weight: ``[N, K]``, any float dtype.
        padding_idx: a row without a gradient; -1: none.
        weight_shard: the key of a table that is sharded over ranks (:mod:`transformer_plugin.ops.sharded`);
            ``weight`` is then this rank's shard ``[n, K]``.

    Returns:
        ``[..., K]`` in the dtype of ``weight``. Differentiable in ``weight``.

    Raises:
        TypeError: another dtype. ValueError: another number of dimensions, a ``padding_idx`` outside of the table, or,
        on a CPU, such an index.
    """
    return with_peers(_ops.embedding.default, indices, weight, padding_idx, weight_shard)


def quantize_weight(
    weight: Tensors, input_format: str | Format, weight_format: str | Format, grad_format: str | Format
) -> list[Tensor]:
    """The quantized weight of :func:`linear`, :func:`grouped_linear` and :func:`~transformer_plugin.ops.grouped_mlp`.

    Make it once after an optimizer step and pass it as ``quantized_weight`` to every call until the next.

    Args:
        weight: ``[N, K]`` or ``[G, N, K]``, float32, bfloat16 or float16, any strides; or G matrices ``[N, K]``,
            quantized into the tensors that their stack would give, without making it. For ``mxfp8`` K is a multiple of
            32, for ``nvfp4`` of 16; along columns N of 16 for ``nvfp4``.
        input_format, weight_format, grad_format: as the layer takes them, of any family but ``none``.

    Returns:
        ``[data, scale_inv]``, for ``nvfp4`` ``[data, scale_inv, amax]``, for ``bf16`` ``[data]``, as
        :func:`~transformer_plugin.ops.quantize` gives them. Where the data gradient needs the weight column-wise, those
        of :func:`~transformer_plugin.ops.quantize` columnwise follow: with blocks that are not square, and on Hopper,
        whose kernels need the reduction dimension contiguous, in all formats but ``bf16``. Fresh, contiguous, and not
        differentiable. The number depends on the device. Where both directions have the same values
        (``fp8_tensor``, square blocks), layers take rows alone or both on every device.

    Under ``torch.inference_mode()`` a tracer cannot know the device: compile calls under ``torch.no_grad()``.

    Raises:
        TypeError: another dtype. ValueError: other dimensions, a width that the format does not take, formats of
        different families, ``none``.
    """
    return _ops.quantize_weight.default(
        weights(weight, "quantize_weight"),
        *layer_keys("quantize_weight", input_format, weight_format, grad_format),
    )


def quantize_weight_out(
    weight: Tensors,
    input_format: str | Format,
    weight_format: str | Format,
    grad_format: str | Format,
    out: Sequence[Tensor],
    noop: Tensor | None = None,
) -> None:
    """:func:`quantize_weight` into given tensors, so that a CUDA graph may hold their addresses.

    Args:
        weight, input_format, weight_format, grad_format: as in :func:`quantize_weight`.
        out: what that returns, of an earlier call for example: as many contiguous tensors of these sizes and dtypes on
            the device of ``weight``. They must not share memory with each other or with ``weight``. Of several matrices
            the quantized data is made first, and copied.
        noop: float32 ``[1]`` on the device of ``weight``, read when the kernels run: with 1 every byte stays.

    The tensors' autograd versions change: the backward of an earlier forward that used them raises.

    Raises:
        TypeError, ValueError: as :func:`quantize_weight`; tensors that do not fit. Nothing is written then.
    """
    keys = layer_keys("quantize_weight_out", input_format, weight_format, grad_format)
    _ops.quantize_weight_out.default(
        weights(weight, "quantize_weight_out"), *keys, buffers(out, "quantize_weight_out"), noop
    )
