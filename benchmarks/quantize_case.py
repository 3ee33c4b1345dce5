"""What a row of :mod:`benchmarks.quantize` consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.peers import Tensors
from transformer_plugin.formats import Format

DIRECTIONS = {"rows": "", "transposed": "_transposed", "both": "_both"}

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op in one format. ``op``, ``reference`` and ``single`` take what ``prepare`` makes of a bfloat16 matrix."""

    name: str
    format: Format
    prepare: Callable[[Tensor], Tensors]
    op: Call
    reference: Call
    #: what stands beside the op instead, where the reference's order of additions is not a compiler's to choose.
    peer: Call | None = None
    #: what a compiler is given instead of either: the same bytes of ordinary values, in dtypes that it knows.
    compiled: Call | None = None
    #: the op without groups on the same rows, or what a fused op is measured beside.
    single: Call | None = None
    #: how often the input has to be read: an amax of a whole tensor takes a pass of its own.
    reads: int = 1
    #: its inputs end with the sizes of groups.
    grouped: bool = False
