"""How a weight is sharded over ranks: the key that tells ops, and which rows each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from transformer_plugin.tensor._layout import message


@dataclass(frozen=True)
class WeightShard:
    """How the rows of a weight are sharded over the ranks of a group, see :mod:`transformer_plugin.ops.sharded`.

    ``str()`` of it is the argument ``weight_shard`` of the ops of layers, and ``shard`` of
    :func:`~transformer_plugin.ops.gather_weight`. Zero rows are appended until all ranks have equally many.

    Wrong numbers, ranks and sizes are a ``ValueError``.
    """

    #: Rows of the full weight, or matrices of a stack; with ``is_list`` rows of every matrix of a list.
    rows: int
    #: Size of the group.
    ranks: int
    #: ``group_name`` of the c10d group. With ``"#rank=0"`` after it this process must have that rank in the group.
    group_name: str
    #: Whether the gradient is the mean over the ranks, or their sum.
    mean: bool = True
    #: Whether gradients travel in bfloat16 where they are added to float32.
    reduce_in_bfloat16: bool = False
    #: Whether, on CUDA, gradients are complete at the end of the backward, and not before.
    asynchronous: bool = False
    #: For each wait on other ranks; None: the timeout of the group.
    timeout_ms: int | None = None
    #: A number of the weights that are used together and exist as long as each other; only those are gathered ahead of
    #: their use, one after the other. 0: none.
    param_group: int = 0
    #: Of the parameter, for errors; "" for none.
    name: str = ""
    #: Whether the weight is a list of matrices, of each of which the rows are sharded.
    is_list: bool = False
    #: The rows of each rank are a multiple of this number, such as the rows that one scale covers. It is not part of
    #: the key: ops see it from the rows that they are given.
    align: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rows", 0), ("ranks", 1), ("align", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                advice = "Pass the sizes of the weight, of the group and of a block"
                _refuse(name, f"an integer of at least {least}", value, advice)

    def __str__(self) -> str:
        options = ["list"] if self.is_list else []
        options += ["mean"] if self.mean else []
        options += ["reduce_dtype=bf16"] if self.reduce_in_bfloat16 else []
        options += ["async"] if self.asynchronous else []
        options += [] if self.timeout_ms is None else [f"timeout_ms={self.timeout_ms}"]
        options += [f"param_group={self.param_group}"] if self.param_group else []
        options += [f"name={self.name}"] if self.name else []
        return ",".join([f"rows={self.rows}", f"ranks={self.ranks}", *options, f"group={self.group_name}"])

    @property
    def shard_rows(self) -> int:
        """The rows of every rank, padding included."""
        return -(-self.rows // (self.align * self.ranks)) * self.align

    @property
    def padded_rows(self) -> int:
        """The rows of all ranks together."""
        return self.shard_rows * self.ranks

    def offset(self, rank: int) -> int:
        """The first row of a rank, counted in the padded weight."""
        if not 0 <= rank < self.ranks:
            _refuse("rank", f"0 to {self.ranks - 1}", rank, "Pass a rank of the group that shards the weight")
        return rank * self.shard_rows

    def valid_rows(self, rank: int) -> int:
        """How many rows of a rank are rows of the weight. The last ranks may have none."""
        return min(max(self.rows - self.offset(rank), 0), self.shard_rows)

    def shard_of(self, full: Tensor, rank: int) -> Tensor:
        """Returns a rank's shard of a weight ``[rows, ...]``: a contiguous copy ``[shard_rows, ...]``, zeros last.

        It has no gradient.
        """
        self._check_rows("full", full, self.rows)
        full = full.detach()
        valid = self.valid_rows(rank)
        shard = full.new_zeros(self.shard_rows, *full.shape[1:])
        shard[:valid] = full[self.offset(rank) : self.offset(rank) + valid]
        return shard

    def unpadded(self, gathered: Tensor) -> Tensor:
        """Returns the weight's rows of what was gathered, ``[padded_rows, ...]``, as a view."""
        self._check_rows("gathered", gathered, self.padded_rows)
        return gathered if self.padded_rows == self.rows else gathered[: self.rows]

    def _check_rows(self, name: str, tensor: Tensor, rows: int) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            weight = f"a weight of {self.rows} rows over {self.ranks} ranks, in steps of {self.align}"
            _refuse(name, f"{rows} rows", list(tensor.shape), f"Pass a tensor of {weight}")


def _refuse(argument: str, expected: str, got: Any, advice: str) -> NoReturn:
    raise ValueError(message("WeightShard", argument, expected, str(got), advice))
