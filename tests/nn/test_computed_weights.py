"""Weights that a layer computes in each forward (parametrizations, norms, pruning): loads, copies, and values."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

import transformer_plugin as tp
from tests.parallel.replacements import COMPUTING
from transformer_plugin import nn
from transformer_plugin.nn import _recipe
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling
from transformer_plugin.testing.numerics import assert_same_bits

GROUPS, SIZES = 4, [3, 0, 5, 2]


class Half(torch.nn.Module):
    """A parametrization that changes values, and has an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x * 2


WAYS: dict[str, Callable[[Any, str], Any]] = {
    **COMPUTING,
    "parametrization": lambda layer, name: parametrize.register_parametrization(layer, name, Half()),
    "prune": lambda layer, name: prune.l1_unstructured(layer, name, amount=0.3),
}
by_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _without_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def listed(seed: int, layout: str = "list", **options: Any) -> Any:
    torch.manual_seed(seed)
    return nn.GroupedLinear(GROUPS, 32, 64, parameters=layout, **options).eval()


def output_of(layer: Any) -> Tensor:
    x = torch.randn(sum(SIZES), 32, generator=torch.Generator().manual_seed(1))
    rest = [torch.tensor(SIZES)] if isinstance(layer, nn.GroupedLinear) else []
    output: Tensor = layer(x, *rest)
    return output


def loaded(layer: Any, state: dict[str, Any], strict: bool = True) -> Any:
    """What is missing and unexpected, by torch's words; sizes that do not fit are errors."""
    return layer.load_state_dict(dict(state), strict=strict)


@by_way
@pytest.mark.parametrize("names", [["weight2"], ["bias1"], [f"weight{i}" for i in range(GROUPS)]], ids=str)
def test_states_of_lists_load(way: str, names: list[str]) -> None:
    old, new = listed(0), listed(1)
    for layer in (old, new):
        for name in names:
            WAYS[way](layer, name)
    assert not torch.equal(output_of(new), output_of(old))
    state = old.state_dict()
    assert loaded(new, state) == ([], [])
    assert_same_bits(output_of(new), output_of(old))
    for key, value in new.state_dict().items():
        assert_same_bits(value, state[key], key)


@by_way
def test_states_of_experts_load(way: str) -> None:
    experts: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(nn.MoE(32, 64, 4, 2, parameters="list")).eval()
        WAYS[way](model[0].experts.fc1, "weight0")
        WAYS[way](model[0].experts.fc2, "weight3")
        experts.append(model)
    assert loaded(experts[1], experts[0].state_dict()) == ([], [])
    x = torch.randn(9, 32)
    assert_same_bits(experts[1](x).output, experts[0](x).output)


def test_other_keys_are_named() -> None:
    """As torch names them, and no others: with strict=False the rest is loaded."""
    pruned, plain = listed(0), listed(1)
    prune.l1_unstructured(pruned, "weight2", amount=0.3)
    of_weight = {"weight2_orig", "weight2_mask"}
    packed = listed(2, "packed")
    for layer, state, missing, unexpected in (
        (pruned, plain.state_dict(), of_weight, {"weight2"}),
        (plain, pruned.state_dict(), {"weight2"}, of_weight),
        (packed, pruned.state_dict(), {"weight"}, of_weight | {"weight0", "weight1", "weight3"}),
        (pruned, packed.state_dict(), of_weight | {"weight0", "weight1", "weight3"}, {"weight"}),
    ):
        found = loaded(layer, state, strict=False)
        assert (set(found.missing_keys), set(found.unexpected_keys)) == (missing, unexpected)
        with pytest.raises(RuntimeError, match="Missing key") as refusal:
            loaded(layer, state)
        assert "size mismatch" not in str(refusal.value)
        assert set(re.findall(r'"(weight\w*)"', str(refusal.value))) == missing | unexpected
    state = plain.state_dict()
    del state["weight1"]
    assert loaded(plain, state, strict=False) == (["weight1"], [])


@pytest.mark.parametrize("way", ["weight_norm", "prune"])
def test_states_of_other_sizes_are_refused(way: str) -> None:
    """Nothing of the layer is loaded, and keys that are there are not missing."""
    layer, before = listed(0), {}
    WAYS[way](layer, "weight3")
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    fewer: Any = nn.GroupedLinear(3, 32, 64, parameters="list")
    WAYS[way](fewer, "weight2")
    other = listed(1).state_dict()
    for state, text in (
        (
            fewer.state_dict(),
            "the state dict has 3 members weight{i} of sizes [(64, 32)], the module 4 of one size",
        ),
        ({**before, "weight1": torch.zeros(64, 31)}, "members weight{i} of sizes [(64, 31), (64, 32)]"),
        ({**other, "weight7": torch.zeros(64, 32)}, "the state dict has 5 members"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)) as refusal:
            loaded(layer, state, strict=False)
        assert "Missing" not in str(refusal.value)
        for name in ("weight0", "weight1", "weight2", "bias0"):
            assert_same_bits(layer.state_dict()[name], before[name], name)


