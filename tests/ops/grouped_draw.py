"""Random inputs of grouped products. A seed determines all choices; tensors are drawn on the device that uses them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ops.gemm_oracle import whole
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import FLOAT_DTYPES
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import COLUMNS, rows_for, width_for

COUNTS = [0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 8, 16, 16, 40, 40]
ROWS = [0, 0, 1, 2, 3, 7, 8, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 192, 255, 257]
WIDTHS = [
    0,
    1,
    3,
    8,
    8,
    16,
    17,
    24,
    33,
    40,
    64,
    72,
    96,
    127,
    128,
    130,
    136,
    144,
    160,
    192,
    200,
    256,
    264,
    272,
    288,
]
MOST_ROWS = 512  # in all groups together


@dataclass(frozen=True)
class Groups:
    """Group sizes on the host and on the device, and the number of rows of the buffer."""

    host: Tensor
    device: Tensor
    capacity: int

    @property
    def end(self) -> int:
        return int(self.host.sum())

    @property
    def count(self) -> int:
        return self.host.numel()

    @property
    def longest(self) -> int:
        return int(self.host.max()) if self.count else 0


class QuantizedOperand(NamedTuple):
    """Quantized data with its scales, the amax if the format is nvfp4, and the dequantized values in float64."""

    data: Tensor
    scale: Tensor
    amax: Tensor | None
    values: Tensor


class Draw:
    """Makes the choices of ``random.Random(seed)``. Values are either whole numbers, whose FP32 sums are exact, or
    normal."""

    def __init__(self, seed: str, device: torch.device, whole: bool | None = None) -> None:
        self.random, self.device = Random(seed), device
        self.generator = torch.Generator(device).manual_seed(self.random.getrandbits(60))
        self.whole = self.maybe() if whole is None else whole
        self.spread = 0 if self.whole else self.random.choice([0, 0, 2, 6])
        self.step = self.random.choice([1, 1, 8, 16, 16])  # widths are multiples of this
        #: If rows have different magnitudes, float16 would overflow.
        self.dtypes = FLOAT_DTYPES[:2] if self.spread else FLOAT_DTYPES

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def width(self, *formats: str) -> int:
        return width_for(-(-self.random.choice(WIDTHS) // self.step) * self.step, *formats)

    def groups(self, *formats: str) -> Groups:
        """Returns up to 40 groups whose sizes the formats support; the buffer may have rows past the groups."""
        count, left, sizes = self.random.choice(COUNTS), MOST_ROWS, list[int]()
        for _ in range(count):
            size = rows_for(self.random.choice(ROWS), *formats)
            sizes.append(size if size <= left else 0)
            left -= sizes[-1]
        capacity = rows_for(sum(sizes) + self.random.choice([0, 0, 1, 3, 15, 16, 80]), *formats)
        host = torch.tensor(sizes, dtype=self.random.choice([torch.int32, torch.int64]))
        return Groups(host, host.to(self.device), capacity)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draws whole numbers up to 4, or normal values in rows of different magnitudes."""
        if self.whole:
            values = torch.randint(-4, 5, shape, generator=self.generator, device=self.device)
            return values.to(dtype)
        values = torch.randn(shape, generator=self.generator, device=self.device)
        if self.spread and len(shape) > 1:
            size = (*shape[:-1], 1)
            exponents = torch.randint(
                -self.spread, self.spread + 1, size, generator=self.generator, device=self.device
            )
            values = values * 2.0**exponents
        return values.to(dtype)

    def operand(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor: contiguous, transposed, strided, or at an address that is not a multiple of 16."""
        kind = self.random.choice(["whole", "whole", "whole", "transposed", "sliced", "unaligned"])
        if kind == "transposed":
            return self.tensor(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
        if kind == "sliced":
            return self.tensor(*shape[:-1], 2 * shape[-1] + 3, dtype=dtype)[..., 3::2]
        values = self.tensor(*shape, dtype=dtype)
        if kind == "whole":
            return values
        flat = torch.empty(values.numel() + 3, dtype=dtype, device=self.device)
        flat[3:] = values.flatten()
        return flat[3:].view(shape)

    def matrix(self, groups: Groups, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a ragged matrix whose rows past the groups are NaN."""
        matrix = self.operand(groups.capacity, columns, dtype=dtype)
        matrix[groups.end :] = float("nan")
        return matrix

    def factors(self, count: int) -> Tensor | None:
        """Returns None, or one factor per group: multiples of a quarter if values are whole numbers. Some factors
        are 0."""
        if self.maybe():
            return None
        values = self.tensor(count) / 4
        return values * (torch.rand(count, generator=self.generator, device=self.device) < 0.8)

    def buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns a buffer for a result: contiguous, with padded rows, at any address, or with the rows of the
        groups interleaved."""
        *lead, columns = shape
        more, first = self.random.choice([(0, 0), (0, 0), (16, 0), (16, 8), (5, 3)])
        if len(lead) == 2 and self.maybe(0.3):
            wide = self.tensor(lead[1], lead[0], columns + more, dtype=dtype).transpose(0, 1)
        else:
            wide = self.tensor(*lead, columns + more, dtype=dtype)
        return wide[..., first : first + columns]

    def rows_of(self, groups: Groups, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a matrix, a row index with one entry per row of the buffer, and a copy of the indexed rows.

        Rows that the index does not contain are NaN, and index entries past the groups are out of range.
        """
        rows = self.random.randint(1, 200)
        shape, kind = (groups.capacity,), groups.host.dtype
        index = torch.randint(rows, shape, generator=self.generator, device=self.device, dtype=kind)
        source = self.operand(rows, columns, dtype=dtype)
        taken = torch.zeros(rows, dtype=torch.bool, device=self.device)
        taken[index[: groups.end].long()] = True
        source[~taken] = float("nan")
        copy = source[index.long()]
        index[groups.end :] = 2**31 - 1
        return source, index, copy


def is_whole(tensor: Tensor) -> bool:
    """Whether the address and strides of a result are multiples of 16 bytes, as the TMA of Hopper requires."""
    steps = [
        s * tensor.element_size() for n, s in zip(tensor.shape[:-1], tensor.stride(), strict=False) if n > 1
    ]
    return tensor.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)


