"""Weights whose first dimension is sharded over the ranks of a group.

Each rank keeps a shard of the rows; layers gather the full weight for a product, and gather it again for the backward.
``weight_shard`` of :func:`~transformer_plugin.ops.linear`, :func:`~transformer_plugin.ops.norm_linear`,
:func:`~transformer_plugin.ops.grouped_linear` and :func:`~transformer_plugin.ops.grouped_mlp`, and ``shard`` here, is a
key, a constant under ``torch.compile``: ``"rows=1000,ranks=4,mean,group=0"``, of these options in this order:

- ``rows``: rows of the full weight ``[rows, K]``; of a stack ``[rows, N, K]`` its matrices.
- ``ranks``: the size of the group. Every rank has equally many rows, at least ``rows / ranks``; those past the last row
  of the full weight are zeros.
- ``list``: the weight is a list of matrices ``[rows, K]``, of each of which the rows are sharded; only of
  :func:`~transformer_plugin.ops.grouped_linear`, whose ``weight`` is then a list of shards.
- ``mean``: the gradient is the mean over the ranks, in place of the sum. Both are made in float32 in ascending order of
  ranks, and rounded once.
- ``reduce_dtype=bf16``: gradients travel in bfloat16 also where the buffer they are added to is float32.
- ``async``: on CUDA the gradient travels on a side stream while the backward goes on. It is in ``weight.grad``, or in
  ``main_grad``, at the end of the backward. Where a hook of the weight waits for its gradient, or
  ``torch.autograd.grad`` asks for it, it is not asynchronous.
- ``timeout_ms``: for waits on other ranks; without it the timeout of the group.
- ``param_group``: a number of weights that are used together and exist as long as each other, as those of a model. A
  weight is gathered early only after a weight of its param group.
- ``name``: of the parameter, for errors; without a comma.
- ``group``: the ``group_name`` of a c10d group. It is last, and may have any characters.

:class:`transformer_plugin.parallel.WeightShard` makes keys. In the call of a layer ``weight`` is this rank's shard, and
so are its gradient, ``main_grad`` and ``quantized_weight``. With ``quantized_weight`` the ranks exchange quantized
data: scales and amaxes that belong to the full weight must be the same on all ranks. Without it they exchange the
values, which each rank quantizes after the gather. All ranks make the same calls in the same order.

Weights are gathered before they are needed: a group remembers in which order its weights are used, and gathers the next
one on a side stream while the product of this one runs. It is used only if neither it nor its place in the program has
changed; otherwise it is gathered again. So the order of use decides about time, never about values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_plugin.errors import with_peers
from transformer_plugin.formats import Format

__all__ = [
    "GatherCounts",
    "clear_gathers",
    "configure_gathers",
    "count_gathers",
    "enter_gather_region",
    "finish_reduce_gradient",
    "gather_weight",
    "gather_weight_list",
    "invalidate_prefetched",
    "leave_gather_region",
    "reduce_gradient_out",
    "start_reduce_gradient",
]

_ops = torch.ops.transformer_plugin


class GatherCounts(NamedTuple):
    """What a group has gathered since it was first used."""

    #: Collectives.
    gathers: int
    #: Of them those that were begun before the weight was needed.
    prefetched: int
    #: Of those, how many were used.
    hits: int
    #: And how many were not, because another weight was needed, or the weight had changed.
    dropped: int
    #: Bytes that this rank sent.
    bytes_sent: int


def gather_weight(
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    format: str | Format,
    columnwise: bool,
    backward: bool,
    shard: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of one direction of the full weight, from this rank's.

    Args:
        data, scale_inv, amax: of this rank's rows, as :func:`~transformer_plugin.ops.quantize` gives them along one
            direction, ``amax`` of ``nvfp4`` only; or the values alone. Contiguous. Scales that cover the full weight,
            as that of ``fp8_tensor``, and amaxes are the same on all ranks and do not travel.
        format: the key of the format, ``"none"`` for values. Not with ``tiled`` or ``row_scaled``.
        columnwise: whether they are columnwise, so that data are transposed.
        backward: what the weight is needed for; each purpose has its own place in the order of use.
        shard: the key of the weight, see above. Blocks of a format do not cross ranks: a shard has a multiple of their
            rows.

    Returns:
        ``data``, ``scale_inv`` and ``amax``, those that do not exist with no elements: bit for bit what quantizing the
        full weight gives, without the rows of padding. Fresh. ``data``, and scales that follow the rows, may lie in
        memory of the padded size.

    Not differentiable: layers have the gradient.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, or differ between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    key = format.key if isinstance(format, Format) else format
    arguments = (data, scale_inv, amax, key, columnwise, backward, shard)
    result: tuple[Tensor, Tensor, Tensor] = with_peers(_ops.gather_weight.default, *arguments)
    return result


def gather_weight_list(shards: list[Tensor], backward: bool, shard: str) -> Tensor:
    """Return several unsharded matrices as one stack, from this rank's rows of each, in one collective.

    Args:
        shards: ``[n, K]`` for each matrix, of one dtype. Contiguous.
        backward: what they are needed for, as in :func:`gather_weight`.
        shard: the key, with ``list``: ``rows`` are those of an unsharded matrix.

    Returns:
        ``[G, rows, K]``, without the rows of padding. Fresh.

    Not differentiable: layers have the gradient.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, or differ between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    unsharded: Tensor = with_peers(_ops.gather_weight_list.default, shards, backward, shard)
    return unsharded


