"""Modules of other libraries that multiply by weights of their own: what helpers for a whole model leave as it is.

They are recognized by what they hold and by their names, so that a library need not be imported, nor known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from transformer_plugin.nn._module import PluginModule

#: Layers of torch that multiply by weights which they do not keep in a ``torch.nn.Linear``.
_OF_TORCH = (torch.nn.MultiheadAttention, torch.nn.Bilinear, torch.nn.RNNBase, torch.nn.RNNCellBase)
#: Names of the numbers of features: in torch and most libraries, in GPTQ, in ``Conv1D`` of Hugging Face.
_FEATURES = (("in_features", "out_features"), ("infeatures", "outfeatures"), ("nx", "nf"))


class Left(NamedTuple):
    """Modules of one class that are left as they are."""

    kind: type[torch.nn.Module]
    #: The name of the first, and how many there are.
    name: str
    number: int
    #: Of the parameters and buffers that are their own.
    elements: int

    def __str__(self) -> str:
        modules = "a module" if self.number == 1 else f"{self.number} modules"
        example = (
            "" if not self.name else f" ('{self.name}')" if self.number == 1 else f" (such as '{self.name}')"
        )
        return f"{modules} of the class {self.kind.__name__}{example}"


def left_alone(found: Iterable[tuple[str, torch.nn.Module]]) -> list[Left]:
    """Modules by their classes, in the order in which the classes come first."""
    kinds: dict[type[torch.nn.Module], Left] = {}
    for name, module in found:
        before = kinds.get(type(module), Left(type(module), name, 0, 0))
        elements = sum(t.numel() for t in _own_tensors(module))
        kinds[type(module)] = before._replace(number=before.number + 1, elements=before.elements + elements)
    return list(kinds.values())


def described(model: torch.nn.Module, found: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """What is left alone of a model, with its share of the model's elements; "" of nothing."""
    left = left_alone(found)
    if not left:
        return ""
    elements, whole = sum(each.elements for each in left), sum(p.numel() for p in model.parameters())
    return f"{' and '.join(map(str, left))}, with {elements / max(whole, 1):.0%} of the model's parameters"


def chooses(filter: Callable[..., bool] | None, *arguments: Any) -> bool:
    """Whether a filter would take a module that the helper cannot take. Filters need to know only modules that it can:
    one that reads an attribute which this module does not have does not leave it out."""
    try:
        return filter is None or filter(*arguments)
    except AttributeError:
        return True


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module that is not of this package computes a linear layer: ``torch.nn.Linear``, its subclasses, and
    classes with numbers of features and a matrix, as quantized layers and Hugging Face's ``Conv1D`` are."""
    if isinstance(module, PluginModule | NonDynamicallyQuantizableLinear) or _is_router(module):
        return False
    if isinstance(module, (torch.nn.Linear, *_OF_TORCH)):
        return True
    if isinstance(getattr(module, "base_layer", None), torch.nn.Module):
        return False  # an adapter of PEFT; the layer that it adapts, of any kind, is a module of its own
    has_features = any(all(isinstance(getattr(module, n, None), int) for n in names) for names in _FEATURES)
    return has_features and any(map(_is_matrix, _own_tensors(module)))


def is_experts(name: str, module: torch.nn.Module) -> bool:
    """Whether a module that is neither of this package nor linear holds the weights of experts: several stacks of
    equally many matrices, or any matrices where the class, or its place in the model, is named after experts."""
    kind = type(module)
    if isinstance(module, PluginModule) or kind.__module__.startswith("torch."):
        return False
    if is_linear(module) or _is_router(module):
        return False
    matrices = [tensor for tensor in _own_tensors(module) if _is_matrix(tensor)]
    # Hugging Face's decorator use_experts_implementation gives a class this method.
    if hasattr(kind, "_apply_gate") or any("expert" in part.lower() for part in (kind.__name__, name)):
        return bool(matrices)
    stacks = [t.shape[0] for t in matrices if t.dim() >= 3 and t.shape[0] > 1]
    return len(set(stacks)) < len(stacks)


def _own_tensors(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module and of its lists of parameters, but not of the modules in it."""
    lists = (torch.nn.ParameterList, torch.nn.ParameterDict)
    owners = [module, *(child for child in module.children() if isinstance(child, lists))]
    tensors = [t for owner in owners for t in (*owner._parameters.values(), *owner._buffers.values())]
    return [tensor for tensor in tensors if tensor is not None and not is_lazy(tensor)]


def _is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix or a stack of matrices, and not a vector with dimensions of size 1."""
    return tensor.dim() >= 2 and min(tensor.shape[-2:]) > 1


def _is_router(module: torch.nn.Module) -> bool:
    """Routers are left as they are on purpose: their products are small, and decide."""
    kind = type(module).__name__.lower()
    return "router" in kind or kind.endswith(("gate", "gating"))
