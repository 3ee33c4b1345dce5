"""convert: one warning for each class of modules that it leaves as they are, and none for what it leaves on purpose."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import ModuleDict, ModuleList, Parameter, Sequential
from torch.nn.utils import parametrize

import transformer_plugin as tp
from transformer_plugin import nn
from transformer_plugin.nn.convert import ConvertedExperts
from transformer_plugin.recipes import Float8BlockScaling


def texts_of(model: torch.nn.Module, *arguments: Any) -> list[str]:
    """The warnings of convert, whose place in the code is that of the call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert tp.convert(model, *arguments) is model
    assert all(each.category is UserWarning and each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


def weights(module: type[torch.nn.Module], **sizes: tuple[int, ...]) -> torch.nn.Module:
    made = module()
    for name, size in sizes.items():
        made.register_parameter(name, Parameter(torch.ones(size)))
    return made


class Bank(torch.nn.Module):
    pass


class Expert(torch.nn.Module):
    pass


class Own(torch.nn.Linear):
    pass


class Llama4Router(torch.nn.Linear):
    pass


class Conv1D(torch.nn.Module):
    """As in Hugging Face."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = Parameter(torch.ones(nx, nf))


class Packed(torch.nn.Module):
    """As GPTQ has them."""

    def __init__(self) -> None:
        super().__init__()
        self.infeatures = self.outfeatures = 64
        self.register_buffer("qweight", torch.ones(8, 64, dtype=torch.int32))


class Lists(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.ParameterList([Parameter(torch.ones(4, 4)) for _ in range(3)])


def quantized_linear() -> torch.nn.Module:
    return parametrize.register_parametrization(torch.nn.Linear(8, 8), "weight", torch.nn.Identity())


#: A model, and what each of its warnings names: the class, the number, and one of the modules.
LEFT: dict[str, tuple[Callable[[], torch.nn.Module], list[str]]] = {
    "stacks of equally many matrices": (
        lambda: ModuleList([weights(Bank, up=(4, 8, 16), down=(4, 16, 8)) for _ in range(3)]),
        ["got 3 modules of the class Bank (such as '0')"],
    ),
    "of more dimensions": (
        lambda: weights(Bank, blocks=(4, 8, 2, 16), scales=(4, 8, 2)),
        ["got a module of the class Bank."],
    ),
    "one matrix, in a class of experts": (
        lambda: ModuleList([weights(Expert, w=(32, 8))]),
        ["got a module of the class Expert ('0')"],
    ),
    "one matrix, in a list of experts": (
        lambda: ModuleDict({"experts": ModuleList([weights(Bank, w1=(8, 16)) for _ in range(4)])}),
        ["got 4 modules of the class Bank (such as 'experts.0')"],
    ),
    "lists of matrices": (
        lambda: ModuleDict({"experts": Lists()}),
        ["got a module of the class Lists ('experts')"],
    ),
    "subclasses of Linear": (
        lambda: Sequential(Own(8, 8), torch.nn.Linear(8, 8), Own(8, 8), torch.nn.LazyLinear(8)),
        ["got 2 modules of the class Own (such as '0')", "got a module of the class LazyLinear ('3')"],
    ),
    "parametrizations": (
        lambda: Sequential(quantized_linear()),
        ["got a module of the class ParametrizedLinear ('0')"],
    ),
    "other linear layers": (
        lambda: Sequential(Conv1D(8, 8), Packed(), Conv1D(8, 16), Conv1D(8, 16)),
        ["got 3 modules of the class Conv1D (such as '0')", "got a module of the class Packed ('1')"],
    ),
    "layers of torch": (
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16),
        ["got a module of the class MultiheadAttention ('self_attn')"],
    ),
    "recurrent layers": (lambda: torch.nn.LSTM(8, 8), ["got a module of the class LSTM."]),
}


@pytest.mark.parametrize("name", LEFT)
def test_one_warning_for_each_class(name: str) -> None:
    make, expected = LEFT[name]
    model = make()
    before = [type(module) for module in model.modules() if type(module) is not torch.nn.Linear]
    found = [
        text for text in texts_of(model, Float8BlockScaling()) if "nothing is converted" not in text.lower()
    ]
    assert len(found) == len([text for text in expected if text.startswith("got")])
    for text in expected:
        assert any(text in other for other in found), (text, found)
    assert [type(module) for module in model.modules() if type(module) is not nn.Linear] == before


class Positions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = Parameter(torch.ones(1, 1, 8))
        self.positions, self.table = Parameter(torch.ones(1, 9, 8)), Parameter(torch.ones(9, 8))


def test_what_is_left_on_purpose() -> None:
    """Also of experts that are a list of modules with linear layers, which are converted."""
    expert = Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
    router = weights(type("TopKRouter", (torch.nn.Module,), {}), weight=(4, 8))
    gate = weights(type("MoEGate", (torch.nn.Module,), {}), weight=(4, 8))
    parts = [Positions(), router, gate, Llama4Router(8, 4), torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8)]
    parts += [torch.nn.Conv1d(8, 8, 3), torch.nn.Conv2d(8, 8, 3), nn.RMSNorm(8), nn.Embedding(9, 8)]
    parts += [nn.MoE(8, 16, 4, 2), nn.LayerNormLinear(8, 8)]
    model = ModuleDict({"experts": ModuleList([expert]), "others": ModuleList(parts)})
    assert texts_of(model) == []
    assert type(model["experts"][0][0]) is nn.Linear  # type: ignore[index]
    assert texts_of(model, Float8BlockScaling(), lambda _, name: "moe" not in name) == []  # once more


def test_adapters_of_other_layers() -> None:
    """PEFT's adapter of an embedding has numbers of features and matrices, as linear layers have."""
    adapter = weights(Bank)
    adapter.base_layer, adapter.in_features, adapter.out_features = torch.nn.Embedding(32, 8), 32, 8
    adapter.lora_embedding_A = torch.nn.ParameterDict({"default": Parameter(torch.ones(2, 32))})
    assert texts_of(Sequential(adapter, torch.nn.Linear(8, 8))) == []


def test_the_filter_silences() -> None:
    model = Sequential(torch.nn.Linear(8, 8), Own(8, 8), weights(Expert, up=(4, 8, 8), down=(4, 8, 8)))
    asked: list[str] = []

    def filter(module: torch.nn.Module, name: str) -> bool:
        asked.append(name)
        return type(module) is torch.nn.Linear

    assert texts_of(model, None, filter) == [] and sorted(asked) == ["0", "1", "2"]
    model = Sequential(torch.nn.Linear(8, 8), weights(Expert, up=(4, 8, 8), down=(4, 8, 8)))
    # A filter that knows linear layers only leaves nothing out that it does not know.
    (text,) = texts_of(model, None, lambda module, _: module.in_features == 8)
    assert "Expert ('1')" in text and type(model[0]) is nn.Linear


def test_nothing_to_convert() -> None:
    head = "transformer_plugin::convert: argument 'model': expected layers that can be converted, got "
    tail = ". Nothing is converted: pass a model with such layers, or another filter."
    assert texts_of(Sequential(torch.nn.GELU())) == [f"{head}none{tail}"]
    model = Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    assert texts_of(model, None, lambda *_: False) == [f"{head}a filter that takes none of 2{tail}"]
    assert type(model[0]) is torch.nn.Linear


class Config:
    """What the classes read of their configurations."""

    num_local_experts = moe_num_experts = 4
    hidden_size = 16
    intermediate_size = ffn_hidden_size = 24
    hidden_act, ffn_act_fn = "silu", {"name": "silu"}


@pytest.mark.parametrize(
    ("folder", "kind", "arguments"),
    [
        ("llama4", "Llama4TextExperts", None),
        ("dbrx", "DbrxExpertGLU", None),
        ("jetmoe", "JetMoeParallelExperts", (4, 16, 24)),
    ],
)
def test_experts_that_transformers_does_not_decorate(folder: str, kind: str, arguments: Any) -> None:
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    make = getattr(module, kind)
    model = ModuleList([make(*(arguments or (Config(),))) for _ in range(2)])
    texts = texts_of(model, Float8BlockScaling())
    assert texts[0] == (
        "transformer_plugin::convert: argument 'model': expected experts of a class that transformers decorates with "
        f"use_experts_implementation, in 16 or 32 bits, got 2 modules of the class {kind} (such as '0'). They stay as "
        "they are, without the recipe: leave them out with 'filter' if that is meant."
    )
    assert len(texts) == 2 and "got none" in texts[1]


def test_a_model_of_gpt_oss() -> None:
    """Its experts are converted, and its router is left on purpose."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.GptOssForCausalLM(config).eval(), torch.arange(16).view(2, 8)
    expected = model(tokens).logits
    assert texts_of(model, None, lambda _, name: name != "lm_head") == []
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert isinstance(model.model.layers[1].mlp.experts, ConvertedExperts)
    assert type(model.lm_head) is torch.nn.Linear
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
