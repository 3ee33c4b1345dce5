"""How the first dimension of a weight is cut over ranks: zero rows are appended until all ranks have equally many, each
a multiple of the rows that one scale covers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowShard:
    """The cut of ``rows`` rows over ``ranks`` ranks, in steps of ``align`` rows. Pure arithmetic."""

    rows: int
    ranks: int
    align: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "ranks", "align"):
            value, least = getattr(self, name), 0 if name == "rows" else 1
            if value < least:
                raise ValueError(
                    f"RowShard: argument '{name}': expected at least {least}, got {value}. "
                    "Pass the sizes of the weight, of the group and of a block"
                )

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
        return rank * self.shard_rows

    def valid_rows(self, rank: int) -> int:
        """How many rows of a rank are rows of the weight. The last ranks may have none."""
        return min(max(self.rows - self.offset(rank), 0), self.shard_rows)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's rows of a weight ``[rows, ...]``: a contiguous copy ``[shard_rows, ...]``, zeros last."""
        valid = self.valid_rows(rank)
        part = whole.new_zeros(self.shard_rows, *whole.shape[1:])
        part[:valid] = whole[self.offset(rank) : self.offset(rank) + valid]
        return part

    def strip(self, gathered: Tensor) -> Tensor:
        """Returns the weight's rows of what was gathered, ``[padded_rows, ...]``, as a view."""
        return gathered if self.padded_rows == self.rows else gathered[: self.rows]
