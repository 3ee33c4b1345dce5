"""grouped_mlp: the bits of its steps in every format, gradients compared with float64, compilation, and CUDA
graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from tests.ops.test_linear_ops import NONE, RECIPES, groups, keys
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.recipes import NVFP4BlockScaling
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import normals, poison_tail
from transformer_plugin.testing.grouped_mlp_cases import (
    MLP_SHAPES,
    MlpShape,
    grouped_mlp_cases,
    mlp_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits, relative_error
from transformer_plugin.testing.quantize_cases import rows_for

Formats = tuple[str, str, str]
FORMATS: dict[str, Formats] = {"none": NONE, **{name: keys(recipe) for name, recipe in RECIPES.items()}}
FORMATS["nv-random"] = keys(NVFP4BlockScaling())  # rounds stochastically: the calls draw their seeds in order
ONE_OF_A_FAMILY = {name: FORMATS[name] for name in ("none", "bf16", "current", "row", "block", "mx", "nv")}
NAMES = ("input", "fc1_weight", "fc2_weight", "probs", "fc1_bias", "fc2_bias")
_op = torch.ops.transformer_plugin.grouped_mlp.default
by_formats = pytest.mark.parametrize("formats", ONE_OF_A_FAMILY.values(), ids=ONE_OF_A_FAMILY.keys())


def steps(
    input: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    group_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None,
    fc2_bias: Tensor | None,
    *formats: str,
) -> Tensor:
    """Returns what grouped_mlp is defined to compute, step by step."""
    linear = ops.grouped_linear(input, fc1_weight, group_sizes, fc1_bias, None, *formats)
    scale = None if fc2_bias is None else probs
    return ops.grouped_linear(
        ops.activation(linear, probs), fc2_weight, group_sizes, fc2_bias, scale, *formats
    )


def leaves_of(arguments: tuple[Any, ...], wanted: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    """Returns new leaves for the arguments that have a gradient; only those in `wanted` require one."""
    input, fc1, fc2, _, probs, first, second = arguments
    differentiable = dict(zip(NAMES, (input, fc1, fc2, probs, first, second), strict=True))
    return {
        name: tensor.detach().clone().requires_grad_(name in wanted)
        for name, tensor in differentiable.items()
        if tensor is not None
    }


def run(
    function: Any, arguments: tuple[Any, ...], formats: Formats, wanted: tuple[str, ...] = NAMES
) -> dict[str, Tensor]:
    """Returns the output and the requested gradients. The output gradient is random, and NaN past the groups."""
    leaves = leaves_of(arguments, wanted)
    sizes = arguments[3]
    torch.manual_seed(5)
    output = function(
        leaves["input"],
        leaves["fc1_weight"],
        leaves["fc2_weight"],
        sizes,
        leaves["probs"],
        leaves.get("fc1_bias"),
        leaves.get("fc2_bias"),
        *formats,
    )
    generator = torch.Generator().manual_seed(7)
    grad = normals(tuple(output.shape), output.dtype, output.device, generator)
    poison_tail(grad, tuple(sizes.tolist()))
    asked = [leaf for leaf in leaves.values() if leaf.requires_grad]
    gradients = torch.autograd.grad(output, asked, grad) if asked else ()
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def assert_all_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(got[name], tensor, name)


CASES = [(name, case) for name, formats in FORMATS.items() for case in grouped_mlp_cases(formats)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_output_and_gradients_have_the_bits_of_the_steps(name: str, case: Case, device: torch.device) -> None:
    arguments, formats = case.arguments(device), FORMATS[name]
    got, expected = run(ops.grouped_mlp, arguments, formats), run(steps, arguments, formats)
    assert_all_same(got, expected)
    total = int(arguments[3].sum())
    for tail in ("output", "input", "probs"):
        assert not got[tail][total:].any(), tail
    torch.manual_seed(5)
    with torch.no_grad():
        assert_same_bits(ops.grouped_mlp(*arguments, *formats), got["output"], "without a gradient")


def one_case(
    formats: Formats, device: torch.device, biases: tuple[bool, bool] = (True, True)
) -> tuple[Any, ...]:
    shape = MLP_SHAPES[1].fitted(formats)
    return mlp_arguments(shape, torch.bfloat16, biases, device, torch.Generator().manual_seed(1))


@by_formats
@pytest.mark.parametrize("biases", [(False, False), (True, True)], ids=["plain", "biases"])
def test_any_subset_of_gradients(formats: Formats, biases: tuple[bool, bool], device: torch.device) -> None:
    """Leaves that require gradients: each one, each two, and all; and single gradients of a call where all leaves
    require one."""
    arguments = one_case(formats, device, biases)
    names = tuple(leaves_of(arguments))
    expected = run(steps, arguments, formats)
    for count in (1, 2, len(names)):
        for wanted in itertools.combinations(names, count):
            got = run(ops.grouped_mlp, arguments, formats, wanted)
            assert_all_same(got, {name: expected[name] for name in ("output", *wanted)})
    leaves = leaves_of(arguments)
    sizes, bias = arguments[3], (leaves.get("fc1_bias"), leaves.get("fc2_bias"))
    weights = leaves["fc1_weight"], leaves["fc2_weight"]
    output = ops.grouped_mlp(leaves["input"], *weights, sizes, leaves["probs"], *bias, *formats)
    generator = torch.Generator().manual_seed(7)
    grad = normals(tuple(output.shape), output.dtype, device, generator)
    poison_tail(grad, tuple(sizes.tolist()))
    for name in names:
        for _ in range(2):  # saved tensors can be used twice
            (gradient,) = torch.autograd.grad(output, leaves[name], grad, retain_graph=True)
            assert_same_bits(gradient, expected[name], name)


def mlp_fp64(leaves: dict[str, Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Computes each group separately in float64."""
    parts = []
    for g, rows in groups(sizes):
        hidden = leaves["input"][rows] @ leaves["fc1_weight"][g].T + leaves["fc1_bias"][g]
        gate, linear = hidden.chunk(2, 1)
        probs = leaves["probs"][rows, None]
        activation = gate / (1 + torch.exp(-gate)) * linear * probs
        parts.append(activation @ leaves["fc2_weight"][g].T + leaves["fc2_bias"][g] * probs)
    return torch.cat(parts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("features", [128, 96], ids=["tiles", "partial-tile"])
def test_results_agree_with_float64(name: str, features: int, device: torch.device) -> None:
    formats = FORMATS[name]
    shape = MlpShape("", (70, 0, 130, 5), 230, 96, features).fitted(formats)
    generator = torch.Generator().manual_seed(3)
    arguments = mlp_arguments(shape, torch.float32, (True, True), device, generator)
    got = run(ops.grouped_mlp, arguments, formats)
    total = sum(shape.sizes)
    leaves = {
        key: (leaf[:total] if key in ("input", "probs") else leaf).detach().double().requires_grad_()
        for key, leaf in leaves_of(arguments).items()
    }
    output = mlp_fp64(leaves, shape.sizes)
    drawn = normals((shape.rows, shape.hidden), torch.float32, device, torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad(output, list(leaves.values()), drawn[:total].double())
    # Two products in sequence, and in between SwiGLU multiplies two inexact factors: at most four times the
    # error of one product.
    one = 1e-6 if name == "none" else max(Format.parse(key).gemm_tolerance for key in formats)
    for key, expected in zip(("output", *leaves), (output.detach(), *gradients), strict=True):
        result = got[key][:total] if key in ("output", "input", "probs") else got[key]
        error = relative_error(result, expected)
        assert error < 4 * one, f"{key}: {error:.3g}"
        if key in ("output", "input", "fc1_weight", "fc2_weight") and name != "none":
            assert error > one / 20, f"{key}: {error:.3g}, too exact for the format"


def test_reference_agrees_with_the_op(device: torch.device) -> None:
    shape = MlpShape("", (7, 0, 20), 30, 24, 40)
    for biases in ((False, False), (True, True)):
        arguments = mlp_arguments(shape, torch.float32, biases, device, torch.Generator().manual_seed(2))
        got = run(lambda *a: ops.grouped_mlp(*a), arguments, NONE)
        expected = run(lambda *a: reference.grouped_mlp(*a[:7]), arguments, NONE)
        for name, tensor in expected.items():
            end = 27 if name in ("output", "input", "probs") else None
            torch.testing.assert_close(got[name][:end], tensor[:end], rtol=1e-5, atol=1e-5)


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    arguments = list(one_case(NONE, device))
    expected = run(ops.grouped_mlp, tuple(arguments), ONE_OF_A_FAMILY["block"])
    for i in (0, 1, 2, 4, 5, 6):
        wide = torch.stack([arguments[i], arguments[i]], -1)
        arguments[i] = wide[..., 0]
        assert not arguments[i].is_contiguous()
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in arguments]
    output = ops.grouped_mlp(*leaves, *ONE_OF_A_FAMILY["block"])
    assert_same_bits(output.detach(), expected["output"])
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    one = torch.ones((), device=device, dtype=output.dtype).expand(output.shape)  # stride 0
    for got, same in zip(
        torch.autograd.grad(output, wanted, one, retain_graph=True),
        torch.autograd.grad(output, wanted, one.contiguous()),
        strict=True,
    ):
        assert_same_bits(got, same)


@by_formats
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(formats: Formats, requires_grad: bool, device: torch.device) -> None:
    some = MlpShape("", (16, 0, 128), 160, 32, 128)
    empty = ((shape, (True, True)) for shape in MLP_SHAPES[5:7])
    for shape, biases in ((some, (False, False)), (some, (True, True)), *empty):
        arguments = mlp_arguments(
            shape.fitted(formats), torch.float32, biases, device, torch.Generator().manual_seed(1)
        )
        leaves = [
            t.nan_to_num().requires_grad_(requires_grad) if t is not None and t.is_floating_point() else t
            for t in arguments
        ]
        opcheck(_op, (leaves[0], [leaves[1]], [leaves[2]], *leaves[3:], *formats))


@by_formats
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiles_without_graph_breaks(formats: Formats, dynamic: bool | None, device: torch.device) -> None:
    """Other group sizes need no new graph, and other numbers of rows at most one. The bits are those of eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.grouped_mlp, fullgraph=True, backend=counter, dynamic=dynamic)
    generator = torch.Generator().manual_seed(1)
    counts = ((16, 32, 0), (0, 48, 0), (0, 0, 0), (128, 16, 16), (32, 0, 144))
    for number, sizes in enumerate(counts):
        shape = MlpShape("", sizes, 64 if number < 3 else 176 + 16 * number, 32, 128)
        arguments = mlp_arguments(shape, torch.float32, (True, True), device, generator)
        assert_all_same(run(compiled, arguments, formats), run(ops.grouped_mlp, arguments, formats))
        assert counter.frame_count == 1 or number >= 3
    assert counter.frame_count <= (1 if dynamic else 2)


@pytest.mark.parametrize("name", ["none", "block"])
def test_compiles_with_its_backward(name: str, device: torch.device) -> None:
    """Forward and backward are in one compiled function; compiled autograd traces the backward."""
    torch._dynamo.reset()
    arguments, formats = one_case(FORMATS[name], device), FORMATS[name]
    leaves = leaves_of(arguments)

    def step() -> None:
        first = [leaves[key] for key in ("input", "fc1_weight", "fc2_weight")]
        last = [leaves[key] for key in ("probs", "fc1_bias", "fc2_bias")]
        output = ops.grouped_mlp(*first, arguments[3], *last, *formats)
        output.float().nan_to_num().square().sum().backward()

    step()
    expected = {key: leaf.grad for key, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")()
    for key, leaf in leaves.items():
        assert_same_bits(leaf.grad, expected[key], key)


def capture(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.gpu
@by_formats
@pytest.mark.parametrize("biases", [(False, False), (True, True)], ids=["plain", "biases"])
def test_graph_replays_with_new_sizes_and_data(formats: Formats, biases: tuple[bool, bool]) -> None:
    generator, device = torch.Generator().manual_seed(0), torch.device("cuda")
    shape = MlpShape("", (96, 48, 160), 352, 128, 256)
    static_inputs = mlp_arguments(shape, torch.bfloat16, biases, device, generator)
    grad = normals((352, 128), torch.bfloat16, device, generator)

    def step() -> tuple[Tensor, ...]:
        leaves = [
            t.detach().requires_grad_() if t is not None and t is not static_inputs[3] else t
            for t in static_inputs
        ]
        output = ops.grouped_mlp(*leaves, *formats)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        return (output.detach(), *torch.autograd.grad(output, wanted, grad))

    graph, captured = capture(step)
    for new in ((0, 300, 0), (1, 0, 129), (0, 0, 0), (100, 100, 100)):
        new = tuple(rows_for(size, *formats) for size in new)
        drawn = mlp_arguments(MlpShape("", new, 352, 128, 256), torch.bfloat16, biases, device, generator)
        for target, value in zip(static_inputs, drawn, strict=True):
            if target is not None:
                target.copy_(value)
        grad.copy_(poison_tail(normals((352, 128), torch.bfloat16, device, generator), new))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)
        assert not captured[0][sum(new) :].any() and not captured[1][sum(new) :].any()


@pytest.mark.gpu
@by_formats
def test_calls_do_not_synchronize(formats: Formats) -> None:
    arguments = one_case(formats, torch.device("cuda"))
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in arguments]
    grad = torch.ones_like(leaves[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = ops.grouped_mlp(*leaves, *formats)
        torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
