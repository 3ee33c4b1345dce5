"""A node with a weight has one output with a gradient, the first.

``torch.distributed.pipelining`` splits a backward at the nodes that have a parameter and lead to the stage's input: it
adds up the gradients of all outputs of such a node, and computes the parameter's gradient from the sum, as that of the
first output.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.ops.test_node_names import CALLS
from transformer_plugin.testing.every_op import Call, calls, registered

ops = torch.ops.transformer_plugin
SCHEMAS = registered()
WITH_NODES = {name for name, _ in CALLS}
#: Nodes with several outputs, or whose output is not the first, and what has an edge to them: no weights.
ACTIVATIONS = {
    "router_logits_with_tokens": {"input"},
    "dispatch": {"tokens", "topk_weights"},
    "assign_weighted_slots": {"weights"},
}


def leaves_of(call: Call, without: set[str]) -> dict[str, Any]:
    """The arguments, of which all that may have a gradient require one."""
    mutable = {a.name for a in SCHEMAS[call.op].arguments if a.alias_info is not None}

    def leaf(value: Any, name: str) -> Any:
        if isinstance(value, list):
            return [leaf(item, f"{name}[{i}]") for i, item in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        own = value.detach().clone()
        wanted = (
            own.is_floating_point() and own.element_size() > 1 and name.split("[")[0] not in mutable | without
        )
        return own.requires_grad_(wanted)

    return {name: leaf(value, name) for name, value in call.arguments.items()}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []
    )


def called(call: Call) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments and results, with as many gradients as the op has."""
    without: set[str] = set()
    while True:
        arguments = leaves_of(call, without)
        try:
            return arguments, tensors_in(call.function(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            refused = re.match(rf"transformer_plugin::{call.packet}: argument '(\w+)", str(error))
            assert refused is not None and refused[1] not in without, error
            without |= set(call.arguments) if isinstance(error, NotImplementedError) else {refused[1]}


def outputs_of_nodes(results: list[Tensor]) -> dict[Any, set[int]]:
    """The nodes of a graph, and which of their outputs have a gradient."""
    edges = [(result.grad_fn, result.output_nr) for result in results if result.grad_fn is not None]
    found: dict[Any, set[int]] = {}
    while edges:
        node, output = edges.pop()
        if node not in found:
            edges += [(below, at) for below, at in node.next_functions if below is not None]
        found.setdefault(node, set()).add(output)
    return found


def test_a_node_of_weights_has_one_output() -> None:
    wrong, with_nodes = [], set()
    for call in calls():
        if call.packet not in WITH_NODES:
            continue
        arguments, results = called(call)
        names = {id(t): name for name, value in arguments.items() for t in tensors_in(value)}
        for node, outputs in outputs_of_nodes(results).items():
            if not node.name().startswith("transformer_plugin::"):
                continue  # of torch, for ops without a gradient
            with_nodes.add(call.op)
            leaves = {
                names[id(below.variable)] for below, _ in node.next_functions if hasattr(below, "variable")
            }
            if outputs != {0} and not leaves <= ACTIVATIONS.get(call.op, set()):
                wrong.append(
                    f"{node.name()} of {call.name}: outputs {sorted(outputs)}, leaves {sorted(leaves)}"
                )
    assert wrong == []
    # The graphs are not empty.
    weights = {
        "linear",
        "norm_linear",
        "grouped_linear",
        "grouped_mlp",
        "linear.scaled",
        "grouped_linear.scaled",
    }
    weights |= {"embedding", "rms_norm", "layer_norm", "router_logits", "router_logits_with_tokens", "gemm"}
    assert (
        weights | {"grouped_gemm", "grouped_gemm_activation", "dispatch", "assign_weighted_slots"}
        <= with_nodes
    )
