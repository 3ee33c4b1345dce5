"""RouterConfig and TopKRouter: errors and warnings of the constructors, presets, the dtype of the product, widths that
recipes support."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear, MoE, RouterConfig, TopKRouter
from transformer_plugin.recipes import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from transformer_plugin.testing.numerics import assert_same_bits


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"score_function": "sigmoids"},
            ValueError,
            "'score_function': expected softmax, sigmoid or sqrtsoftplus, got sigmoids. Pass one of the three names.",
        ),
        (
            {"score_function": "sigmoid", "pre_softmax": True},
            ValueError,
            "'pre_softmax': expected False with this score function, got True. Only the softmax can be applied "
            "before or after the choice.",
        ),
        (
            {"expert_bias": True},
            ValueError,
            "'expert_bias': expected False with the softmax, got True. Use sigmoid or sqrtsoftplus with an expert "
            "bias.",
        ),
        (
            {"num_groups": 0},
            ValueError,
            "'num_groups': expected 1 or more, got 0. Pass 1 for no groups.",
        ),
        (
            {"num_groups": 2, "group_topk": 3},
            ValueError,
            "'group_topk': expected from 1 to the 2 groups, got 3. Choose that many groups for each token.",
        ),
        (
            {"group_score_topk": 0},
            ValueError,
            "'group_score_topk': expected None, or 1 or more, got 0. Pass 1 for DeepSeek-V2, 2 for DeepSeek-V3.",
        ),
        (
            {"aux_loss_coeff": -0.1},
            ValueError,
            "'aux_loss_coeff': expected 0 or a finite positive number of float32, got -0.1. Pass 0 for no auxiliary "
            "loss.",
        ),
        (
            {"num_groups": 2.0},
            TypeError,
            "'num_groups': expected an integer, got 2.0. The default is 1.",
        ),
        (
            {"pre_softmax": 1},
            TypeError,
            "'pre_softmax': expected True or False, got 1. The default is False.",
        ),
        (
            {"router_dtype": torch.bfloat16},
            TypeError,
            "'router_dtype': expected None or torch.float32, got torch.bfloat16. Cast tokens and weight to another "
            "dtype, and pass None.",
        ),
        (
            {"router_dtype": "float32"},
            TypeError,
            "'router_dtype': expected None or torch.float32, got 'float32'. Cast tokens and weight to another dtype, "
            "and pass None.",
        ),
    ],
)
def test_configurations_that_cannot_be(options: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        RouterConfig(**options)
    assert str(caught.value) == "transformer_plugin::RouterConfig: argument " + text


@pytest.mark.parametrize("name", ["scaling_factor", "aux_loss_coeff"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_factors_are_numbers(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"argument '{name}': expected .* finite .*, got {value}. Pass "):
        RouterConfig(**{name: value})


@pytest.mark.parametrize(
    ("experts", "topk", "config", "text"),
    [
        (
            8,
            2,
            RouterConfig(num_groups=3),
            "RouterConfig: argument 'num_groups': expected a number that divides the 8 experts, got 3. Pass 1 for no "
            "groups.",
        ),
        (
            8,
            5,
            RouterConfig(num_groups=2),
            "RouterConfig: argument 'group_topk': expected enough groups of 4 experts to hold topk=5 experts, got "
            "1. Choose more groups or fewer experts.",
        ),
        (
            8,
            1,
            RouterConfig("sigmoid", num_groups=4, group_topk=2),
            "RouterConfig: argument 'group_topk': expected at most topk=1 if group_score_topk is None, got 2. "
            "Pass group_score_topk: 1 for DeepSeek-V2, 2 for DeepSeek-V3.",
        ),
        (
            8,
            4,
            RouterConfig.deepseek_v3(8, 4),
            "RouterConfig: argument 'group_score_topk': expected None or from 1 to the 1 experts of a group, got 2. "
            "Pass 1 for DeepSeek-V2, 2 for DeepSeek-V3.",
        ),
        (
            1025,
            2,
            RouterConfig(),
            "TopKRouter: argument 'num_experts': expected at most 1024, got 1025. Use fewer experts.",
        ),
        (
            8,
            0,
            RouterConfig(),
            "TopKRouter: argument 'topk': expected 1 to the number of experts, 8, got 0. Choose fewer experts per "
            "token.",
        ),
    ],
)
def test_experts_that_cannot_be_chosen(experts: int, topk: int, config: RouterConfig, text: str) -> None:
    for make in (
        lambda: TopKRouter(32, experts, topk, config),
        lambda: MoE(32, 32, experts, topk, router=config, device="meta"),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == "transformer_plugin::" + text
    with pytest.raises(TypeError, match=r"argument 'topk': expected an integer, got 2\.0\. Pass an int\."):
        TopKRouter(32, 8, 2.0)  # type: ignore[arg-type]


def test_a_router_that_cannot_learn_is_warned_of() -> None:
    """The warning is right: the gradient is 0, and with the settings that it recommends it is not."""
    text = (
        r"TopKRouter: argument 'topk': expected 2 or more .* got 1: .* Pass RouterConfig\(pre_softmax=True\)"
    )
    with pytest.warns(UserWarning, match=text):
        layer = MoE(16, 16, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = [
            MoE(16, 16, 4, 1, router=RouterConfig(pre_softmax=True)),
            MoE(16, 16, 4, 1, router=RouterConfig("sigmoid")),
            MoE(16, 16, 4, 2),
        ]
        MoE(16, 16, 1, 1)  # one expert: there is no choice
    input = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    for each in (layer, *others):
        (grad,) = torch.autograd.grad(each(input).output.square().sum(), each.router.weight)
        assert bool((grad == 0).all()) == (each is layer)


def test_presets() -> None:
    assert RouterConfig.deepseek_v2() == RouterConfig(
        pre_softmax=True, num_groups=8, group_topk=3, scaling_factor=16.0, group_score_topk=1
    )
    assert RouterConfig.deepseek_v3(aux_loss_coeff=1e-4) == RouterConfig(
        "sigmoid",
        num_groups=8,
        group_topk=4,
        scaling_factor=2.5,
        expert_bias=True,
        aux_loss_coeff=1e-4,
        group_score_topk=2,
    )
    TopKRouter(32, 160, 6, RouterConfig.deepseek_v2(), device="meta")
    TopKRouter(32, 256, 8, RouterConfig.deepseek_v3(), device="meta")


class OperandDtypes(TorchDispatchMode):
    """Records the dtypes of the operands of the router's product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.transformer_plugin.router_logits.default:
            self.found.append(tuple(x.dtype for x in args))
        return func(*args, **kwargs or {})


