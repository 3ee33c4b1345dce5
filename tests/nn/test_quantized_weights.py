"""Modules that quantize their weights once for many steps: the same bits, and an error for stale weights."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.error_text import text_of
from tests.nn.common import RECIPES, rows_of, width_of
from tests.ops.test_grouped_mlp import capture
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LayerNormLinear, Linear
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits

GROUPS = 3
MAKERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda k, **options: Linear(k, 96, **options),
    "LayerNormLinear": lambda k, **options: LayerNormLinear(k, 96, **options),
    "GroupedLinear": lambda k, **options: GroupedLinear(GROUPS, k, 96, **options),
    "GroupedMLP": lambda k, **options: GroupedMLP(GROUPS, k, 128, True, **options),
}
#: Those of x, group sizes and probabilities that a module takes, if not all.
ARGUMENTS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "Linear": lambda x, *_: (x,),
    "LayerNormLinear": lambda x, *_: (x,),
    "GroupedLinear": lambda x, sizes, _: (x, sizes),
}
by_module = pytest.mark.parametrize("kind", list(MAKERS))
by_format = pytest.mark.parametrize("name", [name for name in RECIPES if name != "none"])


def make(kind: str, name: str = "fp8_block", device: torch.device | str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    return MAKERS[kind](width_of(name, 48), device=device, recipe=RECIPES[name][0])


def step(
    module: torch.nn.Module,
    name: str = "fp8_block",
    run: Callable[..., Tensor] | None = None,
    seed: int = 3,
) -> list[Tensor]:
    """Returns the output and all gradients."""
    parameters = list(module.parameters())
    device, generator = parameters[0].device, torch.Generator().manual_seed(seed)
    counts = [rows_of(name, size) for size in (40, 0, 50)]
    rows = sum(counts) + rows_of(name, 8)
    x = torch.randn(rows, width_of(name, 48), generator=generator).to(device).requires_grad_()
    arguments = [x]
    if not isinstance(module, Linear | LayerNormLinear):
        arguments.append(torch.tensor(counts, device=device))
    if isinstance(module, GroupedMLP):
        arguments.append(torch.rand(rows, generator=generator).to(device))
    torch.manual_seed(9)
    output = (module if run is None else run)(*arguments)
    grad = torch.randn(output.shape, generator=generator).to(device)
    return [output.detach(), *torch.autograd.grad(output, [x, *parameters], grad)]


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, str(i))


def layers(module: torch.nn.Module) -> list[RecipeModule]:
    return [layer for layer in module.modules() if isinstance(layer, RecipeModule)]


def kept(module: torch.nn.Module) -> list[Tensor]:
    """The quantized weights of a module."""
    weights = [layer.quantized_weight for layer in layers(module)]
    return [tensor for weight in weights if weight is not None for tensor in weight.tensors]


def hide_values(module: torch.nn.Module) -> None:
    """Sets the weights to NaN without autograd's knowledge, so that any read of them is visible."""
    for layer in layers(module):
        layer.weight.data.fill_(float("nan"))


