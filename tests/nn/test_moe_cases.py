"""A whole MoE layer in every recipe and for every kind of routing: the bits of its steps, and float64.

Steps: the router, slots, a copy of the tokens for each expert, the two products with SwiGLU between them, and the sums.
The layer runs in memory that was NaN before, so that reads of rows that nothing has written have an effect.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.nn.moe_cases import (
    CASES,
    NAMES,
    Case,
    bounds,
    in_float64,
    layer_of,
    leave_nan,
    poisoned,
    run,
    tokens_of,
)
from transformer_plugin import ops
from transformer_plugin.nn import MoE, TopKRouter
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_name = pytest.mark.parametrize("name", NAMES)
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def test_fresh_memory_is_nan(device: torch.device) -> None:
    """What the tests below rely on."""
    with poisoned():
        assert bool(torch.empty(100, device=device).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def steps(layer: MoE, tokens: Tensor) -> Tensor:
    """What the layer does, one op after the other."""
    router, experts = layer.router, layer.experts
    routing, tokens = router.route(tokens) if isinstance(router, TopKRouter) else (router(tokens), tokens)
    multiple = layer.dispatcher.row_multiple
    alignment = layer.dispatcher.alignment_of(routing.indices.numel(), tokens.is_cuda)
    capacity = layer.dispatch.capacity
    if capacity is None:
        capacity = routing.indices.numel() + layer.num_experts * (alignment - 1)
        capacity = -(-capacity // multiple) * multiple
    slot, source, sizes, _, probs = ops.assign_weighted_slots(
        routing.indices, routing.weights, 0, layer.num_experts, capacity, alignment
    )
    rows = ops.permute_rows(tokens, slot, source)
    activation = ops.activation(experts.fc1(rows, sizes), probs)
    return ops.unpermute(experts.fc2(activation, sizes, probs if layer.bias else None), slot, source)


@by_case
@by_dtype
@by_name
def test_bits_of_the_steps(name: str, dtype: torch.dtype, case: Case, device: torch.device) -> None:
    case = case.fitting(name)
    layer, twin = (layer_of(case, name, dtype, device) for _ in range(2))
    tokens, grad = tokens_of(case, dtype, device)
    expected = run(twin, lambda x: steps(twin, x), tokens, grad)
    leave_nan(device)
    got = run(layer, lambda x: layer(x).output, tokens, grad)
    for key, value in expected.items():
        assert_same_bits(got[key], value, key)


@by_case
@by_dtype
@by_name
def test_float64(name: str, dtype: torch.dtype, case: Case, device: torch.device) -> None:
    case = case.fitting(name)
    layer = layer_of(case, name, dtype, device)
    tokens, grad = tokens_of(case, dtype, device)
    with poisoned():
        got = run(layer, lambda x: layer(x).output, tokens, grad)
    of_output, of_gradients = bounds(name, dtype)
    expected = in_float64(case, name, layer, tokens, grad)
    for key, value in expected.items():
        mine, bound = got[key].cpu(), of_output if key == "output" else of_gradients
        # Tokens without a row, experts without one, and experts that were not chosen.
        assert not mine[value == 0].any(), f"{key}: not 0 where nothing was added"
        error = relative_error(mine, value)
        if case.tokens == 1 and key == "router.weight":
            # From the difference of two products of the gradient and a row, both far smaller than their factors.
            error = float(
                (mine.double() - value).norm() / (expected["output"].norm() * grad.norm() * tokens.norm())
            )
        assert error <= bound, f"{key}: relative error {error:.2e}, allowed {bound:.2e}"


NAN = 5  # the token whose logits are NaN


def with_nan_logits(layer: MoE, tokens: Tensor, kind: str) -> Tensor:
    """Returns tokens of which one has NaN logits: by a NaN, or by finite operands whose products are infinite."""
    tokens = tokens.clone()
    if kind == "token":
        tokens[NAN, 7] = torch.nan
        return tokens
    tokens[:, :2] = 0.0
    tokens[NAN, :2] = 4.0
    with torch.no_grad():
        layer.router.weight[:, 0], layer.router.weight[:, 1] = 3e38, -3e38
    return tokens


@pytest.mark.parametrize("kind", ["token", "overflow"])
@by_dtype
@by_name
def test_nan_logits(name: str, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """A token with NaN logits has the first experts, and NaN as output and gradient, but in nvfp4, which has no NaN,
    as output. No other token is affected, and no expert but those two."""
    case = CASES[0].fitting(name)
    layer, twin = (layer_of(case, name, dtype, device) for _ in range(2))
    tokens, grad = tokens_of(case, dtype, device)
    if kind == "overflow" and dtype == torch.bfloat16 and device.type == "cuda":
        pytest.skip(
            "tensor cores subtract products beyond float32's range exactly, so these logits are finite"
        )
    bad = with_nan_logits(layer, with_nan_logits(twin, tokens, kind), kind)
    routing = layer.router(bad)
    assert routing.indices[NAN].tolist() == [0, 1] and bool(routing.weights[NAN].isnan().all())
    expected = run(twin, lambda x: steps(twin, x), bad, grad)
    with poisoned():
        got = run(layer, lambda x: layer(x).output, bad, grad)
    for key, value in expected.items():
        assert torch.equal(got[key].isnan(), value.isnan()), key
        assert_same_bits(got[key].nan_to_num(7.0), value.nan_to_num(7.0), key)
    assert bool(got["tokens"][NAN].isnan().all()) and bool(got["router.weight"][:2].isnan().all())
    assert bool(got["output"][NAN].isnan().all()) == (name != "nvfp4")
    good, grad = bad.clone(), grad.clone()
    good[NAN], grad[NAN] = 0.0, 0.0  # a token with the same experts, whose gradients are 0
    others = [token for token in range(case.tokens) if token != NAN]
    of_output, of_gradients = bounds(name, dtype)
    for key, value in in_float64(case, name, layer, good, grad).items():
        mine = got[key].cpu()
        if key in ("output", "tokens"):
            mine, value = mine[others, 2:], value[others, 2:]
        elif key == "router.weight":  # 0 times NaN is NaN in the columns where the token is NaN
            assert kind == "token" or bool(mine[2:].isfinite().all())
            mine, value = mine[2:, 8:], value[2:, 8:]
        else:
            mine, value = mine[2:], value[2:]
        error, bound = relative_error(mine, value), of_output if key == "output" else of_gradients
        assert error <= bound, f"{key}: relative error {error:.2e}, allowed {bound:.2e}"


#: each in one of the ways in which rows are left out.
SOME_NAMES = ("natural", "padded and dropped rows", "masked", "odd widths")
SOME = [case for case in CASES if case.name in SOME_NAMES]
by_some = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
#: delayed scaling refuses main_grad and delayed weight gradients.
by_other_name = pytest.mark.parametrize("name", [name for name in NAMES if name != "fp8_delayed"])
FIRST = 0.25


def weights_of(layer: MoE) -> dict[str, Any]:
    return {key: p for key, p in layer.named_parameters() if key.startswith("experts.fc") and "weight" in key}


def train(layer: MoE, forward: Any, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Outputs, and gradients of the tokens."""
    results = []
    for tokens, grad in batches:
        leaf = tokens.clone().requires_grad_()
        output = forward(leaf)
        output.backward(grad)
        assert leaf.grad is not None
        results += [output.detach(), leaf.grad]
    return results


