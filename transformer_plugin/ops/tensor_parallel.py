"""Tensor parallelism: collectives along the first dimension, with gradients, or into buffers of the caller, and the
cross entropy of logits whose columns are sharded over ranks.

R is the number of ranks of the group. All ranks make the same calls in the same order, with the same shapes and
dtypes. On a CPU the ranks compare each call (op, dtype, rows, width, whether a gradient is needed) before payload
moves; if they differ, every rank raises a ``ValueError`` that says what differs on which ranks, and the group stays
usable. On CUDA each new kind of call is compared once, through the store of the group, not during graph capture. A rank
that makes no call, or refuses its arguments, counts as lost: ``PeerTimeoutError``, then the group cannot be used again.

``group_name`` is ``group.group_name`` of a c10d process group (Gloo for CPU tensors, NCCL for CUDA tensors), or ``""``
for this process alone; ``num_ranks`` is its size, so that shapes are known where the group is not, as in
``torch.export``. ``timeout_ms`` bounds each wait, at most 10^12; 0 or less: the timeout of the group. Autograd fills in
``needs_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_plugin.errors import with_peers
from transformer_plugin.ops._operands import are

__all__ = [
    "all_gather",
    "all_gather_list_out",
    "all_reduce",
    "copy_to_group",
    "finish_all_gather",
    "finish_reduce_scatter",
    "reduce_scatter",
    "reduce_scatter_out",
    "start_all_gather",
    "start_reduce_scatter",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy_backward",
    "vocab_parallel_cross_entropy_forward",
]

_ops = torch.ops.transformer_plugin


def all_gather(
    input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1, needs_grad: int = -1
) -> Tensor:
    """Return the inputs of all ranks, one after the other along the first dimension.

    Args:
        input: ``[n, ...]``, any dtype and strides, the same shape on every rank.
        num_ranks, group_name, timeout_ms, needs_grad: see above.

    Returns:
        ``[R * n, ...]``, contiguous, the same on every rank: rows ``r * n`` to ``(r + 1) * n`` are those of rank r.

    Differentiable in ``input``: the gradient is :func:`reduce_scatter`, so it contains what every rank's loss says
    about these rows. All ranks take part in the backward, with zeros where a rank has no gradient.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(_ops.all_gather.default, input, num_ranks, group_name, timeout_ms, needs_grad)


def all_gather_list_out(
    inputs: Sequence[Tensor],
    out: Sequence[Tensor],
    num_ranks: int = 1,
    group_name: str = "",
    timeout_ms: int = -1,
) -> None:
    """Gather several tensors in one collective, each into a buffer: ``out[i]`` is ``all_gather(inputs[i])``.

    For what belongs together, as the data and the scales of quantized weights, or the weights of all experts. On CUDA
    nothing is allocated for contiguous inputs; Gloo flattens the set. The buffers keep their addresses, so the call can
    be captured in a CUDA graph. Not differentiable.

    Args:
        inputs: ``[n_i, ...]`` each, at least one, any dtypes and strides, on one device; the same shapes and dtypes on
            every rank.
        out: ``[R * n_i, ...]`` each, contiguous, of the dtype of its input. They overlap neither each other nor an
            input, nor lie between the elements of one.
        num_ranks, group_name, timeout_ms: see above.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks; nothing is written then.
        PeerTimeoutError: a rank did not take part in time.
    """
    if are((inputs, out), ([], [])):  # torch finds no kernel for a call without a tensor
        raise ValueError(
            "transformer_plugin::all_gather_list_out: argument 'inputs': expected at least one tensor, got an empty "
            "list. Pass tensors to gather."
        )
    with_peers(_ops.all_gather_list_out.default, inputs, out, num_ranks, group_name, timeout_ms)


