"""convert: models of torch and of Hugging Face with the layers of this package."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from transformer_plugin import nn, recipes
from transformer_plugin.nn.convert import EXPERTS, ConvertedExperts


def small() -> Any:
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.GELU())
    return torch.nn.Sequential(torch.nn.Linear(32, 64), inner, torch.nn.Linear(64, 32))


def test_linear_layers(device: torch.device) -> None:
    model = small().to(device)
    expected, x = copy.deepcopy(model), torch.randn(5, 32, device=device)
    parameters, modules = dict(model.named_parameters()), list(model.modules())
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    assert id(tp.convert(model)) == id(model)
    assert all(q is parameters[name] for name, q in model.named_parameters())
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [type(m) for m in (model[0], model[1][0], model[2])] == [nn.Linear] * 3
    assert torch.equal(model(x), expected(x)) and seen == ["hook"]
    assert list(model.state_dict()) == list(expected.state_dict())


def test_recipe_and_filter(device: torch.device) -> None:
    model = small().to(device)
    recipe = recipes.Float8BlockScaling()
    tp.convert(model, recipe, lambda module, name: name != "2")
    assert [getattr(m, "recipe", None) for m in (model[0], model[1][0], model[2])] == [recipe, recipe, None]
    assert type(model[2]) is torch.nn.Linear
    model(torch.randn(5, 32, device=device)).sum().backward()
    tp.convert(model, None)
    assert model[0].recipe is None
    moe = nn.MoE(32, 64, 4, 2, device=device)
    tp.convert(moe, recipe)
    assert moe.recipe == recipe
    alone = torch.nn.Linear(32, 32)
    assert tp.convert(alone, recipe) is alone and type(alone) is nn.Linear
    assert copy.deepcopy(alone).recipe == recipe


def test_refused_models_stay() -> None:
    model = small()
    with pytest.raises(
        ValueError, match=r"argument 'recipe': expected widths of layer '0' that are multiples of 32"
    ):
        tp.convert(torch.nn.Sequential(torch.nn.Linear(33, 64)), recipes.MXFP8BlockScaling())
    odd: Any = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 33))
    with pytest.raises(ValueError, match="layer '1'"):
        tp.convert(odd, recipes.MXFP8BlockScaling())
    assert type(odd[0]) is torch.nn.Linear
    model[2].forward = lambda x: x
    with pytest.raises(ValueError, match="the forward of Linear of layer '2', got one that was replaced"):
        tp.convert(model)
    assert type(model[0]) is torch.nn.Linear
    for wrong in ((3,), (model, "fp8_block")):
        with pytest.raises(TypeError, match=r"transformer_plugin::convert: argument '\w+': expected"):
            tp.convert(*wrong)


def transformers_class(name: str) -> Any:
    pytest.importorskip("transformers")
    folders = {"Glm4MoeExperts": "glm4_moe", "OlmoeExperts": "olmoe", "MixtralExperts": "mixtral"}
    folder = (
        folders.get(name)
        or {
            "DeepseekV2Experts": "deepseek_v2",
            "DeepseekV3Experts": "deepseek_v3",
            "Qwen2MoeExperts": "qwen2_moe",
            "Qwen3MoeExperts": "qwen3_moe",
            "Qwen3NextExperts": "qwen3_next",
        }[name]
    )
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


class Config:
    """What the classes read of their configurations, under all of its names."""

    num_experts = num_local_experts = n_routed_experts = 4
    hidden_size = 16
    moe_intermediate_size = intermediate_size = 24
    hidden_act = "silu"
    _experts_implementation = "eager"


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_transformers(name: str, device: torch.device) -> None:
    experts = transformers_class(name)(Config())
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape) / 4)
    weights = torch.rand(10, 2)
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    masked = indices.clone()
    masked[3, 1] = 4  # as transformers does under expert parallelism
    with contextlib.suppress(
        RuntimeError
    ):  # on a GPU, a version that does not would end all tests of the process
        experts(torch.zeros(10, 16), masked, weights)
        indices = masked
    experts.to(device)
    expected = copy.deepcopy(experts)
    tp.convert(experts)
    assert type(experts) is ConvertedExperts
    weights, indices = weights.to(device), indices.to(device)
    results: list[list[Any]] = []
    for module in (experts, expected):
        x = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        output = module(x, indices, weights)
        output.square().sum().backward()
        assert x.grad is not None
        results.append([output.detach(), x.grad, *(p.grad for p in module.parameters())])
    for got, reference in zip(*results, strict=True):
        torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-4)


def model_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    if kind == "Qwen3-MoE":
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=8, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True
        )
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "Mixtral"])
def test_models_of_transformers(kind: str, device: torch.device, tmp_path: Path) -> None:
    model = model_of(kind).to(device)
    expected = copy.deepcopy(model)
    storages = {name: p.data_ptr() for name, p in model.named_parameters()}
    tp.convert(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == storages
    assert sum(type(m) is ConvertedExperts for m in model.modules()) == 2
    tokens = torch.randint(0, 64, (2, 16), device=device)
    got, reference = (m(tokens, labels=tokens, output_router_logits=True) for m in (model, expected))
    assert float((got.logits - reference.logits).abs().max()) < 1e-5
    torch.testing.assert_close(got.loss, reference.loss, atol=1e-5, rtol=1e-5)
    got.loss.backward()
    reference.loss.backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=2e-5, rtol=1e-3, msg=name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    output = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False)
    assert torch.equal(output, expected.generate(tokens[:, :4], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "fp8_tensor", "bf16"])
def test_a_model_of_transformers_trains_in_a_recipe(name: str, device: torch.device) -> None:
    model = model_of("Qwen3-MoE").to(device)
    recipe = recipes.recipe_from_name(name)
    tp.convert(model, recipe, lambda module, layer: layer != "lm_head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 64, (4, 16), device=device)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3, losses


def test_other_activations_are_refused() -> None:
    experts = transformers_class("Qwen3MoeExperts")(type("Gelu", (Config,), {"hidden_act": "gelu"})())
    with pytest.raises(ValueError, match="experts with SiLU"):
        tp.convert(experts)
    with pytest.raises(ValueError, match="scales come from current values"):
        tp.convert(transformers_class("Qwen3MoeExperts")(Config()), recipes.DelayedScaling())


def test_refused_of_experts_that_are_converted() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(16, 16), transformers_class("Qwen3MoeExperts")(Config())])
    tp.convert(model[1], recipes.Float8BlockScaling())
    with pytest.raises(
        ValueError, match="expected a recipe whose scales come from current values for experts of"
    ):
        tp.convert(model, recipes.DelayedScaling())
    assert type(model[0]) is torch.nn.Linear


def encoder_layer(device: torch.device) -> Any:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=device).eval()


def calls_of(model: torch.nn.Module) -> int:
    """How many layers of this package a call without gradients calls."""
    seen: list[torch.nn.Module] = []
    originals = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in originals:
        layer.forward = lambda x, layer=layer: seen.append(layer) or type(layer).forward(layer, x)
    try:
        with torch.no_grad():
            model(torch.randn(2, 8, 64, device=originals[0].weight.device))
    finally:
        for layer in originals:
            del layer.forward
    return len(seen)


@pytest.mark.filterwarnings("ignore:transformer_plugin..convert")
@pytest.mark.parametrize("recipe", [None, recipes.Float8BlockScaling()], ids=str)
def test_encoder_layers_evaluate_what_they_train(recipe: Any, device: torch.device) -> None:
    """torch's fused kernel reads the weights of the linear layers, whatever the layers are."""
    layer, other = encoder_layer(device), encoder_layer(device)
    x = torch.randn(2, 8, 64, device=device)
    with torch.no_grad():
        plain = layer(x)
    tp.convert(layer, recipe)
    trained = layer.train()(x).detach()
    layer.eval()
    with torch.no_grad():
        evaluated = layer(x)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=1e-5)
    assert (evaluated - plain).abs().max() > 1e-3 or recipe is None
    assert calls_of(layer) == calls_of(copy.deepcopy(layer)) == 2
    tp.convert(other, recipe, lambda module, name: False)
    assert other.activation_relu_or_gelu == encoder_layer(device).activation_relu_or_gelu


@pytest.mark.filterwarnings("ignore:transformer_plugin..convert")
@pytest.mark.parametrize("converted_first", [False, True])
def test_encoders_make_no_nested_tensors(converted_first: bool, device: torch.device) -> None:
    """Of padded sequences, which torch's kernel alone takes."""
    layer = encoder_layer(device)
    if converted_first:
        tp.convert(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says why it makes none
        encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    if not converted_first:
        filtered = copy.deepcopy(encoder)
        tp.convert(encoder)
        tp.convert(filtered, None, lambda module, name: name.startswith("layers.1"))
        assert filtered.layers[0].activation_relu_or_gelu and not filtered.use_nested_tensor
    assert calls_of(encoder) == 4
    x, padding = torch.randn(2, 8, 64, device=device), torch.zeros(2, 8, dtype=torch.bool, device=device)
    padding[1, 5:] = True
    with torch.no_grad():
        evaluated = encoder(x, src_key_padding_mask=padding)
        trained = encoder.train()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=1e-5)
