"""Stages of a pipeline with every module of ``transformer_plugin.nn``: each maps ``[T, H]`` to ``[T, H]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import nn, ops
from transformer_plugin.nn import DispatchConfig, RouterConfig
from transformer_plugin.recipes import Recipe

T, H, F = 48, 64, 96
GROUPS = 3
Recipes = dict[str, Any]


class Layer(torch.nn.Module):
    """A layer of several inputs or outputs as one of a tensor."""

    def __init__(self, layer: torch.nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Stage(torch.nn.Module):
    """A layer between parameters of plain PyTorch, so that the layer is neither the first nor the last node."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.before, self.after = (torch.nn.Parameter(torch.rand(H) + 0.5) for _ in range(2))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x * self.before) * self.after)


def sizes(x: Tensor) -> Tensor:
    return torch.tensor([16, 16, 16], device=x.device)


def probs(x: Tensor) -> Tensor:
    """Of each row, with a gradient."""
    return x.float().mean(1).sigmoid()


def both(outputs: tuple[Tensor, ...]) -> Tensor:
    """All outputs of ``[T, H]``, in different roles."""
    first, *others = outputs
    return first + sum((other.sin() for other in others), torch.zeros(()).to(first))


def tokens_of_experts(experts: nn.GroupedMLP, x: Tensor) -> Tensor:
    """The experts read the tokens where they lie."""
    indices = (torch.arange(2 * T, device=x.device).view(T, 2) * 5 % 7) % GROUPS
    weights = torch.stack([probs(x), 1 - probs(x)], 1)
    assigned = ops.assign_weighted_slots(indices, weights, 0, GROUPS, 2 * T + 48, 16)
    slot, source, group_sizes, _, of_rows = assigned
    return experts(x, nn.Slots(slot, source, group_sizes), of_rows)


def one_by_one(experts: nn.GroupedMLP) -> nn.GroupedMLP:
    """The layers are called one after the other."""
    experts.fc1.register_forward_hook(lambda *_: None)
    return experts


def grouped(options: Recipes, **more: Any) -> torch.nn.Module:
    return Layer(nn.GroupedLinear(GROUPS, H, H, **more, **options), lambda m, x: m(x, sizes(x)))


def experts(options: Recipes, **more: Any) -> nn.GroupedMLP:
    return nn.GroupedMLP(GROUPS, H, F, **more, **options)


def mlp(options: Recipes, **more: Any) -> torch.nn.Module:
    return Layer(experts(options, **more), lambda m, x: m(x, sizes(x), probs(x)))


def moe(options: Recipes, num_experts: int = 6, topk: int = 2, **more: Any) -> torch.nn.Module:
    aux = more.get("router", RouterConfig()).aux_loss_coeff

    def call(layer: nn.MoE, x: Tensor) -> Tensor:
        made = layer(x)
        return made.output + made.aux_loss.to(x.dtype) if aux else made.output

    return Layer(
        nn.MoE(H, F, num_experts, topk, dispatch=DispatchConfig(alignment=16), **more, **options), call
    )


def hooked_router(options: Recipes) -> torch.nn.Module:
    """The router is called as a module, without the sum of gradients that its op has."""
    made: Any = moe(options)
    made.layer.router.register_forward_hook(lambda *_: None)
    return made


def frozen(module: torch.nn.Module, *names: str) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return module


def embedding(options: Recipes) -> torch.nn.Module:
    table = nn.Embedding(11, H, dtype=options["dtype"])
    return Layer(table, lambda m, x: x * m(torch.arange(T, device=x.device) % 11))


def router(options: Recipes, **config: Any) -> torch.nn.Module:
    made = nn.TopKRouter(H, 8, 3, RouterConfig(**config), dtype=options["dtype"])

    def call(layer: nn.TopKRouter, x: Tensor) -> Tensor:
        routing = layer(x)
        return x * (routing.weights.cos().sum(1, keepdim=True) + routing.aux_loss).to(x.dtype)

    return Layer(made, call)


def cached(module: Any) -> torch.nn.Module:
    """Weights that are quantized once."""
    (module if hasattr(module, "quantize_weights") else module.layer).quantize_weights()
    return module


def norm_linear(options: Recipes, **more: Any) -> torch.nn.Module:
    return Layer(nn.LayerNormLinear(H, H, return_normalized=True, **more, **options), lambda m, x: both(m(x)))


