"""References at the ends of their domain (no rows, no columns, no groups), compared with their ops."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.ops.test_refusals import copied, flat
from transformer_plugin import ops, reference
from transformer_plugin.testing.every_op import Call, Sizes, calls, registered

SCHEMAS = registered()  # reads all of torch's schemas: 40 ms
SIZES = {
    "all": Sizes(),
    "no-rows": Sizes(T=0, groups=(0, 0, 0)),
    "no-groups": Sizes(groups=()),
    "no-rows-no-groups": Sizes(T=0, groups=()),
    "no-input-columns": Sizes(K=0),
    "no-output-columns": Sizes(N=0),
    "tail": Sizes(groups=(0, 0)),
}


def has_reference(call: Call) -> bool:
    """Whether a call has a reference to compare with. References of layers do not quantize operands; routing and
    deferred gradients, whose queue is a list in the reference, have separate tests."""
    function = getattr(reference, call.packet, None)
    rounds = (
        "linear" in call.op
        and "scaled" not in call.op
        and call.arguments.get("input_format", "none") != "none"
    )
    rounds = rounds or (call.op == "grouped_mlp" and call.name != "none")
    return (
        function is not None
        and not rounds
        and not function.__module__.endswith((".routing", ".deferred_wgrad"))
    )


CASES = [
    pytest.param(call, id=f"{name}-{call.op}-{call.name}")
    for name, sizes in SIZES.items()
    for call in calls(sizes, strict=False)
    if has_reference(call) and (name == "all" or "mxfp8" not in call.name)
]


def of_reference(call: Call, arguments: dict[str, Any]) -> Any:
    taken = inspect.signature(getattr(reference, call.packet)).parameters
    return getattr(reference, call.packet)(**{name: x for name, x in arguments.items() if name in taken})


@pytest.mark.parametrize("call", CASES)
def test_reference_agrees_with_the_op(call: Call) -> None:
    mine, other = copied(call.arguments), copied(call.arguments)
    found, expected = call.function(**mine), of_reference(call, other)
    written = [a.name for a in SCHEMAS[call.op].arguments if a.alias_info is not None]
    if call.op == "quantize_scaled":  # the op returns empty tensors for a direction that is not requested
        found = found[0 if mine["rowwise"] else 2 : 4 if mine["columnwise"] else 2]
    pairs = list(zip(flat(found), flat(expected), strict=True))
    for name in written:
        pairs += zip(flat(mine.get(name)), flat(other.get(name)), strict=True)
    for x, y in pairs:
        assert x.shape == y.shape and x.dtype == y.dtype, f"{x.dtype}{list(x.shape)} {y.dtype}{list(y.shape)}"
        if x.element_size() == 1:
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        else:
            bound = 2e-2 if x.dtype in (torch.bfloat16, torch.float16) else 1e-5
            torch.testing.assert_close(x, y, rtol=bound, atol=bound, equal_nan=True)


def test_float64_products_scale_the_bias_in_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(*n, dtype=torch.float64, generator=generator) for n in ((7, 5), (2, 3, 5)))
    bias = torch.randn(2, 3, generator=generator)
    scale, sizes = torch.rand(7, generator=generator), torch.tensor([3, 2])
    expected = torch.zeros(7, 3, dtype=torch.float64)
    for row in range(5):
        group = 0 if row < 3 else 1
        for n in range(3):
            product = sum(float(a[row, k]) * float(b[group, n, k]) for k in range(5))
            expected[row, n] = product + float(scale[row]) * float(bias[group, n])
    for module in (reference, ops):
        found = module.grouped_gemm(a, b, sizes, bias, scale)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("family", ["fp8_tensor", "fp8_block"])
def test_requantize_transposed_aligns_groups(family: str) -> None:
    """Group g begins at column ``round_up(its first row, 32) + 32 g``, with zeros in between."""
    sizes = torch.tensor([5, 0, 40, 3])
    input = torch.randn(60, 33, generator=torch.Generator().manual_seed(1))
    plain = reference.requantize_transposed(
        *reference.quantize(input, family, sizes), family, torch.float32, sizes
    )
    rows = reference.quantize(input, f"{family}:aligned", sizes)
    expected = torch.zeros(33, 64 + 32 * 5, dtype=torch.uint8)
    begin = 0
    for group, size in enumerate(sizes.tolist()):
        first = -(-begin // 32) * 32 + 32 * group
        expected[:, first : first + size] = plain[0].view(torch.uint8)[:, begin : begin + size]
        begin += size
    for module in (reference, ops):
        data, scale = module.requantize_transposed(*rows, f"{family}:aligned", torch.float32, sizes)
        assert torch.equal(data.view(torch.uint8), expected)
        assert torch.equal(scale, plain[1])


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (2, 0), (4,), (2, 3, 4), (0, 3, 4)])
def test_linear_supports_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    input, weight = torch.randn(shape), torch.randn(5, shape[-1])
    expected = torch.nn.functional.linear(input.double(), weight.double())
    assert reference.linear(input, weight).shape == expected.shape
    torch.testing.assert_close(reference.linear(input, weight), expected.float())


def test_every_reference_is_tested() -> None:
    tested = {case.values[0].op for case in CASES}
    assert tested == {call.op for call in calls() if has_reference(call)}
