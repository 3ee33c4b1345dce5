"""State dicts and arguments with TransformerEngine's names."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import nn
from transformer_plugin.nn._transformer_engine import ADVICE
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

#: As TransformerEngine writes it: pickled bytes, or none without a recipe that has a state.
STATE, EMPTY = torch.arange(9, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_loads(layer: torch.nn.Module, state: dict[str, Any], expected: dict[str, Tensor]) -> None:
    given = dict(state)
    result = layer.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert state.keys() == given.keys(), "the caller's dict stays"
    for name, value in expected.items():
        assert_same_bits(layer.state_dict()[name], value)


@pytest.mark.parametrize("extra", [STATE, EMPTY, None], ids=["state", "empty", "none"])
def test_linear(extra: Any) -> None:
    entries = {"weight": drawn(32, 64), "bias": drawn(32)}
    layer = nn.Linear(64, 32, recipe=Float8BlockScaling())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_loads(layer, {**entries, "_extra_state": extra}, entries)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layer_norm_linear(normalization: Any) -> None:
    model = torch.nn.Sequential(nn.LayerNormLinear(64, 32, normalization=normalization))
    entries = {"0.norm_weight": drawn(64), "0.weight": drawn(32, 64), "0.bias": drawn(32)}
    if normalization == "LayerNorm":
        entries["0.norm_bias"] = drawn(65)[:64]
    state = {name.replace("norm_", "layer_norm_"): value for name, value in entries.items()}
    check_loads(model, {**state, "0._extra_state": EMPTY}, entries)
    check_loads(model, entries, entries)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"'0\.layer_norm_weight': expected one entry for a parameter"):
            model.load_state_dict({**entries, "0.layer_norm_weight": drawn(64)}, strict=strict)


def test_an_entry_of_another_size_leaves_the_layer_as_it_is() -> None:
    layer = nn.LayerNormLinear(64, 32)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = {"layer_norm_weight": drawn(63), "layer_norm_bias": drawn(64), "weight": drawn(32, 64)}
    with pytest.raises(RuntimeError, match="size mismatch for norm_weight"):
        layer.load_state_dict({**state, "bias": drawn(32)})
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name])


@pytest.mark.parametrize("parameters", ["packed", "list", "grouped"])
def test_grouped_linear(parameters: Any) -> None:
    """TransformerEngine has a parameter for each group."""
    layer = nn.GroupedLinear(3, 64, 32, parameters=parameters)
    weights, biases = [drawn(32, 64 + g)[:, :64] for g in range(3)], [drawn(32 + g)[:32] for g in range(3)]
    state: dict[str, Any] = {f"weight{g}": weight for g, weight in enumerate(weights)}
    state.update({f"bias{g}": bias for g, bias in enumerate(biases)})
    layer.load_state_dict({**state, "_extra_state": STATE})
    sizes, rows = torch.tensor([2, 0, 3]), drawn(5, 64)
    expected = torch.cat([rows[:2] @ weights[0].T + biases[0], rows[2:] @ weights[2].T + biases[2]])
    assert float((layer(rows, sizes).detach() - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_norms(norm: Any) -> None:
    state = {name: drawn(*value.shape) for name, value in norm(64).state_dict().items()}
    check_loads(norm(64), {**state, "_extra_state": EMPTY}, state)


def test_scales_of_delayed_scaling_are_named() -> None:
    layer = nn.Linear(64, 32, recipe=DelayedScaling())
    own = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.warns(UserWarning, match=r"'_extra_state' of TransformerEngine is not loaded"):
        layer.load_state_dict({**own, "_extra_state": STATE})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict({**own, "_extra_state": EMPTY})


def test_a_state_of_the_layers_own() -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> int:
            return self.calls

        def set_extra_state(self, state: int) -> None:
            self.calls = state

    layer, other = Counting(64, 32), Counting(64, 32)
    layer.calls = 7
    other.load_state_dict(layer.state_dict())
    assert other.calls == 7


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (lambda: nn.Linear(64, 32, params_dtype=torch.bfloat16), "params_dtype", r"Pass dtype=torch\.bfloat16"),
        (lambda: nn.Linear(64, 32, init_method=None), "init_method", r"torch\.nn\.init"),
        (lambda: nn.Linear(64, 32, ub_bulk_dgrad=True), "ub_bulk_dgrad", "no overlap with userbuffers"),
        (lambda: nn.GroupedLinear(num_gemms=4, in_features=64, out_features=32), "num_gemms", "Pass num_groups=4"),
        (lambda: nn.LayerNormLinear(64, 32, zero_centered_gamma=True), "zero_centered_gamma", "zero_centered=True"),
        (lambda: nn.RMSNorm(64, zero_centered_gamma=True), "zero_centered_gamma", "Pass zero_centered=True"),
        (lambda: nn.LayerNorm(64, params_dtype=torch.float16), "params_dtype", r"Pass dtype=torch\.float16"),
        (lambda: nn.Embedding(8, 64, params_dtype=torch.float16), "params_dtype", r"Pass dtype=torch\.float16"),
    ],
)  # fmt: skip
def test_arguments_of_constructors(make: Any, name: str, text: str) -> None:
    with pytest.raises(
        TypeError, match=rf"transformer_plugin::\w+: argument '{name}': expected .*got .*{text}"
    ):
        make()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"is_first_microbatch": True}, r"cache_weights=True, or call quantize_weights\(True\)"),
        ({"fp8_output": True}, "outputs are not quantized"),
    ],
)
def test_arguments_of_forwards(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{next(iter(options))}': expected .*{text}"):
        nn.Linear(64, 32)(drawn(2, 64), **options)
    with pytest.raises(TypeError, match=r"argument 'm_splits': expected .*Pass group_sizes="):
        nn.GroupedLinear(2, 64, 32)(drawn(2, 64), m_splits=[1, 1])


def test_a_name_that_would_be_that_of_another_layer_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_gemms'"):
        nn.MoE(64, 32, topk=2, num_experts=4, num_gemms=4)


def test_names_of_nobody_are_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        nn.Linear(64, 32, colour="red")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        nn.Linear(64, 32)(drawn(2, 64), colour="red")


#: The constructors of transformer_engine.pytorch 2.20.2.
LAYERS = (
    "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
    "init_method bias return_bias params_dtype parallel_mode device ub_overlap_ag ub_overlap_rs ub_name "
    "delay_wgrad_compute name "
)
OF_DENSE = "parameters_split ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad symmetric_ar_type "
OF_NORM = "eps sequence_parallel params_dtype zero_centered_gamma "
SIGNATURES = {
    nn.Linear: LAYERS + OF_DENSE + "rng_tracker_name save_original_input",
    nn.LayerNormLinear: LAYERS
    + OF_DENSE
    + OF_NORM
    + "normalization return_layernorm_output return_layernorm_output_gathered",
    nn.GroupedLinear: LAYERS.replace("in_features", "num_gemms in_features")
    + "rng_tracker_name save_original_input single_grouped_weight single_grouped_bias use_grouped_tensor",
    nn.RMSNorm: OF_NORM + "normalized_shape hidden_size",
    nn.LayerNorm: OF_NORM + "normalized_shape hidden_size",
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_every_argument_is_there_or_has_advice(kind: Any) -> None:
    own = inspect.signature(kind.__init__).parameters.keys()
    names = {*SIGNATURES[kind].split()}
    assert names - own <= ADVICE.keys()
    assert len(names & own) >= 3 and len(names - own) >= 3


def test_the_page_has_every_argument() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "from-transformer-engine.md"
    if not page.exists():
        pytest.skip("needs the source tree")
    text = page.read_text()
    names = {name for each in SIGNATURES.values() for name in each.split()}
    assert len(names) > 35
    assert not [name for name in names | ADVICE.keys() - {"inp"} if f"`{name}`" not in text]
