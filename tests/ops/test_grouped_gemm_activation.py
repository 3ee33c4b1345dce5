"""grouped_gemm_activation and its gradients: float64 results, the bits of the separate steps, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import poison, rows_fp64
from transformer_plugin import ops, reference
from transformer_plugin.activations import Activation
from transformer_plugin.reference.gemm_activation import halves_apart
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_activation_cases import grouped_gemm_activation_cases
from transformer_plugin.testing.gemm_cases import normals, poison_tail
from transformer_plugin.testing.numerics import assert_close_in_ulp, assert_rounded_sum, assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn
EXACT, RANDOM = list(grouped_gemm_activation_cases()), list(grouped_gemm_activation_cases(normals))
_ops = torch.ops.transformer_plugin


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def with_zero_tail(rows: Tensor, sizes: Tensor) -> Tensor:
    rows = rows.clone()
    rows[int(sizes.sum()) :] = 0
    return rows


def columns_fp64(h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Splits the columns of h into gate and linear part, computed column by column."""
    features, interleave = h.shape[1] // 2, Activation.parse(activation).interleave
    at = [j if not interleave else j // 32 * 64 + j % 32 for j in range(features)]
    step = interleave or features
    gate, linear = torch.tensor(at, dtype=torch.long), torch.tensor([j + step for j in at], dtype=torch.long)
    return h.double()[:, gate.to(h.device)], h.double()[:, linear.to(h.device)]


def swiglu_fp64(h: Tensor, probs: Tensor | None, activation: str) -> Tensor:
    gate, linear = columns_fp64(h, activation)
    return gate / (1 + torch.exp(-gate)) * linear * (1 if probs is None else probs.double()[:, None])


def ulp_of(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float32 else 1


@each(EXACT)
def test_output_agrees_with_float64(case: Case, device: torch.device) -> None:
    """Sums are exact, so h must agree to the last bit. The expected output is SwiGLU of the rounded h."""
    a, b, sizes, probs, bias, activation = case.arguments()
    h = rows_fp64(a, b, sizes, bias, None, True).to(a.dtype)
    expected = with_zero_tail(swiglu_fp64(h, probs, activation), sizes)
    act, kept = reference.grouped_gemm_activation(a, b, sizes, probs, bias, activation)
    assert_same_bits(kept + 0, h, "h of the reference")
    assert_close_in_ulp(act, expected, ulp=ulp_of(a.dtype), name="act of the reference")
    arguments = case.arguments(device)
    poison(tuple(h.shape), h.dtype, device)
    poison(tuple(expected.shape), h.dtype, device)
    act, kept = ops.grouped_gemm_activation(*arguments)
    assert_same_bits(kept + 0, h.to(device), "h")
    assert_close_in_ulp(act, expected.to(device), ulp=ulp_of(a.dtype), name="act")
    tail = act[int(sizes.sum()) :]
    assert_same_bits(tail, torch.zeros_like(tail), "tail")


@each(RANDOM)
def test_output_has_the_bits_of_the_steps(case: Case, device: torch.device) -> None:
    a, b, sizes, probs, bias, activation = case.arguments(device)
    act, h = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation)
    assert_same_bits(h, ops.grouped_gemm(a, b, sizes, bias), "h")
    assert_same_bits(act, with_zero_tail(ops.activation(halves_apart(h, activation), probs), sizes), "act")
    alone, none = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation, keep_input=False)
    assert_same_bits(alone, act, "act without h")
    assert none.shape == (0, b.shape[1]) and none.dtype == a.dtype
    few = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation, True, 6, 10)
    for got, expected in zip(few, (act, h), strict=True):
        assert_same_bits(got, expected, "with max_sms")
    exact = rows_fp64(a, b, sizes, bias, None, True)
    magnitude = rows_fp64(a.abs(), b.abs(), sizes, None if bias is None else bias.abs(), None, True)
    assert_rounded_sum(h, exact, magnitude, a.shape[1] + 1, "h")


def steps(
    a: Tensor, b: Tensor, sizes: Tensor, probs: Tensor | None, bias: Tensor | None, activation: str
) -> Tensor:
    h = ops.grouped_gemm(a, b, sizes, bias)
    return ops.activation(halves_apart(h, activation), probs)


def gradients(
    function: Callable[..., Tensor], arguments: tuple[Any, ...], grad: Tensor, wanted: tuple[int, ...]
) -> list[Tensor]:
    given = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
    leaves = [given[i].requires_grad_() for i in wanted if given[i] is not None]
    return list(torch.autograd.grad(function(*given), leaves, grad))


