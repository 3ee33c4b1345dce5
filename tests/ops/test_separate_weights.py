"""grouped_linear and grouped_mlp with a matrix for each group at any address: the bits of the weight as one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.main_grad_runs import BUFFERS, FORMATS, AllCalls, buffers, layer_of, run, separate, stacked
from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.testing.numerics import assert_same_bits

LAYERS = ("grouped_linear", "grouped_mlp")
by_layer = pytest.mark.parametrize("name", LAYERS)
by_formats = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
# What stochastic rounding draws depends on the place of an element in its tensor, so a weight is not rounded by it.
QUANTIZED = {name: formats for name, formats in FORMATS.items() if name != "none"}


@by_layer
@by_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_one_tensor(
    name: str, formats: tuple[str, str, str], dtype: torch.dtype, device: torch.device
) -> None:
    layer = layer_of(name, formats, dtype, device)
    plain = run(layer, formats)
    for lists in ((1, 2), (1,), (2,)) if name == "grouped_mlp" else ((1,),):
        got = run(layer, formats, lists=lists)
        assert_same_bits(got.output, plain.output)
        for place, (a, b) in enumerate(zip(got.gradients, plain.gradients, strict=True)):
            if b is not None:
                assert_same_bits(stacked(a), b, str(place))
        without = [separate(x) if i in lists else x for i, x in enumerate(layer.arguments)]
        torch.manual_seed(5)
        with torch.no_grad():
            assert_same_bits(layer.function(*without, *formats), plain.output, "without a gradient")


@by_layer
@pytest.mark.parametrize("formats", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_one_quantized_weight_serves_both(
    name: str, formats: tuple[str, str, str], device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    of_stack = {n: ops.quantize_weight(layer.arguments[i], *formats) for i, n in layer.weights.items()}
    of_list = {
        n: ops.quantize_weight(separate(layer.arguments[i]), *formats) for i, n in layer.weights.items()
    }
    for argument, tensors in of_stack.items():
        for i, (a, b) in enumerate(zip(of_list[argument], tensors, strict=True)):
            assert_same_bits(a, b, f"{argument}[{i}]")
    for place, argument in layer.weights.items():
        out = [torch.empty_like(tensor) for tensor in of_stack[argument]]
        ops.quantize_weight_out(separate(layer.arguments[place]), *formats, out)
        for i, (a, b) in enumerate(zip(out, of_stack[argument], strict=True)):
            assert_same_bits(a, b, f"out {argument}[{i}]")
    plain, got = run(layer, formats), run(layer, formats, of_stack, lists=tuple(layer.weights))
    assert_same_bits(got.output, plain.output)
    for place in layer.weights:
        assert_same_bits(stacked(got.gradients[place]), plain.gradients[place], str(place))


@by_layer
@pytest.mark.parametrize("formats", [FORMATS["none"], FORMATS["block"]], ids=["none", "block"])
def test_one_group(name: str, formats: tuple[str, str, str], device: torch.device) -> None:
    """A list of one matrix is not taken for the weight of a dense layer."""
    whole = layer_of(name, formats, torch.bfloat16, device)
    first = tuple(
        x[:1] if (i in whole.weights or i > 4 or not x.is_floating_point() or x.shape[:1] == (4,)) else x
        for i, x in enumerate(whole.arguments)
    )
    layer = whole._replace(arguments=first)
    plain = run(layer, formats)
    given = buffers(name, layer, torch.float32, 0.0)
    for options in ({}, {k: [b[0]] for k, b in given.items()}):
        got = run(layer, formats, options, lists=tuple(layer.weights))
        assert_same_bits(got.output, plain.output)
        for place, argument in BUFFERS[name].items():
            if options:
                assert got.gradients[place] == [None] and options[argument][0].any()
            else:
                assert_same_bits(stacked(got.gradients[place]), plain.gradients[place], str(place))
    if formats != FORMATS["none"]:
        made = ops.quantize_weight([layer.arguments[1][0]], *formats)
        for a, b in zip(made, ops.quantize_weight(layer.arguments[1], *formats), strict=True):
            assert_same_bits(a, b)


@by_layer
@pytest.mark.parametrize(
    "formats",
    [FORMATS[n] for n in ("none", "bf16", "current", "block", "mx", "nv")],
    ids=["none", "bf16", "current", "block", "mx", "nv"],
)
def test_matrices_are_not_put_together(
    name: str, formats: tuple[str, str, str], device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    with AllCalls() as calls:
        run(layer, formats, lists=tuple(layer.weights))
    assert "transformer_plugin::grouped_gemm" in calls.names
    assert not {"aten::cat", "aten::stack"} & set(calls.names)


@by_layer
@pytest.mark.usefixtures("schema_checks_take_fp8")
@pytest.mark.parametrize(
    "formats", [FORMATS[n] for n in ("none", "bf16", "block", "nv")], ids=["none", "bf16", "block", "nv"]
)
@pytest.mark.parametrize("lists", [False, True], ids=["stack", "list"])
def test_opcheck(name: str, lists: bool, formats: tuple[str, str, str], device: torch.device) -> None:
    layer = layer_of(name, formats, torch.float32, device)
    leaves = [x.nan_to_num().requires_grad_() if x.is_floating_point() else x for x in layer.arguments]
    for place in layer.weights:
        matrices = [w.detach().requires_grad_() for w in separate(leaves[place].detach())]
        leaves[place] = matrices if lists else [leaves[place]]
    op = getattr(torch.ops.transformer_plugin, name).default
    opcheck(op, (*leaves, *formats))
    for mode in ("none", "zeros"):
        made = buffers(name, layer, torch.float32, 0.25, as_list=lists)
        given = {argument: b if lists else [b] for argument, b in made.items()}
        opcheck(op, (*leaves, *formats), {**given, "accumulate": False, "weight_grad": mode})


@pytest.mark.usefixtures("schema_checks_take_fp8")
@pytest.mark.parametrize(
    "formats", [FORMATS[n] for n in ("none", "bf16", "block", "nv")], ids=["none", "bf16", "block", "nv"]
)
def test_opcheck_of_a_dense_layer(formats: tuple[str, str, str], device: torch.device) -> None:
    layer = layer_of("linear", formats, torch.float32, device)
    leaves = [x.requires_grad_() for x in layer.arguments]
    for mode in ("none", "zeros"):
        given = buffers("linear", layer, torch.float32, 0.25)
        opcheck(
            torch.ops.transformer_plugin.linear.default,
            (*leaves, *formats),
            {**given, "accumulate": mode == "none", "weight_grad": mode},
        )


KEYS = ("fp8_tensor", "fp8_row", "fp8_block", "fp8_block:square", "mxfp8", "nvfp4")
STACKS = ((1, 32, 64), (3, 64, 96), (3, 144, 160), (70, 16, 32), (2, 0, 64), (2, 32, 0), (3, 48, 48))
#: mxfp8 takes whole blocks of 32.
STACKS_OF = [
    (key, s) for key in KEYS for s in STACKS if key != "mxfp8" or (s[1] % 32 == 0 and s[2] % 32 == 0)
]


@pytest.mark.parametrize(("key", "shape"), STACKS_OF, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_list_stacked(
    key: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Sizes with which a matrix of the stack does not begin at a multiple of 16 bytes are in the next test."""
    assert_stacked(key, torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype))


