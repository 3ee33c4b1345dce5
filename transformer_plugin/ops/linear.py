"""Linear layers whose operands are rounded to formats, and weights that are rounded once for many of their calls.

Letters are those of :mod:`transformer_plugin.ops.gemm`, and what it says of groups holds here.

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

**Rows over ranks** (sequence parallelism): with ``input_ranks`` above 1 the input ``[n, ..., K]`` of :func:`linear` is
this rank's part of the rows, along the first dimension, over the ranks of the c10d group ``input_group``. The output is
that of all rows, in ascending order of ranks, as if :func:`~transformer_plugin.ops.all_gather` came first; the gradient
of the input is this rank's part of the sum over ranks. The backward keeps this rank's rows and gathers them again. Rows
of formats whose scales belong to rows (FP8 blocks, MXFP8) travel quantized in the forward. Not with ``dgrad_out``.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_PLAIN = (*_NO_FORMATS, True, "none", "", 1)  # what linear takes besides tensors, by default
_PLAIN_GROUPED = (*_NO_FORMATS, 0, -1, True, "none", "")  # and grouped_linear


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
    input_ranks: int = 1,
    input_group: str = "",
) -> Tensor:
    """``input @ weight.T + bias`` with operands in the given formats; ``torch.nn.functional.linear`` by default.

    Args:
        input: ``[..., K]`` float32, bfloat16 or float16 (float64 without formats).
        weight: ``[N, K]`` in the dtype of ``input``.
        bias: ``[N]``, any float dtype.
        input_format, weight_format, grad_format: keys of formats of one family, as a recipe gives them, or
            :class:`~transformer_plugin.formats.Format`s. The input is rounded along its rows for the output and along
            its columns for the weight's gradient; the output's gradient likewise; the weight once when its format is
            the same along both (``bf16``, ``fp8_tensor``, square blocks). In a format without group columns
            (:mod:`transformer_plugin.formats`) the weight's gradient is computed from the input and the output's
            gradient before quantization. What no gradient needs is not computed or kept.
        quantized_weight: what :func:`quantize_weight` made of ``weight`` with these formats: the same bits, without
            quantizing the weight again. ``weight`` is then not read; its gradient is the usual one.
        main_grad, accumulate, weight_grad: where the gradient of the weight goes, see above; ``[N, K]``.
        wgrad_queue: a queue of :mod:`transformer_plugin.ops.deferred_wgrad`: the backward leaves the operands of the
            weight gradient there, and computes none.
        save_original_input: whether the backward keeps ``input`` itself, and quantizes it again with the same bits: no
            more memory where another layer keeps it, too. Not with stochastic rounding of the input.
        dgrad_out: where the backward writes the gradient of ``input``, contiguous, of its sizes and dtype; autograd
            gets that memory. Do not read or write it between the backward and the use of that gradient.
        weight_shard: the key of a weight that is sharded over ranks (:mod:`transformer_plugin.ops.sharded`);
            ``weight``, ``quantized_weight`` and ``main_grad`` are then this rank's part ``[n, K]``. Not with
            ``wgrad_queue``.
        input_ranks, input_group: the ranks over which the rows of ``input`` are sharded, see above.

    Returns:
        ``[..., N]`` in the dtype of ``input``. Differentiable in ``input``, ``weight`` and ``bias``.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree, a format that does not exist,
        formats of different families, a quantized weight that does not fit the weight and the formats; a buffer
        that does not fit, shares memory with an argument or requires a gradient; options of one that is missing.
    """
    no_tensors = quantized_weight is None and main_grad is wgrad_queue is dgrad_out is None
    rest = (input_format, weight_format, grad_format, accumulate, weight_grad, weight_shard, input_ranks)
    if no_tensors and are(rest, _PLAIN):  # strings that are not passed need not be parsed: 0.5 us
        return _ops.linear.default(input, weight, bias)
    formats = layer_keys("linear", input_format, weight_format, grad_format)
    gradient = (main_grad, accumulate, weight_grad, wgrad_queue, save_original_input, dgrad_out, weight_shard)
    options = (*formats, quantized_weight, *gradient, input_ranks, input_group)
    return with_peers(_ops.linear.default, input, weight, bias, *options)


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
) -> Tensor:
    """:func:`linear` for each group of rows with the group's own weight and bias.

    Args:
        input: ``[T, K]`` float32, bfloat16 or float16 (float64 on a CPU without formats).
        weight: ``[G, N, K]`` in the dtype of ``input``, or G matrices, see above.
        group_sizes: int32 or int64 ``[G]``.
        bias: ``[G, N]``, any float dtype.
        bias_scale: float32 ``[T]``, a factor of the bias for each row.
        input_format, weight_format, grad_format: as for :func:`linear`; each group has its own scales.
        quantized_weight: as for :func:`linear`.
        max_sms, expected_rows: as for :func:`~transformer_plugin.ops.grouped_gemm`, for all products of forward and
            backward.
        main_grad, accumulate, weight_grad: see above; ``[G, N, K]`` or G matrices.
        wgrad_queue, save_original_input, dgrad_out: as for :func:`linear`; rows of ``dgrad_out`` past the last group
            become zero.
        weight_shard: the key of a weight that is sharded over ranks (:mod:`transformer_plugin.ops.sharded`); ``weight``
            is then this rank's part ``[n, N, K]`` of the stack, or with ``each`` a list of parts ``[n, K]``.

    On Hopper pass :func:`transformer_plugin.formats.resolve` of the formats of input and gradient: weight gradients of
    groups that begin at any row then need no copy.

    Returns:
        ``[T, N]`` in the dtype of ``input``, tail rows zero. Differentiable in ``input``, ``weight``, ``bias`` and
        ``bias_scale``.

    Raises:
        TypeError: another dtype. ValueError: as :func:`~transformer_plugin.ops.grouped_gemm` and :func:`linear`; square
        blocks for the input or the gradient.
    """
    matrices = listed(weight, "grouped_linear", "weight")
    required = (input, matrices, group_sizes, bias, bias_scale)
    gradient = (listed_or_none(main_grad, "grouped_linear", "main_grad"), accumulate, weight_grad)
    formats = layer_keys("grouped_linear", input_format, weight_format, grad_format)
    no_tensors = quantized_weight is main_grad is wgrad_queue is dgrad_out is None
    rest = (*formats, max_sms, expected_rows, accumulate, weight_grad, weight_shard)
    if no_tensors and are(rest, _PLAIN_GROUPED):
        return _ops.grouped_linear.default(*required)  # what is not passed need not be parsed
    options = (quantized_weight, max_sms, expected_rows)
    others = (wgrad_queue, save_original_input, dgrad_out, weight_shard)
    return with_peers(_ops.grouped_linear.default, *required, *formats, *options, *gradient, *others)


def embedding(indices: Tensor, weight: Tensor, padding_idx: int = -1, weight_shard: str = "") -> Tensor:
    """The rows of a table that indices name: ``torch.nn.functional.embedding``, for a table that may be
    sharded over ranks.

    Args:
        indices: ``[...]`` int32 or int64, of rows. On a GPU others are not noticed by the host, as in torch.
        weight: ``[N, K]``, any float dtype.
        padding_idx: a row without a gradient; -1: none.
        weight_shard: the key of a table that is sharded over ranks (:mod:`transformer_plugin.ops.sharded`);
            ``weight`` is then this rank's part ``[n, K]``.

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
