"""ShardTensor: what this rank has of a tensor, as checkpoints see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.parallel._tensor_slices import Chunk, ShardLayout, TensorSlices
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message

_aten = torch.ops.aten


class ShardTensor(Tensor):
    """A tensor of which this process has some rows or columns, without padding.

    The ``state_dict`` of a module with sharded or tensor-parallel weights has them, and that of its optimizer. Its
    shape is that of the full tensor, so that checkpoints are of the model and not of the ranks:
    ``torch.distributed.checkpoint`` saves each element once, and loads them on any number of ranks. ``torch.save``
    saves this rank's shard, for as many ranks. It computes nothing: :attr:`local` is this rank's tensor, padding
    included.
    """

    #: Over the memory of the parameter.
    local: Tensor
    shard_layout: ShardLayout

    @staticmethod
    def __new__(cls, local: Tensor, layout: ShardLayout) -> ShardTensor:
        local = local.detach()
        made: ShardTensor = Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=local.dtype, device=local.device
        )
        made.local, made.shard_layout = local, layout
        return made

    def __init__(self, local: Tensor, layout: ShardLayout) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardTensor({_held(self.shard_layout)}, {self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        layout = self.shard_layout
        shard, slices = layout.shard, layout.slices
        # Names of groups may differ where it is loaded, so it has only the numbers of the shard.
        rows = None if shard is None else (shard.rows, shard.ranks, shard.align)
        of_slices = None if slices is None else dataclasses.astuple(slices)
        return _rebuild, (self.local, layout.shape, of_slices, rows, layout.rank)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What copies and moves a tensor does so with the local one; everything else is refused."""
        kwargs = kwargs or {}
        own = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return ShardTensor(own.local, own.shard_layout)
        if func in (_aten.clone.default, _aten._to_copy.default, _aten.empty_like.default):
            return ShardTensor(func(own.local, **kwargs), own.shard_layout)
        if func is _aten.new_empty.default and list(args[1]) == list(own.shape):
            return ShardTensor(func(own.local, own.local.shape, **kwargs), own.shard_layout)
        if func is _aten.copy_.default and all(
            isinstance(t, ShardTensor) and _same(t.shard_layout, own.shard_layout) for t in args[:2]
        ):
            own.local.copy_(args[1].local)
            return own
        got = f"{func}, which computes with values that other ranks have"
        advice = "Use .local for what this rank has, or transformer_plugin.parallel.full_weight(parameter)"
        raise NotImplementedError(message("ShardTensor", "self", "an op that copies or moves", got, advice))

    def untyped_storage(self) -> Any:
        """Raises an error: savers that read the memory of a tensor, as safetensors does, would save nothing."""
        got = f"{self}, of which other ranks have the rest"
        advice = "Save parallel.full_state_dict(model), or use torch.distributed.checkpoint"
        raise ValueError(
            message("ShardTensor", "self", "a tensor whose elements are all on this rank", got, advice)
        )

    # The protocol of torch.distributed.checkpoint, as DTensor has it.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
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
            for chunk in self.shard_layout.chunks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        chunk = next(c for c in self.shard_layout.chunks() if list(c.offsets) == list(index.offset))
        return _view(self.local, chunk)


def _held(layout: ShardLayout) -> str:
    """What a rank has: ``[0:2, 0:3] of [4, 3]``."""
    blocks = ", ".join(
        "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(c.offsets, c.sizes, strict=True)) + "]"
        for c in layout.chunks()
    )
    return f"{blocks or 'nothing'} of {list(layout.shape)}"


def _view(local: Tensor, chunk: Chunk) -> Tensor:
    for dim, (start, size) in enumerate(zip(chunk.local, chunk.sizes, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def _rebuild(local: Tensor, shape: Any, slices: Any, rows: Any, rank: int) -> ShardTensor:
    shard = None
    if rows is not None:
        count, ranks, align = rows
        shard = WeightShard(count, ranks, group_name="", align=align)
    own = None if slices is None else TensorSlices(*slices)
    return ShardTensor(local, ShardLayout(tuple(shape), own, shard, rank))


torch.serialization.add_safe_globals([_rebuild])


def shard_for(value: Any, layout: ShardLayout, name: str) -> Tensor:
    """This rank's shard of a value of a checkpoint: of a :class:`ShardTensor` of the same layout, or of a full tensor.

    Raises:
        ValueError: a value of another model, another number of ranks, or another rank.
    """
    advice = "Load it with torch.distributed.checkpoint, which shards again, or load the full tensor"
    if isinstance(value, ShardTensor):
        if _same(value.shard_layout, layout) and tuple(value.local.shape) == layout.local_shape:
            return value.local
        expected, got = f"what this rank has, {_held(layout)}", _held(value.shard_layout)
        raise ValueError(message("load_state_dict", name, expected, got, advice))
    if tuple(value.shape) != layout.shape:
        got = f"a tensor of sizes {list(value.shape)}"
        advice = "Load a checkpoint of this model, not one of a part of it"
        expected = f"the full weight, of sizes {list(layout.shape)}"
        raise ValueError(message("load_state_dict", name, expected, got, advice))
    return layout.local_shard_of(values_of(value))


def values_of(tensor: Any) -> Any:
    """The numbers of a quantized tensor, of which a shard has no bytes of the full tensor; any other one unchanged."""
    return tensor.dequantize() if isinstance(tensor, FormatTensor) and tensor.format.is_quantized else tensor


def _same(one: ShardLayout, other: ShardLayout) -> bool:
    """Whether both have the same blocks; names of groups may differ between runs."""
    return (one.shape, one.local_shape, one.chunks()) == (other.shape, other.local_shape, other.chunks())
