"""quantize_weight, its _out form, and layers that receive its result: the bits of quantizing the weight in every
call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from tests.ops.test_grouped_mlp import capture
from tests.ops.test_linear_ops import OPCHECKED, OTHERS, RECIPES, by_recipe, keys
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.recipes import Float8BlockScaling, NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.gemm_cases import normals, poison_tail
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits
from transformer_plugin.testing.quantize_cases import rows_for, width_for

Formats = tuple[str, str, str]
_ops = torch.ops.transformer_plugin
SIZES = (70, 0, 130, 5)
FORMATS = {name: formats for name, formats in OPCHECKED.items() if name != "none"}
by_steady_name = pytest.mark.parametrize("name", list(FORMATS))
# Stochastic rounding: the calls draw their seeds in order, and no two calls draw the same numbers.
FORMATS["nv-random"] = keys(NVFP4BlockScaling())
by_formats = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())


class Layer(NamedTuple):
    """A call, the positions of its weights among the arguments, and the names of the arguments for quantized
    weights."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    weights: dict[int, str]


def layers(formats: Formats, dtype: torch.dtype, device: torch.device) -> dict[str, Layer]:
    """Returns each layer with biases, NaN in the tail rows, and an empty group."""
    generator = torch.Generator().manual_seed(1)
    k, n = (width_for(width, *formats) for width in (48, 96))
    counts = tuple(rows_for(size, *formats) for size in SIZES)
    rows, groups = rows_for(sum(counts) + 7, *formats), len(counts)

    def draw(*shape: int) -> Tensor:
        return normals(shape, dtype, device, generator)

    sizes = torch.tensor(counts, device=device)
    probs = poison_tail(torch.rand(rows, generator=generator), counts).to(device)
    x = poison_tail(draw(rows, k), counts)
    return {
        "linear": Layer(ops.linear, (draw(2, counts[0], k), draw(n, k), draw(n)), {1: "quantized_weight"}),
        "grouped_linear": Layer(
            ops.grouped_linear,
            (x, draw(groups, n, k), sizes, draw(groups, n), probs),
            {1: "quantized_weight"},
        ),
        "grouped_mlp": Layer(
            ops.grouped_mlp,
            (
                x,
                draw(groups, 2 * n, k) / 8,
                draw(groups, k, n),
                sizes,
                probs,
                draw(groups, 2 * n),
                draw(groups, k),
            ),
            {1: "quantized_fc1_weight", 2: "quantized_fc2_weight"},
        ),
    }


by_layer = pytest.mark.parametrize("layer", ["linear", "grouped_linear", "grouped_mlp"])


def quantized(layer: Layer, formats: Formats, only: tuple[int, ...] = (1, 2)) -> dict[str, list[Tensor]]:
    return {
        name: ops.quantize_weight(layer.arguments[place], *formats)
        for place, name in layer.weights.items()
        if place in only
    }


def with_nan_weights(layer: Layer, places: tuple[int, ...] = (1, 2)) -> Layer:
    """Replaces every weight by NaN, so that reading it shows."""
    arguments = tuple(
        torch.full_like(argument, float("nan")) if i in layer.weights and i in places else argument
        for i, argument in enumerate(layer.arguments)
    )
    return layer._replace(arguments=arguments)


def leaves_of(layer: Layer, wanted: tuple[int, ...] | None = None) -> list[Any]:
    """Returns new leaves: those at the wanted positions, or all that can, require gradients."""
    return [
        t.detach().clone().requires_grad_(wanted is None or i in wanted) if t.is_floating_point() else t
        for i, t in enumerate(layer.arguments)
    ]


def run(
    layer: Layer,
    formats: Formats,
    quantized_weights: dict[str, list[Tensor]],
    wanted: tuple[int, ...] | None = None,
    function: Callable[..., Tensor] | None = None,
) -> list[Tensor]:
    """Returns the output and the gradients of the wanted arguments. Stochastic rounding uses a fixed seed."""
    leaves = leaves_of(layer, wanted)
    torch.manual_seed(5)
    output = (function or layer.function)(*leaves, *formats, **quantized_weights)
    grad = normals(tuple(output.shape), output.dtype, output.device, torch.Generator().manual_seed(7))
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [output.detach(), *(torch.autograd.grad(output, asked, grad) if asked else ())]


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, str(i))


