"""The ops that values have, and the errors of those that they do not have."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_plugin as tp
from tests.tensor.values import CASES, bytes_of, quantized, same_bytes, sizes, stack
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor
from transformer_plugin.tensor._table import HANDLERS

STACKS = [case for case in CASES if case[1] == "stack"]


def test_members_are_views(device: torch.device) -> None:
    value = stack(device)
    data = value.rowwise_data
    assert data is not None
    members = [value[2], value.select(0, -2), value.unbind()[2], value.unbind(0)[2], value.members()[2]]
    assert all(type(member) is torch.Tensor and member.data_ptr() == data[2].data_ptr() for member in members)
    members[0].fill_(7.0)
    assert bool((data[2] == 7).all()) and not bool((data[1] == 7).any())
    for part in (
        value[1:3],
        value.narrow(0, 1, 2),
        value.split(1)[1],
        value.split([1, 2, 1])[1],
        value.chunk(4)[1],
    ):
        assert type(part) is GroupedTensor and part.data_ptr() == data[1].data_ptr()
        assert torch.equal(part.packed(), data[1 : 1 + part.num_groups])
    assert [part.num_groups for part in value.split(3)] == [3, 1]
    assert value[4:].num_groups == 0 and value[:].num_groups == 4
    with pytest.raises(IndexError):
        value[4]


def test_members_that_do_not_exist(device: torch.device) -> None:
    quantized_stack = quantized(("fp8_block", "stack", (True, True)), device)
    for value in (stack(device), quantized_stack):
        groups = value.num_groups
        for index in (groups, -groups - 1):
            with pytest.raises(
                IndexError, match=rf"argument 'index': expected .* {groups} members, got {index}"
            ):
                value.select(0, index)
        for sizes_of_parts in ([1], [groups, 1], [groups + 1, -1], [-1] * groups, []):
            with pytest.raises(ValueError, match=r"argument 'split_sizes': expected .* sum is"):
                value.split(sizes_of_parts)
        for size in (-1, 0):
            with pytest.raises(
                ValueError, match=f"argument 'split_size': expected at least 1 .*, got {size}"
            ):
                value.split(size)
        for dim in (1, 3, -2, -4):
            with pytest.raises(ValueError, match="argument 'dim': expected 0"):
                value.split(1, dim)
        assert [part.num_groups for part in value.split([0, groups], -3)] == [0, groups]
        assert [part.num_groups for part in value[:0].split(2)] == [0]
        assert torch.equal(value.select(-3, -groups), value[0])


@pytest.mark.parametrize("case", STACKS, ids=str)
def test_members_of_a_quantized_stack(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    matrices = value.dequantize(torch.float32)
    for i, member in enumerate(value.unbind()):
        assert type(member) is QuantizedTensor and member.format == value.format
        assert torch.equal(member.dequantize(torch.float32), matrices[i])
        assert {t.untyped_storage().data_ptr() for _, t in member._buffers.present()} == {
            t.untyped_storage().data_ptr() for _, t in value._buffers.present()
        }
    part = value[1:]
    assert part.num_groups == 2 and torch.equal(part.dequantize(torch.float32), matrices[1:])
    alone = tp.quantize(matrices[1].bfloat16(), case[0], rowwise=case[2][0], columnwise=case[2][1])
    value[1].copy_(matrices[1].bfloat16())
    assert same_bytes(value[1], alone)


def test_members_of_a_ragged_value(device: torch.device) -> None:
    value = GroupedTensor(torch.randn(80, 16, device=device), sizes(device))
    assert [member.shape[0] for member in value.members()] == [16, 0, 48]
    assert value.members()[2].data_ptr() == value.data_ptr() + 16 * 16 * 4
    for change in (
        lambda v: v[0],
        lambda v: v.unbind(),
        lambda v: v.split(16),
        lambda v: v[:16],
        lambda v: v.sum(),
    ):
        with pytest.raises(ValueError, match="members whose sizes the host knows"):
            change(value)
    quantized_rows = tp.quantize(value, "fp8_block")
    with pytest.raises(ValueError, match="members of one size, or unquantized"):
        quantized_rows.members()


def test_flat_storage(device: torch.device) -> None:
    value = stack(device)
    flat = value.detach().view(-1)
    assert type(flat) is torch.Tensor and flat.shape == (512,) and flat.data_ptr() == value.data_ptr()
    for other in (value.view(512), torch.ops.aten._unsafe_view(value, [-1])):
        assert other.data_ptr() == value.data_ptr()
    flat.zero_()
    group_sizes = torch.tensor([2, 0, 1, 2], device=device)
    assert not bool(tp.grouped_gemm(torch.randn(5, 16, device=device), value, group_sizes).any())
    assert type(value.view(4, 8, 16)) is GroupedTensor and value.view_as(value).data_ptr() == value.data_ptr()
    for shape in ((16, 8, 4), (32, 16), (4, -1), (511,), torch.int32):
        with pytest.raises((ValueError, RuntimeError)):
            value.view(shape)
    with pytest.raises(ValueError, match=r"expected \[-1\] or \[512\], the flat storage"):
        value.view(32, 16)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_quantized_storage_is_asked_for(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    for shape in ((-1,), (value.numel(),), (1, *value.shape)):
        with pytest.raises(ValueError, match=r"flat_bytes\(\)"):
            value.view(shape)
    for other in (value.view(value.shape), value.as_strided(value.shape, value.stride())):
        assert (
            type(other) is type(value) and same_bytes(other, value) and other.data_ptr() == value.data_ptr()
        )
    for size, stride, offset in (((1,), (1,), 0), (value.shape, value.stride(), 8)):
        with pytest.raises(ValueError, match=r"as_strided\.default"):
            value.as_strided(size, stride, offset)
    rowwise, columnwise = case[2]
    for exists, other, data in (
        (rowwise, False, value.rowwise_data),
        (columnwise, True, value.columnwise_data),
    ):
        if not exists:
            with pytest.raises(ValueError, match="argument 'columnwise'"):
                value.flat_bytes(columnwise=other)
            continue
        flat = value.flat_bytes(columnwise=other)
        assert flat.dtype == torch.uint8 and flat.dim() == 1 and flat.data_ptr() == data.data_ptr()
        assert flat.numel() == data.numel()


def test_expand_to_the_same_shape(device: torch.device) -> None:
    value = stack(device)
    for other in (value.expand(4, 8, 16), value.expand(-1, 8, -1), value.expand_as(value.packed())):
        assert type(other) is GroupedTensor and other.data_ptr() == value.data_ptr()
    for shape in ((1, 4, 8, 16), (4, 8, 32), (2, 8, 16)):
        with pytest.raises((ValueError, RuntimeError)):
            value.expand(shape)
    with pytest.raises(ValueError, match="argument 'size'"):
        value.expand_as(torch.empty(2, 4, 8, 16))


FOUR_PARTS = r"^transformer_plugin::GroupedTensor: argument '\w+': expected .+, got .+\."
UNSUPPORTED = (
    lambda v: v.reshape(2, -1),
    lambda v: v.unsqueeze(0),
    lambda v: v.squeeze(0),
    lambda v: v.transpose(-1, -2),
    lambda v: v.mT,
    lambda v: v.movedim(0, -1),
    lambda v: torch.cat([v, v]),
    lambda v: torch.stack([v, v]),
    lambda v: v @ v.packed() if not v.format.is_quantized else v @ v,
    lambda v: torch.softmax(v, -1),
    lambda v: v.numpy(),
    lambda v: v.tolist(),
    lambda v: v.item(),
    lambda v: numpy.asarray(v),
    lambda v: torch.from_dlpack(v),
    lambda v: v.apply_(lambda x: x),
    lambda v: v.map_(v, lambda x, y: y),
    lambda v: torch.nn.functional.linear(torch.ones(2, v.shape[-1], device=v.device), v),
    lambda v: v.resize_(3),
    lambda v: torch.add(v, 1, out=torch.empty(4)),
)


@pytest.mark.parametrize("i", range(len(UNSUPPORTED)))
def test_other_ops_are_errors(i: int, device: torch.device) -> None:
    for value in (stack(device), quantized(("fp8_block", "stack", (True, True)), device)):
        before = bytes_of(value)
        with pytest.raises(ValueError, match=rf"{FOUR_PARTS} Call .*(packed|dequantize)\(\).*\.$"):
            UNSUPPORTED[i](value)
        assert all(torch.equal(old, bytes_of(value)[name]) for name, old in before.items())


IN_PLACE = (
    lambda v, t: v.add_(t, alpha=0.5),
    lambda v, t: v.mul_(0.5),
    lambda v, t: v.addcdiv_(t, t.abs() + 1, value=-0.1),
    lambda v, t: v.lerp_(t, 0.3),
    lambda v, t: v.fill_(2.0),
    lambda v, t: v.zero_(),
    lambda v, t: v.copy_(t),
    lambda v, t: v.clamp_(-0.5, 0.5),
    lambda v, t: v.masked_fill_(t > 0, 1.0),
    lambda v, t: torch._foreach_add_([v], [t]),
    lambda v, t: torch._foreach_mul_([v, t.clone()], 0.5),
    lambda v, t: torch._foreach_addcmul_([v], [t], [t], 0.1),
    lambda v, t: torch._foreach_lerp_([v], [t], 0.1),
    lambda v, t: torch._foreach_zero_([v]),
    lambda v, t: torch._foreach_copy_([v], [t]),
)


@pytest.mark.parametrize("i", range(len(IN_PLACE)))
def test_elementwise_on_the_storage(i: int, device: torch.device) -> None:
    data, other = torch.randn(4, 8, 16, device=device), torch.randn(4, 8, 16, device=device)
    expected = data.clone()
    IN_PLACE[i](expected, other)
    value = GroupedTensor(data)
    address, version, inner = value.data_ptr(), value._version, data._version
    result: Any = IN_PLACE[i](value, other)
    assert result is value or result[0] is value
    assert torch.equal(data, expected) and value.data_ptr() == address
    assert value._version > version and data._version > inner
    refused = quantized(("mxfp8", "stack", (True, False)), device)
    before = bytes_of(refused)
    if i != 6:  # copy_ quantizes
        with pytest.raises((ValueError, RuntimeError)):
            IN_PLACE[i](refused, torch.randn(3, 48, 160, device=device))
        assert all(torch.equal(old, bytes_of(refused)[name]) for name, old in before.items())


@pytest.mark.parametrize("i", range(len(IN_PLACE)))
def test_elementwise_in_the_groups_of_a_ragged_value(i: int, device: torch.device) -> None:
    data, other = torch.randn(80, 16, device=device), torch.randn(80, 16, device=device)
    data[64:] = torch.nan
    expected = data.clone()
    IN_PLACE[i](expected, other)
    value = GroupedTensor(data, sizes(device))
    IN_PLACE[i](value, other)
    assert torch.equal(data[:64], expected[:64]) and bool(data[64:].isnan().all())


READS = (
    lambda v, t: t.add(v, alpha=0.1),
    lambda v, t: v + t,
    lambda v, t: v * 2,
    lambda v, t: torch._foreach_add([t], [v], alpha=0.1)[0],
    lambda v, t: v.norm(),
    lambda v, t: torch.linalg.vector_norm(v, dim=-1),
    lambda v, t: v.sum(0),
    lambda v, t: v.abs().mean(),
    lambda v, t: torch.isfinite(v).all(),
    lambda v, t: torch._foreach_norm([v])[0],
)


@pytest.mark.parametrize("i", range(len(READS)))
def test_reads_give_plain_tensors(i: int, device: torch.device) -> None:
    data, other = torch.randn(4, 8, 16, device=device), torch.randn(4, 8, 16, device=device)
    result = READS[i](GroupedTensor(data), other)
    assert type(result) is torch.Tensor and torch.equal(result, READS[i](data, other))
    with pytest.raises(ValueError, match="high precision"):
        READS[i](
            quantized(("fp8_block", "stack", (True, True)), device), torch.randn(3, 48, 160, device=device)
        )


def test_states_are_plain(device: torch.device) -> None:
    for value in (stack(device), quantized(("nvfp4", "stack", (True, False)), device)):
        new: list[torch.Tensor] = [
            torch.zeros_like(value),
            torch.empty_like(value),
            value.new_zeros(value.shape),
        ]
        new += [torch.zeros_like(value, memory_format=torch.preserve_format), torch.ones_like(value)]
        for tensor in new:
            assert type(tensor) is torch.Tensor and tensor.is_contiguous()
            assert (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)
        assert torch.zeros_like(value, dtype=torch.float32).dtype == torch.float32


def test_nominal_dtype_and_device(device: torch.device) -> None:
    value = quantized(("nvfp4", "stack", (True, True)), device)
    single = value.float()
    assert single.dtype == torch.float32 and same_bytes(single, value)
    assert single.dequantize().dtype == torch.float32
    with pytest.raises(ValueError, match="a nominal dtype"):
        value.to(torch.int8)
    assert value.to(device) is value
    moved = value.to("cpu")
    assert moved.device.type == "cpu" and same_bytes(moved.to(device), value)
    plain = stack(device)
    half = plain.bfloat16()
    assert type(half) is GroupedTensor and torch.equal(half.packed(), plain.packed().bfloat16())


def test_data_is_replaced_or_refused(device: torch.device) -> None:
    value = stack(device)
    bucket = torch.randn(4 * 8 * 16, device=device)
    value.data = bucket.view(4, 8, 16)
    assert value.data_ptr() == bucket.data_ptr() and torch.equal(value.packed(), bucket.view(4, 8, 16))
    bucket.zero_()
    assert not bool(value.packed().any())
    value.rowwise_data = torch.ones(4, 8, 16, device=device)
    assert bool((value.packed() == 1).all())
    other = stack(device)
    value.data = other
    assert value.data_ptr() == other.data_ptr()
    before = value.data_ptr()
    wrong: list[Any] = [
        torch.ones(4, 8, 15),
        torch.ones(4, 8, 16, dtype=torch.float64),
        torch.ones(4, 16, 8).mT,
        3,
    ]
    wrong += [torch.ones(4, 8, 16, device="meta"), quantized(("fp8_block", "stack", (True, True)), device)]
    for replacement in wrong:
        with pytest.raises(ValueError, match="argument 'data': expected"):
            value.data = replacement
        assert value.data_ptr() == before
    rows = quantized(("fp8_block", "stack", (True, False)), device)
    again = quantized(("fp8_block", "stack", (True, False)), device, seed=1)
    rows.data = again
    assert same_bytes(rows, again)
    for replacement in (torch.ones(3, 48, 160), quantized(("mxfp8", "stack", (True, False)), device)):
        with pytest.raises(ValueError, match="argument 'data': expected"):
            rows.data = replacement


def test_equal(device: torch.device) -> None:
    for case in CASES[::4]:
        value = quantized(case, device)
        assert torch.equal(value, value.clone()) and not torch.equal(value, quantized(case, device, seed=1))
    assert not torch.equal(value, value.dequantize()) and torch.equal(stack(device), stack(device)) is False


def test_text_reads_no_number(device: torch.device) -> None:
    value = quantized(("mxfp8", "stack", (True, False)), device)
    ops: list[Any] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func)
            return func(*args, **(kwargs or {}))

    with Recorded():
        texts = {repr(value), str(value), f"{value}"}
        assert not ops
        value.rowwise_data.view(torch.uint8).sum()
        assert torch.ops.aten.sum.default in ops  # what reads is seen
    assert texts == {
        "GroupedTensor([3, 48, 160], format='mxfp8:e4m3', dtype=torch.bfloat16, "
        f"device='{value.device}', buffers=(rowwise_data, scale_inv))"
    }


@pytest.mark.gpu
def test_members_are_read_without_the_host() -> None:
    """Only members() of a ragged value may wait for the device."""
    device = torch.device("cuda")
    value, group_sizes = stack(device), torch.tensor([2, 0, 1, 2], device=device)
    x = torch.randn(5, 16, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged = tp.activation(tp.grouped_gemm(GroupedTensor(x, group_sizes), value))
        ragged.mul_(2)
        tp.quantize(ragged.packed(), "fp8_block", group_sizes=group_sizes).dequantize()
        value.unbind()
        value[1:3].mul_(2)
        with pytest.raises(RuntimeError):
            ragged.members()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_op_of_the_table_exists() -> None:
    for name in HANDLERS:
        namespace, _, op = name.partition("::")
        if namespace == "aten":
            assert hasattr(torch.ops.aten, op), name
    assert len(HANDLERS) > 100


@pytest.mark.parametrize("groups", [0, 2])
def test_what_torch_does_not_check_is_refused(groups: int) -> None:
    """torch divides by this argument of the op, which ends the process if it is 0.

    On a GPU it does so before a subclass of Tensor is asked.
    """
    with pytest.raises(ValueError, match="native_channel_shuffle"):
        torch.ops.aten.native_channel_shuffle(stack(torch.device("cpu")), groups)
