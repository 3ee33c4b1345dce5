"""What torch.compile takes as one node of a graph, because it does not trace into it."""

from __future__ import annotations

import torch

from transformer_plugin.functional import _values, layers
from transformer_plugin.tensor import _base, _layout, grouped


def register() -> None:
    """Called when torch's compiler is imported."""
    nodes = (_base.new_value, grouped.differentiable, _values._rows_with_gradient, _values.with_dtype)
    for function in nodes:
        torch.compiler.allow_in_graph(function)
    for constant in (_layout.parsed, _layout.facts, layers._on_device):
        torch.compiler.assume_constant_result(constant)
