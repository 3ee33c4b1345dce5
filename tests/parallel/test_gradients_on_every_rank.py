"""Gradients of every differentiable input and parameter of every layer, on every rank, against one process in float64.

A rank computes its outputs from what it has of the inputs, and differentiates what it has of the outputs. Its gradients
are then what it has of those of the full layer in plain PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.parallel.gradient_cases import (
    CASES,
    RECIPES,
    ROWS,
    K,
    N,
    embedding_case,
    linear,
    norm_case,
    norm_linear_case,
)
from tests.parallel.layer_case import Axis, Case, Place, ShardOf, even, everything
from transformer_plugin import nn as tnn
from transformer_plugin.parallel import shard_
from transformer_plugin.parallel.styles import NormColwiseParallel
from transformer_plugin.testing.distributed import Rank, RankPool

#: The largest error relative to the exact tensor. A rank that left out the others would be off by a half.
BOUNDS = {"float32": 1e-5, "bf16": 2**-5, "float16": 2**-8, "fp8_block": 2**-3, "delayed": 2**-2}
#: Tensor-parallel ranks, and ranks that compute on other rows with sharded weights.
GRIDS = {"2 tensor": (2, 1), "4 tensor": (4, 1), "2 data": (1, 2), "2 x 2": (2, 2)}
#: Ways whose ranks have other experts; those of "rows" have other rows of one loss.
EXPERT_WAYS = {"experts": "data", "experts plain": "data", "experts rows": "tensor"}
#: Arguments of forward that have no gradient.
NOT_DIFFERENTIABLE = {"out", "dgrad_out", "group_sizes"}


@functools.cache
def place_of(tensor: int, data: int, index: int, device: torch.device) -> Place:
    mesh = init_device_mesh(device.type, (data, tensor))
    axes = [Axis(mesh.get_local_rank(d), mesh.size(d), mesh.get_group(d)) for d in (0, 1)]
    return Place(axes[1], axes[0], device)


def drawn(case: Case, name: str, size: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Values of a dtype, in float64: small ones of matrices, and of inputs that are numbers of rows float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {name}".encode()) + seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values = values * K**-0.5 if "weight" in name and len(size) > 1 else values
    return values.to(torch.float32 if size == (ROWS,) else dtype).double()


class Exact(NamedTuple):
    """Of one input of the full layer."""

    inputs: dict[str, Tensor]
    factors: list[Tensor]
    outputs: list[Tensor]
    grads: dict[str, Tensor]


def exactly(case: Case, parameters: dict[str, Tensor], seed: int, dtype: torch.dtype) -> Exact:
    p = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    x = {
        name: drawn(case, name, size, 1 + seed, dtype).to(next(iter(p.values())).device).requires_grad_()
        for name, (size, _) in case.inputs.items()
    }
    outputs = case.plain(p, x)
    factors = [
        drawn(case, f"of output {i}", tuple(output.shape), 1 + seed, torch.float32).to(output.device)
        for i, output in enumerate(outputs)
    ]
    torch.stack([(o * f).sum() for o, f in zip(outputs, factors, strict=True)]).sum().backward()
    grads = {name: value.grad for name, value in (*p.items(), *x.items()) if value.grad is not None}
    return Exact(x, factors, [output.detach() for output in outputs], grads)


def is_sharded(place: Place, case: Case, name: str) -> bool:
    """Whether shard_ has this parameter: weights of products, and tables."""
    own = name.rsplit(".", 1)[-1]
    of_product = own.startswith("weight") and not name.startswith("router.") and case.way != "rows"
    return place.data.size > 1 and of_product and case.way not in EXPERT_WAYS


def full_gradient(
    place: Place, case: Case, name: str, exact: list[Exact], mean: bool
) -> tuple[Tensor, ShardOf, Axis]:
    """The gradient that belongs to a parameter, and which shard of it a rank has."""
    matrix = re.fullmatch(r"(.*?)(\d*)", name)
    assert matrix is not None
    base, index = matrix.groups()
    shard_of, axis = case.parameters[base][1], place.tensor
    grads = [each.grads[base] for each in exact]
    own = grads[place.data.index]
    if case.way in EXPERT_WAYS and base.startswith("experts."):
        axis = place.data if EXPERT_WAYS[case.way] == "data" else place.tensor
        own = torch.stack(grads).sum(0)
    elif is_sharded(place, case, base):
        own = torch.stack(grads).mean(0) if mean else torch.stack(grads).sum(0)
    return (own[int(index)], everything, axis) if index else (own, shard_of, axis)


def own_rows(shard: Tensor, like: Tensor, axis: Axis) -> Tensor:
    """A rank's rows of a sharded weight, of which each rank has as many, zeros last."""
    rows = shard.new_zeros((like.shape[0] * axis.size, *shard.shape[1:]))
    rows[: shard.shape[0]] = shard
    return rows.chunk(axis.size)[axis.index]