def quantize_operand(
    x: Tensor, key: str, groups: Groups | None = None, columns: bool = False
) -> QuantizedOperand:
    """Quantizes a matrix, a stack or a ragged matrix, row-wise or column-wise."""
    sizes = None if groups is None else groups.device
    flags, amax = COLUMNS if columns else {}, None
    if Format.parse(key).needs_amax:
        amax = ops.amax(x, key, sizes, **flags)
    amaxes = {"amax_t" if columns else "amax": amax}
    data, scale = ops.quantize(x, key, sizes, **amaxes, **flags)
    values = ops.dequantize(data, scale, key, torch.float32, sizes, columns, amax)
    return QuantizedOperand(data, scale, amax, values.double())


def values_of(x: Tensor, key: str, groups: Groups | None = None, columns: bool = False) -> Tensor:
    """Returns the values of ``x`` after quantization to a format and back, in float64."""
    if key in ("none", "bf16"):
        return (x.bfloat16() if key == "bf16" else x).double()
    return quantize_operand(x, key, groups, columns).values


def memory_around(out: Tensor) -> Tensor:
    """Returns a copy of the storage that a buffer is a view of, with zeros in the buffer's own elements."""
    memory = whole(out).clone()
    memory.as_strided(out.shape, out.stride(), out.storage_offset()).zero_()
    return memory


def assert_bits(got: Tensor, expected: Tensor, name: str) -> None:
    """Compares as :func:`assert_same_bits` does, but copies to the CPU only if something differs."""
    bytes_of = [
        t.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (got, expected)
    ]
    if got.dtype != expected.dtype or not torch.equal(*bytes_of):
        assert_same_bits(got, expected, name)