@by_some
@by_other_name
def test_main_grad(name: str, case: Case, device: torch.device) -> None:
    """Two micro-batches are added to the buffers: the bits of the steps, and float64."""
    case = case.fitting(name)
    dtype = torch.bfloat16
    layer, twin = (layer_of(case, name, dtype, device, fuse_wgrad_accumulation=True) for _ in range(2))
    batches = [tokens_of(case, dtype, device, seed) for seed in range(2)]
    for each in (layer, twin):
        for p in weights_of(each).values():
            p.main_grad = torch.full(p.shape, FIRST, device=device)
    expected = train(twin, lambda x: steps(twin, x), batches)
    with poisoned():
        got = train(layer, lambda x: layer(x).output, batches)
    for mine, value in zip(got, expected, strict=True):
        assert_same_bits(mine, value)
    sums = [in_float64(case, name, layer, *batch) for batch in batches]
    for (key, p), q in zip(weights_of(layer).items(), weights_of(twin).values(), strict=True):
        assert p.grad is None, key
        assert_same_bits(p.main_grad, q.main_grad, key)
        exact = sums[0][key] + sums[1][key]
        error, bound = relative_error(p.main_grad.cpu() - FIRST, exact), bounds(name, dtype)[1]
        assert error <= bound, f"{key}: relative error {error:.2e}, allowed {bound:.2e}"


@pytest.mark.parametrize("into", [False, True], ids=["grad", "main_grad"])
@by_some
@by_other_name
def test_delayed_weight_gradients(name: str, case: Case, into: bool, device: torch.device) -> None:
    """Two backwards, then their weight gradients: the bits of a layer that computes them at once."""
    case = case.fitting(name)
    dtype = torch.bfloat16
    layers = [
        layer_of(case, name, dtype, device, fuse_wgrad_accumulation=into, delay_wgrad_compute=delay)
        for delay in (True, False)
    ]
    batches = [tokens_of(case, dtype, device, seed) for seed in range(2)]
    results = []
    for layer in layers:
        for p in weights_of(layer).values() if into else ():
            p.main_grad = torch.full(p.shape, FIRST, device=device)
        with poisoned():
            results.append(train(layer, lambda x, layer=layer: layer(x).output, batches))
            if layer.delay_wgrad_compute:
                assert layer.need_backward_dw()
                assert all(p.grad is None for p in weights_of(layer).values())
                layer.backward_dw()
                assert not layer.need_backward_dw()
    for mine, value in zip(*results, strict=True):
        assert_same_bits(mine, value)
    for (key, p), q in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None:
            assert_same_bits(p.grad, q.grad, key)
        if hasattr(q, "main_grad"):
            assert_same_bits(p.main_grad, q.main_grad, key)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", SOME[:2], ids=lambda case: case.name)
@by_name
def test_fullgraph(name: str, case: Case, device: torch.device) -> None:
    """One graph for routings of random tokens, and for one where all tokens have the same experts: eager's bits."""
    case = case.fitting(name)
    layer = layer_of(case, name, torch.bfloat16, device)
    twin = copy.deepcopy(layer)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, fullgraph=True, backend=counter)
    batches = [tokens_of(case, torch.bfloat16, device, seed) for seed in range(4)]
    batches[2][0].copy_(batches[2][0][:1].clone().expand_as(batches[2][0]))
    for tokens, grad in batches:
        got = run(layer, lambda x: fast(x).output, tokens, grad)
        for key, value in run(twin, lambda x: twin(x).output, tokens, grad).items():
            assert_same_bits(got[key], value, key)
    assert counter.frame_count == 1