@by_module
@by_format
def test_same_bits_for_many_steps(kind: str, name: str, device: torch.device) -> None:
    module, plain = make(kind, name, device), make(kind, name, device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    places: list[int] = []
    for number in range(3):
        assert module.quantize_weights() is None
        now = [tensor.data_ptr() for tensor in kept(module)]
        assert now and now == (places or now)
        places = now
        hidden = copy.deepcopy(module)
        hide_values(hidden)
        for micro_batch in range(2):
            expected = step(plain, name, seed=10 * number + micro_batch)
            assert_all_same(step(module, name, seed=10 * number + micro_batch), expected)
            assert_all_same(step(hidden, name, seed=10 * number + micro_batch), expected)
        for m, optimizer in zip((module, plain), optimizers, strict=True):
            for parameter, gradient in zip(m.parameters(), expected[2:], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    with pytest.raises(ValueError, match="changed in place"):
        step(module, name)
    module.forget_quantized_weights()
    assert not kept(module)
    assert_all_same(step(module, name), step(plain, name))


def changed_in_place(module: torch.nn.Module) -> None:
    with torch.no_grad():
        layers(module)[-1].weight.add_(1)


def optimized(module: torch.nn.Module, **options: bool) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(module.parameters(), **options).step()


def optimized_compiled(module: torch.nn.Module) -> None:
    torch.compile(optimized, backend="aot_eager")(module)


def loaded(module: torch.nn.Module) -> None:
    module.load_state_dict(module.state_dict())


def loaded_by_assignment(module: torch.nn.Module) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replaced(module: torch.nn.Module) -> None:
    layer = layers(module)[-1]
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


def reset(module: torch.nn.Module) -> None:
    module.reset_parameters()


def moved_to_other_memory(module: torch.nn.Module) -> None:
    layer = layers(module)[-1]
    layer.weight.data = layer.weight.detach() + 1


def moved_to_memory_of_before(module: torch.nn.Module) -> None:
    """The old memory is freed first, so that the allocator may return the same address."""
    weight = layers(module)[-1].weight
    sizes = weight.shape
    weight.data = weight.new_empty(0)
    weight.data = torch.ones(sizes)


def loaded_by_swapping(module: torch.nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(module.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = [
    changed_in_place,
    optimized,
    optimized_compiled,
    loaded,
    loaded_by_assignment,
    loaded_by_swapping,
    replaced,
    reset,
    moved_to_other_memory,
    moved_to_memory_of_before,
]


@by_module
@pytest.mark.parametrize("change", CHANGES)
def test_stale_weights_are_refused(kind: str, change: Callable[[torch.nn.Module], None]) -> None:
    module = make(kind)
    module.quantize_weights()
    step(module)
    change(module)
    with pytest.raises(ValueError) as caught:
        step(module)
    got = "one that was changed in place afterwards"
    if change in (loaded_by_assignment, replaced):
        got = "another tensor"
    elif change in (moved_to_other_memory, moved_to_memory_of_before):
        got = "one whose .data was replaced afterwards"
    layer = "GroupedLinear" if kind == "GroupedMLP" else kind
    assert text_of(caught.value) == (
        f"transformer_plugin::{layer}: argument 'weight': expected the weight that quantize_weights() quantized, "
        f"got {got}. Call quantize_weights() again after each change of the weight, or forget_quantized_weights()."
    )
    module.quantize_weights()
    fresh = make(kind)
    fresh.load_state_dict(module.state_dict())
    assert_all_same(step(module), step(fresh))


def test_weights_given_from_outside_are_another_tensor() -> None:
    module = make("Linear")
    module.quantize_weights()
    given = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(ValueError, match="another tensor"):
        torch.func.functional_call(module, given, torch.randn(4, 48))


def test_a_weight_of_another_size_makes_other_buffers() -> None:
    module = make("Linear")
    module.quantize_weights()
    module.weight, module.bias = torch.nn.Parameter(torch.randn(40, 48)), None
    module.quantize_weights()
    fresh = Linear(48, 40, False, recipe=Float8BlockScaling())
    fresh.load_state_dict(module.state_dict())
    assert_all_same(step(module), step(fresh))


@by_module
def test_a_backward_of_what_was_overwritten_raises(kind: str) -> None:
    module = make(kind)
    module.quantize_weights()

    def requantized(*arguments: Tensor) -> Tensor:
        output = module(*arguments)
        module.quantize_weights()
        return output

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(module, run=requantized)


@by_module
def test_state_dict_is_unchanged(kind: str) -> None:
    module, plain = make(kind), make(kind)
    module.quantize_weights()
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict(), strict=True)
    plain.quantize_weights()
    assert_all_same(step(plain), step(module))


def set_recipe(module: torch.nn.Module, recipe: Recipe | None) -> None:
    for layer in layers(module):
        layer.recipe = recipe


@by_module
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.bfloat16(),
        lambda module: module.to("cpu"),
        lambda module: set_recipe(module, MXFP8BlockScaling()),
        lambda module: set_recipe(module, None),
    ],
    ids=["cast", "move", "recipe", "no recipe"],
)
def test_moves_casts_and_recipes_drop_the_buffers(
    kind: str, change: Callable[[torch.nn.Module], None]
) -> None:
    module = make(kind)
    module.quantize_weights()
    set_recipe(module, Float8BlockScaling())  # an equal recipe, another object
    assert kept(module)
    change(module)
    assert not kept(module)


@by_module
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(kind: str, how: str) -> None:
    """A copy is as fresh or as stale as the original, and has separate buffers."""
    module = make(kind)
    changed_in_place(module)
    module.quantize_weights()

    def copied() -> torch.nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    expected, twin = step(module), copied()
    assert {t.data_ptr() for t in kept(twin)}.isdisjoint(t.data_ptr() for t in kept(module))
    assert_all_same(step(twin), expected)
    optimized(twin)
    with pytest.raises(ValueError, match="changed in place"):
        step(twin)
    twin.quantize_weights()
    assert_all_same(step(module), expected)
    optimized(module)
    with pytest.raises(ValueError, match="changed in place"):
        step(copied())


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["none", "delayed"])
@by_module
def test_recipes_without(kind: str, recipe: DelayedScaling | None) -> None:
    module = MAKERS[kind](48, recipe=recipe)
    with pytest.raises(ValueError) as caught:
        module.quantize_weights()
    layer = "GroupedLinear" if kind == "GroupedMLP" else kind
    assert str(caught.value) == (
        f"transformer_plugin::{layer}: argument 'recipe': expected a recipe that quantizes the weight from its "
        f"current values, got {recipe}. Leave out quantize_weights(), or set another recipe."
    )
    module.forget_quantized_weights()