B, H, S, D = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("tokens", "weight", "router_dtype", "operands"),
    [
        *((dtype, dtype, None, dtype) for dtype in (B, H, S)),
        *((B, S, None, S), (S, B, None, S), (B, H, None, S), (D, D, None, S)),
        *((dtype, dtype, S, S) for dtype in (B, H, S)),
        (B, S, S, S),
    ],
    ids=str,
)
def test_dtype_of_the_product(
    tokens: torch.dtype,
    weight: torch.dtype,
    router_dtype: torch.dtype | None,
    operands: torch.dtype,
    device: torch.device,
) -> None:
    """The results, and the gradients, are those of the product of operands in this dtype. Autocast changes nothing."""
    torch.manual_seed(0)
    router = TopKRouter(64, 8, 2, RouterConfig(router_dtype=router_dtype), device=device, dtype=weight)
    x = torch.randn(33, 64, device=device, dtype=tokens)
    grad = torch.randn(33, 2, device=device)

    def route(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = ops.linear if operands == S else ops.router_logits
        return ops.topk_router(product(x.to(operands), weight.to(operands)), None, 2)

    def run(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        weights, indices = function(leaf)
        assert weights.dtype == torch.float32
        return [weights.detach(), indices, *torch.autograd.grad(weights, [leaf, router.weight], grad)]

    expected = run(lambda x: route(x, router.weight))
    with OperandDtypes() as dtypes:
        results = [run(lambda x: (router(x).weights, router(x).indices))]
        with torch.autocast(device.type, torch.bfloat16):
            results.append(run(lambda x: (router(x).weights, router(x).indices)))
    assert dtypes.found == [(operands, operands)] * 4
    for got in results:
        for one, wanted in zip(got, expected, strict=True):
            assert_same_bits(one, wanted)


def test_the_dtype_of_the_product_is_part_of_the_configuration() -> None:
    config = RouterConfig(router_dtype=torch.float32)
    assert config == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) != RouterConfig()
    assert len({config, RouterConfig(), RouterConfig(router_dtype=torch.float32)}) == 2
    assert "router_dtype=torch.float32" in repr(TopKRouter(16, 4, 2, config))
    assert RouterConfig().router_dtype is None
    assert eval(repr(config), {"RouterConfig": RouterConfig, "torch": torch}) == config


@pytest.mark.gpu
def test_devices_choose_the_same_experts_for_bfloat16_tokens() -> None:
    """With small integers all sums are exact, so logits, choices, weights and gradients have the same bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (200, 64), generator=generator).bfloat16()
    router = TopKRouter(64, 16, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(torch.randint(-3, 4, (16, 64), generator=generator))
    expected = router(x)
    got = router.cuda()(x.cuda())
    assert_same_bits(got.indices, expected.indices.cuda())
    assert_same_bits(got.weights.detach(), expected.weights.detach().cuda())


@pytest.mark.parametrize(
    ("recipe", "block"), [(MXFP8BlockScaling(), 32), (NVFP4BlockScaling(), 16)], ids=["mxfp8", "nvfp4"]
)
def test_widths_that_a_recipe_does_not_take(recipe: Recipe, block: int) -> None:
    bad, good = block + block // 2, 2 * block

    calls = {
        "in_features": (
            lambda: Linear(bad, good, recipe=recipe),
            lambda: GroupedLinear(2, bad, good, recipe=recipe),
            lambda: GroupedMLP(2, bad, good, recipe=recipe),
            lambda: MoE(bad, good, 4, 2, recipe=recipe),
            lambda: MoE(good, bad, 4, 2, recipe=recipe),
        ),
        "out_features": (
            lambda: Linear(good, bad, recipe=recipe),
            lambda: GroupedLinear(2, good, bad, recipe=recipe),
        ),
    }
    for name, makers in calls.items():
        for make in makers:
            with pytest.raises(
                ValueError, match=rf"argument 'recipe': expected one that supports {name}={bad}, got "
            ):
                make()
    with pytest.raises(ValueError) as caught:
        Linear(bad, good, recipe=recipe)
    assert str(caught.value) == (
        f"transformer_plugin.nn.Linear: argument 'recipe': expected one that supports in_features={bad}, got {recipe}, "
        f"which needs a multiple of {block}. Use for example in_features={good}, or a recipe of another format."
    )
    layer = Linear(bad, bad, recipe=Float8BlockScaling())
    with pytest.warns(
        UserWarning, match=rf"argument 'recipe': expected one that supports in_features={bad}, got "
    ):
        layer.recipe = recipe
