"""torchtitan's experts, dispatchers and linear layers by this package: configs, values, gradients, state dicts, errors.

torchtitan 0.3 does not import on torch 2.11: `make test-titan` runs this file with a newer one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, recipes
from transformer_plugin.formats import Format
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

moe = pytest.importorskip("torchtitan.models.common.moe")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
    TorchAOTokenDispatcher,
)
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from transformer_plugin.integrations import torchtitan as integration

NAME = "transformer_plugin.integrations.torchtitan."
EXPERTS, TOPK, HIDDEN, FFN = 4, 2, 64, 96
WEIGHTS = ("w1_EFD", "w3_EFD", "w2_EDF")  # gate, linear part, down
#: Of outputs and gradients, relative to other arithmetic in high precision.
BOUNDS = {"none": 2**-6, "fp8_block": 0.15, "mxfp8": 0.15, "nvfp4": 0.5}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchtitan.md"


def experts_config(**sizes: int) -> Any:
    sizes = {"dim": HIDDEN, "hidden_dim": FFN, "num_experts": EXPERTS, **sizes}
    return moe.GroupedExperts.Config(**sizes)


def routed_config(kind: Any = LocalTokenDispatcher, **more: Any) -> Any:
    dispatcher = kind.Config(num_experts=EXPERTS, top_k=TOPK, **more)
    return moe.RoutedExperts.Config(inner_experts=experts_config(), token_dispatcher=dispatcher)


def initialize(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(module.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return module


def routing(tokens: int, device: torch.device, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, scores and experts; the last expert gets none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    indices = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(TOPK).indices
    scores = torch.rand(tokens, TOPK, generator=generator)
    return x.to(device), scores.to(device), indices.to(device)


def run(module: Any, x: Tensor, scores: Tensor, indices: Tensor) -> list[Tensor]:
    """The output, and the gradients of the sum of its squares: of tokens, scores and weights."""
    x, scores = x.detach().clone().requires_grad_(), scores.detach().clone().requires_grad_()
    counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
    output = module(x[None], scores[None], indices[None], counts)[0]
    output.float().square().sum().backward()
    weights = dict(module.named_parameters())
    return [
        output.detach(),
        x.grad,
        scores.grad,
        *(weights[f"inner_experts.{name}"].grad for name in WEIGHTS),
    ]  # type: ignore[list-item]


def in_float64(module: Any, x: Tensor, scores: Tensor, indices: Tensor) -> list[Tensor]:
    """The same by other arithmetic, of weights in bfloat16."""
    parameters = dict(module.named_parameters())
    rows, factors = x.double().requires_grad_(), scores.double().requires_grad_()
    weights = [parameters[f"inner_experts.{name}"].detach().bfloat16().double() for name in WEIGHTS]
    gate, linear, down = (weight.requires_grad_() for weight in weights)
    outputs = []
    for token, experts in enumerate(indices.tolist()):
        row = rows[token]
        parts = [down[e] @ (torch.nn.functional.silu(gate[e] @ row) * (linear[e] @ row)) for e in experts]
        outputs.append(sum(factors[token, k] * part for k, part in enumerate(parts)))
    output = torch.stack(outputs)
    output.square().sum().backward()
    return [output.detach(), rows.grad, factors.grad, gate.grad, linear.grad, down.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
def test_override_by_name(name: str) -> None:
    model = model_registry("debugmodel").model
    lines = apply_overrides(OverrideConfig(imports=[(NAME + name, {"recipe": "fp8_block"})]), model)
    assert len(lines) == 5
    found = list(model.traverse(moe.RoutedExperts.Config))
    assert len(found) == 5
    for _, config, _, _ in found:
        inner = config.inner_experts
        assert type(inner) is integration.Experts.Config and inner.recipe == "fp8_block"
        assert inner.param_init is not None
        is_ours = type(config.token_dispatcher) is integration.TokenDispatcher.Config
        assert is_ours == (name == "routed_experts")
        if is_ours:
            ours = config.token_dispatcher
            assert (ours.hidden_dim, ours.top_k, ours.num_experts, ours.recipe) == (256, 3, 8, "fp8_block")


def test_state_dicts_are_interchangeable() -> None:
    stock = initialize(experts_config().build())
    ours = integration.experts(experts_config(), recipe="fp8_block").build()
    assert isinstance(ours, moe.GroupedExperts)
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [
        (key, value.shape) for key, value in stock.state_dict().items()
    ]
    ours.load_state_dict(stock.state_dict())
    back = experts_config().build()
    back.load_state_dict(ours.state_dict())
    for name, value in stock.state_dict().items():
        assert_same_bits(back.state_dict()[name], value)
        assert_same_bits(ours.state_dict()[name], value)


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
@pytest.mark.parametrize("kind", [LocalTokenDispatcher, AllToAllTokenDispatcher])
def test_values_without_a_recipe(name: str, kind: Any, device: torch.device) -> None:
    cfg = routed_config(kind)
    if name == "experts":
        cfg.inner_experts = integration.experts(cfg.inner_experts)
    else:
        cfg = integration.routed_experts(cfg)
    stock, ours = initialize(routed_config(kind).build()).to(device), initialize(cfg.build()).to(device)
    arguments = routing(50, device)
    expected = in_float64(stock, *arguments)
    for of_stock, of_ours, exact in zip(run(stock, *arguments), run(ours, *arguments), expected, strict=True):
        assert of_ours.dtype == of_stock.dtype and of_ours.shape == of_stock.shape
        assert relative_error(of_ours, exact) < 2**-6  # a few roundings to bfloat16
        assert relative_error(of_ours, exact) < 1.5 * relative_error(of_stock, exact)


def rounded(x: Tensor, key: str) -> Tensor:
    """What is left of the values in a format, scales along rows, in float64."""
    data, scale, *amax = ops.quantize(x, key)[:3]
    return ops.dequantize(data, scale, key, amax=amax[0] if Format.parse(key).needs_amax else None).double()


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor", "mxfp8"])
def test_products_in_a_recipe(recipe: str, device: torch.device) -> None:
    experts = initialize(integration.experts(experts_config(), recipe=recipe).build()).to(device)
    counts = [20, 0, 7, 13]
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    output = experts(x, torch.tensor(counts, device=device)).detach()
    of_rows, of_weights = recipes.RECIPES[recipe].input_format, recipes.RECIPES[recipe].weight_format  # type: ignore[union-attr]

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        exact = rounded(rows, of_rows) @ rounded(weight.bfloat16(), of_weights).T
        return exact.bfloat16()

    parts, plain = [], []
    for i, rows in enumerate(x.split(counts)):
        w1, w3, w2 = (getattr(experts, name)[i].detach() for name in WEIGHTS)
        if len(rows):
            hidden = torch.nn.functional.silu(product(rows, w1)) * product(rows, w3)
            parts.append(product(hidden, w2))
            row = rows.double()
            plain.append(
                (torch.nn.functional.silu(row @ w1.double().T) * (row @ w3.double().T)) @ w2.double().T
            )
    assert relative_error(output, torch.cat(parts)) < 2**-7
    assert relative_error(output, torch.cat(plain)) > 2**-6  # and the formats do something


@pytest.mark.parametrize("recipe", ["none", "fp8_block", "mxfp8", "nvfp4"])
def test_compiled(recipe: str, device: torch.device) -> None:
    module = initialize(integration.routed_experts(routed_config(), recipe=recipe).build()).to(device)
    arguments = routing(48, device)
    expected = run(module, *arguments)
    for parameter in module.parameters():
        parameter.grad = None
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled.named_parameters = module.named_parameters
    values, exact = run(compiled, *arguments), in_float64(module, *arguments)
    random = recipe == "nvfp4"  # rounds gradients at random
    for value, other in list(zip(values, expected, strict=True))[: 1 if random else None]:
        assert_same_bits(value, other)
    for value, other in zip(values, exact, strict=True):
        assert relative_error(value, other) < BOUNDS[recipe]


def over_ranks(rank: Rank, recipe: str, limit: int | None) -> None:
    """Each rank's tokens over the ranks against all experts on one rank; a second call has more tokens."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=("ep",))
    options: dict[str, Any] = {"recipe": recipe, "max_tokens_per_rank": limit}
    alone = initialize(integration.routed_experts(routed_config(), recipe=recipe).build()).to(rank.device)
    ours = initialize(integration.routed_experts(routed_config(AllToAllTokenDispatcher), **options).build())
    ours = ours.to(rank.device)
    count = EXPERTS // rank.size
    for name in WEIGHTS:
        mine = getattr(ours.inner_experts, name).detach()[rank.rank * count : (rank.rank + 1) * count]
        setattr(ours.inner_experts, name, torch.nn.Parameter(mine.clone()))
    ours.token_dispatcher.wire_meshes(ep_mesh=mesh)
    for tokens in (16, 48, 32):
        arguments = routing(tokens, rank.device, seed=rank.rank + tokens)
        ours.zero_grad()
        values, expected = run(ours, *arguments), in_float64(alone, *arguments)
        for value, exact in zip(values[:3], expected[:3], strict=True):
            assert relative_error(value, exact) < BOUNDS[recipe]
        for value, exact in zip(values[3:], expected[3:], strict=True):
            sums = exact.clone()
            torch.distributed.all_reduce(sums)
            sums = sums[rank.rank * count : (rank.rank + 1) * count]
            assert relative_error(value, sums) < BOUNDS[recipe]


