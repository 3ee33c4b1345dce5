"""SwiGLU and its backward into quantized tensors: the bytes of their steps done one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import SPECS, assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.fused_cases import swiglu_quantize_cases
from transformer_plugin.testing.numerics import assert_same_bits

OPS = torch.ops.transformer_plugin
CASES = list(swiglu_quantize_cases())
BACKWARD_CASES = list(swiglu_quantize_cases(widths=(128, 384)))
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_backward_case = pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda case: case.name)


def oracle_both(matrix: Tensor, group_sizes: Tensor | None, format: str) -> tuple[Tensor, ...]:
    if group_sizes is None:
        return oracle.quantize_both(matrix, SPECS[format])
    return oracle.grouped_quantize_both(matrix, group_sizes.tolist(), SPECS[format])


def grad_like(input: Tensor) -> Tensor:
    grad = torch.randn(input.shape[0], input.shape[1] // 2, generator=torch.Generator().manual_seed(5))
    return grad.to(input.dtype).to(input.device)


@by_case
def test_swiglu_quantize(case: Case, device: torch.device) -> None:
    input, probs, sizes, format = case.arguments(device)
    expected = oracle_both(ops.swiglu(input, probs), sizes, format)
    assert_all_same(ops.swiglu_quantize_both(input, probs, sizes, format), expected)
    assert_all_same(ops.swiglu_quantize(input, probs, sizes, format), expected[:2])
    assert_all_same(ops.swiglu_quantize_transposed(input, probs, sizes, format), expected[2:])


@by_backward_case
def test_swiglu_backward_quantize(case: Case, device: torch.device) -> None:
    input, probs, sizes, format = case.arguments(device)
    grad = grad_like(input)
    grad_input, grad_probs = ops.swiglu_backward(grad, input, probs)
    *got, got_probs = ops.swiglu_backward_quantize_both(grad, input, probs, sizes, format)
    assert_all_same(tuple(got), oracle_both(grad_input, sizes, format))
    if sizes is not None and probs is not None:
        grad_probs[int(sizes.sum()) :] = 0.0
    finite = ~grad_probs.isnan()
    assert_same_bits(got_probs[finite], grad_probs[finite], "grad_probs")
    assert got_probs[~finite].isnan().all()


def exact_case(rows: int, features: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Gates so large that their sigmoid is 1: silu is the gate, exactly, on every machine."""
    generator = torch.Generator().manual_seed(2)
    gate = 20 + 20 * torch.rand(rows, features, generator=generator)
    linear, grad = (torch.randn(rows, features, generator=generator) for _ in range(2))
    return grad.to(device), torch.cat([gate, linear], 1).to(device), torch.rand(rows).to(device)


@pytest.mark.parametrize("features", [1, 3, 100, 128, 129, 384, 1000])
def test_order_of_the_row_sums(features: int, device: torch.device) -> None:
    grad, input, probs = exact_case(70, features, device)
    gate, linear = input.chunk(2, 1)
    terms = (grad * (gate * linear)).cpu()
    expected = []
    for row in terms.tolist():  # a tree over each 128, written out in float32
        total = torch.zeros(())
        for first in range(0, features, 128):
            level = [torch.tensor(value) for value in row[first : first + 128]]
            level += [torch.zeros(())] * (128 - len(level))
            while len(level) > 1:
                level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
            total = total + level[0]
        expected.append(total)
    grad_probs = ops.swiglu_backward(grad, input, probs)[1]
    assert_same_bits(grad_probs, torch.stack(expected))
    assert_same_bits(reference.swiglu_backward(grad, input, probs)[1], grad_probs.cpu())


