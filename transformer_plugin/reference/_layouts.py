"""Layouts of the stored scales of a matrix, by family of formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_plugin.formats import BLOCK, Format
from transformer_plugin.reference._fp8 import decode_exponent


class Layout(Protocol):
    """How one family stores its scales. torch has no arithmetic for E8M0 and E4M3, so their bytes are uint8 here."""

    def store(self, scale: Tensor, rows: int) -> Tensor:
        """Returns scales ``[blocks down, blocks across]`` of a matrix with this number of rows in their stored
        layout."""

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the float32 scale of each element, which broadcasts to ``[..., rows, columns]``."""

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        """Returns zeros for the scales of a ragged matrix ``[rows, columns]``."""

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        """Returns the part of group ``g`` with the rows from begin to end; ``block`` is the number of blocks of 128
        rows in the groups before it."""


class _OneScale:
    """fp8_tensor: ``[1]``; ``[G]`` for a stack of matrices or a ragged one."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def store(self, scale: Tensor, rows: int) -> Tensor:
        return scale.reshape(1)

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        return stored[:, None, None] if stored.numel() != 1 else stored

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        return torch.zeros(groups)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        return ragged[g : g + 1]


class _RowScales:
    """fp8_row: ``[M]``, one scale per row of the data."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def store(self, scale: Tensor, rows: int) -> Tensor:
        return scale.reshape(rows)

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        return stored[..., None]

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        return torch.zeros(rows)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        return ragged[begin:end]


class _BlockScales:
    """fp8_block: ``[ceil(K/128), up4(M)]``, with the scales of one block of columns adjacent; for square blocks
    ``[ceil(M/128), up4(ceil(K/128))]``."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def store(self, scale: Tensor, rows: int) -> Tensor:
        stored = scale if self.format.square_blocks else scale.T
        return F.pad(stored, (0, -stored.shape[1] % 4)).contiguous()

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        assert self.format.block is not None
        height, width = self.format.block
        scale = stored if self.format.square_blocks else stored.mT
        scale = scale.repeat_interleave(height, -2)[..., :rows, :]
        return scale.repeat_interleave(width, -1)[..., :columns]

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        if transposed:
            return torch.zeros(-(-rows // BLOCK) + groups, -(-columns // 4) * 4)
        return torch.zeros(-(-columns // BLOCK), -(-rows // 4) * 4)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        return ragged[block : block + -(-(end - begin) // BLOCK)] if transposed else ragged[:, begin:end]


class _ByteScales:
    """mxfp8 and nvfp4: bytes ``[up128(M), up4(ceil(K/width))]``, with the scales of a row's blocks adjacent, as
    TransformerEngine's row-wise scales before they are swizzled. The scale of a square block is repeated for each
    of its rows."""

    def __init__(self, format: Format) -> None:
        assert format.block is not None
        self.format = format
        self.height, self.width = format.block
        self.per_128 = 128 // self.width

    def store(self, scale: Tensor, rows: int) -> Tensor:
        scale = scale.repeat_interleave(self.height, 0)[:rows]
        return F.pad(scale, (0, -scale.shape[1] % 4, 0, -rows % 128))

    def spread(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        bytes = stored.view(torch.uint8)[..., :rows, :]
        scale = (
            decode_exponent(bytes)
            if self.format.family == "mxfp8"
            else bytes.view(torch.float8_e4m3fn).float()
        )
        return scale.repeat_interleave(self.width, -1)[..., :columns]

    def ragged(self, rows: int, columns: int, groups: int, transposed: bool) -> Tensor:
        if transposed:
            across = self.per_128 * (-(-rows // 128) + groups)
            return torch.zeros(-(-columns // 128) * 128, across, dtype=torch.uint8)
        blocks = -(-columns // self.width)
        return torch.zeros(-(-rows // 128) * 128, -(-blocks // 4) * 4, dtype=torch.uint8)

    def of_group(self, ragged: Tensor, g: int, begin: int, end: int, block: int, transposed: bool) -> Tensor:
        if transposed:
            last = block + -(-(end - begin) // 128)
            return ragged[:, self.per_128 * block : self.per_128 * last]
        return ragged[begin:end]


def layout_of(format: Format) -> Layout:
    """Returns the layout of a format's scales, before any tiling."""
    layouts: dict[str, Callable[[Format], Layout]] = {
        "fp8_tensor": _OneScale,
        "fp8_row": _RowScales,
        "fp8_block": _BlockScales,
        "mxfp8": _ByteScales,
        "nvfp4": _ByteScales,
    }
    return layouts[format.family](format)


def tile(scale: Tensor) -> Tensor:
    """Rearranges scales for Blackwell's tensor cores: tiles of 128 rows and 4 columns, 512 bytes each, in row-major
    order. In a tile, the byte of row r and column c is ``(r % 32) * 16 + r // 32 * 4 + c``."""
    tiles = scale.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    return tiles.movedim(-2, -4).transpose(-2, -3).reshape(scale.shape)


def untile(scale: Tensor) -> Tensor:
    """Reverses :func:`tile`."""
    rows, columns = scale.shape[-2:]
    tiles = scale.reshape(*scale.shape[:-2], rows // 128, columns // 4, 32, 4, 4)
    return tiles.transpose(-2, -3).movedim(-4, -2).reshape(scale.shape)