@by_module
def test_inference_mode(kind: str) -> None:
    """Inference tensors have no version."""
    with torch.inference_mode():
        module = make(kind)
        module.quantize_weights()
        x, sizes, probs = torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6)
        arguments = ARGUMENTS.get(kind, lambda *given: given)(x, sizes, probs)
        got = module(*arguments)
        module.forget_quantized_weights()
        assert_same_bits(got, module(*arguments))


@by_module
def test_training_after_inference_mode(kind: str) -> None:
    """A backward may keep a copy that was made and refreshed in inference mode."""
    module = make(kind)
    x, sizes, probs = torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6)
    arguments = ARGUMENTS.get(kind, lambda *given: given)(x, sizes, probs)
    with torch.inference_mode():
        module.quantize_weights()
        module.quantize_weights()
    module(*arguments).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.usefixtures("fresh_compiler")
@by_module
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp8"])
def test_compiled_once_for_many_steps(kind: str, name: str, device: torch.device) -> None:
    module, plain = make(kind, name, device), make(kind, name, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for number in range(4):
        module.quantize_weights()
        assert_all_same(step(module, name, compiled, seed=number), step(plain, name, seed=number))
        for m in (module, plain):
            changed_in_place(m)
    assert counter.frame_count == 1
    module.forget_quantized_weights()
    assert_all_same(step(module, name, compiled), step(plain, name))


@pytest.mark.gpu
@by_module
@by_format
@pytest.mark.parametrize("inside", [False, True], ids=["written before", "written in the graph"])
def test_graph_of_a_forward_takes_new_weights(kind: str, name: str, inside: bool) -> None:
    module, plain = make(kind, name, "cuda"), make(kind, name, "cuda")
    counts = [rows_of(name, size) for size in (40, 0, 50)]
    x = torch.randn(sum(counts), width_of(name, 48), device="cuda")
    sizes, probs = torch.tensor(counts, device="cuda"), torch.rand(sum(counts), device="cuda")
    arguments = ARGUMENTS.get(kind, lambda *given: given)(x, sizes, probs)
    module.quantize_weights()

    @torch.no_grad()
    def forward() -> Tensor:
        if inside:
            module.quantize_weights()
        return module(*arguments)

    graph, output = capture(forward)
    for _ in range(3):
        for m in (module, plain):
            changed_in_place(m)
        if not inside:
            module.quantize_weights()
        graph.replay()
        with torch.no_grad():
            assert_same_bits(output, plain(*arguments))
