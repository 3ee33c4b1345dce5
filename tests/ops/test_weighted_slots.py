"""assign_weighted_slots: the bits of assign_slots and of an index, the reference, gradients, compilation and CUDA
graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.routing_cases import ROUTINGS, Routing, assign_slots_cases

tp = torch.ops.transformer_plugin
assign_cases = pytest.mark.parametrize("case", list(assign_slots_cases()), ids=lambda case: case.name)
NAMES = ("slot", "source", "group_sizes", "total", "probs")


def draw_weights(indices: Tensor, seed: int = 7) -> Tensor:
    """Weights with every kind of float among them, which must arrive bit for bit."""
    weights = torch.randn(indices.shape, generator=torch.Generator().manual_seed(seed))
    special = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
    flat = weights.view(-1)
    flat[: min(5, flat.numel())] = special[: min(5, flat.numel())]
    return weights.to(indices.device)


def at_slots(weights: Tensor, slot: Tensor, source: Tensor) -> Tensor:
    """Each weight at its slot, zeros elsewhere, by torch's ops."""
    placed = slot >= 0
    positions = torch.where(placed, slot, len(source)).flatten().long()
    probs = weights.new_zeros(len(source) + 1)
    return probs.index_copy(0, positions, torch.where(placed, weights, 0.0).flatten())[:-1]


def two_ops(indices: Tensor, weights: Tensor, *layout: int) -> tuple[Tensor, ...]:
    slot, source, _, group_sizes, total = ops.assign_slots(indices, *layout)
    return slot, source, group_sizes, total, at_slots(weights, slot, source)


@assign_cases
def test_has_the_bits_of_the_two_ops_and_of_the_reference(case: Case, device: torch.device) -> None:
    indices, *layout = case.arguments(device)
    weights = draw_weights(indices)
    got = ops.assign_weighted_slots(indices, weights, *layout)
    expected = reference.assign_weighted_slots(indices.cpu(), weights.cpu(), *layout)
    for name, a, b, c in zip(NAMES, got, two_ops(indices, weights, *layout), expected, strict=True):
        assert_same_bits(a, b, name)
        assert_same_bits(a, c, name)


@pytest.mark.parametrize("capacity", [300_000, 900_000])
def test_many_indices(capacity: int, device: torch.device) -> None:
    """Several thousand chunks of the counting pass; the smaller capacity drops rows."""
    generator = torch.Generator().manual_seed(4)
    indices = torch.randint(-1, 128, (100_000, 8), generator=generator, dtype=torch.int32).to(device)
    weights = draw_weights(indices)
    got = ops.assign_weighted_slots(indices, weights, 0, 128, capacity, 16)
    for name, a, b in zip(NAMES, got, two_ops(indices, weights, 0, 128, capacity, 16), strict=True):
        assert_same_bits(a, b, name)
    placed = got[0].cpu().reshape(-1) >= 0
    slots = got[0].cpu().reshape(-1)[placed].long()
    assert_same_bits(got[4].cpu()[slots], weights.cpu().reshape(-1)[placed])
    empty = got[1].cpu() < 0
    assert int(placed.sum()) + int(empty.sum()) == capacity
    assert_same_bits(got[4].cpu()[empty], torch.zeros(int(empty.sum())))


def test_probs_by_hand(device: torch.device) -> None:
    indices = torch.tensor([[2, 0], [1, 2], [-1, 2], [1, 1]], device=device)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [torch.nan, 0.6], [0.7, 0.8]], device=device)
    slot, source, sizes, total, probs = ops.assign_weighted_slots(indices, weights, 0, 3, 10, 4)
    assert slot.tolist() == [[8, 0], [4, 9], [-1, -1], [5, 6]]
    assert source.tolist() == [0, -1, -1, -1, 1, 3, 3, -1, 0, 1]
    assert sizes.tolist() == [4, 4, 2] and total.tolist() == [12]
    expected = [0.2, 0, 0, 0, 0.3, 0.7, 0.8, 0, 0.1, 0.4]
    assert_same_bits(probs, torch.tensor(expected))


