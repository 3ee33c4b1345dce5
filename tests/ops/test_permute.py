"""permute and unpermute: the reference, float64 sums, gradients, compilation, CUDA graphs, and equal
bits on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.routing_cases import Routing, permute_cases

tp = torch.ops.transformer_plugin
PERMUTE = list(permute_cases())
permute_by_name = pytest.mark.parametrize("case", PERMUTE, ids=lambda case: case.name)
REAL = [case for case in PERMUTE if case.name.split("-")[-1] in ("float32", "bfloat16", "float16", "float64")]
# opcheck reads no values: one case for each kind of shape and dtype is enough.
OPCHECK = [
    case
    for case in PERMUTE
    if case.name.startswith(("no_", "one_token", "aligned_4", "capacity"))
    or case.name.startswith("skewed-96")
]
real_cases = pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)


@permute_by_name
def test_permute_agrees_with_the_reference(case: Case, device: torch.device) -> None:
    got = ops.permute(*case.arguments(device))
    expected = reference.permute(*case.arguments())
    for name, a, b in zip(("rows", "group_sizes", "slot", "source", "total"), got, expected, strict=True):
        assert_same_bits(a, b, name)


def unpermute_fp64(rows: Tensor, slot: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the sum in float64, computed by a loop, and the sum of the absolute values of its terms."""
    output, size = (torch.zeros(slot.shape[0], rows.shape[1], dtype=torch.float64) for _ in range(2))
    for t, row in enumerate(slot.tolist()):
        for k, s in enumerate(row):
            if s >= 0:
                term = rows[s].double() * (1.0 if weights is None else weights[t, k].double())
                output[t] += term
                size[t] += term.abs()
    return output, size


