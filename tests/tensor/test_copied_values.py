"""New numbers and bytes in a value, from values and tensors of other devices and dtypes; weights of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_plugin as tp
from tests.tensor.values import CASES, bytes_of, numbers, quantized, same_bytes, sizes, stack
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._table import HANDLERS


def test_copies_between_values(device: torch.device) -> None:
    plain, source = stack(device), stack(device)
    plain.copy_(source)
    assert torch.equal(plain.packed(), source.packed())
    target = torch.zeros(4, 8, 16, device=device)
    target.copy_(source)
    assert torch.equal(target, source.packed())
    rows, both = (quantized(("fp8_block", "stack", d), device) for d in ((True, False), (True, True)))
    before = bytes_of(rows)
    for destination, origin in ((rows, both), (torch.zeros(3, 48, 160, device=device), rows)):
        with pytest.raises(ValueError, match=r"Call dequantize\(\)"):
            destination.copy_(origin)
    assert all(torch.equal(old, bytes_of(rows)[name]) for name, old in before.items())


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_copies_across_devices_and_dtypes(case: Any, device: torch.device) -> None:
    """What load_state_dict does with a checkpoint of another device or dtype."""
    expected = quantized(case, device, seed=1)
    for source in (expected.cpu(), expected.float(), expected.cpu().half()):
        value = quantized(case, device)
        assert value.copy_(source, non_blocking=True) is value
        assert same_bytes(value, expected) and value.dtype == torch.bfloat16
    x = numbers(case[1], device, seed=1)
    for plain in (x.cpu(), x.double(), x.cpu().double(), x.float().cpu()):
        value = quantized(case, device)
        value.copy_(plain)
        assert same_bytes(value, expected)
    if case[1] != "matrix":
        value = quantized(case, device)
        value.copy_(GroupedTensor(x.cpu(), sizes(torch.device("cpu"), case[1])))
        assert same_bytes(value, expected)
    meta = quantized(case, device).to("meta")
    assert meta.copy_(x) is meta and meta.device.type == "meta"


def test_copies_say_what_differs(device: torch.device) -> None:
    rows, both = (quantized(("fp8_block", "stack", d), device) for d in ((True, False), (True, True)))
    with pytest.raises(ValueError) as error:
        rows.copy_(both)
    assert f"on {device.type}" in str(error.value)
    assert "with rowwise_data, scale_inv, got " in str(error.value)
    assert "with rowwise_data, scale_inv, columnwise_data, columnwise_scale_inv. Call" in str(error.value)
    with pytest.raises(ValueError, match=r"of nominal dtype bfloat16 .*, got .* of nominal dtype float32"):
        rows.data = rows.float()


def test_copied_bytes_are_counted(device: torch.device) -> None:
    """A backward that has kept the old bytes raises an error, and does not use the new ones."""
    x = numbers("matrix", device, seed=2).float().requires_grad_()
    value, other = (quantized(("fp8_tensor", "matrix", (True, True)), device, seed=i) for i in (0, 1))
    scale = value.scale_inv
    for write in (lambda: value.copy_(other), lambda: value.quantize_(numbers("matrix", device))):
        output = (x * scale).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()


def test_non_blocking_reaches_the_storage(device: torch.device) -> None:
    seen: list[bool] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                seen.append(bool(args[2]) if len(args) > 2 else False)
            return func(*args, **(kwargs or {}))

    value, plain = quantized(("fp8_row", "stack", (True, True)), device), stack(device)
    for destination, source in (
        (value, value.float()),
        (plain, stack(device)),
        (torch.zeros(4, 8, 16, device=device), plain),
    ):
        for non_blocking in (True, False):
            seen.clear()
            with Recorded():  # a mode sees what a handler calls only where the handler is called directly
                HANDLERS["aten::copy_"](torch.ops.aten.copy_.default, (destination, source, non_blocking), {})
            assert seen and set(seen) == {non_blocking}


def test_shared_memory(device: torch.device) -> None:
    for value in (stack(device), quantized(("nvfp4", "stack", (True, True)), device)):
        before = bytes_of(value)
        assert value.is_shared() == (device.type == "cuda")  # as of plain tensors
        assert value.share_memory_() is value and value.is_shared()
        assert all(t.is_shared() for _, t in value._buffers.present())
        assert all(torch.equal(old, bytes_of(value)[name]) for name, old in before.items())


def test_weights_of_layers_need_their_quantized_data(device: torch.device) -> None:
    """Without it an op below would read memory that nothing was written to."""
    op, formats = tp.ops, ("fp8_block",) * 3
    x, group_sizes = torch.randn(48, 160, device=device).bfloat16(), torch.tensor([16, 0, 32], device=device)
    matrix = quantized(("fp8_block", "matrix", (True, True)), device)
    experts = quantized(("fp8_block", "stack", (True, True)), device)
    fc2 = quantize_stack(3, 160, 24, device)
    data = [*experts._buffers[:2], *experts._buffers[3:5]]
    norm = (x, None, None)
    calls: list[tuple[str, Any]] = [
        ("weight", lambda w: op.linear(x, matrix, None, *formats)),
        ("weight", lambda w: op.linear(x, matrix)),
        ("weight", lambda w: op.norm_linear(*norm, matrix, None, 1e-5, "rms_norm", False, False, *formats)),
        ("weight", lambda w: op.grouped_linear(x, experts, group_sizes, None, None, *formats)),
        ("weight", lambda w: op.grouped_linear(x, experts.unbind(), group_sizes, None, None, *formats)),
        ("fc1_weight", lambda w: op.grouped_mlp(x, experts, fc2, group_sizes, w, None, None, *formats)),
        (
            "fc2_weight",
            lambda w: op.grouped_mlp(x, experts, fc2, group_sizes, w, None, None, *formats, data),
        ),
        ("input", lambda w: op.linear(matrix, matrix.dequantize(), None, *formats)),
    ]
    for argument, call in calls:
        # With a gradient the first op inside the layer refuses it, as an argument of its own.
        for wants_gradient, named in ((False, argument), (True, r"\w+")):
            x.requires_grad_(wants_gradient)
            with pytest.raises(
                ValueError, match=rf"argument '{named}': expected .*, got .*(Quant|Group).*\. \w"
            ):
                call(torch.rand(48, device=device))
    x.requires_grad_(False)
    got = op.linear(x, matrix, None, *formats, [*matrix._buffers[:2], *matrix._buffers[3:5]])
    assert torch.equal(got, op.linear(x, numbers("matrix", device), None, *formats))


def quantize_stack(groups: int, rows: int, columns: int, device: torch.device) -> Any:
    return tp.quantize(
        torch.randn(groups, rows, columns, device=device).bfloat16(), "fp8_block", columnwise=True
    )
