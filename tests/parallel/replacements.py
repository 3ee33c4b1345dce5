"""The ways in which PyTorch replaces a parameter, and which layers refuse them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torch.utils import swap_tensors

from tests.parallel.replaced_layers import Case, T
from transformer_plugin import parallel
from transformer_plugin.functional.quantize import quantize

Way = Callable[[Any, Case, Tensor], Any]


def layer_of(model: Any, case: Case) -> Any:
    return model.get_submodule(case.path)


def parameter_like(old: Any, value: Tensor) -> Any:
    """A parameter like another one, with other values of this rank."""
    value = value.to(old.device)
    if hasattr(old, "to_local"):
        value = type(old).from_local(value, old.device_mesh, old.placements, run_check=False)
    elif hasattr(old, "format"):
        value = quantize(value, old.format.key, columnwise=True)
    return Parameter(value)


def local(tensor: Any) -> Tensor:
    """This rank's values of a parameter."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.dequantize() if hasattr(tensor, "format") else tensor


def full_state(model: Any) -> dict[str, Tensor]:
    state = parallel.full_state_dict(model)
    return {
        n: (v.full_tensor() if hasattr(v, "to_local") else local(v)).detach().cpu().clone()
        for n, v in state.items()
    }


def close(one: Tensor, other: Tensor, kind: str, what: str) -> None:
    bound = 0.08 if kind.startswith("quantized") else 1e-5
    one, other = one.detach().cpu(), other.detach()
    error = (one - other).norm() / other.norm().clamp(min=1e-6)
    assert one.shape == other.shape and error < bound, f"{what}: off by {float(error):.2g}"


# The ways. Each gets the model, its case, and this rank's new values, and returns the model that follows.


