"""Row kernels on their vector and their generic path: widths, addresses, dtypes and numbers of slots, bit for bit.

Values are small integers and weights powers of two, so that sums are exact in float32 and the reference, which does not
fuse multiply and add, has the same bits. On CUDA, results with random values have the bits of the CPU, too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")
#: Odd, one vector, less than a warp of vectors, and several warps with a rest.
WIDTHS = [1, 7, 8, 100, 515, 2056]
#: Around the slots that a warp sorts, and the most.
TOPKS = [0, 1, 2, 8, 31, 32, 33, 100, 1024]


def unaligned(tensor: Tensor) -> Tensor:
    """A contiguous copy whose address is one element past a multiple of 16 bytes."""
    copy = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    assert copy.is_contiguous() and (not copy.numel() or copy.data_ptr() % 16 == copy.element_size())
    return copy.copy_(tensor)


def draw_slots(tokens: int, topk: int, capacity: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A map in random order with dropped, masked and invalid slots, and rows without a token."""
    order = torch.randperm(max(capacity, tokens * topk), generator=generator)
    slot = order[: tokens * topk].view(tokens, topk)
    slot = torch.where(slot < capacity, slot, -1)
    masks = torch.rand(tokens, topk, generator=generator)
    slot = torch.where(masks < 0.1, -1, torch.where(masks > 0.97, capacity + 5, slot)).int()
    source = torch.full((capacity,), -1, dtype=torch.int32)
    placed = (slot >= 0) & (slot < capacity)
    token = torch.arange(tokens, dtype=torch.int32)[:, None].expand(tokens, topk)
    source[slot[placed].long()] = token[placed]
    return slot, source


def draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if kind == "exact":
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_weights(kind: str, slot: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if kind == "exact":
        return 2.0 ** torch.randint(-2, 3, slot.shape, generator=generator).to(wide)
    return torch.randn(slot.shape, generator=generator, dtype=torch.float64).to(wide)


def check_rows(
    tokens: int, topk: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device, place=None
) -> None:
    """Compares unpermute and permute_backward with the reference, and with the CPU. `place` moves tensors to the
    device."""
    place = place or (lambda tensor: tensor.to(device))
    generator = torch.Generator().manual_seed(tokens + topk + width)
    slot, source = draw_slots(tokens, topk, capacity, generator)
    for kind in ("exact", "random"):
        rows = draw(kind, (capacity, width), dtype, generator)
        weights = draw_weights(kind, slot, dtype, generator)
        for w in (None, weights):
            there = None if w is None else w.to(device)
            got = ops.unpermute(place(rows), slot.to(device), source.to(device), there)
            assert_same_bits(got, ops.unpermute(rows, slot, source, w))
            if w is None:
                assert_same_bits(got, ops.permute_backward(place(rows), slot.to(device)))
            if kind == "exact":
                assert_same_bits(got, reference.unpermute(rows, slot, source, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_every_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    check_rows(13, 8, 120, width, dtype, device)
    check_rows(13, 8, 120, width, dtype, device, lambda tensor: unaligned(tensor.to(device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", TOPKS)
def test_sums_of_any_number_of_slots(topk: int, dtype: torch.dtype, device: torch.device) -> None:
    check_rows(5, topk, 5 * topk + 3, 24, dtype, device)
    check_rows(5, topk, 2 * topk, 9, dtype, device)


@pytest.mark.parametrize("tokens", [0, 1, 300, 70_000])
def test_sums_of_any_number_of_tokens(tokens: int, device: torch.device) -> None:
    check_rows(tokens, 2, 2 * tokens + 1, 16, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_that_several_pairs_name_is_added_for_each(dtype: torch.dtype, device: torch.device) -> None:
    slot = torch.tensor([[1, 0, 1], [2, 2, 2], [-1, 3, 9]], dtype=torch.int32)
    source = torch.zeros(4, dtype=torch.int32)
    weights = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 0.5], [8.0, 1.0, 8.0]]).to(dtype)
    weights = weights if dtype == torch.float64 else weights.float()
    rows = torch.tensor([[1.0], [10.0], [100.0], [1000.0]]).expand(4, 8).to(dtype)
    got = ops.unpermute(rows.to(device), slot.to(device), source.to(device), weights.to(device))
    assert got[:, 0].tolist() == [52.0, 250.0, 1000.0]
    assert_same_bits(got, got[:, :1].expand(3, 8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, 16, 4096])
def test_copies_of_every_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randint(0, 256, (21, width * dtype.itemsize), generator=generator, dtype=torch.uint8)
    tokens = tokens.view(dtype)
    indices = torch.randint(-1, 5, (21, 3), generator=generator)
    for place in (lambda tensor: tensor.to(device), lambda tensor: unaligned(tensor.to(device))):
        rows, _, slot, source, _ = ops.permute(place(tokens), indices.to(device), 5, 80, 4)
        source = source.cpu().long()
        expected = torch.where((source >= 0)[:, None], tokens.view(torch.uint8)[source.clamp(min=0)], 0)
        assert_same_bits(rows.view(torch.uint8), expected)
        if dtype in DTYPES:
            grad = ops.unpermute_backward(place(tokens), None, slot, source.int().to(device))[0]
            assert_same_bits(grad.view(torch.uint8), expected)


@pytest.mark.parametrize("topk", [1, 8, 33])
@pytest.mark.parametrize("capacity", [0, 40_000, 200_000])
def test_copies_of_many_rows(capacity: int, topk: int, device: torch.device) -> None:
    """Dropped rows, and many rows without a token."""
    generator = torch.Generator().manual_seed(capacity)
    tokens = torch.randn(6000, 8, generator=generator).bfloat16()
    indices = torch.randint(-1, 64, (6000, topk), generator=generator)
    rows, _, _, source, _ = ops.permute(tokens.to(device), indices.to(device), 64, capacity, 16)
    source = source.cpu().long()
    expected = torch.where((source >= 0)[:, None], tokens[source.clamp(min=0)], 0.0)
    assert_same_bits(rows, expected)


def test_copies_follow_source_where_the_two_maps_disagree(device: torch.device) -> None:
    """The gradient of unpermute without weights reads ``source`` only."""
    slot = torch.tensor([[0, 2], [0, -1], [9, 3]], dtype=torch.int32, device=device)
    source = torch.tensor([1, 2, 0, -1, 7, 2], dtype=torch.int32, device=device)
    grad = torch.tensor([[1.0], [10.0], [100.0]], device=device).expand(3, 64)
    got = ops.unpermute_backward(grad, None, slot, source)[0]
    assert got[:, 0].tolist() == [10.0, 100.0, 1.0, 0.0, 0.0, 100.0]
    assert_same_bits(got, got[:, :1].expand(6, 64))
