"""GroupedLinear and GroupedMLP, compared with a loop over torch layers in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.error_text import text_of
from tests.nn.common import (
    RECIPES,
    Bound,
    by_recipe,
    check_module_state,
    in_fp64,
    outputs_and_gradients,
    row_unit,
    rows_of,
    width_of,
)
from transformer_plugin.nn import GroupedLinear, GroupedMLP
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

# Group sizes and buffer rows: empty groups at the beginning, middle and end, and rows past the end.
SIZES = {
    "even": ([64, 64, 64], 192),
    "empty": ([0, 100, 0, 60, 0], 160),
    "one": ([129], 129),
    "tail": ([70, 1, 90], 200),
    "nothing": ([0, 0], 8),
    "no rows": ([0, 0, 0], 0),
    "many": ([3] * 100, 320),
}
by_sizes = pytest.mark.parametrize("sizes", list(SIZES))


def sizes_for(name: str, sizes: str) -> tuple[list[int], int]:
    """As above, with more rows if the recipe's backward requires it."""
    counts, rows = SIZES[sizes]
    more = [rows_of(name, count) for count in counts]
    return more, rows_of(name, rows + sum(more) - sum(counts))


def slices_of(sizes: list[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def grouped_linear_fp64(
    input: Tensor,
    weight: Tensor,
    sizes: list[int],
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    parts = []
    for g, rows in enumerate(slices_of(sizes)):
        part = input[rows] @ weight[g].T
        if bias is not None:
            part = part + (bias[g] if scale is None else bias[g] * scale[rows, None])
        parts.append(part)
    tail = input.new_zeros(input.shape[0] - sum(sizes), weight.shape[1])
    return torch.cat([*parts, tail])


def data(shape: tuple[int, ...], device: torch.device, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def compare(
    got: dict[str, Tensor], expected: dict[str, Tensor], limits: dict[str, float], bound: Bound
) -> None:
    for name, limit in limits.items():
        error = relative_error(got[name], expected[name])
        assert error <= limit, f"{name}: {error:.3g} > {limit}"
        if "bias" not in name and limit > 1e-5 and expected[name].count_nonzero() > 4000:
            assert error >= bound.least(name), f"{name}: {error:.3g}, too exact for the recipe"


@by_recipe
@by_sizes
@pytest.mark.parametrize("bias", ["no bias", "bias", "scaled bias"])
def test_grouped_linear(name: str, sizes: str, bias: str, device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    counts, rows = sizes_for(name, sizes)
    torch.manual_seed(0)
    k, n = width_of(name, 48), width_of(name, 80)
    module = GroupedLinear(
        len(counts), k, n, bias != "no bias", device=device, recipe=recipe, scale_bias=bias == "scaled bias"
    )
    input = data((rows, k), device).requires_grad_()
    scale = data((rows,), device, 4).abs().requires_grad_() if bias == "scaled bias" else None
    grad = data((rows, n), device, 5)
    leaves = {"input": input, "weight": module.weight, "bias": module.bias, "scale": scale}
    leaves = {key: leaf for key, leaf in leaves.items() if leaf is not None}

    group_sizes = torch.tensor(counts, device=device)
    got = outputs_and_gradients(lambda _: module(input, group_sizes, scale), leaves, grad)
    expected = outputs_and_gradients(
        lambda x: grouped_linear_fp64(x["input"], x["weight"], counts, x.get("bias"), x.get("scale")),
        in_fp64(leaves),
        grad.double(),
    )
    limits = dict.fromkeys(got, bound.backward) | {"output": bound.forward}
    limits |= {key: 1e-5 for key in ("bias", "scale") if key in got}
    compare(got, expected, limits, bound)
    assert not got["output"][sum(counts) :].any() and not got["input"][sum(counts) :].any()


def swiglu_mlp_fp64(input: Tensor, sizes: list[int], probs: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    hidden = grouped_linear_fp64(input, parameters["fc1.weight"], sizes, parameters.get("fc1.bias"), None)
    gate, linear = hidden.chunk(2, dim=-1)
    activation = torch.nn.functional.silu(gate) * linear * probs[:, None]
    return grouped_linear_fp64(activation, parameters["fc2.weight"], sizes, parameters.get("fc2.bias"), probs)


@by_recipe
@by_sizes
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_grouped_mlp(name: str, sizes: str, bias: bool, device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    counts, rows = sizes_for(name, sizes)
    torch.manual_seed(0)
    hidden = width_of(name, 48)
    module = GroupedMLP(len(counts), hidden, 64, bias, device=device, recipe=recipe)
    input = data((rows, hidden), device).requires_grad_()
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_()
    grad = data((rows, hidden), device, 5)
    leaves = {"input": input, "probs": probs} | dict(module.named_parameters())

    group_sizes = torch.tensor(counts, device=device, dtype=torch.int32)
    got = outputs_and_gradients(lambda _: module(input, group_sizes, probs), leaves, grad)
    expected = outputs_and_gradients(
        lambda x: swiglu_mlp_fp64(x["input"], counts, x["probs"], x), in_fp64(leaves), grad.double()
    )
    # Two products, and SwiGLU multiplies two factors with errors between them: at most four errors of one product.
    limits = {key: 4 * max(bound.forward, bound.backward) for key in got}
    compare(got, expected, limits, bound)


def test_a_factor_of_zero_hides_the_row(device: torch.device) -> None:
    """Padding rows have probability 0: for any biases of their expert, their output and gradient are 0."""
    module = GroupedMLP(2, 16, 32, True, device=device)
    torch.nn.init.ones_(module.fc2.bias)
    input = torch.randn(10, 16, device=device, requires_grad=True)
    probs = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0, 1, 0], device=device)
    output = module(input, torch.tensor([4, 6], device=device), probs)
    output.square().sum().backward()
    assert not output[1::2].any() and output[::2].any(1).all()
    assert not input.grad[1::2].any() and input.grad[::2].any(1).all()


def test_initial_values_are_those_of_torch_nn_linear() -> None:
    torch.manual_seed(1)
    layers = torch.cat([torch.nn.Linear(32, 24, bias=False).weight.detach() for _ in range(3)])
    torch.manual_seed(1)
    packed = GroupedLinear(3, 32, 24, bias=False).weight.detach()
    assert packed.shape == (3, 24, 32)
    assert_same_bits(packed.reshape(72, 32), layers)
    bias = GroupedLinear(50, 100, 20).bias.detach()
    assert bias.shape == (50, 20)
    assert bias.abs().max() <= 0.1 and bias.std() == pytest.approx(0.1 / 3**0.5, rel=0.1)


@by_recipe
def test_state(name: str) -> None:
    recipe, _ = RECIPES[name]
    k = width_of(name, 16)
    counts = [rows_of(name, 5), 0, rows_of(name, 6)]
    rows = sum(counts) + row_unit(name)
    input, sizes = data((rows, k), torch.device("cpu")), torch.tensor(counts)
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(2))
    check_module_state(
        lambda **factory: GroupedLinear(3, k, 32, recipe=recipe, **factory),
        lambda module: module(input, sizes).detach(),
    )
    check_module_state(
        lambda **factory: GroupedMLP(3, k, 32, True, recipe=recipe, **factory),
        lambda module: module(input, sizes, probs).detach(),
    )


def test_the_description_of_a_module() -> None:
    recipe, _ = RECIPES["fp8_block"]
    assert GroupedLinear(4, 8, 16).extra_repr() == "num_groups=4, in_features=8, out_features=16, bias=True"
    assert GroupedLinear(4, 8, 16, scale_bias=True, recipe=recipe).extra_repr() == (
        f"num_groups=4, in_features=8, out_features=16, bias=True, scale_bias=True, recipe={recipe}"
    )


def test_errors_have_four_parts() -> None:
    with pytest.raises(ValueError) as caught:
        GroupedLinear(2, 4, 4, bias=False, scale_bias=True)
    assert str(caught.value) == (
        "transformer_plugin::GroupedLinear: argument 'scale_bias': expected False without a bias, got True. "
        "Pass bias=True or leave scale_bias out."
    )
    sizes = torch.tensor([1, 2])
    with pytest.raises(ValueError) as caught:
        GroupedLinear(2, 4, 4, scale_bias=True)(torch.zeros(3, 4), sizes)
    assert text_of(caught.value) == (
        "transformer_plugin::GroupedLinear: argument 'bias_scale': expected a tensor [T] with "
        "scale_bias=True, got None. Use the same choice in the constructor and the call."
    )
    with pytest.raises(ValueError) as caught:
        GroupedLinear(2, 4, 4)(torch.zeros(3, 4), sizes, torch.ones(3))
    assert text_of(caught.value) == (
        "transformer_plugin::GroupedLinear: argument 'bias_scale': expected None with scale_bias=False, got "
        "a tensor. Use the same choice in the constructor and the call."
    )


@pytest.mark.parametrize("sizes", [[2, 0, 3], (2, 0, 3)])
def test_sizes_in_a_list_are_made_a_tensor(sizes: list[int] | tuple[int, ...]) -> None:
    layer, input = GroupedLinear(3, 8, 4), torch.randn(6, 8)
    assert torch.equal(layer(input, sizes), layer(input, torch.tensor(sizes)))
    with pytest.raises(
        TypeError, match="argument 'group_sizes': expected one of the dtypes int32, int64, got float32"
    ):
        layer(input, [2.0, 0.0, 3.0])
    with pytest.raises(TypeError, match="argument 'input': expected a tensor, got None"):
        layer(None, sizes)
    with pytest.raises(TypeError, match="argument 'group_sizes': expected a tensor, got list of str"):
        layer(input, ["2", "0", "3"])