def fill(layer: Any, place: Place, case: Case, parameters: dict[str, Tensor], dtype: torch.dtype) -> None:
    state = {}
    for name, value in parameters.items():
        axis = place.data if EXPERT_WAYS.get(case.way) == "data" else place.tensor
        is_own = name.startswith("experts.") and case.way in ("experts plain", "experts rows")
        state[name] = (even(0)(value, axis.index, axis.size) if is_own else value).to(dtype)
    found = layer.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and all("delayed" in key for key in found.missing_keys), found


def compare(
    place: Place, case: Case, key: str, after: Callable[[Any, Any], None] | None = None
) -> Iterator[str]:
    """Yields what is wrong on this rank."""
    recipe, dtype = RECIPES[key]
    sizes = {name: size for name, (size, _) in case.parameters.items()}
    parameters = {name: drawn(case, name, size, 0, dtype).to(place.device) for name, size in sizes.items()}
    exact = [exactly(case, parameters, seed, dtype) for seed in range(place.data.size)]
    mine, mean = exact[place.data.index], key != "bf16"
    layer = case.make(place, {"device": place.device, "dtype": dtype, "recipe": recipe()})
    fill(layer, place, case, parameters, dtype)
    if place.data.size > 1 and case.way not in EXPERT_WAYS:
        shard_(layer, place.data.group, gradient="mean" if mean else "sum")
    if after is not None:
        after(layer, place)
    tensor = place.tensor.index, place.tensor.size

    def shard(full: Tensor, shard_of: ShardOf) -> Tensor:
        return shard_of(full, *tensor).detach()

    leaves = {
        name: shard(mine.inputs[name], shard_of)
        .to(torch.float32 if size == (ROWS,) else dtype)
        .requires_grad_()
        for name, (size, shard_of) in case.inputs.items()
    }
    given = {name: shard(value, shard_of).to(place.device) for name, (value, shard_of) in case.given.items()}
    arguments = inspect.signature(layer.forward).bind(
        **leaves, **given
    )  # torch's styles see those by position
    outputs = case.results(layer(*arguments.args, **arguments.kwargs))
    terms, bound = [], BOUNDS[key]
    for i, (output, shard_of) in enumerate(zip(outputs, case.outputs, strict=True)):
        terms.append((output.double() * shard(mine.factors[i], shard_of)).sum())
        yield from wrong(f"output {i}", output, shard(mine.outputs[i], shard_of), mine.outputs[i], bound)
    torch.stack(terms).sum().backward()
    for name, leaf in leaves.items():
        want = shard(mine.grads[name], case.inputs[name][1])
        yield from wrong(f"gradient of {name}", leaf.grad, want, mine.grads[name], bound)
    for name, parameter in layer.named_parameters():
        grad: Any = parameter.grad
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        full, shard_of, axis = full_gradient(place, case, name, exact, mean)
        want = shard_of(full, axis.index, axis.size)
        if grad is not None and is_sharded(place, case, name):
            want = own_rows(want, grad, place.data)
        yield from wrong(f"gradient of {name}", grad, want, full, bound)


def wrong(name: str, got: Tensor | None, want: Tensor, full: Tensor, bound: float) -> Iterator[str]:
    if got is None or got.shape != want.shape:
        yield f"{name}: expected {list(want.shape)}, got {None if got is None else list(got.shape)}"
        return
    scale = torch.maximum(want.norm(), 0.1 * full.norm())
    error = float((got.detach().double() - want).norm() / scale.clamp(min=1e-12))
    if not error <= bound:
        yield f"{name}: error {error:.3g} of {float(want.norm()):.3g}"


def fits(case: Case, grid: str, key: str) -> bool:
    """Whether a case is one of a grid and a recipe."""
    tensor, data = GRIDS[grid]
    if case.way in ("rows", "alone") and data > 1:
        return False  # nothing is sharded
    if key == "float16" and not case.layer.startswith("Grouped"):
        return False  # bfloat16 and float16 are alike elsewhere
    if key != "float32" and not case.has_recipe:
        return key == "bf16"
    if "list" in case.way or case.note.startswith("list"):
        return tensor == 1 and key != "delayed"
    if case.way in EXPERT_WAYS:
        return grid == ("2 tensor" if EXPERT_WAYS[case.way] == "tensor" else "2 data")
    return not (grid == "4 tensor" and "interleaved" in case.note)  # blocks of 32 rows


