"""RMSNorm and LayerNorm: the constructors, values and state of torch's, and the bits of the ops."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.error_text import note_of
from tests.nn.common import check_module_state, in_fp64, outputs_and_gradients
from transformer_plugin import ops
from transformer_plugin.nn import LayerNorm, RMSNorm
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

THEIRS = {RMSNorm: torch.nn.RMSNorm, LayerNorm: torch.nn.LayerNorm}
SHAPES = [(48,), (1, 48), (33, 48), (0, 48), (3, 5, 48), (2, 0, 48)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_norm = pytest.mark.parametrize("norm", list(THEIRS))
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(norm: type[torch.nn.Module], *arguments: Any, **options: Any) -> Any:
    """Returns a module with random parameters."""
    module = norm(*arguments, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def data(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    input, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    return (input * 3 + 1).to(dtype).to(device), grad.to(dtype).to(device)


def step(module: torch.nn.Module, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Returns the output and the gradients of the input and the parameters."""
    leaves = {"input": input.detach().requires_grad_()} | dict(module.named_parameters())
    return outputs_and_gradients(lambda x: module(x["input"]), leaves, grad)


def fp64(module: torch.nn.Module, input: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The same in float64, from the definition."""
    leaves = in_fp64({"input": input} | dict(module.named_parameters()))

    def norm(x: dict[str, Tensor]) -> Tensor:
        values = x["input"]
        if isinstance(module, LayerNorm):
            values = values - values.mean(-1, keepdim=True)
        values = values / (values.square().mean(-1, keepdim=True) + module.eps).sqrt()
        if "weight" in x:
            values = values * (x["weight"] + int(module.zero_centered))
        return values + x["bias"] if "bias" in x else values

    return outputs_and_gradients(norm, leaves, grad.double())


@by_norm
def test_takes_the_place_of_torch_s(norm: Any) -> None:
    theirs = inspect.signature(THEIRS[norm].__init__).parameters
    mine = inspect.signature(norm.__init__).parameters
    assert [*theirs] == [name for name in mine if mine[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert {name for name in theirs if theirs[name].default != mine[name].default} == (
        {"eps"} if norm is RMSNorm else set()
    )
    assert mine["zero_centered"].kind is inspect.Parameter.KEYWORD_ONLY and not mine["zero_centered"].default
    assert mine["eps"].default == 1e-5
    choices: list[dict[str, Any]] = [{}, {"elementwise_affine": False}, {"eps": 1e-3}]
    for options in choices + ([{"bias": False}] if norm is LayerNorm else []):
        expected = THEIRS[norm](24, **{"eps": 1e-5, **options})
        for shape in (24, [24], (24,), torch.Size([24])):
            got = norm(shape, **options)
            assert isinstance(got, THEIRS[norm])
            assert got.extra_repr() == expected.extra_repr()
            assert got.normalized_shape == expected.normalized_shape
        assert list(got.state_dict()) == list(expected.state_dict())
        for key, value in expected.state_dict().items():
            assert_same_bits(got.state_dict()[key], value, key)
        for here, there in ((got, expected), (expected, got)):  # a round trip
            with torch.no_grad():
                for parameter in here.parameters():
                    parameter.normal_()
            there.load_state_dict(here.state_dict(), strict=True)
            for key, value in here.state_dict().items():
                assert_same_bits(there.state_dict()[key], value, key)
    assert norm(8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert norm(8, zero_centered=True).extra_repr().endswith(", zero_centered=True")


@by_norm
@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_numbers(
    norm: Any, zero_centered: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    limit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for affine in (True,) if zero_centered else (True, False):  # without a gamma nothing is centered
        module = drawn(norm, 48, 1e-4, affine, device=device, dtype=dtype, zero_centered=zero_centered)
        input, grad = data(shape, dtype, device)
        got, expected = step(module, input, grad), fp64(module, input, grad)
        assert got.keys() == expected.keys()
        for name, e in expected.items():
            assert got[name].dtype == dtype and got[name].shape == e.shape
            assert relative_error(got[name], e) <= limit, name


@by_norm
@by_dtype
def test_agrees_with_torch_s(norm: Any, dtype: torch.dtype, device: torch.device) -> None:
    module = drawn(norm, 48, device=device, dtype=dtype)
    theirs = THEIRS[norm](48, eps=1e-5, device=device, dtype=dtype)
    theirs.load_state_dict(module.state_dict())
    input, grad = data((33, 48), dtype, device)
    got, expected = step(module, input, grad), step(theirs, input, grad)
    for name, e in expected.items():
        assert got[name].dtype == e.dtype
        assert relative_error(got[name], e) <= (2e-6 if dtype == torch.float32 else 1e-2), name


@by_dtype
def test_an_eps_of_none_is_that_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    """That of float32 in every dtype: torch computes the norm in float32."""
    input = (torch.randn(5, 48, device=device) * 1e-3).to(dtype)
    options: Any = {"device": device, "dtype": dtype}
    module, theirs = RMSNorm(48, None, **options), torch.nn.RMSNorm(48, **options)
    torch.testing.assert_close(module(input), theirs(input))
    assert_same_bits(module(input), ops.rms_norm(input, module.weight, torch.finfo(torch.float32).eps))


@by_norm
@by_dtype
@pytest.mark.parametrize("zero_centered", [False, True])
def test_has_the_bits_of_the_op(
    norm: Any, zero_centered: bool, dtype: torch.dtype, device: torch.device
) -> None:
    module = drawn(norm, 136, 1e-3, device=device, dtype=dtype, zero_centered=zero_centered)
    input, grad = data((70, 136), dtype, device)
    leaves = [input.requires_grad_(), *module.parameters()]
    op = ops.rms_norm if norm is RMSNorm else ops.layer_norm
    output = op(*leaves, 1e-3, zero_centered)
    expected = (output.detach(), *torch.autograd.grad(output, leaves, grad))
    for got, e in zip(step(module, input, grad).values(), expected, strict=True):
        assert_same_bits(got, e)


@by_norm
def test_gamma_starts_at_one(norm: Any) -> None:
    input = torch.randn(4, 24)
    module = norm(24, zero_centered=True)
    assert not module.weight.any()
    assert_same_bits(module(input), norm(24)(input))
    torch.nn.init.ones_(module.weight)
    module.reset_parameters()
    assert not module.weight.any()


@by_norm
@pytest.mark.parametrize("zero_centered", [False, True])
def test_state(norm: Any, zero_centered: bool) -> None:
    input = torch.randn(6, 24)
    check_module_state(
        lambda **factory: norm(24, zero_centered=zero_centered, **factory),
        lambda module: module(input).detach(),
    )


@by_norm
def test_frozen_parameters_have_no_gradient(norm: Any, device: torch.device) -> None:
    module, (input, grad) = norm(48, device=device), data((5, 48), torch.float32, device)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not module(input).requires_grad
    output = module(input.requires_grad_())
    output.backward(grad)
    assert input.grad is not None and all(parameter.grad is None for parameter in module.parameters())


@by_norm
@by_dtype
def test_autocast(norm: Any, dtype: torch.dtype, device: torch.device) -> None:
    """float32 parameters give float32, whatever the input is; the gradients have the dtypes of the leaves."""
    module = drawn(norm, 48, device=device)
    input, grad = data((33, 48), dtype, device)
    with torch.autocast(device.type, torch.bfloat16):
        got = step(module, input, grad.float())
        assert norm(48, elementwise_affine=False, device=device)(input).dtype == dtype
    expected = step(module, input.float(), grad.float())
    assert got["output"].dtype == torch.float32 and got["input"].dtype == dtype
    for name, e in expected.items():
        assert_same_bits(got[name], e.to(got[name].dtype), name)
    if dtype != torch.float32:
        with pytest.raises(TypeError, match="argument 'weight': expected"):
            module(input)


@by_norm
def test_one_graph_serves_any_number_of_rows(norm: Any, device: torch.device) -> None:
    torch._dynamo.reset()
    module = drawn(norm, 48, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    counts = set()  # torch traces eps as a symbol first, then as a number, as it does in its own norms
    for rows in (4, 9, 300):
        input, grad = data((rows, 48), torch.float32, device)
        got, expected = step(compiled, input, grad), step(module, input, grad)
        for g, e in zip(got.values(), expected.values(), strict=True):
            assert_same_bits(g, e)
        counts.add(counter.frame_count)
    assert len(counts) == 1


@by_norm
@pytest.mark.parametrize("shape", [(4, 24), 0, (), (0,)], ids=str)
def test_other_shapes_are_refused(norm: Any, shape: Any) -> None:
    with pytest.raises(ValueError) as error:
        norm(shape)
    assert str(error.value) == (
        f"transformer_plugin::{norm.__name__}: argument 'normalized_shape': expected the size of the last dimension, "
        f"at least 1, got {shape}. Use torch.nn.{norm.__name__}, or flatten the normalized dimensions."
    )


@by_norm
def test_errors_name_the_layer(norm: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), norm(24))
    with pytest.raises(ValueError, match="argument 'weight': expected size 23") as error:
        model(torch.randn(3, 23))
    note = note_of(error.value)
    assert note == f"raised in the layer '1' of Sequential: {norm.__name__}({model[1].extra_repr()})"
    with pytest.raises(TypeError, match=f"transformer_plugin.nn.{norm.__name__}: expected torch.export"):
        torch.jit.script(model)
