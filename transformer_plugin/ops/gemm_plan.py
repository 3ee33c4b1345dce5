"""Which kernel computes a grouped GEMM, why, and what a caller may ask of its launch.

The Hopper kernels are persistent: as many thread blocks as fit, one to a multiprocessor, in clusters of two. How many,
and the way in which sums are added to memory, is decided on the host from shapes; no group size is read for it. All ops
over groups in :mod:`transformer_plugin.ops.gemm` and :mod:`transformer_plugin.ops.gemm_out` take two arguments that
change when a product is done, never its bits:

``max_sms``: at most so many multiprocessors, 0 for all; rounded down to an even number, at least 2. The others are left
to what runs at the same time, communication for example. Small kernels around the product (offsets from sizes, zeros
in the tail) are not bounded.

``expected_rows``: how many rows all groups are expected to have together, where that is less than the buffer's; -1 if
it is not known. More than the buffer has counts as all of it. Today it chooses how a weight gradient is added to
float32 in place. In compiled code it is a constant: with one that follows an open size, ``x.shape[0] // 2`` for
example, ``torch.compile`` compiles for each.

Both take effect where :func:`grouped_gemm_plan` names the backend ``sm90``. Elsewhere, as on a CPU, they are checked
and have no effect. A gradient is computed with those of its forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_plugin.formats import Format
from transformer_plugin.ops._operands import key_of

__all__ = [
    "GroupedGemmPlan",
    "grouped_gemm_plan",
]

_ops = torch.ops.transformer_plugin


class GroupedGemmPlan(NamedTuple):
    """Which kernel computes a grouped GEMM on a GPU, and how it is launched."""

    #: ``"sm90"``: this package's Hopper kernels (TMA and WGMMA); ``"generic"``: its kernels for any GPU; ``"torch"``:
    #: ``torch._grouped_mm``; ``"steps"``: operands are dequantized first, then multiplied by one of the others.
    backend: str
    #: why this backend, in words.
    reason: str
    #: of ``sm90``: clusters of two thread blocks, each block on a multiprocessor of its own. 0 for other backends.
    clusters: int
    #: of ``sm90``, of sums that are added to memory: bit i stands for columns 32 i to 32 i + 31 of a tile's 256, set
    #: where threads add; elsewhere TMA reduces.
    thread_boxes: int
    #: of ``sm90``, ``mxfp8`` and ``nvfp4``: whether warps of the GEMM dequantize rows while it runs, and not a kernel
    #: before it.
    overlaps_dequantize: bool


def grouped_gemm_plan(
    product: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    rows: int,
    groups: int,
    n: int,
    k: int,
    multiprocessors: int,
    accumulate: bool = False,
    max_sms: int = 0,
    expected_rows: int = -1,
    a_format: str | Format = "none",
    b_format: str | Format = "none",
    capability: int = 90,
) -> GroupedGemmPlan:
    """What a GPU would run, computed on any host, also one without a GPU.

    Args:
        product: ``"forward"`` (:func:`~transformer_plugin.ops.grouped_gemm` with ``transpose_b``), ``"data_grad"``
            (without), or ``"weight_grad"`` (:func:`~transformer_plugin.ops.grouped_gemm_wgrad`).
        dtype: of operands that are not quantized: float32, bfloat16 or float16.
        out_dtype: of the output.
        rows: of the buffer.
        groups: 1 for a product without groups.
        n, k: of the weight ``[G, n, k]``.
        multiprocessors: of the GPU: 132 of an H100 or H200 with SXM.
        accumulate: as for :func:`~transformer_plugin.ops.grouped_gemm_wgrad_out`.
        max_sms, expected_rows: as the product is given them.
        a_format, b_format: formats, or their keys, of quantized operands: of the rows and the weight, of the gradient
            and the weight (``"data_grad"``), or of the gradient and the input (``"weight_grad"``); else ``"none"``.
        capability: compute capability of the GPU, 90 for 9.0.

    Returns:
        A :class:`GroupedGemmPlan`, of contiguous tensors at addresses that are multiples of 16. ``clusters`` is the
        least of half of ``multiprocessors``, half of ``max_sms``, and the pairs of tiles that groups of any sizes can
        have.

    Raises:
        TypeError: another dtype. ValueError: another product or format, formats that the op refuses for this
        product, or counts that are negative or too large.
    """
    backend, reason, (clusters, thread_boxes, overlaps) = _ops.grouped_gemm_plan.default(
        product,
        key_of(a_format, "grouped_gemm_plan", "a_format"),
        key_of(b_format, "grouped_gemm_plan", "b_format"),
        dtype,
        out_dtype,
        rows,
        groups,
        n,
        k,
        multiprocessors,
        capability,
        accumulate,
        max_sms,
        expected_rows,
    )
    return GroupedGemmPlan(backend, reason, clusters, thread_boxes, bool(overlaps))