def check(rank: Rank, grid: str, key: str) -> list[str]:
    place = place_of(*GRIDS[grid], rank.rank, rank.device)
    cases = [case for case in CASES.values() if fits(case, grid, key)]
    return [f"{case.name}, rank {rank.rank}: {text}" for case in cases for text in compare(place, case, key)]


PAIRS = [("2 tensor", key) for key in RECIPES]
PAIRS += [("2 data", key) for key in ("float32", "bf16", "float16", "fp8_block")]


@pytest.mark.parametrize(("grid", "key"), PAIRS)
def test_two_ranks(pair: RankPool, grid: str, key: str) -> None:
    assert_nothing(pair.run(check, grid, key))


@pytest.mark.parametrize(
    ("grid", "key"), [("4 tensor", "float32"), ("2 x 2", "float32"), ("2 x 2", "fp8_block")]
)
def test_four_ranks(four: RankPool, grid: str, key: str) -> None:
    assert_nothing(four.run(check, grid, key))


def assert_nothing(found: list[list[str]]) -> None:
    assert not any(found), "\n".join(text for texts in found for text in texts)


def styled(rows: bool) -> Iterator[tuple[Case, Any]]:
    """Layers whose parameters torch's styles make DTensors."""
    layout = Shard(0) if rows else Replicate()
    place: dict[str, Any] = {"input_layouts": layout}
    yield linear("column", rows, False, (N, even(0), even(-1)), {}, ""), ColwiseParallel(**place)
    yield (
        linear("row", rows, False, (N, everything, everything), {}, ""),
        RowwiseParallel(output_layouts=layout),
    )
    for kind in ("LayerNorm", "RMSNorm"):
        case = norm_linear_case(kind, rows, False, False, (N,))
        yield case, NormColwiseParallel(**place)
        yield norm_case(kind, rows), SequenceParallel(sequence_dim=0, use_local_output=True)
    indices = torch.arange(ROWS).view(ROWS // 2, 2) % 20
    yield (
        embedding_case(indices, rows, None, 20),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
    )


def check_dtensors(rank: Rank, key: str) -> list[str]:
    place, mesh = place_of(2, 1, rank.rank, rank.device), init_device_mesh(rank.device.type, (rank.size,))
    alone = Place(Axis(0, 1, None), place.data, place.device)
    problems = []
    for rows in (False, True):
        for case, style in styled(rows):
            made = replace(case, make=lambda _, common, case=case: case.make(alone, common))
            found = compare(
                place, made, key, lambda layer, _, style=style: parallelize_module(layer, mesh, style)
            )
            problems += [f"DTensor {case.name}, rank {rank.rank}: {text}" for text in found]
    return problems


@pytest.mark.parametrize("key", ["float32", "bf16", "fp8_block"])
def test_dtensors(pair: RankPool, key: str) -> None:
    assert_nothing(pair.run(check_dtensors, key))


def ways_of(layer: type) -> set[str]:
    """How ranks can share a layer, by the arguments of its constructor."""
    options = inspect.signature(layer.__init__).parameters
    if "parallel_mode" in options:
        modes = str(options["parallel_mode"].annotation)
        return {"column"} if "column" in modes else {"column", "row"}
    if layer is tnn.MoE:
        return {"sliced", *EXPERT_WAYS}
    known = {tnn.GroupedMLP: {"sliced"}, tnn.Embedding: {"row"}, tnn.TopKRouter: {"alone"}}
    return known.get(layer, {"rows"} if "tp_group" in options else set())


def test_every_layer_and_argument_is_here() -> None:
    """A new layer, or a new tensor of one's forward, needs a case for each way in which ranks can share it."""
    layers = [each for name in tnn.__all__ if inspect.isclass(each := getattr(tnn, name))]
    covered = {
        (case.layer, case.way, name) for case in CASES.values() for name in (*case.inputs, *case.given)
    }
    for layer in (each for each in layers if issubclass(each, torch.nn.Module)):
        ways = ways_of(layer)
        assert ways, f"{layer.__name__}: say how ranks share it"
        for name, argument in inspect.signature(layer.forward).parameters.items():
            if "Tensor" not in str(argument.annotation) or name in NOT_DIFFERENTIABLE:
                continue
            for way in ways:
                assert (layer.__name__, way, name) in covered, (
                    f"no case of '{name}' of {layer.__name__}, {way}"
                )


def test_a_gradient_of_one_rank_alone_is_found() -> None:
    """What ranks would have without the sum over them is far outside of the bounds."""
    want = torch.tensor([-0.871, 0.5])
    for bound in BOUNDS.values():
        assert not list(wrong("bias_scale", want, want, want, bound))
        for got in (want / 2, torch.zeros(2), None):
            assert list(wrong("bias_scale", got, want, want, bound))