LAYERS: dict[str, tuple[Callable[..., Any], str]] = {
    "Linear": (lambda **options: nn.Linear(32, 64, **options), "weight"),
    "LayerNormLinear": (lambda **options: nn.LayerNormLinear(32, 64, **options), "weight"),
    "packed": (lambda **options: nn.GroupedLinear(GROUPS, 32, 64, **options), "weight"),
    "list": (lambda **options: listed(0, **options), "weight2"),
}


@by_way
@pytest.mark.parametrize("kind", LAYERS)
def test_no_copies_of_computed_weights(kind: str, way: str) -> None:
    make, name = LAYERS[kind]
    expected = (
        f"argument '{name}': expected a parameter, whose quantized copy serves .*, got one that is computed"
    )
    layer = make(recipe=Float8BlockScaling()).eval()
    WAYS[way](layer, name)
    with pytest.raises(ValueError, match=expected + r".*Leave out quantize_weights\(\)"):
        layer.quantize_weights()
    assert layer.quantized_weight is None
    assert_same_bits(output_of(layer), output_of(layer))

    layer = make(recipe=Float8BlockScaling()).eval()
    layer.quantize_weights()
    WAYS[way](layer, name)
    for _ in range(2):
        with pytest.raises(ValueError, match=expected + r".*Call forget_quantized_weights\(\)"):
            output_of(layer)
    layer.forget_quantized_weights()
    output_of(layer)


def test_copies_beside_computed_biases() -> None:
    """And after a parametrization was removed."""
    layer: Any = nn.GroupedLinear(GROUPS, 32, 64, recipe=Float8BlockScaling())
    parametrize.register_parametrization(layer, "bias", Half())
    expected = output_of(layer)
    layer.quantize_weights()
    assert_same_bits(output_of(layer), expected)
    parametrize.register_parametrization(layer, "weight", Half())
    parametrize.remove_parametrizations(layer, "weight")
    layer.quantize_weights()
    assert_same_bits(output_of(layer), expected)


def test_both_layers_of_experts_have_copies_or_none() -> None:
    experts = nn.GroupedMLP(GROUPS, 32, 64, recipe=Float8CurrentScaling())
    parametrize.register_parametrization(experts.fc2, "weight", Half())
    with pytest.raises(ValueError, match="expected a parameter, whose quantized copy"):
        experts.quantize_weights()
    assert experts.fc1.quantized_weight is None and experts.fc2.quantized_weight is None


#: Beside those of WAYS: what computes with a parameter before it is replaced.
OTHERS: dict[str, Callable[[Any, str], Any]] = {
    "orthogonal": parametrizations.orthogonal,
    "global pruning": lambda layer, name: prune.global_unstructured(
        [(layer, name)], prune.L1Unstructured, amount=0.3
    ),
    "structured pruning": lambda layer, name: prune.ln_structured(layer, name, 0.3, n=2, dim=0),
}


@pytest.mark.parametrize("way", [*WAYS, *OTHERS])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "packed", "grouped"])
def test_quantized_parameters_refuse_them(kind: str, way: str) -> None:
    """At once, with one text, and the layer stays as it is."""
    with tp.quantized_init(Float8BlockScaling()):
        layer = listed(0, "grouped") if kind == "grouped" else LAYERS[kind][0]()
    before, names = output_of(layer), sorted(layer.state_dict())
    text = (
        r"argument 'weight': expected a plain parameter, got a (Quantized|Grouped)Tensor \[.*quantized_init"
    )
    with pytest.raises(ValueError, match=text):
        {**WAYS, **OTHERS}[way](layer, "weight")
    assert sorted(layer.state_dict()) == names
    assert_same_bits(output_of(layer), before)


def test_layers_that_come_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks nothing until the first quantized parameter of a process exists, which may be an unpickled one."""
    watched: list[str] = []
    monkeypatch.setattr(_recipe, "watch_quantized", lambda: watched.append("here"))
    copy.deepcopy(nn.Linear(32, 64))
    assert not watched
    with tp.quantized_init(Float8BlockScaling()):
        layer = nn.Linear(32, 64)
    copy.deepcopy(layer)
    assert watched == ["here"]


@pytest.mark.parametrize("way", [*WAYS, "orthogonal"])
def test_grouped_tensors(way: str) -> None:
    """Norms need views that these do not have; parametrizations and pruning compute with them."""
    layer, other = listed(0, "grouped"), listed(0, "packed")
    if "norm" in way or way == "orthogonal":
        with pytest.raises(
            ValueError, match=r"expected a plain parameter, got a GroupedTensor .*='packed' or 'list'"
        ):
            {**WAYS, **OTHERS}[way](layer, "weight")
    else:
        for each in (layer, other):
            WAYS[way](each, "weight")
    assert_same_bits(output_of(layer), output_of(other))