def draw_weights(indices: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(indices.shape, generator=torch.Generator().manual_seed(5), dtype=wide).to(
        indices.device
    )


@real_cases
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_unpermute_agrees_with_float64(case: Case, weighted: bool, device: torch.device) -> None:
    tokens, indices, *layout = case.arguments(device)
    _, _, slot, source, _ = ops.permute(tokens, indices, *layout)
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(layout[1], tokens.shape[1], generator=generator).to(tokens.dtype)
    rows[source.cpu() < 0] = float("nan")  # rows of padding must not be read
    weights = draw_weights(indices, tokens.dtype) if weighted else None
    got = ops.unpermute(rows.to(device), slot, source, weights).cpu()
    host_weights = None if weights is None else weights.cpu()
    expected, size = unpermute_fp64(rows, slot.cpu(), host_weights)
    rounding = torch.finfo(tokens.dtype).eps / 2 if tokens.dtype != torch.float64 else 0.0
    narrow = torch.finfo(torch.float64 if tokens.dtype == torch.float64 else torch.float32).eps
    bound = expected.abs() * rounding + size * narrow * max(slot.shape[1], 1) + 1e-40
    bound = bound + (
        torch.finfo(torch.float16).smallest_normal * 2**-11 if tokens.dtype == torch.float16 else 0
    )
    assert bool(((got.double() - expected).abs() <= bound).all())
    close = reference.unpermute(torch.nan_to_num(rows), slot.cpu(), source.cpu(), host_weights)
    torch.testing.assert_close(got, close)
    # On CUDA: the bits of the CPU.
    assert_same_bits(got, ops.unpermute(rows, slot.cpu(), source.cpu(), host_weights))


def test_unpermute_adds_in_ascending_order_of_slot(device: torch.device) -> None:
    """In float32, 1e8 + 1 - 1e8 is 0 in this order, and 1 in every order that adds the 1 last."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]], device=device)
    source = torch.zeros(3, dtype=torch.int32, device=device)
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
        slot = torch.tensor([order], dtype=torch.int32, device=device)
        assert ops.unpermute(rows, slot, source).item() == 0.0
        assert ops.permute_backward(rows, slot).item() == 0.0
        assert ops.unpermute(rows, slot, source, torch.ones(1, 3, device=device)).item() == 0.0


def test_indices_out_of_range_are_ignored(device: torch.device) -> None:
    slot = torch.tensor([[5, 0], [-7, 2**31 - 1], [1, -1]], dtype=torch.int32, device=device)
    source = torch.tensor([0, 2, 9, -4, 2**31 - 1], dtype=torch.int32, device=device)
    rows = torch.arange(1.0, 6.0, device=device)[:, None].expand(5, 3)
    weights = torch.full((3, 2), 2.0, device=device)
    assert ops.unpermute(rows, slot, source, weights)[:, 0].tolist() == [2.0, 0.0, 4.0]
    grad = torch.tensor([[1.0], [10.0], [100.0]], device=device).expand(3, 3)
    grad_rows, grad_weights = ops.unpermute_backward(grad, rows, slot, source, weights)
    assert grad_rows[:, 0].tolist() == [2.0, 200.0, 0.0, 0.0, 0.0]
    assert grad_weights.tolist() == [[0.0, 3.0], [0.0, 0.0], [600.0, 0.0]]


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("capacity", [0, 5, 40])
@pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (0, 0), (4, 0), (1, 1), (6, 3)])
def test_references_agree_on_the_whole_domain(
    tokens: int, topk: int, capacity: int, width: int, device: torch.device
) -> None:
    """Zero sizes, masked pairs, and infinite and NaN values, both in masked pairs, which must not be read, and in
    others."""
    generator = torch.Generator().manual_seed(tokens + topk)
    indices = torch.randint(-1, 4, (tokens, topk), generator=generator, dtype=torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1.0, -2.0, 3e38, 2**-149])

    def draw(*shape: int) -> Tensor:
        return special[torch.randint(0, len(special), shape, generator=generator)]

    _, _, slot, source, _ = reference.permute(draw(tokens, width), indices, 4, capacity)
    weights = torch.where(slot < 0, torch.inf, draw(tokens, topk))
    rows = draw(capacity, width)
    grad = draw(tokens, width)
    calls = [
        ("permute_backward", (rows, slot)),
        ("unpermute", (rows, slot, source, weights)),
        ("unpermute", (rows, slot, source)),
        ("unpermute_backward", (grad, rows, slot, source, weights)),
        ("unpermute_backward", (grad, None, slot, source, weights)),
        ("unpermute_backward", (grad, None, slot, source)),
        ("count_tokens_per_expert", (indices, 4)),
    ]
    for name, arguments in calls:
        there = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        got, expected = getattr(ops, name)(*there), getattr(reference, name)(*arguments)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=2**-149, equal_nan=True)


@real_cases
def test_gradients_agree_with_the_reference(case: Case, device: torch.device) -> None:
    tokens, indices, *layout = case.arguments(device)
    weights = draw_weights(indices, tokens.dtype)
    generator = torch.Generator().manual_seed(2)

    def run(on: torch.device, module) -> tuple[Tensor, ...]:
        x, w = (t.detach().to(on).requires_grad_() for t in (tokens, weights))
        rows, _, slot, source, _ = module.permute(x, indices.to(on), *layout)
        out = module.unpermute(rows, slot, source, w)
        generator.manual_seed(2)
        grads = [torch.randn(t.shape, generator=generator).to(t.dtype).to(on) for t in (rows, out)]
        return torch.autograd.grad((rows, out), (x, w), grads, materialize_grads=True)

    got, expected = run(device, ops), run(torch.device("cpu"), reference)
    loose = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-6, torch.float64: 1e-13}[
        tokens.dtype
    ]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=loose, atol=loose * 8)
    for a, b in zip(got, run(torch.device("cpu"), ops), strict=True):
        assert_same_bits(a, b)


def test_gradcheck(device: torch.device) -> None:
    indices = torch.tensor([[0, 2], [2, 2], [-1, 1], [0, -1], [1, 0]], device=device)
    tokens = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, device=device, requires_grad=True)
    for capacity, alignment in ((12, 2), (5, 1), (20, 4)):
        _, _, slot, source, _ = ops.permute(tokens, indices, 3, capacity, alignment)
        rows = torch.randn(capacity, 3, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda t, c=capacity, a=alignment: ops.permute(t, indices, 3, c, a)[0], tokens
        )
        assert torch.autograd.gradcheck(
            lambda r, w, m=slot, s=source: ops.unpermute(r, m, s, w), (rows, weights)
        )
        assert torch.autograd.gradcheck(lambda r, m=slot, s=source: ops.unpermute(r, m, s), rows)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_of_few_bytes(dtype: torch.dtype, width: int, device: torch.device) -> None:
    """Also of one word, which a GPU copies by another kernel, and at an address in the middle of a word."""
    generator = torch.Generator().manual_seed(width)
    source = torch.randint(-1, 300, (1000,), generator=generator, dtype=torch.int32)
    slot = torch.full((300, 1), -1, dtype=torch.int32)
    for begin in (0, 1):
        storage = torch.randn(300 * width + begin, generator=generator).to(dtype)
        tokens = storage.to(device)[begin:].view(300, width)
        sizes = torch.tensor([600, 0, 77], device=device)
        expected = reference.permute_rows(storage[begin:].view(300, width), slot, source)
        got = ops.permute_rows(tokens, slot.to(device), source.to(device))
        assert_same_bits(got, expected)
        got = ops.permute_rows(tokens, slot.to(device), source.to(device), sizes)
        assert_same_bits(got[:677], expected[:677])


def test_unpermute_inverts_permute(device: torch.device) -> None:
    routing = Routing("round", 40, 3, 8, 120 + 8 * 3, 4)
    indices = routing.indices(device, torch.Generator().manual_seed(1))
    tokens = torch.randn(40, 33, device=device)
    rows, _, slot, source, _ = ops.permute(tokens, indices, 8, routing.capacity, 4)
    quarters = torch.tensor([0.5, 0.25, 0.25], device=device).expand(40, 3)
    assert_same_bits(ops.unpermute(rows, slot, source, quarters), tokens)


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    tokens = torch.randn(8, 12, device=device)
    indices = torch.randint(0, 4, (2, 12), device=device)[:, ::3].t()[:4].repeat(2, 1)
    strided = torch.randn(8, 24, device=device)[:, ::2].copy_(tokens)
    got = ops.permute(strided, indices.t().contiguous().t(), 4, 16)
    expected = ops.permute(tokens, indices.contiguous(), 4, 16)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
    leaf = tokens.clone().requires_grad_()
    ops.permute(leaf, indices, 4, 16)[0].sum().backward()  # a gradient with stride 0
    assert_same_bits(leaf.grad, torch.full_like(tokens, 2.0))


@pytest.mark.parametrize("case", OPCHECK, ids=lambda case: case.name)
def test_opcheck_permute(case: Case, device: torch.device) -> None:
    tokens, indices, *layout = case.arguments(device)
    if case not in REAL:  # torch cannot compare float8 values, which the other checks require
        opcheck(tp.permute.default, (tokens, indices, *layout), test_utils=("test_faketensor",))
        return
    opcheck(tp.permute.default, (tokens, indices, *layout))
    opcheck(tp.permute.default, (tokens.clone().requires_grad_(), indices, *layout))
    rows, _, slot, source, _ = ops.permute(tokens, indices, *layout)
    weights = draw_weights(indices, tokens.dtype)
    opcheck(tp.permute_backward.default, (rows, slot))
    for w in (None, weights, weights.clone().requires_grad_()):
        opcheck(tp.unpermute.default, (rows, slot, source, w))
        opcheck(tp.unpermute.default, (rows.clone().requires_grad_(), slot, source, w))
    grad = torch.randn_like(tokens)
    opcheck(tp.unpermute_backward.default, (grad, rows, slot, source, weights))
    opcheck(tp.unpermute_backward.default, (grad, None, slot, source, weights))
    opcheck(tp.unpermute_backward.default, (grad, None, slot, source, None))


def layer(tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    rows, sizes, slot, source, _ = ops.permute(tokens, indices, 4, tokens.shape[0] * 2 + 4 * 3, 4)
    return ops.unpermute(rows * rows, slot, source, weights) + sizes.sum()


def test_compiles_without_graph_breaks_or_recompiling(device: torch.device) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for step, tokens in enumerate([16, 16, 16, 24, 40]):
        generator = torch.Generator().manual_seed(step)
        indices = torch.randint(-1, 4, (tokens, 2), generator=generator).to(device)
        x = torch.randn(tokens, 8, generator=generator).to(device)
        w = torch.rand(tokens, 2, generator=generator).to(device)
        leaves = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]
        outputs = [function(*leaf, indices) for function, leaf in zip((compiled, layer), leaves, strict=True)]
        for output in outputs:
            output.square().sum().backward()
        assert_same_bits(*outputs)
        for a, b in zip(*leaves, strict=True):
            assert_same_bits(a.grad, b.grad)
    assert graphs.frame_count == 2  # once more when the number of tokens first changes


@pytest.mark.gpu
def test_graph_replays_with_new_routing() -> None:
    device = torch.device("cuda")
    x = torch.randn(64, 16, device=device, requires_grad=True)
    w = torch.rand(64, 2, device=device, requires_grad=True)
    indices = torch.zeros(64, 2, dtype=torch.int32, device=device)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        output = layer(x, w, indices)
        return output, *torch.autograd.grad(output.square().sum(), (x, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        indices.copy_(torch.randint(-1, 4, (64, 2), generator=generator) if seed else torch.full((64, 2), -1))
        with torch.no_grad():
            x.copy_(torch.randn(64, 16, generator=generator))
            w.copy_(torch.rand(64, 2, generator=generator))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
def test_calls_do_not_synchronize() -> None:
    indices = torch.randint(-1, 4, (64, 2), device="cuda")
    x = torch.randn(64, 8, device="cuda", requires_grad=True)
    w = torch.rand(64, 2, device="cuda", requires_grad=True)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, w, indices).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
