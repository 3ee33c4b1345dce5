"""The ops without zero_tail, and with group sizes: the bits of the rows of groups are those with zeros past them, and
nothing is read of what was not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.used_memory import BYTE, garbage_in_new_memory
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.reference._layouts import untile
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    GROUPED_FORMATS,
    GROUPED_MX_FORMATS,
    GROUPED_NV_FORMATS,
    PER_ROW_FORMATS,
    extras,
)

#: Sizes of groups and rows past them: empty groups first, in the middle and last, ends in and at tiles and sectors, all
#: rows in use, none in use, more rows past the groups than in them.
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "uneven": ((0, 70, 0, 130, 5, 0), 700),
    "strip": ((128, 0, 256), 1024),
    "sector": ((32, 160, 0), 64),
    "all used": ((17, 0, 240), 0),
    "none used": ((0, 0), 260),
    "many": ((2, 0, 1, 3) * 40, 500),
}
#: The same of whole blocks of 16 rows.
NV_GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "uneven": ((0, 80, 0, 144, 16, 0), 704),
    "strip": ((128, 0, 256), 1024),
    "all used": ((16, 0, 240), 0),
    "none used": ((0, 0), 272),
}
ALIGNED = ("fp8_tensor:aligned", "fp8_block:aligned")
WIDTH = 256

by_groups = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def cases(formats: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every format with groups that it takes."""
    return pytest.mark.parametrize(
        ("format", "groups"),
        [
            pytest.param(format, given, id=f"{format}-{name}")
            for format in formats
            for name, given in (NV_GROUPS if format.startswith("nvfp4") else GROUPS).items()
        ],
    )


