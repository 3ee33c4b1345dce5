"""Values over buffers that exist: what is accepted, what is refused, and that nothing is copied."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import transformer_plugin as tp
from tests.tensor.values import CASES, bytes_of, numbers, quantized, same_bytes, sizes, stack
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor, _layout


def arguments_of(value: Any) -> dict[str, Any]:
    """What the constructor takes to make the value again."""
    arguments = dict(value._buffers.present())
    rows = value.shape[0] if value.rowwise_data is None and value._buffers.group_sizes is not None else None
    extra = {} if rows is None else {"rows": rows}
    return {**arguments, **extra, "format": value.format, "dtype": value.dtype}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_made_of_what_quantize_returns(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    again = type(value)(**arguments_of(value), requires_grad=True)
    assert type(again) is (QuantizedTensor if case[1] == "matrix" else GroupedTensor)
    assert again.shape == numbers(case[1], device).shape and again.dtype == torch.bfloat16
    assert again.format == Format.parse(case[0]) and again.device == value.device
    assert again.requires_grad and again.is_leaf
    for (name, old), (_, new) in zip(value._buffers.present(), again._buffers.present(), strict=True):
        assert old is new, name
    assert again.stride() == numbers(case[1], device).stride() and again.is_contiguous()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantizes_as_the_op(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    key, kind, (rowwise, _) = case
    direction = (
        (value.rowwise_data, value.scale_inv)
        if rowwise
        else (value.columnwise_data, value.columnwise_scale_inv)
    )
    amax = value.amax if rowwise else value.columnwise_amax
    for dtype in (torch.float32, torch.bfloat16):
        expected = ops.dequantize(*direction, key, dtype, sizes(device, kind), not rowwise, amax)
        assert torch.equal(value.dequantize(dtype), expected)
    assert torch.equal(value.dequantize(), value.dequantize(torch.bfloat16))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_buffers_are_refused(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    arguments = arguments_of(value)
    for name, tensor in value._buffers.present():
        wrong: list[tuple[str, Any]] = [
            ("dtype", torch.zeros(tensor.shape, dtype=torch.float64, device=device))
        ]
        wrong += [("size", tensor[None]), ("kind", 3.0)] if name != "group_sizes" else []
        strided = torch.stack([tensor.view(torch.uint8)] * 2, -1)[..., 0]
        if tensor.numel() > 1:
            wrong.append(
                ("strides", strided if tensor.element_size() == 1 else torch.stack([tensor] * 2, -1)[..., 0])
            )
        for what, replacement in wrong:
            is_type = what == "kind" or (what == "dtype" and name != "group_sizes")
            with pytest.raises(TypeError if is_type else ValueError) as error:
                type(value)(**{**arguments, name: replacement})
            assert f"argument '{name}': expected " in str(error.value), what
            assert f"got {_layout.describe(replacement)}. " in str(error.value), what
        if name != "group_sizes":
            # Without data its scales are too many, and without any data there is no value.
            scales = f"{name.removesuffix('data').removeprefix('rowwise_')}scale_inv"
            named = f"({scales}|rowwise_data)" if name.endswith("data") else name
            with pytest.raises(ValueError, match=f"argument '{named}': expected .*, got .*"):
                type(value)(**{**arguments, name: None})


def test_unquantized(device: torch.device) -> None:
    data = torch.randn(4, 8, 16, device=device)
    value = GroupedTensor(data, requires_grad=True)
    assert value.shape == (4, 8, 16) and value.num_groups == 4 and not value.is_ragged
    assert value.rowwise_data is data and value.data_ptr() == data.data_ptr()
    assert value.format.key == "none" and value.requires_grad
    assert GroupedTensor(torch.randn(4, 8, device=device)).num_groups == 4  # biases
    group_sizes = torch.tensor([3, 0, 4], device=device)
    ragged = GroupedTensor(data[0], group_sizes)
    assert ragged.shape == (8, 16) and ragged.num_groups == 3 and ragged.is_ragged
    assert ragged.group_sizes is group_sizes
    made = GroupedTensor.from_members(list(data))
    assert torch.equal(made.packed(), data) and made.data_ptr() != data.data_ptr()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda d, s: GroupedTensor(d.transpose(0, 1)), "rowwise_data"),
        (lambda d, s: GroupedTensor(d[..., ::2]), "rowwise_data"),
        (lambda d, s: GroupedTensor(d[0, 0]), "rowwise_data"),
        (lambda d, s: GroupedTensor(d, s), "rowwise_data"),
        (lambda d, s: GroupedTensor(d[0], s.float()), "group_sizes"),
        (lambda d, s: GroupedTensor(d[0], s[None]), "group_sizes"),
        (lambda d, s: GroupedTensor(d[0], s.to("meta")), "group_sizes"),
        (lambda d, s: GroupedTensor(d, scale_inv=d), "scale_inv"),
        (lambda d, s: GroupedTensor(d, dtype=torch.float64), "dtype"),
        (lambda d, s: GroupedTensor(d, format="bf16"), "format"),
        (lambda d, s: GroupedTensor(d, format=cast(Any, 3)), "format"),
        (lambda d, s: GroupedTensor(GroupedTensor(d)), "rowwise_data"),
        (lambda d, s: GroupedTensor(None), "rowwise_data"),
        (lambda d, s: GroupedTensor.from_members([]), "members"),
        (lambda d, s: GroupedTensor.from_members([d[0], d[0, 0]]), "members"),
        (lambda d, s: QuantizedTensor(format="fp8_block"), "rowwise_data"),
        (lambda d, s: QuantizedTensor(d[0], d[0], format="none"), "format"),
        (lambda d, s: QuantizedTensor(d[0], d[0], format="fp8_block", dtype=torch.int8), "dtype"),
        (lambda d, s: QuantizedTensor(d, d, format="fp8_block"), "rowwise_data"),
    ],
)
def test_refused(change: Any, argument: str, device: torch.device) -> None:
    data = torch.randn(4, 8, 16, device=device)
    group_sizes = torch.tensor([3, 0, 4], device=device)
    with pytest.raises((TypeError, ValueError), match=rf"argument '{argument}': expected .*, got .*\. \w"):
        change(data, group_sizes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_keep_every_buffer(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    for other in (
        value.detach(),
        value.data,
        torch.ops.aten.alias(value),
        value.expand(-1, *value.shape[1:]),
    ):
        assert type(other) is type(value) and other.format == value.format and other.dtype == value.dtype
        for (name, old), (_, new) in zip(value._buffers.present(), other._buffers.present(), strict=True):
            assert old.data_ptr() == new.data_ptr(), name
    clone = value.clone()
    assert same_bytes(clone, value)
    shared = {t.data_ptr() for _, t in value._buffers.present()} & {
        t.data_ptr() for _, t in clone._buffers.present()
    }
    assert not shared - {0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_numbers_in_the_same_memory(case: Any, device: torch.device) -> None:
    value = quantized(case, device)
    before = {name: t.data_ptr() for name, t in value._buffers.present()}
    versions = [value._version, *(t._version for _, t in value._buffers.of_values())]
    expected = quantized(case, device, seed=1)
    value.copy_(numbers(case[1], device, seed=1))
    assert same_bytes(value, expected)
    assert before == {name: t.data_ptr() for name, t in value._buffers.present()}
    after = [value._version, *(t._version for _, t in value._buffers.of_values())]
    assert all(new > old for old, new in zip(versions, after, strict=True))
    other = quantized(case, device, seed=2)
    value.copy_(other)
    assert same_bytes(value, other)


def test_noop_keeps_every_byte(device: torch.device) -> None:
    for key in ("fp8_tensor", "fp8_block", "nvfp4"):
        case = (key, "stack", (True, True))
        value = quantized(case, device)
        before = bytes_of(value)
        noop = torch.ones(1, device=device)
        value.quantize_(numbers("stack", device, seed=1), noop=noop)
        assert all(torch.equal(before[name], now) for name, now in bytes_of(value).items())
        noop.zero_()
        value.quantize_(numbers("stack", device, seed=1), noop=noop)
        assert same_bytes(value, quantized(case, device, seed=1))


def test_refused_numbers_change_nothing(device: torch.device) -> None:
    value = quantized(("nvfp4", "matrix", (True, True)), device)
    before = bytes_of(value)
    x = numbers("matrix", device)
    for wrong in (x[:-1], x.to(torch.float64), x.to("meta"), stack(device)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            value.quantize_(wrong)
    for wrong_noop in (torch.ones(2, device=device), torch.ones(1, dtype=torch.int32, device=device)):
        with pytest.raises((TypeError, ValueError)):
            value.quantize_(x, noop=wrong_noop)
    assert all(torch.equal(before[name], now) for name, now in bytes_of(value).items())
    with pytest.raises(ValueError, match="argument 'self': expected a quantized value"):
        stack(device).quantize_(x)


def test_random_rounding_takes_a_seed(device: torch.device) -> None:
    seed = torch.tensor([3], device=device)
    value = tp.quantize(numbers("matrix", device), "nvfp4:sr", seed=seed)
    with pytest.raises(ValueError, match="seed"):
        value.copy_(numbers("matrix", device, seed=1))
    value.quantize_(numbers("matrix", device, seed=1), seed=seed)
    assert same_bytes(value, tp.quantize(numbers("matrix", device, seed=1), "nvfp4:sr", seed=seed))


def test_rows_are_only_of_ragged_columns(device: torch.device) -> None:
    """Other values know how many rows they have, and another number would be ignored."""
    value = quantized(("fp8_block", "ragged", (True, True)), device)
    b = value._buffers
    rowwise = {"scale_inv": b.scale_inv, "format": value.format}
    columnwise = {"columnwise_data": b.columnwise_data, "columnwise_scale_inv": b.columnwise_scale_inv}
    wrong: list[tuple[Any, str, dict[str, Any]]] = [
        (ValueError, "None, but for a ragged value", {"rowwise_data": torch.ones(4, 5, 6), "rows": 4}),
        (ValueError, "None, but for a ragged value", {"rowwise_data": b.rowwise_data, **rowwise, "rows": 7}),
        (ValueError, "a number from 0", {**columnwise, "format": value.format, "rows": -1}),
        (TypeError, "an int", {**columnwise, "format": value.format, "rows": "80"}),
    ]
    for error, expected, arguments in wrong:
        group_sizes = (
            None if "columnwise_data" not in arguments and "scale_inv" not in arguments else b.group_sizes
        )
        with pytest.raises(error, match=f"argument 'rows': expected {expected}.*, got .*"):
            GroupedTensor(group_sizes=group_sizes, **arguments)
    given: dict[str, Any] = {**columnwise, "format": value.format, "group_sizes": b.group_sizes}
    assert GroupedTensor(**given, rows=80).shape == GroupedTensor(**given).shape == (80, 160)


def test_format_none_as_an_object(device: torch.device) -> None:
    data = torch.ones(2, 3, 4, device=device)
    assert torch.equal(GroupedTensor(data, format=Format("none")), GroupedTensor(data))


def test_members_that_are_no_matrices(device: torch.device) -> None:
    one = torch.ones(2, 3, device=device)
    wrong: tuple[tuple[Any, str, type[Exception]], ...] = (
        (3, "'members': expected tensors, got int", TypeError),
        ([one, 1], r"'members\[1\]': expected a plain tensor, got int", TypeError),
        (
            [GroupedTensor(one), GroupedTensor(one)],
            r"'members\[0\]': expected a plain tensor, got Grouped",
            TypeError,
        ),
        (
            [one[None]],
            r"'members\[0\]': expected \[M, K\], or \[N\] for biases, got Tensor \[1, 2, 3\]",
            ValueError,
        ),
        ([one[0, 0]], r"'members\[0\]': expected \[M, K\], or \[N\] for biases, got Tensor \[\]", ValueError),
        ([], "'members': expected at least one tensor", ValueError),
    )
    for members, text, error in wrong:
        with pytest.raises(error, match=f"^transformer_plugin::GroupedTensor: argument {text}"):
            GroupedTensor.from_members(members)
    assert GroupedTensor.from_members(one * i for i in range(3)).shape == (3, 2, 3)


@pytest.mark.parametrize("wrong", [[3, -1], [3, 3]], ids=str)
def test_members_of_wrong_sizes(wrong: list[int], device: torch.device) -> None:
    value = GroupedTensor(torch.ones(5, 4, device=device), torch.tensor(wrong, device=device))
    with pytest.raises(
        ValueError, match="argument 'group_sizes': expected sizes from 0 whose sum is at most 5"
    ):
        value.members()
