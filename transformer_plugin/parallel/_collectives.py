"""Collectives of functions in Python, bounded in time: a rank that is lost is named, and the function that waited."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.errors import PeerTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: How backends say that a connection was lost, or that a wait took too long.
_LOST = re.compile("connection|time[d ]?[ -]?out|broken pipe|socket", re.IGNORECASE)


def all_gather(op: str, phase: str, value: Tensor, group: ProcessGroup) -> Tensor:
    """The values of all ranks of a group, ``[R, ...]``, the same on every rank.

    Args:
        op: the function that needs them, and ``phase``, for what: both for the error of a lost rank.
        value: of any dtype, on the device of the group, with the same shape on every rank.
        group: the ranks. Its timeout is that of the wait.

    Raises:
        PeerTimeoutError: a rank did not take part in time.
    """
    return _wait(op, phase, ops.all_gather, value.unsqueeze(0), group.size(), group.group_name)


def all_reduce_max(op: str, phase: str, value: Tensor, group: ProcessGroup) -> Tensor:
    """The largest value of all ranks, of each element; a NaN of any rank stays one. As :func:`all_gather`."""
    return all_gather(op, phase, value, group).amax(0)


def all_reduce_sum(op: str, phase: str, value: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, in ascending order of ranks. As :func:`all_gather`."""
    if value.dtype == torch.float64 and value.is_cuda:  # no kernel adds these
        return all_gather(op, phase, value, group).sum(0)
    return _wait(op, phase, ops.all_reduce, value, group.size(), group.group_name)


def all_gather_value(op: str, phase: str, value: Any, group: ProcessGroup) -> list[Any]:
    """A value of numbers, texts, None, tuples and lists of each rank, through the group's store."""
    texts = _wait(op, phase, ops.all_gather_text, repr(value), group.group_name)
    return [ast.literal_eval(text) for text in texts]


@contextmanager
def torch_collectives(op: str, phase: str, over: ProcessGroup | DeviceMesh | None) -> Iterator[None]:
    """Around collectives that torch issues: if a rank is lost there, the error becomes one that names it.

    On a GPU the host does not wait for them.

    Args:
        op, phase: as for :func:`all_gather`.
        over: the ranks: a group, a mesh of one dimension, or None for all.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, PeerTimeoutError) and _LOST.search(str(error)):
            group: Any = dist.group.WORLD if over is None else over
            group = group.get_group() if hasattr(group, "get_group") else group
            # A rank that is no neighbour of the lost one learns of it when the timeout is over.
            left = max(0.0, seconds_of(group) - (time.monotonic() - begun))
            _wait(op, phase, ops.all_gather_text, "", group.group_name, int(1000 * left) + 1000)
        raise  # all ranks are there: something else has failed


def seconds_of(group: ProcessGroup) -> float:
    """The timeout of a group."""
    devices = group._device_types
    of_cpu = [device for device in devices if device.type == "cpu"]
    options: Any = group._get_backend((of_cpu or devices)[0]).options
    seconds: float = options._timeout.total_seconds()
    return seconds


def _wait(op: str, phase: str, collective: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return collective(*arguments)
    except PeerTimeoutError as error:
        raise error.of(op, phase) from None
