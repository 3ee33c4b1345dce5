"""convert: models of torch and of Hugging Face with the layers of this package."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.clients.hf_experts import are_near, differences, expected_results, make, results, routed
from tests.clients.imported import transformers
from transformer_plugin import nn, recipes
from transformer_plugin.nn.convert import ConvertedExperts, explain


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


def made(name: str, **options: Any) -> Any:
    """An experts module of transformers, with random weights."""
    transformers()
    return make(name, **options)


#: Classes of experts, and whether they keep methods of their own.
KINDS = {
    **dict.fromkeys(("MixtralExperts", "Qwen3NextExperts", "Lfm2MoeExperts", "Gemma4TextExperts"), False),
    **dict.fromkeys(("AriaExperts", "MuseSparkExperts", "NemotronHExperts"), False),
    **dict.fromkeys(("GptOssExperts", "Inkling2Experts", "DeepseekV4Experts"), True),
}


@pytest.mark.parametrize("name", KINDS)
def test_experts_of_transformers(name: str, device: torch.device) -> None:
    experts = made(name).to(device)
    inputs: Any = tuple(each.to(device) for each in routed())
    expected, parameters = expected_results(experts, inputs), dict(experts.named_parameters())
    tp.convert(experts)
    assert isinstance(experts, ConvertedExperts)
    assert type(experts).__name__ == (f"Converted{name}" if KINDS[name] else "ConvertedExperts")
    assert all(parameter is parameters[name] for name, parameter in experts.named_parameters())
    assert are_near(differences(results(experts, inputs), expected))
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(copied) is type(experts) and list(copied.state_dict()) == list(parameters)
        assert torch.equal(copied(*inputs), experts(*inputs))
    assert "num_experts=4, hidden=32, ffn_hidden=64, recipe=None" in repr(experts)


def model_of(kind: str) -> Any:
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
        config = transformers().Qwen3MoeConfig(
            **sizes, num_experts=8, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True
        )
        return transformers().Qwen3MoeForCausalLM(config)
    return transformers().MixtralForCausalLM(transformers().MixtralConfig(**sizes, num_local_experts=4))


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


def test_refused_recipes_of_experts() -> None:
    text = "expected a recipe whose scales come from current values for experts"
    for name in ("Qwen3MoeExperts", "GptOssExperts"):
        model = torch.nn.ModuleList([torch.nn.Linear(16, 16), made(name)])
        with pytest.raises(ValueError, match=f"{text} of layer '1', got DelayedScaling"):
            tp.convert(model, recipes.DelayedScaling())
        tp.convert(model[1], recipes.MXFP8BlockScaling())  # of biases no width counts
        with pytest.raises(ValueError, match=text):
            tp.convert(model, recipes.DelayedScaling())
        with pytest.raises(ValueError, match=text):
            model[1].recipe = recipes.DelayedScaling()
        assert type(model[0]) is torch.nn.Linear
    with pytest.raises(ValueError, match="widths that are multiples of 32"):
        tp.convert(made("GptOssExperts", intermediate_size=48), recipes.MXFP8BlockScaling())


class Bank(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.ones(4, 8, 8)) for _ in range(2))


def test_explained() -> None:
    replaced = made("MixtralExperts")
    replaced.forward = lambda *_: None
    float8 = made("MixtralExperts")
    float8.gate_up_proj = torch.nn.Parameter(float8.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    wrapped, own_forward = made("MixtralExperts"), made("MixtralExperts")
    for each, members in ((wrapped, {}), (own_forward, {"forward": Bank.forward})):
        each.__class__ = type("FSDPExperts", (type(each),), members)
    model = torch.nn.ModuleDict(
        {
            "linear": torch.nn.Linear(32, 32), "fused": made("MixtralExperts"), "own": made("GptOssExperts"),
            "bank": Bank(), "float8": float8, "replaced": replaced, "norm": torch.nn.LayerNorm(8),
            "narrow": torch.nn.Linear(32, 33), "rnn": torch.nn.LSTM(8, 8), "moe": nn.Linear(32, 32),
            "wrapped": wrapped, "changed": own_forward,
        }
    )  # fmt: skip
    rows = {row.name: row[1:] for row in explain(model, recipes.MXFP8BlockScaling())}
    own = "experts, their own functions between two products: transposed weights, biases"
    assert rows.pop("linear") == ("Linear", "converted", "a linear layer")
    assert rows.pop("fused") == ("MixtralExperts", "converted", "experts, one op")
    assert rows.pop("own") == ("GptOssExperts", "converted", own)
    assert rows.pop("moe") == ("Linear", "converted", "a layer of this package, gets the recipe")
    assert rows.pop("bank")[1:] == (
        "left", "experts: its class is not decorated with transformers' use_experts_implementation",
    )  # fmt: skip
    assert rows.pop("float8")[1:] == ("left", "experts: its weights are torch.float8_e4m3fn")
    text = "experts: a wrapper such as fully_shard has changed its class: convert the model first"
    assert rows.pop("wrapped") == ("FSDPExperts", "left", text)
    text = "experts: its forward is not that of transformers' use_experts_implementation"
    assert rows.pop("changed")[1:] == ("left", text)
    assert rows.pop("rnn")[1:] == ("left", "a linear layer of another class than torch.nn.Linear")
    assert [rows.pop(name)[1] for name in ("replaced", "narrow")] == ["refused"] * 2 and rows == {}
    assert not isinstance(model["fused"], ConvertedExperts) and type(model["linear"]) is torch.nn.Linear
    lines = str(explain(model)).splitlines()
    assert lines[0] == f"linear    {'Linear':14}  converted  a linear layer" and len(lines) == 11
    assert explain is vars(tp.convert)["explain"] and "no module" in str(explain(torch.nn.GELU()))
    tp.convert(model["fused"])
    assert explain(model["fused"])[0] == ("", "ConvertedExperts", "converted", "experts, one op")


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