@pytest.mark.parametrize("key", ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:square"])
def test_quantize_list_stacked_of_odd_widths(key: str, device: torch.device) -> None:
    assert_stacked(key, torch.randn(5, 33, 17, generator=torch.Generator().manual_seed(1)).to(device))


def assert_stacked(key: str, stack: Tensor) -> None:
    amax = ops.amax(stack, key) if Format.parse(key).needs_amax else None
    for directions in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True}):
        amaxes = {}
        if amax is not None and directions.get("rowwise", True):
            amaxes["amax"] = amax
        if amax is not None and directions.get("columnwise"):
            amaxes["amax_t"] = amax
        expected = ops.quantize(stack, key, **amaxes, **directions)
        [got] = ops.quantize_list(separate(stack), key, stacked=True, **directions)
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b, f"{key} {directions}")


def test_stacked_matrices_have_one_size() -> None:
    text = "argument 'inputs': expected matrices of one size, which a stack has, got float32"
    with pytest.raises(ValueError, match=text):
        ops.quantize_list([torch.ones(4, 32), torch.ones(5, 32)], "fp8_block", stacked=True)


@by_layer
def test_wrong_lists(name: str) -> None:
    layer = layer_of(name, FORMATS["none"], torch.float32, torch.device("cpu"))
    argument = "fc1_weight" if name == "grouped_mlp" else "weight"
    first, second, *rest = separate(layer.arguments[1])
    for matrices, error, text in (
        ([], ValueError, f"'{argument}': expected 1 to 1024 matrices"),
        ([first, second[1:], *rest], ValueError, rf"'{argument}\[1\]': expected size"),
        ([first, second.bfloat16(), *rest], TypeError, rf"'{argument}\[1\]': expected float32"),
        ([second, *rest], ValueError, "expected .*groups|expected size 3"),
        ([layer.arguments[1], layer.arguments[1]], ValueError, rf"'{argument}\[0\]': expected 2 dimensions"),
    ):
        arguments = [matrices if i == 1 else x for i, x in enumerate(layer.arguments)]
        with pytest.raises(error, match=f"transformer_plugin::{name}: argument .*{text}"):
            layer.function(*arguments)
