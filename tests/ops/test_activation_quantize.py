"""An activation and its gradient, fused with quantization: the bytes of the separate steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops import quantize_oracle as oracle
from tests.ops.quantize_oracle import SPECS, assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.fused_cases import activation_quantize_cases, given
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import BOTH, COLUMNS, columns_of, rows_of

OPS = torch.ops.transformer_plugin
CASES = list(activation_quantize_cases())
BACKWARD_CASES = list(activation_quantize_cases(widths=(128, 384)))
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_backward_case = pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda case: case.name)


def steps(
    matrix: Tensor, group_sizes: Tensor | None, format: str, more: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """Quantizes in both directions with the oracle. With an amax argument, uses the ops, which other tests compare
    with the oracle."""
    if more:
        return ops.quantize(matrix, format, group_sizes, **more, columnwise=True)
    if group_sizes is None:
        return oracle.both_directions(matrix, SPECS[format])
    return oracle.grouped_both_directions(matrix, group_sizes.tolist(), SPECS[format])


def grad_like(input: Tensor) -> Tensor:
    grad = torch.randn(input.shape[0], input.shape[1] // 2, generator=torch.Generator().manual_seed(5))
    return grad.to(input.dtype).to(input.device)


@by_case
def test_activation_quantize(case: Case, device: torch.device) -> None:
    input, format, probs, sizes = case.arguments(device)
    arguments, activation = (input, format, probs, sizes), ops.activation(input, probs)
    more = given(activation, format, sizes)
    expected = steps(activation, sizes, format, more)
    assert_all_same(ops.activation_quantize(*arguments, **more, columnwise=True), expected)
    assert_all_same(ops.activation_quantize(*arguments, **rows_of(more)), expected[:2])
    assert_all_same(
        ops.activation_quantize(*arguments, **columns_of(more), rowwise=False, columnwise=True), expected[2:]
    )


@by_backward_case
def test_activation_backward_quantize(case: Case, device: torch.device) -> None:
    input, format, probs, sizes = case.arguments(device)
    grad = grad_like(input)
    grad_input, grad_probs = ops.activation_backward(grad, input, probs)
    more = given(grad_input, format, sizes)
    *got, got_probs = ops.activation_backward_quantize(grad, input, format, probs, sizes, **more)
    assert_all_same(tuple(got), steps(grad_input, sizes, format, more))
    if sizes is not None and probs is not None:
        grad_probs[int(sizes.sum()) :] = 0.0
    finite = ~grad_probs.isnan()
    assert_same_bits(got_probs[finite], grad_probs[finite], "grad_probs")
    assert got_probs[~finite].isnan().all()


@pytest.mark.parametrize(
    ("format", "sizes"),
    [
        ("nvfp4", None),
        ("nvfp4", [3, 0, 130]),
        ("nvfp4:square,sr,tiled", None),  # not supported for ragged matrices
        ("nvfp4:row_scaled,4over6,tiled", None),
        ("nvfp4:row_scaled,4over6,tiled", [3, 0, 130]),
    ],
)
def test_rowwise_nvfp4_supports_any_number_of_rows(
    format: str, sizes: list[int] | None, device: torch.device
) -> None:
    """Only the transposed copy requires whole blocks of rows."""
    input = torch.randn(141, 2 * 48, generator=torch.Generator().manual_seed(7)).bfloat16().to(device)
    groups = None if sizes is None else torch.tensor(sizes, device=device)
    activation = ops.activation(input)
    more = rows_of(given(activation, format, groups))
    expected = ops.quantize(activation, format, groups, **more)
    assert_all_same(ops.activation_quantize(input, format, None, groups, **more), expected)


def exact_case(rows: int, features: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gates so large that their sigmoid is 1 in float32, so that silu(gate) is exactly the gate on every
    processor."""
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
    for row in terms.tolist():  # a binary tree over each 128 columns, written out in float32
        total = torch.zeros(())
        for first in range(0, features, 128):
            level = [torch.tensor(value) for value in row[first : first + 128]]
            level += [torch.zeros(())] * (128 - len(level))
            while len(level) > 1:
                level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
            total = total + level[0]
        expected.append(total)
    grad_probs = ops.activation_backward(grad, input, probs)[1]
    assert_same_bits(grad_probs, torch.stack(expected))
    assert_same_bits(reference.activation_backward(grad, input, probs)[1], grad_probs.cpu())


