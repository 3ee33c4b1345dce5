"""PartTensor: what this rank has of a tensor, as checkpoints see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.parallel._row_shard import RowShard
from transformer_plugin.parallel._tensor_slices import Chunk, PartLayout, TensorSlices
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message

_aten = torch.ops.aten


class PartTensor(Tensor):
    """A whole tensor of which this process has some rows or columns, without padding.

    The ``state_dict`` of a module with sharded or tensor-parallel weights has them, and that of its optimizer. Its
    shape is that of the whole, so that checkpoints are of the model and not of the ranks:
    ``torch.distributed.checkpoint`` saves each element once, and loads them on any number of ranks. ``torch.save``
    saves this rank's part, for as many ranks. It computes nothing: :attr:`part` is this rank's tensor, padding
    included.
    """

    #: Over the memory of the parameter.
    part: Tensor
    part_layout: PartLayout

    @staticmethod
    def __new__(cls, part: Tensor, layout: PartLayout) -> PartTensor:
        part = part.detach()
        made: PartTensor = Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=part.dtype, device=part.device
        )
        made.part, made.part_layout = part, layout
        return made

    def __init__(self, part: Tensor, layout: PartLayout) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        held = ", ".join(
            "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(c.offsets, c.sizes, strict=True)) + "]"
            for c in self.part_layout.chunks()
        )
        return f"PartTensor({held or 'nothing'} of {list(self.shape)}, {self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        layout = self.part_layout
        rows = None if layout.rows is None else dataclasses.astuple(layout.rows)
        slices = None if layout.slices is None else dataclasses.astuple(layout.slices)
        return _rebuild, (self.part, layout.shape, slices, rows, layout.rank)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What copies and moves a tensor does so with the part; everything else is refused."""
        kwargs = kwargs or {}
        own = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return PartTensor(own.part, own.part_layout)
        if func in (_aten.clone.default, _aten._to_copy.default, _aten.empty_like.default):
            return PartTensor(func(own.part, **kwargs), own.part_layout)
        if func is _aten.new_empty.default and list(args[1]) == list(own.shape):
            return PartTensor(func(own.part, own.part.shape, **kwargs), own.part_layout)
        if func is _aten.copy_.default and all(
            isinstance(t, PartTensor) and t.part_layout == own.part_layout for t in args[:2]
        ):
            own.part.copy_(args[1].part)
            return own
        got = f"{func}, which computes with values that other ranks have"
        advice = "Use .part for what this rank has, or transformer_plugin.parallel.full_weight(parameter)"
        raise NotImplementedError(message("PartTensor", "self", "an op that copies or moves", got, advice))

    def untyped_storage(self) -> Any:
        """Raises an error: savers that read the memory of a tensor, as safetensors does, would save nothing."""
        got = f"{self}, of which other ranks have the rest"
        advice = "Save parallel.full_state_dict(model), or use torch.distributed.checkpoint"
        raise ValueError(
            message("PartTensor", "self", "a tensor whose elements are all on this rank", got, advice)
        )

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

        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in self.part_layout.chunks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        chunk = next(c for c in self.part_layout.chunks() if list(c.offsets) == list(index.offset))
        return _view(self.part, chunk)


def _view(part: Tensor, chunk: Chunk) -> Tensor:
    for dim, (start, size) in enumerate(zip(chunk.local, chunk.sizes, strict=True)):
        part = part.narrow(dim, start, size)
    return part


def _rebuild(part: Tensor, shape: Any, slices: Any, rows: Any, rank: int) -> PartTensor:
    layout = PartLayout(
        tuple(shape),
        None if slices is None else TensorSlices(*slices),
        None if rows is None else RowShard(*rows),
        rank,
    )
    return PartTensor(part, layout)


torch.serialization.add_safe_globals([_rebuild])


def part_for(value: Any, layout: PartLayout, name: str) -> Tensor:
    """This rank's part of a value of a checkpoint: of a :class:`PartTensor` of the same layout, or of a whole tensor.

    Raises:
        ValueError: a value of another model, another number of ranks, or another rank.
    """
    advice = "Load it with torch.distributed.checkpoint, which shards again, or load the whole tensor"
    if isinstance(value, PartTensor):
        if _same(value.part_layout, layout) and tuple(value.part.shape) == layout.part_shape:
            return value.part
        got = f"rank {value.part_layout.rank} of {value.part_layout}"
        raise ValueError(
            message("load_state_dict", name, f"what rank {layout.rank} has of {layout}", got, advice)
        )
    if tuple(value.shape) != layout.shape:
        got = f"a tensor of sizes {list(value.shape)}"
        advice = "Load a checkpoint of this model, not one of a part of it"
        expected = f"the whole weight, of sizes {list(layout.shape)}"
        raise ValueError(message("load_state_dict", name, expected, got, advice))
    return layout.cut(values_of(value))


def values_of(tensor: Any) -> Any:
    """The numbers of a quantized tensor, of which a part has no bytes of the whole; any other one unchanged."""
    return tensor.dequantize() if isinstance(tensor, FormatTensor) and tensor.format.is_quantized else tensor


def _same(one: PartLayout, other: PartLayout) -> bool:
    """Whether both have the same blocks; names of groups may differ between runs."""
    return (one.shape, one.part_shape, one.chunks()) == (other.shape, other.part_shape, other.chunks())
