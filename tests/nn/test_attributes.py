"""Attributes of modules: setting one takes effect, also in the layers inside, or raises an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from transformer_plugin.nn import (
    DispatchConfig,
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    MoE,
    RouterConfig,
    TopKRouter,
)
from transformer_plugin.recipes import (
    BFloat16,
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_plugin.testing.numerics import assert_same_bits

NVFP4 = NVFP4BlockScaling(stochastic_rounding=False)
RECIPES = [BFloat16(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4, DelayedScaling(), None]


def moe_of(recipe: Recipe | None, device: torch.device | str = "cpu", **options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(64, 32, 4, 2, bias=True, recipe=recipe, device=device, **options)


def results(module: MoE) -> list[Tensor]:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).to(module.router.weight.device)
    output = module(x.requires_grad_()).output
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *module.experts.parameters()])]


def set_in(module: MoE, where: str, recipe: Recipe | None) -> None:
    if where == "moe":
        module.recipe = recipe
    elif where == "experts":
        module.experts.recipe = recipe
    else:
        module.experts.fc1.recipe = recipe
        module.experts.fc2.recipe = recipe


@pytest.mark.parametrize("where", ["moe", "experts", "layers"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_set_later_is_that_of_the_constructor(
    where: str, recipe: Recipe | None, device: torch.device
) -> None:
    expected = results(moe_of(recipe, device))
    module = moe_of(Float8BlockScaling() if recipe is None else None, device)
    before = results(module)
    set_in(module, where, recipe)
    assert module.recipe == module.experts.recipe == module.experts.fc1.recipe == recipe
    got = results(module)
    assert not torch.equal(got[0], before[0])
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)
    assert moe_of(recipe, device).dispatcher == module.dispatcher  # the padding is that of the recipe
    set_in(module, where, NVFP4)
    for g, e in zip(results(copy.deepcopy(module)), results(moe_of(NVFP4, device)), strict=True):
        assert_same_bits(g, e)


def test_a_compiled_layer_follows_its_recipe() -> None:
    module = moe_of(None)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(48, 64)
    compiled(x)
    module.experts.recipe = NVFP4
    assert_same_bits(compiled(x).output.detach(), moe_of(NVFP4)(x).output.detach())
    compiled.recipe = None  # torch.compile's module forwards attributes
    assert module.recipe is None
    assert_same_bits(compiled(x).output.detach(), moe_of(None)(x).output.detach())


def test_recipes_that_differ_or_cannot_be() -> None:
    module = moe_of(None)
    module.experts.fc2.recipe = BFloat16()
    for one in (module, module.experts):
        with pytest.raises(ValueError) as error:
            _ = one.recipe
        name = "experts.fc2" if one is module else "fc2"
        assert str(error.value) == (
            f"transformer_plugin::{type(one).__name__}: attribute 'recipe': expected the same recipe in all "
            f"layers, got {name.replace('2', '1')} with None, {name} with {BFloat16()}. Read the recipe of each layer."
        )
        with pytest.raises(TypeError, match=r"argument 'recipe': expected a recipe of"):
            one.recipe = "bf16"
        assert module.experts.fc1.recipe is None and module.experts.fc2.recipe == BFloat16()
    module.recipe = None
    assert module.recipe is None and module.experts.fc2.recipe is None

    padded = moe_of(None, dispatch=DispatchConfig(alignment=8))
    with pytest.raises(
        ValueError, match="expected a DispatchConfig whose alignment is None or a multiple of 16"
    ):
        padded.recipe = NVFP4
    assert padded.recipe is None
    padded(torch.randn(3, 64))
    padded.experts.recipe = NVFP4  # the experts do not know the padding: the next call raises
    with pytest.raises(
        ValueError, match="expected a DispatchConfig whose alignment is None or a multiple of 16"
    ):
        padded(torch.randn(3, 64))

    replaced = GroupedMLP(2, 64, 32)
    replaced.fc1 = replaced.fc2 = torch.nn.Identity()
    assert replaced.recipe is None
    with pytest.raises(ValueError, match="attribute 'recipe': expected layers that have a recipe, got"):
        replaced.recipe = BFloat16()


FIXED = [
    (lambda: GroupedLinear(2, 64, 32), ("num_groups", "in_features", "out_features")),
    (lambda: GroupedMLP(2, 64, 32), ("num_groups", "hidden", "ffn_hidden", "bias")),
    (lambda: moe_of(None), ("hidden", "ffn_hidden", "num_experts", "group", "dispatch", "bias")),
    (lambda: TopKRouter(64, 4, 2), ("num_experts",)),
    (lambda: LayerNormLinear(64, 32), ("in_features", "out_features", "normalization")),
]


@pytest.mark.parametrize(
    "make, names", FIXED, ids=[*("GroupedLinear", "GroupedMLP", "MoE", "TopKRouter"), "LayerNormLinear"]
)
def test_what_cannot_change_is_refused(make: object, names: tuple[str, ...]) -> None:
    module = make()
    for name in names:
        value = getattr(module, name)
        setattr(module, name, value)
        with pytest.raises(ValueError) as error:
            setattr(module, name, 7)
        assert str(error.value) == (
            f"transformer_plugin::{type(module).__name__}: attribute '{name}': expected {value!r}, as in the "
            "constructor, got 7. Make a new layer."
        )
        assert getattr(module, name) == value


def test_what_can_change_has_its_effect() -> None:
    x = torch.randn(6, 64)
    one = moe_of(None)
    expected = moe_of(None)
    expected.router.topk = 3
    one.topk = 3
    assert one.router.topk == one.topk == 3
    assert_same_bits(one(x).output.detach(), expected(x).output.detach())
    assert int(one(x).expert_load.sum()) == 18

    router = TopKRouter(64, 4, 2)
    assert router.expert_bias is None
    router.config = RouterConfig("sigmoid", expert_bias=True, scaling_factor=2.0)
    assert torch.equal(router.expert_bias, torch.zeros(4))
    router.expert_bias.copy_(torch.tensor([0.0, 100.0, 0.0, 100.0]))
    routing = router(x)
    assert torch.equal(routing.expert_load, torch.tensor([0, 6, 0, 6]))
    assert routing.weights.sum(1).allclose(torch.full((6,), 2.0))
    router.config = RouterConfig("sigmoid", expert_bias=True)
    assert router.expert_bias.sum() == 200
    router.config = RouterConfig()
    assert router.expert_bias is None and "expert_bias" not in router.state_dict()
    with pytest.raises(TypeError, match="argument 'config': expected a RouterConfig"):
        router.config = "softmax"


CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.bfloat16),
    "to device": lambda module: module.to(module.router.weight.device, torch.float16),
    "type": lambda module: module.type(torch.bfloat16),
    "copied": lambda module: copy.deepcopy(module.bfloat16()),
    "twice": lambda module: module.bfloat16().float().half(),
    "within": lambda module: torch.nn.Sequential(module).bfloat16()[0],
    "on meta": lambda module: module.to("meta").to(torch.bfloat16),
}


@pytest.mark.parametrize("cast", list(CASTS))
def test_the_bias_of_a_router_stays_float32(cast: str, device: torch.device) -> None:
    module = moe_of(None, device, router=RouterConfig("sigmoid", expert_bias=True))
    bias = torch.tensor([0.1, 1 / 3, -0.7, 1e-9], device=device)
    module.router.expert_bias.copy_(bias)
    module = CASTS[cast](module)
    weight = module.router.weight
    assert weight.dtype != torch.float32
    assert module.router.expert_bias.dtype == torch.float32
    assert module.router.expert_bias.device == weight.device
    if not weight.is_meta:
        assert_same_bits(module.router.expert_bias, bias)
    if weight.dtype != torch.float64:  # experts do not support it
        output = module(torch.randn(6, 64, device=weight.device, dtype=weight.dtype)).output
        assert output.dtype == weight.dtype


def test_the_bias_of_a_router_moves() -> None:
    router = TopKRouter(
        64, 4, 2, RouterConfig("sigmoid", expert_bias=True), device="meta", dtype=torch.bfloat16
    )
    assert router.expert_bias.dtype == torch.float32
    router.to_empty(device="cpu").reset_parameters()
    assert torch.equal(router.bfloat16().expert_bias, torch.zeros(4))


def test_what_the_router_cannot_be_is_refused_when_it_is_set() -> None:
    module = MoE(64, 64, 8, 4, router=RouterConfig("sigmoid", num_groups=4, group_topk=2))
    for topk in (0, 9, 7):
        with pytest.raises(ValueError, match="argument"):
            module.topk = topk
    for topk in ("abc", 2.0, None, True):
        with pytest.raises(TypeError, match="argument 'topk': expected an integer"):
            module.router.topk = topk
    assert module.topk == module.router.topk == 4
    module = MoE(64, 64, 8, 4)
    with pytest.warns(UserWarning, match="gradient does not reach the router"):
        module.topk = 1
    module = MoE(64, 64, 8, 1, router=RouterConfig("sigmoid"))
    with pytest.warns(UserWarning, match="gradient does not reach the router"):
        module.router.config = RouterConfig()
    module = MoE(64, 64, 4, 2)
    module.router = TopKRouter(64, 8, 2)
    with pytest.raises(ValueError, match="attribute 'router': expected a router of 4 experts, got one of 8"):
        module(torch.randn(5, 64))


@pytest.mark.parametrize(
    ("name", "value"), [("router", None), ("router", "sigmoid"), ("dispatch", None), ("recipe", "mxfp8")]
)
def test_arguments_of_another_kind_are_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"transformer_plugin::MoE: argument '{name}': expected a "):
        MoE(64, 64, 8, 2, **{name: value})
    with pytest.raises(TypeError, match="argument 'dtype': expected float32, bfloat16 or float16"):
        MoE(64, 64, 8, 2, dtype=torch.float64)
    for input in ([1.0, 2.0], torch.ones(3, 64).numpy()):
        with pytest.raises(TypeError, match=r"transformer_plugin::MoE: argument 'input': expected a tensor"):
            MoE(64, 64, 8, 2)(input)


def test_a_cast_checkpoint_leaves_the_bias_of_a_router_in_float32() -> None:
    module = MoE(64, 64, 8, 2, router=RouterConfig("sigmoid", expert_bias=True))
    state = {name: value.bfloat16() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    assert module.router.expert_bias.dtype == torch.float32
    module(torch.randn(5, 64, dtype=torch.bfloat16))