def per_direction(formats: Formats) -> int:
    return {"bf16": 1, "nvfp4": 3}.get(Format.parse(formats[1]).family, 2)


@by_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 64), (3, 144, 160), (0, 16, 32), (2, 0, 64), (2, 32, 0)], ids=str)
def test_bytes_agree_with_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    formats, one = keys(recipe), per_direction(keys(recipe))
    for strided in (False, True):
        weight = normals(shape, dtype, device, torch.Generator().manual_seed(0)).requires_grad_()
        weight = torch.stack([weight, weight], -1)[..., 0] if strided else weight
        got = ops.quantize_weight(weight, *formats)
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        if not hopper:
            assert len(got) == len(reference.quantize_weight(weight, *formats))
        expected = reference.quantize_weight(weight, *formats, columns=len(got) > one)
        for i, (tensor, same) in enumerate(zip(got, expected, strict=True)):
            assert_same_bits(tensor, same.detach(), str(i))
            assert tensor.is_contiguous() and not tensor.requires_grad
            assert tensor.numel() == 0 or tensor.data_ptr() != weight.data_ptr()
        with torch.inference_mode():
            for tensor, same in zip(ops.quantize_weight(weight, *formats), got, strict=True):
                assert_same_bits(tensor, same)


@by_recipe
@pytest.mark.parametrize("shape", [(96, 64), (3, 144, 160), (0, 16, 32)], ids=str)
def test_out_writes_in_place(shape: tuple[int, ...], recipe: Recipe, device: torch.device) -> None:
    formats, generator = keys(recipe), torch.Generator().manual_seed(0)
    first, second = (normals(shape, torch.float32, device, generator) for _ in range(2))
    out = ops.quantize_weight(first, *formats)
    places, versions = [t.data_ptr() for t in out], [t._version for t in out]
    ops.quantize_weight_out(second.requires_grad_(), *formats, out)
    assert [t.data_ptr() for t in out] == places
    assert all(now._version > then for now, then in zip(out, versions, strict=True))
    for tensor, same in zip(out, ops.quantize_weight(second, *formats), strict=True):
        assert_same_bits(tensor, same)
    again = [t.clone() for t in out]
    reference.quantize_weight_out(first.detach(), *formats, again)
    for tensor, same in zip(again, ops.quantize_weight(first, *formats), strict=True):
        assert_same_bits(tensor, same)


@by_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "formats",
    [*map(keys, RECIPES.values()), *OTHERS.values(), FORMATS["nv-random"]],
    ids=[*RECIPES, *OTHERS, "nv-random"],
)
def test_quantized_weights_replace_the_weight_with_equal_bits(
    formats: Formats, dtype: torch.dtype, layer: str, device: torch.device
) -> None:
    one = layers(formats, dtype, device)[layer]
    expected = run(one, formats, {})
    quantized_weights = quantized(one, formats)
    before = {name: [t.clone() for t in tensors] for name, tensors in quantized_weights.items()}
    for _ in range(2):  # quantized weights can be used twice
        assert_all_same(run(with_nan_weights(one), formats, quantized_weights), expected)
    for name, tensors in before.items():
        for tensor, same in zip(quantized_weights[name], tensors, strict=True):
            assert_same_bits(tensor, same, name)
    torch.manual_seed(5)
    with torch.no_grad():
        output = one.function(*with_nan_weights(one).arguments, *formats, **quantized_weights)
    assert_same_bits(output, expected[0], "without a gradient")


@by_layer
@by_formats
def test_any_subset_of_gradients(formats: Formats, layer: str, device: torch.device) -> None:
    one = layers(formats, torch.float32, device)[layer]
    floating = [i for i, t in enumerate(one.arguments) if t.is_floating_point()]
    for wanted in (*((i,) for i in floating), (0, 1), (1, floating[-1]), ()):
        expected = run(one, formats, {}, wanted)
        assert_all_same(run(with_nan_weights(one), formats, quantized(one, formats), wanted), expected)


