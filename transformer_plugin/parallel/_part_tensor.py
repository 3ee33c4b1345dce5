"""PartTensor: this rank's rows of a tensor, as checkpoints see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin.parallel._row_shard import RowShard
from transformer_plugin.tensor._layout import message

_aten = torch.ops.aten


class PartTensor(Tensor):
    """A whole tensor ``[N, ...]`` of which this process has some rows, without padding.

    The ``state_dict`` of a module with sharded weights has them, and that of its optimizer. Its shape is that of the
    whole, so that checkpoints are of the model and not of the ranks: ``torch.distributed.checkpoint`` saves each row
    once, and loads them on any number of ranks. ``torch.save`` saves this rank's rows, for as many ranks. It computes
    nothing: :attr:`part` is this rank's tensor, padding included.
    """

    #: ``[S, ...]``, over the memory of the parameter.
    part: Tensor
    rows: RowShard
    rank: int

    @staticmethod
    def __new__(cls, part: Tensor, rows: RowShard, rank: int) -> PartTensor:
        part = part.detach()
        shape = (rows.rows, *part.shape[1:])
        made: PartTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        made.part, made.rows, made.rank = part, rows, rank
        return made

    def __init__(self, part: Tensor, rows: RowShard, rank: int) -> None:
        pass

    @property
    def valid(self) -> Tensor:
        """This rank's rows, without padding: a view."""
        return self.part[: self.rows.valid_rows(self.rank)]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        first = self.rows.offset(self.rank)
        held = f"{first}:{first + self.rows.valid_rows(self.rank)}"
        return f"PartTensor(rows {held} of {list(self.shape)}, {self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.part, self.rows.rows, self.rows.ranks, self.rows.align, self.rank)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What copies and moves a tensor does so with the part; everything else is refused."""
        kwargs = kwargs or {}
        own = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return PartTensor(own.part, own.rows, own.rank)
        if func in (_aten.clone.default, _aten._to_copy.default, _aten.empty_like.default):
            return PartTensor(func(own.part, **kwargs), own.rows, own.rank)
        if func is _aten.new_empty.default and list(args[1]) == list(own.shape):
            return PartTensor(func(own.part, own.part.shape, **kwargs), own.rows, own.rank)
        if func is _aten.copy_.default and all(
            isinstance(t, PartTensor) and t.rows == own.rows for t in args[:2]
        ):
            own.part.copy_(args[1].part)
            return own
        got = f"{func}, which computes with values that other ranks have"
        advice = "Use .part for this rank's rows, or transformer_plugin.parallel.whole_weight(parameter)"
        raise NotImplementedError(message("PartTensor", "self", "an op that copies or moves", got, advice))

    # The protocol of torch.distributed.checkpoint, as DTensor has it.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        valid = self.valid
        if valid.shape[0] == 0:
            return []
        offsets = torch.Size([self.rows.offset(self.rank)] + [0] * (valid.dim() - 1))
        return [ChunkStorageMetadata(offsets=offsets, sizes=valid.shape)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.valid


def _rebuild(part: Tensor, rows: int, ranks: int, align: int, rank: int) -> PartTensor:
    return PartTensor(part, RowShard(rows, ranks, align), rank)


torch.serialization.add_safe_globals([_rebuild])


def part_for(value: Any, like: Tensor, rows: RowShard, rank: int, name: str) -> Tensor:
    """This rank's part of a value of a checkpoint: of a :class:`PartTensor` of the same cut, or of a whole tensor.

    Raises:
        ValueError: a value of another model, another cut, or another rank.
    """
    advice = "Load it with torch.distributed.checkpoint, which cuts again, or load the whole tensor"
    whole = [rows.rows, *like.shape[1:]]
    if isinstance(value, PartTensor):
        if (value.rows, value.rank) != (rows, rank) or value.part.shape != like.shape:
            got = f"rank {value.rank} of {value.rows}"
            raise ValueError(
                message("load_state_dict", name, f"the rows of rank {rank} of {rows}", got, advice)
            )
        return value.part
    if list(value.shape) != whole:
        got = f"a tensor of sizes {list(value.shape)}"
        advice = "Load a checkpoint of this model, not one of a part of it"
        raise ValueError(message("load_state_dict", name, f"the whole weight, of sizes {whole}", got, advice))
    return rows.cut(value.detach(), rank)
