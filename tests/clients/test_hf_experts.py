"""transformers with experts_implementation="transformer_plugin": every class of experts against its eager forward."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.clients.hf_experts import (
    EXPERTS,
    FFN,
    HIDDEN,
    are_near,
    classes,
    differences,
    expected_results,
    make,
    results,
    routed,
    table,
)
from tests.clients.imported import transformers
from transformer_plugin import nn
from transformer_plugin.integrations import hf
from transformer_plugin.nn._experts import not_computed, not_one_op
from transformer_plugin.parallel.token_dispatcher import LocalTokenDispatcher
from transformer_plugin.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_plugin.testing.numerics import assert_same_bits

#: A class of each form.
FORMS = {
    "MixtralExperts": "",
    "Lfm2MoeExperts": "",  # F.silu
    "NemotronHExperts": "",  # no gate, the square of ReLU
    "AriaExperts": "transposed weights",
    "BeamExperts": "a gate of its own",  # in float32
    "DeepseekV4Experts": "",  # clamped
    "Gemma4TextExperts": "",  # GELU with tanh
    "GptOssExperts": "transposed weights, biases",  # a gate of its own that the ops have, interleaved
    "Inkling2Experts": "a gate of its own",  # softcaps
    "MiniMaxM3VLExperts": "",  # clamped, with alpha and offset
    "MuseSparkExperts": "a norm of each expert's output",
    "OpenAIPrivacyFilterExperts": "transposed weights, biases",
}
#: Forms that one op computes, and that it does not.
TWO = ("MixtralExperts", "GptOssExperts")
#: At a limit the gradient jumps, and bfloat16 would be on another side of it.
UNCLAMPED = {"swiglu_limit": 100.0}


def ours(name: str, device: Any = None, **options: Any) -> Any:
    experts = make(name, _experts_implementation=hf.NAME, **options)
    return experts if device is None else experts.to(device)


def inputs_on(device: torch.device) -> Any:
    return tuple(each.to(device) for each in routed())


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, device: torch.device) -> None:
    experts, inputs = ours(name, device), inputs_on(device)
    assert not_one_op(experts) == FORMS[name]
    found = differences(results(experts, inputs), expected_results(experts, inputs))
    assert are_near(found), found
    tokens, index, weights = inputs
    with_minus = index.masked_fill(index == EXPERTS, -1)
    assert_same_bits(experts(tokens, with_minus, weights), experts(*inputs))
    assert float(experts(*inputs)[5].detach().abs().max()) == 0


def test_every_class_of_transformers() -> None:
    computed, wrong = [], {}
    for name in classes():
        experts = ours(name)
        if reason := not_computed(experts):
            wrong[name] = reason
            continue
        found = differences(results(experts, routed()), expected_results(experts, routed()))
        if not are_near(found):
            wrong[name] = str(found)
        computed.append(name)
    assert wrong == {} and len(computed) == len(classes()) >= 55


def test_the_page_lists_every_class() -> None:
    """``python -m tests.clients.hf_experts`` prints the rows."""
    if transformers().__version__ != "5.24.0":
        pytest.skip("the page is about transformers 5.24.0")
    assert len(classes()) == 68
    page = (Path(__file__).parents[2] / "docs" / "training-frameworks.md").read_text()
    assert f"\n{table()}\n\n" in page


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
@pytest.mark.parametrize("name", FORMS)
def test_tokens_without_expert_are_not_read(name: str, recipe: Recipe | None, device: torch.device) -> None:
    """Nor do the rows that no token takes make NaN, also of a norm that has no gradient at zero."""
    experts, (tokens, index, weights) = ours(name, device, post_norm_eps=0.0), inputs_on(device)
    hf.set_recipe(experts, recipe)
    tokens[5] = torch.nan
    found = results(experts, (tokens, index, weights))
    assert all(bool(each.isfinite().all()) for each in found)
    assert (
        float(found[0][5].abs().max())
        == float(found[1][5].abs().max())
        == float(found[2][5].abs().max())
        == 0
    )
    nobody = results(experts, (tokens, torch.full_like(index, EXPERTS), weights))
    assert all(float(each.abs().max()) == 0 for each in nobody)


class Recorder(TorchDispatchMode):
    """The ops that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
@pytest.mark.parametrize("converted", [False, True])
def test_the_ops_are_those_of_the_moe_layer(converted: bool, recipe: Any, device: torch.device) -> None:
    """So no row of a token is copied that it does not copy."""
    experts, inputs = ours("MixtralExperts", device), inputs_on(device)
    if converted:
        nn.convert(experts, recipe)
    else:
        hf.set_recipe(experts, recipe)
    moe = nn.MoE(HIDDEN, FFN, EXPERTS, 2, recipe=recipe, device=device)
    dispatcher: Any = moe.dispatcher
    assert isinstance(dispatcher, LocalTokenDispatcher)
    tokens, index, weights = inputs
    index = index.clamp(max=EXPERTS - 1)
    ops = []
    for run in (experts, lambda *inputs: dispatcher.run(moe.experts, *inputs)[0]):
        tokens = tokens.detach().requires_grad_()
        with Recorder() as recorder:
            run(tokens, index, weights).sum().backward()
        ops.append(recorder.ops)
    assert ops[0] == ops[1] and any("assign_weighted_slots" in op for op in ops[0])


