"""Delayed scaling: FP8 with one scale per tensor that comes from the amaxes of earlier steps.

Quantizing with a known scale reads a tensor once, where ``fp8_tensor``'s own scale needs two passes. The amax of the
input is collected in the same pass and determines the scales of later steps. The state of n
tensors is three float32 tensors that the caller keeps: ``scale [n]``, at first 1; ``amax [n]``, at first 0, which
collects; and ``history [H, n]``, at first 0, the amaxes of H steps. ``history[0]`` is 0 after an update.

The update, for each tensor separately, the same bits on CPU and CUDA:

1. ``last = amax``, or ``history[0]`` where ``amax`` is 0.
2. If ``last`` is not 0, the history moves up by one: ``history[i] = history[i + 1]``, ``history[H - 1] = last``,
   ``history[0] = 0``. An empty tensor keeps its history and its scale.
3. ``a`` is the largest of the moved history, NaN left out, before its first entry became 0 (``"max"``), or ``last``
   (``"most_recent"``).
4. ``scale = largest * 2**-margin / a`` when ``a`` is positive and finite, otherwise unchanged; an infinite scale
   becomes the largest float32. So an infinity freezes the scale of its tensor until it has left the history.
5. ``amax = 0``.

Source: NVIDIA TransformerEngine 2.20, delayed scaling; Micikevicius et al., "FP8 Formats for Deep Learning",
arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from transformer_plugin.errors import with_peers
from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of, keys_of

__all__ = [
    "delayed_scale",
    "quantize_scaled",
    "update_delayed_scale_",
]

Algorithm = Literal["max", "most_recent"]

_ops = torch.ops.transformer_plugin


def quantize_scaled(
    input: Tensor,
    scale: Tensor,
    format: str | Format,
    amax: Tensor | None = None,
    group_sizes: Tensor | None = None,
    first: int = 0,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, ...]:
    """Quantizes along rows, columns or both with known scales, and collects the amax in the same pass.

    Args:
        input: ``[M, K]``, ``[G, M, K]``, or ``[T, K]`` with ``group_sizes``; float32, bfloat16 or float16; any
            strides, any sizes including 0. Rows past the groups may hold anything.
        scale: float32 ``[n]``, contiguous: what a value is multiplied by before it is rounded. Those from ``first``
            on are used: one, or one for each matrix or group. They are not checked.
        format: ``fp8_tensor:e4m3`` or ``fp8_tensor:e5m2``; ``pow2`` and ``eps`` are for scales from the data.
        amax: float32 ``[n]``, contiguous, with entries that are not negative: those from ``first`` on are raised to the
            largest magnitude of their matrix or group, NaN left out. Written through its pointer, its autograd version
            does not change. None collects nothing.
        group_sizes: int32 or int64 ``[G]`` on the device of ``input``; never read on the host when on a GPU.
        first: where the scales of this input begin.
        rowwise, columnwise: as in :func:`~transformer_plugin.ops.quantize`.

    Returns:
        ``data`` in the shape of ``input``, ``round(float(x) * scale)`` as :func:`~transformer_plugin.ops.quantize`
        rounds, 0 past the groups; and ``scale_inv = 1 / scale``, ``[1]`` or ``[G]``. With ``columnwise`` then the
        transposed data, ``[K, M]``, ``[G, K, M]`` or ``[K, T]``, contiguous, and the same scales. Not differentiable.

    Raises:
        TypeError: another dtype. ValueError: other dimensions or devices, a state that is too short or not contiguous,
        another format; on a CPU also group sizes that are negative or sum to more than T. Nothing is written then.
    """
    key = key_of(format, "quantize_scaled")
    outputs: tuple[Tensor, ...] = _ops.quantize_scaled.default(
        input, scale, key, amax, group_sizes, first, rowwise, columnwise
    )
    return outputs[0 if rowwise else 2 : 4 if columnwise else 2]


def update_delayed_scale_(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    formats: Sequence[str | Format],
    margin: int = 0,
    algorithm: Algorithm = "max",
    group: str = "",
) -> Tensor:
    """The update between two steps, of any number of tensors in one launch.

    Args:
        history: float32 ``[H, n]``, contiguous, H at least 1.
        scale, amax: float32 ``[n]``, contiguous, on the device of ``history``.
        formats: 1 to 16 formats or keys of ``fp8_tensor``; each is that of ``n / len(formats)`` tensors in a row.
        margin: from -100 to 100; the scale is divided by ``2**margin``.
        algorithm: ``"max"`` over the history, or the ``"most_recent"`` amax.
        group: the name of a c10d process group, every rank of which calls this: the largest amaxes of all its ranks
            count, found by one collective first. ``""`` for this rank alone.

    All three are written through their pointers; their autograd version does not change. Inside a backward, where
    activation checkpointing recomputes a forward, nothing is written and the current ``scale`` is returned: that of the
    first run, unless the layer had another forward since.

    Returns:
        A copy of the new ``scale``, for the calls of this step: a later update does not change it.

    Raises:
        TypeError: another dtype. ValueError: sizes or devices that do not agree, a state that is not contiguous, a
        format, margin, algorithm or group that does not exist. Nothing is written then.
    """
    keys = keys_of(formats, "update_delayed_scale_")
    arguments = (history, scale, amax, keys, margin, algorithm)
    if not isinstance(group, str) or not group:
        return _ops.update_delayed_scale_.default(*arguments, group)
    return with_peers(_ops.update_delayed_scale_.default, *arguments, group)


def delayed_scale(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    formats: Sequence[str | Format],
    margin: int = 0,
    algorithm: Algorithm = "max",
) -> Tensor:
    """The scale that :func:`update_delayed_scale_` would give, without writing anything: for evaluation.

    Args:
        history, scale, amax, formats, margin, algorithm: as in :func:`update_delayed_scale_`.

    Returns:
        float32 ``[n]``.

    Raises:
        TypeError, ValueError: as :func:`update_delayed_scale_`.
    """
    keys = keys_of(formats, "delayed_scale")
    return _ops.delayed_scale.default(history, scale, amax, keys, margin, algorithm)