@pytest.mark.parametrize(
    ("recipe", "limit"), [("none", None), ("none", 48), ("fp8_block", None), ("nvfp4", 64)]
)
def test_over_ranks(recipe: str, limit: int | None) -> None:
    with RankPool(2, "gloo") as pool:
        pool.run(over_ranks, recipe, limit)


def refusals() -> list[tuple[str, Any, type[Exception], str]]:
    gpt_oss = GptOssGroupedExperts.Config(dim=64, hidden_dim=64, num_experts=4)
    odd = experts_config(hidden_dim=72)
    ao = routed_config(TorchAOTokenDispatcher, pad_multiple=16)
    experts, routed = integration.experts, integration.routed_experts
    return [
        (
            "a name",
            lambda: experts(experts_config(), recipe="fp9"),
            ValueError,
            "argument 'recipe': expected one of",
        ),
        ("no name", lambda: experts(experts_config(), recipe=3), ValueError, "got 3"),
        ("delayed", lambda: routed(routed_config(), recipe="fp8_delayed"), ValueError, "got 'fp8_delayed'"),
        (
            "rows",
            lambda: experts(experts_config(), recipe="nvfp4"),
            ValueError,
            "Use the override routed_experts",
        ),
        ("activation", lambda: experts(gpt_oss), TypeError, "got GptOssGroupedExperts.Config"),
        ("sizes", lambda: experts(odd, recipe="mxfp8"), ValueError, "multiples of 32 .*, got 64 and 72"),
        ("dispatcher", lambda: routed(ao), TypeError, "got TorchAOTokenDispatcher.Config"),
        (
            "linear",
            lambda: integration.LinearConverter.Config(recipe="x").build(),
            ValueError,
            "LinearConverter",
        ),
    ]