def ragged(
    groups: tuple[tuple[int, ...], int], columns: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A matrix with NaN past its groups, and the sizes."""
    sizes, tail = groups
    rows = torch.randn(sum(sizes) + tail, columns, generator=torch.Generator().manual_seed(seed))
    rows[sum(sizes) :] = float("nan")
    return rows.to(device, dtype), torch.tensor(sizes, device=device)


def of_groups(outputs: tuple[Tensor, ...], format: str, sizes: Tensor, columns: int) -> list[Tensor]:
    """What belongs to the groups of data and scale along rows, then along columns if there are four."""
    fmt, each = Format.parse(format), sizes.tolist()
    end, tiles = sum(each), sum(-(-size // 128) for size in each)
    bytes_of = [t.view(torch.uint8) if t.element_size() == 1 else t for t in outputs]
    if fmt.tiled_scales:
        bytes_of[1::2] = [untile(scale) for scale in bytes_of[1::2]]
    packing = 2 if fmt.family == "nvfp4" else 1
    blocks = {"mxfp8": 4, "nvfp4": 8}.get(fmt.family)  # of a tile, with byte scales
    data, scale = bytes_of[:2]
    parts = [data[:end]]
    if fmt.family == "fp8_tensor":
        parts.append(scale)
    elif fmt.family == "fp8_block":
        parts.append(scale[:, :end])
    else:
        parts.append(scale[:end])
    if len(outputs) == 2:
        return parts
    data, scale = bytes_of[2:4]
    begins = [sum(each[:g]) for g in range(len(each))]
    lines = [
        data[:, fmt.line_begin(b, g) // packing :][:, : size // packing]
        for g, (b, size) in enumerate(zip(begins, each, strict=True))
    ]
    parts += lines
    if fmt.family == "fp8_tensor":
        parts.append(scale)
    else:
        parts.append(scale[:columns, : blocks * tiles] if blocks else scale[:tiles, :columns])
    return parts


def assert_same_groups(
    call: Callable[[bool], tuple[Tensor, ...]], format: str, sizes: Tensor, columns: int, device: torch.device
) -> None:
    """What belongs to the groups; results after the fourth are compared whole."""
    expected = call(True)
    with garbage_in_new_memory(device):
        got = call(False)
    assert [t.shape for t in got] == [t.shape for t in expected]
    for i, (a, b) in enumerate(
        zip(
            of_groups(got[:4], format, sizes, columns),
            of_groups(expected[:4], format, sizes, columns),
            strict=True,
        )
    ):
        assert_same_bits(a.contiguous(), b.contiguous(), f"part {i}")
    for a, b in zip(got[4:], expected[4:], strict=True):
        assert_same_bits(a, b, "the last result")


@by_dtype
@cases((*GROUPED_FORMATS, *ALIGNED, *GROUPED_MX_FORMATS, *GROUPED_NV_FORMATS))
def test_quantize_in_both_directions(
    format: str, groups: tuple[tuple[int, ...], int], dtype: torch.dtype, device: torch.device
) -> None:
    x, sizes = ragged(groups, WIDTH, dtype, device)
    more: dict[str, Any] = extras(x, format, sizes)
    assert_same_groups(
        lambda zero: ops.quantize(x, format, sizes, **more, columnwise=True, zero_tail=zero),
        format,
        sizes,
        WIDTH,
        device,
    )


@cases((*GROUPED_FORMATS[:4], *GROUPED_MX_FORMATS, *GROUPED_NV_FORMATS[:2], *PER_ROW_FORMATS))
def test_quantize_along_rows(format: str, groups: tuple[tuple[int, ...], int], device: torch.device) -> None:
    x, sizes = ragged(groups, WIDTH, torch.bfloat16, device)
    more: dict[str, Any] = extras(x, format, sizes)
    more.pop("amax_t", None)
    assert_same_groups(
        lambda zero: ops.quantize(x, format, sizes, **more, zero_tail=zero), format, sizes, WIDTH, device
    )


@cases(("fp8_tensor", "fp8_block", *ALIGNED, "mxfp8"))
def test_quantize_by_an_index(format: str, groups: tuple[tuple[int, ...], int], device: torch.device) -> None:
    sizes = torch.tensor(groups[0], device=device)
    tokens = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    rows = torch.randint(-1, 40, (sum(groups[0]) + groups[1],), generator=torch.Generator().manual_seed(3))
    rows = rows.to(device, torch.int32)
    assert_same_groups(
        lambda zero: ops.quantize(tokens, format, sizes, columnwise=True, rows=rows, zero_tail=zero),
        format,
        sizes,
        WIDTH,
        device,
    )


@by_dtype
@cases(("fp8_block", "fp8_block:aligned", "mxfp8", "mxfp8:tiled"))
def test_activation_quantize(
    format: str, groups: tuple[tuple[int, ...], int], dtype: torch.dtype, device: torch.device
) -> None:
    h, sizes = ragged(groups, 2 * WIDTH, dtype, device)
    grad, _ = ragged(groups, WIDTH, dtype, device, seed=1)
    probs = torch.rand(h.shape[0], device=device)
    for both in (False, True):

        def act(zero: bool, both: bool = both) -> tuple[Tensor, ...]:
            return ops.activation_quantize(h, format, probs, sizes, columnwise=both, zero_tail=zero)

        assert_same_groups(act, format, sizes, WIDTH, device)
    assert_same_groups(
        lambda zero: ops.activation_backward_quantize(grad, h, format, probs, sizes, zero_tail=zero),
        format,
        sizes,
        2 * WIDTH,
        device,
    )
    # One tile of features: its row sums are the gradient of the probability.
    narrow, gate = grad[:, :128].contiguous(), h[:, :256].contiguous()
    assert_same_groups(
        lambda zero: ops.activation_backward_quantize(narrow, gate, format, probs, sizes, zero_tail=zero),
        format,
        sizes,
        256,
        device,
    )


@cases(("fp8_tensor", "fp8_block", "fp8_block:aligned", "mxfp8", "nvfp4"))
def test_bias_backward_quantize(
    format: str, groups: tuple[tuple[int, ...], int], device: torch.device
) -> None:
    grad, sizes = ragged(groups, WIDTH, torch.bfloat16, device)
    more: dict[str, Any] = extras(grad, format, sizes)
    assert_same_groups(
        lambda zero: ops.bias_backward_quantize(grad, format, sizes, **more, columnwise=True, zero_tail=zero),
        format,
        sizes,
        WIDTH,
        device,
    )


@cases(("fp8_tensor", "fp8_block", "fp8_block:aligned", "mxfp8", "nvfp4"))
def test_dequantize(format: str, groups: tuple[tuple[int, ...], int], device: torch.device) -> None:
    x, sizes = ragged(groups, WIDTH, torch.bfloat16, device)
    more: dict[str, Any] = extras(x, format, sizes)
    outputs = ops.quantize(x, format, sizes, **more, columnwise=True)
    end = int(sizes.sum())
    for i, name in ((0, "amax"), (2, "amax_t")):

        def values(zero: bool, i: int = i, name: str = name) -> Tensor:
            data, scale = outputs[i : i + 2]
            options = (torch.bfloat16, sizes, i == 2, more.get(name))
            return ops.dequantize(data, scale, format, *options, zero_tail=zero)

        expected = values(True)
        with garbage_in_new_memory(device):
            got = values(False)
        assert_same_bits(got[:end], expected[:end])


@by_dtype
@by_groups
def test_activation(groups: tuple[tuple[int, ...], int], dtype: torch.dtype, device: torch.device) -> None:
    for columns in (WIDTH, 100, 37):
        h, sizes = ragged(groups, 2 * columns, dtype, device)
        grad, _ = ragged(groups, columns, dtype, device, seed=1)
        probs, end = torch.rand(h.shape[0], device=device), int(sizes.sum())
        act, backward = ops.activation(h, probs), ops.activation_backward(grad, h, probs)
        with garbage_in_new_memory(device):
            got = ops.activation(h, probs, sizes)
            of_h, of_probs = ops.activation_backward(grad, h, probs, sizes)
            without = ops.activation_backward(grad, h, None, sizes)
        assert_same_bits(got[:end], act[:end], "act")
        assert_same_bits(of_h[:end], backward[0][:end], "gradient of h")
        assert_same_bits(of_probs[:end], backward[1][:end], "gradient of probs")
        assert not of_probs[end:].any()
        assert_same_bits(without[0][:end], ops.activation_backward(grad, h)[0][:end])


@by_groups
def test_gradients_of_an_activation_are_zero_past_the_groups(
    groups: tuple[tuple[int, ...], int], device: torch.device
) -> None:
    h, sizes = ragged(groups, 64, torch.float32, device)
    probs, end = torch.rand(h.shape[0], device=device), int(sizes.sum())
    leaves = (h.requires_grad_(), probs.requires_grad_())
    grad = torch.randn(h.shape[0], 32, device=device)
    expected = torch.autograd.grad(ops.activation(h, probs), leaves, grad)
    got = torch.autograd.grad(ops.activation(h, probs, sizes), leaves, grad)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a[:end], b[:end])
        assert not a[end:].any()


@pytest.mark.parametrize("transpose_b", [True, False])
@by_dtype
@by_groups
def test_grouped_gemm(
    groups: tuple[tuple[int, ...], int], dtype: torch.dtype, transpose_b: bool, device: torch.device
) -> None:
    for k, n in ((64, WIDTH), (72, 40)):
        a, sizes = ragged(groups, k, dtype, device)
        count, end = sizes.numel(), int(sizes.sum())
        b = torch.randn(count, *((n, k) if transpose_b else (k, n)), device=device).to(dtype)
        more: dict[str, Any] = {"transpose_b": transpose_b}
        with_bias = {"bias": torch.randn(count, n, device=device), **more}
        index = torch.randint(0, 30, (a.shape[0],), device=device, dtype=torch.int32)
        tokens = torch.randn(30, k, device=device).to(dtype)
        for matrix, options in ((a, more), (a, with_bias), (tokens, {"rows": index, **more})):
            expected = ops.grouped_gemm(matrix, b, sizes, **options)
            with garbage_in_new_memory(device):
                got = ops.grouped_gemm(matrix, b, sizes, **options, zero_tail=False)
            assert not expected[end:].any()
            assert_same_bits(got[:end], expected[:end])


@cases(("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"))
def test_grouped_gemm_of_quantized_operands(
    format: str, groups: tuple[tuple[int, ...], int], device: torch.device
) -> None:
    """Quantized without zeros past the groups, too."""
    x, sizes = ragged(groups, 128, torch.bfloat16, device)
    weight = torch.randn(sizes.numel(), WIDTH, 128, generator=torch.Generator().manual_seed(4))
    weight = weight.to(device, torch.bfloat16)
    of_weight = format if format != "fp8_block" else "fp8_block:square"
    end = int(sizes.sum())
    amaxes = [extras(x, format, sizes).get("amax"), extras(weight, of_weight).get("amax")]

    def product(zero: bool) -> Tensor:
        a = ops.quantize(x, format, sizes, amaxes[0], zero_tail=zero)
        b = ops.quantize(weight, of_weight, None, amaxes[1])
        scales = [
            [s] if amax is None or not format.startswith("nv") else [s, amax]
            for s, amax in zip((a[1], b[1]), amaxes, strict=True)
        ]
        keys: dict[str, Any] = {
            "a_scale": scales[0],
            "b_scale": scales[1],
            "a_format": format,
            "b_format": of_weight,
        }
        return ops.grouped_gemm(a[0], b[0], sizes, **keys, zero_tail=zero)

    expected = product(True)
    with garbage_in_new_memory(device):
        got = product(False)
    assert not expected[end:].any()
    assert_same_bits(got[:end], expected[:end])


@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
@by_dtype
@by_groups
def test_grouped_gemm_activation(
    groups: tuple[tuple[int, ...], int], dtype: torch.dtype, activation: str, device: torch.device
) -> None:
    a, sizes = ragged(groups, 64, dtype, device)
    b = torch.randn(sizes.numel(), 2 * WIDTH, 64, device=device).to(dtype)
    probs, end = torch.rand(a.shape[0], device=device), int(sizes.sum())
    leaves = [t.requires_grad_() for t in (a, b, probs)]
    grad = torch.randn(a.shape[0], WIDTH, device=device).to(dtype)
    for keep in (True, False):
        options: dict[str, Any] = {"activation": activation, "keep_input": keep}
        expected = ops.grouped_gemm_activation(a, b, sizes, probs, **options)
        gradients = torch.autograd.grad(expected[0], leaves, grad)
        with garbage_in_new_memory(device):
            got = ops.grouped_gemm_activation(a, b, sizes, probs, **options, zero_tail=False)
        for x, y in zip(got, expected, strict=True):
            assert_same_bits(x.detach()[:end], y.detach()[:end])
        for x, y in zip(torch.autograd.grad(got[0], leaves, grad), gradients, strict=True):
            assert_same_bits(x, y)


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(device: torch.device) -> None:
    """With all rows in groups, because what is not written may differ from call to call."""
    h, sizes = ragged(((64, 0, 32), 0), 256, torch.bfloat16, device)
    grad, weight = h[:, :128].contiguous(), torch.randn(3, 256, 256, device=device).to(torch.bfloat16)
    probs = torch.rand(96, device=device)
    data, scale = ops.quantize(h, "mxfp8", sizes)
    last = {"zero_tail": False}
    _op = torch.ops.transformer_plugin
    opcheck(_op.quantize.default, (h, "mxfp8", sizes), last)
    opcheck(_op.dequantize.default, (data, scale, "mxfp8", torch.bfloat16, sizes), last)
    opcheck(_op.activation_quantize.default, (h, "mxfp8", probs, sizes), last)
    amax = torch.ones(3, device=device)  # scales of tiles would have some of tiles without rows
    opcheck(_op.activation_backward_quantize.default, (grad, h, "fp8_tensor", probs, sizes, amax), last)
    opcheck(_op.bias_backward_quantize.default, (h, "mxfp8", sizes), last)
    h.requires_grad_()
    opcheck(_op.grouped_gemm.default, (h, [weight], sizes), last)
    opcheck(_op.grouped_gemm_activation.default, (h, weight, sizes, probs), last)
    opcheck(_op.activation.default, (h, probs, sizes))
    opcheck(_op.activation_backward.default, (grad, h.detach(), probs, sizes))


def test_what_is_past_the_groups_stays_unwritten() -> None:
    """On a CPU, where new memory is known to have one byte throughout."""
    cpu = torch.device("cpu")
    h, sizes = ragged(((70, 0, 33), 500), 2 * WIDTH, torch.bfloat16, cpu)
    weight = torch.randn(3, WIDTH, 2 * WIDTH).to(torch.bfloat16)
    index = torch.zeros(603, dtype=torch.int32)
    with garbage_in_new_memory(cpu):
        written = [
            ops.activation(h, None, sizes),
            ops.activation_backward(h[:, :WIDTH], h, None, sizes)[0],
            ops.grouped_gemm(h, weight, sizes, zero_tail=False),
            *ops.grouped_gemm_activation(h, weight, sizes, zero_tail=False),
            ops.permute_rows(h[:4], index[:4].unsqueeze(1), index, sizes),
            *ops.quantize(h, "mxfp8", sizes, zero_tail=False),
            ops.quantize(h, "fp8_row", sizes, zero_tail=False)[0],
            ops.activation_quantize(h, "fp8_block", None, sizes, zero_tail=False)[0],
            ops.activation_backward_quantize(h[:, :WIDTH], h, "fp8_block", None, sizes, zero_tail=False)[0],
            ops.bias_backward_quantize(h, "fp8_block", sizes, zero_tail=False)[0],
        ]
    for i, tensor in enumerate(written):
        assert (tensor[103:603].view(torch.uint8) == BYTE).all(), i


@by_groups
def test_permute_rows(groups: tuple[tuple[int, ...], int], device: torch.device) -> None:
    sizes, rows = torch.tensor(groups[0], device=device), sum(groups[0]) + groups[1]
    indices = torch.repeat_interleave(torch.arange(len(groups[0])), torch.tensor(groups[0])).unsqueeze(1)
    slot, source, *_ = ops.assign_slots(indices.to(device), 0, len(groups[0]), rows)
    tokens = torch.randn(indices.shape[0], 64, device=device).to(torch.bfloat16)
    expected, end = ops.permute_rows(tokens, slot, source), int(sizes.sum())
    with garbage_in_new_memory(device):
        got = ops.permute_rows(tokens, slot, source, sizes)
    assert_same_bits(got[:end], expected[:end])
