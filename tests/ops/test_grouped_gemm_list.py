"""Grouped products with lists of matrices: exact bits, one rounding, gradients, buffers, no copies, and CUDA
graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import poison, rows_fp64, wgrad_fp64, whole
from tests.ops.on_gpu import captured, most_memory
from tests.ops.test_grouped_gemm import each, one_of_each_kind
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import (
    apart,
    factors,
    grouped_gemm_list_cases,
    grouped_wgrad_list_cases,
    integers,
    normals,
    row_index,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn

EXACT, RANDOM = list(grouped_gemm_list_cases()), list(grouped_gemm_list_cases(normals))
WGRAD_EXACT = list(grouped_wgrad_list_cases())
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_ops = torch.ops.transformer_plugin


@each(EXACT)
def test_exact_sums(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    expected = rows_fp64(a, torch.stack(b), sizes, bias, scale, transpose_b).to(a.dtype)
    got = reference.grouped_gemm(a, b, sizes, bias, scale, transpose_b)
    assert_same_bits(got + 0, expected, "reference")
    arguments = case.arguments(device)
    poison(tuple(expected.shape), a.dtype, device)
    assert_same_bits(ops.grouped_gemm(*arguments) + 0, expected.to(device))


@each(EXACT[::2])
def test_alpha_indexed_rows_and_dtype_have_exact_sums(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments()
    generator = torch.Generator().manual_seed(3)
    alpha = factors(sizes.numel(), CPU, generator)
    more = integers((a.shape[0] // 2 + 1, a.shape[1]), a.dtype, CPU, generator)
    rows = row_index(sizes, a.shape[0], more.shape[0], CPU, generator)
    end = int(sizes.sum())
    taken = torch.zeros_like(a)
    taken[:end] = more[rows[:end].long()]
    exact = rows_fp64(taken, torch.stack(b), sizes, bias, scale, transpose_b, alpha)
    _, b, sizes, bias, scale, transpose_b = case.arguments(device)
    arguments = (more.to(device), b, sizes, bias, scale, transpose_b)
    for dtype in (a.dtype, torch.float32):
        got = ops.grouped_gemm(*arguments, dtype, alpha.to(device), rows.to(device))
        assert_same_bits(got + 0, exact.to(dtype).to(device))


@each(RANDOM)
def test_list_has_the_bits_of_the_stack(case: Case, device: torch.device) -> None:
    """Lists and stacks use the same kernels, except on Blackwell, where torch multiplies stacks and does not
    support lists."""
    a, b, *rest = case.arguments(device)
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("torch._grouped_mm runs there, and takes no list")
    assert_same_bits(ops.grouped_gemm(a, b, *rest), ops.grouped_gemm(a, torch.stack(b), *rest))


def layouts(stack: Tensor) -> dict[str, list[Tensor]]:
    """Returns the same matrices: adjacent, with gaps, in another order in memory, one of them elsewhere,
    transposed, unaligned."""
    groups, n, k = stack.shape
    gaps = torch.full((groups, n + 3, k), float("nan"), dtype=stack.dtype, device=stack.device)
    gaps[:, :n] = stack
    off = list(gaps[:, :n].unbind())
    off[1] = off[1].clone()
    odd = torch.empty(groups, n * k + 1, dtype=stack.dtype, device=stack.device)
    odd[:, 1:] = stack.flatten(1)
    return {
        "stack": list(stack.unbind()),
        "gaps": list(gaps[:, :n].unbind()),
        "other order": list(stack.flip(0).unbind())[::-1],
        "one elsewhere": off,
        "transposed": list(stack.transpose(1, 2).contiguous().transpose(1, 2).unbind()),
        "unaligned": [row[1:].view(n, k) for row in odd],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transpose_b", [True, False])
def test_matrices_at_any_address(transpose_b: bool, dtype: torch.dtype, device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([130, 0, 7, 3])
    a, b = integers((150, 72), dtype, CPU, generator), integers((4, 40, 72), dtype, CPU, generator)
    b = b if transpose_b else b.transpose(1, 2).contiguous()
    expected = rows_fp64(a, b, sizes, None, None, transpose_b).to(dtype).to(device)
    a, b, sizes = a.to(device), b.to(device), sizes.to(device)
    for name, matrices in layouts(b).items():
        got = ops.grouped_gemm(a, matrices, sizes, transpose_b=transpose_b)
        assert_same_bits(got + 0, expected, name)


def test_one_matrix_for_all_groups(device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([3, 2, 4], device=device)
    a, b = (integers(s, torch.float32, device, generator).requires_grad_() for s in ((9, 16), (8, 16)))
    output = ops.grouped_gemm(a, [b, b, b], sizes)
    assert_same_bits(output + 0, (a.detach().double() @ b.detach().double().T).float() + 0)
    output.sum().backward()
    assert b.grad is not None
    assert_same_bits(b.grad + 0, a.detach().sum(0).expand(8, 16) + 0)


@pytest.mark.parametrize("groups", [128, 129, 1024])
def test_largest_numbers_of_matrices(groups: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([g % 3 for g in range(groups)])
    rows = int(sizes.sum()) + 2
    a, grad = (integers((rows, width), torch.bfloat16, CPU, generator) for width in (24, 16))
    b = integers((groups, 16, 24), torch.bfloat16, CPU, generator)
    expected = rows_fp64(a, b, sizes, None, None, True).to(torch.bfloat16)
    product = wgrad_fp64(grad, a, sizes)
    a, b, grad, sizes = (t.to(device) for t in (a, b, grad, sizes))
    assert_same_bits(ops.grouped_gemm(a, apart(b), sizes) + 0, expected.to(device))
    out = apart(torch.ones(b.shape, device=device))
    ops.grouped_gemm_wgrad_out(grad, a, sizes, out)
    assert_same_bits(torch.stack(out), (product + 1).float().to(device))


@each(RANDOM)
def test_gradient(case: Case, device: torch.device) -> None:
    a, b, sizes, bias, scale, transpose_b = case.arguments(device)
    extra = [t for t in (bias, scale) if t is not None]
    leaves = [a, *extra, *b]
    for leaf in leaves:
        leaf.requires_grad_()
    output = ops.grouped_gemm(a, b, sizes, bias, scale, transpose_b)
    grad = normals(tuple(output.shape), a.dtype, device, torch.Generator().manual_seed(2))
    got = list(torch.autograd.grad(output, leaves, grad))
    of_b = got[1 + len(extra) :]
    assert len({g.untyped_storage().data_ptr() for g in of_b}) == 1, "views of one tensor"
    got[1 + len(extra) :] = [torch.stack(of_b)]

    def expected_of(absolute: bool) -> tuple[Tensor, ...]:
        doubles = [leaf.detach().double() for leaf in (a, *extra, torch.stack(b))]
        doubles = [(d.abs() if absolute else d).requires_grad_() for d in doubles]
        bias_and_scale = [doubles[1] if bias is not None else None, doubles[2] if scale is not None else None]
        exact = rows_fp64(doubles[0], doubles[-1], sizes, *bias_and_scale, transpose_b)
        seed = grad.double().abs() if absolute else grad.double()
        return torch.autograd.grad(exact, doubles, seed, materialize_grads=True)

    terms = max([a.shape[1], output.shape[1], *sizes.tolist()], default=1)
    for g, exact, magnitude in zip(got, expected_of(False), expected_of(True), strict=True):
        assert_rounded_sum(g, exact, magnitude, terms)


@pytest.mark.parametrize(
    "wanted", [("a",), ("b0",), ("b2", "bias"), ("scale",), ("bias",), ("a", "b1", "scale")]
)
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("indexed", [False, True])
def test_only_requested_gradients_are_computed(
    wanted: tuple[str, ...], transpose_b: bool, indexed: bool, device: torch.device
) -> None:
    """Also with alpha, indexed rows, and a float32 gradient of bfloat16 operands."""
    generator, sizes = torch.Generator().manual_seed(1), torch.tensor([3, 0, 4], device=device)
    shape = (8, 16) if transpose_b else (16, 8)
    drawn = {f"b{i}": integers(shape, torch.bfloat16, device, generator, 3) for i in range(3)}
    drawn["a"] = integers((9, 16), torch.bfloat16, device, generator, 3)
    drawn["bias"] = integers((3, 8), torch.float32, device, generator, 3)
    drawn["scale"] = integers((9,), torch.float32, device, generator, 3)
    rows = torch.tensor([4, 4, 0, 8, 1, 4, 2, 99, 99], device=device) if indexed else None
    alpha, seed = (
        torch.tensor([0.5, 3.0, -2.0], device=device),
        integers((9, 8), torch.float32, device, generator),
    )
    doubles = {name: t.double().requires_grad_(name in wanted) for name, t in drawn.items()}
    leaves = {name: t.requires_grad_(name in wanted) for name, t in drawn.items()}
    b = [leaves[f"b{i}"] for i in range(3)]
    output = ops.grouped_gemm(
        leaves["a"], b, sizes, leaves["bias"], leaves["scale"], transpose_b, torch.float32, alpha, rows
    )
    x = doubles["a"] if rows is None else doubles["a"][rows.clamp(max=8)]
    stack = torch.stack([doubles[f"b{i}"] for i in range(3)])
    exact = rows_fp64(x, stack, sizes, doubles["bias"], doubles["scale"], transpose_b, alpha)
    got = torch.autograd.grad(output, [leaves[name] for name in wanted], seed)
    expected = torch.autograd.grad(exact, [doubles[name] for name in wanted], seed.double())
    for name, g, e in zip(wanted, got, expected, strict=True):
        assert_same_bits(g + 0, e.to(g.dtype) + 0, name)


def buffers(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, list[Tensor]]:
    """Returns zero buffers: separate, one stack, padded rows, a stack with gaps, interleaved rows, unaligned."""
    g, n, k = shape
    wide = torch.zeros(n, g, k + 8, dtype=dtype, device=device)
    return {
        "separate": apart(torch.zeros(shape, dtype=dtype, device=device)),
        "stack": list(torch.zeros(shape, dtype=dtype, device=device).unbind()),
        "padded rows": [torch.zeros(n, k + 8, dtype=dtype, device=device)[:, :k] for _ in range(g)],
        "unaligned rows": [torch.zeros(n, k + 5, dtype=dtype, device=device)[:, :k] for _ in range(g)],
        "gaps": [torch.zeros(g, n + 2, k, dtype=dtype, device=device)[i, 1 : n + 1] for i in range(g)],
        "interleaved": [wide[:, (5 * i + 1) % g if g % 5 else i, :k] for i in range(g)],
        "unaligned": [torch.zeros(n * k + 1, dtype=dtype, device=device)[1:].view(n, k) for _ in range(g)],
    }


@pytest.mark.parametrize("mode", ["add", "over", "beta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each(WGRAD_EXACT[::2])
def test_wgrad_out(case: Case, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    grad, input, sizes = case.arguments()
    generator = torch.Generator().manual_seed(7)
    alpha, beta = (factors(sizes.numel(), CPU, generator) for _ in range(2))
    product = wgrad_fp64(grad, input, sizes, alpha)
    shape = (product.shape[0], product.shape[1], product.shape[2])
    before = integers(shape, torch.float64, CPU, generator)
    added = {"add": before, "over": 0 * before, "beta": before * beta.double()[:, None, None]}[mode]
    expected = (product + added + 0.0).to(dtype)
    more = {"accumulate": mode == "add", "alpha": alpha.to(device)}
    more |= {"beta": beta.to(device)} if mode == "beta" else {}
    for name, out in buffers(shape, dtype, device).items():
        for matrix, value in zip(out, before, strict=True):
            matrix.copy_(value)
        storages = [whole(matrix).clone() for matrix in out]
        places = [(matrix.data_ptr(), matrix._version) for matrix in out]
        ops.grouped_gemm_wgrad_out(*case.arguments(device), out, **more)
        assert [(matrix.data_ptr(), matrix._version) for matrix in out] == places
        assert_same_bits(torch.stack(out) + 0, expected.to(device), name)
        for matrix, value in zip(out, before, strict=True):
            matrix.copy_(value)  # nothing outside the buffers' own elements was written
        for matrix, storage in zip(out, storages, strict=True):
            assert_same_bits(whole(matrix), storage, name)
    out = list(before.to(dtype).unbind())
    more = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in more.items()}
    reference.grouped_gemm_wgrad_out(grad, input, sizes, out, **more)
    assert_same_bits(torch.stack(out) + 0, expected, "reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad_out_with_any_way_of_accumulating(
    accumulate: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Hints of few and of many rows per group select between accumulation by threads and by TMA reductions."""
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([300, 0, 129, 1])
    grad, input = (integers((440, width), dtype, CPU, generator) for width in (136, 520))
    product = wgrad_fp64(grad, input, sizes)
    grad, input, sizes = (t.to(device) for t in (grad, input, sizes))
    for expected_rows in (-1, 0, 2**30):
        for max_sms in (0, 2):
            out = apart(torch.ones(product.shape, device=device))
            ops.grouped_gemm_wgrad_out(
                grad, input, sizes, out, accumulate, max_sms=max_sms, expected_rows=expected_rows
            )
            assert_same_bits(torch.stack(out) + 0, (product + accumulate).float().to(device))