def start_all_gather(
    input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1, needs_grad: int = -1
) -> Tensor:
    """Begin :func:`all_gather` on a side stream.

    Do not write the input until :func:`finish_all_gather`. All ranks begin and finish the same collectives in the same
    order; any number may be in flight. In a CUDA graph both steps belong to the same capture.

    Args:
        input, num_ranks, group_name, timeout_ms, needs_grad: as in :func:`all_gather`.

    Returns:
        A work tensor, int64 ``[1]``, to be kept until it is finished. On a CPU the collective is complete. It has no
        gradient: that belongs to the second step.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(_ops.start_all_gather.default, input, num_ranks, group_name, timeout_ms, needs_grad)


def finish_all_gather(
    work: Tensor,
    input: Tensor,
    num_ranks: int = 1,
    group_name: str = "",
    timeout_ms: int = -1,
    depends_on: Tensor | None = None,
) -> Tensor:
    """Return what :func:`start_all_gather` has begun: on CUDA the current stream waits for it, and not the host.

    Args:
        work: what that returned, once. Of a copy, or a second time, this is :func:`all_gather`, on all ranks alike.
        input, num_ranks, group_name, timeout_ms: those of the start.
        depends_on: a tensor that is computed while the rows travel. Its values are not read: a compiler that orders ops
            by their operands would wait at once without it.

    Returns:
        That of :func:`all_gather`.

    Differentiable in ``input``, as :func:`all_gather`.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, or the work is that of another op or input.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(
        _ops.finish_all_gather.default, work, input, num_ranks, group_name, timeout_ms, depends_on
    )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    num_ranks: int,
    group_name: str,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    timeout_ms: int = -1,
) -> Tensor:
    """Return the cross entropy of each row of logits, the columns of which are sharded over ranks.

    For the full logits x of a row ``[vocabulary]``, its target t and ``log_softmax(x) = x - max(x) - log(sum(exp(x -
    max(x))))``: ``(label_smoothing - 1) * log_softmax(x)[t] - label_smoothing * mean(log_softmax(x))``, as
    ``torch.nn.functional.cross_entropy(x, t, reduction="none")``, and 0 where t is ``ignore_index``.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any strides: columns ``r * V`` to ``(r + 1) * V`` of the
            vocabulary on rank r. V is the same on every rank, and ``V * R`` at least ``vocabulary``. Columns past the
            vocabulary are padding: nothing depends on their values.
        target: ``[...]`` int64 or int32, the same on every rank: columns of the vocabulary, or ``ignore_index``.
        vocabulary: columns of all ranks without padding, at least 1.
        num_ranks, group_name, timeout_ms: see above; 1 and ``""`` for logits that are not sharded.
        label_smoothing: at least 0 and below 1.
        ignore_index: the target of rows that do not count. Their logits are not read.

    Returns:
        float32 ``[...]``, contiguous, the same on every rank. Computed in float32; sums have a fixed order
        (``csrc/tensor_parallel/vocab_parallel_cross_entropy.h``), so that the bits repeat and are the same on CPU and
        CUDA, except those of a NaN. NaN in a row whose logits hold NaN or infinity, or are all -infinity. One
        collective moves three floats of each row and rank, four with ``label_smoothing``.

    Differentiable in ``logits``, by :func:`vocab_parallel_cross_entropy_backward`, without a collective: each rank gets
    the gradient of its columns. The graph keeps the logits and two floats of each row. Backpropagate the same gradient
    of the losses on every rank.

    On CUDA a target that is neither in the vocabulary nor ``ignore_index`` makes the loss and the gradient of its row
    NaN: the host does not read the targets.

    Raises:
        TypeError: another dtype.
        ValueError: sizes do not match, on this rank or between ranks, or the ranks have other options; on a CPU, a
            target outside of the vocabulary.
        PeerTimeoutError: a rank did not take part in time.
    """
    options = vocabulary, num_ranks, group_name, label_smoothing, ignore_index, timeout_ms
    return with_peers(_ops.vocab_parallel_cross_entropy.default, logits, target, *options)


def vocab_parallel_cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    num_ranks: int,
    group_name: str,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    timeout_ms: int = -1,
) -> tuple[Tensor, Tensor]:
    """:func:`vocab_parallel_cross_entropy`, and the statistics for its backward. Not differentiable.

    Args:
        logits, target, vocabulary, num_ranks, group_name, label_smoothing, ignore_index, timeout_ms: as there.

    Returns:
        The losses, and ``stats`` float32 ``[..., 2]``: for each row the largest logit of all ranks, and the sum over
        the vocabulary of ``exp(logit - largest)``. So ``largest + log(sum)`` is the log-sum-exp, which has fewer bits
        of large logits. Both are NaN where the logits make the loss NaN, and 0 in rows that are ignored.

    Raises:
        TypeError, ValueError, PeerTimeoutError: as :func:`vocab_parallel_cross_entropy`.
    """
    options = vocabulary, num_ranks, group_name, label_smoothing, ignore_index, timeout_ms
    return with_peers(_ops.vocab_parallel_cross_entropy_forward.default, logits, target, *options)


def vocab_parallel_cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    vocabulary: int,
    num_ranks: int,
    group_name: str,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the gradient of this rank's logits, without a collective.

    Args:
        grad: float32 ``[...]``, that of the losses, any strides.
        logits, target, vocabulary, num_ranks, group_name, label_smoothing, ignore_index: those of the forward.
        stats: what :func:`vocab_parallel_cross_entropy_forward` returned.

    Returns:
        ``[..., V]`` in the dtype of ``logits``, rounded once: ``(exp(logit - largest) / sum - q) * grad``, where q is
        ``label_smoothing / vocabulary``, and ``1 - label_smoothing`` more in the target's column. Zero in padding and
        in rows that are ignored; NaN in rows with a target outside of the vocabulary, on a CPU, too.

    Raises:
        TypeError, ValueError: sizes, dtypes or devices do not match.
    """
    options = vocabulary, num_ranks, group_name, label_smoothing, ignore_index
    return _ops.vocab_parallel_cross_entropy_backward.default(grad, logits, target, stats, *options)


def reduce_scatter(
    input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1, needs_grad: int = -1
) -> Tensor:
    """Return this rank's share of the rows, added over all ranks.

    Args:
        input: ``[R * n, ...]`` float32, bfloat16, float16 (float64 on a CPU), any strides; rows ``r * n`` to
            ``(r + 1) * n`` go to rank r.
        num_ranks, group_name, timeout_ms, needs_grad: see above.

    Returns:
        ``[n, ...]``, contiguous: the sum in ascending order of ranks, in float32 (float64 for float64), starting at
        zero and rounded once. So the bits do not depend on the backend or on the device.

    Differentiable in ``input``: the gradient is :func:`all_gather`. All ranks take part in the backward.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks; the rows do not divide by R.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(_ops.reduce_scatter.default, input, num_ranks, group_name, timeout_ms, needs_grad)


