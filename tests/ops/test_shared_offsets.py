"""One table of the groups in each direction of a layer: how often it is made, and that it is the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_plugin import ops
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.launches import launched
from transformer_plugin.testing.numerics import assert_same_bits

#: A number of groups whose table has a size that no other tensor of these calls has.
GROUPS, HIDDEN, FFN, ROWS = 37, 32, 128, 592
NONE = ("none",) * 3


def formats_of(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.input_format, recipe.weight_format, recipe.grad_format


BLOCK = formats_of(Float8BlockScaling())
OFFSETS_BYTES = 4 * (GROUPS + 1)
KERNELS = ("group_offsets_kernel", "row_tiles_kernel")


def tables(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """How many tables a call makes, and its result: kernels on a GPU, tensors of offsets on a CPU."""
    results: list[Any] = []
    if device.type == "cuda":
        names = launched(lambda: results.append(call()))
        return sum(any(kernel in name for kernel in KERNELS) for name in names), results[0]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        results.append(call())
    kineto = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() == OFFSETS_BYTES for event in kineto), results[0]


def sizes_of(device: torch.device, seed: int = 0) -> Tensor:
    """Multiples of 16, some of them 0, with room after the last group."""
    sizes = torch.randint(0, 2, (GROUPS,), generator=torch.Generator().manual_seed(seed)) * 16
    return sizes.to(device)


def operands(device: torch.device, bias: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, generator=generator) * 0.2
        return values.to(device, torch.bfloat16).requires_grad_()

    named = {
        "input": draw(ROWS, HIDDEN),
        "fc1_weight": draw(GROUPS, 2 * FFN, HIDDEN),
        "fc2_weight": draw(GROUPS, HIDDEN, FFN),
        "probs": torch.rand(ROWS, generator=generator).to(device).requires_grad_(),
    }
    if bias:
        named |= {"fc1_bias": draw(GROUPS, 2 * FFN), "fc2_bias": draw(GROUPS, HIDDEN)}
    return named


def mlp(sizes: Tensor, given: dict[str, Tensor], formats: tuple[str, str, str] = NONE) -> Tensor:
    keys = ("input_format", "weight_format", "grad_format")
    return ops.grouped_mlp(group_sizes=sizes, **given, **dict(zip(keys, formats, strict=True)))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_layer_makes_one_in_each_direction(bias: bool, device: torch.device) -> None:
    sizes, given = sizes_of(device), operands(device, bias)
    mlp(sizes, given).sum().backward()  # what a first call does besides
    forward, output = tables(lambda: mlp(sizes, given), device)
    backward, _ = tables(lambda: torch.autograd.grad(output.sum(), list(given.values())), device)
    assert (forward, backward) == (1, 1)
    with torch.no_grad():
        assert tables(lambda: mlp(sizes, given), device)[0] == 1


def test_a_layer_of_tokens_makes_one_in_each_direction(device: torch.device) -> None:
    tokens, topk = 24, 3
    indices = torch.rand(tokens, GROUPS, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :topk]
    slot, source, sizes, _, probs = ops.assign_weighted_slots(
        indices.to(device), torch.rand(tokens, topk).to(device), 0, GROUPS, ROWS, 16
    )
    given = operands(device) | {"probs": probs.requires_grad_()}
    given["input"] = given["input"][:tokens].detach().requires_grad_()

    def call() -> Tensor:
        return mlp(sizes, given | {"slot": slot, "source": source})

    call().sum().backward()
    forward, output = tables(call, device)
    backward, _ = tables(lambda: torch.autograd.grad(output.sum(), list(given.values())), device)
    assert (forward, backward) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()])
def test_row_tiles_have_the_offsets(recipe: Recipe) -> None:
    device, formats = torch.device("cuda"), formats_of(recipe)
    sizes, given = sizes_of(device), operands(device)
    mlp(sizes, given, formats).sum().backward()
    forward, output = tables(lambda: mlp(sizes, given, formats), device)
    backward, _ = tables(lambda: torch.autograd.grad(output.sum(), list(given.values())), device)
    assert (forward, backward) == (1, 1)


def test_row_tiles_have_the_offsets_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    sizes, given = sizes_of(cpu), operands(cpu)
    forward, output = tables(lambda: mlp(sizes, given, BLOCK), cpu)
    backward, _ = tables(lambda: torch.autograd.grad(output.sum(), list(given.values())), cpu)
    assert (forward, backward) == (0, 0)


@pytest.mark.parametrize("formats", [NONE, BLOCK], ids=["none", "block"])
def test_a_grouped_linear_makes_one_in_its_backward(
    formats: tuple[str, str, str], device: torch.device
) -> None:
    sizes, given = sizes_of(device), operands(device, bias=True)
    leaves = [given["input"], given["fc1_weight"], given["fc1_bias"]]
    input, weight, bias = leaves

    def loss() -> Tensor:
        return ops.grouped_linear(input, weight, sizes, bias, None, *formats).sum()

    loss().backward()
    output = loss()
    backward, _ = tables(lambda: torch.autograd.grad(output, leaves), device)
    on_cpu = formats != NONE and device.type == "cpu"  # where row tiles are not counted
    assert backward == (0 if on_cpu else 1)


def test_nothing_is_shared_outside_of_a_layer(device: torch.device) -> None:
    sizes, given = sizes_of(device), {name: t.detach() for name, t in operands(device).items()}
    mlp(sizes, given)

    def products() -> None:
        for _ in range(3):
            ops.grouped_gemm(given["input"], given["fc1_weight"], sizes)

    products()
    assert tables(products, device)[0] == 3


class Between(TorchDispatchMode):
    """Calls a function before the second product of a layer."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act, self.products = act, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "transformer_plugin" and func._opname.startswith("grouped_gemm"):
            self.products += 1
            if self.products == 2:
                self.act()
        return func(*args, **(kwargs or {}))


