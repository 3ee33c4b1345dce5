"""LayerNormLinear: the bits of a norm and a Linear with every recipe, torch's values, and module state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.error_text import note_of
from tests.nn.common import (
    RECIPES,
    by_recipe,
    check_module_state,
    in_fp64,
    outputs_and_gradients,
    row_unit,
    rows_of,
    width_of,
)
from tests.nn.test_autocast import one_rank
from transformer_plugin.nn import LayerNorm, LayerNormLinear, Linear, RMSNorm
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
by_norm = pytest.mark.parametrize("normalization", list(NORMS))
SHAPES = [(48,), (1, 48), (33, 48), (0, 48), (3, 5, 48), (2, 0, 48)]


def drawn(k: int, n: int, bias: bool = True, **options: Any) -> LayerNormLinear:
    """Returns a layer whose norm has random parameters."""
    torch.manual_seed(0)
    layer = LayerNormLinear(k, n, bias, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in (layer.norm_weight, layer.norm_bias):
            if parameter is not None:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator).to(parameter.device), alpha=0.3
                )
    return layer


class Steps(torch.nn.Module):
    """The two modules that the layer stands for, with the same parameters."""

    def __init__(self, layer: LayerNormLinear) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        k, n, norm = layer.in_features, layer.out_features, NORMS[layer.normalization]
        self.norm = norm(k, layer.eps, zero_centered=layer.zero_centered, **options)
        self.linear = Linear(k, n, layer.bias is not None, recipe=layer.recipe, **options)
        self.norm.weight, self.linear.weight = layer.norm_weight, layer.weight
        if layer.norm_bias is not None:
            self.norm.bias = layer.norm_bias
        self.linear.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.norm(input))


def data(shape: tuple[int, ...], features: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    input = (torch.randn(shape, generator=generator) * 2 + 0.5).to(device)
    return input, torch.randn(*shape[:-1], features, generator=generator).to(device)


def step(module: torch.nn.Module, layer: LayerNormLinear, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Returns the output and the gradients of the input and of the layer's parameters."""
    leaves = {"input": input.detach().requires_grad_()} | dict(layer.named_parameters())
    torch.manual_seed(9)  # stochastic rounding
    return outputs_and_gradients(lambda x: module(x["input"]), leaves, grad)


def assert_all_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(got[name], tensor, name)


