"""How the buffers of a quantized weight are made of those that each rank quantized from its rows of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.formats import BLOCK, Format
from transformer_plugin.parallel._collectives import all_reduce_max
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.tensor import _layout
from transformer_plugin.tensor._layout import Shape

#: Where the columnwise buffers come from: there are none; they are gathered, too; or each rank transposes the rowwise
#: ones, which have the same values.
Columns = Literal["none", "gathered", "transposed"]
OP = "quantize_all_gather"


class BufferLayout(NamedTuple):
    """One buffer of the weight."""

    #: Field of :class:`transformer_plugin.tensor._base.Buffers`.
    name: str
    dtype: torch.dtype
    #: Sizes for the unsharded weight, and of one rank.
    unsharded: tuple[int, ...]
    shard: tuple[int, ...]
    #: Along which dimension the ranks' shards follow each other. None: all ranks have the same, after a reduction.
    axis: int | None
    #: How many entries of a shard along this dimension hold values; the rest is padding.
    used: int

    @property
    def is_joined(self) -> bool:
        """Whether the shards, one after the other, are the unsharded buffer."""
        return self.axis == 0 and self.used == self.shard[0]

    def joined(self, gathered: Tensor) -> Tensor:
        """The unsharded buffer over the gathered memory."""
        rows = gathered.view(self.dtype).view(-1, *self.shard[1:])
        return rows[: self.unsharded[0]] if rows.shape[0] != self.unsharded[0] else rows

    def assemble(self, gathered: Tensor, out: Tensor) -> None:
        """Writes the unsharded buffer from the gathered memory, and zeros into its padding."""
        source, out = plain(gathered.view(self.dtype)), plain(out)
        if self.axis is None:
            out.copy_(source.view(self.unsharded))
            return
        shards = source.view(-1, *self.shard).narrow(1 + self.axis, 0, self.used)
        ranks = shards.shape[0]
        if self.axis == 1:
            shards = shards.transpose(0, 1)
        if out.shape[self.axis] != ranks * self.used:
            out.zero_()
        out.narrow(self.axis, 0, ranks * self.used).unflatten(self.axis, (ranks, self.used)).copy_(shards)


def plain(tensor: Tensor) -> Tensor:
    """A tensor whose dtype every kernel of torch copies: bytes of dtypes of one byte."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class Shards(NamedTuple):
    """A weight whose first dimension is sharded over ranks."""

    key: str
    #: ``[N, K]`` or ``[G, N, K]``.
    size: tuple[int, ...]
    ranks: int
    columns: Columns

    @property
    def format(self) -> Format:
        """The format of the weight."""
        return _layout.parsed(self.key)

    @property
    def is_stack(self) -> bool:
        """Whether shards are whole matrices."""
        return len(self.size) == 3

    @property
    def has_scale_per_row(self) -> bool:
        """Whether a row has one scale, and a column of the transposed data one, too."""
        return self.format.block is None and self.format.family != "fp8_tensor"

    @property
    def rows(self) -> int:
        """The length of a shard along the first dimension, padded as FSDP2 pads it."""
        return WeightShard(self.size[0], self.ranks, group_name="").shard_rows


@cache
def buffer_layouts(shards: Shards) -> tuple[BufferLayout, ...]:
    """The buffers that a rank sends or reduces; data along rows is the first."""
    return tuple(_buffer_layouts(shards))


def _buffer_layouts(shards: Shards) -> Iterator[BufferLayout]:
    format = shards.format
    stacked = shards.size[0] if shards.is_stack else None
    full = Shape(shards.size[-2], shards.size[-1], stacked)
    shard = full._replace(stacked=shards.rows) if shards.is_stack else full._replace(rows=shards.rows)
    kinds = [("rowwise_data", "scale_inv", "amax", False)]
    if shards.columns == "gathered":
        kinds.append(("columnwise_data", "columnwise_scale_inv", "columnwise_amax", True))
    assert format.dtype is not None and format.scale_dtype is not None
    for data, scale, amax, columnwise in kinds:
        of = [(data, format.dtype, _layout.data_sizes), (scale, format.scale_dtype, _layout.scale_sizes)]
        of += [(amax, torch.float32, _layout.amax_sizes)] if format.needs_amax else []
        for name, dtype, sizes in of:
            both = sizes(format, full, columnwise), sizes(format, shard, columnwise)
            axis, used = (0, both[1][0]) if shards.is_stack else _place(shards, name, both[1], columnwise)
            yield BufferLayout(name, dtype, *both, axis, used)


