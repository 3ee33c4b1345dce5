"""grouped_mlp of tokens with more rows than the groups have: the bits do not depend on how many, in any format, and
nothing is read of memory that was not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_grouped_mlp import FORMATS, Formats
from tests.ops.used_memory import garbage_in_new_memory
from transformer_plugin import ops
from transformer_plugin.formats import Format, resolve
from transformer_plugin.testing.numerics import assert_same_bits

TOKENS, EXPERTS, TOPK = 190, 5, 2
NAMES = ("tokens", "fc1", "fc2", "weights", "fc1_bias", "fc2_bias")
#: What depends on the capacity: the random numbers of a block come from its position.
SAME_CAPACITY = {name for name, formats in FORMATS.items() if any(",sr" in key for key in formats)}


def routing(device: torch.device, alignment: int) -> tuple[Tensor, int]:
    """The experts of tokens, of which one gets no token and one choice is masked, and the rows that they take."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(1)[:, :TOPK]
    indices[indices >= 2] += 1
    indices[3, 1] = -1
    sizes = torch.bincount(indices[indices >= 0], minlength=EXPERTS)
    return indices.to(device), int((-(-sizes // alignment) * alignment).sum())


def leaves_of(dtype: torch.dtype, widths: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, ffn = widths

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(device, dtype)

    return {
        "tokens": draw(TOKENS, hidden),
        "fc1": draw(EXPERTS, 2 * ffn, hidden, scale=hidden**-0.5),
        "fc2": draw(EXPERTS, hidden, ffn, scale=ffn**-0.5),
        "weights": torch.rand(TOKENS, TOPK, generator=generator).to(device),
        "fc1_bias": draw(EXPERTS, 2 * ffn),
        "fc2_bias": draw(EXPERTS, hidden),
    }


def step(
    given: dict[str, Tensor],
    names: tuple[str, ...],
    indices: Tensor,
    capacity: int,
    alignment: int,
    formats: Formats,
    activation: str = "swiglu",
) -> dict[str, Tensor]:
    """The output, and the gradients of `names`. That of the probabilities of rows arrives as that of the weights."""
    leaves = {name: value.clone().requires_grad_() for name, value in given.items() if name in names}
    slot, source, sizes, _, probs = ops.assign_weighted_slots(
        indices, leaves["weights"], 0, EXPERTS, capacity, alignment
    )
    arguments = (leaves["tokens"], leaves["fc1"], leaves["fc2"], sizes, probs)
    biases = (leaves.get("fc1_bias"), leaves.get("fc2_bias"))
    torch.manual_seed(5)
    more: dict[str, Any] = {"slot": slot, "source": source, "activation": activation}
    output = ops.grouped_mlp(*arguments, *biases, *formats, **more)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    grads = torch.autograd.grad(output, [*leaves.values(), probs], grad)
    assert not grads[-1][int(sizes.sum()) :].any(), "the gradient of a row that is in no group"
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=False))}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    for name, value in expected.items():
        assert value.isfinite().all(), f"{name} of {where}"
        assert_same_bits(got[name], value, f"{name} of {where}")


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_the_capacity(name: str, biases: bool, device: torch.device) -> None:
    """Groups of any sizes, and padded ones; widths of whole tiles, and others."""
    first, weight, grad = FORMATS[name]
    formats = resolve(first, device), weight, resolve(grad, device)
    multiples = [Format.parse(key).group_multiple for key in formats if key not in ("none", "bf16")]
    names = NAMES if biases else NAMES[:4]
    for alignment, widths in ((16, (256, 128)), (1, (160, 96))):
        if any(alignment % multiple for multiple in multiples):
            continue
        given = leaves_of(torch.bfloat16, widths, device)
        indices, rows = routing(device, alignment)
        least = -(-rows // 16) * 16
        expected = step(given, names, indices, least, alignment, formats)
        for times in (1, 2, 4):
            if times > 1 and name in SAME_CAPACITY:
                expected = step(given, names, indices, least * times, alignment, formats)
            with garbage_in_new_memory(device):
                got = step(given, names, indices, least * times, alignment, formats)
            assert_same(got, expected, f"{times} times the rows, alignment {alignment}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["none", "bf16", "block", "mx"])
def test_other_dtypes(name: str, dtype: torch.dtype, device: torch.device) -> None:
    first, weight, grad = FORMATS[name]
    formats = resolve(first, device), weight, resolve(grad, device)
    given = leaves_of(dtype, (128, 128), device)
    indices, rows = routing(device, 1)
    expected = step(given, NAMES, indices, rows, 1, formats)
    with garbage_in_new_memory(device):
        got = step(given, NAMES, indices, 3 * rows, 1, formats)
    assert_same(got, expected, "three times the rows")


@pytest.mark.parametrize("name", ["none", "current", "block", "mx"])
def test_interleaved_columns(name: str, device: torch.device) -> None:
    first, weight, grad = FORMATS[name]
    formats = resolve(first, device), weight, resolve(grad, device)
    given = leaves_of(torch.bfloat16, (128, 128), device)
    indices, rows = routing(device, 1)
    expected = step(given, NAMES, indices, rows, 1, formats, "swiglu:interleave=32")
    with garbage_in_new_memory(device):
        got = step(given, NAMES, indices, 2 * rows, 1, formats, "swiglu:interleave=32")
    assert_same(got, expected, "twice the rows")


def test_no_token_has_a_row(device: torch.device) -> None:
    given = leaves_of(torch.bfloat16, (128, 128), device)
    indices = torch.full((TOKENS, TOPK), -1, device=device)
    for name in ("none", "block", "current", "mx"):
        first, weight, grad = FORMATS[name]
        formats = resolve(first, device), weight, resolve(grad, device)
        with garbage_in_new_memory(device):
            got = step(given, NAMES, indices, 256, 1, formats)
        assert not any(value.any() for value in got.values())
