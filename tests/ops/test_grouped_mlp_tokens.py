"""grouped_mlp of tokens: the bits of permute_rows, grouped_mlp of the rows and unpermute, in every format; and what the
forward keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from tests.ops.test_grouped_mlp import FORMATS, ONE_OF_A_FAMILY, Formats
from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

_op = torch.ops.transformer_plugin.grouped_mlp.default
TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 40, 64, 96, 6, 3
NAMES = ("input", "fc1_weight", "fc2_weight", "probs", "fc1_bias", "fc2_bias")


def routed(
    device: torch.device, *, capacity: int | None = None, alignment: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, sources, sizes and probabilities. Expert 0 has no token, one choice is masked; rows are padded."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(1)[:, :TOPK] + 1
    indices[3, 1] = -1
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    if capacity is None:
        capacity = TOKENS * TOPK + EXPERTS * (alignment - 1)
        capacity = -(-capacity // 16) * 16
    slot, source, sizes, _, probs = ops.assign_weighted_slots(
        indices.to(device), weights.to(device), 0, EXPERTS, capacity, alignment
    )
    return slot, source, sizes, probs


def operands(device: torch.device, dtype: torch.dtype, bias: bool) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(device, dtype)

    return {
        "input": draw(TOKENS, HIDDEN),
        "fc1_weight": draw(EXPERTS, 2 * FFN, HIDDEN, scale=HIDDEN**-0.5),
        "fc2_weight": draw(EXPERTS, HIDDEN, FFN, scale=FFN**-0.5),
        "fc1_bias": draw(EXPERTS, 2 * FFN) if bias else None,
        "fc2_bias": draw(EXPERTS, HIDDEN) if bias else None,
    }


def of_tokens(slot: Tensor, source: Tensor, arguments: tuple[Any, ...], formats: Formats) -> Tensor:
    return ops.grouped_mlp(*arguments, *formats, slot=slot, source=source)


def of_rows(slot: Tensor, source: Tensor, arguments: tuple[Any, ...], formats: Formats) -> Tensor:
    rows = ops.permute_rows(arguments[0], slot, source)
    return ops.unpermute(ops.grouped_mlp(rows, *arguments[1:], *formats), slot, source)


def run(
    function: Any, device: torch.device, formats: Formats, wanted: tuple[str, ...], bias: bool, **routing: Any
) -> dict[str, Tensor]:
    """The output and the gradients in `wanted`."""
    dtype = torch.bfloat16
    slot, source, sizes, probs = routed(device, **routing)
    given = {**operands(device, dtype, bias), "probs": probs.detach()}
    leaves = {k: None if t is None else t.clone().requires_grad_(k in wanted) for k, t in given.items()}
    torch.manual_seed(5)
    arguments = (leaves["input"], leaves["fc1_weight"], leaves["fc2_weight"], sizes, leaves["probs"])
    output = function(slot, source, (*arguments, leaves["fc1_bias"], leaves["fc2_bias"]), formats)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(device, dtype)
    named = {k: t for k, t in leaves.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad(output, list(named.values()), grad)
    return {"output": output, **dict(zip(named, grads, strict=True))}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_bits_of_the_steps(formats: Formats, bias: bool, device: torch.device) -> None:
    got = run(of_tokens, device, formats, NAMES, bias)
    for name, expected in run(of_rows, device, formats, NAMES, bias).items():
        assert_same_bits(got[name], expected, name)


@pytest.mark.parametrize("capacity", [0, 48, 96])
def test_dropped_rows(capacity: int, device: torch.device) -> None:
    got = run(of_tokens, device, FORMATS["none"], NAMES, False, capacity=capacity)
    for name, expected in run(of_rows, device, FORMATS["none"], NAMES, False, capacity=capacity).items():
        assert_same_bits(got[name], expected, name)


@pytest.mark.parametrize("left_out", NAMES[:4])
@pytest.mark.parametrize("formats", ONE_OF_A_FAMILY.values(), ids=ONE_OF_A_FAMILY.keys())
def test_one_gradient_is_not_wanted(formats: Formats, left_out: str, device: torch.device) -> None:
    wanted = tuple(name for name in NAMES if name != left_out)
    got = run(of_tokens, device, formats, wanted, True)
    for name, expected in run(of_rows, device, formats, wanted, True).items():
        assert_same_bits(got[name], expected, name)


def test_float64_agrees(device: torch.device) -> None:
    """Each token: the sum over its experts of probability times fc2(silu(gate) * linear), in float64."""
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.float32, False)
    x, fc1, fc2 = (given[name] for name in ("input", "fc1_weight", "fc2_weight"))
    output = ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source)
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    expert_of = torch.repeat_interleave(torch.arange(EXPERTS), sizes.cpu())
    for row, expert in enumerate(expert_of.tolist()):
        token = int(source[row])
        if token < 0:
            continue
        gate, linear = (fc1[expert].double().cpu() @ x[token].double().cpu()).chunk(2)
        act = torch.nn.functional.silu(gate) * linear * probs[row].double().cpu()
        expected[token] += fc2[expert].double().cpu() @ act
    assert relative_error(output.cpu(), expected) < 1e-5
    host = [t.cpu() for t in (x, fc1, fc2, sizes, probs)]
    wanted = reference.grouped_mlp(*host, slot=slot.cpu(), source=source.cpu())
    assert relative_error(output.cpu(), wanted) < 1e-5


def test_forward_keeps_tokens_and_not_rows(device: torch.device) -> None:
    """Without formats nothing of [capacity, H] is saved for the backward."""
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.bfloat16, False)
    saved: list[tuple[int, ...]] = []
    x, fc1, fc2 = (given[name].requires_grad_() for name in ("input", "fc1_weight", "fc2_weight"))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source)
    assert (source.shape[0], HIDDEN) not in saved and (TOKENS, HIDDEN) in saved
    assert saved.count((source.shape[0], 2 * FFN)) == 1 and saved.count((source.shape[0], FFN)) == 1


def test_caller_buffers(device: torch.device) -> None:
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.bfloat16, False)
    x, fc1, fc2 = (given[name].requires_grad_() for name in ("input", "fc1_weight", "fc2_weight"))
    expected = ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source)
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    out, dgrad_out = torch.full_like(expected, float("nan")), torch.full_like(wanted, float("nan"))
    maps = {"slot": slot, "source": source, "dgrad_out": dgrad_out}
    ops.grouped_mlp_out(x, fc1, fc2, sizes, probs, out, **maps)
    assert_same_bits(out, expected)
    (got,) = torch.autograd.grad(out, x, grad)
    assert_same_bits(got, wanted)
    assert_same_bits(dgrad_out, wanted)


def test_deferred_weight_gradients(device: torch.device) -> None:
    """A queue keeps the tokens and the index; the gradients have the bits of those that are computed at once."""
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.bfloat16, False)
    x, fc1, fc2 = (given[name].requires_grad_() for name in ("input", "fc1_weight", "fc2_weight"))
    output = ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [fc1, fc2], grad)
    queues = [ops.new_wgrad_queue() for _ in range(2)]
    later = {"fc1_wgrad_queue": queues[0], "fc2_wgrad_queue": queues[1]}
    deferred = ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source, **later)
    deferred.backward(grad)
    for queue, wanted in zip(queues, expected, strict=True):
        into = torch.zeros(wanted.shape, device=device, dtype=torch.bfloat16)
        ops.run_deferred_wgrads(queue, into)
        assert_same_bits(into, wanted + 0)
        ops.release_wgrad_queue(queue)


def test_compiles_and_takes_other_routings(device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    given = operands(device, torch.bfloat16, False)
    x, fc1, fc2 = (given[name].requires_grad_() for name in ("input", "fc1_weight", "fc2_weight"))

    def step(slot: Tensor, source: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        return ops.grouped_mlp(x, fc1, fc2, sizes, probs, slot=slot, source=source)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for seed in range(3):
        maps = routed(device, seed=seed)
        got, expected = compiled(*maps), step(*maps)
        grad = torch.randn_like(got)
        assert_same_bits(got, expected)
        leaves = [x, fc1, fc2]
        for a, b in zip(
            torch.autograd.grad(got, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
        ):
            assert_same_bits(a, b)
    assert counter.frame_count == 1


def test_opcheck(device: torch.device) -> None:
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.bfloat16, False)
    x, fc1, fc2 = (given[name] for name in ("input", "fc1_weight", "fc2_weight"))
    maps = {"slot": slot, "source": source}
    opcheck(_op, (x, [fc1], [fc2], sizes, probs.detach()), maps)
    opcheck(_op, (x.requires_grad_(), [fc1.requires_grad_()], [fc2], sizes, probs.detach()), maps)


def test_wrong_maps(device: torch.device) -> None:
    slot, source, sizes, probs = routed(device)
    given = operands(device, torch.bfloat16, False)
    arguments = (given["input"], given["fc1_weight"], given["fc2_weight"], sizes, probs)
    with pytest.raises(
        ValueError, match=r"grouped_mlp: argument 'source': expected both maps .* got one of them"
    ):
        ops.grouped_mlp(*arguments, slot=slot)
    with pytest.raises(ValueError, match=r"grouped_mlp: argument 'slot': expected both maps"):
        ops.grouped_mlp(*arguments, source=source)
    with pytest.raises(TypeError, match=r"grouped_mlp: argument 'slot': expected .*int32"):
        ops.grouped_mlp(*arguments, slot=slot.long(), source=source)
    with pytest.raises(ValueError, match=r"grouped_mlp: argument 'slot': expected .*the rows of 'input'"):
        ops.grouped_mlp(*arguments, slot=slot[1:], source=source)
    with pytest.raises(
        ValueError, match=r"grouped_mlp: argument 'probs': expected .*the entries of 'source'"
    ):
        ops.grouped_mlp(*arguments, slot=slot, source=source[16:].contiguous())