@pytest.mark.parametrize("sizes", [None, [96, 32]])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "fp8_tensor", "nvfp4:rht", "nvfp4:row_scaled"])
def test_reference_agrees_with_the_ops(format: str, sizes: list[int] | None) -> None:
    """Compares values with a tolerance, because exp of torch and of the ops differ in the last bit."""
    input, probs = torch.randn(144, 256), torch.rand(144)
    arguments = (input, format, probs, None if sizes is None else torch.tensor(sizes))
    grad = grad_like(input)
    more = given(ops.activation(input, probs), format, arguments[3])
    got = ops.activation_quantize(*arguments, **more, columnwise=True)
    meaning = reference.activation_quantize(*arguments, **more, columnwise=True)
    assert_all_same(meaning[:2], reference.activation_quantize(*arguments, **rows_of(more)))
    assert_all_same(
        meaning[2:],
        reference.activation_quantize(*arguments, **columns_of(more), rowwise=False, columnwise=True),
    )
    more = given(ops.activation_backward(grad, input, probs)[0], format, arguments[3])
    *got_b, got_p = ops.activation_backward_quantize(grad, *arguments, **more)
    *meaning_b, meaning_p = reference.activation_backward_quantize(grad, *arguments, **more)
    for a, b in zip([*got, *got_b], [*meaning, *meaning_b], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        same = (a.view(torch.uint8) == b.view(torch.uint8)).float().mean()
        assert same > 0.999  # a last bit of exp changes few quantized elements
    torch.testing.assert_close(got_p, meaning_p)


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(40, 4 * 256, device=device).bfloat16()
    flat = torch.randn(1 + 24 * 512, device=device).bfloat16()
    probs = torch.rand(80, device=device)[::2]
    for input in (wide[:, ::2], flat[1:].view(24, 512), wide[3:17, 5:517]):
        copy, p = input.clone(memory_format=torch.contiguous_format), probs[: input.shape[0]]
        got = ops.activation_quantize(input, "fp8_block", p, columnwise=True)
        assert_all_same(got, ops.activation_quantize(copy, "fp8_block", p.contiguous(), columnwise=True))
        one = torch.ones((), device=device, dtype=input.dtype).expand(input.shape[0], 256)  # stride 0
        *got_b, got_p = ops.activation_backward_quantize(one, input, "mxfp8", p)
        *expected, expected_p = ops.activation_backward_quantize(one.contiguous(), copy, "mxfp8", p)
        assert_all_same(tuple(got_b), tuple(expected))
        assert_same_bits(got_p, expected_p)


@pytest.mark.gpu
@by_backward_case
def test_cuda_gives_the_bytes_of_the_cpu(case: Case) -> None:
    arguments, on_device = case.arguments(), case.arguments("cuda")
    input, format, probs, sizes = arguments
    more = given(ops.activation(input, probs), format, sizes)
    there = {name: value.cuda() for name, value in more.items()}
    expected = ops.activation_quantize(*arguments, **more, columnwise=True)
    assert_all_same(ops.activation_quantize(*on_device, **there, columnwise=True), expected)
    more = given(ops.activation_backward(grad_like(input), input, probs)[0], format, sizes)
    there = {name: value.cuda() for name, value in more.items()}
    *got, _ = ops.activation_backward_quantize(grad_like(on_device[0]), *on_device, **there)
    *expected_b, _ = ops.activation_backward_quantize(grad_like(input), *arguments, **more)
    assert_all_same(tuple(got), tuple(expected_b))


@pytest.mark.usefixtures("schema_checks_take_fp8")
@pytest.mark.parametrize("case", CASES[::3] + BACKWARD_CASES[::3], ids=lambda case: case.name)
def test_opcheck(case: Case, device: torch.device) -> None:
    input, format, probs, sizes = case.arguments(device)
    input, probs = input.nan_to_num(), None if probs is None else probs.nan_to_num()
    more = given(ops.activation(input, probs), format, sizes)
    arguments = (input.requires_grad_(), format, probs, sizes)
    opcheck(OPS.activation_quantize.default, arguments, rows_of(more))
    opcheck(OPS.activation_quantize.default, arguments, {**columns_of(more), **COLUMNS})
    opcheck(OPS.activation_quantize.default, arguments, {**more, **BOTH})
    if input.shape[1] % 256 == 0:
        grad = grad_like(input.detach())
        more = given(ops.activation_backward(grad, input.detach(), probs)[0], format, sizes)
        opcheck(OPS.activation_backward_quantize.default, (grad, *arguments), more)


GIVEN_FORMATS = ["fp8_tensor", "nvfp4:rht,sr"]


def fused_calls(
    grad: Tensor, input: Tensor, probs: Tensor, sizes: Tensor, amax: Tensor, seed: Tensor
) -> tuple[Tensor, ...]:
    """Calls the forward and backward op with each kind of format."""
    outputs: list[Tensor] = []
    for format in ("fp8_block", *GIVEN_FORMATS):
        kind = format.split(":")[0]
        one = {} if kind == "fp8_block" else {"amax": amax}
        both = {**one, "amax_t": 2 * amax, "seed": seed} if kind == "nvfp4" else one
        outputs += ops.activation_quantize(input, format, probs, sizes, **both, columnwise=True)
        outputs += ops.activation_backward_quantize(grad, input, format, probs, sizes, **both)
    return tuple(outputs)


def step_arguments(device: torch.device | str, seed: int, counts: list[int]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    input, probs = torch.randn(48, 256, generator=generator), torch.rand(48, generator=generator)
    more = torch.tensor(counts), 3 * torch.rand(2, generator=generator), torch.tensor([seed])
    grad = torch.randn(48, 128, generator=generator)
    return tuple(t.to(device) for t in (grad, input, probs, *more))


def test_compiles_without_graph_breaks(device: torch.device) -> None:
    compiled = torch.compile(fused_calls, fullgraph=True, backend="aot_eager")
    for seed, counts in enumerate([[16, 32], [0, 48]]):
        arguments = step_arguments(device, seed, counts)
        for got, expected in zip(compiled(*arguments), fused_calls(*arguments), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
def test_graph_replays_with_new_data_amaxes_and_seeds() -> None:
    arguments = step_arguments("cuda", 0, [16, 16])
    fused_calls(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_calls(*arguments)
    for seed, counts in enumerate([[48, 0], [0, 32], [16, 16]], 1):
        here = step_arguments("cpu", seed, counts)
        for target, value in zip(arguments, here, strict=True):
            target.copy_(value)
        graph.replay()
        for got, expected in zip(captured, fused_calls(*here), strict=True):
            assert_same_bits(got, expected)


X = torch.zeros(4, 256)
GRAD = torch.zeros(4, 128)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (X.int(), "fp8_block", None, None),
            TypeError,
            "argument 'input': expected one of the dtypes float32, bfloat16, float16, got int32. "
            "Convert it with .to() first.",
        ),
        (
            (X, "fp8_tensor", None, None),
            ValueError,
            "argument 'amax': expected a float32 tensor of sizes [1], the largest magnitudes that 'fp8_tensor' scales "
            "by, got None. Compute it with transformer_plugin.ops.amax of what activation gave in "
            "earlier steps, or use activation, and quantize its result.",
        ),
        (
            (X.repeat(4, 1), "nvfp4", None, torch.tensor([16, 0])),
            ValueError,
            "argument 'amax': expected a float32 tensor of sizes [2], the largest magnitudes that 'nvfp4' scales "
            "by, got None. Compute it with transformer_plugin.ops.amax of what activation gave in "
            "earlier steps, or use activation, and quantize its result.",
        ),
        (
            (X, "mxfp8", None, None, torch.ones(1)),
            ValueError,
            "argument 'amax': expected None for 'mxfp8', which has no use for it, got float32[1] on cpu. Leave it out.",
        ),
        (
            (X[:, :240], "nvfp4", None, None, torch.ones(1)),
            ValueError,
            "argument 'input': expected a last dimension that is a multiple of 32: two halves in blocks of nvfp4, 16, "
            "got float32[4, 240] on cpu. Pad each half with zeros.",
        ),
        (
            (X, "bf16", None, None),
            ValueError,
            "argument 'format': expected a format with scales, fp8_tensor, fp8_block, mxfp8 or nvfp4, got 'bf16'. Use "
            "the unquantized tensor, or convert it with .to().",
        ),
        (
            (X, "mxfp8:square", None, torch.tensor([4])),
            ValueError,
            "argument 'format': expected blocks along a row for a ragged matrix, whose groups do not end on square "
            "blocks, got 'mxfp8:square'. Leave out 'square'.",
        ),
        (
            (X[:, :96], "mxfp8", None, None),
            ValueError,
            "argument 'input': expected a last dimension that is a multiple of 64: two halves in blocks of mxfp8, 32, "
            "got float32[4, 96] on cpu. Pad each half with zeros.",
        ),
        (
            (X, "mxfp8", torch.zeros(3), None),
            ValueError,
            "argument 'probs': expected size 4 in dimension 0 (the rows of 'input'), got float32[3] on cpu. "
            "Pass tensors whose sizes agree.",
        ),
        (
            (X, "mxfp8", None, torch.tensor([5])),
            ValueError,
            "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at "
            "group 0. Enlarge the buffer or fix the sizes.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    for flags in ({}, COLUMNS, BOTH):
        with pytest.raises(error) as caught:
            ops.activation_quantize(*arguments, **flags)
        expected = text
        if flags == COLUMNS and arguments[1] == "nvfp4":
            expected = text.replace("'amax'", "'amax_t'").replace("ops.amax", "ops.amax and columnwise=True")
        assert str(caught.value) == f"transformer_plugin::activation_quantize: {expected}"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"amax": torch.ones(1)},
            "argument 'amax_t': expected a float32 tensor of sizes [1], the largest magnitudes that 'nvfp4:sr' scales "
            "by, got None. Compute it with transformer_plugin.ops.amax and columnwise=True of what activation "
            "gave in earlier steps, or use activation, and quantize its result.",
        ),
        (
            {"amax": torch.ones(1), "amax_t": torch.ones(1), "seed": None},
            "argument 'seed': expected an int64 tensor of size [1], which 'nvfp4:sr' draws its roundings from, got "
            "None. Pass another number in each step, for example of torch.randint.",
        ),
        (
            {"amax": torch.ones(2), "amax_t": torch.ones(1)},
            "argument 'amax': expected sizes [1], the largest magnitudes that 'nvfp4:sr' scales by, got float32[2] on "
            "cpu. Compute it with transformer_plugin.ops.amax of what activation gave in earlier steps, or use "
            "activation, and quantize its result.",
        ),
        (
            {"input": X},
            "argument 'input': expected a number of rows that is a multiple of 16, the block of nvfp4 in transposed "
            "data, got float32[4, 256] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
        ),
        (
            {"format": "fp8_tensor", "amax": torch.ones(1), "amax_t": torch.ones(1), "seed": None},
            "argument 'amax_t': expected None for 'fp8_tensor', which has no use for it, got float32[1] on cpu. Leave "
            "it out.",
        ),
        (
            {"group_sizes": torch.tensor([8]), "amax": torch.ones(1), "amax_t": torch.ones(1)},
            "argument 'group_sizes': expected sizes that are multiples of 16, the block of nvfp4 in transposed data, "
            "got 8 for group 0. Pad the rows of each group with zeros.",
        ),
    ],
)
def test_errors_of_amaxes_and_seed(more: dict, text: str) -> None:
    seed = torch.tensor([1])
    arguments = {
        "input": X.repeat(4, 1),
        "probs": None,
        "group_sizes": None,
        "format": "nvfp4:sr",
        "seed": seed,
    }
    with pytest.raises(ValueError) as caught:
        ops.activation_quantize(**arguments | more, columnwise=True)
    assert str(caught.value) == f"transformer_plugin::activation_quantize: {text}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (GRAD[:, :64], X[:, :128], "fp8_block", None, None),
            "argument 'input': expected a last dimension that is a multiple of 256: two halves of whole tiles of 128, "
            "got float32[4, 128] on cpu. Use activation_backward and quantize, which take any width.",
        ),
        (
            (GRAD, X, "fp8_tensor", None, None),
            "argument 'amax': expected a float32 tensor of sizes [1], the largest magnitudes that 'fp8_tensor' scales "
            "by, got None. Compute it with transformer_plugin.ops.amax of what activation_backward gave in earlier "
            "steps, or use activation_backward, and quantize its first result.",
        ),
        (
            (X, X, "fp8_block", None, None),
            "argument 'grad': expected size 128 in dimension 1 (half the columns of 'input'), got float32[4, 256] on "
            "cpu. Pass tensors whose sizes agree.",
        ),
    ],
)
def test_errors_of_the_backward(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        ops.activation_backward_quantize(*arguments)
    assert str(caught.value) == f"transformer_plugin::activation_backward_quantize: {text}"
