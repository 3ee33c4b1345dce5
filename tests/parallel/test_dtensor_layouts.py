"""Layers with DTensor parameters in every layout, with shards of unequal sizes, and what they refuse."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.error_text import text_of
from tests.parallel.dtensor_model import results
from transformer_plugin.nn import Embedding, LayerNorm, LayerNormLinear, Linear, RMSNorm
from transformer_plugin.parallel import shard_
from transformer_plugin.parallel.styles import NormColwiseParallel
from transformer_plugin.recipes import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool

Make = Callable[[], torch.nn.Module]
#: The layouts of the parameters, and that of the input.
Case = tuple[dict[str, Any], Any]


def distribute(layer: torch.nn.Module, mesh: DeviceMesh, layouts: dict[str, Any]) -> None:
    """Replicates the parameters that have no layout."""
    for name, parameter in list(layer.named_parameters()):
        shard = distribute_tensor(parameter, mesh, [layouts.get(name, Replicate())])
        layer.register_parameter(name, torch.nn.Parameter(shard))


def compare(
    rank: Rank,
    make: Make,
    cases: list[Case],
    x: Tensor,
    compiled: bool = False,
    rtol: float = 1e-5,
    atol: float = 2e-5,
) -> None:
    """Outputs and all gradients of layers with layouts of the parameters and of the input.

    One graph has the layers of all cases, as compiling a graph takes far longer than one layer more in it.
    """
    torch._dynamo.reset()
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    plain, sharded = torch.nn.ModuleList(), torch.nn.ModuleList()
    for layouts, _ in cases:
        for layers in (plain, sharded):
            torch.manual_seed(0)
            layers.append(make().to(rank.device))
        distribute(sharded[-1], mesh, layouts)

    def all_layers(inputs: list[Tensor]) -> list[Any]:
        return [layer(x) for layer, x in zip(sharded, inputs, strict=True)]

    run = torch.compile(all_layers, fullgraph=True, backend="aot_eager") if compiled else all_layers

    def expected_of(*inputs: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer, x in zip(plain, inputs, strict=True)])

    def forward(*inputs: Tensor) -> Tensor:
        replicated = [DTensor.from_local(x, mesh, [Replicate()]) for x in inputs]
        given = [x.redistribute(placements=[case[1]]) for x, case in zip(replicated, cases, strict=True)]
        return torch.stack([y.redistribute(placements=[Replicate()]).to_local() for y in run(given)])

    wanted = x.is_floating_point()
    x = x.to(rank.device)
    expected = results(plain, expected_of, *[x.clone().requires_grad_(wanted) for _ in cases])
    got = results(sharded, forward, *[x.clone().requires_grad_(wanted) for _ in cases])
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        message = f"{name} of {cases}, compiled: {compiled}"
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=message)


def compare_both(rank: Rank, make: Make, cases: list[Case], shape: tuple[int, ...]) -> None:
    """Compiled, too, where the input is sharded along dimension 0 or 1."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    compare(rank, make, cases, x)
    compare(rank, make, [case for case in cases if case[1] in (Shard(0), Shard(1))], x, compiled=True)


def linear() -> torch.nn.Module:
    return Linear(32, 48)


def odd_linear() -> torch.nn.Module:
    return Linear(33, 17)


def rms_norm() -> torch.nn.Module:
    return RMSNorm(32, zero_centered=True)


def rms_norm_without_weight() -> torch.nn.Module:
    return RMSNorm(32, elementwise_affine=False)


def layer_norm() -> torch.nn.Module:
    return LayerNorm(32)


def layer_norm_without_bias() -> torch.nn.Module:
    return LayerNorm(32, bias=False)


def norm_linear() -> torch.nn.Module:
    return LayerNormLinear(32, 48)


def rms_norm_linear() -> torch.nn.Module:
    return LayerNormLinear(32, 48, normalization="RMSNorm", bias=False)


COLUMNS, ROWS = {"weight": Shard(0), "bias": Shard(0)}, {"weight": Shard(1)}


def every_layout(rank: Rank) -> None:
    for make in (linear, norm_linear, rms_norm_linear):
        of_inputs = (Replicate(), Shard(0), Shard(1), Shard(2))
        compare_both(rank, make, list(itertools.product((COLUMNS, ROWS, {}), of_inputs)), (4, 6, 32))


def norms(rank: Rank) -> None:
    for make in (rms_norm, rms_norm_without_weight, layer_norm, layer_norm_without_bias):
        of_inputs = (Replicate(), Shard(0), Shard(1), Shard(2))
        compare_both(rank, make, [({}, of_input) for of_input in of_inputs], (4, 6, 32))


