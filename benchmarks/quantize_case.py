"""What a row of :mod:`benchmarks.quantize` consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.peers import Tensors
from transformer_plugin.formats import Format

#: The flags of an op.
DIRECTIONS = {
    "rows": {"rowwise": True, "columnwise": False},
    "transposed": {"rowwise": False, "columnwise": True},
    "both": {"rowwise": True, "columnwise": True},
}

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op in one format. Its calls take what ``prepare`` makes of a bfloat16 matrix."""

    name: str
    format: Format
    prepare: Callable[[Tensor], Tensors]
    op: Call
    #: of :mod:`transformer_plugin.reference`.
    reference: Call
    #: the package's own ops in turn: a fused op has their bytes, also where the reference's exponential is torch's.
    steps: Call | None = None
    #: what stands beside the op instead, where the reference's order of additions is not a compiler's to choose.
    peer: Call | None = None
    #: what a compiler is given instead of any of them: the same bytes of ordinary values, in dtypes that it knows.
    compiled: Call | None = None
    #: the op without groups on the same rows, or what a fused op is measured beside.
    single: Call | None = None
    #: how often the input has to be read: an amax of a whole tensor takes a pass of its own.
    reads: int = 1
    #: its inputs have the sizes of so many groups.
    groups: int = 0