def test_wgrad_of_indexed_rows(device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([3, 0, 4])
    grad, input = (
        integers((9, 8), torch.bfloat16, CPU, generator),
        integers((5, 16), torch.bfloat16, CPU, generator),
    )
    rows = row_index(sizes, 9, 5, CPU, generator)
    expected = wgrad_fp64(grad[:7], input[rows[:7]], sizes).float().to(device)
    out = apart(torch.zeros(3, 8, 16, device=device))
    ops.grouped_gemm_wgrad_out(*(t.to(device) for t in (grad, input, sizes)), out, input_rows=rows.to(device))
    assert_same_bits(torch.stack(out) + 0, expected)


@each(one_of_each_kind(EXACT)[::3])
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    opcheck(_ops.grouped_gemm.default, arguments)
    for tensor in (arguments[0], *arguments[1], *arguments[3:5]):
        if tensor is not None:
            tensor.requires_grad_()
    opcheck(_ops.grouped_gemm.default, arguments)


@each(one_of_each_kind(WGRAD_EXACT)[::3])
def test_wgrad_opcheck(case: Case, device: torch.device) -> None:
    grad, input, sizes = case.arguments(device)
    out = apart(torch.zeros(sizes.numel(), grad.shape[1], input.shape[1], device=device))
    ones = torch.ones(sizes.numel(), device=device)
    op = _ops.grouped_gemm_wgrad_out.default
    opcheck(op, (grad, input, sizes, out))
    opcheck(op, (grad, input, sizes, out, False, ones, ones))


def test_compiled(device: torch.device) -> None:
    """A training step with main_grads compiles without graph breaks, including its backward."""
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([2, 0, 3], device=device)
    a = integers((6, 8), torch.float32, device, generator).requires_grad_()
    b = [integers((16, 8), torch.float32, device, generator).requires_grad_() for _ in range(3)]

    def step(a: Tensor, b: list[Tensor]) -> tuple[Tensor, ...]:
        output = ops.grouped_gemm(a, b, sizes)
        main_grads = [torch.ones_like(matrix) for matrix in b]
        ops.grouped_gemm_wgrad_out(output.detach(), a.detach(), sizes, main_grads)
        return output, *main_grads

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, step):
        output, *main_grads = run(a, b)
        results.append([output, *main_grads, *torch.autograd.grad((output * output).sum(), [a, *b])])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_replays_with_new_sizes_and_data(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([60, 70, 80, 0, 90], device=CUDA)
    x, grad, y = (torch.zeros(333, width, dtype=dtype, device=CUDA) for width in (192, 160, 160))
    b, main = (
        apart(torch.zeros(5, 160, 192, dtype=dtype, device=CUDA)),
        apart(torch.zeros(5, 160, 192, device=CUDA)),
    )
    dx = torch.zeros_like(x)

    def products() -> None:
        y.copy_(ops.grouped_gemm(x, b, sizes))
        dx.copy_(ops.grouped_gemm(grad, b, sizes, transpose_b=False))
        ops.grouped_gemm_wgrad_out(grad, x, sizes, main)

    graph = captured(products)
    for new in [
        (0, 0, 0, 0, 0),
        (333, 0, 0, 0, 0),
        (1, 2, 3, 5, 7),
        (17, 100, 0, 33, 120),
        (127, 1, 128, 0, 77),
    ]:
        host = torch.tensor(new)
        new_inputs = [integers(tuple(t.shape), dtype, CPU, generator) for t in (x, grad)]
        stack = integers((5, 160, 192), dtype, CPU, generator)
        for tensor, value in zip((x, grad, sizes, *b), (*new_inputs, host, *stack), strict=True):
            tensor.copy_(value)
        for tensor in main:
            tensor.fill_(1.0)
        y.fill_(float("nan"))
        graph.replay()
        assert_same_bits(y + 0, rows_fp64(new_inputs[0], stack, host, None, None, True).to(dtype).to(CUDA))
        assert_same_bits(dx + 0, rows_fp64(new_inputs[1], stack, host, None, None, False).to(dtype).to(CUDA))
        expected = wgrad_fp64(new_inputs[1], new_inputs[0], host) + 1
        assert_same_bits(torch.stack(main) + 0, expected.float().to(CUDA))


@pytest.mark.gpu
def test_consecutive_lists_do_not_mix() -> None:
    """A launch may reuse the memory of an earlier launch's pointer array; each must still use its own matrices."""
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([130, 1, 60, 65], device=CUDA)
    a = integers((256, 256), torch.bfloat16, CUDA, generator)
    stacks = [integers((4, 256, 256), torch.bfloat16, CUDA, generator) for _ in range(8)]
    lists = [apart(stack) for stack in stacks]
    torch.cuda.synchronize()
    results = [ops.grouped_gemm(a, lists[i % 8], sizes) for i in range(200)]
    expected = [rows_fp64(a, stack, sizes, None, None, True).bfloat16() for stack in stacks]
    for i, result in enumerate(results):
        assert_same_bits(result + 0, expected[i % 8], f"product {i}")


@pytest.mark.gpu
def test_no_copies_and_no_synchronization() -> None:
    sizes = torch.full((8,), 15, device=CUDA)
    x, grad = (torch.randn(128, 1024, device=CUDA).bfloat16() for _ in range(2))
    b = apart(torch.randn(8, 1024, 1024, device=CUDA).bfloat16())
    out = apart(torch.zeros(8, 1024, 1024, device=CUDA))

    def products() -> None:
        ops.grouped_gemm(x, b, sizes)
        ops.grouped_gemm(grad, b, sizes, transpose_b=False)
        ops.grouped_gemm_wgrad_out(grad, x, sizes, out)

    assert most_memory(products) < 8 * 1024 * 1024, "less than half of the weights"