@pytest.mark.parametrize("name", FORMS)
def test_compiled_in_one_graph(name: str, device: torch.device) -> None:
    torch.compiler.reset()  # all classes share the code of transformers' forward
    experts, inputs = ours(name, device), inputs_on(device)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled, inputs), results(experts, inputs), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("name", FORMS)
def test_autocast(name: str, device: torch.device) -> None:
    """The products are in bfloat16, and gradients are those of the parameters, in float32."""
    experts, inputs = ours(name, device, **UNCLAMPED), inputs_on(device)
    with torch.autocast(device.type, torch.bfloat16):
        got = results(experts, inputs)
    expected = expected_results(experts, inputs)
    assert [each.dtype for each in got] == [each.dtype for each in expected]
    found = differences(got, expected)
    assert are_near(found, 3e-2, 6e-2) and max(found) > 1e-4, found


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16(name: str, device: torch.device) -> None:
    tokens, index, weights = inputs_on(device)
    exact = expected_results(ours(name, device, **UNCLAMPED), (tokens, index, weights))
    experts = ours(name, device, **UNCLAMPED).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):  # of the routing weights
        found = differences(results(experts, (tokens.bfloat16(), index, weights.to(dtype))), exact)
        assert are_near(found, 3e-2, 6e-2), found


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize(
    "recipe",
    [
        Float8BlockScaling(),
        MXFP8BlockScaling(),
        NVFP4BlockScaling(stochastic_rounding=False),
        Float8BlockScaling(nonfinite="nan"),
    ],
    ids=str,
)
def test_recipes(name: str, recipe: Recipe, device: torch.device) -> None:
    """As the converted module has them; the configuration keeps them as JSON does."""
    experts, inputs = ours(name, device), inputs_on(device)
    converted = nn.convert(copy.deepcopy(experts), recipe)
    plain = results(experts, inputs)
    assert hf.set_recipe(experts, recipe) is experts
    saved = experts.config.transformer_plugin_recipe
    experts.config.transformer_plugin_recipe = json.loads(json.dumps(saved))
    got = results(experts, inputs)
    for each, expected in zip(got, results(converted, inputs), strict=True):
        assert_same_bits(each, expected)
    assert max(differences(got, plain)) > 1e-4
    hf.set_recipe(experts, None)
    assert_same_bits(experts(*inputs).detach(), plain[0])


def test_refused_recipes() -> None:
    experts = ours("MixtralExperts")
    with pytest.raises(
        ValueError, match="set_recipe: argument 'recipe': expected a recipe whose scales come from"
    ):
        hf.set_recipe(experts, DelayedScaling())
    wrong: Any = "fp8_block"
    with pytest.raises(
        TypeError, match=r"set_recipe: argument 'recipe': expected a recipe of .*, got 'fp8_block'"
    ):
        hf.set_recipe(experts, wrong)
    with pytest.raises(ValueError, match="set_recipe: argument 'model': expected a model with experts"):
        hf.set_recipe(torch.nn.Linear(4, 4), Float8BlockScaling())
    assert not hasattr(experts.config, "transformer_plugin_recipe")


def qwen() -> Any:
    torch.manual_seed(0)
    config = transformers().Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers().Qwen3MoeForCausalLM(config)


def test_a_model_by_name(tmp_path: Path, device: torch.device) -> None:
    """Loaded with the name, switched to it, and saved with a recipe."""
    model, tokens = qwen(), torch.randint(0, 64, (2, 16), device=device)
    model.save_pretrained(tmp_path / "stock")
    load = type(model).from_pretrained
    eager = load(tmp_path / "stock", experts_implementation="eager").to(device)
    named = load(tmp_path / "stock", experts_implementation="transformer_plugin").to(device)
    assert named.config._experts_implementation == "transformer_plugin"
    with torch.no_grad():
        expected, logits = eager(tokens).logits, named(tokens).logits
        assert 0 < float((logits - expected).abs().max()) < 1e-5
        eager.set_experts_implementation("transformer_plugin")
        assert_same_bits(eager(tokens).logits, logits)
        eager.set_experts_implementation("eager")
        assert_same_bits(eager(tokens).logits, expected)
    keys = list(named.state_dict())
    hf.set_recipe(named, Float8BlockScaling())
    assert list(named.state_dict()) == keys == list(model.state_dict())
    named.save_pretrained(tmp_path / "named")
    saved = json.loads((tmp_path / "named" / "config.json").read_text())
    stock = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert saved.pop("transformer_plugin_recipe") == "fp8_block" and saved == stock
    again = load(tmp_path / "named", experts_implementation="transformer_plugin").to(device)
    with torch.no_grad():
        assert_same_bits(again(tokens).logits, named(tokens).logits)
        assert float((again(tokens).logits - expected).abs().max()) > 1e-4


def test_a_model_compiles_in_one_graph(device: torch.device) -> None:
    model, tokens = qwen().to(device), torch.randint(0, 64, (2, 16), device=device)
    model.set_experts_implementation("transformer_plugin")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["transformer_plugin", "transformers.modeling_utils"])
def test_the_name_is_registered_whatever_is_imported_first(first: str) -> None:
    """The package does not import transformers itself."""
    transformers()
    code = f"""
import sys, {first}
if "{first}" == "transformer_plugin":
    assert "transformers" not in sys.modules
import transformer_plugin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
print(ALL_EXPERTS_FUNCTIONS["transformer_plugin"] is transformer_plugin.integrations.hf.experts_forward)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
