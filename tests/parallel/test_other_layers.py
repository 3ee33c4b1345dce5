"""shard_ and quantize_all_gather on models with layers that they do not take: these are named, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Module, ModuleDict, Parameter, Sequential

import transformer_plugin as tp
from transformer_plugin import nn as tnn
from transformer_plugin.nn.convert import ConvertedExperts
from transformer_plugin.parallel import quantize_all_gather, set_gather_order, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool


class Experts(Module):
    """Of another library."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.up, self.down = (Parameter(torch.ones(2, 32, 32, device=device)) for _ in range(2))


def texts_of(function: Callable[..., Module], model: Module, *arguments: Any, **options: Any) -> list[str]:
    """The warnings of a helper, whose place in the code is that of the call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert function(model, *arguments, **options) is model
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


def mixed(device: Any = None) -> ModuleDict:
    """7296 elements: 1024 each of a layer, of one of torch and of a table, 4096 of experts, 128 of a router."""
    own = tnn.Linear(32, 32, bias=False, device=device, recipe=Float8BlockScaling())
    parts: dict[str, Module] = {"own": own, "head": torch.nn.Linear(32, 32, bias=False, device=device)}
    parts["table"] = torch.nn.Embedding(32, 32, device=device)
    parts["experts"] = Experts(device)
    parts["router"] = tnn.TopKRouter(32, 4, 2, device=device)
    return ModuleDict(parts)


def converted(device: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 96}
    config = transformers.Qwen3MoeConfig(**sizes, num_experts=8, moe_intermediate_size=32)
    model = transformers.Qwen3MoeForCausalLM(config).to(device)
    return tp.convert(model, Float8BlockScaling(), lambda _, name: name != "lm_head")


def check_shard(rank: Rank) -> None:
    head = "transformer_plugin::shard_: argument 'module': expected layers of transformer_plugin.nn, got "
    tail = ". Their weights stay unsharded on every rank: leave them out with 'filter' if that is meant."
    model = mixed(rank.device)
    (text,) = texts_of(shard_, model, rank.group)
    assert text == (
        f"{head}a module of the class Linear ('head') and a module of the class Embedding ('table') and a module of "
        f"the class Experts ('experts'), with 84% of the model's parameters{tail}"
    )
    assert (
        shard_of_parameter(model["own"].weight) is not None
        and shard_of_parameter(model["head"].weight) is None
    )  # type: ignore[arg-type]
    own = mixed(rank.device)
    assert texts_of(shard_, own, rank.group, filter=lambda _, layer: isinstance(layer, tnn.Linear)) == []
    (text,) = texts_of(shard_, mixed(rank.device), rank.group, filter=lambda name, _: name != "experts")
    assert "Experts" not in text and "'table'" in text
    assert texts_of(shard_, Sequential(tnn.MoE(32, 32, 2, 1, device=rank.device)), rank.group) == []
    check_converted(rank)


def check_converted(rank: Rank) -> None:
    model = converted(rank.device)
    (text,) = texts_of(shard_, model, rank.group)
    assert "2 modules of the class ConvertedExperts (such as 'model.layers.0.mlp.experts')" in text
    assert "class Linear ('lm_head')" in text and "class Embedding ('model.embed_tokens')" in text
    text = "argument 'module': expected layers of transformer_plugin.nn with weights, got "
    for nothing in (mixed(rank.device)["experts"], Sequential(torch.nn.Linear(8, 8, device=rank.device))):
        for group in (rank.group, dist.new_group([rank.rank], use_local_synchronization=True)):
            with pytest.raises(ValueError, match=f"{text}a module of the class .*, with 100%"):
                shard_(nothing, group)
    with pytest.raises(ValueError, match=f"{text}none"):
        shard_(Sequential(torch.nn.LayerNorm(8)), rank.group)
    with pytest.raises(ValueError, match=f"{text}none"):
        shard_(mixed(rank.device), rank.group, filter=lambda *_: False)
    with pytest.raises(ValueError, match="expected layers with sharded weights, got none"):
        set_gather_order(converted(rank.device).modules())


def test_shard(pair: RankPool) -> None:
    pair.run(check_shard)


def test_quantize_all_gather(device: torch.device) -> None:
    head = "transformer_plugin::quantize_all_gather: argument 'model': expected layers of transformer_plugin.nn, got "
    model = mixed(device)
    (text,) = texts_of(quantize_all_gather, model)
    assert text == (
        f"{head}a module of the class Experts ('experts'), with 56% of the model's parameters. FSDP2 gathers them in "
        "their dtype: leave them out with 'filter' if that is meant."
    )
    assert texts_of(quantize_all_gather, mixed(device), lambda _, name: name != "experts") == []
    (text,) = texts_of(quantize_all_gather, converted(device))
    assert (
        f"{head}2 modules of the class ConvertedExperts (such as 'model.layers.0.mlp.experts'), with" in text
    )
    model = converted(device)
    for module in model.modules():
        if isinstance(module, ConvertedExperts):
            module.recipe = None  # as layers without a recipe
    assert texts_of(quantize_all_gather, model) == []


def test_quantize_all_gather_of_nothing(device: torch.device) -> None:
    text = "expected a layer with a recipe that quantizes its weight, got "
    with pytest.raises(ValueError, match=f"{text}a module of the class Experts, with 100%"):
        quantize_all_gather(Experts(device))
    model = tp.convert(converted(device), None)
    with pytest.raises(ValueError, match=f"{text}none"):
        quantize_all_gather(model)
    with pytest.raises(ValueError, match=f"{text}none"):
        quantize_all_gather(mixed(device), lambda *_: False)