def _place(shards: Shards, name: str, sizes: tuple[int, ...], columnwise: bool) -> tuple[int | None, int]:
    """Along which dimension of a buffer the rows of a matrix lie, and how many entries they have there."""
    format, rows = shards.format, shards.rows
    if name.endswith("data"):
        return (1, sizes[1]) if columnwise else (0, sizes[0])
    if format.family == "fp8_tensor" or name.endswith("amax"):
        return None, 0
    if shards.has_scale_per_row:
        return (None, 0) if columnwise else (0, rows)
    assert format.block is not None
    height, width = format.block
    if format.family == "fp8_block":
        if format.square_blocks:
            return (1 if columnwise else 0), rows // height
        return (0, rows // width) if columnwise else (1, rows)
    return (1, rows // width) if columnwise else (0, rows)


def check(shards: Shards, module: str) -> None:
    """Raises, on all ranks alike, if a shard would not be whole matrices or whole blocks."""
    format, (first, *_) = shards.format, shards.size
    if shards.is_stack:
        unit, what = 1, "matrices, each rank whole ones"
    else:
        unit = 1 if format.block is None else max(format.block)
        what = f"rows, each rank whole blocks of {unit} rows of '{format.key}'"
    even = format.family == "fp8_tensor" and not shards.is_stack
    if even or first % (unit * shards.ranks) == 0:
        return
    multiple = unit * shards.ranks
    advice = f"Use {-(-first // multiple) * multiple}, fewer ranks, or leave the layer out with 'filter'"
    refuse(
        "model", f"a multiple of {multiple} {what}", f"{first} in a {module} on {shards.ranks} ranks", advice
    )


def refuse(
    argument: str, expected: str, got: str, advice: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(_layout.message(OP, argument, expected, got, advice))


@cache
def columns_of(formats: tuple[str, str, str], device: torch.device) -> Columns:
    """Whether products of a layer on a device read columnwise buffers of the weight, and where these come from."""
    format = _layout.parsed(formats[1])
    if not format.square_blocks and format.family != "fp8_tensor":
        return "gathered"
    with torch.no_grad():
        made = ops.quantize_weight(torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16, device=device), *formats)
    if len(made) <= (3 if format.needs_amax else 2):
        return "none"
    return "gathered" if format.needs_amax else "transposed"


def quantize_shard(
    shards: Shards, rows: Tensor, group: Any, largest: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """The buffers of this rank's rows, bit for bit those that the full weight has there.

    ``largest`` returns the largest of each number over the ranks; by default an all-reduce over the group.
    """
    largest = largest or partial(all_reduce_max, OP, "amaxes", group=group)
    columns = shards.columns == "gathered"
    if shards.has_scale_per_row and columns and not shards.is_stack:
        return _quantize_rows_and_columns(shards, rows, largest)
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None)
    if shards.format.needs_amax or (shards.format.family == "fp8_tensor" and not shards.is_stack):
        amax: Any = ops.amax(rows, shards.key)
        if not shards.is_stack:
            amax = largest(amax)
        amaxes = (amax, amax if columns and shards.format.needs_amax else None)
    outputs = ops.quantize(rows, shards.key, None, *amaxes, None, True, columns)
    names = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
    buffers = dict(zip(names, outputs, strict=False))
    if shards.format.needs_amax:
        found = zip(("amax", "columnwise_amax"), amaxes, strict=True)
        buffers.update({name: amax for name, amax in found if amax is not None})
    return buffers


def _quantize_rows_and_columns(
    shards: Shards, rows: Tensor, largest: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Of a format with a scale per row: its columns have scales of the rows of all ranks.

    The op finds them itself, because one more row holds the magnitudes of the other ranks.
    """
    magnitudes = rows.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(0, keepdim=True)
    magnitudes = largest(magnitudes)
    data, scale = ops.quantize(rows, shards.key)
    columns, columns_scale = ops.quantize(
        torch.cat([rows, magnitudes]), shards.key, rowwise=False, columnwise=True
    )
    columns = plain(columns)[:, :-1].contiguous().view(columns.dtype)
    return {
        "rowwise_data": data,
        "scale_inv": scale,
        "columnwise_data": columns,
        "columnwise_scale_inv": columns_scale,
    }


def transposed_buffers(shards: Shards, device: torch.device) -> dict[str, Tensor]:
    """Uninitialized columnwise buffers of a format whose columns have the values of its rows."""
    format = shards.format
    stacked = shards.size[0] if shards.is_stack else None
    full = Shape(shards.size[-2], shards.size[-1], stacked)
    data = _layout.data_sizes(format, full, True)
    scale = _layout.scale_sizes(format, full, True)
    return {
        "columnwise_data": torch.empty(data, dtype=format.dtype, device=device),
        "columnwise_scale_inv": torch.empty(scale, dtype=format.scale_dtype, device=device),
    }


def transpose(shards: Shards, data: Tensor, scale: Tensor, to_data: Tensor, to_scale: Tensor) -> None:
    """Writes the columnwise buffers of such a format from its rowwise ones."""
    format, (rows, columns) = shards.format, shards.size[-2:]
    plain(to_data).copy_(plain(data).mT)
    source, out = plain(scale), plain(to_scale)
    if format.family == "fp8_tensor":
        out.copy_(source)
        return
    assert format.block is not None
    side = format.block[0]
    down, across = -(-rows // side), -(-columns // side)
    if out.numel() != out.shape[0] * columns:
        out.zero_()
    if format.family == "fp8_block":
        out[..., :across, :down].copy_(source[..., :down, :across].mT)
        return
    # A scale of mxfp8 is stored for each row of its block.
    blocks = source[..., :rows:side, :across].mT.unsqueeze(-2).expand(*source.shape[:-2], across, side, down)
    out[..., :columns, :down].unflatten(-2, (across, side)).copy_(blocks)