def test_sizes_that_change_between_the_products_count(device: torch.device) -> None:
    """Nothing in a layer changes them. A mode might, and a table is found by their version and their memory."""
    sizes, others, given = sizes_of(device), sizes_of(device, seed=1), operands(device)
    act, _ = ops.grouped_gemm_activation(given["input"], given["fc1_weight"], sizes, given["probs"])
    expected = ops.grouped_gemm(act, given["fc2_weight"], others)
    with torch.no_grad():
        assert not torch.equal(expected, ops.grouped_gemm(act, given["fc2_weight"], sizes))
    changed = sizes.clone()

    def overwrite() -> None:
        torch.autograd.graph.increment_version(changed.copy_(others))  # not counted below autograd

    with Between(overwrite):
        assert_same_bits(mlp(changed, given), expected)
    changed = sizes.clone()
    with Between(lambda: setattr(changed, "data", others.clone())):
        assert_same_bits(mlp(changed, given), expected)


@pytest.mark.parametrize("formats", [NONE, BLOCK], ids=["none", "block"])
def test_a_layer_within_a_layer_has_its_own(formats: tuple[str, str, str], device: torch.device) -> None:
    sizes, others, given = sizes_of(device), sizes_of(device, seed=1), operands(device)
    leaves = list(given.values())
    expected, other = mlp(sizes, given, formats), mlp(others, given, formats).detach()
    grad = torch.ones_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad, retain_graph=True)
    inner: list[Tensor] = []

    def layers() -> None:
        inner.extend(mlp(each, given, formats).detach() for each in (others, sizes, others))

    with Between(layers):
        assert_same_bits(mlp(sizes, given, formats), expected)
    with Between(layers):
        for got, wanted in zip(torch.autograd.grad(expected, leaves, grad), gradients, strict=True):
            assert_same_bits(got, wanted)
    for got, wanted in zip(inner, [other, expected.detach(), other] * 2, strict=True):
        assert_same_bits(got, wanted)


def test_an_op_within_a_layer_has_the_table_of_its_sizes(device: torch.device) -> None:
    sizes, others, given = sizes_of(device), sizes_of(device, seed=1), operands(device)
    rows, weight = given["input"].detach(), given["fc1_weight"].detach()
    expected, product = mlp(sizes, given), ops.grouped_gemm(rows, weight, others)
    short = rows[: int(sizes.sum()) - 16]
    inner: list[Tensor] = []

    def act() -> None:
        inner.append(ops.grouped_gemm(rows, weight, others))
        inner.append(ops.grouped_gemm(rows, weight, others.int()))
        if device.type == "cpu":  # where sizes that exceed the buffer are refused at once
            with pytest.raises(ValueError, match="sizes that sum to at most"):
                ops.grouped_gemm(short, weight, sizes)

    with Between(act):
        assert_same_bits(mlp(sizes, given), expected)
    for got in inner:
        assert_same_bits(got, product)


def test_a_layer_that_raises_leaves_nothing(device: torch.device) -> None:
    sizes, given = sizes_of(device), operands(device)

    def fail() -> None:
        raise RuntimeError("between the products")

    with pytest.raises(RuntimeError, match="between the products"), Between(fail):
        mlp(sizes, given)

    def call() -> Tensor:
        return ops.grouped_gemm(given["input"], given["fc1_weight"], sizes)

    call()
    assert tables(call, device)[0] == 1
    assert tables(lambda: (call(), call()), device)[0] == 2


@pytest.mark.parametrize("formats", [NONE, BLOCK], ids=["none", "block"])
def test_in_inference_mode(formats: tuple[str, str, str], device: torch.device) -> None:
    sizes, given = sizes_of(device), operands(device)
    expected = mlp(sizes, given, formats)
    with torch.inference_mode():
        assert_same_bits(mlp(sizes.clone(), given, formats), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [NONE, BLOCK], ids=["none", "block"])
def test_a_replayed_graph_reads_the_sizes_again(formats: tuple[str, str, str]) -> None:
    device = torch.device("cuda")
    sizes, others, given = sizes_of(device), sizes_of(device, seed=1), operands(device)
    leaves = list(given.values())

    def step() -> list[Tensor]:
        output = mlp(sizes, given, formats)
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for values in (others, sizes_of(device)):
        sizes.copy_(values)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert_same_bits(a, b)