@pytest.mark.parametrize(
    "routing",
    [r for r in ROUTINGS if r.name in ("masked", "capacity_cuts", "no_tokens", "several_chunks")],
    ids=lambda routing: routing.name,
)
def test_gradients_are_those_of_an_index(routing: Routing, device: torch.device) -> None:
    indices = routing.indices(device, torch.Generator().manual_seed(0))
    layout = (0, routing.experts, routing.capacity, routing.alignment)
    grad = torch.randn(routing.capacity, generator=torch.Generator().manual_seed(1)).to(device)
    grads = []
    for function in (ops.assign_weighted_slots, two_ops):
        weights = draw_weights(indices).requires_grad_()
        *integers, probs = function(indices, weights, *layout)
        assert not any(t.requires_grad for t in integers)
        grads += torch.autograd.grad(probs, weights, grad)
    assert_same_bits(*grads)
    slot = ops.assign_slots(indices, *layout)[0].long()
    by_hand = torch.where(slot >= 0, grad[slot.clamp(min=0)], 0.0) if routing.capacity else slot.float()
    assert_same_bits(grads[0], by_hand)


def test_strided_arguments_give_the_same_bits(device: torch.device) -> None:
    indices = torch.randint(0, 4, (12, 6), device=device).t()
    weights = torch.rand(6, 24, device=device)[:, ::2]
    got = ops.assign_weighted_slots(indices, weights, 0, 4, 80)
    for a, b in zip(got, two_ops(indices.contiguous(), weights.contiguous(), 0, 4, 80), strict=True):
        assert_same_bits(a, b)


@assign_cases
def test_opcheck(case: Case, device: torch.device) -> None:
    indices, *layout = case.arguments(device)
    weights = torch.rand(indices.shape, device=device)
    opcheck(tp.assign_weighted_slots.default, (indices, weights, *layout))
    # The last check of torch adds all outputs in place, beginning with an integer, which fails for a float after it.
    # test_compiles_without_graph_breaks_or_recompiling compiles the gradient.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(tp.assign_weighted_slots.default, (indices, weights.requires_grad_(), *layout), test_utils=checks)


def layer(weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    slot, source, sizes, _, probs = ops.assign_weighted_slots(
        indices, weights, 0, 4, weights.shape[0] * 2 + 12, 4
    )
    return probs * 2 + sizes.sum(), slot, source


def test_compiles_without_graph_breaks_or_recompiling(device: torch.device) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for step, tokens in enumerate([16, 16, 24, 40]):
        generator = torch.Generator().manual_seed(step)
        indices = torch.randint(-1, 4, (tokens, 2), generator=generator).to(device)
        leaves = [torch.rand(tokens, 2).to(device) for _ in range(2)]
        leaves[1].copy_(leaves[0])
        outputs = [
            f(leaf.requires_grad_(), indices) for f, leaf in zip((compiled, layer), leaves, strict=True)
        ]
        for output in outputs:
            output[0].square().sum().backward()
        for a, b in zip(*outputs, strict=True):
            assert_same_bits(a, b)
        assert_same_bits(leaves[0].grad, leaves[1].grad)
    assert graphs.frame_count == 2  # once more when the number of tokens first changes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 4096])
def test_graph_replays_with_new_routing(tokens: int) -> None:
    indices = torch.zeros(tokens, 2, dtype=torch.int32, device="cuda")
    weights = torch.zeros(tokens, 2, device="cuda")
    layer(weights, indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(weights, indices)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        indices.copy_(torch.randint(-1, 4, (tokens, 2), generator=generator))
        weights.copy_(torch.rand(tokens, 2, generator=generator))
        graph.replay()
        for a, b in zip(captured, layer(weights, indices), strict=True):
            assert_same_bits(a, b)