@pytest.mark.parametrize(
    ("call", "kind", "words"), [case[1:] for case in refusals()], ids=[c[0] for c in refusals()]
)
def test_refused(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as error:
        call()
    text = str(error.value)
    assert (
        text.startswith("transformer_plugin::integrations.torchtitan.")
        and "expected" in text
        and "got" in text
    )


def test_a_compiled_model_over_ranks_needs_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = integration.routed_experts(routed_config()).token_dispatcher.build()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        ValueError, match="argument 'max_tokens_per_rank': expected a number in a compiled model"
    ):
        dispatcher._connected(torch.ones(2, HIDDEN))


def layers(model: Any) -> dict[str, Any]:
    return {fqn: config for fqn, config, _, _ in model.traverse(TitanLinear.Config)}


def test_linear_converter() -> None:
    converter = integration.LinearConverter.Config(recipe="fp8_block")
    stock, model = (
        layers(model_registry("debugmodel").model),
        layers(model_registry("debugmodel", converters=[converter]).model),
    )
    assert stock.keys() == model.keys()
    for fqn, config in model.items():
        is_left = fqn == "lm_head" or fqn.endswith("router.gate")
        assert (type(config) is TitanLinear.Config) == is_left, fqn
        of_stock = stock[fqn]
        assert (config.in_features, config.out_features) == (of_stock.in_features, of_stock.out_features)
        assert config.param_init.keys() == of_stock.param_init.keys()
    layer, other = model["layers.1.attention.wo"].build(), stock["layers.1.attention.wo"].build()
    assert isinstance(layer, torch.nn.Linear) and layer.recipe == recipes.Float8BlockScaling()
    layer.load_state_dict(other.state_dict())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(8, layer.in_features).bfloat16()
    exact = other.bfloat16()(x)
    assert 2**-8 < relative_error(layer.bfloat16()(x).detach(), exact.double().detach()) < 2**-4


def test_linear_converter_takes_named_layers_and_sizes_that_fit() -> None:
    converter = integration.LinearConverter.Config(
        recipe="mxfp8", fqns=["attention", "shared"], filter_fqns=["wo"]
    )
    model = model_registry("debugmodel").model
    found = layers(model)
    found["layers.0.attention.wkv_a"].out_features = 575
    converted = layers(converter.build().convert(model))
    ours = {fqn for fqn, config in converted.items() if type(config) is integration.Linear.Config}
    named = {fqn for fqn in found if ("attention" in fqn or "shared" in fqn) and "wo" not in fqn}
    assert ours == named - {"layers.0.attention.wkv_a"}
    alone = TitanLinear.Config(in_features=64, out_features=64)
    assert (
        type(integration.LinearConverter.Config(recipe="bf16").build().convert(alone))
        is integration.Linear.Config
    )


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_page() -> None:
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 3
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), namespace)
    assert namespace["config"].override.imports
    # The command of the page names overrides and arguments that there are.
    for name in re.findall(r"transformer_plugin\.integrations\.torchtitan\.(\w+)", text):
        assert hasattr(integration, name)
