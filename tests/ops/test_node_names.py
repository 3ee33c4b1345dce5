"""Autograd nodes have the names of ops, as profiles and ``grad_fn`` show them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.surface.surface import ROOT
from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, Linear
from transformer_plugin.recipes import DelayedScaling, Float8BlockScaling

T, N, K, G = 6, 8, 16, 2
SIZES = torch.tensor([2, 3])
INDICES = torch.tensor([[0], [1], [1], [0], [1], [0]], dtype=torch.int32)


def of(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def permuted(name: str) -> Tensor:
    rows, _, slot, source, _ = ops.permute(of(T, K), INDICES, G, T)
    if name == "permute":
        return rows
    if name == "permute_rows":
        return ops.permute_rows(of(T, K), slot, source)
    return ops.unpermute(of(T, K), slot, source)


def connected() -> Tensor:
    value = torch.randn(T, K)
    ops.connect_gradient(value, of(T, K))
    return value


def aux_loss() -> Tensor:
    scores, load = ops.router_scores(of(T, G)), ops.count_tokens_per_expert(INDICES, G)
    return ops.aux_loss(scores, load, T, 1, 0.1)


def exchanged(name: str) -> Tensor:
    slot, source, *_ = torch.ops.transformer_plugin.plan(INDICES, G, T, T)
    if name == "dispatch":
        return torch.ops.transformer_plugin.dispatch(of(T, K), None, slot, source)[0]
    return torch.ops.transformer_plugin.combine(of(T, K), slot, source, T)


def finished(name: str) -> Tensor:
    operand = of(T, K)
    token = getattr(ops, f"start_{name}")(operand)
    result: Tensor = getattr(ops, f"finish_{name}")(token, operand)
    return result


#: For each node: the op that records it, and a call that has the node in its graph.
CALLS: list[tuple[str, Callable[[], Tensor]]] = [
    ("activation", lambda: ops.activation(of(T, K))),
    ("rms_norm", lambda: ops.rms_norm(of(T, K), of(K), 1e-5)),
    ("layer_norm", lambda: ops.layer_norm(of(T, K), of(K), of(K), 1e-5)),
    ("connect_gradient", connected),
    ("permute", lambda: permuted("permute")),
    ("unpermute", lambda: permuted("unpermute")),
    ("permute_rows", lambda: permuted("permute_rows")),
    ("topk_router", lambda: ops.topk_router(of(T, 4), None, 2)[0]),
    ("topk_router_with_load", lambda: ops.topk_router_with_load(of(T, 4), None, 2)[0]),
    ("router_logits", lambda: ops.router_logits(of(T, K), of(N, K))),
    ("router_logits_with_tokens", lambda: ops.router_logits_with_tokens(of(T, K), of(N, K))[0]),
    ("router_scores", lambda: ops.router_scores(of(T, 4))),
    ("assign_weighted_slots", lambda: ops.assign_weighted_slots(INDICES, of(T, 1), 0, G, T)[4]),
    ("aux_loss", aux_loss),
    ("dispatch", lambda: exchanged("dispatch")),
    ("combine", lambda: exchanged("combine")),
    ("all_gather", lambda: ops.all_gather(of(T, K))),
    ("reduce_scatter", lambda: ops.reduce_scatter(of(T, K))),
    ("finish_all_gather", lambda: finished("all_gather")),
    ("finish_reduce_scatter", lambda: finished("reduce_scatter")),
    ("all_reduce", lambda: ops.all_reduce(of(T, K))),
    ("copy_to_group", lambda: ops.copy_to_group(of(T, K))),
    ("enter_gather_region", lambda: ops.enter_gather_region(of(T, K), "")),
    ("leave_gather_region", lambda: ops.leave_gather_region(of(T, K), "")),
    (
        "vocab_parallel_cross_entropy",
        lambda: ops.vocab_parallel_cross_entropy(of(T, K), torch.arange(T), K, 1, ""),
    ),
    ("gemm", lambda: ops.gemm(of(T, K), of(N, K))),
    ("grouped_gemm", lambda: ops.grouped_gemm(of(T, K), of(G, N, K), SIZES)),
    ("grouped_gemm", lambda: ops.grouped_linear(of(T, K), of(G, N, K), SIZES)),
    ("grouped_gemm", lambda: ops.grouped_gemm(of(T, K), [of(N, K), of(N, K)], SIZES)),
    ("grouped_gemm_activation", lambda: ops.grouped_gemm_activation(of(T, K), of(G, N, K), SIZES)[0]),
    ("grouped_mlp", lambda: ops.grouped_mlp(of(T, K), of(G, 2 * N, K), of(G, K, N), SIZES, torch.rand(T))),
    ("embedding", lambda: ops.embedding(torch.tensor([1, 0]), of(N, K))),
    ("linear", lambda: ops.linear(of(T, K), of(N, K))),
    ("linear", lambda: ops.linear(of(T, K), of(N, K), of(N))),
    ("linear", lambda: Linear(K, N, recipe=Float8BlockScaling())(of(T, K))),
    ("norm_linear", lambda: ops.norm_linear(of(T, K), of(K), None, of(N, K), None, 1e-5)[0]),
    ("linear", lambda: Linear(K, N, recipe=DelayedScaling()).eval()(of(T, K))),
    ("linear", lambda: Linear(K, N, recipe=DelayedScaling())(of(T, K))),
    ("grouped_linear", lambda: GroupedLinear(G, K, N, recipe=Float8BlockScaling())(of(T, K), SIZES)),
    ("grouped_linear", lambda: GroupedLinear(G, K, N, recipe=DelayedScaling())(of(T, K), SIZES)),
]


def test_every_op_with_a_node_is_tested() -> None:
    named = set()
    for path in [path for kind in ("*.cpp", "*.h") for path in (ROOT / "csrc").rglob(kind)]:
        for text in re.findall(r"kName = ([^;]+);", path.read_text()):
            named |= set(re.findall(r'"(\w+)"', text))
    assert named == {name for name, _ in CALLS}


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CALLS)])
def test_node_has_the_name_of_the_op(name: str, call: Callable[[], Tensor]) -> None:
    output = call()
    assert output.grad_fn.name() == f"transformer_plugin::{name}_backward_node"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output.sum().backward()
    names = {event.name for event in profile.events()}
    assert f"transformer_plugin::{name}_backward_node" in names
    assert not [event for event in names if "anonymous" in event or "CppNode" in event]
