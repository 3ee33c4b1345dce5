"""The parts of a row of :mod:`benchmarks.quantize`."""

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
    """An op in one format. ``prepare`` makes the arguments of all its calls from a bfloat16 matrix."""

    name: str
    format: Format
    prepare: Callable[[Tensor], Tensors]
    op: Call
    #: the function of :mod:`transformer_plugin.reference`.
    reference: Call
    #: the package's separate ops. A fused op has their bytes, also if the reference uses torch's exponential.
    steps: Call | None = None
    #: a peer for comparison instead of the reference, if the compiler must not choose the order of additions.
    peer: Call | None = None
    #: the function to compile instead of these: the same bytes for finite values, in dtypes that Inductor supports.
    compiled: Call | None = None
    #: the op without groups on the same rows, or another op to which a fused op is compared.
    single: Call | None = None
    #: how often the input must be read: the amax of a whole tensor needs an additional pass.
    reads: int = 1
    #: the number of groups of the inputs.
    groups: int = 0