def unequal_shards(rank: Rank) -> None:
    of_inputs = (Replicate(), Shard(0), Shard(1))
    compare_both(rank, odd_linear, list(itertools.product((COLUMNS, ROWS, {}), of_inputs)), (5, 33))
    # One rank has no rows along dimension 0.
    compare_both(rank, layer_norm, [({}, Shard(0)), ({}, Shard(1))], (1, 5, 32))
    compare_both(rank, norm_linear, [(COLUMNS, Shard(0)), (COLUMNS, Shard(1))], (1, 5, 32))


def normalized_output(rank: Rank) -> None:
    """The gradient of the norm that is returned counts once."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    found = []
    for parallel in (False, True):
        torch.manual_seed(0)
        layer: Any = LayerNormLinear(32, 48, return_normalized=True).to(rank.device)
        x = torch.randn(4, 6, 32).to(rank.device).requires_grad_()
        given: Any = x
        if parallel:
            distribute(layer, mesh, COLUMNS)
            given = DTensor.from_local(x, mesh, [Replicate()])
        output, normalized = layer(given)
        if parallel:
            assert output.placements == (Shard(2),) and normalized.placements == (Replicate(),)
            output, normalized = output.full_tensor(), normalized.full_tensor()
        (output.square().sum() + normalized.pow(3).sum()).backward()
        grads = [p.grad.full_tensor() if parallel else p.grad for p in layer.parameters()]
        found.append([output.detach(), normalized.detach(), x.grad, *grads])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


TABLES = [Shard(0), Shard(1), Replicate()]


def compare_tables(rank: Rank, rows: int, padding: int | None, layouts: list[Any], compiled: bool) -> None:
    """Embeddings of tables in layouts, with indices in each layout."""
    of_inputs = (Replicate(), Shard(0), Shard(1))
    cases: list[Case] = [({"weight": table}, x) for table, x in itertools.product(layouts, of_inputs)]
    torch.manual_seed(0)
    indices = torch.randint(rows, (4, 6))
    for dtype in (torch.int64,) if compiled else (torch.int64, torch.int32):
        make = functools.partial(Embedding, rows, 32, padding_idx=padding)
        compare(rank, make, cases, indices.to(dtype), compiled, 1e-6, 1e-6)


def tables(rank: Rank) -> None:
    """Tables in each layout, also with a shard without rows, and with a padding row in each shard."""
    for rows, padding in ((64, None), (33, 32), (33, 3), (1, None)):
        compare_tables(rank, rows, padding, TABLES, False)
    compare_tables(rank, 33, 32, TABLES, True)
    compare_tables(rank, 1, None, TABLES[:1], True)


def other_tables_compiled(rank: Rank) -> None:
    compare_tables(rank, 64, None, TABLES, True)
    compare_tables(rank, 33, 3, TABLES, True)
    compare_tables(rank, 1, None, TABLES[1:], True)


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return text_of(error)
    return "no error"


START = "transformer_plugin::Linear: argument "


def by_columns(rank: Rank, mesh: DeviceMesh, **options: Any) -> Any:
    layer = Linear(32, 32, **options).to(rank.device)
    distribute(layer, mesh, COLUMNS)
    return layer


def refused_operands(rank: Rank) -> None:
    device = rank.device.type
    mesh, grid = init_device_mesh(device, (2,)), init_device_mesh(device, (2, 1), mesh_dim_names=("dp", "tp"))
    x = torch.randn(4, 32).to(rank.device)
    full, layer = distribute_tensor(x, mesh, [Replicate()]), by_columns(rank, mesh)
    assert message(lambda: layer(x)) == (
        START
        + "'input': expected a DTensor, as the weight is one, got a plain tensor. Parallelize the layer with "
        "ColwiseParallel, RowwiseParallel or SequenceParallel, or convert its input with PrepareModuleInput or "
        "DTensor.from_local."
    )
    other = distribute_tensor(x, grid["dp"], [Replicate()])
    assert message(lambda: layer(other)) == (
        START
        + "'input': expected a DTensor on the mesh of the weight, got one on another. Use one mesh for both."
    )
    layer.register_parameter("bias", torch.nn.Parameter(torch.zeros(16, device=rank.device)))
    assert message(lambda: layer(full)) == (
        START
        + "'bias': expected a DTensor in Shard(0), as the weight is one, got a plain tensor. Parallelize the layer "
        "with the styles of torch.distributed.tensor.parallel."
    )
    norm = RMSNorm(32).to(rank.device)
    distribute(norm, mesh, {"weight": Shard(0)})
    assert message(lambda: norm(full)) == (
        "transformer_plugin::RMSNorm: argument 'weight': expected a DTensor in Replicate(), got one in S(0). "
        "Parallelize the layer with the styles of torch.distributed.tensor.parallel."
    )
    on_grid = Linear(32, 32).to(rank.device)
    for name, parameter in list(on_grid.named_parameters()):
        shard = distribute_tensor(parameter, grid, [Replicate(), Shard(0)])
        on_grid.register_parameter(name, torch.nn.Parameter(shard))
    assert message(lambda: on_grid(full)) == (
        START
        + "'weight': expected a DTensor on a mesh of one dimension, got one on a mesh of 2. Pass the dimension of "
        "tensor parallelism to parallelize_module, for example mesh['tp'], and the others to fully_shard."
    )


def refused_options(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    full = distribute_tensor(torch.randn(4, 32).to(rank.device), mesh, [Replicate()])
    layer = by_columns(rank, mesh)
    assert message(lambda: by_columns(rank, mesh, recipe=DelayedScaling())(full)) == (
        START + "'recipe': expected one with scales of the current values, as the weight is a DTensor, got "
        "DelayedScaling. Use for example Float8CurrentScaling()."
    )
    for name, columns in (("out", 16), ("dgrad_out", 32)):
        buffer = torch.empty(4, columns, device=rank.device)
        assert message(lambda name=name, buffer=buffer: layer(full, **{name: buffer})) == (  # type: ignore[misc]
            START + "'out': expected none with DTensor parameters, nor 'dgrad_out', got one. Leave both out."
        )
    replicated: Any = Linear(32, 32, fuse_wgrad_accumulation=True).to(rank.device)
    distribute(replicated, mesh, {})
    replicated.weight.main_grad = torch.zeros(32, 32, device=rank.device)
    rows = full.redistribute(placements=[Shard(0)])
    assert message(lambda: replicated(rows)) == (
        START
        + "'weight': expected a sharded weight with fuse_wgrad_accumulation or delay_wgrad_compute, got a "
        "replicated one with a sharded input, whose gradient is a sum over ranks. Leave both out, or shard the weight."
    )
    table, sharded = Embedding(32, 8).to(rank.device), Linear(32, 32).to(rank.device)
    for layer in (table, sharded):
        shard_(layer, rank.group)
        sizes = list(layer.weight.shape)
        assert message(lambda layer=layer: distribute(layer, mesh, {"weight": Shard(1)})) == (  # type: ignore[misc]
            f"transformer_plugin::{type(layer).__name__}: argument 'weight': expected a plain tensor of sizes {sizes}, "
            "this rank's shard over the ranks [0, 1], got a DTensor. Assign this rank's shard, or load the full tensor "
            "with load_state_dict."
        )
    assert message(lambda: parallelize_module(Linear(32, 32), mesh, NormColwiseParallel())) == (
        "transformer_plugin::NormColwiseParallel: argument 'module': expected a LayerNormLinear with one output, got "
        "Linear. Use torch's ColwiseParallel for other layers, and distribute_tensor for a layer with several outputs."
    )


def refused_indices(rank: Rank) -> None:
    """On a CPU, as the op refuses them."""
    if rank.device.type == "cpu":
        mesh, table = init_device_mesh("cpu", (rank.size,)), Embedding(32, 8)
        distribute(table, mesh, {"weight": Shard(0)})
        assert message(lambda: table(distribute_tensor(torch.tensor([3, 32]), mesh, [Replicate()]))) == (
            "transformer_plugin::embedding: argument 'indices': expected rows of the table, 0 to 31, got 3 to 32. Pass "
            "indices of rows."
        )
        flags = distribute_tensor(torch.tensor([True, False]), mesh, [Replicate()])
        assert message(lambda: table(flags)) == (
            "transformer_plugin::embedding: argument 'indices': expected one of the dtypes int64, int32, got bool. "
            "Convert it with .to() first."
        )


def too_narrow(rank: Rank) -> None:
    """A shard whose width its format does not take: the error of the op."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    layer = Linear(32, 48, recipe=NVFP4BlockScaling()).to(rank.device)
    parallelize_module(layer, mesh, ColwiseParallel())
    text = message(lambda: layer(torch.randn(16, 32).to(rank.device)))
    assert "a multiple of 16" in text and "[24, 32]" in text


def partial_input(rank: Rank) -> None:
    """An input that is a sum over ranks is added up first."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for style, recipe in ((ColwiseParallel, None), (RowwiseParallel, Float8CurrentScaling())):
        torch.manual_seed(0)
        layer, x = Linear(32, 48, recipe=recipe).to(rank.device), torch.randn(16, 32).to(rank.device)
        expected = layer(x).detach()
        layouts: Any = {"input_layouts": Partial(), "output_layouts": Replicate()}
        parallelize_module(layer, mesh, style(**layouts))
        partial = x * 0.25 if rank.rank == 0 else x * 0.75
        torch.testing.assert_close(layer(partial), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "check",
    [
        every_layout,
        norms,
        unequal_shards,
        normalized_output,
        tables,
        pytest.param(other_tables_compiled, marks=pytest.mark.long),
        refused_operands,
        refused_options,
        refused_indices,
        too_narrow,
        partial_input,
    ],
)
def test_two_ranks(pair: RankPool, check: Callable[[Rank], None]) -> None:
    pair.run(check)