@pytest.mark.parametrize("keep_input", [True, False], ids=["kept", "again"])
@each([case for i, case in enumerate(RANDOM) if i % 3 != 2])
def test_gradient_has_the_bits_of_the_steps(case: Case, keep_input: bool, device: torch.device) -> None:
    """The gradients have the bits of the separate steps, although the tail of the output gradient is NaN."""
    arguments = case.arguments(device)
    a, b, sizes, probs, bias, _ = arguments
    shape = (a.shape[0], b.shape[1] // 2)
    grad = normals(shape, a.dtype, device, torch.Generator().manual_seed(2))
    poison_tail(grad, tuple(sizes.tolist()))
    wanted = (0, 1, 3, 4)
    got = gradients(
        lambda *given: ops.grouped_gemm_activation(*given, keep_input=keep_input)[0], arguments, grad, wanted
    )
    expected = gradients(steps, arguments, grad, wanted)
    names = [
        name
        for name, t in zip(["a", "b", "probs", "bias"], (a, b, probs, bias), strict=True)
        if t is not None
    ]
    for tensor, exact, name in zip(got, expected, names, strict=True):
        assert_same_bits(tensor, with_zero_tail(exact, sizes) if name == "probs" else exact, name)


@pytest.mark.parametrize("both", [True, False])
def test_gradient_through_h(both: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = (70, 16), (2, 128, 16), (70,), (2, 128), (70, 128)
    a, b, probs, bias, grad = (normals(s, torch.bfloat16, device, generator) for s in shapes)
    sizes, wanted = torch.tensor([40, 23], device=device), (0, 1, 4)
    arguments = (a, b, sizes, probs.float(), bias, "swiglu:interleave=32")
    poison_tail(grad, (63,))

    def fused(*given: Any) -> Tensor:
        act, h = ops.grouped_gemm_activation(*given)
        return torch.cat([act, h], 1)[:, 0 if both else 64 :]

    def separate(a: Tensor, b: Tensor, sizes: Tensor, probs: Tensor, bias: Tensor, activation: str) -> Tensor:
        h = ops.grouped_gemm(a, b, sizes, bias)
        act = ops.activation(halves_apart(h, activation), probs)
        return torch.cat([act, h], 1)[:, 0 if both else 64 :]

    grad = torch.cat([grad[:, :64], grad], 1)[:, 0 if both else 64 :]
    expected = gradients(separate, arguments, grad, wanted)
    for got, exact in zip(gradients(fused, arguments, grad, wanted), expected, strict=True):
        assert_same_bits(got, exact)


@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (4,), (3, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("keep_input", [True, False], ids=["kept", "again"])
def test_only_requested_gradients_are_computed(
    wanted: tuple[int, ...], keep_input: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = (6, 5), (2, 8, 5), (6,), (2, 8)
    a, b, probs, bias = (normals(s, torch.float32, device, generator) for s in shapes)
    arguments = [a, b, torch.tensor([2, 3], device=device), probs, bias]
    for i in wanted:
        arguments[i].requires_grad_()
    ops.grouped_gemm_activation(*arguments, keep_input=keep_input)[0].sum().backward()
    doubles = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in arguments]
    exact = swiglu_fp64_of(doubles)
    exact.sum().backward()
    for i in (0, 1, 3, 4):
        if i in wanted:
            torch.testing.assert_close(
                arguments[i].grad.double(), doubles[i].grad, rtol=1e-5, atol=1e-5, msg=str(i)
            )
        else:
            assert arguments[i].grad is None


def swiglu_fp64_of(doubles: list[Tensor]) -> Tensor:
    a, b, sizes, probs, bias = doubles
    h = rows_fp64(a, b, sizes, bias, None, True)
    end = int(sizes.sum())
    return swiglu_fp64(h[:end], probs[:end], "swiglu")


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = [normals(s, torch.bfloat16, device, generator) for s in ((12, 64), (2, 32, 64))]
    a, b = wide[0][::2, ::2], wide[1].transpose(1, 2)[:, :, :32]
    probs = torch.rand(12, generator=generator).to(device)[::2]
    sizes = torch.tensor([3, 2], device=device)
    for got, expected in zip(
        ops.grouped_gemm_activation(a, b, sizes, probs, None, "swiglu:interleave=32"),
        ops.grouped_gemm_activation(
            a.contiguous(), b.contiguous(), sizes, probs.contiguous(), None, "swiglu:interleave=32"
        ),
        strict=True,
    ):
        assert_same_bits(got, expected)


def some(cases: list[Case]) -> list[Case]:
    """opcheck reads no values: every shape in float32, and a few in each other dtype, are enough."""
    return [case for i, case in enumerate(cases) if case.name.startswith("float32") or i % 5 == 0]


@each(some(EXACT))
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(_ops.grouped_gemm_activation.default, arguments)
    opcheck(_ops.grouped_gemm_activation.default, (*arguments, False))
    for i in (0, 1, 3, 4):
        if arguments[i] is not None:
            arguments[i].requires_grad_()
    opcheck(_ops.grouped_gemm_activation.default, arguments)


def mlp(x: Tensor, w1: Tensor, w2: Tensor, sizes: Tensor, probs: Tensor, activation: str) -> Tensor:
    act, _ = ops.grouped_gemm_activation(x, w1, sizes, probs, None, activation)
    return ops.grouped_gemm(act, w2, sizes)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
def test_compiles_without_graph_breaks(activation: str, device: torch.device) -> None:
    """One graph serves any sizes and numbers of rows, forward and backward, with the bits of eager mode."""
    torch._dynamo.reset()
    fast = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for rows, sizes in ((24, (5, 0, 16)), (40, (40, 0, 0)), (17, (0, 3, 9))):
        shapes = (rows, 16), (3, 128, 16), (3, 16, 64)
        x, w1, w2 = (normals(s, torch.bfloat16, device, generator) for s in shapes)
        probs = torch.rand(rows, generator=generator).to(device)
        group_sizes, grad = torch.tensor(sizes, device=device), torch.ones_like(x)
        arguments = x, w1, w2, group_sizes, probs, activation
        wanted = (0, 1, 2, 4)
        expected = gradients(mlp, arguments, grad, wanted)
        for got, exact in zip(gradients(fast, arguments, grad, wanted), expected, strict=True):
            assert_same_bits(got, exact)
        assert_same_bits(fast(*arguments), mlp(*arguments))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
def test_graph_replays_with_new_sizes_and_data(activation: str) -> None:
    device, rows, features, k = torch.device("cuda"), 700, 160, 136

    def draw(seed: int, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        shapes = (rows, k), (4, 2 * features, k)
        a, b = (normals(s, torch.bfloat16, device, generator) for s in shapes)
        probs = poison_tail(torch.rand(rows, generator=generator), sizes).to(device)
        return (
            poison_tail(a, sizes),
            b,
            torch.tensor(sizes, device=device),
            probs,
        )

    def run(a: Tensor, b: Tensor, sizes: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return ops.grouped_gemm_activation(a, b, sizes, probs, None, activation)

    held = draw(0, (100, 0, 300, 57))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*held)
    replays = [(700, 0, 0, 0), (0, 0, 0, 0), (1, 2, 3, 5), (129, 127, 1, 443), (0, 64, 0, 65)]
    for seed, sizes in enumerate(replays, start=1):
        new = draw(seed, sizes)
        for target, source in zip(held, new, strict=True):
            target.copy_(source)
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        a, b, group_sizes, probs = new
        h = ops.grouped_gemm(a, b, group_sizes)
        act = with_zero_tail(ops.activation(halves_apart(h, activation), probs), group_sizes)
        for got, exact, name in zip(captured, (act, h), ("act", "h"), strict=True):
            assert_same_bits(got, exact, name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_calls_do_not_synchronize(dtype: torch.dtype) -> None:
    """Runs a forward and a backward; synchronization is an error."""
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    shapes = (96, 64), (3, 128, 64), (3, 64, 64)
    x, w1, w2 = (normals(s, dtype, device, generator).requires_grad_() for s in shapes)
    probs = torch.rand(96, device=device, requires_grad=True)
    sizes = torch.tensor([32, 0, 48], device=device)
    grad = torch.ones(96, 64, dtype=dtype, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for activation in ("swiglu", "swiglu:interleave=32"):
            mlp(x, w1, w2, sizes, probs, activation).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@each([case for case in RANDOM if not case.name.startswith("float32")])
def test_repeated_calls_give_the_same_bits(case: Case) -> None:
    arguments = case.arguments("cuda")
    first = ops.grouped_gemm_activation(*arguments)
    for _ in range(20):
        for got, expected in zip(ops.grouped_gemm_activation(*arguments), first, strict=True):
            assert_same_bits(got, expected)
