"""LoRA of PEFT on parameters of each module (``target_parameters``): outputs, gradients of the adapters, and merges.

The reference is the bare module with ``weight + delta`` in place of the weight, where ``delta`` is made of the
adapter's matrices in plain torch.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from tests.clients.imported import peft
from transformer_plugin import convert, nn, quantize, quantized_init
from transformer_plugin.nn.convert import ConvertedExperts
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

ROWS, HIDDEN, FFN, EXPERTS, RANK = 24, 32, 48, 4, 2


class Model(torch.nn.Module):
    """One module, by name, with what its forward needs besides the input."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        rest: tuple[Tensor, ...] = ()
        if isinstance(self.layer, nn.GroupedMLP) or self.has_groups():
            rest = (torch.tensor([8, 0, 10, 4], device=input.device),)
        if isinstance(self.layer, nn.GroupedMLP):
            rest += (torch.linspace(0.1, 1, ROWS, device=input.device),)
        output = self.layer(input, *rest)
        return (
            output.output
            if hasattr(output, "expert_load") and hasattr(output, "output")
            else _weights(output)
        )

    def has_groups(self) -> bool:
        return any(isinstance(layer, nn.GroupedLinear) for layer in _unwrapped(self.layer))


def _unwrapped(layer: Any) -> Any:
    while layer is not None:
        yield layer
        layer = getattr(layer, "base_layer", None)


def _weights(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.weights


def grouped(**options: Any) -> nn.GroupedLinear:
    return nn.GroupedLinear(EXPERTS, HIDDEN, FFN, **options)


Case = tuple[Callable[..., torch.nn.Module], list[str]]
#: How a module is made, and the parameters that have adapters.
CASES: dict[str, Case] = {
    "Linear": (lambda **options: nn.Linear(HIDDEN, FFN, **options), ["weight"]),
    "LayerNormLinear": (lambda **options: nn.LayerNormLinear(HIDDEN, FFN, **options), ["weight"]),
    "GroupedLinear": (grouped, ["weight"]),
    "GroupedLinear, its bias, too": (grouped, ["weight", "bias"]),
    "GroupedLinear, list": (lambda **options: grouped(parameters="list", **options), ["weight0", "weight2"]),
    "GroupedMLP": (
        lambda **options: nn.GroupedMLP(EXPERTS, HIDDEN, FFN, **options),
        ["fc1.weight", "fc2.weight"],
    ),
    "GroupedMLP, fc2": (
        lambda **options: nn.GroupedMLP(EXPERTS, HIDDEN, FFN, True, **options),
        ["fc2.weight"],
    ),
    "MoE, router": (lambda **options: nn.MoE(HIDDEN, FFN, EXPERTS, 2, **options), ["router.weight"]),
    "MoE": (
        lambda **options: nn.MoE(HIDDEN, FFN, EXPERTS, 2, **options),
        ["router.weight", "experts.fc1.weight", "experts.fc2.weight"],
    ),
    "TopKRouter": (lambda recipe, **options: nn.TopKRouter(HIDDEN, EXPERTS, 2, **options), ["weight"]),
}


def adapted(model: Model, parameters: list[str]) -> Any:
    names = [f"layer.{name}" for name in parameters]
    config = peft().LoraConfig(r=RANK, lora_alpha=3, target_modules=[], target_parameters=names)
    return peft().get_peft_model(model, config)


def deltas(wrapped: Any, names: list[str], model: Model) -> dict[str, Tensor]:
    """What the adapters add, by the names of the bare model's parameters."""
    found = {}
    for module in wrapped.modules():
        if type(module).__name__ != "ParamWrapper":
            continue
        base = module.get_base_layer()
        (name,) = (
            f"layer.{name}" for name in names
            if name.rpartition(".")[2] == module.parameter_name and _owner(wrapped, name) is base
        )  # fmt: skip
        a, b = (getattr(module, f"lora_{each}")["default"].weight for each in "AB")
        weight = model.get_parameter(name)
        scale = 3 / RANK
        if weight.dim() == 2:
            found[name] = scale * b @ a
        else:
            a = a.view(weight.shape[0], RANK, -1)
            b = b.view(b.shape[0], RANK, weight.shape[0])
            found[name] = scale * torch.einsum("ore,eri->eoi", b, a)
    return found


def _owner(wrapped: Any, name: str) -> Any:
    """The innermost module that has a parameter."""
    found = wrapped.base_model.model.layer
    for part in name.split(".")[:-1]:
        while not hasattr(found, part):
            found = found.base_layer
        found = getattr(found, part)
    while hasattr(found, "base_layer"):
        found = found.base_layer
    return found


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_parameters(name: str, recipe: Any, device: torch.device) -> None:
    make, names = CASES[name]
    torch.manual_seed(0)
    bare = Model(make(recipe=recipe, device=device))
    wrapped = adapted(copy.deepcopy(bare), names)
    x = torch.randn(ROWS, HIDDEN, device=device)
    assert_same_bits(wrapped(x).detach(), bare(x).detach())  # B begins with zeros

    adapters = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * len(names) and all("lora_" in n for n in adapters)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(torch.randn(parameter.shape, device=device) / 10)
    bare.requires_grad_(False)
    added = deltas(wrapped, names, bare)
    assert len(added) == len(names)
    changed = {n: bare.get_parameter(n) + delta for n, delta in added.items()}
    expected, output = functional_call(bare, changed, (x,)), wrapped(x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.square().sum(), list(adapters.values()))
    output.square().sum().backward()
    for (n, parameter), grad in zip(adapters.items(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-4, msg=n)
        assert grad.abs().max() > 0, n
    assert not any(p.grad is not None for n, p in wrapped.named_parameters() if n not in adapters)


def test_merged() -> None:
    make, names = CASES["MoE"]
    torch.manual_seed(0)
    bare = Model(make(recipe=None))
    wrapped = adapted(copy.deepcopy(bare), names)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    x = torch.randn(ROWS, HIDDEN)
    expected = wrapped(x)
    assert not torch.equal(expected, bare(x))
    torch.testing.assert_close(wrapped.merge_and_unload()(x), expected)


def drawn(wrapped: Any) -> None:
    """Adapters with an effect, as after a training."""
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)


#: Adapters: of which module, and of what in it.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "of modules": ("Linear", {"target_modules": ["layer"]}),
    "of parameters": (
        "GroupedMLP",
        {"target_modules": [], "target_parameters": ["layer.fc1.weight", "layer.fc2.weight"]},
    ),
}