def start_reduce_scatter(
    input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1, needs_grad: int = -1
) -> Tensor:
    """Begin :func:`reduce_scatter` on a side stream, as :func:`start_all_gather` does.

    Args:
        input, num_ranks, group_name, timeout_ms, needs_grad: as in :func:`reduce_scatter`, not written meanwhile.

    Returns:
        A work tensor for :func:`finish_reduce_scatter`, int64 ``[1]``, without a gradient.

    Raises:
        TypeError, ValueError, PeerTimeoutError: as :func:`reduce_scatter`.
    """
    return with_peers(_ops.start_reduce_scatter.default, input, num_ranks, group_name, timeout_ms, needs_grad)


def finish_reduce_scatter(
    work: Tensor,
    input: Tensor,
    num_ranks: int = 1,
    group_name: str = "",
    timeout_ms: int = -1,
    depends_on: Tensor | None = None,
) -> Tensor:
    """Return what :func:`start_reduce_scatter` has begun: on CUDA the current stream waits for it, and not the host.

    Args:
        work: what that returned, once.
        input, num_ranks, group_name, timeout_ms: its arguments.
        depends_on: as in :func:`finish_all_gather`.

    Returns:
        That of :func:`reduce_scatter`.

    Differentiable in ``input``, as :func:`reduce_scatter`.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, or the work is that of another op or input.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(
        _ops.finish_reduce_scatter.default, work, input, num_ranks, group_name, timeout_ms, depends_on
    )


def reduce_scatter_out(
    input: Tensor,
    out: Tensor,
    accumulate: bool = False,
    num_ranks: int = 1,
    group_name: str = "",
    timeout_ms: int = -1,
    factor: float = 1.0,
) -> None:
    """Write :func:`reduce_scatter` into a buffer, or add it to the buffer. Not differentiable.

    bfloat16 gradients can be added to a float32 ``main_grad``, without a rounding between.

    Args:
        input: as in :func:`reduce_scatter`.
        out: ``[n, ...]``, contiguous, of the dtype of ``input`` or float32. It does not overlap ``input``.
        accumulate: add to ``out`` what it holds; otherwise that is not read.
        num_ranks, group_name, timeout_ms: see above.
        factor: of the sum, in float32, before it is added and rounded: 1 / R for the mean.

    For R > 1 a receive buffer is allocated for the rows of the other ranks, on a CPU of all. The sum is that of
    :func:`reduce_scatter`; ``accumulate`` adds the buffer last, in float32 (or float64), before the one rounding.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks; nothing is written then.
        PeerTimeoutError: a rank did not take part in time.
    """
    with_peers(
        _ops.reduce_scatter_out.default, input, out, accumulate, num_ranks, group_name, timeout_ms, factor
    )


def all_reduce(input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1) -> Tensor:
    """Return the sum of a tensor over all ranks, on every rank.

    For products whose inner dimension is sharded over ranks: each rank has a partial sum.

    Args:
        input: ``[...]`` float32, bfloat16, float16 (float64 on a CPU), any strides, the same shape on every rank.
        num_ranks, group_name, timeout_ms: see above.

    Returns:
        ``[...]``, contiguous: the sum in ascending order of ranks, as in :func:`reduce_scatter`.

    Differentiable in ``input``: the gradient is that of the result, which must be the same on all ranks, as the result
    is. It is counted once and not for each rank; no communication in the backward.

    Raises:
        TypeError, ValueError: sizes or dtypes do not match, on this rank or between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    return with_peers(_ops.all_reduce.default, input, num_ranks, group_name, timeout_ms)


def copy_to_group(input: Tensor, num_ranks: int = 1, group_name: str = "", timeout_ms: int = -1) -> Tensor:
    """Return a tensor that is the same on all ranks, and of which each uses a different part or in a different way.

    For the input of products whose weight is sharded over ranks, and for parameters that each rank applies to other
    rows. No communication in the forward.

    Args:
        input: ``[...]`` float32, bfloat16, float16 (float64 on a CPU), the same values on every rank.
        num_ranks, group_name, timeout_ms: see above.

    Returns:
        ``input``, or a view of it.

    Differentiable in ``input``: the gradient is the sum over ranks, as :func:`all_reduce` makes it. All ranks take
    part in the backward, with zeros where a rank has no gradient.

    Raises:
        TypeError, ValueError: wrong arguments, on this rank; in the backward, differences between ranks.
        PeerTimeoutError: in the backward, a rank did not take part in time.
    """
    return with_peers(_ops.copy_to_group.default, input, num_ranks, group_name, timeout_ms)