def fp64(layer: LayerNormLinear, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The same by torch's functions in float64."""
    leaves = in_fp64({"input": input} | dict(layer.named_parameters()))

    def forward(x: dict[str, Tensor]) -> Tensor:
        gamma, shape = x["norm_weight"] + int(layer.zero_centered), x["norm_weight"].shape
        if layer.normalization == "LayerNorm":
            values = torch.nn.functional.layer_norm(x["input"], shape, gamma, x["norm_bias"], layer.eps)
        else:
            values = torch.nn.functional.rms_norm(x["input"], shape, gamma, layer.eps)
        return torch.nn.functional.linear(values, x["weight"], x.get("bias"))

    return outputs_and_gradients(forward, leaves, grad.double())


@by_norm
@by_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_has_the_bits_of_the_two_modules(
    name: str, normalization: str, dtype: torch.dtype, device: torch.device
) -> None:
    k, n = width_of(name, 264), width_of(name, 96)
    input, grad = (t.to(dtype) for t in data((2, rows_of(name, 70), k), n, device))
    for zero_centered, bias in ((False, True), (True, False)):
        layer = drawn(
            *(k, n, bias),
            **{"normalization": normalization, "zero_centered": zero_centered, "eps": 1e-4},
            **{"recipe": RECIPES[name][0], "device": device, "dtype": dtype},
        )
        assert_all_same(step(layer, layer, input, grad), step(Steps(layer), layer, input, grad))


@by_norm
@by_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(name: str, shape: tuple[int, ...], normalization: str, device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    k, n = width_of(name, 48), width_of(name, 80)
    layer = drawn(k, n, normalization=normalization, recipe=recipe, device=device)
    if row_unit(name) > 1:  # the backward requires whole blocks of rows
        shape = (*(shape[:-2]), rows_of(name, shape[-2] if len(shape) > 1 else 1), k)
    input, grad = data((*shape[:-1], k), n, device)
    got, expected = step(layer, layer, input, grad), fp64(layer, input, grad)
    # float32 has the errors of the norm in addition, and the gradient of the norm subtracts means.
    limits = dict.fromkeys(got, 2 * max(bound.backward, 2e-6)) | {"bias": 1e-6}
    limits |= {"output": max(bound.forward, 2e-6), "weight": max(bound.backward, 2e-6)}
    for what, limit in limits.items():
        g, e = got[what], expected[what]
        assert g.dtype == torch.float32 and g.shape == e.shape
        assert relative_error(g, e) <= (limit if input.numel() > 100 else 2 * limit), what
        if what in ("output", "weight") and input.numel() > 100:
            assert relative_error(g, e) >= bound.least(what), f"{what}: too exact for {name}"


@by_norm
def test_initial_values_are_those_of_torch(normalization: str) -> None:
    for bias in (True, False):
        torch.manual_seed(1)
        expected = torch.nn.Linear(24, 40, bias)
        torch.manual_seed(1)
        layer = LayerNormLinear(24, 40, bias, normalization=normalization)
        state = {f"norm_{key}": value for key, value in NORMS[normalization](24).state_dict().items()}
        state |= expected.state_dict()
        assert list(layer.state_dict()) == list(state)
        for key, value in state.items():
            assert_same_bits(layer.state_dict()[key], value, key)
    assert not LayerNormLinear(24, 40, zero_centered=True).norm_weight.any()


@by_norm
@by_recipe
def test_state(name: str, normalization: str) -> None:
    k = width_of(name, 16)
    input, _ = data((rows_of(name, 6), k), 32)
    check_module_state(
        lambda **factory: LayerNormLinear(
            k, 32, normalization=normalization, zero_centered=True, recipe=RECIPES[name][0], **factory
        ),
        lambda module: module(input).detach(),
    )


@by_norm
@by_recipe
def test_returns_the_norm_where_asked(name: str, normalization: str, device: torch.device) -> None:
    k = width_of(name, 48)
    layer = drawn(k, 96, normalization=normalization, recipe=RECIPES[name][0], device=device)
    steps = Steps(layer)
    expected_layer = layer(data((rows_of(name, 33), k), 96, device)[0])
    layer.return_normalized = True
    input, grad = data((rows_of(name, 33), k), 96, device)

    def both(x: Tensor) -> Tensor:
        normalized = steps.norm(x)
        return torch.cat([steps.linear(normalized), normalized * 2], 1)

    class Both(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output, normalized = layer(x)
            return torch.cat([output, normalized * 2], 1)

    grad = torch.cat([grad, torch.ones(grad.shape[0], k, device=device)], 1)
    got = step(Both(), layer, input, grad)
    leaves = {"input": input.detach().requires_grad_()} | dict(layer.named_parameters())
    torch.manual_seed(9)
    assert_all_same(got, outputs_and_gradients(lambda x: both(x["input"]), leaves, grad))
    assert_same_bits(got["output"][:, :96], expected_layer.detach())


@by_norm
@pytest.mark.parametrize("return_normalized", [False, True])
def test_delayed_scaling_is_that_of_the_two_modules(
    normalization: str, return_normalized: bool, device: torch.device
) -> None:
    recipe = DelayedScaling(amax_history_len=2)
    layer = drawn(
        *(48, 96),
        normalization=normalization,
        recipe=recipe,
        device=device,
        return_normalized=return_normalized,
    )
    steps = Steps(layer)
    call = (lambda x: layer(x)[0]) if return_normalized else layer
    input, grad = data((33, 48), 96, device)
    for scale in (1.0, 4.0, 0.5):
        got = step(call, layer, input, grad * scale)
        assert_all_same(got, step(steps, layer, input, grad * scale))
        for name, buffer in steps.linear.named_buffers():
            assert_same_bits(layer.get_buffer(name), buffer, name)
    assert list(dict(layer.named_buffers())) == ["delayed_history", "delayed_scale", "delayed_amax"]
    before = [buffer.clone() for buffer in layer.buffers()]
    for wrong in (input[:, :40], input.double()):
        with pytest.raises((TypeError, ValueError)):  # a refused call changes no state
            layer(wrong)
    layer.eval()(input)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), before, strict=True))