def test_reference_is_the_steps() -> None:
    """In values, since torch's exp differs in its last bit from the ops'."""
    input, probs = torch.randn(140, 256), torch.rand(140)
    sizes = torch.tensor([100, 30])
    grad = grad_like(input)
    for group_sizes in (None, sizes):
        for format in ("fp8_block", "mxfp8"):
            got = ops.swiglu_quantize_both(input, probs, group_sizes, format)
            meaning = reference.swiglu_quantize_both(input, probs, group_sizes, format)
            assert_all_same(meaning[:2], reference.swiglu_quantize(input, probs, group_sizes, format))
            assert_all_same(
                meaning[2:], reference.swiglu_quantize_transposed(input, probs, group_sizes, format)
            )
            *got_b, got_p = ops.swiglu_backward_quantize_both(grad, input, probs, group_sizes, format)
            *meaning_b, meaning_p = reference.swiglu_backward_quantize_both(
                grad, input, probs, group_sizes, format
            )
            for a, b in zip([*got, *got_b], [*meaning, *meaning_b], strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                same = (a.view(torch.uint8) == b.view(torch.uint8)).float().mean()
                assert same > 0.999  # a last bit of exp moves few codes across a tie
            torch.testing.assert_close(got_p, meaning_p)


def test_inputs_of_any_strides(device: torch.device) -> None:
    wide = torch.randn(40, 4 * 256, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 512, device=device).bfloat16()
    probs = torch.rand(80, device=device)[::2]
    for input in (wide[:, ::2], flat[1:].view(24, 512), wide[3:17, 5:517]):
        copy, p = input.clone(memory_format=torch.contiguous_format), probs[: input.shape[0]]
        got = ops.swiglu_quantize_both(input, p, None, "fp8_block")
        assert_all_same(got, ops.swiglu_quantize_both(copy, p.contiguous(), None, "fp8_block"))
        one = torch.ones((), device=device, dtype=input.dtype).expand(input.shape[0], 256)  # stride 0
        *got_b, got_p = ops.swiglu_backward_quantize_both(one, input, p, None, "mxfp8")
        *expected, expected_p = ops.swiglu_backward_quantize_both(one.contiguous(), copy, p, None, "mxfp8")
        assert_all_same(tuple(got_b), tuple(expected))
        assert_same_bits(got_p, expected_p)


@pytest.mark.gpu
@by_backward_case
def test_cuda_gives_the_bytes_of_the_cpu(case: Case) -> None:
    input, *rest = case.arguments()
    device = case.arguments("cuda")
    expected = ops.swiglu_quantize_both(input, *rest)
    assert_all_same(ops.swiglu_quantize_both(*device), expected)
    *got, _ = ops.swiglu_backward_quantize_both(grad_like(device[0]), *device)
    *expected_b, _ = ops.swiglu_backward_quantize_both(grad_like(input), input, *rest)
    assert_all_same(tuple(got), tuple(expected_b))


@pytest.mark.usefixtures("schema_checks_take_fp8")
@pytest.mark.parametrize("case", CASES[::3] + BACKWARD_CASES[::3], ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, probs, sizes, format = case.arguments(device)
    input, probs = input.nan_to_num(), None if probs is None else probs.nan_to_num()
    arguments = (input.requires_grad_(), probs, sizes, format)
    for op in (OPS.swiglu_quantize, OPS.swiglu_quantize_transposed, OPS.swiglu_quantize_both):
        torch.library.opcheck(op.default, arguments)
    if input.shape[1] % 256 == 0:
        torch.library.opcheck(
            OPS.swiglu_backward_quantize_both.default, (grad_like(input.detach()), *arguments)
        )


def test_compiles_whole(device: torch.device) -> None:
    def both(grad: Tensor, input: Tensor, probs: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        forward = ops.swiglu_quantize(input, probs, sizes, "fp8_block")
        return *forward, *ops.swiglu_backward_quantize_both(grad, input, probs, sizes, "fp8_block")

    input, probs = torch.randn(40, 256, device=device), torch.rand(40, device=device)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for sizes in ([10, 20], [0, 40]):
        arguments = (grad_like(input), input, probs, torch.tensor(sizes, device=device))
        for got, expected in zip(compiled(*arguments), both(*arguments), strict=True):
            assert_same_bits(got, expected)


X = torch.zeros(4, 256)
GRAD = torch.zeros(4, 128)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (X.int(), None, None, "fp8_block"),
            TypeError,
            "argument 'input': expected one of the dtypes float32, bfloat16, float16, got int32. "
            "Convert it with .to() first.",
        ),
        (
            (X, None, None, "fp8_tensor"),
            ValueError,
            "argument 'format': expected a format whose scales are found block by block, fp8_block or mxfp8, got "
            "'fp8_tensor'. Use swiglu, and quantize its result.",
        ),
        (
            (X, None, torch.tensor([4]), "mxfp8:square"),
            ValueError,
            "argument 'format': expected blocks along a row for a ragged matrix, whose groups do not end on square "
            "blocks, got 'mxfp8:square'. Leave out 'square'.",
        ),
        (
            (X[:, :96], None, None, "mxfp8"),
            ValueError,
            "argument 'input': expected a last dimension that is a multiple of 64: two halves in blocks of mxfp8, 32, "
            "got float32[4, 96] on cpu. Pad each half with zeros.",
        ),
        (
            (X, torch.zeros(3), None, "mxfp8"),
            ValueError,
            "argument 'probs': expected size 4 in dimension 0 (the rows of 'input'), got float32[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (X, None, torch.tensor([5]), "mxfp8"),
            ValueError,
            "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at "
            "group 0. Enlarge the buffer or fix the sizes.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    for name in ("swiglu_quantize", "swiglu_quantize_transposed", "swiglu_quantize_both"):
        with pytest.raises(error) as caught:
            getattr(ops, name)(*arguments)
        assert str(caught.value) == f"transformer_plugin::{name}: {text}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (GRAD[:, :64], X[:, :128], None, None, "fp8_block"),
            "argument 'input': expected a last dimension that is a multiple of 256: two halves of whole tiles of 128, "
            "got float32[4, 128] on cpu. Use swiglu_backward and quantize_both, which take any width.",
        ),
        (
            (GRAD, X, None, None, "fp8_tensor"),
            "argument 'format': expected a format whose scales are found block by block, fp8_block or mxfp8, got "
            "'fp8_tensor'. Use swiglu_backward, and quantize its first result.",
        ),
        (
            (X, X, None, None, "fp8_block"),
            "argument 'grad': expected size 128 in dimension 1 (half the columns of 'input'), got float32[4, 256] on "
            "cpu. Pass tensors whose sizes agree.",
        ),
    ],
)
def test_errors_of_the_backward(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        ops.swiglu_backward_quantize_both(*arguments)
    assert str(caught.value) == f"transformer_plugin::swiglu_backward_quantize_both: {text}"