@by_formats
def test_only_one_of_two_weights_is_quantized(formats: Formats, device: torch.device) -> None:
    one = layers(formats, torch.float32, device)["grouped_mlp"]
    expected = run(one, formats, {})
    for place in (1, 2):
        quantized_weights = quantized(one, formats, (place,))
        assert_all_same(run(with_nan_weights(one, (place,)), formats, quantized_weights), expected)


def test_product_agrees_with_float64() -> None:
    """Compares with the float64 product of the tensors in the list, dequantized here as the documentation of the
    format says."""
    formats = keys(Float8BlockScaling())
    x, w = (
        normals(s, torch.float32, torch.device("cpu"), torch.Generator()) for s in ((130, 200), (136, 200))
    )
    other = normals((136, 200), torch.float32, torch.device("cpu"), torch.Generator().manual_seed(9))
    data, scale = ops.quantize_weight(other, *formats)
    blocks = scale[:, :2].double().repeat_interleave(128, 0)[:136].repeat_interleave(128, 1)[:, :200]
    values = data.double() * blocks
    rounded = reference.dequantize(*reference.quantize(x, formats[0]), formats[0], torch.float32).double()
    got = ops.linear(x, w, None, *formats, [data, scale])
    assert_rounded_sum(got, rounded @ values.T, rounded.abs() @ values.abs().T, 200)


@by_layer
@by_formats
def test_change_before_the_backward_raises(formats: Formats, layer: str, device: torch.device) -> None:
    one = layers(formats, torch.float32, device)[layer]
    for name, tensors in quantized(one, formats).items():
        quantized_weights = {**quantized(one, formats), name: tensors}
        place = next(place for place, own in one.weights.items() if own == name)
        output = one.function(*leaves_of(one), *formats, **quantized_weights)
        ops.quantize_weight_out(one.arguments[place], *formats, tensors)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.float().sum().backward()


@by_steady_name
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(name: str, requires_grad: bool, device: torch.device) -> None:
    formats = FORMATS[name]
    for op, layer in layers(formats, torch.float32, device).items():
        leaves = [
            t.nan_to_num().requires_grad_(requires_grad) if t.is_floating_point() else t
            for t in layer.arguments
        ]
        weight = leaves[1]
        arguments = [
            [leaf] if i in layer.weights and op != "linear" else leaf for i, leaf in enumerate(leaves)
        ]
        opcheck(getattr(_ops, op).default, (*arguments, *formats), quantized(layer, formats))
        opcheck(_ops.quantize_weight.default, ([weight], *formats))
        out = ops.quantize_weight(weight, *formats)
        opcheck(_ops.quantize_weight_out.default, ([weight.detach()], *formats, out))


@by_layer
@by_formats
def test_compiles_without_graph_breaks(formats: Formats, layer: str, device: torch.device) -> None:
    """One graph quantizes into buffers, and one computes the layer; other weights need no new graph."""
    torch._dynamo.reset()
    multiply, rounding = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    one = layers(formats, torch.float32, device)[layer]
    compiled = torch.compile(one.function, fullgraph=True, backend=multiply)
    write = torch.compile(ops.quantize_weight_out, fullgraph=True, backend=rounding)
    make = torch.compile(ops.quantize_weight, fullgraph=True, backend="aot_eager")
    quantized_weights = {name: make(one.arguments[place], *formats) for place, name in one.weights.items()}
    for step in range(3):
        weights = {place: one.arguments[place] * (1 + step) for place in one.weights}
        changed = one._replace(arguments=tuple(weights.get(i, t) for i, t in enumerate(one.arguments)))
        for place, name in one.weights.items():
            write(weights[place], *formats, quantized_weights[name])
        got = run(with_nan_weights(changed), formats, quantized_weights, function=compiled)
        assert_all_same(got, run(changed, formats, {}))
    assert multiply.frame_count == 1 and rounding.frame_count == len(one.weights)