def rows_of_sequences(module: torch.nn.Module) -> torch.nn.Module:
    """Inputs of three dimensions."""
    return Layer(module, lambda m, x: m(x.view(2, T // 2, H)).reshape(T, H))


#: By the class that a stage is of, and what is special about it. `options` are dtype and recipe.
STAGES: dict[tuple[type, str], Callable[[Recipes], torch.nn.Module]] = {
    (nn.Linear, ""): lambda options: nn.Linear(H, H, **options),
    (nn.Linear, "no bias"): lambda options: nn.Linear(H, H, False, **options),
    (nn.Linear, "three dimensions"): lambda options: rows_of_sequences(nn.Linear(H, H, **options)),
    (nn.Linear, "its bias is returned"): lambda options: Layer(
        nn.Linear(H, H, return_bias=True, **options), lambda m, x: sum(m(x), torch.zeros(()).to(x))
    ),
    (nn.Linear, "a frozen weight"): lambda options: frozen(nn.Linear(H, H, **options), "weight"),
    (nn.LayerNormLinear, ""): lambda options: nn.LayerNormLinear(H, H, **options),
    (nn.LayerNormLinear, "three dimensions"): lambda options: rows_of_sequences(
        nn.LayerNormLinear(H, H, normalization="RMSNorm", **options)
    ),
    (nn.LayerNormLinear, "both outputs"): norm_linear,
    (nn.LayerNormLinear, "both outputs of RMSNorm"): lambda options: norm_linear(
        options, normalization="RMSNorm", zero_centered=True, bias=False
    ),
    (nn.LayerNormLinear, "three outputs"): lambda options: norm_linear(options, return_bias=True),
    (nn.LayerNormLinear, "the norm alone"): lambda options: Layer(
        nn.LayerNormLinear(H, H, return_normalized=True, **options), lambda m, x: m(x)[1]
    ),
    (nn.GroupedLinear, ""): grouped,
    (nn.GroupedLinear, "list"): lambda options: grouped(options, parameters="list"),
    (nn.GroupedLinear, "grouped"): lambda options: grouped(options, parameters="grouped"),
    (nn.GroupedLinear, "scaled bias"): lambda options: Layer(
        nn.GroupedLinear(GROUPS, H, H, scale_bias=True, **options), lambda m, x: m(x, sizes(x), probs(x))
    ),
    (nn.GroupedMLP, ""): mlp,
    (nn.GroupedMLP, "biases"): lambda options: mlp(options, bias=True, glu_interleave=32),
    (nn.GroupedMLP, "list"): lambda options: mlp(options, bias=True, parameters="list"),
    (nn.GroupedMLP, "grouped"): lambda options: mlp(options, parameters="grouped"),
    (nn.GroupedMLP, "tokens"): lambda options: Layer(experts(options, bias=True), tokens_of_experts),
    (nn.GroupedMLP, "one by one"): lambda options: Layer(
        one_by_one(experts(options, bias=True)), lambda m, x: m(x, sizes(x), probs(x))
    ),
    (nn.MoE, ""): moe,
    (nn.MoE, "hidden == num_experts"): lambda options: moe(options, num_experts=H),
    (nn.MoE, "tokens == num_experts"): lambda options: moe(options, num_experts=T, topk=3),
    (nn.MoE, "one expert"): lambda options: moe(
        options, num_experts=1, topk=1, router=RouterConfig("sigmoid")
    ),
    (nn.MoE, "biases and an auxiliary loss"): lambda options: moe(
        options, bias=True, router=RouterConfig(aux_loss_coeff=0.1)
    ),
    (nn.MoE, "DeepSeek-V3"): lambda options: moe(
        options, num_experts=8, router=RouterConfig.deepseek_v3(num_groups=2, group_topk=1)
    ),
    (nn.MoE, "a float32 router"): lambda options: moe(
        options, router=RouterConfig(router_dtype=torch.float32)
    ),
    (nn.MoE, "a frozen router"): lambda options: frozen(moe(options), "router"),
    (nn.MoE, "frozen experts"): lambda options: frozen(moe(options), "experts"),
    (nn.MoE, "list"): lambda options: moe(options, parameters="list"),
    (nn.MoE, "a hooked router"): hooked_router,
    (nn.MoE, "three dimensions"): lambda options: Layer(
        nn.MoE(H, F, 4, 2, dispatch=DispatchConfig(alignment=16), **options),
        lambda m, x: m(x.view(2, T // 2, H)).output.view(T, H),
    ),
    (nn.RMSNorm, ""): lambda options: nn.RMSNorm(H, dtype=options["dtype"]),
    (nn.LayerNorm, ""): lambda options: nn.LayerNorm(H, dtype=options["dtype"], zero_centered=True),
    (nn.Embedding, ""): embedding,
    (nn.TopKRouter, ""): lambda options: router(options, aux_loss_coeff=0.1),
    (nn.TopKRouter, "sigmoid"): lambda options: router(options, score_function="sigmoid", expert_bias=True),
    (nn.QuantizedWeight, "Linear"): lambda options: cached(nn.Linear(H, H, **options)),
    (nn.QuantizedWeight, "LayerNormLinear"): lambda options: cached(norm_linear(options)),
    (nn.QuantizedWeight, "GroupedLinear"): lambda options: cached(grouped(options, parameters="list")),
    (nn.QuantizedWeight, "MoE"): lambda options: cached_experts(options),
}


def cached_experts(options: Recipes) -> torch.nn.Module:
    made: Any = moe(options)
    made.layer.experts.quantize_weights()
    return made


def make_stage(
    key: tuple[type, str], recipe: Recipe | None, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Stage:
    """A stage with the same initial values in every call."""
    torch.manual_seed(seed)
    return Stage(STAGES[key]({"dtype": dtype, "recipe": recipe})).to(dtype)


def name_of(key: tuple[type, str]) -> str:
    return f"{key[0].__name__} {key[1]}".strip()