def reduce_gradient_out(
    unsharded_grad: Tensor, weight: Tensor, out: Tensor, accumulate: bool, shard: str
) -> None:
    """Write this rank's shard of the ranks' gradients of the unsharded weight into a buffer, or add it to the buffer.

    :func:`~transformer_plugin.ops.reduce_scatter_out` with the options of the key. In a backward, where the key has
    ``async`` and nothing waits for the gradient of ``weight``, it runs on a side stream, and ``out`` is complete at the
    end of the backward. Layers call it.

    Args:
        unsharded_grad: ``[ranks * n, ...]``: the gradient of the unsharded weight as this rank computed it, then
            zeros.
        weight: ``[n, ...]``, this rank's shard.
        out: like ``weight``, of the dtype of ``unsharded_grad`` or float32.
        accumulate: add to ``out`` what it holds.
        shard: the key of the weight.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, or differ between ranks; nothing is written then.
        PeerTimeoutError: a rank did not take part in time.
    """
    with_peers(_ops.reduce_gradient_out.default, unsharded_grad, weight, out, accumulate, shard)


def start_reduce_gradient(unsharded_grad: Tensor, weight: Tensor, shard: str) -> Tensor:
    """Begin to add the ranks' gradients of a weight on a side stream.

    The sum is enqueued at once. On a CPU it is complete.

    Args:
        unsharded_grad, weight, shard: as in :func:`reduce_gradient_out`. The gradient is not written until the sum is
            finished.

    Returns:
        A work tensor for :func:`finish_reduce_gradient`, int64 ``[1]``.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, or differ between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    work: Tensor = with_peers(_ops.start_reduce_gradient.default, unsharded_grad, weight, shard)
    return work


def finish_reduce_gradient(
    work: Tensor, unsharded_grad: Tensor, weight: Tensor, shard: str, depends_on: Tensor | None = None
) -> Tensor:
    """Return what :func:`start_reduce_gradient` has begun: on CUDA the current stream waits for it, and not the host.

    Args:
        work: what that returned, once. Of a copy, or a second time, the ranks add their gradients again.
        unsharded_grad, weight, shard: its arguments.
        depends_on: any tensor that is computed while the reduce-scatter runs. Its values are not read: a compiler that
            orders ops by their operands would wait at once without it.

    Returns:
        This rank's shard of the sum, like ``weight``: float32 where ``weight`` is float32, otherwise of the dtype of
        ``unsharded_grad``; float64 of float64 ``unsharded_grad``.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, or differ between ranks.
        PeerTimeoutError: a rank did not take part in time.
    """
    result: Tensor = with_peers(
        _ops.finish_reduce_gradient.default, work, unsharded_grad, weight, shard, depends_on
    )
    return result


def configure_gathers(group_name: str, distance: int, in_graphs: bool = False) -> None:
    """Say how many weights ahead of their use a group gathers. All ranks must say the same.

    Args:
        group_name: of the group.
        distance: 0 gathers each weight when it is needed; 1, the default, the next one, too.
        in_graphs: also while a CUDA graph is captured. The capture must then contain the use of what it gathers, as
            that of a whole forward and backward does. For graphs of single layers see :func:`enter_gather_region`.

    Raises:
        ValueError: a negative distance, or no such group.
    """
    _ops.configure_gathers.default(group_name, distance, in_graphs)


def enter_gather_region(input: Tensor, group_name: str) -> Tensor:
    """Return a copy of the input of something that is captured in CUDA graphs of its own, such as one layer.

    In a capture, weights that are used between this and :func:`leave_gather_region` are gathered early there, in the
    order that runs before the capture have shown, and none that is used after it. Outside of a capture the borders have
    no effect on what is gathered early. Differentiable: the backward leaves what the forward enters.

    Args:
        input: any tensor, of which the gradient is needed where the backward is captured, too.
        group_name: of the ranks that have shards of the weights.

    Returns:
        A tensor with the same values, strides and dtype.

    Raises:
        TypeError: a sparse tensor.
        ValueError: no such group.
    """
    result: Tensor = _ops.enter_gather_region.default(input, group_name)
    return result


def leave_gather_region(output: Tensor, group_name: str) -> Tensor:
    """Return a copy of the output of what :func:`enter_gather_region` has entered.

    In a capture, the stream waits for what was gathered early and not used, as the capture of all streams must end
    together.

    Args:
        output: any tensor; with several outputs, the one that is computed last.
        group_name: that of :func:`enter_gather_region`.

    Returns:
        A tensor with the same values, strides and dtype.

    Raises:
        TypeError: a sparse tensor.
        ValueError: no such group.
    """
    result: Tensor = _ops.leave_gather_region.default(output, group_name)
    return result


def clear_gathers(group_name: str) -> None:
    """Free what a group has gathered early, and forget the order of use.

    Call it on all ranks after weights were given other memory. It is not among the changes that a group notices on all
    ranks alike: the old memory may exist on some of them.
    """
    _ops.clear_gathers.default(group_name)


def count_gathers(group_name: str) -> GatherCounts:
    """Return what a group has gathered in this process."""
    return GatherCounts(*_ops.count_gathers.default(group_name))


def invalidate_prefetched() -> None:
    """Announce a change of weights that torch does not count, so that nothing gathered before is used.

    Steps of torch's optimizers are noticed. Call it after others that write through pointers or ``.data``. All ranks
    must call it at the same place.
    """
    _ops.invalidate_prefetched.default()
