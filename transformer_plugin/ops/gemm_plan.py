"""How grouped products are laid out on a Hopper, and what a caller may ask of that.

The kernels for Hopper are blocks that stay until the product is done, one to a multiprocessor, in clusters of two. How
many, and which way sums are added, is decided on the host from shapes; no size of a group is read for it. All ops over
groups in :mod:`transformer_plugin.ops.gemm` and :mod:`transformer_plugin.ops.gemm_out` take two arguments for it. They
change when a product is done, never its bits:

``max_sms``: at most so many multiprocessors, 0 for all; rounded down to an even number, at least 2. The others are left
to what runs at the same time, communication for example. Small kernels around the product (offsets from sizes, zeros
into the tail) are not bounded.

``expected_rows``: how many rows all groups are expected to have together, where that is less than the buffer's; -1 if
it is not known. More than the buffer has count as all of it. Today it chooses how a weight gradient is added to float32
in place. In compiled code it is a constant: with one that follows an open size, ``x.shape[0] // 2`` for example,
``torch.compile`` compiles for each.

Both take effect where :func:`grouped_gemm_plan` says that these kernels take the product, on a Hopper. Elsewhere, as on
a CPU, they are checked and have none. A gradient is made with those of its forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_ops = torch.ops.transformer_plugin


class GroupedGemmPlan(NamedTuple):
    """How the kernels for Hopper would run a product."""

    #: whether they take it; if not, the rest is 0 and other kernels run, which know neither argument.
    takes: bool
    #: clusters of two blocks, each on two multiprocessors.
    clusters: int
    #: of a sum into a buffer: bit i stands for columns 32 i to 32 i + 31 of a tile's 256, set where threads add and not
    #: the copy engine.
    thread_boxes: int
    #: whether rows in ``mxfp8`` and ``nvfp4`` are widened to bfloat16 beside the products, and not by a kernel before.
    widens_beside: bool


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
    microscaled: bool = False,
) -> GroupedGemmPlan:
    """What a GPU of Hopper's kind would run, on any host, also one without a GPU.

    Args:
        product: ``"forward"`` (:func:`~transformer_plugin.ops.grouped_gemm` with ``transpose_b``), ``"data_grad"``
            (without), or ``"weight_grad"`` (:func:`~transformer_plugin.ops.grouped_gemm_wgrad`).
        dtype: of the operands; ``float8_e4m3fn`` for those in ``fp8_block`` that are multiplied as they are, or in
            ``mxfp8``; ``float4_e2m1fn_x2`` for those in ``nvfp4``.
        out_dtype: of the output.
        rows: of the buffer.
        groups: 1 for a product without groups.
        n, k: of the weight ``[G, n, k]``.
        multiprocessors: of the GPU: 132 of an H100 or H200 with SXM.
        accumulate: as for :func:`~transformer_plugin.ops.grouped_gemm_wgrad_out`.
        max_sms, expected_rows: as the product is given them.
        microscaled: that ``float8_e4m3fn`` is in ``mxfp8``.

    Returns:
        A :class:`GroupedGemmPlan`, of contiguous tensors at addresses that are multiples of 16, in a package that was
        built for ``sm_90a``. ``clusters`` is the least of: half of ``multiprocessors``, half of
        ``max_sms``, and the pairs of tiles that groups of any sizes can have.

    Raises:
        TypeError: another dtype. ValueError: another product, counts that are negative or too large,
            ``microscaled`` with a dtype that is not.
    """
    takes, clusters, thread_boxes, widens_beside = _ops.grouped_gemm_plan.default(
        product,
        dtype,
        out_dtype,
        rows,
        groups,
        n,
        k,
        multiprocessors,
        accumulate,
        max_sms,
        expected_rows,
        microscaled,
    )
    return GroupedGemmPlan(bool(takes), clusters, thread_boxes, bool(widens_beside))