@by_recipe
def test_frozen_parameters(name: str, device: torch.device) -> None:
    k = width_of(name, 48)
    layer = drawn(k, 96, recipe=RECIPES[name][0], device=device)
    input, grad = data((rows_of(name, 33), k), 96, device)
    expected = step(layer, layer, input, grad)
    names = [key for key, _ in layer.named_parameters()]
    for trained in ([], ["weight"], ["norm_weight"], ["norm_bias", "bias"], names):
        for key, parameter in layer.named_parameters():
            parameter.requires_grad_(key in trained)
            parameter.grad = None
        for leaf in (input.detach(), input.detach().requires_grad_()):
            torch.manual_seed(9)
            output = layer(leaf)
            assert output.requires_grad == bool(trained or leaf.requires_grad)
            assert_same_bits(output.detach(), expected["output"])
            if not output.requires_grad:
                continue
            for parameter in layer.parameters():
                parameter.grad = None
            output.backward(grad)
            for key, parameter in layer.named_parameters():
                assert (parameter.grad is not None) == (key in trained)
                if key in trained and name != "nvfp4":  # whose gradients are rounded with other random bits
                    assert_same_bits(parameter.grad, expected[key], key)


@by_recipe
def test_one_graph_serves_any_number_of_rows(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    k = width_of(name, 48)
    layer = drawn(k, 96, recipe=RECIPES[name][0], device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = set()  # torch traces eps as a symbol first, then as a number, as it does in its own norms
    for rows in (16, 48, 160, 400):
        input, grad = data((rows, k), 96, device)
        got, expected = step(compiled, layer, input, grad), step(layer, layer, input, grad)
        if name == "nvfp4":
            assert_same_bits(got["output"], expected["output"])  # compiled seeds of random rounding differ
        else:
            assert_all_same(got, expected)
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_trains_as_torch_does(device: torch.device) -> None:
    torch.manual_seed(0)
    mine = LayerNormLinear(16, 8, device=device)
    theirs = torch.nn.Sequential(torch.nn.LayerNorm(16, device=device), torch.nn.Linear(16, 8, device=device))
    state = mine.state_dict()
    names = {"0.weight": "norm_weight", "0.bias": "norm_bias", "1.weight": "weight", "1.bias": "bias"}
    theirs.load_state_dict({key: state[name] for key, name in names.items()}, strict=True)
    input = torch.randn(32, 16, device=device)
    for module in (mine, theirs):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(input).square().mean().backward()
            optimizer.step()
    for key, name in names.items():
        torch.testing.assert_close(mine.get_parameter(name), theirs.get_parameter(key), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_data_parallel_wrappers(wrapper: str, recipe: Recipe | None, tmp_path: Path) -> None:
    layer = drawn(128, 96, recipe=recipe)
    input, _ = data((32, 128), 96)
    layer(input).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    wrapped: Any = drawn(128, 96, recipe=recipe)
    with one_rank(tmp_path):
        if wrapper == "FSDP2":
            fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)))
        else:
            wrapped = DistributedDataParallel(wrapped)
        wrapped(input).square().sum().backward()
        for name, parameter in wrapped.named_parameters():
            grad = parameter.grad.full_tensor() if wrapper == "FSDP2" else parameter.grad
            assert_same_bits(grad, expected[name.removeprefix("module.")], name)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"normalization": "layer_norm"},
            "argument 'normalization': expected 'LayerNorm' or 'RMSNorm', got 'layer_norm'. Use one of the two.",
        ),
        (
            {"in_features": 0},
            "argument 'in_features': expected at least 1, got 0. There is nothing to normalize in an empty row.",
        ),
    ],
)
def test_constructor_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        LayerNormLinear(**{"in_features": 8, "out_features": 8, **arguments})
    assert str(error.value) == f"transformer_plugin::LayerNormLinear: {text}"


def test_errors_name_the_layer() -> None:
    recipe = MXFP8BlockScaling()
    with pytest.raises(ValueError, match="expected one that supports in_features=40"):
        LayerNormLinear(40, 32, recipe=recipe)
    model = torch.nn.ModuleDict({"qkv": LayerNormLinear(64, 32, normalization="RMSNorm", recipe=recipe)})
    with pytest.raises(ValueError, match="argument 'norm_weight': expected size 48") as error:
        model["qkv"](torch.randn(4, 48))
    assert note_of(error.value) == (
        "raised in the layer LayerNormLinear(in_features=64, out_features=32, bias=True, normalization=RMSNorm, "
        f"eps=1e-05, recipe={recipe})"
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model["qkv"](torch.randn(4, 64))
    assert "transformer_plugin.nn.LayerNormLinear" in {event.key for event in profile.key_averages()}