def copied(model: torch.nn.Module) -> list[Any]:
    """The layers of a model, each with a quantized copy of its weight."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.GroupedLinear)]
    for layer in layers:
        layer.quantize_weights()
    return layers


STALE = r"got one that was changed in place afterwards\. Call quantize_weights\(\) again"


@pytest.mark.parametrize("adapted_first", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_quantized_copies_notice_a_merge(name: str, adapted_first: bool) -> None:
    """PEFT adds to ``weight.data``, which torch does not count."""
    kind, options = TARGETS[name]
    torch.manual_seed(0)
    model = Model(CASES[kind][0](recipe=Float8BlockScaling()))
    x = torch.randn(ROWS, HIDDEN)
    layers = [] if adapted_first else copied(model)
    config = peft().LoraConfig(r=RANK, lora_alpha=3, **options)
    wrapped = peft().get_peft_model(model, config)
    drawn(wrapped)
    layers = layers or copied(wrapped)
    before = [layer.quantized_weight.value.dequantize().clone() for layer in layers]
    merged = wrapped.merge_and_unload()
    with pytest.raises(ValueError, match=STALE):
        merged(x)
    assert copied(merged) == layers
    output = merged(x)
    for layer, old in zip(layers, before, strict=True):
        assert not torch.equal(layer.quantized_weight.value.dequantize(), old)
        layer.forget_quantized_weights()
    assert_same_bits(output, merged(x))


def test_quantized_copies_notice_changes_of_adapters() -> None:
    """Merged, unmerged, unmerged by a forward, and OLoRA's initial values, which change the weight. Others do not."""
    torch.manual_seed(0)
    model = Model(nn.Linear(HIDDEN, FFN, recipe=Float8BlockScaling()))
    x = torch.randn(ROWS, HIDDEN)
    copied(model)
    expected = model(x)
    wrapped = peft().get_peft_model(model, peft().LoraConfig(r=RANK, target_modules=["layer"]))
    assert_same_bits(wrapped(x), expected)
    drawn(wrapped)

    def disabled(x: Tensor) -> None:
        with wrapped.disable_adapter():
            wrapped(x)

    for act, call in (("merge_adapter", wrapped), ("unmerge_adapter", wrapped), ("merge_adapter", disabled)):
        getattr(wrapped, act)()
        with pytest.raises(ValueError, match=STALE):
            call(x)
        copied(wrapped)
        wrapped(x)
    wrapped.add_adapter(
        "other", peft().LoraConfig(r=RANK, target_modules=["layer"], init_lora_weights="olora")
    )
    with pytest.raises(ValueError, match=STALE):
        wrapped(x)


def test_adapters_that_are_derived_later() -> None:
    """A class of adapters from after the first quantized copy."""
    base: Any = peft().tuners.tuners_utils.BaseTunerLayer
    layer: Any = nn.Linear(HIDDEN, FFN, recipe=Float8BlockScaling())
    copied(layer)

    def merge(self: Any) -> str:
        self.base_layer.weight.data += 1
        return "merged"

    adapter: Any = type("Late", (torch.nn.Module, base), {"merge": merge})()
    adapter.base_layer = layer
    assert adapter.merge() == "merged"
    with pytest.raises(ValueError, match=STALE):
        layer(torch.randn(ROWS, HIDDEN))


