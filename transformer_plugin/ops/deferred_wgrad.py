"""Weight gradients that are computed later than their backward, as pipeline schedules with zero bubbles want them.

A layer's op with a ``wgrad_queue`` computes the gradients of its input and its biases in the backward, and leaves the
operands of the weight gradient in the queue: the columnwise quantized gradient and input, or the unquantized ones.
:func:`run_deferred_wgrads` computes the gradients of all backwards since its last call. The modules do this with
``delay_wgrad_compute=True``.

A queue belongs to one weight. The ops have it as an int64 scalar on the CPU whose value is its id: a copy of the scalar
is the same queue. In eager code the operands are kept as they are, without a copy: they must not change before
they are used, which is checked where torch counts versions. In compiled code they are copied, because Inductor reuses
their memory. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import Tensors, key_of, listed, listed_or_none, queue_id

__all__ = [
    "count_deferred_wgrads",
    "defer_wgrad",
    "new_wgrad_queue",
    "release_wgrad_queue",
    "run_deferred_wgrads",
]

_ops = torch.ops.transformer_plugin


def new_wgrad_queue() -> Tensor:
    """Makes an empty queue.

    Returns:
        int64, a scalar on the CPU: the ``wgrad_queue`` of :func:`~transformer_plugin.ops.linear` and the other layers.
        Call :func:`release_wgrad_queue` when no layer uses it any longer.
    """
    return torch.tensor(_ops.new_wgrad_queue.default(), dtype=torch.int64, device="cpu")


def release_wgrad_queue(queue: Tensor | int) -> None:
    """Frees a queue with what it holds.

    Args:
        queue: what :func:`new_wgrad_queue` returned, or its value.

    Raises:
        ValueError: there is no such queue, or no longer.
    """
    _ops.release_wgrad_queue.default(queue_id(queue, "release_wgrad_queue"))


def count_deferred_wgrads(queue: Tensor | int) -> int:
    """How many weight gradients wait in a queue.

    Args:
        queue: what :func:`new_wgrad_queue` returned, or its value.

    Raises:
        ValueError: there is no such queue.
    """
    count: int = _ops.count_deferred_wgrads.default(queue_id(queue, "count_deferred_wgrads"))
    return count


def defer_wgrad(
    queue: Tensor,
    grad: Tensor,
    input: Tensor,
    group_sizes: Tensor | None = None,
    grad_scale: Tensors | None = None,
    input_scale: Tensors | None = None,
    grad_format: str | Format = "none",
    input_format: str | Format = "none",
    dtype: torch.dtype | None = None,
    accumulate: bool = True,
    skipped: Sequence[int] = (),
    max_sms: int = 0,
    expected_rows: int = -1,
    copy: bool = False,
    input_rows: Tensor | None = None,
    grad_rows: Tensor | None = None,
) -> None:
    """Puts the operands of a weight gradient into a queue. The backward of a layer with a ``wgrad_queue`` calls it.

    Args:
        queue: what :func:`new_wgrad_queue` returned. It is declared as written, so that compiled code calls the op.
        grad, input, group_sizes, grad_scale, input_scale, grad_format, input_format, max_sms, expected_rows: as for
            :func:`~transformer_plugin.ops.grouped_gemm_wgrad`: ``[T, N]`` and ``[T, K]``, or quantized along columns,
            ``[N, T]`` and ``[K, T]``. Without group sizes the gradient is that of one matrix.
        dtype: of the gradient, which is then rounded before it is added, as autograd adds to ``.grad``; without it the
            gradient is added in the epilogue of the product, as to a ``main_grad``.
        accumulate: False: the gradient is written over what the buffers hold then, not added.
        skipped: the indices of matrices of a list that need no gradient.
        copy: whether to keep copies of the operands, for callers that reuse their memory.
        input_rows, grad_rows: as for :func:`~transformer_plugin.ops.grouped_gemm_wgrad`, kept too.

    Raises:
        TypeError: another dtype. ValueError: no such queue, operands that do not fit each other, ``skipped`` without
        such a group.
    """
    _ops.defer_wgrad.default(
        queue,
        grad,
        input,
        group_sizes,
        listed_or_none(grad_scale, "defer_wgrad", "grad_scale"),
        listed_or_none(input_scale, "defer_wgrad", "input_scale"),
        key_of(grad_format, "defer_wgrad", "grad_format"),
        key_of(input_format, "defer_wgrad", "input_format"),
        dtype,
        accumulate,
        list(skipped) if isinstance(skipped, Sequence) else skipped,
        max_sms,
        expected_rows,
        copy,
        input_rows,
        grad_rows,
    )


def run_deferred_wgrads(queue: Tensor, out: Tensors, accumulate: bool = True) -> None:
    """Computes the weight gradients of a queue, in the order of the backwards, and frees their operands.

    Args:
        queue: what :func:`new_wgrad_queue` returned.
        out: what the gradients are added to: ``[N, K]``, ``[G, N, K]``, or G matrices ``[N, K]`` of one dtype.
        accumulate: False: ``out`` becomes their sum, whatever it holds; 0 if there is none.

    Raises:
        TypeError: another dtype. ValueError: no such queue; ``out`` of other sizes or on another device than the
        gradients, or in the memory of an operand; an operand that was changed in place since its backward. A refused
        call changes nothing. If a product fails later, for example without memory, those before it are in ``out`` and
        the others still in the queue: call again with ``accumulate=True``.
    """
    _ops.run_deferred_wgrads.default(queue, listed(out, "run_deferred_wgrads", "out"), accumulate)
