"""How the rows of a weight are sharded over ranks: zero rows are appended until all ranks have equally many, each a
multiple of the rows that one scale covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from transformer_plugin.tensor._layout import message


def refuse(argument: str, expected: str, got: Any, advice: str) -> NoReturn:
    """Raises a ValueError."""
    raise ValueError(message("RowShard", argument, expected, str(got), advice))


@dataclass(frozen=True)
class RowShard:
    """The shards of ``rows`` rows over ``ranks`` ranks, in steps of ``align`` rows. Pure arithmetic.

    Wrong numbers, ranks and sizes are a ``ValueError``.
    """

    rows: int
    ranks: int
    align: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rows", 0), ("ranks", 1), ("align", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                advice = "Pass the sizes of the weight, of the group and of a block"
                refuse(name, f"an integer of at least {least}", value, advice)

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
            refuse("rank", f"0 to {self.ranks - 1}", rank, "Pass a rank of the group that shards the weight")
        return rank * self.shard_rows

    def valid_rows(self, rank: int) -> int:
        """How many rows of a rank are rows of the weight. The last ranks may have none."""
        return min(max(self.rows - self.offset(rank), 0), self.shard_rows)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's rows of a weight ``[rows, ...]``: a contiguous copy ``[shard_rows, ...]``, zeros last.

        It has no gradient.
        """
        self._check_rows("whole", whole, self.rows)
        whole = whole.detach()
        valid = self.valid_rows(rank)
        part = whole.new_zeros(self.shard_rows, *whole.shape[1:])
        part[:valid] = whole[self.offset(rank) : self.offset(rank) + valid]
        return part

    def strip(self, gathered: Tensor) -> Tensor:
        """Returns the weight's rows of what was gathered, ``[padded_rows, ...]``, as a view."""
        self._check_rows("gathered", gathered, self.padded_rows)
        return gathered if self.padded_rows == self.rows else gathered[: self.rows]

    def _check_rows(self, name: str, tensor: Tensor, rows: int) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            refuse(name, f"{rows} rows", list(tensor.shape), f"Pass a tensor of the weight of {self}")