def test_compiles_without_gradients(device: torch.device) -> None:
    """Without gradients the graph contains the layer's op, whose Meta function cannot ask the device how many
    tensors to expect."""
    torch._dynamo.reset()
    formats = keys(Float8BlockScaling())
    for layer in layers(formats, torch.float32, device).values():
        quantized_weights = quantized(layer, formats)
        compiled = torch.compile(layer.function, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            got = compiled(*with_nan_weights(layer).arguments, *formats, **quantized_weights)
            assert_same_bits(got, layer.function(*layer.arguments, *formats))


@pytest.mark.gpu
@by_layer
@by_steady_name
def test_graph_replays_with_new_weights_and_sizes(name: str, layer: str) -> None:
    """The buffers are written outside of the step's graph, which keeps their addresses."""
    device, generator, formats = torch.device("cuda"), torch.Generator().manual_seed(3), FORMATS[name]
    one = layers(formats, torch.bfloat16, device)[layer]
    static_inputs = [t.nan_to_num() if t.is_floating_point() else t for t in one.arguments]
    quantized_weights = quantized(one, formats)
    shape = tuple(one.function(*static_inputs, *formats).shape)
    grad = normals(shape, torch.bfloat16, device, generator)

    def step(quantized_weights: dict[str, list[Tensor]] = quantized_weights) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in static_inputs]
        output = one.function(*leaves, *formats, **quantized_weights)
        return [output.detach(), *torch.autograd.grad(output, [t for t in leaves if t.requires_grad], grad)]

    graph, captured = capture(step)
    for sizes in ((0, 128, 0, 64), (16, 16, 16, 16), (0, 0, 0, 0)):
        for place, argument in one.weights.items():
            static_inputs[place].copy_(
                normals(tuple(static_inputs[place].shape), torch.bfloat16, device, generator)
            )
            ops.quantize_weight_out(static_inputs[place], *formats, quantized_weights[argument])
        for t in static_inputs:
            if not t.is_floating_point():
                t.copy_(torch.tensor(sizes))
        graph.replay()
        assert_all_same(captured, step({}))


@pytest.mark.gpu
@by_formats
def test_calls_do_not_synchronize(formats: Formats) -> None:
    one = layers(formats, torch.bfloat16, torch.device("cuda"))["grouped_mlp"]
    leaves, weight = leaves_of(one), one.arguments[1]
    grad = torch.ones_like(one.arguments[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantized_weights = quantized(one, formats)
        ops.quantize_weight_out(weight, *formats, quantized_weights["quantized_fc1_weight"])
        output = one.function(*leaves, *formats, **quantized_weights)
        torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@by_formats
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
def test_noop_keeps_every_byte(formats: Formats, listed: bool, device: torch.device) -> None:
    weights = [torch.randn(3, 48, 160, device=device, dtype=torch.bfloat16) for _ in range(2)]
    given = [list(w) if listed else w for w in weights]
    out = ops.quantize_weight(given[0], *formats)
    before = [t.view(torch.uint8).clone() for t in out]
    noop = torch.ones(1, device=device)
    ops.quantize_weight_out(given[1], *formats, out, noop)
    assert all(torch.equal(t.view(torch.uint8), old) for t, old in zip(out, before, strict=True))
    noop.zero_()
    ops.quantize_weight_out(given[1], *formats, out, noop)
    expected = ops.quantize_weight(given[1], *formats)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, expected, strict=True)
    )
    for wrong in (torch.ones(2, device=device), torch.ones(1, device=device, dtype=torch.int32)):
        with pytest.raises((TypeError, ValueError), match="argument 'noop'"):
            ops.quantize_weight_out(given[0], *formats, out, wrong)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block"])
def test_both_directions_of_a_symmetric_weight(name: str, device: torch.device) -> None:
    """A layer takes rows alone or both, whatever its kernels need; a refresh writes what is there."""
    recipe = recipe_from_name(name)
    formats = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    weight = torch.randn(96, 128, device=device, dtype=torch.bfloat16)
    other = torch.randn_like(weight)
    both = list(ops.quantize(weight, formats[1], rowwise=True, columnwise=True))
    x = torch.randn(40, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for given in (both, both[:2]):
        output = ops.linear(x, weight, None, *formats, given)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        results.append((output, grad))
    assert_same_bits(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=0.05, rtol=0.02)
    ops.quantize_weight_out(other, *formats, both)
    expected = ops.quantize(other, formats[1], rowwise=True, columnwise=True)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(both, expected, strict=True)
    )