def assign(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    setattr(layer, case.name, parameter_like(getattr(layer, case.name), value))


def register(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    layer.register_parameter(case.name, parameter_like(getattr(layer, case.name), value))


def delete_and_assign(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    made = parameter_like(getattr(layer, case.name), value)
    delattr(layer, case.name)
    setattr(layer, case.name, made)


def exchange(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    made = parameter_like(getattr(layer, case.name), value)
    made.__class__ = type(getattr(layer, case.name))
    swap_tensors(getattr(layer, case.name), made)


def write(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    layer._parameters[case.name] = parameter_like(getattr(layer, case.name), value)


def load_with_assign(model: Any, case: Case, value: Tensor) -> None:
    load(model, case, value, assign=True)


def load(model: Any, case: Case, value: Tensor, assign: bool) -> None:
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    entry = state[case.full_name]
    if hasattr(entry, "shard_layout"):
        entry.local.copy_(value)
    elif hasattr(entry, "to_local"):
        entry.to_local().copy_(value)
    else:
        entry.copy_(value)
    model.load_state_dict(state, assign=assign)


def load_with_swap(model: Any, case: Case, value: Tensor) -> None:
    with conversions(overwrite=False, swap=True):
        load(model, case, value, assign=False)


def to_empty(model: Any, case: Case, value: Tensor) -> None:
    state = {name: each.detach().clone() for name, each in model.named_parameters()}
    model.to_empty(device=next(model.parameters()).device)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(state[name])
        write_values(layer_of(model, case), case.name, value)


def through_meta(model: Any, case: Case, value: Tensor) -> None:
    state = {name: each.detach().clone() for name, each in model.named_parameters()}
    device = next(model.parameters()).device
    model.to("meta").to_empty(device=device)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(state[name])
        write_values(layer_of(model, case), case.name, value)


def write_values(layer: Any, name: str, value: Tensor) -> None:
    parameter = getattr(layer, name)
    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).copy_(value)


@contextmanager
def conversions(overwrite: bool, swap: bool) -> Iterator[None]:
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.__future__.set_swap_module_params_on_conversion(False)


def converted(overwrite: bool = False, swap: bool = False) -> Way:
    def convert(model: Any, case: Case, value: Tensor) -> None:
        with torch.no_grad():
            write_values(layer_of(model, case), case.name, value)
        with conversions(overwrite, swap):
            model.to(torch.bfloat16 if case.is_quantized else torch.float64)
            model.float()
        with torch.no_grad():
            write_values(layer_of(model, case), case.name, value)

    return convert


def deepcopy(model: Any, case: Case, value: Tensor) -> Any:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        write_values(layer_of(copied, case), case.name, value)
    return copied


def pickled(model: Any, case: Case, value: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        write_values(layer_of(loaded, case), case.name, value)
    return loaded


class Adapter(torch.nn.Module):
    """As PEFT wraps a layer, which is its ``base_layer``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer = layer


def adapter(model: Any, case: Case, value: Tensor) -> None:
    """What adapters save of their layer is full, and they write merged values into the memory of the weight."""
    layer = layer_of(model, case)
    state = full_state(Adapter(layer))
    close(state[f"base_layer.{case.name}"], full_state(model)[case.full_name], case.kind, "adapter")
    weight = getattr(layer, case.name)
    if hasattr(weight, "format"):
        weight.data.copy_(value)
    else:
        data = weight.to_local() if hasattr(weight, "to_local") else weight
        data.data += value.to(data.device) - data.data


def tied_and_untied(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    other = copy.deepcopy(layer)
    setattr(other, case.name, getattr(layer, case.name))
    assert getattr(other, case.name) is getattr(layer, case.name)
    setattr(layer, case.name, parameter_like(getattr(layer, case.name), value))
    assert getattr(other, case.name) is not getattr(layer, case.name)


class Same(torch.nn.Module):
    """A parametrization, whose inverse replaces the memory of the original."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1

    def right_inverse(self, x: Tensor) -> Tensor:
        return x + 0


#: What makes a layer compute its weight from others.
COMPUTING: dict[str, Callable[[Any, str], Any]] = {
    "parametrization": lambda layer, name: register_parametrization(layer, name, Same()),
    "weight_norm": parametrizations.weight_norm,
    "weight_norm_hook": torch.nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm_hook": torch.nn.utils.spectral_norm,
    "prune": prune.identity,
}


def computing(name: str) -> Way:
    def change(model: Any, case: Case, value: Tensor) -> None:
        with torch.no_grad():
            write_values(layer_of(model, case), case.name, value)
        COMPUTING[name](layer_of(model, case), case.name)

    return change


def full_like(case: Case, value: Tensor, old: Any) -> Parameter:
    """A full weight of which ``value`` is this rank's."""
    if case.dim is not None:
        value = torch.zeros(case.full_sizes(value.shape, dist.get_world_size()))
    return Parameter(value.to(old.device))


def assign_full(model: Any, case: Case, value: Tensor) -> None:
    layer = layer_of(model, case)
    setattr(layer, case.name, full_like(case, value, getattr(layer, case.name)))


def exchange_full(model: Any, case: Case, value: Tensor) -> None:
    old = getattr(layer_of(model, case), case.name)
    if case.kind in SHARDS and not case.is_quantized:
        data, old.data = old.data, full_like(case, value, old).data
        with pytest.raises(ValueError, match=IN_FORWARD):
            model(case.draw(T).to(old.device))
        old.data = data
    swap_tensors(old, full_like(case, value, old))
    try:
        model(case.draw(T).to(old.device))
    finally:
        if case.dim is not None:
            swap_tensors(old, Parameter(value.to(old.device)))


#: Text of the errors.
DELETED = r"expected a layer that keeps its parameter, of which this rank has a shard, got a deletion of"
COMPUTED = r"expected a parameter of which this rank has all elements, got .*a shard of sizes"
SIZES = r"argument 'weight\d?': expected a.* tensor of sizes .*this rank's shard over the ranks .*, got one of sizes"
QUANTIZED = (
    r"argument 'weight': expected a plain parameter, got a (Quantized|Grouped)Tensor \[.*quantized_init"
)
DTENSOR = (
    r"expected a DTensor of sizes .* as the experts are sharded over the ranks \[0, 1\], got a Parameter"
)
OF_EXPERTS = (
    r"argument 'weight': expected a parameter of which this rank has all elements, got a DTensor of sizes"
)
IN_FORWARD = r"expected (this rank's shard, of sizes|size \d+ in dimension 0)"
SHARDS = ("sharded", "sliced", "quantized slices", "experts")


def refused(*kinds: str, text: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(kinds, text), **others}


#: Each way, and the kinds of layers that refuse it, with the text.
WAYS: dict[str, tuple[Way, dict[str, str]]] = {
    "assign": (assign, {}),
    "register_parameter": (register, {}),
    "delete_and_assign": (delete_and_assign, refused(*SHARDS, text=DELETED)),
    "swap_tensors": (exchange, {}),
    "_parameters": (write, {}),
    "load_with_assign": (load_with_assign, {}),
    "load_with_swap": (load_with_swap, {}),
    "to_empty": (to_empty, {}),
    "meta_to_empty": (through_meta, {}),
    "to": (converted(), {}),
    "to_overwrites": (converted(overwrite=True), {}),
    "to_swaps": (converted(swap=True), {}),
    "deepcopy": (deepcopy, {}),
    "pickle": (
        pickled,
        {
            "sharded": r"expected a model without sharded weights to pickle, got",
            "experts": "MoE: argument 'group': expected a layer without a group when the module itself is pickled",
            "dtensor": "MoE: argument 'group': expected a layer without a group when the module itself is pickled",
        },
    ),
    "adapter": (adapter, {}),
    "tie_and_untie": (tied_and_untied, {}),
    **{name: (computing(name), refused(*SHARDS, text=COMPUTED, quantized=QUANTIZED)) for name in COMPUTING},
    **{
        name: (computing(name), refused(*SHARDS, text=COMPUTED, quantized=QUANTIZED, dtensor=OF_EXPERTS))
        for name in COMPUTING
        if "norm" in name
    },
    "assign_full": (assign_full, refused(*SHARDS, text=SIZES, dtensor=DTENSOR)),
    "swap_full": (
        exchange_full,
        {
            **refused(*SHARDS, text=IN_FORWARD),
            "dtensor": "Cannot swap t1 and t2 if they have different slots",
        },
    ),
}
