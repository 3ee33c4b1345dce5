"""A whole MoE layer on a GPU: one CUDA graph for every routing, in every recipe, and the memory of a training step."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.nn.moe_cases import CASES, NAMES, Case, layer_of, run, tokens_of
from tests.ops.on_gpu import most_memory
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.gpu
CAPTURED = [c for c in CASES if c.name in ("natural", "padded and dropped rows", "odd widths")]


@pytest.mark.parametrize("case", CAPTURED, ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_every_routing(name: str, case: Case) -> None:
    """Captured once; replayed with three other routings, one of them with all tokens to the same experts: the bits of
    eager steps."""
    case, device, dtype = case.fitting(name), torch.device("cuda"), torch.bfloat16
    layer = layer_of(case, name, dtype, device)
    twin = copy.deepcopy(layer)
    tokens, grad = tokens_of(case, dtype, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(layer, lambda x: layer(x).output, tokens, grad)
    torch.cuda.current_stream().wait_stream(stream)
    run(twin, lambda x: twin(x).output, tokens, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(layer, lambda x: layer(x).output, tokens, grad)
    loads = []
    for seed in (1, 2, 3):
        others = tokens_of(case, dtype, device, seed)
        if seed == 2:
            others[0].copy_(others[0][:1].clone().expand_as(others[0]))
        for held, value in zip((tokens, grad), others, strict=True):
            held.copy_(value)
        graph.replay()
        expected = run(twin, lambda x: twin(x).output, *others)
        for key, value in expected.items():
            assert_same_bits(got[key], value, f"{key}, routing {seed}")
        loads.append(layer.router(others[0]).expert_load.tolist())
    assert loads[1].count(case.tokens) == case.topk


#: the proportions of a layer of Qwen3-30B. Weight gradients are added to buffers that exist before the step.
LARGE = Case("large", tokens=2048, hidden=2048, ffn=768, experts=16, topk=8)


def test_memory_of_a_step() -> None:
    """A bfloat16 step takes at most the memory of: three times the tokens (the output, the gradient of the tokens, and
    one of the two in its making), the output of the first product, the activation, and one copy of the rows.

    In bytes, with T tokens, R rows including padding, H and F columns: ``2 * (3 * T * H + R * (2 * F + F + H))``, and
    5 % for logits, slots and sums.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU copies the rows")
    device, dtype = torch.device("cuda"), torch.bfloat16
    layer = layer_of(LARGE, "none", dtype, device, fuse_wgrad_accumulation=True)
    for weight in (layer.experts.fc1.weight, layer.experts.fc2.weight):
        weight.main_grad = torch.zeros(weight.shape, device=device)
    tokens, grad = tokens_of(LARGE, dtype, device)
    leaf = tokens.requires_grad_()

    def step() -> None:
        layer(leaf).output.backward(grad)
        leaf.grad, layer.router.weight.grad = None, None

    alignment = layer.dispatcher.alignment_of(LARGE.tokens * LARGE.topk, True)
    rows = LARGE.tokens * LARGE.topk + LARGE.experts * (alignment - 1)
    bound = 2 * (3 * LARGE.tokens * LARGE.hidden + rows * (3 * LARGE.ffn + LARGE.hidden))
    used = most_memory(step)
    assert used <= 1.05 * bound, f"{used / 2**20:.1f} MiB, allowed {1.05 * bound / 2**20:.1f} MiB"
