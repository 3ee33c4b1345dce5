"""How the grouped GEMMs of a layer are launched."""

from __future__ import annotations

from typing import NamedTuple


class LaunchOptions(NamedTuple):
    """Launch options of a layer's grouped GEMMs, forward and backward. They change the time, never a result.

    Source: the arguments of :func:`transformer_plugin.ops.grouped_gemm` of the same names.
    """

    #: the multiprocessors that a GEMM may use at most, for example to leave some to communication kernels; 0: all.
    max_sms: int = 0
    #: how many rows the groups have together if the host knows, in a buffer that is larger; -1: all rows of the buffer.
    expected_rows: int = -1