def test_a_library_that_is_imported_later() -> None:
    code = """
import sys, torch, transformer_plugin as tp
layer = tp.nn.Linear(32, 32, recipe=tp.recipes.Float8BlockScaling())
layer.quantize_weights()
assert "peft" not in sys.modules
import peft
config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
merged = peft.get_peft_model(torch.nn.Sequential(layer), config).merge_and_unload()
try:
    merged(torch.randn(4, 32))
except ValueError as error:
    print("quantize_weights" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("safe", [False, True])
def test_merged_into_quantized_parameters(safe: bool, dtype: torch.dtype) -> None:
    """The merged weight is quantized into the same parameter; one that does not change keeps its bytes."""
    torch.manual_seed(0)
    with quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        model = Model(nn.Linear(HIDDEN, FFN, dtype=dtype))
    weight: Any = model.layer.weight
    old = weight.dequantize()
    x = torch.randn(ROWS, HIDDEN, dtype=dtype)
    config = peft().LoraConfig(r=RANK, lora_alpha=3, target_modules=["layer"])
    wrapped = peft().get_peft_model(model, config)
    assert_same_bits(wrapped(x), model(x))
    bytes_before = weight.rowwise_data.clone()
    wrapped.merge_adapter(safe_merge=safe)  # B is zeros
    assert torch.equal(weight.rowwise_data, bytes_before)
    assert weight.get_high_precision_init_val() is not None
    wrapped.unmerge_adapter()
    drawn(wrapped)
    delta = wrapped.base_model.model.layer.get_delta_weight("default").detach()
    wanted = old + delta.to(dtype) if safe else old.clone().add_(delta)
    merged = wrapped.merge_and_unload(safe_merge=safe)
    assert merged.layer.weight is weight and weight.dtype == dtype
    assert_same_bits(weight.dequantize(), quantize(wanted, weight.format.key).dequantize())
    assert_same_bits(weight.get_high_precision_init_val(), wanted)
    assert not torch.equal(weight.dequantize(), old)
    merged(x)


@pytest.mark.parametrize("kind", ["grouped", "quantized"])
def test_adapters_of_values_are_refused(kind: str) -> None:
    recipe, options = Float8BlockScaling(), {"parameters": "grouped"}
    with quantized_init(recipe) if kind == "quantized" else nullcontext():
        model = Model(grouped(**({} if kind == "quantized" else options)))
    wrapped = adapted(model, ["weight"])
    text = {
        "grouped": r"Call packed\(\) for a plain tensor",
        "quantized": "Make the layer without quantized_init",
    }
    with pytest.raises(ValueError, match=text[kind]):
        wrapped(torch.randn(ROWS, HIDDEN))


def converted_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_experts=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts_per_tok=2, intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).float()


@pytest.mark.parametrize("adapted_first", [False, True])
def test_converted_model(adapted_first: bool, tmp_path: Path) -> None:
    """As the model of Hugging Face, with adapters of experts, of the router, and of layers, one of them DoRA's."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]

    def config(**options: Any) -> Any:
        modules: Any = {
            "target_modules": ["q_proj", "o_proj", "embed_tokens"],
            "target_parameters": parameters,
        }
        return peft().LoraConfig(r=RANK, lora_alpha=3, **{**modules, **options})

    tokens = torch.arange(12).view(2, 6) * 5 % 32
    for configs in ([config(), config()], [config(target_parameters=None, use_dora=True)]):
        wanted: Any = peft().get_peft_model(converted_model(), configs[0])
        model: Any = converted_model() if adapted_first else convert(converted_model())
        model = peft().get_peft_model(model, configs[0])
        model = convert(model) if adapted_first else model
        kinds = [type(module) for module in model.modules()]
        assert ConvertedExperts in kinds and nn.Linear in kinds
        for each in (model, wanted):
            for i, other in enumerate(configs[1:]):
                each.add_adapter(f"other{i}", other)
            for i, (name, parameter) in enumerate(each.named_parameters()):
                if "lora_" in name:
                    parameter.data = (
                        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) / 5
                    )

        def check(what: str, model: Any = model, wanted: Any = wanted) -> None:
            torch.testing.assert_close(
                model(tokens).logits, wanted(tokens).logits, rtol=1e-4, atol=1e-5, msg=what
            )

        for each in (model, wanted):
            each(tokens).logits.square().mean().backward()
        gradients = {n: p.grad for n, p in wanted.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-6, msg=name
            )
        for act in ("merge_adapter", "unmerge_adapter", "disable_adapter_layers", "enable_adapter_layers"):
            for each in (model, wanted):
                getattr(each.base_model if "layers" in act else each, act)()
            check(act)
        model.save_pretrained(str(tmp_path))
        check("loaded", peft().PeftModel.from_pretrained(convert(converted_model()), str(tmp_path)))
        check("merged", model.merge_and_unload(), wanted.merge_and_unload())
